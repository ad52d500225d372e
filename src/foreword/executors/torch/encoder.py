"""The torch executor of encoders: texts of different lengths without padding, except in attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Unpack

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding, layer_norm, scaled_dot_product_attention

from foreword.arrays import F32
from foreword.batch import InputBatch
from foreword.executors.encoder import EncoderExecutor
from foreword.executors.option_types import TorchKeywords
from foreword.executors.options import TorchOptions
from foreword.executors.torch.activations import ACTIVATIONS
from foreword.executors.torch.loras import Loras, StepLoras
from foreword.executors.torch.options import device_of, dtype_of, use_threads
from foreword.executors.torch.rotation import Rotaries, Rotation
from foreword.executors.torch.tensors import as_floats, as_tensor
from foreword.executors.torch.weights import Linear, Loader
from foreword.models.encoder_spec import EncoderSpec, by_distance
from foreword.models.pooling import PoolingSpec
from foreword.models.spec import RopeSpec
from foreword.models.weights import Weights

Rotations = Mapping[RopeSpec, Rotation]


class TorchEncoderExecutor(EncoderExecutor):
    """Runs ``spec`` with ``weights``. Options and errors are those of `TorchExecutor`."""

    def __init__(
        self, spec: EncoderSpec, weights: Weights, pooling: PoolingSpec, **options: Unpack[TorchKeywords]
    ) -> None:
        own = TorchOptions(**options).of_encoder()
        use_threads(own.num_threads)
        super().__init__(spec, weights, pooling)
        dtype = dtype_of(own.dtype, weights)
        load = Loader(weights, device_of(own.device), dtype, weight_format=own.weight_format)
        self.device = load.device
        self.embed = load("embed")
        self.positions = load("positions") if spec.num_positions else None
        self.types = load("token_types") if spec.num_token_types else None
        self.embed_norm = LayerNorm("embed_norm", spec, load)
        self.rotaries = Rotaries(
            {layer.rope: spec.head_dim for layer in spec.layers if layer.rope is not None}, load.device
        )
        self.biases = None
        if spec.relative_buckets:
            self.biases = as_tensor(by_distance(spec, weights["relative"].dequantize()), load.device).to(dtype)
        self.layers = [EncoderLayer(spec, i, load) for i in range(spec.num_layers)]
        self.final_norm = LayerNorm("final_norm", spec, load) if spec.norms_before else None
        products = [product for layer in self.layers for product in layer.products]
        self.adapters = self.loras = Loras(products, load.device, load.dtype)

    def encode(self, batch: InputBatch) -> F32:
        """Return the hidden states [T, hidden]."""
        with torch.inference_mode():
            return as_floats(self._hidden_states(batch))

    def _hidden_states(self, batch: InputBatch) -> Tensor:
        T = batch.num_tokens
        positions = as_tensor(batch.positions[:T], self.device)
        x = embedding(as_tensor(batch.input_ids[:T], self.device), self.embed)
        if self.positions is not None:
            x = x + embedding(positions, self.positions)
        if self.types is not None:
            types = self.token_types(batch)
            x = x + (self.types[0] if types is None else embedding(as_tensor(types, self.device), self.types))
        x = self.embed_norm(x)
        rotations = self.rotaries.at(positions, x.dtype)
        texts, loras = texts_of(batch, self.device, self.biases), self.loras.of_step(batch)
        for layer in self.layers:
            x = layer(x, rotations, texts, loras)
        return x if self.final_norm is None else self.final_norm(x)


class LayerNorm:
    """The layer norm ``name``."""

    def __init__(self, name: str, spec: EncoderSpec, load: Loader) -> None:
        self.weight, self.eps = load(name), spec.norm_eps
        self.bias = load(name + "_bias") if spec.biases else None

    def __call__(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class EncoderLayer:
    """One layer of an encoder."""

    def __init__(self, spec: EncoderSpec, index: int, load: Loader) -> None:
        self.spec, self.layer, prefix = spec, spec.layers[index], f"layers.{index}."

        def product(*names: str) -> Linear:
            return load.linear(prefix, names, biases=names if spec.biases else ())

        self.attn_norm = LayerNorm(prefix + "attn_norm", spec, load) if self.layer.has_attn_norm else None
        self.qkv, self.output = product("q", "k", "v"), product("o")
        self.mlp_norm = LayerNorm(prefix + "mlp_norm", spec, load)
        self.up, self.down = product(*(("gate", "up") if spec.gated else ("up",))), product("down")
        self.products = self.qkv, self.output, self.up, self.down

    def __call__(self, x: Tensor, rotations: Rotations, texts: list[Texts], loras: StepLoras | None) -> Tensor:
        if self.spec.norms_before:
            x = x + self.attention(self.attn_norm(x) if self.attn_norm else x, rotations, texts, loras)
            return x + self.mlp(self.mlp_norm(x), loras)
        assert self.attn_norm is not None
        x = self.attn_norm(x + self.attention(x, rotations, texts, loras))
        return self.mlp_norm(x + self.mlp(x, loras))

    def attention(self, h: Tensor, rotations: Rotations, texts: list[Texts], loras: StepLoras | None) -> Tensor:
        """Let each text attend to itself. Return [T, hidden]."""
        spec, heads = self.spec, self.spec.num_heads
        qk, v = self.qkv(h, loras).unflatten(1, (3 * heads, spec.head_dim)).split((2 * heads, heads), dim=1)
        if self.layer.rope is not None:
            qk = rotations[self.layer.rope](qk)
        out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        for own in texts:
            q, k, values = (x[own.tokens].transpose(1, 2) for x in (qk[:, :heads], qk[:, heads:], v))
            mask = own.mask(self.layer.window)
            a = scaled_dot_product_attention(q, k, values, attn_mask=mask, scale=spec.query_scale)
            out[own.tokens[own.is_token]] = a.transpose(1, 2)[own.is_token]
        return self.output(out.flatten(1), loras)

    def mlp(self, h: Tensor, loras: StepLoras | None) -> Tensor:
        """Return act(h Wup) Wdown, or with ``gated`` (act(h Wgate) * (h Wup)) Wdown."""
        act, up = ACTIVATIONS[self.spec.activation], self.up(h, loras)
        if not self.spec.gated:
            return self.down(act(up), loras)
        gate, up = up.chunk(2, dim=1)
        return self.down(act(gate) * up, loras)


@dataclass(frozen=True, slots=True)
class Texts:
    """Texts of a step of more than half as many tokens as the longest of them, padded to it.

    tokens: int64 [texts, longest], of the step; is_token: bool of the same shape, False for padding. biases: what is
    added to scores, [heads, longest, longest]; None: nothing.
    """

    tokens: Tensor
    is_token: Tensor
    biases: Tensor | None

    def mask(self, window: int | None) -> Tensor:
        """Return which keys a query sees: [texts, 1, longest, longest], or [texts, 1, 1, longest] without a window;
        with biases what is added to scores, [texts, heads, longest, longest], −∞ for other keys.
        """
        mask = self.is_token[:, None, None]
        if window is not None:
            at = torch.arange(self.tokens.shape[1], device=mask.device)
            mask = mask & ((at[:, None] - at).abs() <= window)
        return mask if self.biases is None else torch.where(mask, self.biases, -torch.inf)


def texts_of(batch: InputBatch, device: torch.device, biases: Tensor | None) -> list[Texts]:
    """Return the texts of a step, by the power of two that holds their length. biases: see `by_distance`."""
    lengths = batch.num_scheduled_tokens
    power = np.ceil(np.log2(lengths))
    found = []
    for own in (np.flatnonzero(power == p) for p in np.unique(power)):
        at = np.arange(lengths[own].max())
        is_token = at < lengths[own, None]
        tokens = batch.query_start_loc[own, None] + np.where(is_token, at, 0)
        of_pairs = None
        if biases is not None:
            distances = as_tensor(at - at[:, None], device)
            of_pairs = biases[:, biases.shape[1] // 2 + distances]
        found.append(Texts(as_tensor(tokens, device), as_tensor(is_token, device), of_pairs))
    return found
