"""The files of models in GGUF: one, or the parts of a split model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from foreword.errors import ModelError
from foreword.models.gguf import GGUF, read_gguf
from foreword.models.gguf_names import part_names
from foreword.models.weights import Tensor


def files_at(path: Path) -> list[Path]:
    """Return the files of a model: those in its directory, or all parts of which ``path`` is one."""
    found = path.rglob("*") if path.is_dir() else (path.with_name(name) for name in part_names(path.name))
    return sorted(file for file in found if file.is_file())


def read_model(path: Path) -> GGUF:
    """Return the contents of a model's file, and if it is a part of a split model, of all parts. Raise ModelError for a
    part that is missing, or of another model.
    """
    given = read_gguf(path)
    count = given.get("split.count", int, 1)
    if count in (0, 1):
        return given
    names = part_names(path.name)
    if len(names) != count or path.name not in names:
        fix = f"Give the files the names that they had: NAME-00001-of-{count:05}.gguf and so on"
        raise ModelError(f"{path}: is one of {count} files of a split model, and its name does not say so. {fix}")
    parts: list[GGUF] = []
    tensors: dict[str, Tensor] = {}
    for i, name in enumerate(names):
        beside = path.with_name(name)
        if not beside.is_file():
            raise ModelError(f"{beside}: is missing, one of {count} files of a split model. Fetch all of them")
        part = given if beside == path else read_gguf(beside)
        if (part.get("split.no", int), part.get("split.count", int)) != (i, count) or part.tensors.keys() & tensors:
            raise ModelError(f"{beside}: is not part {i + 1} of this model. Fetch all {count} files again")
        parts.append(part)
        tensors |= part.tensors
    if len(tensors) != (expected := parts[0].get("split.tensors.count", int, len(tensors))):
        raise ModelError(
            f"{parts[0].path}: {len(tensors)} of {expected} tensors are in its {count} files. Fetch all of them again"
        )
    return replace(parts[0], tensors=tensors, files=tuple(file for part in parts for file in part.files))
