"""The reference executor of encoders in float32 NumPy, text by text. Tests compare the native one with it."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from foreword.arrays import F32, I32, I64, Ints
from foreword.batch import InputBatch
from foreword.executors.executor import AdapterStore, Capability
from foreword.executors.functions import ACTIVATIONS, FloatWeights, LoraTokens, layer_norm, product, rms_norm, softmax
from foreword.executors.host import AdaptedExecutor
from foreword.executors.inputs import check_whole
from foreword.executors.numpy import NumpyAdapters, rotate
from foreword.executors.pooling import Pooler
from foreword.models.encoder_spec import EncoderLayerSpec, EncoderSpec, relative_bucket
from foreword.models.pooling import PoolingSpec
from foreword.models.weights import Weights

QUERIES_AT_ONCE = 512
"""The rows of a text at a time, so that its scores do not take memory for all pairs of tokens."""


class EncoderLayers:
    """The layers of an encoder. weight: the weights by their canonical names."""

    def __init__(self, spec: EncoderSpec, weight: FloatWeights) -> None:
        self.spec, self.weight = spec, weight

    def run(self, x: F32, positions: I64, starts: Ints, groups: Ints | None = None, loras: LoraTokens = ()) -> F32:
        """Return the hidden states [T, hidden] of texts, or of images.

        x: [T, hidden]. positions: [T], from 0 in each text; or [T, axes]. starts: [B + 1], the first row of each, and
        T. groups: the same of the groups that windowed layers see; None: they see all. loras: the adapters of the rows.
        """
        spec, act = self.spec, ACTIVATIONS[self.spec.activation]
        for i, layer in enumerate(spec.layers):
            p = f"layers.{i}."
            h = self.norm(x, p + "attn_norm") if spec.norms_before and layer.has_attn_norm else x
            seen = groups if layer.is_windowed and groups is not None else starts
            a = self.linear(self.attention(h, p, layer, positions, seen, loras), p + "o", loras)
            x = x + self.normed(a, p + "post_attn_norm")
            if not spec.norms_before:
                x = self.norm(x, p + "attn_norm")
            h = self.norm(x, p + "mlp_norm") if spec.norms_before else x
            up = self.linear(h, p + "up", loras)
            inner = act(self.linear(h, p + "gate", loras)) * up if spec.gated else act(up)
            x = x + self.normed(self.linear(inner, p + "down", loras), p + "post_mlp_norm")
            if not spec.norms_before:
                x = self.norm(x, p + "mlp_norm")
        return self.norm(x, "final_norm") if spec.norms_before and spec.has_final_norm else x

    def linear(self, h: F32, name: str, loras: LoraTokens) -> F32:
        """Return `product`, plus the bias if the model has one, or between the bounds of the product."""
        if self.spec.bounded:
            least, most, least_out, most_out = self.weight(name + "_bounds")
            return clipped(product(clipped(h, least, most), name, self.weight, loras), least_out, most_out)
        out = product(h, name, self.weight, loras)
        return out + self.weight(name + "_bias") if self.spec.biases else out

    def normed(self, out: F32, name: str) -> F32:
        """Return the output of a branch after its norm, if the model has such norms."""
        return self.norm(out, name) if self.spec.post_norms else out

    def norm(self, x: F32, name: str) -> F32:
        """Apply the norm ``name``."""
        if self.spec.rms_norm:
            return rms_norm(x, self.spec.norm_eps) * self.weight(name)
        bias = self.weight(name + "_bias") if self.spec.biases else None
        return layer_norm(x, self.weight(name), bias, self.spec.norm_eps)

    def attention(
        self, h: F32, p: str, layer: EncoderLayerSpec, positions: I64, starts: Ints, loras: LoraTokens
    ) -> F32:
        """Let each text attend to itself. Return [T, heads * head_dim]."""
        spec = self.spec
        q, k, v = (self.linear(h, p + name, loras).reshape(len(h), -1, spec.head_dim) for name in "qkv")
        if spec.qk_norm:
            q, k = self.norm(q, p + "q_norm"), self.norm(k, p + "k_norm")
        if spec.unit_v:
            v = rms_norm(v, spec.norm_eps)
        if layer.rope is not None:
            at = positions[:, list(layer.rope.axes)] if layer.rope.axes else positions[:, None]
            q, k = rotate(q, at, layer.rope), rotate(k, at, layer.rope)
        k, v = (np.repeat(one, spec.num_heads // spec.kv_heads, 1) for one in (k, v))
        out = np.empty_like(q)
        for start, end in pairwise(np.asarray(starts).tolist()):
            for first in range(start, end, QUERIES_AT_ONCE):
                last = min(first + QUERIES_AT_ONCE, end)
                scores = np.einsum("qhd,khd->hqk", q[first:last], k[start:end], optimize=True)
                scores = scores * np.float32(spec.query_scale)
                if spec.relative_buckets:
                    distances = np.arange(start, end) - np.arange(first, last)[:, None]
                    buckets = relative_bucket(distances, spec.relative_buckets)
                    scores = scores + self.weight("relative")[buckets].transpose(2, 0, 1)
                if layer.window is not None:
                    distance = np.abs(np.arange(first, last)[:, None] - np.arange(start, end))
                    scores = np.where(distance <= layer.window, scores, np.float32(-np.inf))
                out[first:last] = np.einsum("hqk,khd->qhd", softmax(scores), v[start:end], optimize=True)
        return out.reshape(len(h), -1)


def clipped(x: F32, least: F32, most: F32) -> F32:
    """Return the numbers between the bounds."""
    return np.minimum(np.maximum(x, least), most)


class EncoderExecutor(AdaptedExecutor):
    """Runs ``spec`` over whole texts and pools. It keeps nothing between steps: its KV blocks have no memory."""

    capabilities = frozenset({Capability.LORA, Capability.POOLING})
    reads_gathered_tables = False

    def __init__(self, spec: EncoderSpec, weights: Weights, pooling: PoolingSpec) -> None:
        super().__init__(pooler=Pooler(pooling, weights))
        self.spec, self.weight = spec, FloatWeights(weights)
        self.arithmetic = EncoderLayers(spec, self.weight)
        self._float_adapters = NumpyAdapters()
        self.adapters: AdapterStore = self._float_adapters
        self._last: F32 = np.zeros((0, spec.hidden_size), np.float32)

    def compute(self, batch: InputBatch, logits_indices: I64) -> F32:
        """Compute the hidden states of the batch. There are no logits.

        Raise PlanError for a part of a text: every token sees the whole of it.
        """
        check_whole(batch)
        self._last = self.encode(batch)
        return np.zeros((0, self.spec.vocab_size), np.float32)

    def hidden_states(self, tokens: I64) -> F32:
        return self._last[tokens]

    def copy_blocks(self, sources: I32, destinations: I32) -> None:
        """Do nothing, because blocks have no memory."""

    def encode(self, batch: InputBatch) -> F32:
        """Return the hidden states [T, hidden] of the batch."""
        spec, T = self.spec, batch.num_tokens
        positions = batch.positions[:T]
        x = self.weight("embed")[batch.input_ids[:T]]
        if spec.num_positions:
            x = x + self.weight("positions")[positions]
        if spec.num_token_types:
            types = self.token_types(batch)
            x = x + self.weight("token_types")[0 if types is None else types]
        starts = batch.query_start_loc[: batch.num_reqs + 1]
        loras = self._float_adapters.of_step(batch)
        return self.arithmetic.run(self.arithmetic.norm(x, "embed_norm"), positions, starts, loras=loras)

    def token_types(self, batch: InputBatch) -> I32 | None:
        """Return 1 for the tokens of the second of two texts, else 0, int32 [T]; None if all are 0."""
        if self.spec.num_token_types < 2:
            return None
        params = batch.states.extras.pooling_params
        firsts = [params[row].first_text_len for row in batch.idx_mapping.tolist()]
        if all(first is None for first in firsts):
            return None
        ends = np.array([np.iinfo(np.int32).max if first is None else first for first in firsts], np.int64)
        return (batch.positions[: batch.num_tokens] >= ends[batch.req_indices]).astype(np.int32)
