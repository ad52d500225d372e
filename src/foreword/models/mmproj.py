"""The names of GGUF files of encoders of images, which stand beside those of their models."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePath

QUANT = re.compile(
    r"(?:^|[-_.])((?:i?q\d|tq\d|mxfp\d|nvfp\d|bf16|f16|f32)[a-z0-9_]*)(?:-\d{5}-of-\d{5})?\.gguf$", re.IGNORECASE
)
"""The format of the weights in the name of a GGUF file."""
_USUAL = ("f16", "bf16", "q8_0", "f32")
"""Formats of encoders, the preferred one first."""


def is_mmproj(name: str) -> bool:
    """Return whether a GGUF file is that of an encoder, by its name or path."""
    return PurePath(name).name.lower().startswith("mmproj")


def mmproj_of(model: str, names: Iterable[str]) -> str | None:
    """Return the encoder for the file of a model among files, of those in its folder: the only one, or the one whose
    format is the model's, or the first of F16, BF16, Q8_0 and F32 that there is once. None if no file, or no single
    one, is it.
    """
    folder = PurePath(model).parent
    found = [name for name in names if name.endswith(".gguf") and is_mmproj(name) and PurePath(name).parent == folder]
    if len(found) == 1:
        return found[0]
    for wanted in (quant_of(model), *_USUAL):
        same = [name for name in found if wanted and quant_of(name) == wanted]
        if len(same) == 1:
            return same[0]
    return None


def quant_of(name: str) -> str:
    """Return the format in the name of a GGUF file, in lower case; "" without one."""
    match = QUANT.search(PurePath(name).name)
    return match[1].lower() if match else ""
