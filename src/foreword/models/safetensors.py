"""Weights in safetensors files: ``header size u64 | JSON header | data``, each tensor at its offsets."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from foreword.errors import ModelError
from foreword.jsonfile import parse_object
from foreword.models.files import FETCH_AGAIN, FileRows, ModelFile, check_overlap
from foreword.models.quants import Quant
from foreword.models.text_files import read_object
from foreword.models.weights import Tensor

_FLOATS = {"F32": Quant.F32, "F16": Quant.F16, "BF16": Quant.BF16}
_BYTES = {"I64": 8, "I32": 4, "U32": 4, "I8": 1, "U8": 1, "F8_E4M3": 1, "F8_E8M0": 1}
_BYTES |= {name: quant.block_bytes for name, quant in _FLOATS.items()}

_NO_WEIGHTS = ("embeddings.position_ids", ".attn.bias", ".attn.causal_mask", ".attention.bias")
"""Ends of the names of positions, 0, 1, 2, …, and of causal masks, which older files and their indexes have."""


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """A tensor as a file holds it: ``rows`` of its last dimension, of the type that safetensors call ``dtype``."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    rows: FileRows

    @property
    def is_float(self) -> bool:
        return self.dtype in _FLOATS

    def tensor(self) -> Tensor:
        """Return the entry as a weight. Raise ModelError unless it is of floats of 16 or 32 bits."""
        if not self.is_float:
            raise _unsupported(self.rows.file, self.name, self.dtype)
        return Tensor(self.rows, _FLOATS[self.dtype], self.shape)

    def error(self, what: str, fix: str = FETCH_AGAIN) -> ModelError:
        return _error(self.rows.file, self.name, what, fix)


def read_directory(folder: Path) -> dict[str, Entry]:
    """Return all tensors of model.safetensors, or of the shards that model.safetensors.index.json names, but for those
    without elements, such as the matrices of no shared experts.
    """
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return _with_elements(read_entries(folder / "model.safetensors"))
    shards = read_object(index).get("weight_map")
    if not isinstance(shards, dict):
        raise ModelError(f"{index}: weight_map is not a JSON object. {FETCH_AGAIN}")
    for name, shard in shards.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ModelError(
                f"{index}: tensor {name!r:.80} is in {shard!r:.80}, not in a file beside it. {FETCH_AGAIN}"
            )
    files = {shard: read_entries(folder / shard) for shard in sorted(set(shards.values()))}
    named = {name: shard for name, shard in shards.items() if not name.endswith(_NO_WEIGHTS)}
    for name, shard in named.items():
        if name not in files[shard]:
            raise ModelError(
                f"{folder / shard}: lacks tensor {name!r:.80}, which {index.name} says it has. {FETCH_AGAIN}"
            )
    return _with_elements({name: files[shard][name] for name, shard in named.items()})


def _with_elements(entries: Mapping[str, Entry]) -> dict[str, Entry]:
    return {name: entry for name, entry in entries.items() if math.prod(entry.shape)}


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of one file by name, all of floats. ModelError names the file, the tensor and the fault."""
    return {name: entry.tensor() for name, entry in _with_elements(read_entries(path)).items()}


def read_entries(path: Path) -> dict[str, Entry]:
    """Return the tensors of one file by name, also of quantised ones. Raise ModelError as `read_safetensors`."""
    file = ModelFile(path, at_least=8)
    start = 8 + int.from_bytes(file.read(0, 8), "little")
    if start > file.size:
        needed = f"a header of {start - 8} bytes needed, {file.size - 8} left in the file"
        raise ModelError(f"{path}: {needed}. {FETCH_AGAIN}")
    header = parse_object(file.read(8, start - 8).tobytes(), f"{path}: the header", ModelError)
    header.pop("__metadata__", None)
    entries, spans = {}, []
    for name, entry in header.items():
        if name.endswith(_NO_WEIGHTS):
            continue
        entries[name], first, last = _entry(file, start, name, entry)
        spans.append((first, last, name))
    check_overlap(path, spans)
    return entries


def _entry(file: ModelFile, start: int, name: str, entry: object) -> tuple[Entry, int, int]:
    """Return the tensor of an entry, and the first and last offset of its bytes."""
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(first), int(last)]} if all(
            type(n) is int and n >= 0 for n in shape
        ):
            pass
        case _:
            raise _error(file, name, f"{entry!r:.200} is not a dtype, a shape and data_offsets")
    if dtype not in _BYTES:
        raise _unsupported(file, name, dtype)
    wanted = math.prod(shape) * _BYTES[dtype]
    if first < 0 or last - first != wanted or start + last > file.size:
        where = f"bytes {first!r:.40} to {last!r:.40} of {file.size - start}"
        raise _error(file, name, f"shape {shape!r:.80} of {dtype} does not fit {where}")
    rows = math.prod(shape[:-1])
    row_bytes = math.prod(shape[-1:]) * _BYTES[dtype]
    return Entry(name, dtype, tuple(shape) or (1,), FileRows(file, start + first, rows, row_bytes)), first, last


def _unsupported(file: ModelFile, name: str, dtype: str) -> ModelError:
    fix = f"Use weights in {', '.join(_FLOATS)}, or quantised ones whose config.json has a quantization_config"
    return _error(file, name, f"dtype {dtype!r:.80} is not supported", fix)


def _error(file: ModelFile, name: str, what: str, fix: str = FETCH_AGAIN) -> ModelError:
    return ModelError(f"{file.path}: tensor {name!r:.80}: {what}. {fix}")
