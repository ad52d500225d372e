"""The parts that executors in PyTorch share: a batch's arrays as tensors, a paged KV cache, and attention over it."""
