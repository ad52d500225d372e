"""The tensors of a step: their table, their memory, and a batch's views of them."""
