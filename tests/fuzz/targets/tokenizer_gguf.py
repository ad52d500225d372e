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
    made += [vocabularies.sentence_piece(user=("▁▁",)), *of_encoders()]
    return [json.dumps(metadata, default=lambda array: array.tolist()).encode() for metadata in made]


def of_encoders():
    pieces = {"tokens": ["[PAD]", "[UNK]", "[CLS]", "▁he", "llo", "▁X", "▁<tool>"], "token_type": [3, 3, 3, 1, 1, 1, 4]}
    unigrams = {"tokens": ["<s>", "</s>", "<unk>", "▁he", "l", "lo"], "token_type": [3, 3, 2, 1, 1, 1]}
    made = [
        {"model": "bert", **pieces, "unknown_token_id": 1, "cls_token_id": 2, "seperator_token_id": 2},
        {"model": "t5", **unigrams, "scores": [0.0, 0.0, 0.0, -1.5, -2.5, -3.0], "unknown_token_id": 2,
         "bos_token_id": 0, "eos_token_id": 1, "precompiled_charsmap": [0, 4] + [0] * 1026},
    ]  # fmt: skip
    return [{f"tokenizer.ggml.{key}": value for key, value in metadata.items()} for metadata in made]


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
    plain = {k: v for k, v in ((k, as_in_a_file(v)) for k, v in metadata.items()) if v is not None}
    tokenizer = Tokenizer.from_gguf(plain, of_encoder=metadata.get("tokenizer.ggml.model") in ("bert", "t5"))
    for text in TEXTS:
        for parse_special in (True, False):
            tokenizer.decode(tokenizer.encode(text, parse_special=parse_special))


TARGET = Target(valid, read, mutate_json)
