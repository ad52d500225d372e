"""A decoder architecture as data: everything an executor needs to run a model, and nothing about how it runs.

An executor reads a `DecoderSpec` and a `Weights` mapping with the canonical names of `weight_names`.
Loaders convert file-format conventions first: rotary halves are in the split ("neox") order, norm weights
are the factors that multiply (Gemma's ``1 + w`` is already added), fused projections are split.

One decoder layer, with ``x`` the residual stream [T, hidden]:

    h = norm(x, attn_norm);  q, k, v = h Wq + bq, h Wk + bk, h Wv + bv       h = x unless pre_norms; biases if qkv_bias
    h *= sigmoid(silu(h Wattn_norm_low) Wattn_norm_high) before the products                   if attn_norm_rank
    u = norm(x, mlp_norm)                                                    if parallel_norm
    q, k = norm(q, q_norm), norm(k, k_norm)                                   if qk_norm, per head or all: joint_qk_norm
                                                                              LayerNorm if qk_layer_norm
    q, k, v = their numbers, limited to ±clip_qkv                             if clip_qkv; norms of q, k are joint then
    q, k = unit(q), unit(k);  v = unit(v)                                     if the layer has unit_qk_eps, which is the
                                                                              eps then; if it has unit_v. per head
    q, k = rope(q) q_norm, rope(k) k_norm in place of rope(q), rope(k)        if qk_scales; for each head
    k *= key_scale                                                            if key_scales; a number per head
    q *= 1 + growth.scale * ln(1 + ⌊(position + growth.offset) / growth.interval⌋)     if the layer has a query_growth
    a = softmax(cap(rope(q) · rope(k) * query_scale, attn_softcap) + mask) v  mask: causal, and the sliding window;
                                                                              sinks: below; with slopes, a head
                                                                              adds slope (key position − position)
    a = a sigmoid(h Wattn_gate + bg)                                          if attn_gate; bg if qkv_bias; one number
                                                                              per head if head_gates; softplus in place
                                                                              of sigmoid if softplus_gates
    a = unit(a) inner_attn_norm                                               if inner_norms; over all heads
    a = a Wo + bo;   a = norm(a, post_attn_norm) if post_norms;   x += residual_scale mixer_scale a    bo if o_bias
    h = norm(x, mlp_norm), or if parallel_mlp the h of attention, or its u
    h *= sigmoid(silu(h Wmlp_norm_low) Wmlp_norm_high)                        if mlp_norm_rank
                            n = act(gate_scale h Wgate) * (h Wup);  m = n Wdown    or the mixture of experts
                            n = act(h Wup + bup);  m = n Wdown + bdown        unless gated_mlp
                            n = unit(n) inner_mlp_norm                        if inner_norms
                            biases of Wgate, Wup and Wdown if mlp_bias; another gate: ClampedGate, gate_cutoff
    m = norm(m, post_mlp_norm) if post_norms;   x += residual_scale mlp_scale m
    x += the mixture of the experts of the layer before, of the h of its MLP      if that has late_moe
    x += b stands for x = (b + sum_bias) sum_scale + (x + kept_bias) kept_scale, with attn_ or mlp_ before these names,
    in the sums of attention and MLP                                          if scaled_sums
    x += norm((act(x Wper_layer_gate) * p) Wper_layer_out, post_per_layer_norm)   if per_layer, with p: PerLayerSpec
    x *= layer_scale                                                          if layer_scales
    the lines of `StreamsSpec` beside these                                   if streams
    the lines of `ConnectionsSpec` in place of both sums                      if connections
    X_s = norm(x, final_norm);   x = X_0 + X_1                                before a layer that has a stream, with the
                                                                              stream s of the last one before it, if any
    y = norm(x, final_norm);   y = norm(act(y Whead_dense), head_norm) if head_dense
    logits = cap(y Whead * logit_scale + bhead, final_softcap)                bhead if logits_bias

with rounds_inputs, each h, and a before Wo and n before Wdown, is ``rounded(x) = round(s x) / s``, to even numbers,
with s = 127 / max(|x|, 1e-5) of the token.

with ``norm(x, w) = x / sqrt(mean(x²) + norm_eps) * w``, ``unit(x) = norm(x, 1)`` and ``cap(x, c) = c * tanh(x / c)``
(identity for None). With layer_norm, norms of x are ``(x − mean(x)) / sqrt(mean((x − mean(x))²) + norm_eps) * w + b``.
With xielu, the numbers alpha_p, alpha_n, beta and eps of each layer replace act of an MLP without a gate: with
``soft(a) = ln(1 + exp(a))``, act(x) = soft(alpha_p) x² + beta x for x > 0, else (beta + soft(alpha_n)) (exp(min(x,
eps)) − 1 − x) + beta x.
In a layer with has_sinks, each head has a further score in its softmax, without a value: weights = exp(s) / (Σ exp(s) +
exp(sink)).
With mla, attention is over one compressed head, whose keys are its values, see `MlaSpec`. With indexer, a query sees
the keys that this chooses, see `IndexerSpec`.
In a model whose layers run several times for a token, X_0 begins as stream_begin and X_1 as the first layer's input.
``x`` begins as embed[input_ids] * embedding_scale, or as the prompt embedding in place of a token; plus
positions[position] if num_positions; through norm(x, embed_norm) if embed_norm; as (x + embed_bias) embed_scale if
scaled_sums.
A recurrent layer (`foreword.models.recurrent`) replaces the lines of attention; `LayerSpec` says which lines a layer
lacks, and where its norms are, if not where pre_norms and post_norms say.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from foreword.models.recurrent import RecurrentSpec

Activation = Literal["silu", "gelu_tanh", "gelu", "relu", "relu2"]
"""The activation of an MLP. gelu uses the error function, gelu_tanh its approximation by tanh; relu2 is max(x, 0)²."""
Scoring = Literal["softmax", "sigmoid"]
"""The function by which a router turns its outputs into probabilities."""

XIELU = ("alpha_p", "alpha_n", "beta", "eps")
"""The weights of xIELU in a layer, a number each."""
SUM = ("sum_bias", "sum_scale", "kept_bias", "kept_scale")
"""The vectors of a sum with scales."""
INDEXER = ("index_q", "index_k", "index_k_norm", "index_k_norm_bias", "index_weights")
"""The weights of an indexer in a layer."""


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding of the first ``2 * len(inv_freq)`` dimensions of a head.

    angle(p, j) = p * inv_freq[j];  pairs are (j, j + len(inv_freq));  cos and sin are multiplied by ``scale``.
    Each scaling rule (linear, llama3, yarn, …) yields these two values; loaders compute them.

    axes: empty, or M-RoPE: a position is a vector (time, height and width of an image; for text all equal), and pair j
    is rotated by its component axes[j]: angle(p, j) = p[axes[j]] * inv_freq[j].
    """

    inv_freq: tuple[float, ...]
    scale: float = 1.0
    axes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """An MLP in a router. With ``before`` the r of the layer with experts before, where the router carries it:

        r = h Wrouter_in + router_in_bias;   r += before router_carry         r and router_carry: [size]
        u = norm(r, router_norm)
        u = gelu(u Wrouter_first + router_first_bias);   u = gelu(u Wrouter_second + router_second_bias)

    Then s = u Wrouter.
    """

    size: int
    carries: bool


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """A mixture of experts in place of the dense MLP.

    p = softmax(s), or sigmoid of each: ``scoring``, of s = h Wrouter, or h Wrouter + b if ``scores_bias``, through cap
    with ``softcap``; take the ``experts_per_token`` largest of p, or of p + bias if ``router_bias``; divide these p by
    their sum + ``sum_eps`` if ``norm_topk``, and multiply them by ``scale``; m = Σ p_e * mlp_e(h), plus mlp_shared(h)
    if ``shared_intermediate_size``, times sigmoid(h Wshared_gate) if ``shared_gate``.

    scales_inputs: m = Σ mlp_e(p_e h) in place of Σ p_e mlp_e(h).
    own_norms: the router, the experts and the shared expert have norms of their own, and each expert a scale s_e. x is
    the residual stream: m = norm(mlp_shared(norm(x, mlp_norm)), post_shared_norm) + norm(Σ p_e s_e mlp_e(norm(x,
    experts_norm)), post_experts_norm), with p of unit(x) * router_scale / sqrt(hidden) Wrouter.
    latent_size: the number of inputs and outputs of each expert: m = (Σ p_e mlp_e(h Wlatent_in)) Wlatent_out. 0: the
    experts read h.

    gate_limit: the gates of experts, but not that of the shared one, are silu(min(h Wgate, gate_limit)) times h Wup
    within ±gate_limit.
    ranks_outputs: s stands in the place of p in the choice of experts.
    identities: the number of further experts of the router, behind the others, whose output is their input h. Beside
    them there is no shared expert, and the experts read h.
    empties: the number of further experts, behind all others, whose output is 0.
    router: s = u Wrouter with the u of this MLP, in place of h Wrouter.

    sparse_mix: in place of that, experts are taken in rounds. With the outputs s of the router, the expert e of a round
    has the largest s of those that are not taken yet, and p_e = 1 / Σ_f exp(s_f − s_e) over the f of these with
    (s_e − s_f) / max(|s_f|, s_e) not above this number.
    num_groups: adjacent experts form this many groups of equal size; a token takes experts of its ``groups_per_token``
    best groups only. The score of a group is its largest p, or if ``router_bias`` the sum of its two largest of p +
    bias.
    zeroes_groups: in the choice, p + bias of the experts of other groups is 0, and one with this may be taken.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    norm_topk: bool = True
    shared_intermediate_size: int = 0
    shared_gate: bool = True
    scoring: Scoring = "softmax"
    router_bias: bool = False
    scale: float = 1.0
    sum_eps: float = 0.0
    scores_bias: bool = False
    num_groups: int = 1
    groups_per_token: int = 1
    scales_inputs: bool = False
    latent_size: int = 0
    own_norms: bool = False
    gate_limit: float | None = None
    softcap: float | None = None
    sparse_mix: float | None = None
    ranks_outputs: bool = False
    identities: int = 0
    zeroes_groups: bool = False
    empties: int = 0
    router: RouterSpec | None = None

    @property
    def num_choices(self) -> int:
        """The number of experts that the router knows."""
        return self.num_experts + self.identities + self.empties


@dataclass(frozen=True, slots=True)
class MlaSpec:
    """Multi-head latent attention: keys and values of all heads are products of one vector c per token, which is cached
    once in their place. With r = rope_dim:

        y = h Wq_a + bq_a;   u = norm(y, q_a_norm) if q_rank else h;   q = u Wq   per head [r + nope_dim]
        k = h Wkv_a + bkv_a;   c = [rope(k[:r]), kv_scale norm(k[r:], kv_a_norm)]   [r + kv_rank]: the spec's head_dim
        a = softmax([rope(q[:r]), q[r:] Wk_b] · c * query_scale + mask) c        with sinks in a layer that has them
        a = a[r:] Wv_bᵀ                                                  per head
        a = a sigmoid(h Wattn_gate)                                      if attn_gate; one number per head: head_gates
        output: a Wo + bo

    joins_latents: q = [u, y] Wq, and gates are sigmoid([u, y] Wattn_gate); q_rank is not 0.
    Each head has its own Wk_b [nope_dim, kv_rank] and Wv_b [value_dim, kv_rank]. norm_eps: the eps of both norms.
    bq_a, bkv_a: if qkv_bias; bo: if o_bias. rope leaves its argument as it is in layers without one.
    """

    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    norm_eps: float = 1e-6
    kv_scale: float = 1.0
    joins_latents: bool = False

    @property
    def query_inputs(self) -> int:
        """The number of inputs of Wq; 0: those of the layer."""
        return 2 * self.q_rank if self.joins_latents else self.q_rank


@dataclass(frozen=True, slots=True)
class IndexerSpec:
    """Sparse attention: a query sees ``topk`` of the keys, those at the positions with the largest scores. With the u
    of `MlaSpec`, whose q_rank is not 0, and a query at position p:

        key = layer_norm(h Windex_k, index_k_norm, index_k_norm_bias)     [head_dim], with norm_eps; cached beside c
        q = u Windex_q   per head [head_dim];   w = h Windex_weights      [num_heads]
        key, q = rope(key), rope(q)                                       of their first dimensions, as in the layer
        score(j) = Σ_head w_head max(q_head · key_j, 0)                   for j ≤ p

    Of equal scores, those of earlier positions come first. Up to position topk − 1, a query sees all keys.
    """

    num_heads: int
    head_dim: int
    topk: int
    norm_eps: float = 1e-6


@dataclass(frozen=True, slots=True)
class QKLayerNorm:
    """LayerNorm in the place of RMSNorm of queries and keys. of_heads: each head has a weight of its own; otherwise all
    heads of queries have the same, and all of keys. has_bias: there is a bias, too, without of_heads.
    """

    of_heads: bool = False
    has_bias: bool = False


@dataclass(frozen=True, slots=True)
class ClampedGate:
    """The gate g sigmoid(alpha g) (u + 1), with g = min(h Wgate, limit) and u = h Wup within ±limit, in place of act(h
    Wgate) * (h Wup).
    """

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True)
class QueryGrowth:
    """Growth of queries with their position p: they are multiplied by 1 + scale ln(1 + ⌊(p + offset) / interval⌋)."""

    interval: int
    scale: float
    offset: int = 1


@dataclass(frozen=True, slots=True)
class AsideSpec:
    """A layer of attention and an MLP whose output is not added to the residual stream x: the mixer of the next layer
    reads norm(x + aside, attn_norm) in place of norm(x, attn_norm). With e the input of the first layer:

        h = norm([x, e], attn_norm)                                  [T, 2 hidden], the input of q, k and v
        q = h Wq + h Wq_low Wq_high;   k, v likewise                 Wq alone if not attention_rank
        a = attention Wo;   u = norm(a, mlp_norm)
        g = u Wgate + u Wmlp_low Wgate_high;   up likewise           Wgate alone if not mlp_rank
        aside = (act(g) * up) Wdown Waside

    block: the number of the weights. Those of layers with one number are the same, ``blocks.{block}.NAME``; but for
    low, high and aside, which each layer has of its own. The ranks are the outputs of low.
    """

    block: int
    attention_rank: int = 0
    mlp_rank: int = 0


class NormPlaces(NamedTuple):
    """Which of the norms of its input and of its output the mixer of a layer has, and which of them its MLP."""

    before_mixer: bool
    after_mixer: bool
    before_mlp: bool
    after_mlp: bool


class HeadShape(NamedTuple):
    """The number and the sizes of the heads of a layer's keys and values, and the number of those of its queries.

    head_dim: the size of a key, and of a query. value_dim: that of a value.
    """

    num_kv_heads: int
    head_dim: int
    num_heads: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class PerLayerSpec:
    """Separate inputs of each layer, vectors of ``size`` numbers. With L layers and x the input of the first one:

        p = scale (norm(x Wper_layer_in) + per_layer_embed[input_ids] * embedding_scale)      [T, L, size]

    Both matrices have L · size outputs; norm is over ``size`` numbers, with the weight per_layer_norm and norm_eps.
    vocab_size: the number of rows of per_layer_embed; ids that are not below it use row 0. A prompt embedding has the
    row of its input id.
    """

    size: int
    vocab_size: int
    norm_eps: float
    embedding_scale: float
    scale: float


@dataclass(frozen=True, slots=True)
class StreamsSpec:
    """Alternating updates: each layer predicts K = num_streams streams X_k, computes the first, and corrects them all.
    With r(x) = tanh(norm(x, streams_norm) Wstreams_router / hidden) [T, K], rms(x) = sqrt(mean(x²)) and scaled(y, x) =
    y rms(x) / max(rms(y), sqrt(1e-5)):

        X_0 = x;  X_k = scaled(x Wstream_in.k, x)                            before the first layer
        P_k = X_k + Σ_j (r(X_0) Wstreams_predict)[k K + j] X_j;  x = P_0     before each layer
        l = h + norm(h Wlaurel_left Wlaurel_right, laurel_norm)              with h = norm(x, attn_norm)
        x = (x + l) / sqrt(2)                                                after attention
        X_k = P_k + (1 + (r(x) Wstreams_correct)[k]) (x − P_0)               after the MLP; then its own inputs p:
        X_k += norm((act(y Wper_layer_gate) * p) Wper_layer_out, post_per_layer_norm)   for k > 0, with y = X_0, times
                                                                             streams_scale if scales_first
        x = (X_0 + Σ_k scaled(X_k Wstream_out.k, X_0)) / K                   after the last layer

    laurel_rank: the outputs of Wlaurel_left.
    """

    num_streams: int
    laurel_rank: int
    scales_first: bool = True


@dataclass(frozen=True, slots=True)
class ConnectionsSpec:
    """Hyper-connections: attention and MLP read a sum of K = num_streams residual streams X_k, and add their output to
    each. With the matrix W of a name, its base b and its scale s, and the mean over all numbers of the streams:

        m = [X_0, …, X_K−1] W / sqrt(mean(X²) + norm_eps)                    W: attn_mix, mlp_mix or out_mix
        pre_k = sigmoid(s_0 m_k + b_k) + eps
        post_k = magnitude sigmoid(s_1 m_K+k + b_K+k) + eps                  not of out_mix
        X_k = x                                                              before the first layer
        x = Σ_k pre_k X_k                                                    before attention, before the MLP, and after
                                                                             the last layer
        X_k += post_k a                                                      in place of x += a, after both
    """

    num_streams: int
    magnitude: float
    eps: float


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The part of a specification that differs between layers. A query at position p sees keys in (p − sliding_window,
    p]; None: all to p. chunked: it sees those of [p − p mod sliding_window, p].

    recurrent: the state that the layer has in place of attention; then rope and sliding_window are None.
    has_mixer, has_mlp: whether the layer has the lines up to the first sum, and those from there up to the second sum.
    It has at least one of the two.
    beside: the mixer reads the h of the layer before, which has only a mixer, so that both layers mix the same tokens.
    heads: None: as the spec says.
    norms: None: before mixer and MLP if pre_norms, after both if post_norms.
    reads_layer: the layer computes no keys and values, and attends to those of this earlier layer of the same kind.
    values_are_keys: v = h Wk, before norms and rotation.
    intermediate_size: the size of its MLP; None: that of the spec.
    has_sinks: its heads have sinks.
    late_moe: experts beside its MLP, which is dense.
    gate_cutoff: the gate of its MLP is act(max(g − mean(g) − gate_cutoff std(g), 0)), with g = h Wgate of a token.
    kept: x = f h before each sum, with the h of the mixer and of the MLP and these factors f of both. Such a layer has
    norms before both and none after them; without one before the mixer, f is 1 there.
    aside: the layer has the lines of `AsideSpec` in place of others. A layer with a mixer follows.
    attn_norm_rank, mlp_norm_rank: the ranks of gates of both norms; 0: these have none. Such layers have these norms,
    and a model with one residual stream; those with attn_norm_rank follow no layer aside, and are none.
    takes_qkv: its queries, keys and values are the outputs of the layer before, a recurrent one of kind mixed_qkv,
    which has only a mixer and adds nothing to x. Such a layer is ``beside``.
    takes_chosen: in a model with an indexer, the layer has none, and its queries see the keys at the positions that
    were chosen for the last layer before it with one.
    weights_of: the layer is this earlier one, run again, with keys and values of its own. A change of the earlier one
    by an adapter applies to both.
    stream: the layer is the first of a run of layers, whose output is this one of two residual streams, 0 or 1. If
    layers have one, the first layer of the model does.
    """

    rope: RopeSpec | None
    sliding_window: int | None = None
    moe: MoeSpec | None = None
    recurrent: RecurrentSpec | None = None
    has_mixer: bool = True
    has_mlp: bool = True
    beside: bool = False
    chunked: bool = False
    unit_qk_eps: float | None = None
    query_growth: QueryGrowth | None = None
    mixer_scale: float = 1.0
    mlp_scale: float = 1.0
    heads: HeadShape | None = None
    has_sinks: bool = False
    late_moe: MoeSpec | None = None
    norms: NormPlaces | None = None
    reads_layer: int | None = None
    unit_v: bool = False
    values_are_keys: bool = False
    intermediate_size: int | None = None
    gate_cutoff: float | None = None
    kept: tuple[float, float] | None = None
    aside: AsideSpec | None = None
    takes_chosen: bool = False
    weights_of: int | None = None
    stream: int | None = None
    attn_norm_rank: int = 0
    mlp_norm_rank: int = 0
    takes_qkv: bool = False

    @property
    def experts(self) -> MoeSpec | None:
        """The experts of the layer."""
        return self.moe or self.late_moe

    @property
    def has_attention(self) -> bool:
        return self.has_mixer and self.recurrent is None

    @property
    def adds_mixer(self) -> bool:
        """True if the output of its mixer is added to the residual stream."""
        return self.has_mixer and (self.recurrent is None or self.recurrent.kind != "mixed_qkv")


@dataclass(frozen=True, slots=True)
class KVGroupSpec:
    """Layers whose keys and values share one block table. ``layers[j]`` uses storage slot j of each block.

    recurrent: the layers are recurrent, and a block holds their states.
    """

    layers: tuple[int, ...]
    sliding_window: int | None
    recurrent: bool = False


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A decoder-only transformer. Sizes are element counts; the module docstring gives the arithmetic.

    is_causal: if False, a token also sees the tokens after it, with a window only those at a distance below it. A step
    then has whole texts, and computes no logits.
    prefix_lm: the tokens of a prompt see each other: it is one of `NewRequest.bidirectional_ranges`.
    sees_spans: each prompt embedding has one more value, by which it sees later ones: see `Executor.extra_size`.
    spans_in_windows: only in layers with a window; in others it sees those before it.
    value_dim: the size of a head of values; 0: head_dim.
    num_positions: the rows of ``positions``; max_model_len is not above it. 0: there are none.
    num_features: a prompt embedding has a further vector for each of this many first layers. It is added to the
    residual stream after the layer.
    inner_norms, rounds_inputs, xielu: only with a dense MLP in every layer, the first two only with attention of heads,
    rounds_inputs only with pre_norms.
    slopes: one per head, or none (ALiBi); models with them have no attn_softcap, sinks or other heads in some layers.
    qk_layer_norm: only with qk_norm, of single heads.
    indexer: only with mla, in layers that all see all tokens before; the first of them has one.
    scaled_sums: only in layers without norms after mixer and MLP, ``kept`` and other factors of their outputs.
    connections: the same, in layers with a mixer and an MLP, which are not parallel, without inputs of their own or
    other streams.
    has_logits: whether it has an output projection; classifiers have another head, see `PoolingSpec`.
    longer: the same model for requests of more than ``max_model_len`` tokens, if those use other rotary frequencies
    (longrope). An engine uses one of the two for all requests, so that cached keys stay consistent: see `for_length`.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    query_scale: float
    value_dim: int = 0
    activation: Activation = "silu"
    embedding_scale: float = 1.0
    num_positions: int = 0
    embed_norm: bool = False
    tie_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    qk_layer_norm: QKLayerNorm | None = None
    qk_scales: bool = False
    key_scales: bool = False
    joint_qk_norm: bool = False
    attn_gate: bool = False
    head_gates: bool = False
    softplus_gates: bool = False
    slopes: tuple[float, ...] = ()
    clip_qkv: float | None = None
    mla: MlaSpec | None = None
    indexer: IndexerSpec | None = None
    o_bias: bool = False
    gated_mlp: bool = True
    clamped_gate: ClampedGate | None = None
    inner_norms: bool = False
    rounds_inputs: bool = False
    xielu: bool = False
    gate_scale: float = 1.0
    mlp_bias: bool = False
    pre_norms: bool = True
    parallel_mlp: bool = False
    parallel_norm: bool = False
    post_norms: bool = False
    layer_norm: bool = False
    residual_scale: float = 1.0
    scaled_sums: bool = False
    logit_scale: float = 1.0
    head_dense: bool = False
    logits_bias: bool = False
    attn_softcap: float | None = None
    final_softcap: float | None = None
    is_causal: bool = True
    prefix_lm: bool = False
    sees_spans: bool = False
    spans_in_windows: bool = False
    num_features: int = 0
    per_layer: PerLayerSpec | None = None
    layer_scales: bool = False
    streams: StreamsSpec | None = None
    connections: ConnectionsSpec | None = None
    has_logits: bool = True
    longer: DecoderSpec | None = None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def mrope_dims(self) -> int:
        """The number of components of a rotary position; 0 if positions are numbers in every layer."""
        return max((1 + axis for layer in self.layers if layer.rope for axis in layer.rope.axes), default=0)

    @property
    def longest_model_len(self) -> int:
        """The maximum number of tokens of a request over all specs of this model."""
        return self.longer.max_model_len if self.longer else self.max_model_len

    def for_length(self, max_model_len: int) -> DecoderSpec:
        """Return the spec for requests of up to this many tokens: ``longer`` if they exceed max_model_len."""
        return self.longer if self.longer and max_model_len > self.max_model_len else self

    @property
    def extra_size(self) -> int:
        """Return the number of values that a prompt embedding has besides its vector, see `Executor.extra_size`."""
        return self.num_features * self.hidden_size + int(self.sees_spans or self.num_features > 0)

    def changed(self, **changes: Any) -> DecoderSpec:
        """Return the spec with these fields changed, in ``longer`` too."""
        return replace(self, longer=self.longer and replace(self.longer, **changes), **changes)

    @property
    def state_size(self) -> int:
        """The number of floats of the largest state of a recurrent layer; 0 without such layers."""
        return max((layer.recurrent.state_size for layer in self.layers if layer.recurrent), default=0)

    @property
    def num_slots(self) -> int:
        """The number of storage slots of a block: the largest number of layers in a KV group with keys and values."""
        return max((len(group.layers) for group in self.kv_groups() if not group.recurrent), default=0)

    @property
    def num_state_slots(self) -> int:
        """The number of storage slots of a state: the number of recurrent layers."""
        return sum(len(group.layers) for group in self.kv_groups() if group.recurrent)

    def kv_groups(self) -> tuple[KVGroupSpec, ...]:
        """Return the layers in groups of one kind each, see `grouped_layers`. Layers that read another layer's keys are
        in no group.
        """
        return grouped_layers(
            LayerKind(layer.sliding_window, layer.recurrent is not None, layer.heads)
            if layer.has_mixer and layer.reads_layer is None
            else None
            for layer in self.layers
        )

    def places(self) -> dict[int, tuple[int, int]]:
        """Return the KV group and the storage slot that each layer with a mixer reads."""
        places = {
            layer: (g, slot) for g, group in enumerate(self.kv_groups()) for slot, layer in enumerate(group.layers)
        }
        read = {i: layer.reads_layer for i, layer in enumerate(self.layers) if layer.reads_layer is not None}
        return places | {i: places[source] for i, source in read.items()}

    def prefix_of(self, index: int) -> str:
        """Return the beginning of the names of the weights of a layer, which for a layer aside are those of its own."""
        of = self.layers[index].weights_of
        return f"layers.{index if of is None else of}."

    @property
    def has_runs(self) -> bool:
        """Return whether layers have a stream, see `LayerSpec`."""
        return self.layers[0].stream is not None

    def indexer_of(self, layer: LayerSpec) -> IndexerSpec | None:
        return None if layer.takes_chosen else self.indexer

    def heads_of(self, layer: LayerSpec) -> HeadShape:
        return layer.heads or self.own_heads

    @property
    def own_heads(self) -> HeadShape:
        """The head shape of layers that do not say otherwise."""
        return HeadShape(self.num_kv_heads, self.head_dim, self.num_heads, self.value_dim or self.head_dim)

    def norms_of(self, layer: LayerSpec) -> NormPlaces:
        return layer.norms or NormPlaces(self.pre_norms, self.post_norms, self.pre_norms, self.post_norms)

    @property
    def head_shapes(self) -> tuple[HeadShape, ...]:
        """The head shape of the spec, then the other shapes that layers have."""
        return tuple(
            dict.fromkeys([self.own_heads, *(layer.heads for layer in self.layers if layer.heads is not None)])
        )

    @property
    def index_size(self) -> int:
        """The number of floats of the key of an indexer; 0 without one."""
        return 0 if self.indexer is None else self.indexer.head_dim

    @property
    def key_size(self) -> int:
        """The number of floats of a token's keys in the layer where it is largest, with that of an indexer."""
        return max(shape.num_kv_heads * shape.head_dim for shape in self.head_shapes) + self.index_size

    @property
    def value_size(self) -> int:
        """The number of floats of a token's values in the layer where it is largest."""
        return max(shape.num_kv_heads * shape.value_dim for shape in self.head_shapes)

    @property
    def token_size(self) -> int:
        """The number of floats that a cache stores of a token's keys and values, each in the layer where it is largest.
        Values that are keys are not stored.
        """
        return self.key_size if self.mla is not None else self.key_size + self.value_size


class LayerKind(NamedTuple):
    """The properties that all layers of a KV group share. heads: their head shape, where it is not the model's."""

    sliding_window: int | None
    recurrent: bool = False
    heads: HeadShape | None = None


def grouped_layers(kinds: Iterable[LayerKind | None]) -> tuple[KVGroupSpec, ...]:
    """Partition layers into groups of nearly equal size, each of one kind, so that they can share one pool. Recurrent
    layers are one group, since their states are no blocks of that pool.

    kinds: the kind of each layer; None for a layer that keeps nothing. With n = the layers of the rarest kind with
    keys, every group of such layers has at most n: 18 layers at 5 sliding : 1 full (15 and 3) make five sliding groups
    and one full group of three layers.
    """
    by_kind: dict[LayerKind, list[int]] = {}
    for i, kind in enumerate(kinds):
        if kind is not None:
            by_kind.setdefault(kind, []).append(i)
    size = min((len(layers) for kind, layers in by_kind.items() if not kind.recurrent), default=0)
    return tuple(
        KVGroupSpec(tuple(layers[start : start + most]), kind.sliding_window, kind.recurrent)
        for kind, layers in by_kind.items()
        for most in [len(layers) if kind.recurrent else size]
        for start in range(0, len(layers), most)
    )


def weight_names(spec: DecoderSpec, *, by_layer: bool = False) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Return every canonical weight name of a model with its shape, [out, in] for matrices, in execution order.
    by_layer: instead of the weights of blocks, those of each layer that has the block, as if they were its own. These
    are the names of what adapters change.
    """
    d = spec.hidden_size
    yield "embed", (spec.vocab_size, d)
    if spec.num_positions:
        yield "positions", (spec.num_positions, d)
    if spec.embed_norm:
        yield from _norm(spec, "embed_norm")
    if spec.scaled_sums:
        yield from ((f"embed_{name}", (d,)) for name in ("bias", "scale"))
    if (per_layer := spec.per_layer) is not None:
        yield "per_layer_embed", (per_layer.vocab_size, spec.num_layers * per_layer.size)
        yield "per_layer_in", (spec.num_layers * per_layer.size, d)
        yield "per_layer_norm", (per_layer.size,)
    if spec.has_runs:
        yield "stream_begin", (d,)
    others = range(1, spec.streams.num_streams) if spec.streams else ()
    yield from ((f"stream_in.{k}", (d, d)) for k in others)
    blocks = set[str]()
    for i, layer in enumerate(spec.layers):
        p, norms = f"layers.{i}.", spec.norms_of(layer)
        if layer.weights_of is not None:
            continue
        if (aside := layer.aside) is not None:
            block = p if by_layer else block_of(aside)
            yield from _aside(spec, p, layer, aside, "" if block in blocks else block)
            blocks.add(block)
            continue
        if layer.has_mixer:
            if norms.before_mixer and not layer.beside:
                yield from _norm(spec, p + "attn_norm", layer.attn_norm_rank)
            if layer.recurrent is not None:
                yield from ((f"{p}state.{name}", shape) for name, shape in layer.recurrent.weight_names(d))
            else:
                if spec.mla is None:
                    yield from _attention(spec, p, layer)
                else:
                    yield from _latent_attention(spec, p, spec.mla, has_sinks=layer.has_sinks)
                if (indexer := spec.indexer_of(layer)) is not None:
                    yield from ((p + name, shape) for name, shape in _indexer(spec, indexer))
            if norms.after_mixer:
                yield from _norm(spec, p + "post_attn_norm")
            if spec.scaled_sums and layer.adds_mixer:
                yield from ((f"{p}attn_{name}", (d,)) for name in SUM)
        if layer.has_mlp:
            if norms.before_mlp and (spec.parallel_norm or not spec.parallel_mlp):
                yield from _norm(spec, p + "mlp_norm", layer.mlp_norm_rank)
            inner = layer.intermediate_size or spec.intermediate_size
            yield from _mlp(spec, p, inner) if layer.moe is None else _experts(spec, p, layer.moe)
            if layer.late_moe is not None:
                yield from _experts(spec, p, layer.late_moe)
            if norms.after_mlp:
                yield from _norm(spec, p + "post_mlp_norm")
            if spec.scaled_sums:
                yield from ((f"{p}mlp_{name}", (d,)) for name in SUM)
        if per_layer is not None:
            yield p + "per_layer_gate", (per_layer.size, d)
            yield p + "per_layer_out", (d, per_layer.size)
            yield from _norm(spec, p + "post_per_layer_norm")
        if spec.layer_scales:
            yield p + "layer_scale", (1,)
        if spec.streams is not None:
            yield from ((p + name, shape) for name, shape in _streams(d, spec.streams))
        if spec.connections is not None:
            yield from _mix(d, spec.connections, p + "attn_mix", 2)
            yield from _mix(d, spec.connections, p + "mlp_mix", 2)
    yield from ((f"stream_out.{k}", (d, d)) for k in others)
    if spec.connections is not None:
        yield from _mix(d, spec.connections, "out_mix", 1)
    yield from _norm(spec, "final_norm")
    if spec.head_dense:
        yield "head_dense", (d, d)
        yield from _norm(spec, "head_norm")
    if spec.has_logits and not spec.tie_embeddings:
        yield "lm_head", (spec.vocab_size, d)
    if spec.logits_bias:
        yield "logits_bias", (spec.vocab_size,)


def _norm(spec: DecoderSpec, name: str, gate_rank: int = 0) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield name, (spec.hidden_size,)
    if spec.layer_norm:
        yield name + "_bias", (spec.hidden_size,)
    if gate_rank:
        yield name + "_low", (gate_rank, spec.hidden_size)
        yield name + "_high", (spec.hidden_size, gate_rank)


def _streams(d: int, of: StreamsSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    count = of.num_streams
    yield from (("streams_norm", (d,)), ("streams_router", (count, d)), ("streams_scale", (d,)))
    yield from (("streams_predict", (count * count, count)), ("streams_correct", (count, count)))
    yield from (("laurel_left", (of.laurel_rank, d)), ("laurel_right", (d, of.laurel_rank)), ("laurel_norm", (d,)))


def _mix(d: int, of: ConnectionsSpec, name: str, parts: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    count = of.num_streams
    yield from ((name, (parts * count, count * d)), (name + "_base", (parts * count,)), (name + "_scale", (parts,)))


def block_of(aside: AsideSpec) -> str:
    """Return the beginning of the names of the weights that layers have in common."""
    return f"blocks.{aside.block}."


def names_in_blocks(spec: DecoderSpec) -> dict[str, str]:
    """Return the weight of a block for each name that `weight_names` returns by layer, and not otherwise."""
    found = dict[str, str]()
    if not any(layer.aside for layer in spec.layers):
        return found
    weights = {name for name, _ in weight_names(spec)}
    for name, _ in weight_names(spec, by_layer=True):
        if name not in weights:
            _, layer, own = name.split(".", 2)
            aside = spec.layers[int(layer)].aside
            assert aside is not None
            found[name] = block_of(aside) + own
    return found


def _aside(
    spec: DecoderSpec, p: str, layer: LayerSpec, aside: AsideSpec, block: str
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Return the weights of a layer aside. block: the beginning of the names of those of its block; "": without
    these.
    """
    d, inner = spec.hidden_size, spec.intermediate_size
    if block:
        yield block + "attn_norm", (2 * d,)
        yield from _attention(spec, block, layer, 2 * d)
        yield from _norm(spec, block + "mlp_norm")
        yield from _mlp(spec, block, inner)
    num_kv_heads, head_dim, num_heads, value_dim = spec.heads_of(layer)
    outputs = {"q": num_heads * head_dim, "k": num_kv_heads * head_dim, "v": num_kv_heads * value_dim}
    for name, size in outputs.items() if aside.attention_rank else ():
        yield f"{p}{name}_low", (aside.attention_rank, 2 * d)
        yield f"{p}{name}_high", (size, aside.attention_rank)
    if aside.mlp_rank:
        yield p + "mlp_low", (aside.mlp_rank, d)
        yield from ((f"{p}{name}_high", (inner, aside.mlp_rank)) for name in ("gate", "up"))
    yield p + "aside", (d, d)


def projections(layer: LayerSpec) -> tuple[str, ...]:
    """Return which of queries, keys and values a layer with attention computes by its own matrix."""
    if layer.takes_qkv:
        return ()
    if layer.reads_layer is not None:
        return ("q",)
    return ("q", "k") if layer.values_are_keys else ("q", "k", "v")


def _attention(
    spec: DecoderSpec, p: str, layer: LayerSpec, num_inputs: int = 0
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Return the weights of attention. num_inputs: of its first products, if not the hidden size."""
    num_kv_heads, head_dim, num_heads, value_dim = spec.heads_of(layer)
    d, q, out = num_inputs or spec.hidden_size, num_heads * head_dim, num_heads * value_dim
    rows = {"q": q, "k": num_kv_heads * head_dim, "v": num_kv_heads * value_dim}
    names = projections(layer)
    for name in names:
        yield p + name, (rows[name], d)
        if spec.qkv_bias:
            yield p + name + "_bias", (rows[name],)
    for name in names[:2] if spec.qk_norm or spec.qk_scales else ():
        layer_norm = spec.qk_layer_norm
        if layer_norm is not None and layer_norm.of_heads:
            yield f"{p}{name}_norm", (rows[name] // head_dim, head_dim)
        else:
            yield f"{p}{name}_norm", (rows[name] if spec.joint_qk_norm else head_dim,)
        if layer_norm is not None and layer_norm.has_bias:
            yield f"{p}{name}_norm_bias", (head_dim,)
    if spec.attn_gate:
        gates = num_heads if spec.head_gates else out
        yield p + "attn_gate", (gates, d)
        if spec.qkv_bias:
            yield p + "attn_gate_bias", (gates,)
    if spec.key_scales:
        yield p + "key_scale", (num_kv_heads,)
    if layer.has_sinks:
        yield p + "sinks", (num_heads,)
    if spec.inner_norms:
        yield p + "inner_attn_norm", (out,)
    yield p + "o", (spec.hidden_size, out)
    if spec.o_bias:
        yield p + "o_bias", (spec.hidden_size,)


def _latent_attention(
    spec: DecoderSpec, p: str, mla: MlaSpec, *, has_sinks: bool
) -> Iterator[tuple[str, tuple[int, ...]]]:
    d, heads = spec.hidden_size, spec.num_heads
    if mla.q_rank:
        yield p + "q_a", (mla.q_rank, d)
        if spec.qkv_bias:
            yield p + "q_a_bias", (mla.q_rank,)
        yield p + "q_a_norm", (mla.q_rank,)
    yield p + "q", (heads * (mla.rope_dim + mla.nope_dim), mla.query_inputs or d)
    yield p + "kv_a", (mla.rope_dim + mla.kv_rank, d)
    if spec.qkv_bias:
        yield p + "kv_a_bias", (mla.rope_dim + mla.kv_rank,)
    yield p + "kv_a_norm", (mla.kv_rank,)
    yield p + "k_b", (heads * mla.nope_dim, mla.kv_rank)
    yield p + "v_b", (heads * mla.value_dim, mla.kv_rank)
    if spec.attn_gate:
        gates = heads if spec.head_gates else heads * mla.value_dim
        yield p + "attn_gate", (gates, mla.query_inputs if mla.joins_latents else d)
    if has_sinks:
        yield p + "sinks", (heads,)
    yield p + "o", (d, heads * mla.value_dim)
    if spec.o_bias:
        yield p + "o_bias", (d,)


def _indexer(spec: DecoderSpec, of: IndexerSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    assert spec.mla is not None
    d, dim = spec.hidden_size, of.head_dim
    shapes = (of.num_heads * dim, spec.mla.q_rank), (dim, d), (dim,), (dim,), (of.num_heads, d)
    yield from zip(INDEXER, shapes, strict=True)


def _router(spec: DecoderSpec, of: RouterSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "router_norm", (of.size,)
    if of.carries:
        yield "router_carry", (of.size,)
    for name, inputs in (("router_in", spec.hidden_size), ("router_first", of.size), ("router_second", of.size)):
        yield name, (of.size, inputs)
        yield name + "_bias", (of.size,)


def _experts(spec: DecoderSpec, p: str, moe: MoeSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    if moe.router is not None:
        yield from ((p + name, shape) for name, shape in _router(spec, moe.router))
    yield p + "router", (moe.num_choices, spec.hidden_size if moe.router is None else moe.router.size)
    if moe.own_norms:
        for name in ("experts_norm", "post_experts_norm", "post_shared_norm"):
            yield from _norm(spec, p + name)
        yield p + "router_scale", (spec.hidden_size,)
        yield p + "expert_scales", (moe.num_experts,)
    if moe.scores_bias:
        yield p + "scores_bias", (moe.num_choices,)
    if moe.router_bias:
        yield p + "router_bias", (moe.num_choices,)
    if moe.latent_size:
        yield p + "latent_in", (moe.latent_size, spec.hidden_size)
        yield p + "latent_out", (spec.hidden_size, moe.latent_size)
    for e in range(moe.num_experts):
        yield from _mlp(spec, f"{p}experts.{e}.", moe.intermediate_size, moe.latent_size)
    if moe.shared_intermediate_size:
        if moe.shared_gate:
            yield p + "shared_gate", (1, spec.hidden_size)
        yield from _mlp(spec, p + "shared.", moe.shared_intermediate_size)


def _mlp(spec: DecoderSpec, p: str, inner: int, outer: int = 0) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Return the weights of an MLP. outer: the number of its inputs and outputs, if not the hidden size."""
    outer = outer or spec.hidden_size
    if spec.gated_mlp:
        yield p + "gate", (inner, outer)
        if spec.mlp_bias:
            yield p + "gate_bias", (inner,)
    yield p + "up", (inner, outer)
    if spec.mlp_bias:
        yield p + "up_bias", (inner,)
    if spec.xielu:
        yield from ((p + name, (1,)) for name in XIELU)
    if spec.inner_norms:
        yield p + "inner_mlp_norm", (inner,)
    yield p + "down", (outer, inner)
    if spec.mlp_bias:
        yield p + "down_bias", (outer,)
