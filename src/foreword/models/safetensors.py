"""Weights in safetensors files: ``header size u64 | JSON header | data``, each tensor at its offsets."""

from __future__ import annotations

import math
from pathlib import Path

from foreword.errors import ModelError
from foreword.jsonfile import parse_object, read_object
from foreword.models.files import FETCH_AGAIN, FileRows, ModelFile, check_overlap
from foreword.models.quants import Quant
from foreword.models.weights import Tensor

_QUANTS = {"F32": Quant.F32, "F16": Quant.F16, "BF16": Quant.BF16}


def read_directory(folder: Path) -> dict[str, Tensor]:
    """All tensors of model.safetensors, or of the shards that model.safetensors.index.json names."""
    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.exists():
        shards = read_object(index, ModelError).get("weight_map")
        if not isinstance(shards, dict):
            raise ModelError(f"{index}: weight_map is not a JSON object. {FETCH_AGAIN}")
        names = sorted({Path(str(shard)).name for shard in shards.values()})
    return {name: tensor for file in names for name, tensor in read_safetensors(folder / file).items()}


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """The tensors of one file by name. ModelError names the file, the tensor and the fault."""
    file = ModelFile(path, at_least=8)
    start = 8 + int.from_bytes(file.read(0, 8), "little")
    if start > file.size:
        needed = f"a header of {start - 8} bytes needed, {file.size - 8} left in the file"
        raise ModelError(f"{path}: {needed}. {FETCH_AGAIN}")
    header = parse_object(file.read(8, start - 8).tobytes(), f"{path}: the header", ModelError)
    header.pop("__metadata__", None)
    tensors, spans = {}, []
    for name, entry in header.items():
        if name.endswith("embeddings.position_ids"):  # 0, 1, 2, … as older encoders store them: no weight
            continue
        tensors[name], first, last = _tensor(file, start, name, entry)
        spans.append((first, last, name))
    check_overlap(path, spans)
    return tensors


def _tensor(file: ModelFile, start: int, name: str, entry: object) -> tuple[Tensor, int, int]:
    """The tensor of an entry, and the first and last offset of its bytes."""
    path = file.path
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(first), int(last)]} if all(
            type(n) is int and n > 0 for n in shape
        ):
            pass
        case _:
            reason = f"{entry!r:.200} is not a dtype, a shape and data_offsets"
            raise ModelError(f"{path}: tensor {name!r:.80}: {reason}. {FETCH_AGAIN}")
    quant = _QUANTS.get(dtype)
    if quant is None:
        fix = f"Use weights in {', '.join(_QUANTS)}"
        raise ModelError(f"{path}: tensor {name!r:.80}: dtype {dtype!r:.80} is not supported. {fix}")
    wanted = math.prod(shape) * quant.block_bytes
    if first < 0 or last - first != wanted or start + last > file.size:
        reason = (
            f"shape {shape!r:.80} of {dtype} does not fit bytes {first!r:.40} to {last!r:.40} of {file.size - start}"
        )
        raise ModelError(f"{path}: tensor {name!r:.80}: {reason}. {FETCH_AGAIN}")
    rows = math.prod(shape[:-1])
    return Tensor(FileRows(file, start + first, rows, wanted // rows), quant, tuple(shape) or (1,)), first, last
