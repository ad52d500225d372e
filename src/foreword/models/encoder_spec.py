"""An encoder architecture as data: BERT, RoBERTa, ModernBERT and their like. `foreword.models.spec` has the decoders.

An executor reads an `EncoderSpec` and a `Weights` mapping with the canonical names of `encoder_weight_names`. With
``x`` [T, hidden], ``norm`` a layer norm, and a bias of every W if ``biases``, it computes:

    x = norm(embed[input_ids] + positions[p] + token_types[type], embed_norm)          p from 0 in each text
                                                                                       or given rows: vocab_size 0
    h = norm(x, attn_norm) if norms_before and the layer has that norm, else x
    q, k, v = h Wq, h Wk, h Wv                                                         of num_kv_heads: k and v
    q, k = norm(q, q_norm), norm(k, k_norm) if qk_norm;   v = unit(v) if unit_v        of each head
    a = softmax(rope(q) · rope(k) * query_scale + mask) v Wo
    x = x + a if norms_before, else norm(x + a, attn_norm)
    h = norm(x, mlp_norm) if norms_before, else x
    m = act(h Wup) Wdown, or with ``gated`` (act(h Wgate) * (h Wup)) Wdown
    x = x + m if norms_before, else norm(x + m, mlp_norm)
    x = norm(x, final_norm) if norms_before, after the last layer

With post_norms, norm(a, post_attn_norm) and norm(m, post_mlp_norm) stand in the place of a and m; unit is the norm
without a weight. With ``bounded``, a product h W is clip(clip(h, b0, b1) W, b2, b3), with the numbers b of W_bounds.

mask: a token sees every token of its text, or with a window w those at a distance of at most w. With
relative_buckets, a score of head n also has relative[bucket(key − query), n]: see `relative_bucket`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from foreword.arrays import F32, I64
from foreword.models.spec import Activation, RopeSpec

EncoderActivation = Activation | Literal["quick_gelu"]
"""The function of an MLP. quick_gelu is x sigmoid(1.702 x)."""


@dataclass(frozen=True, slots=True)
class EncoderLayerSpec:
    """The part of a specification that differs between layers. window: the largest distance that a token sees; None:
    all of its text.

    is_windowed: it sees the rows of its group alone, where the input has groups (windows of the patches of an image).
    has_attn_norm: whether a norm comes before its attention; always true if norms come after.
    """

    rope: RopeSpec | None = None
    window: int | None = None
    has_attn_norm: bool = True
    is_windowed: bool = False


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """An encoder-only transformer; the module docstring gives the arithmetic.

    vocab_size: 0 for an encoder of rows that are given, such as the patches of an image: it has no embedding.
    has_final_norm, post_norms: if norms_before. rms_norm: norms are x / sqrt(mean(x²) + norm_eps) * w, without a bias.
    qk_norm, unit_v, post_norms: with rms_norm. num_kv_heads: 0 for as many as num_heads. scale: of scores; None: one by
    the root of head_dim. bounded: only with ``gated``, and without biases.
    num_positions, num_token_types: rows of the learned tables; 0 for a model without. first_position: as many rows
    before those of positions belong to padding in files. biases: of all products and norms. relative_buckets: rows of a
    table of distances, all layers have the same; 0 without. max_model_len: the longest text.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    head_dim: int
    max_model_len: int
    layers: tuple[EncoderLayerSpec, ...]
    norm_eps: float
    activation: EncoderActivation = "gelu"
    num_positions: int = 0
    first_position: int = 0
    num_token_types: int = 0
    norms_before: bool = False
    gated: bool = False
    biases: bool = True
    rms_norm: bool = False
    has_final_norm: bool = True
    relative_buckets: int = 0
    num_kv_heads: int = 0
    scale: float | None = None
    qk_norm: bool = False
    unit_v: bool = False
    post_norms: bool = False
    bounded: bool = False

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def query_scale(self) -> float:
        return float(self.head_dim**-0.5) if self.scale is None else self.scale

    @property
    def kv_heads(self) -> int:
        """The number of heads of keys and of values."""
        return self.num_kv_heads or self.num_heads


def relative_bucket(distances: I64, buckets: int) -> I64:
    """Return the bucket of each distance of a key from its query: half of them for later keys. Of each half, the first
    half has a bucket for each distance, and the others grow by a factor up to that of 128.
    """
    half, size = buckets // 2, np.abs(distances)
    exact = half // 2
    ratio = np.maximum(size, 1).astype(np.float32) / np.float32(exact)
    large = exact + (np.log(ratio) / np.float32(np.log(128 / exact)) * np.float32(half - exact)).astype(np.int64)
    return (distances > 0) * half + np.where(size < exact, size, np.minimum(large, half - 1))


def by_distance(spec: EncoderSpec, relative: F32) -> F32:
    """Return what is added to the scores of each head, [num_heads, 2 L − 1], by the distance of a key from its query,
    from 1 − L on, with L = max_model_len. relative: the weight of that name.
    """
    distances = np.arange(1 - spec.max_model_len, spec.max_model_len)
    return relative[relative_bucket(distances, spec.relative_buckets)].T


def encoder_weight_names(spec: EncoderSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield every canonical weight name with its shape, [out, in] for matrices, in execution order."""
    d, heads, inner = spec.hidden_size, spec.num_heads * spec.head_dim, spec.intermediate_size
    keys = spec.kv_heads * spec.head_dim

    def with_bias(name: str, *shape: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield name, shape
        if spec.biases and not (spec.rms_norm and name.endswith("_norm")):
            yield f"{name}_bias", shape[:1]
        if spec.bounded and len(shape) == 2:
            yield f"{name}_bounds", (4,)

    if spec.vocab_size:
        yield "embed", (spec.vocab_size, d)
    if spec.num_positions:
        yield "positions", (spec.num_positions, d)
    if spec.num_token_types:
        yield "token_types", (spec.num_token_types, d)
    if spec.vocab_size:
        yield from with_bias("embed_norm", d)
    if spec.relative_buckets:
        yield "relative", (spec.relative_buckets, spec.num_heads)
    for i, layer in enumerate(spec.layers):
        p = f"layers.{i}."
        if layer.has_attn_norm:
            yield from with_bias(p + "attn_norm", d)
        for name, rows in (("q", heads), ("k", keys), ("v", keys)):
            yield from with_bias(p + name, rows, d)
            if spec.qk_norm and name != "v":
                yield f"{p}{name}_norm", (spec.head_dim,)
        yield from with_bias(p + "o", d, heads)
        if spec.post_norms:
            yield p + "post_attn_norm", (d,)
        yield from with_bias(p + "mlp_norm", d)
        if spec.gated:
            yield from with_bias(p + "gate", inner, d)
        yield from with_bias(p + "up", inner, d)
        yield from with_bias(p + "down", d, inner)
        if spec.post_norms:
            yield p + "post_mlp_norm", (d,)
    if spec.norms_before and spec.has_final_norm:
        yield from with_bias("final_norm", d)
