"""adapter_config.json of a LoRA adapter, with the weights that belong to it."""

import json
import tempfile
from pathlib import Path

from foreword.models.loader import load_model
from foreword.models.lora import read_lora
from fuzz.mutations import DEEP, mutate_json
from fuzz.target import Target
from models.lora_cases import CASES, write_case
from models.recorded import make

HOSTILE = (
    {"target_modules": "(.*)" * 8 + r"\1\2[^\w.]"}, {"target_modules": "(" * 10_000}, {"r": 2**70}, {"r": 10**400},
    {"lora_alpha": 1e400}, {"lora_alpha": 10**400}, {"rank_pattern": {"(" * 5000: 4}}, {"alpha_pattern": {"": 1e308}},
    {"target_modules": ["\ud800"]}, {"layers_to_transform": [2**70]}, {"layers_to_transform": [True]},
    {"use_rslora": True, "rank_pattern": {"q_proj": 5e-324}}, {"target_modules": "\0"},
)  # fmt: skip


def written(folder, name):
    return (write_case(folder, CASES[name]) / "adapter_config.json").read_bytes()


def valid():
    with tempfile.TemporaryDirectory() as folder:
        return [
            json.dumps({"base_model_name_or_path": name, **json.loads(written(Path(folder), name))}).encode()
            for name in CASES
        ]


def hostile():
    configs = [json.loads(data) | changes for data in valid()[:3] for changes in HOSTILE]
    return [*(json.dumps(config).encode() for config in configs), b"[" * DEEP]


def read(data, folder):
    name = next((name for name in CASES if f'"base_model_name_or_path": "{name}"'.encode() in data), "llama")
    base = folder / CASES[name]["model"]
    model = load_model(base if base.exists() else make(folder, CASES[name]["model"]))
    adapter = write_case(folder / "adapter", CASES[name])
    (adapter / "adapter_config.json").write_bytes(data)
    read_lora(adapter, model.spec, model.family)


TARGET = Target(valid, read, mutate_json, hostile)
