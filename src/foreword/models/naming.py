"""From the tensors of a file to the canonical weights of a spec: found by name, checked by shape, habits undone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from foreword.errors import ModelError
from foreword.models.families.base import GGUF_NAMES, SAFETENSORS_NAMES, Family, Rows
from foreword.models.spec import DecoderSpec, weight_names
from foreword.models.weights import Tensor, float_tensor

_CANONICAL = re.compile(r"(?:layers\.(\d+)\.)?(?:(experts)\.(\d+)\.)?(.+)")


def weights_from_gguf(
    path: Path, tensors: Mapping[str, Tensor], spec: DecoderSpec, family: Family
) -> dict[str, Tensor]:
    """All weights of a spec from a GGUF file. ModelError for one that is missing or has another shape."""
    weights = _collect(path, tensors, spec, GGUF_NAMES)
    if family.gguf_interleaved:
        for i in range(spec.num_layers):
            for name in (f"layers.{i}.q", f"layers.{i}.k"):
                weights[name] = split_halves(weights[name], spec.head_dim)
    return weights


def weights_from_safetensors(
    path: Path, tensors: Mapping[str, Tensor], spec: DecoderSpec, family: Family
) -> dict[str, Tensor]:
    """All weights of a spec from safetensors. ModelError for one that is missing or has another shape."""
    fused = family.fused(spec) if family.fused else {}
    weights = _collect(path, tensors, spec, {**SAFETENSORS_NAMES, **family.names, **fused})
    if family.norms_less_one:
        for name in weights:
            if name.endswith("_norm"):
                weights[name] = float_tensor(weights[name].dequantize() + np.float32(1))
    return weights


def split_halves(tensor: Tensor, head_dim: int) -> Tensor:
    """Rows of each head from interleaved rotary order (pairs 0 1 | 2 3 | …) to split halves (pairs 0 n | 1 n+1 | …)."""
    order = np.arange(len(tensor.data)).reshape(-1, head_dim // 2, 2).swapaxes(1, 2).ravel()
    return Tensor(tensor.data[order], tensor.quant, tensor.shape)


def _collect(
    path: Path, tensors: Mapping[str, Tensor], spec: DecoderSpec, names: Mapping[str, str | Rows]
) -> dict[str, Tensor]:
    return {name: _find(path, tensors, name, shape, names) for name, shape in weight_names(spec)}


def _find(
    path: Path, tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...], names: Mapping[str, str | Rows]
) -> Tensor:
    layer, expert, e, rest = re.fullmatch(_CANONICAL, name).groups()  # type: ignore[union-attr]
    source = names[f"{expert}.{rest}" if expert else rest]
    template = source.name if isinstance(source, Rows) else source
    found = template.format(i=layer, e=e)
    tensor = tensors.get(found)
    if tensor is None:
        raise ModelError(f"{path}: tensor {found} ({name}) is missing. Use a file that holds the whole model")
    whole = tensor.shape
    if isinstance(source, Rows):
        tensor = _rows(tensor, source.start, source.stop, shape)
    elif expert and "{e}" not in template and len(tensor.shape) == 3 and int(e) < tensor.shape[0]:
        per_expert = tensor.shape[1]  # all experts in one tensor: [experts, out, in]
        tensor = _rows(tensor, int(e) * per_expert, (int(e) + 1) * per_expert, tensor.shape[1:])
    if tensor.shape != shape and tensor.shape != shape[1:]:
        raise ModelError(f"{path}: tensor {found} ({name}) has shape {whole}, expected {shape}. "
                         "The configuration and the weights are not of the same model")  # fmt: skip
    return Tensor(tensor.data, tensor.quant, shape)


def _rows(tensor: Tensor, start: int, stop: int, shape: tuple[int, ...]) -> Tensor:
    rows = tensor.data[start:stop]
    return Tensor(rows, tensor.quant, (len(rows), *shape[1:]))
