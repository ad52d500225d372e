"""The vocabulary in GGUF metadata. An input is the metadata as JSON, with only values that a GGUF file can hold."""

import json

import numpy as np

from foreword.errors import ModelError
from foreword.models.tokenizer import Tokenizer
from fuzz.mutations import mutate_json
from fuzz.target import Target
from models import vocabularies

TEXTS = ("", "hello 12\n\n3 🙂<tool><|im_start|>", " " * 500 + "x", "\0")


def valid():
    few = {"words": ("he", "hello")}
    made = [vocabularies.byte_level(pre, **few, chat_template="{{ eos_token }}") for pre in ("smollm", "llama-bpe")]
    made.append(vocabularies.sentence_piece(user=("▁▁",)))
    return [json.dumps(metadata, default=lambda array: array.tolist()).encode() for metadata in made]


def as_in_a_file(value):
    """Strings are UTF-8, lists are of strings or are numbers of one type; None for what no file holds."""
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, list):
        if value and all(isinstance(item, str) for item in value):
            return list(map(as_in_a_file, value))
        if all((type(item) in (int, float, bool) and abs(item) < 2**62) or item != item for item in value):
            return np.array(value)
        return None
    return value if isinstance(value, int | float) and abs(value) < 2**64 else None


def read(data, folder):
    try:
        metadata = json.loads(data)
    except (ValueError, RecursionError):
        raise ModelError("not a case") from None
    if not isinstance(metadata, dict):
        return
    tokenizer = Tokenizer.from_gguf(
        {k: v for k, v in ((k, as_in_a_file(v)) for k, v in metadata.items()) if v is not None}
    )
    for text in TEXTS:
        for parse_special in (True, False):
            tokenizer.decode(tokenizer.encode(text, parse_special=parse_special))


TARGET = Target(valid, read, mutate_json)
