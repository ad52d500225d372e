"""A decoder over the rows on a device: the model of a `DeviceExecutor`."""

from __future__ import annotations

import torch
from torch import Tensor

from foreword.device.attention import DeviceAttention
from foreword.device.rows import DeviceRows
from foreword.errors import ConfigError
from foreword.executors.torch.attention import GatheredAttention
from foreword.executors.torch.cache import PagedCache
from foreword.executors.torch.decoder import Attention, Decoder
from foreword.executors.torch.executor import cache_layers
from foreword.executors.torch.options import DType, device_of, dtype_of
from foreword.executors.torch.step import Step
from foreword.executors.torch.weights import Loader
from foreword.models.spec import DecoderSpec, RopeSpec
from foreword.models.weights import Weights

_DOT = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


class DecoderOnRows:
    """Runs ``spec`` with ``weights`` on ``device`` for `foreword.executors.device.DeviceExecutor`.

    The matrices are torch's products. Queries and keys are normed, rotated and written in one launch, and attention
    reads the rows' block tables, so a layer is about nine launches. num_splits: see `DeviceAttention`.

    ConfigError for recurrent layers and M-RoPE, and as `TorchExecutor` for device and dtype.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        weights: Weights,
        *,
        num_blocks: int,
        block_size: int,
        device: str = "cuda",
        dtype: DType = "auto",
        num_splits: int = 1,
    ) -> None:
        if spec.state_size or spec.mrope_dims:
            what = "recurrent layers" if spec.state_size else "M-RoPE"
            raise ConfigError(f"{spec.architecture} has {what}, which steps on a device lack; use executor='torch'")
        load = Loader(weights, device_of(device), dtype_of(dtype, weights))
        self.spec, self.dtype, self.num_splits = spec, load.dtype, num_splits
        self.decoder = Decoder(spec, load)
        layers, _ = cache_layers(spec)
        self.cache = PagedCache(
            layers, num_blocks=num_blocks, block_size=block_size, dtype=load.dtype, device=load.device
        )
        self.unused = GatheredAttention(self.cache)  # of a `Step`: the layers attend over the rows
        self.ropes, self.decoder.rotaries = tuple(self.decoder.rotaries), {}  # the kernel rotates
        self.step: _RowStep | None = None
        for layer in self.decoder.layers:
            assert isinstance(layer.mixer, Attention)
            layer.mixer = _RowAttention(layer.mixer, self)
        self.copy_blocks, self.zero_blocks = self.cache.copy_blocks, self.cache.zero_blocks

    def forward(self, rows: DeviceRows, num_tokens: int, num_reqs: int, num_logits: int) -> Tensor:
        """See `DeviceModel.forward`. Its first call allocates what all steps share."""
        with torch.inference_mode():
            if self.step is None:
                self.step = _RowStep(self, rows)
            self.step.num_reqs, tensors = num_reqs, rows.tensors
            ids, positions = (tensors[name][:num_tokens] for name in ("input_ids", "positions"))
            x = self.decoder.forward(Step(ids, positions, None, self.unused))
            return self.decoder.logits(x[tensors["logits_indices"][:num_logits]]).float()


class _RowStep:
    """What the layers share: tables of rotations, memory for queries and outputs, the padded number of requests."""

    def __init__(self, model: DecoderOnRows, rows: DeviceRows) -> None:
        spec, device, T = model.spec, model.cache.device, rows.max_num_batched_tokens
        self.num_reqs = 0
        # Rows past the step's tokens keep finite numbers of earlier steps.
        self.queries = torch.zeros(T, spec.num_heads, spec.head_dim, dtype=model.dtype, device=device)
        self.out = torch.zeros_like(self.queries)
        at = torch.arange(rows.states.max_model_len, device=device, dtype=torch.float32)[:, None]
        self.rotations: dict[RopeSpec, tuple[Tensor, Tensor]] = {}
        for rope in model.ropes:
            angles = at * torch.tensor(rope.inv_freq, dtype=torch.float32, device=device)
            self.rotations[rope] = angles.cos() * rope.scale, angles.sin() * rope.scale
        self.attention = [
            DeviceAttention(
                rows, heads=spec.num_heads, kv_heads=spec.num_kv_heads, dim=spec.head_dim, group=g,
                num_splits=model.num_splits, dot=_DOT[model.dtype],
            )
            for g in range(len(spec.kv_groups()))
        ]  # fmt: skip


class _RowAttention:
    """The attention block of one layer, for its normed input [T, hidden]."""

    def __init__(self, of: Attention, model: DecoderOnRows) -> None:
        self.model, cache = model, model.cache
        self.inputs, self.output, self.layer, self.spec = of.inputs, of.output, of.layer, of.spec
        self.keys, self.values, self.group = cache.keys[of.index], cache.values[of.index], cache.layers[of.index].group
        self.norms: tuple[Tensor, Tensor] | None = None
        if of.qk_norm is not None:
            self.norms = of.qk_norm[0].contiguous(), of.qk_norm[self.spec.num_heads].contiguous()

    def __call__(self, h: Tensor, step: Step) -> Tensor:
        on, spec, T = self.model.step, self.spec, len(h)
        assert on is not None
        attention, queries, out = on.attention[self.group], on.queries[:T], on.out[:T]
        projected = self.inputs(h)
        attention.write(
            projected, queries, self.keys, self.values, num_tokens=T, norms=self.norms, eps=spec.norm_eps,
            rope=None if self.layer.rope is None else on.rotations[self.layer.rope],
        )  # fmt: skip
        attention.attend(
            queries, self.keys, self.values, out, num_tokens=T, num_reqs=on.num_reqs, scale=spec.query_scale,
            window=self.layer.sliding_window, softcap=spec.attn_softcap or 0.0,
        )  # fmt: skip
        a = out.flatten(1)
        return self.output(a * projected[:, -a.shape[1] :].sigmoid() if spec.attn_gate else a)
