"""One entry of the tensor tables: the name, shape, dtype and padding of an array."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Field:
    """An array of the row state or of a step.

    shape: symbols of docs/tensors.md, one per axis. An axis ``Tp`` or ``Bp`` has T or B live entries; the entries after
    them hold ``padding``. padding: a number, "null" for the null block, "T" for the number of tokens, None if the
    entries are unspecified. In the row state it is the value of a row without a request.
    per_group: a tuple of such arrays, one per KV group.
    on_device: whether `foreword.device` prepares it, too.
    """

    name: str
    shape: tuple[str, ...]
    dtype: str
    padding: int | str | None = None
    per_group: bool = False
    on_device: bool = False
