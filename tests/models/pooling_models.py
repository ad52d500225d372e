"""Tiny random encoders and classifiers with results recorded from transformers (tests/data/models/make_pooling.py)."""

import json
from pathlib import Path

from models.tiny import random_tensors, write_model

RECORDED = json.loads((Path(__file__).parents[1] / "data" / "models" / "pooling.json").read_text())
POOLING, FIRST_TEXT_LEN = RECORDED["models"], RECORDED["first"]


def make_pooling(tmp_path, name, absent=(), **changes):
    """The model as a directory, with changes to its configuration, and without the keys ``absent``."""
    tiny = POOLING[name]
    config = {key: value for key, value in {**tiny["config"], **changes}.items() if key not in absent}
    return write_model(tmp_path / name, config, random_tensors(tiny["shapes"]))
