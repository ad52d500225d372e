"""The weights of a PEFT adapter: the header and the bytes of adapter_model.safetensors."""

import json
import struct
import tempfile
from pathlib import Path

from foreword.models.loader import load_model
from foreword.models.lora import read_lora
from fuzz.mutations import DEEP, mutate_bytes, mutate_json
from fuzz.target import Target
from models.lora_cases import CASES, write_case
from models.recorded import make

NAME = "adapter_model.safetensors"


def valid():
    with tempfile.TemporaryDirectory() as folder:
        return [(write_case(Path(folder), CASES["llama"]) / NAME).read_bytes()]


def parts(data):
    end = 8 + struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8:end]), data[end:]


def assembled(header, values):
    return struct.pack("<Q", len(header)) + header + values


def hostile():
    header, values = parts(valid()[0])
    first = next(name for name in header if name != "__metadata__")
    entry = header[first]
    changes = {"shape": [2**40, 2**40]}, {"shape": [0, 64]}, {"shape": []}, {"dtype": "F64"}, {"dtype": "I8"}
    changed = [{**header, first: {**entry, **change}} for change in changes]
    changed += [{**header, name: entry} for name in ("base_model.model.lora_A.weight", "x" * 10**6, "\0", "")]
    return [
        *(assembled(json.dumps(one).encode(), values) for one in changed),
        assembled(b"[" * DEEP, values),
        assembled(json.dumps(header).encode(), b"\x00\x00\x80\x7f" * (len(values) // 4)),  # infinite
    ]


def mutate(rng, data):
    if rng.random() < 0.3:
        return mutate_bytes(rng, data, within=rng.choice((None, 8, 200)))
    header, values = parts(data)
    return assembled(mutate_json(rng, json.dumps(header).encode()), values)


def read(data, folder):
    base, adapter = folder / "llama3", folder / "adapter"
    model = load_model(base if base.exists() else make(folder, "llama3"))
    if not adapter.exists():
        write_case(adapter, CASES["llama"])
    (adapter / NAME).write_bytes(data)
    read_lora(adapter, model.spec, model.family)


TARGET = Target(valid, read, mutate, hostile)
