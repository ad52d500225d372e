"""The files of models in GGUF: one, or the parts of a split model, NAME-00001-of-00003.gguf and so on."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from foreword.errors import ModelError
from foreword.models.gguf import GGUF, read_gguf
from foreword.models.mmproj import is_mmproj
from foreword.models.weights import Tensor

_PART = re.compile(r"-[0-9]{5}(-of-(?!00000)([0-9]{5})\.gguf)\Z")


def whole_name(name: str) -> str:
    """Return the name or path of a file without the number of a part, NAME.gguf."""
    return _PART.sub(".gguf", name)


def model_name(path: Path) -> str:
    """Return the name of a model in a file: that of the file without the number of a part and its ending."""
    return Path(whole_name(path.name)).stem


def part_names(name: str) -> list[str]:
    """Return the names or paths of all files of the model that a file is a part of, in their order."""
    match = _PART.search(name)
    if match is None:
        return [name]
    return [f"{name[: match.start()]}-{i:05}{match[1]}" for i in range(1, int(match[2]) + 1)]


def models_among(names: Iterable[str]) -> list[str]:
    """Return the names or paths of models among those of files: GGUF files that are not encoders of images, and of a
    split model the first part that is there.
    """
    found: dict[str, str] = {}
    for name in sorted(name for name in names if name.endswith(".gguf") and not is_mmproj(name)):
        found.setdefault(_PART.sub(r"-00001\1", name), name)
    return list(found.values())


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
