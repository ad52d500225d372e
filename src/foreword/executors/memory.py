"""The host's memory that an executor takes beside its KV pool, by formula."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from foreword.models.spec import DecoderSpec
from foreword.models.weights import Weights

ROW_PADDING = 64
"""A row of the native executor has a multiple of so many floats: kRowPadding in native/kernels/memory.h."""
_BATCH_ROWS, _BATCH_SCORES = 16, 1 << 22
"""The rows per thread and the scores of a batch of a native indexer, at most: kBatchRows and kBatchScores in
native/kernels/forward/index_stage.cpp.
"""


class HostBytes(NamedTuple):
    """weights: as the executor holds them. activations: of the largest step, logits not included."""

    weights: int
    activations: int


def num_weights(weights: Weights) -> int:
    """Return the number of all weights."""
    return sum(prod(tensor.shape) for tensor in weights.values())


def activation_bytes(spec: DecoderSpec, num_tokens: int) -> int:
    """Return the bytes of the float32 activations of one layer, which the layers share.

    Per token: four vectors of hidden_size (the residual, a branch, the input of a product, an output); queries, keys
    and values before and after rotation, outputs of attention and their copy for the next product; of each expert of
    the token, or of the one MLP, two vectors of its intermediate_size; of a recurrent layer, four of its channels, of
    mamba1 and rg_lru six.
    With latent attention (`MlaSpec`) each head has its query, the latent query, which its output replaces, two of its
    values, and their gates. An indexer has its queries before and after rotation, and the positions that it chooses.
    Norms with gates have these, and their products of low rank before and after the activation.
    A layer aside (`AsideSpec`) has a wide input, that of the first layer and an output, and both parts of its gate.
    Inputs that layers have of their own are there for all layers at once. Streams are vectors of hidden_size, and so
    are their first products; those of layers that run several times are two vectors more. Hyper-connections have a
    vector for each stream.
    """
    attention = max(
        (4 * shape.num_heads + 2 * shape.num_kv_heads) * max(shape.head_dim, shape.value_dim)
        for shape in spec.head_shapes
    )
    if (mla := spec.mla) is not None:
        of_head = mla.nope_dim + mla.rope_dim + spec.head_dim + 2 * mla.value_dim
        attention = spec.num_heads * of_head + 2 * (mla.query_inputs + spec.head_dim)
        if spec.attn_gate and not spec.head_gates:
            attention += spec.num_heads * mla.value_dim
    if (indexer := spec.indexer) is not None:
        attention += 2 * indexer.num_heads * indexer.head_dim + min(indexer.topk, spec.max_model_len)
    widest = attention + 2 * spec.intermediate_size
    for layer in spec.layers:
        own = layer.recurrent
        channels = 0 if own is None else (6 if own.kind in ("mamba1", "rg_lru") else 4) * own.num_channels
        mlp = 2 * spec.intermediate_size
        if (moe := layer.experts) is not None:
            of_expert = 2 * (moe.intermediate_size + spec.hidden_size)
            mlp = moe.experts_per_token * of_expert + 2 * moe.shared_intermediate_size + (mlp if layer.late_moe else 0)
        widest = max(widest, attention + channels + mlp)
    if rank := max(max(layer.attn_norm_rank, layer.mlp_norm_rank) for layer in spec.layers):
        widest += spec.hidden_size + 2 * rank
    if spec.streams is not None:
        widest += 2 * (spec.streams.num_streams + 1) * spec.hidden_size
    if spec.connections is not None:
        widest += spec.connections.num_streams * spec.hidden_size
    widest += 2 * spec.hidden_size if spec.has_runs else 0
    if any(layer.aside is not None for layer in spec.layers):
        widest += 4 * spec.hidden_size + 2 * spec.intermediate_size
    if spec.per_layer is not None:
        widest += (spec.num_layers + 1) * spec.per_layer.size
    return 4 * num_tokens * (4 * spec.hidden_size + widest)


def index_score_bytes(spec: DecoderSpec, num_threads: int, length: int) -> int:
    """Return the bytes of the scores of a native indexer, of a batch of rows or at least a row for each thread; and of
    each thread's ranks.
    """
    if spec.indexer is None:
        return 0
    row_each = num_threads * length
    return 4 * (max(min(_BATCH_SCORES, _BATCH_ROWS * row_each), row_each) + row_each)


def score_bytes(spec: DecoderSpec, num_tokens: int, length: int) -> int:
    """Return the bytes of the scores and the weights of an attention that writes those of one request whole."""
    num_heads = max(*(shape.num_heads for shape in spec.head_shapes), spec.indexer.num_heads if spec.indexer else 0)
    return 2 * 4 * num_heads * min(num_tokens, length) * length
