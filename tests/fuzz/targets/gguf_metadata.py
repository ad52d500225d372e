"""Metadata of GGUF models: keys, types and values changed, in files that are written whole. Loaded and run.

An input is JSON: the name of a tiny model, and key → [type, value].
"""

import json
import struct
from functools import cache

from foreword.models.loader import load_model
from foreword.models.quants import Quant
from fuzz.mutations import NUMBERS
from fuzz.target import Target
from fuzz.targets.gguf_model import NAMES, parts
from models import gguf_writer
from models.gguf_models import gguf_tensors, metadata, xielu
from models.running import EXECUTORS, all_logits, whole
from models.tiny import random_tensors

TEXTS = ("", "\0", "x" * 10_000, "llama", "gpt2", "bert", "yarn", "é🙂", "../x")
FLOATS = (0.0, -1.0, 0.5, 1e-45, 3e38, float("inf"), float("nan"))


def valid():
    return [json.dumps({"tiny": name, "metadata": of(name)[0]}).encode() for name in NAMES]


@cache
def of(name):
    """The metadata and the tensors of a tiny model, as `gguf_writer` takes them."""
    config, shapes, rotated = parts(name)
    made = random_tensors(shapes)
    arrays = gguf_tensors(config, made)
    tensors = {key: (Quant.F32, array.shape, gguf_writer.f32(array).ravel()) for key, array in arrays.items()}
    return metadata(config) | xielu(made) | rotated, tensors


def mutate(rng, data):
    """One to three keys removed, given to another, or with another value; the values of lists, too."""
    given = json.loads(data)
    found = given["metadata"]
    for _ in range(rng.randint(1, 3)):
        key, other = rng.choice(list(found)), rng.choice(list(found))
        kind, value = found[key]
        match rng.randrange(8):
            case 0:
                del found[key]
            case 1:
                found[key] = found[other]
            case 2 if kind.startswith("["):
                found[key] = [kind, value[: rng.randrange(len(value) + 1)] * rng.choice((1, 2, 50))]
            case 3 if kind.startswith("[") and value:
                at = rng.randrange(len(value))
                found[key] = [kind, [*value[:at], item(rng, kind[1:-1]), *value[at + 1 :]]]
            case 4 if not kind.startswith("["):
                found[key] = [f"[{kind}]", [value] * rng.choice((0, 1, 2, 4, 1000))]
            case 5:
                new = rng.choice([*gguf_writer.KINDS, "str"])
                found[key] = [new, item(rng, new)]
            case _:
                found[key] = [kind, [item(rng, kind[1:-1])] * 3 if kind.startswith("[") else item(rng, kind)]
    return json.dumps(given).encode()


def item(rng, kind):
    """A value of a type; integers of any width are cut to it."""
    if kind == "str":
        return rng.choice(TEXTS)
    if kind == "bool":
        return rng.random() < 0.5
    if kind.startswith("f"):
        return rng.choice(FLOATS)
    code = gguf_writer.KINDS[kind][1]
    return struct.unpack(code, (rng.choice(NUMBERS) % 2**64).to_bytes(8, "little")[: struct.calcsize(code)])[0]


def read(data, folder):
    given = json.loads(data)
    path = folder / "model.gguf"
    gguf_writer.write(path, given["metadata"], of(given["tiny"])[1])
    model = load_model(path)
    model.tokenizer.decode(model.tokenizer.encode("hello"))
    text = [i % model.spec.vocab_size for i in (1, 2, 3)]
    for executor in EXECUTORS:
        all_logits(model, [text], whole([text]), executor)


TARGET = Target(valid, read, mutate)
