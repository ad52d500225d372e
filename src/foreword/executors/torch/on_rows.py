"""A decoder over the rows on a device: the model of a `DeviceExecutor`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, rms_norm

from foreword.arrays import I32
from foreword.batch import PaddingBuckets
from foreword.device.adapters import DeviceAdapters
from foreword.device.api import DeviceApi
from foreword.device.attention import DeviceAttention, LayerCache
from foreword.device.cuda import CudaDevice
from foreword.device.interpreter import InterpretedDevice
from foreword.device.rows import DeviceRows
from foreword.errors import ConfigError
from foreword.executors.device import IN_ROWS, DeviceExecutor, DeviceInputs
from foreword.executors.option_types import DeviceKeywords
from foreword.executors.options import DeviceOptions
from foreword.executors.torch.cache import PagedCache
from foreword.executors.torch.decoder import AttentionWeights, Decoder, LatentWeights, Mixer
from foreword.executors.torch.executor import cache_layers
from foreword.executors.torch.grouped import waits_for_host
from foreword.executors.torch.kernel_attention import dot_type
from foreword.executors.torch.loras import Loras, Parts, changed_by_expert, changed_by_head
from foreword.executors.torch.options import device_of, dtype_of
from foreword.executors.torch.step import Step, growth_factors, query_growths
from foreword.executors.torch.tensors import as_tensor
from foreword.executors.torch.weights import Loader
from foreword.models.spec import DecoderSpec, QueryGrowth, RopeSpec
from foreword.models.weights import Weights


def device_executor(
    spec: DecoderSpec,
    weights: Weights,
    *,
    num_blocks: int,
    block_size: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    **options: Unpack[DeviceKeywords],
) -> DeviceExecutor:
    """Return an executor of this decoder.

    options: see `DeviceOptions`. Raise ConfigError as `CudaDevice` and `DecoderOnRows`, and for graphs of larger steps
    than there are, or of a model that cannot be captured.
    """
    own = DeviceOptions(**options)
    api: DeviceApi = InterpretedDevice() if own.device == "cpu" else CudaDevice(own.device)
    model = DecoderOnRows(spec, weights, num_blocks=num_blocks, block_size=block_size, **options)
    most = own.max_graph_tokens
    if most is None:
        may_capture = own.device != "cpu" and model.may_be_captured
        most = min(max_num_seqs, max_num_batched_tokens) if may_capture else 0
    elif most > max_num_batched_tokens:
        raise ConfigError(
            f"max_graph_tokens={most}: a step has at most max_num_batched_tokens={max_num_batched_tokens} tokens; use "
            "at most that"
        )
    elif most and not model.may_be_captured:
        raise ConfigError(
            f"max_graph_tokens={most}: the product of experts in {model.dtype} waits for the host on this GPU, which a "
            "graph cannot; leave it out"
        )
    buckets = PaddingBuckets.up_to(most, max_num_reqs=max_num_seqs) if most else None
    return DeviceExecutor(model, api, buckets=buckets, token_table=own.token_table)


class DecoderOnRows:
    """Runs ``spec`` with ``weights`` on ``device`` for `foreword.executors.device.DeviceExecutor`.

    The matrices are torch's products. Queries and keys are normed, rotated and written in one launch, and attention
    reads the rows' block tables, so a layer is about nine launches; a product with adapters is two more.
    options: see `DeviceOptions`; those of graphs and rows concern the executor. may_be_captured: whether no operator of
    a step waits for the device.

    Raise ConfigError for recurrent layers, and as `TorchExecutor` for device and weight_format.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        weights: Weights,
        *,
        num_blocks: int,
        block_size: int,
        **options: Unpack[DeviceKeywords],
    ) -> None:
        own = DeviceOptions(**options)
        if spec.num_state_slots:
            raise ConfigError(
                f"{spec.architecture} has recurrent layers, which steps on a device lack; use executor='torch'"
            )
        if (
            spec.per_layer
            or spec.value_dim
            or any(layer.heads or layer.reads_layer is not None or layer.unit_v for layer in spec.layers)
        ):
            raise ConfigError(
                f"{spec.architecture} has layers that read others' keys or whose heads differ, which steps on a device "
                "lack; use executor='torch'"
            )
        if spec.slopes or spec.clip_qkv is not None:
            raise ConfigError(
                f"{spec.architecture} has slopes of scores (ALiBi) or a limit of queries, keys and values, which steps "
                "on a device lack; use executor='torch'"
            )
        if spec.indexer is not None:
            raise ConfigError(
                f"{spec.architecture} has indexers that choose keys, which steps on a device lack; use executor='torch'"
            )
        dtype = dtype_of(own.dtype, weights)
        load = Loader(weights, device_of(own.device), dtype, weight_format=own.weight_format)
        self.spec, self.dtype, self.device, self.num_splits = spec, load.dtype, load.device, own.num_splits
        self.hidden_size, self.mrope_dims = spec.hidden_size, spec.mrope_dims
        self.decoder = Decoder(spec, load, _row_mixer)
        layers, _ = cache_layers(spec)
        self.cache = PagedCache(
            layers,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=torch.float8_e4m3fn if own.kv_format == "fp8" else load.dtype,
            device=load.device,
        )
        self.adapters = Loras(self.decoder.products, load.device, load.dtype)
        has_experts = any(layer.experts is not None for layer in spec.layers)
        self.may_be_captured = not (has_experts and waits_for_host(load.device, load.dtype))
        self._memory: _RowMemory | None = None

    def forward(
        self, rows: DeviceRows, num_tokens: int, num_reqs: int, num_logits: int, inputs: DeviceInputs = IN_ROWS
    ) -> Tensor:
        """See `DeviceModel.forward`. Its first call allocates what all steps share."""
        with torch.inference_mode():
            if self._memory is None:
                self._memory = _RowMemory(self, rows)
            step = self._memory.step(num_tokens, num_reqs, inputs)
            x = self.decoder.forward(step)
            at = rows.tensors["logits_indices"][:num_logits]
            if inputs.more_logits is not None:
                at = torch.cat((at, as_tensor(inputs.more_logits, self.device)))
            return self.decoder.logits(x, at, step.loras).float()

    def copy_blocks(self, sources: I32, destinations: I32) -> None:
        """See `BlockStore.copy_blocks`."""
        self.cache.copy_blocks(sources, destinations)

    def zero_blocks(self, blocks: I32) -> None:
        """See `BlockStore.zero_blocks`."""
        self.cache.zero_blocks(blocks)


@dataclass(frozen=True, slots=True)
class _RowStep(Step):
    """A step over the rows. num_reqs: padded.

    growths: see `PagedStep`. rotations: of each rope, cos and sin [N, pairs], and which of their rows belongs to each
    token: None, its position.
    """

    memory: _RowMemory
    num_reqs: int
    rotations: Mapping[RopeSpec, tuple[tuple[Tensor, Tensor], Tensor | None]]
    growths: Mapping[QueryGrowth, Tensor]


class _RowMemory:
    """The memory that all steps share: tables of rotations, memory for queries and outputs, the launches of attention.

    layers: for each layer of the cache, its launches and its keys and values.
    """

    def __init__(self, model: DecoderOnRows, rows: DeviceRows) -> None:
        spec, device, cache, T = model.spec, model.device, model.cache, rows.max_num_batched_tokens
        self._rows, self._adapters, self._mrope_dims = rows, model.adapters, spec.mrope_dims
        # Rows past the step's tokens keep finite numbers of earlier steps.
        self.queries = torch.zeros(T, spec.num_heads, spec.head_dim, dtype=model.dtype, device=device)
        self.out = torch.zeros_like(self.queries)
        ropes = {layer.rope for layer in spec.layers if layer.rope is not None}
        self._frequencies = {rope: torch.tensor(rope.inv_freq, dtype=torch.float32, device=device) for rope in ropes}
        self._axes = {rope: torch.tensor(rope.axes, device=device) for rope in ropes if rope.axes}
        at = torch.arange(rows.states.max_model_len, device=device)[:, None]
        self._rotations = {rope: (self._rotation(rope, at), None) for rope in ropes if not rope.axes}
        self._growths = query_growths(spec)
        self._tokens = torch.arange(T, device=device)
        dot = dot_type(model.dtype, device)
        attention = [
            DeviceAttention(
                rows, heads=spec.num_heads, kv_heads=spec.num_kv_heads, dim=spec.head_dim, group=g,
                num_splits=model.num_splits, dot=dot,
            )
            for g in range(len(spec.kv_groups()))
        ]  # fmt: skip
        unscaled: Sequence[tuple[Tensor, Tensor] | None] = [None] * len(cache.layers)
        scales = cache.scales or unscaled
        self.layers = [
            (attention[layer.group], LayerCache(*tensors))
            for layer, *tensors in zip(cache.layers, cache.keys, cache.values, scales, strict=True)
        ]

    def step(self, num_tokens: int, num_reqs: int, inputs: DeviceInputs) -> _RowStep:
        """Begin a step of these padded sizes."""
        (embeds, mrope), tensors, device = inputs.given, self._rows.tensors, self.queries.device
        rotations: Mapping[RopeSpec, tuple[tuple[Tensor, Tensor], Tensor | None]] = self._rotations
        if self._axes:
            positions = tensors["rope_positions"][:num_tokens].expand(self._mrope_dims, -1)
            if mrope is not None:
                positions = positions.clone()
                positions[:, : mrope.shape[1]] = as_tensor(mrope, device)
            rotations = {
                **rotations,
                **{rope: (self._rotation(rope, positions[axes].T.contiguous()), self._tokens)
                   for rope, axes in self._axes.items()},
            }  # fmt: skip
        at = tensors["positions"][:num_tokens]
        return _RowStep(
            tensors["input_ids"][:num_tokens],
            at,
            None if embeds is None else (as_tensor(embeds[0], device), as_tensor(embeds[1], device)),
            _RowLoras(self._adapters, self._rows, num_tokens) if inputs.has_adapters else None,
            self,
            num_reqs,
            rotations,
            {growth: growth_factors(growth, at, self.queries.dtype) for growth in self._growths},
        )

    def _rotation(self, rope: RopeSpec, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin [N, pairs] of positions [N, 1], or [N, pairs] with M-RoPE."""
        angles = positions.float() * self._frequencies[rope]
        return angles.cos() * rope.scale, angles.sin() * rope.scale


class _RowLoras:
    """The adapters of a step, by the rows' own numbers of them."""

    def __init__(self, loras: Loras, rows: DeviceRows, num_tokens: int) -> None:
        numbers = rows.tensors["lora_tokens"][:num_tokens]
        self._factors = loras.factors
        self._adapters = torch.where(numbers > 0, torch.searchsorted(loras.ids, numbers).int(), -1)
        most = max(own.rank for own in loras.factors.values())
        self._launches = DeviceAdapters(rows, torch.empty(num_tokens, most, device=numbers.device))

    def apply(self, out: Tensor, x: Tensor, parts: Parts) -> Tensor:
        """See `ProductChanges.apply`."""
        own = self._factors.get(parts)
        if own is not None and own.rank:
            self._launches.apply(out, x, own.a, own.b, self._adapters)
        return out

    def apply_by_expert(self, out: Tensor, x: Tensor, parts: Parts, experts: Tensor, tokens: Tensor) -> Tensor:
        """See `ProductChanges.apply_by_expert`."""
        return changed_by_expert(self._factors.get(parts), self._adapters[tokens], out, x, experts)

    def apply_by_head(self, out: Tensor, x: Tensor, part: str, *, is_turned: bool) -> Tensor:
        """See `ProductChanges.apply_by_head`."""
        return changed_by_head(self._factors.get((part,)), self._adapters, out, x, is_turned=is_turned)


class _RowLayer(AttentionWeights):
    """Attention of one layer over the rows, for its normed input [T, hidden]."""

    def __call__(self, h: Tensor, step: _RowStep) -> Tensor:
        memory, spec, T = step.memory, self.spec, len(h)
        attention, cache = memory.layers[self.index]
        queries, out = memory.queries[:T], memory.out[:T]
        projected = self.inputs(h, step.loras)
        norms = self.norms
        if norms is not None and (spec.joint_qk_norm or spec.qk_layer_norm):  # the kernel has RMSNorm of each head
            for i, (part, weight) in enumerate(zip(projected.tensor_split(self.ends, dim=1), norms, strict=False)):
                part.copy_(self._normed(part, weight, i))
            norms = None
        rope, rope_rows = (None, None) if self.layer.rope is None else step.rotations[self.layer.rope]
        attention.write(
            projected, queries, cache, num_tokens=T, norms=norms, eps=self.qk_eps, rope=rope,
            rope_rows=rope_rows,
        )  # fmt: skip
        if self.query_scales is not None:
            queries = queries * self.query_scales
        if self.layer.query_growth is not None:
            queries = queries * step.growths[self.layer.query_growth]
        attention.attend(
            queries, cache, out, num_tokens=T, num_reqs=step.num_reqs, scale=spec.query_scale,
            window=self.layer.sliding_window, chunked=self.layer.chunked,
            softcap=spec.attn_softcap or 0.0, sinks=self.sinks,
        )  # fmt: skip
        return self.output(self.gated(out, projected[:, self.ends[-1] :]), step.loras)

    def _normed(self, part: Tensor, weight: Tensor, nth: int) -> Tensor:
        """Return queries, 0, or keys, 1, of all heads [T, heads · head_dim] after their norm."""
        if self.spec.qk_layer_norm is None:
            return rms_norm(part, weight.shape, weight, self.qk_eps)
        dim = self.heads.head_dim
        of_heads = layer_norm(part.unflatten(1, (-1, dim)), (dim,), None, None, self.qk_eps) * weight
        return (of_heads if self.norm_biases is None else of_heads + self.norm_biases[nth]).flatten(1)


class _RowLatentLayer(LatentWeights):
    """Latent attention of one layer over the rows, for its normed input [T, hidden]."""

    def __call__(self, h: Tensor, step: _RowStep) -> Tensor:
        memory, T = step.memory, len(h)
        attention, cache = memory.layers[self.index]
        queries, out = memory.queries[:T], memory.out[:T]
        rope, rope_rows = (None, None) if self.rope is None else step.rotations[self.rope]
        qk, gates, _ = self.heads(h, step.loras)
        attention.write(
            qk.flatten(1), queries, cache, num_tokens=T, rope=rope, rope_rows=rope_rows, values_are_keys=True
        )
        attention.attend(queries, cache, out, num_tokens=T, num_reqs=step.num_reqs, scale=self.scale)
        return self.output(out, gates, step.loras)


def _row_mixer(spec: DecoderSpec, index: int, load: Loader) -> Mixer[_RowStep]:
    if spec.mla is not None:
        return _RowLatentLayer(spec, spec.mla, index, load)
    return _RowLayer(spec, index, load)
