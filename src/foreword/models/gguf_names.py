"""The names of GGUF files, and what they say.

NAME-00001-of-00003.gguf is a part of a split model; a name that begins with mmproj is that of an encoder of images,
which stands beside the file of its model; and most names have the format of the weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePath

_PART = re.compile(r"-[0-9]{5}(-of-(?!00000)([0-9]{5})\.gguf)\Z")
_QUANT = re.compile(r"(?:^|[-_.])((?:i?q\d|tq\d|mxfp\d|nvfp\d|bf16|f16|f32)[a-z0-9_]*)\.gguf$", re.IGNORECASE)
_USUAL = ("f16", "bf16", "q8_0", "f32")
"""Formats of encoders, the preferred one first."""


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


def is_mmproj(name: str) -> bool:
    """Return whether a GGUF file is that of an encoder, by its name or path."""
    return PurePath(name).name.lower().startswith("mmproj")


def folders_of_mmproj(model: PurePath) -> Sequence[PurePath]:
    """Return where the encoder for the file of a model may be, the first place first: in its folder, and for a part of
    a split model in the one above, because parts often have a folder of their own.
    """
    return model.parents[: 2 if len(part_names(model.name)) > 1 else 1]


def mmproj_of(model: str, names: Iterable[str]) -> str | None:
    """Return the encoder for the file of a model among files, of those in the first of its folders that has any, see
    `folders_of_mmproj`: the only one, or the one whose format is the model's, or the first of F16, BF16, Q8_0 and F32
    that there is once. None if no file, or no single one, is it.
    """
    encoders = [name for name in names if name.endswith(".gguf") and is_mmproj(name)]
    found: list[str] = []
    for folder in folders_of_mmproj(PurePath(model)):
        found = found or [name for name in encoders if PurePath(name).parent == folder]
    if len(found) == 1:
        return found[0]
    for wanted in (quant_of(model), *_USUAL):
        same = [name for name in found if wanted and quant_of(name) == wanted]
        if len(same) == 1:
            return same[0]
    return None


def quant_of(name: str) -> str:
    """Return the format in the name of a GGUF file, in lower case; "" without one."""
    match = _QUANT.search(whole_name(PurePath(name).name))
    return match[1].lower() if match else ""
