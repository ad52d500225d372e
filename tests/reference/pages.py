"""The tables of docs/reference: one row per field or method of another system, and the objects that its names mean.

Row: theirs | ours | how | proof. ``ours`` holds names in backquotes, ``proof`` one or more ``file::test`` under tests/.
"""

import ast
import dataclasses
import importlib
import pkgutil
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import foreword.batch
from foreword.batch import (
    InputBuffers,
    KVGroup,
    NewRequest,
    RequestStates,
    SamplingParams,
    prepare_inputs,
    sampling_metadata,
)
from foreword.batch.adapters import common_attention_metadata
from foreword.batch.adapters.vllm import VllmAdapter

PAGES = Path(__file__).parents[2] / "docs" / "reference"

MODULES = [
    importlib.import_module(info.name)
    for info in pkgutil.walk_packages(foreword.batch.__path__, "foreword.batch.")
    if not info.ispkg and not info.name.endswith("__main__")
]


@dataclass(frozen=True)
class Row:
    page: str
    line: int
    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    how: str
    proofs: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def defined_tests() -> set[str]:
    """Every ``file::test`` under tests/."""
    return {
        f"{path.stem}::{node.name}"
        for path in Path(__file__).parents[1].rglob("test_*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
    }


def rows(folder: Path = PAGES) -> list[Row]:
    """Every row of every table that has the four columns."""
    found = []
    for page in sorted(folder.glob("*.md")):
        inside = False
        for number, line in enumerate(page.read_text().splitlines(), 1):
            cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
            inside = cells == ["theirs", "ours", "how", "proof"] or (inside and bool(cells))
            if not inside or cells[0] == "theirs" or set(cells[0]) <= {"-"}:
                continue
            if len(cells) != 4:
                raise ValueError(f"{page.name}:{number}: expected 4 cells, got {len(cells)}")
            names, ours = (tuple(re.findall(r"`([^`]+)`", cell)) for cell in cells[:2])
            proofs = tuple(cells[3].replace(",", " ").split())
            found.append(Row(page.name, number, names or (cells[0],), ours, cells[2], proofs))
    return found


def _samples() -> dict[str, Any]:
    """One object per prefix that the pages use."""
    states = RequestStates(max_num_reqs=2, max_model_len=8, vocab_size=9, kv_groups=[KVGroup(block_size=2)])
    request = NewRequest(
        "a", [1, 2], [[1]], prompt_embeds=np.ones((2, 1)), sampling_params=SamplingParams(temperature=0.5)
    )
    states.add_request(request)
    buffers = InputBuffers.for_states(states, max_num_batched_tokens=8)
    batch = prepare_inputs(states, {"a": 2}, buffers)
    return {
        "states": states,
        "batch": batch,
        "buffers": buffers,
        "table": states.block_tables[0],
        "request": request,
        "adapter": VllmAdapter.of(states),
        "metadata": sampling_metadata(batch),
        "common": common_attention_metadata(batch),
    }


SAMPLES = _samples()


@dataclass(frozen=True)
class Subject:
    """The meaning of a name. root: the prefix in `SAMPLES`, or "" for a name of `foreword.batch`. path: the attributes
    from there. holder: the object that has the last attribute. value: that attribute.
    """

    root: str
    path: tuple[str, ...]
    holder: Any
    value: Any

    @property
    def attribute(self) -> str:
        return self.path[-1]

    @property
    def owner(self) -> type:
        """The class whose attribute it is; for a name of a module, its type."""
        return self.holder if isinstance(self.holder, type) else type(self.holder)

    @property
    def is_field(self) -> bool:
        """Return whether it is a field of a dataclass."""
        fields = dataclasses.fields(self.owner) if dataclasses.is_dataclass(self.owner) else ()
        return self.attribute in {field.name for field in fields}


def subject(name: str) -> Subject:
    """AttributeError or KeyError for a name that does not exist."""
    if match := re.fullmatch(r'buffers\["(\w+)"\]', name):
        buffers = SAMPLES["buffers"]
        return Subject("buffers", (match[1],), buffers, buffers[match[1]])
    first, *rest = name.split(".")
    root, holder, path = (first, SAMPLES[first], rest) if first in SAMPLES else ("", foreword.batch, [first, *rest])
    for part in path[:-1]:
        holder = getattr(holder, part)
    try:
        value = getattr(holder, path[-1])
    except AttributeError:
        if not (isinstance(holder, type) and dataclasses.is_dataclass(holder)):
            raise
        if path[-1] not in {field.name for field in dataclasses.fields(holder)}:
            raise
        value = None
    return Subject(root, tuple(path), holder, value)
