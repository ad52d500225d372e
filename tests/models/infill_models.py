"""A tiny model whose last tokens are those of gaps in texts."""

from models.gguf_models import metadata
from models.recorded import TINY
from models.test_gguf_models import as_gguf

NAMES = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|endoftext|>"]
FIRST = 44  # the id of the first of them
NAME = "qwen3"
TEXTS = "\u0000\u0001", "\u0002\u0003\u0004"  # two texts in the vocabulary of characters


def write_model_with_gaps(folder):
    every = metadata(TINY[NAME]["config"])["tokenizer.ggml.tokens"][1]
    tokens = [*every[: FIRST - 1], every[-1], *NAMES]
    types = [1] * FIRST + [3] * len(NAMES)
    more = {"tokenizer.ggml.tokens": ("[str]", tokens), "tokenizer.ggml.token_type": ("[i32]", types)}
    return as_gguf(folder, NAME, more)
