"""Scales that make the keys of a layer lose less in 8 bit."""

from __future__ import annotations

import numpy as np

from foreword.arrays import F32
from foreword.models.spec import DecoderSpec, LayerSpec
from foreword.models.weights import Weights

_FLOOR = 1e-4  # relative to the mean square of a layer: a dimension that the model leaves at zero keeps a finite scale


def key_scales(spec: DecoderSpec, layer: LayerSpec, weights: Weights, prefix: str, norm: str) -> tuple[F32, F32]:
    """Return factors of the queries [num_heads, head_dim] and of the keys [num_kv_heads, head_dim] of an attention
    layer.

    prefix: of the layer that writes the keys.

    norm: the weight of the norm of its input, if the model has such norms.

    A dimension of a key is multiplied by s, the same dimension of its queries by 1 / s, so q · k is unchanged. An 8-bit
    key has one step for all its dimensions, and the error of a score is that step times the length of the query:

        s = sqrt(rms(q) / rms(k))  makes the product of both lengths the least

    The rms of a dimension is estimated from the weights: that of the norm of queries and keys, else of the projection's
    row times the norm of its input, plus the bias. Both dimensions of a rotary pair have the same s, which therefore
    commutes with the rotary embedding.
    """
    num_kv_heads, head_dim, num_heads, _ = spec.heads_of(layer)

    def weight(name: str) -> F32:
        return weights[prefix + name].dequantize()

    def squares_of(name: str) -> F32:
        if spec.qk_norm:
            of = spec.qk_layer_norm
            squares = np.square(weight(name + "_norm"))
            if of is not None and of.has_bias:
                squares = squares + np.square(weight(name + "_norm_bias"))
            has_all = spec.joint_qk_norm or (of is not None and of.of_heads)
            return squares.ravel() if has_all else np.tile(squares, num_kv_heads)
        if spec.qk_scales:  # the keys are unit vectors: their factors are the queries' too
            own = np.square(weight("q_norm") * weight("k_norm"))
            return np.tile(own if name == "q" else np.ones_like(own), num_kv_heads)
        of_inputs = np.ones(spec.hidden_size, np.float32)
        if spec.norms_of(layer).before_mixer:
            of_inputs = np.square(weights[norm].dequantize())
        of_rows: F32 = np.square(weight(name)) @ of_inputs
        return of_rows + np.square(weight(name + "_bias")) if spec.qkv_bias else of_rows

    squares: dict[str, F32] = {}
    for name in ("q", "k"):
        mean: F32 = squares_of(name).reshape(num_kv_heads, -1, head_dim).mean(1)
        pairs = len(layer.rope.inv_freq) if layer.rope is not None else 0
        of_pair = (mean[:, :pairs] + mean[:, pairs : 2 * pairs]) / 2
        mean = np.concatenate([of_pair, of_pair, mean[:, 2 * pairs :]], axis=1)
        floor = max(_FLOOR * float(mean.mean()), float(np.finfo(np.float32).tiny))
        squares[name] = mean.clip(min=np.float32(floor))
    scales = np.sqrt(np.sqrt(squares["q"] / squares["k"])).astype(np.float32)
    return np.repeat(1 / scales, num_heads // num_kv_heads, axis=0), scales
