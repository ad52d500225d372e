"""Adapters of encoders whose vectors PEFT has recorded (tests/data/models/make_encoder_lora.py)."""

from models.lora_files import random_factors, write_peft
from models.pooling_models import POOLING

ALL = {"target_modules": "all-linear"}
CASES = {
    "bert": ("bert", {}),
    "all linear layers": ("bert", ALL),
    "fused": ("modernbert", ALL),
    "some layers": ("mpnet", {"layers_to_transform": [1]}),
    "names of a class": ("jina-embeddings-v3", ALL),
    "gate and up in one tensor": ("gte", {}),
    "no biases": ("nomic-bert", ALL),
}
"""A model of pooling.json, and keys of adapter_config.json."""
OF_CLASS = {
    "jina-embeddings-v3": ("fc1", "fc2", "pooler"),
    "gte": ("gate_proj", "up_proj", "down_proj"),
    "nomic-bert": ("gate_proj", "up_proj", "down_proj"),
}
"""Models whose classes in transformers have other linear layers than their files."""


def shapes_of(name):
    """The matrices of a model as its class in transformers has them."""
    shapes = POOLING[name]["shapes"]
    if name not in OF_CLASS:
        return {key: shape for key, shape in shapes.items() if "embeddings." not in key}
    *mlp, last = OF_CLASS[name]
    found = {"pooler.dense.weight": (32, 32)} if last == "pooler" else {}
    mlp += [] if found else [last]
    for i in range(POOLING[name]["config"]["num_hidden_layers"]):
        found |= {f"layers.{i}.self_attn.{part}_proj.weight": (32, 32) for part in "qkvo"}
        found |= {f"layers.{i}.mlp.{part}.weight": (40, 32) for part in mlp[:-1]}
        found[f"layers.{i}.mlp.{mlp[-1]}.weight"] = (32, 40)
    return found


def factors_of(name, seed=1):
    """Random changes of the linear layers of the layers in a model's files."""
    factors = random_factors(POOLING[name]["shapes"], seed=seed)
    return {module: both for module, both in factors.items() if any(part.isdigit() for part in module.split("."))}


def write_case(folder, case):
    """The adapter as a PEFT directory."""
    name, config = case
    factors = random_factors(shapes_of(name))
    if config != ALL:
        layers = config.get("layers_to_transform", range(9))
        kept = tuple(f"{part}.{i}." for i in layers for part in ("layer", "layers"))
        factors = {module: both for module, both in factors.items() if any(part in module for part in kept)}
    return write_peft(folder, factors, **{"task_type": "FEATURE_EXTRACTION", **config})
