"""Tensors that few steps need, as functions of a batch: adapters, embeddings, images, pooling, recurrent state, ranks.

A function fills its tensor's buffer (`layout.OPTIONAL`): the address stays the same in every step, and the values are
valid as long as the batch is.
"""
