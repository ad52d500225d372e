"""docs/reference-systems.md says which of our names has which job, and which test proves it: all of them exist."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
from pathlib import Path

import numpy as np
import pytest

import foreword.batch
from foreword.batch import InputBuffers, KVGroup, NewRequest, RequestStates, prepare_inputs

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "reference-systems.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if line.startswith("|") and not line.startswith(("| theirs", "|---"))
]

MODULES = {
    info.name.rpartition(".")[2]: info.name
    for info in pkgutil.walk_packages(foreword.batch.__path__, "foreword.batch.")
}


@pytest.fixture(scope="module")
def objects():
    states = RequestStates(max_num_reqs=2, max_model_len=8, vocab_size=9, kv_groups=[KVGroup(block_size=2)])
    request = NewRequest("a", [1, 2], [[1]], prompt_embeds=np.ones((2, 1)))
    states.add_request(request)
    buffers = InputBuffers.for_states(states, max_num_batched_tokens=8)
    batch = prepare_inputs(states, {"a": 2}, buffers)
    return {
        "states": states,
        "batch": batch,
        "buffers": buffers,
        "table": states.block_tables[0],
        "request": request,
        "metadata": batch.sampling_metadata(),
        "common": batch.to_common_attention_metadata(),
    }


def resolve(name, objects):
    first, *rest = name.split(".")
    if first in objects:
        value = objects[first]
    else:
        if first == "adapters":
            first, *rest = rest
        value = importlib.import_module(MODULES[first])
    for part in rest:
        value = getattr(value, part)
    return value


def test_the_page_has_a_row_for_every_table_line():
    assert len(ROWS) > 90
    assert all(len(row) == 4 and row[0] and row[1] and row[3] for row in ROWS)


@pytest.mark.parametrize("name", sorted({name for row in ROWS for name in re.findall(r"`([^`]+)`", row[1])}))
def test_every_name_of_ours_exists(name, objects):
    resolve(name, objects)


def test_every_named_test_exists():
    files = {path.stem: path for path in TESTS.rglob("test_*.py")}
    defined = {
        f"{stem}::{node.name}"
        for stem, path in files.items()
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
    }
    named = {row[3] for row in ROWS}
    assert named <= defined, sorted(named - defined)
