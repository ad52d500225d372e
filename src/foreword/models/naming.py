"""Turn the tensors of a file into the canonical weights of a spec: renamed, checked by shape, and converted."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, takewhile
from itertools import count as integers
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from foreword.arrays import F32
from foreword.errors import ModelError
from foreword.models.config import ROPE_FACTORS
from foreword.models.encoder_spec import EncoderSpec, encoder_weight_names
from foreword.models.families.base import (
    GGUF_LAYER,
    GGUF_NAMES,
    SAFETENSORS_LAYER,
    SAFETENSORS_NAMES,
    Family,
    IndexerRows,
    Rows,
    fused_rows,
)
from foreword.models.families.encoder_base import EncoderFamily
from foreword.models.families.vision_base import UNUSED
from foreword.models.files import FileRows, OrderedRows, TransposedRows
from foreword.models.gguf import GGUF
from foreword.models.mlx_names import LATENTS, expert_names
from foreword.models.pooling import GGUF_DENSE, PoolingSpec
from foreword.models.spec import INDEXER, DecoderSpec, MlaSpec, weight_names
from foreword.models.vision_spec import VisionSpec, vision_weight_names
from foreword.models.weights import Tensor, float_tensor

_ROWS_COMPARED = 1024
"""Rows that are read at once to compare two tensors."""
_COMPUTED = (
    *("rotary_emb.inv_freq", "position_ids", "masked_bias"),
    *(f".self_attn.{name}" for name in ("slope_rate", "query_decay", "key_decay", "diagonal_decay")),
)
"""Ends of the names of tensors that files have, although they follow from the configuration."""
DENSE = "dense."
"""Beginning of the names of tensors of layers after the pooling; behind it, the number of the layer."""
_FUSED = ("qkv", "qkv_bias", "gate_up", "gate_up_bias")
_FUSED_IN_SAFETENSORS = {
    name: SAFETENSORS_NAMES[name].removeprefix(SAFETENSORS_LAYER.removesuffix(".")) for name in _FUSED
}
_FUSED_IN_GGUF = {name: GGUF_NAMES[name].removeprefix(GGUF_LAYER.removesuffix(".")) for name in ("qkv", "qkv_bias")}
_STACKED_EXPERTS = ".mlp.experts.gate_up_proj"
_GATE_AND_UP = "ffn_gate_up_exps."
_CANONICAL = re.compile(r"(?:layers\.(\d+)\.)?(?:(experts)\.(\d+)\.)?(.+)")


def weights_from_gguf(
    path: Path,
    tensors: Mapping[str, Tensor],
    spec: DecoderSpec,
    family: Family,
    pooling: PoolingSpec | None = None,
    prefix: str = GGUF_LAYER,
) -> dict[str, Tensor]:
    """Return all weights of a spec, and of the layers after its pooling, from a GGUF file. Raise ModelError for
    a weight that is missing or has another shape, and for a tensor that the spec does not use: a bias, a scale, another
    type of layer.

    prefix: the beginning of the names of a layer's tensors, {i} its number.
    """
    tensors = {f"{name}.weight" if name.endswith(".ffn_norm") else name: tensor for name, tensor in tensors.items()}
    for end, parts in family.gguf_joined.items():
        tensors = _joined(path, tensors, end, parts)
    if spec.mla is not None:
        tensors = _separate_latents(tensors, spec, spec.mla, prefix)
    in_file = dict(family.names_in_gguf(spec))
    for end, kind in (("", "weight"), ("_bias", "bias")):
        if "experts.gate_up" + end in in_file or not any(name.endswith(_GATE_AND_UP + kind) for name in tensors):
            continue
        if any(name.endswith(f"ffn_up_exps.{kind}") for name in tensors):
            tensors = _with_parts(tensors, _GATE_AND_UP + kind)
        else:
            in_file |= _gate_and_up(spec, GGUF_LAYER + _GATE_AND_UP + kind, end)
    names = _with_layer(in_file, GGUF_LAYER, prefix)
    names |= _fused_rows(tensors, spec, names, _FUSED_IN_GGUF)
    names |= {f"{DENSE}{i}": f"{name}.weight" for i, name in enumerate(GGUF_DENSE)}
    wanted = chain(weight_names(spec), pooling.weight_names() if pooling else ())
    numbers = family.numbers(spec)
    weights, used = _collect(path, tensors, wanted, names, numbers, constants=family.constants)
    used |= _unread(spec, names, numbers)
    if extra := sorted(tensors.keys() - used - set(ROPE_FACTORS.values())):
        fix = "Use a directory of safetensors, or another model"
        raise ModelError(f"{path}: tensor {extra[0]} is not part of a {spec.architecture} model. {fix}")
    reorder_rows(weights, spec, family.gguf_interleaved, family.indexer_rows)
    for i, layer in enumerate(spec.layers):
        # The file has −exp(a_log), or exp(a_log) where decays have a bound.
        if layer.recurrent is not None and layer.recurrent.kind != "short_conv":
            has_bound = layer.recurrent.least_log is not None
            rates = weights[name := f"layers.{i}.state.a_log"].dequantize() * np.float32(1 if has_bound else -1)
            if not (np.isfinite(rates) & (rates > 0)).all():
                fix, sign = "Use a file that was converted from the model itself", "above" if has_bound else "below"
                raise ModelError(f"{path}: the rates of layer {i} (ssm_a) are not all {sign} zero. {fix}")
            weights[name] = float_tensor(np.log(rates))
    return weights


def numbers_of_layers(gguf: GGUF, keys: Iterable[str], num_layers: int) -> dict[str, Tensor]:
    """Return the tensors that `Family.gguf_numbers` names. Raise ModelError unless each key has a number for each
    layer, or one for all.
    """
    found: dict[str, Tensor] = {}
    for key in keys:
        numbers = np.atleast_1d(np.asarray(gguf.metadata.get(key, [])))
        if numbers.dtype.kind != "f" or numbers.shape not in ((1,), (num_layers,)):
            fix = "Convert the model again"
            raise ModelError(f"{gguf.path}: metadata {key} has no number for each of {num_layers} layers. {fix}")
        values = np.broadcast_to(numbers.astype(np.float32), num_layers)
        found |= {f"{GGUF_LAYER.format(i=i)}{key}": float_tensor(values[i : i + 1]) for i in range(num_layers)}
    return found


def weights_from_safetensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    spec: DecoderSpec,
    family: Family,
    pooling: PoolingSpec | None = None,
    prefix: str = SAFETENSORS_LAYER,
) -> dict[str, Tensor]:
    """Return all weights of a spec, and of the head of its pooling, from safetensors. Raise ModelError for a weight
    that is missing or has another shape, and for a tensor that the spec does not use: see `_check_unused`.

    prefix: the beginning of the names of a layer's tensors, {i} its number.
    """
    names: dict[str, str | Rows] = {**SAFETENSORS_NAMES, **family.names, **family.fused(spec), **_dense_names(pooling)}
    if family.projection is not None:
        names[f"{DENSE}0"] = f"{family.projection[0]}.weight"
    tensors = _renamed(path, tensors, family)
    tensors = _untied(path, tensors, family.tied(spec))
    for end in family.experts_in_rows:
        tensors = _split_experts(tensors, end, spec, turned=end.endswith(family.transposed))
    if family.transposed:
        tensors = _with_outputs_first(tensors, family.transposed, spec.hidden_size)
    if "experts.gate_up" not in names and any(name.endswith(_STACKED_EXPERTS) for name in tensors):
        prefix_of_layer = SAFETENSORS_LAYER.removesuffix(".")
        names |= _gate_and_up(spec, prefix_of_layer + _STACKED_EXPERTS)
        names["experts.down"] = prefix_of_layer + _STACKED_EXPERTS.replace("gate_up", "down")
    names |= _fused_rows(tensors, spec, names, _FUSED_IN_SAFETENSORS)
    names |= _apart(tensors, names)
    names |= (stacked := expert_names(tensors))
    if spec.mla is not None and any(name.endswith(LATENTS["k_b"]) for name in tensors):
        names |= {key: SAFETENSORS_LAYER + end for key, end in LATENTS.items()}
        tensors = _by_head(tensors, spec, spec.mla, *(prefix + end for end in LATENTS.values()))
    names = _with_layer(names, SAFETENSORS_LAYER, prefix)
    wanted = chain(weight_names(spec), pooling.weight_names() if pooling else ())
    options: dict[str, Any] = {name: getattr(family, name) for name in ("constants", "optional")}
    options["transposed"] = False if stacked else family.transposed_experts
    options["computed"] = family.computed(spec)
    numbers = family.numbers(spec)
    weights, used = _collect(path, tensors, wanted, names, numbers, **options)
    used |= _unread(spec, names, numbers)
    # Equal to the embedding, or of a model that computes no logits.
    heads = () if "lm_head" in weights else (str(names["lm_head"]),)
    _check_unused(path, tensors, used, spec.architecture, (*family.unused, *heads))
    if family.norms_less_one:
        for name in weights:
            if name.endswith("_norm"):
                weights[name] = float_tensor(weights[name].dequantize() + np.float32(1))
    reorder_rows(weights, spec, family.interleaved, family.indexer_rows)
    return weights


def _renamed(path: Path, tensors: Mapping[str, Tensor], family: Family) -> Mapping[str, Tensor]:
    """Return the tensors by the names of a family: see `Family.renamed`. If the name of the embedding lacks that of the
    model in front, all names lack it, but for that of the head: add it. Raise ModelError for two tensors of one name.
    """
    for part, own in family.renamed.items():
        others = {name: name.replace(part, own) for name in tensors if part in name}
        if both := next((name for name, other in others.items() if other in tensors), None):
            fix = "Use a file that has one of them"
            raise ModelError(f"{path}: tensors {both} and {others[both]} are the same weight. {fix}")
        tensors = {others.get(name, name): tensor for name, tensor in tensors.items()}
    for end, parts in family.joined.items():
        tensors = _joined(path, tensors, end, parts)
    names = {**SAFETENSORS_NAMES, **family.names}
    model, _, embed = names["embed"].partition(".")
    if embed not in tensors:
        return tensors
    outside = DENSE, names["lm_head"].removesuffix("weight")
    return {name if name.startswith(outside) else f"{model}.{name}": tensor for name, tensor in tensors.items()}


def _untied(path: Path, tensors: Mapping[str, Tensor], tied: Mapping[str, str]) -> Mapping[str, Tensor]:
    """Return the tensors with one for each weight that several layers have in common: see `Family.tied`. Raise
    ModelError for two that differ.
    """
    found = dict(tensors)
    for name in tensors:
        for part, of in tied.items():
            if not name.startswith(part):
                continue
            own, other = found.pop(name), of + name.removeprefix(part)
            if other not in tensors:
                found[other] = own
            elif differ(own, tensors[other]):
                fix = "Use a file in which they are equal"
                raise ModelError(f"{path}: tensors {name} and {other} are the same weight, and differ. {fix}")
    return found


def _split_experts(tensors: Mapping[str, Tensor], end: str, spec: DecoderSpec, *, turned: bool) -> Mapping[str, Tensor]:
    """Return the tensors with one for each expert in place of those that have the matrices of all: see
    `Family.experts_in_rows`. A tensor without as many rows for each expert stays as it is. turned: each is [in, out].
    """
    count = next((moe.num_experts for layer in spec.layers if (moe := layer.experts) is not None), 1)
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        size = tensor.shape[0] // count
        if not name.endswith(end) or tensor.shape[0] % count:
            found[name] = tensor
            continue
        for e in range(count):
            part = select_rows(tensor, Rows("", e * size, (e + 1) * size))
            one = name.replace(".experts.mlp.", f".experts.{e}.") + ".weight"
            found[one] = _turned(part) if turned else part
    return found


def _with_outputs_first(tensors: Mapping[str, Tensor], ends: tuple[str, ...], num_inputs: int) -> Mapping[str, Tensor]:
    """Return the tensors with those whose names have these ends as [out, in]: see `Family.transposed`. Files by MLX
    have matrices so already, which the first one of floats tells: its inputs are as many as its outputs in none.
    """
    own = (tensor for name, tensor in tensors.items() if name.endswith(ends[0]))
    first = next((tensor for tensor in own if tensor.quant.block_size == 1 and len(tensor.shape) == 2), None)
    if first is not None and first.shape[0] != num_inputs:
        return tensors
    return {name: _turned(own) if name.endswith(ends) else own for name, own in tensors.items()}


def _joined(path: Path, tensors: Mapping[str, Tensor], end: str, parts: tuple[str, ...]) -> Mapping[str, Tensor]:
    """Return the tensors with those whose names end with one of ``parts`` each as rows of one: see `Family.joined`. A
    tensor without its other parts stays as it is. Raise ModelError for rows of different sizes.
    """
    found, first = dict(tensors), parts[0].format(row=0)
    is_numbered = first != parts[0]
    for name in (name for name in tensors if name.endswith(first)):
        stem = name.removesuffix(first)
        own = [stem + part for part in parts]
        if is_numbered:
            own = [*takewhile(tensors.__contains__, (stem + parts[0].format(row=row) for row in integers()))]
        if all(part in tensors for part in own):
            if len({tensors[part].shape[:] if is_numbered else tensors[part].shape[-1] for part in own}) > 1:
                fix = "Use configuration and weights of the same model"
                raise ModelError(f"{path}: tensors {', '.join(own)} are not rows of one. {fix}")
            rows = [found.pop(part).dequantize() for part in own]
            if is_numbered:
                found[stem + end] = float_tensor(np.stack(rows))
            else:
                joined = np.concatenate([row.reshape(-1, row.shape[-1]) for row in rows])
                found[stem + end] = float_tensor(joined)
    return found


def _with_layer(names: Mapping[str, str | Rows], usual: str, prefix: str) -> dict[str, str | Rows]:
    """Return names of tensors with another beginning of those of layers."""
    return {key: name if isinstance(name, Rows) else name.replace(usual, prefix) for key, name in names.items()}


def _dense_names(pooling: PoolingSpec | None) -> dict[str, str]:
    """Return where the layers after the pooling are among the tensors of a directory."""
    parts = {"": "weight", "_bias": "bias"}
    count = 0 if pooling is None else len(pooling.dense)
    return {f"{DENSE}{i}{end}": f"{DENSE}{i}.linear.{part}" for i in range(count) for end, part in parts.items()}


def _unread(spec: DecoderSpec, names: Mapping[str, str | Rows], numbers: Sequence[int] | None = None) -> set[str]:
    """Return the tensors of keys and values that layers would have if they did not read those of others, those of
    indexers that layers would have if they did not take what others choose, those that experts would have whose
    output is their input, and the gate of a shared expert without a width.
    """
    found: list[str] = []
    for i, layer in enumerate(spec.layers):
        if layer.reads_layer is not None:
            found += [f"layers.{i}.{part}" for part in ("k", "v", "k_norm")]
        if layer.takes_chosen:
            found += [f"layers.{i}.{part}" for part in INDEXER]
        if (moe := layer.experts) is not None:
            own = range(moe.num_experts, moe.num_choices)
            found += [f"layers.{i}.experts.{e}.{part}" for e in own for part in ("gate", "up", "down")]
            found += [f"layers.{i}.shared_gate"] * (moe.shared_gate and not moe.shared_intermediate_size)
    return {source_of(name, names, numbers)[0] for name in found}


def _gate_and_up(spec: DecoderSpec, name: str, end: str = "") -> dict[str, str | Rows]:
    """Return where a file has gate and up of all experts of a layer in one tensor, those of each one below the other. A
    model without experts uses no such tensor. end: of canonical names, as that of biases.
    """
    inner = next((moe.intermediate_size for layer in spec.layers if (moe := layer.experts) is not None), None)
    if inner is None:
        return {}
    both = f"experts.gate_up{end}"
    return {both: name, f"experts.gate{end}": Rows(both, 0, inner), f"experts.up{end}": Rows(both, inner, 2 * inner)}


def _with_parts(tensors: Mapping[str, Tensor], end: str) -> dict[str, Tensor]:
    """Return the tensors of a GGUF file of which some layers have gate and up of all experts in one tensor, whose name
    ends with ``end``, with two in its place.
    """
    found: dict[str, Tensor] = {}
    for name, both in tensors.items():
        if not name.endswith(end):
            found[name] = both
            continue
        count, size, *rest = both.shape
        for first, part in ((0, "gate"), (size // 2, "up")):
            own = name.replace("gate_up", part)
            if not rest:  # biases
                found[own] = float_tensor(both.dequantize()[:, first : first + size // 2])
                continue
            rows = select_rows(both, Rows("", first, first + size // 2, size))
            found[own] = Tensor(rows.stored, both.quant, (count, size // 2, *rest))
    return found


def _fused_rows(
    tensors: Mapping[str, Tensor], spec: DecoderSpec, names: Mapping[str, str | Rows], ends: Mapping[str, str]
) -> dict[str, str | Rows]:
    """Return where a file has q, k and v, gate and up, or their biases, in one tensor, which its family has apart.

    ends: of the names of such tensors.
    """
    known = {rows.name for rows in names.values() if isinstance(rows, Rows)}
    found = {s for s, end in ends.items() if s not in known and any(name.endswith(end) for name in tensors)}
    return {name: rows for name, rows in fused_rows(spec).items() if rows.name in found}


def _apart(tensors: Mapping[str, Tensor], names: Mapping[str, str | Rows]) -> dict[str, str | Rows]:
    """Return where a file by MLX has gate and up of a dense MLP in two tensors, which its family has in one."""
    both = [name for name in ("gate", "up") if isinstance(names.get(name), Rows)]
    usual = {name: SAFETENSORS_NAMES[name] for name in both}
    ends = tuple(name.removeprefix(SAFETENSORS_LAYER.removesuffix(".")) for name in usual.values())
    return dict(usual) if ends and any(name.endswith(ends) for name in tensors) else {}


def has_own_head(path: Path, tensors: Mapping[str, Tensor], family: Family) -> bool:
    """Return whether safetensors hold a matrix of logits other than the embedding, whatever the configuration says."""
    names, tensors = {**SAFETENSORS_NAMES, **family.names}, _renamed(path, tensors, family)
    head, embed = (tensors.get(names[name]) for name in ("lm_head", "embed"))
    return head is not None and embed is not None and differ(head, embed)


def differ(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have other shapes, formats or bytes. A few rows are read at a time."""
    if (one.shape, one.quant) != (other.shape, other.quant):
        return True
    parts = range(0, one.shape[0], _ROWS_COMPARED)
    rows = (Rows("", first, first + _ROWS_COMPARED) for first in parts)
    return any((select_rows(one, part).data != select_rows(other, part).data).any() for part in rows)


def encoder_weights(
    path: Path, tensors: Mapping[str, Tensor], spec: EncoderSpec, family: EncoderFamily, pooling: PoolingSpec
) -> dict[str, Tensor]:
    """Return all weights of an encoder and of its head. Raise ModelError as `weights_from_safetensors`."""
    plain = {name.removeprefix(family.prefix): tensor for name, tensor in tensors.items()}
    is_fused = not family.fused_end or any(name.endswith(family.fused_end) for name in plain)
    names: dict[str, str | Rows] = {**family.names, **_dense_names(pooling)}
    names |= family.fused(spec) if is_fused else {}
    wanted = chain(encoder_weight_names(spec), pooling.weight_names())
    weights, used = _collect(path, plain, wanted, names, constants=family.constants)
    _check_unused(path, plain, used, spec.architecture, family.unused)
    return weights


def vision_weights(
    path: Path,
    tensors: Mapping[str, Tensor],
    spec: VisionSpec,
    names: Mapping[str, str | Rows],
    *,
    norms_less_one: bool,
    rotates_halves: bool,
) -> dict[str, Tensor]:
    """Return all weights of an encoder of images. Raise ModelError as `weights_from_safetensors`. norms_less_one,
    rotates_halves: see `VisionFamily`.
    """
    weights, used = _collect(path, tensors, vision_weight_names(spec), names)
    _check_unused(path, tensors, used, f"{spec.tower.architecture} encoder of an image", UNUSED)
    if norms_less_one and "proj_norm" in weights:
        weights["proj_norm"] = float_tensor(weights["proj_norm"].dequantize() + np.float32(1))
    if rotates_halves:
        dim = spec.tower.head_dim
        for name in weights:
            if _parts(name)[1] in ("q", "k", "q_norm", "k_norm"):
                weights[name] = split_halves(weights[name], dim, dim, dim // 4)
    return weights


def _check_unused(
    path: Path, tensors: Mapping[str, Tensor], used: set[str], architecture: str, unused: tuple[str, ...]
) -> None:
    """Raise ModelError for a tensor that changes numbers, and is not used. Those do not that begin with ``unused``,
    frequencies and positions, which the model computes, and a bias of zeros.
    """
    for name in sorted(tensors.keys() - used):
        if name.startswith(unused) or name.endswith(_COMPUTED):
            continue
        if not name.endswith(".bias") or tensors[name].dequantize().any():
            fix = "Use configuration and weights of the same model"
            raise ModelError(f"{path}: tensor {name} is not part of a {architecture} model as configured. {fix}")


def reorder_rows(
    weights: dict[str, Tensor], spec: DecoderSpec, is_interleaved: bool, of_indexer: IndexerRows = "first"
) -> None:
    """Bring the rows of queries and keys, of those that are in ``weights``, from the order of a file to that of a
    spec.
    """
    if spec.mla is not None:
        _rotary_parts_first(weights, spec, spec.mla, is_interleaved=is_interleaved)
    if spec.indexer is not None and spec.mla is not None:
        rest = {part: spec.indexer.head_dim - spec.mla.rope_dim for part in INDEXER if part != "index_weights"}
        if of_indexer == "last":
            _rotary_rows_first(weights, spec, rest, np.arange(spec.mla.rope_dim))
        elif of_indexer == "as others" and is_interleaved:
            for name in (f"layers.{i}.{part}" for i in range(spec.num_layers) for part in rest):
                if name in weights:
                    weights[name] = split_halves(weights[name], spec.indexer.head_dim, spec.mla.rope_dim)
    for name, head_dim, rotated in _interleaved(spec) if is_interleaved else ():
        if name in weights:
            weights[name] = split_halves(weights[name], head_dim, rotated)
        norm = name + "_norm"
        if spec.qk_norm and not spec.joint_qk_norm and norm in weights:
            values = weights[norm].dequantize()
            turned = split_halves(float_tensor(values.ravel()), head_dim, rotated)
            weights[norm] = float_tensor(turned.dequantize().reshape(values.shape))


def _rotary_parts_first(weights: dict[str, Tensor], spec: DecoderSpec, mla: MlaSpec, *, is_interleaved: bool) -> None:
    """Move the rotary rows of latent attention to the front. In files they are last: in each head of q, and in kv_a."""
    rotary = np.arange(mla.rope_dim)
    rotary = rotary.reshape(-1, 2).T.ravel() if is_interleaved else rotary
    parts = {"q": mla.nope_dim, "kv_a": mla.kv_rank, "kv_a_bias": mla.kv_rank}
    _rotary_rows_first(weights, spec, parts, rotary)


def _rotary_rows_first(
    weights: dict[str, Tensor], spec: DecoderSpec, parts: Mapping[str, int], rotary: npt.NDArray[np.int64]
) -> None:
    """Move the rotary rows of each head to the front, in this order. parts: the number of rows before them."""
    for i in range(spec.num_layers):
        for name, rest in parts.items():
            tensor = weights.get(f"layers.{i}.{name}")
            if tensor is None:
                continue
            order = np.concatenate([rest + rotary, np.arange(rest)])
            rows = np.arange(tensor.shape[0]).reshape(-1, len(order))[:, order].ravel()
            is_vector = len(tensor.shape) == 1  # stored as one row
            weights[f"layers.{i}.{name}"] = (
                float_tensor(tensor.dequantize()[rows])
                if is_vector
                else Tensor(tensor.data[rows], tensor.quant, tensor.shape)
            )


def _separate_latents(tensors: Mapping[str, Tensor], spec: DecoderSpec, mla: MlaSpec, prefix: str) -> dict[str, Tensor]:
    """Return the tensors of a GGUF file with attn_k_b and attn_v_b of each layer as matrices [heads · rows, kv_rank].
    Older files have both in one tensor; newer ones have them head by head.
    """
    found, (nope, value) = dict(tensors), (mla.nope_dim, mla.value_dim)
    for i in range(spec.num_layers):
        p = prefix.format(i=i) + "attn_"
        if (both := found.pop(f"{p}kv_b.weight", None)) is not None:
            found[f"{p}k_b.weight"] = select_rows(both, Rows("", 0, nope, nope + value))
            found[f"{p}v_b.weight"] = select_rows(both, Rows("", nope, nope + value, nope + value))
    return _by_head(found, spec, mla, f"{prefix}attn_k_b.weight", f"{prefix}attn_v_b.weight")


def _by_head(
    tensors: Mapping[str, Tensor], spec: DecoderSpec, mla: MlaSpec, k_name: str, v_name: str
) -> dict[str, Tensor]:
    """Return the tensors with those of k [heads, kv_rank, rows] and v [heads, rows, kv_rank] as matrices
    [heads · rows, kv_rank].
    """
    found, (nope, value) = dict(tensors), (mla.nope_dim, mla.value_dim)
    for i in range(spec.num_layers):
        k, v = (found.get(name.format(i=i)) for name in (k_name, v_name))
        if k is not None and k.shape == (spec.num_heads, mla.kv_rank, nope):
            floats = np.ascontiguousarray(k.dequantize().swapaxes(1, 2))
            found[k_name.format(i=i)] = float_tensor(floats.reshape(-1, mla.kv_rank))
        if v is not None and v.shape == (spec.num_heads, value, mla.kv_rank):
            found[v_name.format(i=i)] = Tensor(v.stored, v.quant, (spec.num_heads * value, mla.kv_rank))
    return found


def _interleaved(spec: DecoderSpec) -> Iterator[tuple[str, int, int]]:
    """Yield the weights of queries and keys, with each a head's number of rows, and of those that are rotated; without
    rotation all.
    """
    for i, layer in enumerate(spec.layers):
        if layer.has_attention and spec.mla is None:
            head_dim = spec.heads_of(layer).head_dim
            rotated = 2 * len(layer.rope.inv_freq) if layer.rope else head_dim
            names = ("q", "k", "q_bias", "k_bias") if spec.qkv_bias else ("q", "k")
            yield from ((f"layers.{i}.{name}", head_dim, rotated) for name in names)


def split_halves(tensor: Tensor, head_dim: int, rotated: int, block: int = 1) -> Tensor:
    """Return each head's first ``rotated`` rows from interleaved pairs (0 1 | 2 3 | …) to split halves (0 n | 1 n+1 |
    …). block: so many rows are together in the place of one.
    """
    order = np.arange(tensor.shape[0]).reshape(-1, head_dim)
    order[:, :rotated] = order[:, :rotated].reshape(len(order), -1, 2, block).swapaxes(1, 2).reshape(len(order), -1)
    if len(tensor.shape) == 1:  # stored as one row
        return float_tensor(tensor.dequantize()[order.ravel()])
    if isinstance(tensor.stored, np.ndarray):
        return Tensor(tensor.stored[order.ravel()], tensor.quant, tensor.shape)
    return Tensor(OrderedRows(tensor.stored, order.ravel()), tensor.quant, tensor.shape)


def _collect(
    path: Path,
    tensors: Mapping[str, Tensor],
    wanted: Iterable[tuple[str, tuple[int, ...]]],
    names: Mapping[str, str | Rows],
    numbers: Sequence[int] | None = None,
    *,
    transposed: bool | None = False,
    constants: Mapping[str, float | Callable[[tuple[int, ...]], F32]] = MappingProxyType({}),
    computed: Mapping[str, F32] = MappingProxyType({}),
    optional: Mapping[str, float] = MappingProxyType({}),
) -> tuple[dict[str, Tensor], set[str]]:
    """Return the weights, and the tensors that hold them. Ends at the first fault, whatever sizes the spec claims.
    numbers, transposed, constants, computed, optional: see `Family`, where the second is transposed_experts.
    """
    weights, used = {}, set()
    fix = "Use configuration and weights of the same model"
    # Shape of a tensor of several weights, or of an expert's part of it, and the end of the last one's rows.
    fused: dict[tuple[str, int | None], tuple[tuple[int, ...], int]] = {}
    num_experts: dict[str, tuple[tuple[int, ...], int]] = {}  # tensor of experts: its shape, and those wanted
    for name, shape in wanted:
        _, kind, _ = _parts(name)
        if (values := computed.get(name)) is not None:
            weights[name] = float_tensor(values)
            continue
        if (constant := constants.get(kind)) is not None:
            weights[name] = float_tensor(
                constant(shape) if callable(constant) else np.full(shape, constant, np.float32)
            )
            continue
        if not has_source(name, names):
            raise ModelError(f"{path}: such files have no tensor for {name}. Use a directory of safetensors")
        found, rows, expert = source_of(name, names, numbers)
        used.add(found)
        tensor = tensors.get(found)
        if tensor is None and (value := optional.get(kind)) is not None:
            weights[name] = float_tensor(np.full(shape, value, np.float32))
            continue
        if tensor is None:
            raise ModelError(f"{path}: tensor {found} ({name}) is missing. Use a file that holds the whole model")
        whole = tensor.shape
        is_vector = len(shape) == 1  # files may hold one as several rows
        if expert is not None and len(whole) == len(shape) + 1 and expert < whole[0]:
            is_turned = whole[-1] != shape[-1] if transposed is None else transposed
            num_experts[found] = whole, max(expert + 1, num_experts.get(found, (whole, 0))[1])
            tensor = _of_expert(tensor, expert, transposed=is_turned and not is_vector)
        if rows is not None:
            if rows.period is None:
                _, stop = fused.get((found, expert), (whole, 0))
                fused[found, expert] = tensor.shape, max(stop, rows.stop)
            tensor = select_rows(tensor, rows)
        found_shape = (prod(tensor.shape),) if is_vector and len(tensor.shape) > 1 else tensor.shape
        if _longer_than_one(found_shape) != _longer_than_one(shape):
            raise ModelError(f"{path}: tensor {found} ({name}) has shape {whole}, expected {shape}. {fix}")
        if is_vector and tensor.shape != found_shape:
            weights[name] = float_tensor(tensor.dequantize().ravel())
        else:
            weights[name] = Tensor(tensor.stored, tensor.quant, shape)
    for found, (whole, count) in num_experts.items():
        if whole[0] != count:
            raise ModelError(f"{path}: tensor {found} has shape {whole}, expected {(count, *whole[1:])}. {fix}")
    for (found, expert), (whole, stop) in fused.items():
        if prod(whole[:-1] or whole) != stop:
            of_each = "" if expert is None else " for each expert"
            expected = (stop, *whole[1:][-1:])
            raise ModelError(f"{path}: tensor {found} has shape {whole}{of_each}, expected {expected}. {fix}")
    return weights, used


def _parts(name: str) -> tuple[str | None, str, str | None]:
    """Return the layer of a canonical weight, its name in the tables of names, and its expert."""
    layer, experts, e, rest = re.fullmatch(_CANONICAL, name).groups()  # type: ignore[union-attr]
    return layer, f"{experts}.{rest}" if experts else rest, e


def has_source(name: str, names: Mapping[str, str | Rows]) -> bool:
    """Return whether a file may hold a canonical weight. It may not hold those that `Family.computed` makes."""
    return name in names or _parts(name)[1] in names


def source_of(
    name: str, names: Mapping[str, str | Rows], numbers: Sequence[int] | None = None
) -> tuple[str, Rows | None, int | None]:
    """Return (tensor, rows, expert) that hold a canonical weight: ``rows`` of a fused tensor, ``expert`` of a stacked
    tensor. `Family` explains ``numbers``; None: a layer has the same number in a file.
    """
    layer, kind, e = _parts(name)
    source = names[name] if name in names else names[kind]
    rows = source if isinstance(source, Rows) else None
    template = names[rows.name] if rows else source
    assert isinstance(template, str)
    i, part = (int(layer), 0) if layer else (None, None)
    if numbers is not None and i is not None:
        first = numbers.index(numbers[i])
        i, part = numbers[i], i - first
    return template.format(i=i, e=e, part=part), rows, int(e) if e and "{e}" not in template else None


def _of_expert(tensor: Tensor, expert: int, *, transposed: bool) -> Tensor:
    """Return the weight of an expert in the tensor of all [experts, …]. transposed: it is [in, out] there, see
    `_turned`.
    """
    count, shape = prod(tensor.shape[1:-1]), tensor.shape[1:]
    stored = tensor.stored[expert * count : (expert + 1) * count]
    matrix = Tensor(stored, tensor.quant, shape)
    return _turned(matrix) if transposed else matrix


def _turned(matrix: Tensor) -> Tensor:
    """Return a matrix as [out, in]: one of floats is [in, out] in its file, a quantised one is [out, in] already. Of a
    stack of matrices of floats, return each so, those of all one below the other.
    """
    if len(matrix.shape) == 3 and matrix.quant.block_size == 1:
        count, inputs, outputs = matrix.shape
        values = matrix.data.reshape(count, inputs, outputs, -1).swapaxes(1, 2)
        rows = count * outputs
        return Tensor(np.ascontiguousarray(values).reshape(rows, -1), matrix.quant, (rows, inputs))
    if matrix.quant.block_size > 1 or not isinstance(matrix.stored, FileRows):
        return matrix
    shape = matrix.shape[::-1]
    return Tensor(TransposedRows(matrix.stored, matrix.quant.block_bytes, 0, shape[0]), matrix.quant, shape)


def select_rows(tensor: Tensor, rows: Rows) -> Tensor:
    """Return a matrix of these rows, or a vector of these elements.

    It has none if the tensor is not of whole periods.
    """
    size = _num_rows(tensor)
    index = np.arange(size)
    if rows.period is None:
        index = index[rows.start : rows.stop]
    elif size % rows.period:
        index = index[:0]
    else:
        index = index[(index % rows.period >= rows.start) & (index % rows.period < rows.stop)]
    if len(tensor.shape) == 1:
        return float_tensor(tensor.dequantize()[index])
    if rows.period is None:
        stored = tensor.stored[rows.start : rows.stop]
    else:
        stored = tensor.stored[index] if isinstance(tensor.stored, np.ndarray) else OrderedRows(tensor.stored, index)
    return Tensor(stored, tensor.quant, (len(stored), *tensor.shape[-1:]))


def _num_rows(tensor: Tensor) -> int:
    """Return the number of rows of a matrix or of a stack of them, or of elements of a vector."""
    return prod(tensor.shape[:-1] or tensor.shape)


def _longer_than_one(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape without dimensions of size one, which files add or leave out."""
    return tuple(size for size in shape if size != 1)
