"""Tiny random models with logits recorded from transformers (tests/data/models/make_tiny.py)."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from models.running import all_logits, in_chunks
from models.tiny import random_tensors, write_model

TINY = json.loads((Path(__file__).parents[1] / "data" / "models" / "tiny.json").read_text())["models"]

WITHOUT_LOGITS = {"eurobert": "eurobert", "embedding_gemma2_text": "embedding-gemma2"}
"""Families whose models are recorded in pooling.json, because their tokens see later ones → the name there."""


def make(tmp_path, name, **changes):
    """The model as a directory, with changes to its configuration."""
    tiny = TINY[name]
    return write_model(tmp_path / name, {**tiny["config"], **changes}, random_tensors(tiny["shapes"]))


def assert_logits(model, name, executor="numpy"):
    """A loaded model gives the recorded logits, for whole texts and for chunks."""
    tiny = TINY[name]
    text, want = tiny["token_ids"], np.array(tiny["last_logits"])
    model = replace(model, spec=model.spec.for_length(len(text)))
    for sizes in ([len(text)], [5, 1]):
        [logits] = all_logits(model, [text], in_chunks([text], sizes), executor, block_size=4)
        np.testing.assert_allclose(logits[-len(want) :], want, atol=1e-4)
