"""Bodies of every operation of the server that takes JSON, parsed. An input is the path as a line, then the body."""

import json

from foreword.jsonfile import parse_json
from foreword.server.operations import OPERATIONS
from fuzz.mutations import mutate_json
from fuzz.target import Target
from fuzz.targets.chat_messages import RequestErrorOf

COMMON = {"model": "m", "user": "u", "priority": 1, "cache_salt": "s", "truncate_prompt_tokens": -1}
MORE = {
    "/v1/embeddings": {**COMMON, "input": ["a", [1, 2]], "encoding_format": "base64", "normalize": False},
    "/score": COMMON,
    "/rerank": {**COMMON, "documents": ["b", {"text": "c"}], "top_n": 1, "return_documents": False},
    "/classify": COMMON,
    "/tokenize": {"model": "m", "add_special_tokens": True, "return_token_strs": True},
    "/v1/load_lora_adapter": {"load_inplace": True},
}
"""Fields of some bodies beside those of their examples."""
BODIES = {one.path: one.body for one in OPERATIONS if one.body is not None and one.body.form is None}


def valid():
    examples = {path: {**body.example, **MORE.get(path, {})} for path, body in BODIES.items()}
    return [f"{path}\n{json.dumps(example)}".encode() for path, example in examples.items()]


def read(data, folder):
    path, _, body = data.partition(b"\n")
    BODIES[path.decode()].parse(parse_json(body, "the body", RequestErrorOf))


def mutate(rng, data):
    path, _, body = data.partition(b"\n")
    return path + b"\n" + mutate_json(rng, body)


TARGET = Target(valid, read, mutate)
