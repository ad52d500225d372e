"""config.json of every family, with the weights and the tokenizer that belong to it."""

import json

from foreword.models.families import FAMILIES
from foreword.models.loader import load_model
from fuzz.mutations import mutate_json
from fuzz.target import Target
from models.recorded import TINY, WITHOUT_LOGITS, make

HOSTILE = (
    {"eos_token_id": [1, 64]}, {"eos_token_id": 64}, {"eos_token_id": "2"}, {"bos_token_id": 64}, {"vocab_size": 2**28},
    {"num_hidden_layers": 4096}, {"num_hidden_layers": 2**70}, {"max_position_embeddings": 2**28},
    {"head_dim": 65536}, {"partial_rotary_factor": 1e308}, {"num_experts": 2**28}, {"sliding_window": -1},
    {"layer_types": ["\ud800"] * 4},
)  # fmt: skip


def target(models, make, names, changes):
    """Tiny models, what writes one to a folder, and changes that are hostile to those of these names."""

    def encoded(name, **changed):
        return json.dumps({"tiny": name, **models[name]["config"], **changed}).encode()

    def read(data, folder):
        name = next((name for name in models if f'"tiny": "{name}"'.encode() in data), names[0])
        if not (folder / name).exists():
            make(folder, name)
        (folder / name / "config.json").write_bytes(data)
        load_model(folder / name)

    return Target(
        lambda: list(map(encoded, models)),
        read,
        mutate_json,
        lambda: [encoded(name, **changed) for changed in changes for name in names],
    )


assert {tiny["config"]["model_type"] for tiny in TINY.values()} == set(FAMILIES) - WITHOUT_LOGITS.keys()
TARGET = target(TINY, make, ("llama3", "qwen3-moe", "gemma3"), HOSTILE)
