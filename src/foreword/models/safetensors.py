"""Weights in safetensors files: ``header size u64 | JSON header | data``, each tensor at its offsets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from foreword.errors import ModelError
from foreword.models.files import FETCH_AGAIN, FileRows, ModelFile, read_json
from foreword.models.quants import Quant
from foreword.models.weights import Tensor

_QUANTS = {"F32": Quant.F32, "F16": Quant.F16, "BF16": Quant.BF16}


def read_directory(folder: Path) -> dict[str, Tensor]:
    """All tensors of model.safetensors, or of the shards that model.safetensors.index.json names."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        shards = read_json(index).get("weight_map", {})
        if not isinstance(shards, dict):
            raise ModelError(f"{index}: weight_map is not a JSON object. {FETCH_AGAIN}")
        files = sorted({folder / Path(str(shard)).name for shard in shards.values()})
    else:
        files = [folder / "model.safetensors"]
    return {name: tensor for file in files for name, tensor in read_safetensors(file)}


def read_safetensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) pairs of one file. ModelError names the file, the tensor and the fault."""
    file = ModelFile(path, at_least=8)
    size = file.size
    start = 8 + int.from_bytes(file.read(0, 8), "little")
    if start > size:
        raise ModelError(f"{path}: a header of {start - 8} bytes needed, {size - 8} left in the file. {FETCH_AGAIN}")
    try:
        header = json.loads(file.read(8, start - 8).tobytes())
        entries = [(name, entry) for name, entry in header.items() if name != "__metadata__"]
    except (ValueError, AttributeError, RecursionError) as error:
        raise ModelError(f"{path}: the header is not a JSON object ({error}). {FETCH_AGAIN}") from None
    for name, entry in entries:
        yield name, _tensor(file, start, name, entry)


def _tensor(file: ModelFile, start: int, name: str, entry: Any) -> Tensor:
    path = file.path
    try:
        dtype, shape, (first, last) = entry["dtype"], tuple(map(int, entry["shape"])), map(int, entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"{path}: tensor {name}: the entry in the header is invalid ({error!r}). {FETCH_AGAIN}"
        ) from None
    quant = _QUANTS.get(dtype)
    if quant is None:
        raise ModelError(f"{path}: tensor {name}: dtype {dtype} is not supported. Use weights in {', '.join(_QUANTS)}")
    columns = shape[-1] if shape else 1
    rows = int(np.prod([1, *shape[:-1]], dtype=object))
    wanted = rows * columns * quant.block_bytes
    if min((0, *shape)) < 0 or first < 0 or last - first != wanted or start + last > file.size:
        found = f"bytes {first} to {last} of {file.size - start}"
        raise ModelError(f"{path}: tensor {name}: shape {shape} of {dtype} does not fit {found}. {FETCH_AGAIN}")
    return Tensor(FileRows(file, start + first, rows, columns * quant.block_bytes), quant, shape or (1,))
