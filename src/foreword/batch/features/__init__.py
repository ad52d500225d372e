"""Functions of a batch: tensors that few steps need, and arguments of attention kernels that a batch has as methods.

A function fills its tensor's buffer (`layout.OPTIONAL`): the address stays the same in every step, and the values are
valid as long as the batch is.
"""
