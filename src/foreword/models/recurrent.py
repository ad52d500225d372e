"""Recurrent layers as data: in place of keys and values they keep a state of fixed size per request.

One layer with h = norm(x, attn_norm) [T, hidden]. Value head j uses key head j // (num_heads / num_key_heads),
or with ``tiled`` j mod num_key_heads:

    u = h Wu + bu               the channels v, k, q of mamba2; q, k, v of gated_delta; v of mamba1 and of rg_lru
    u_t = silu(Σ_i conv[:, i] u_{t − conv_kernel + 1 + i} + conv_bias)       per channel; u is 0 before the first token
    z, dt = h Wz + bz, softplus(h Wdt + bdt + dt_bias);   decay = exp(−exp(a_log) dt)   dt, decay: one per head
    z, dt = h Wz_low Wz, softplus(h Wdt_low Wdt + dt_bias)                    where gated_delta has a rank

    mamba2:       dt = max(dt, least_step)
                  S_t = decay S_{t−1} + k (dt v)ᵀ;   y = Sᵀ q + skip v
                  y = norm(y silu(z), norm)          over the value heads of each key head, or of all if joint_norm
                  y = norm(y, norm) silu(z)          where normed is "first"; y silu(z) where it is "never"
    gated_delta:  q, k = q / |q| / sqrt(key_dim), k / |k|;   |x| = sqrt(Σ x² + 1e-6)
                  R = decay S_{t−1};   S_t = R + k (write_scale sigmoid(h Wbeta) (v − Rᵀ k))ᵀ;   y = Sᵀ q
                  y = norm(y, norm) silu(z)          per head
                  with channel_decays, dt and decay have a number for each number of a key, and so for each row of S;
                  decay = exp(least_log sigmoid(exp(a_log) x)) if least_log, where dt = softplus(x)
    mamba1:       r, k, q = v Wdt_low, v Wk, v Wq;   r, k, q = norm(r, dt_norm), norm(k, k_norm), norm(q, q_norm)
                  dt = softplus(r Wdt + dt_bias)     one per value; the norms if inner_eps, which is their eps
                  S_t = exp(−exp(a_logᵀ) dt) S_{t−1} + k (dt v)ᵀ;   y = (Sᵀ q + skip v) silu(z)
    rg_lru:       u_t = Σ_i conv[:, i] u_{t − conv_kernel + 1 + i} + conv_bias      without silu
                  write, forget = sigmoid(v Wwrite + write_bias), sigmoid(v Wforget + forget_bias)   blocks: see below
                  log_a = −8 softplus(a) forget;   S_t = exp(log_a) S_{t−1} + sqrt(1 − exp(2 log_a)) write v
                  S_0 = write v of the first token;   y = S gelu_tanh(z)
    short_conv:   u = (h Wbeta + bbeta) (h Wv + bv);   y = (Σ_i conv[:, i] u_{t − conv_kernel + 1 + i} + conv_bias) z

    x += y Wo + bo

    mixed_qkv:    u_t = [h Wq + bq, h Wk + bk] of all heads;   l_t = h Wlate_v
                  d_t = Σ_i conv[:, i] u_{t − conv_kernel + 1 + i} + conv_bias            per channel, without silu
                  m_t = Σ_i heads_conv[:, :, i] d_{t − heads_kernel + 1 + i} + heads_conv_bias        per head
                  r = (q + k) / 2 for each query head, with the k of its key head
                  q = m + r;   k = m + the mean of r of its query heads;   v = [h Wv + bv, l_{t−1} + blate_v]

The heads q, k and v of mixed_qkv are its outputs, in place of the last sum: the attention of the next layer reads them.

The biases of h W are there if in_bias, bo if o_bias.

With sigmoid_gate, it is sigmoid(z) in place of silu(z).
With scales, the products h W + b of v, k, q, z and dt (mamba2) are multiplied by these numbers first.

The state is S [key_dim, value_dim] of each head and the last conv_kernel − 1 inputs u of the convolution, in float32.
short_conv has no S: its key_dim is 0, and it has one head. mixed_qkv has none either; it has the last inputs u and l of
both convolutions. num_heads and num_key_heads are those of attention, and value_dim is the size of all heads. mamba1
has one head, too; a_log is [value_dim, key_dim], so that each number of S decays by itself. rg_lru has one head, whose
key_dim is 1; Wwrite and Wforget are [value_dim, rank]: the outputs of each block of ``rank`` adjacent ones read the
values of this block alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

RecurrentKind = Literal["mamba2", "gated_delta", "short_conv", "mamba1", "rg_lru", "mixed_qkv"]
Normed = Literal["last", "first", "never"]
"""The place where the outputs of mamba2 are normed: after the gate, before it, or not at all."""
Scales = tuple[float, float, float, float, float]
"""Factors of the inputs v, k, q, z and dt of mamba2."""
INNER_NORMS = ("dt_norm", "k_norm", "q_norm")
"""The norms of the products of v of mamba1, in the order of these."""
GATES = ("write", "forget")
"""The gates of rg_lru."""
RECURRENT_KINDS: tuple[RecurrentKind, ...] = get_args(RecurrentKind)


@dataclass(frozen=True, slots=True)
class RecurrentSpec:
    """A recurrent layer's kind and sizes; the module docstring gives the arithmetic. In the literature of Mamba 2,
    q is C, k is B and v is x; num_key_heads is its number of groups and key_dim the size of its state.

    rank: the size of r of mamba1; of gated_delta, that of h Wz_low and of h Wdt_low, 0 if it has neither; of rg_lru,
    that of a block. inner_eps: see there; None: it has no inner norms. norm_eps: that of ``norm``; None: that of the
    model. least_log: below zero; None: decays have no bound. heads_kernel: of the second convolution of mixed_qkv.
    """

    kind: RecurrentKind
    num_heads: int
    num_key_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int
    conv_bias: bool = False
    tiled: bool = False
    normed: Normed = "last"
    least_step: float = 0.0
    scales: Scales | None = None
    in_bias: bool = False
    o_bias: bool = False
    rank: int = 0
    inner_eps: float | None = None
    write_scale: float = 1.0
    norm_eps: float | None = None
    channel_decays: bool = False
    least_log: float | None = None
    sigmoid_gate: bool = False
    joint_norm: bool = False
    heads_kernel: int = 1

    def scale_of(self, part: str) -> float:
        """Return the number that the product of v, k, q, z or dt is multiplied by."""
        return 1.0 if self.scales is None else self.scales["vkqzd".index(part[0])]

    @property
    def parts(self) -> tuple[tuple[str, int], ...]:
        """The channels of the convolution in their order: (q, k or v; number of channels)."""
        keys = self.num_key_heads * self.key_dim
        if self.kind in ("short_conv", "mamba1", "rg_lru"):
            return (("v", self.num_values),)
        if self.kind == "mixed_qkv":
            of_keys = self.num_key_heads * self.value_dim
            return (("q", self.num_values), ("k", of_keys), ("late_v", of_keys // 2))
        sizes = (("q", keys), ("k", keys), ("v", self.num_values))
        return sizes if self.kind == "gated_delta" else sizes[::-1]

    @property
    def num_values(self) -> int:
        """The number of outputs of all heads."""
        return self.num_heads * self.value_dim

    @property
    def num_decays(self) -> int:
        """The number of decays of a token."""
        return self.num_heads * (self.key_dim if self.channel_decays else 1)

    @property
    def num_channels(self) -> int:
        """The number of channels of the convolution."""
        return sum(size for _, size in self.parts)

    @property
    def num_blocks(self) -> int:
        """The number of blocks of the gates of rg_lru."""
        return self.num_values // self.rank

    @property
    def norm_size(self) -> int:
        """The number of weights of the norm: one for each output of mamba2, shared by the heads of gated_delta."""
        return self.num_values if self.kind == "mamba2" else self.value_dim

    @property
    def state_size(self) -> int:
        """The number of floats in the state of one request in one layer."""
        return self.num_values * self.key_dim + self.num_inputs * self.num_channels

    @property
    def num_inputs(self) -> int:
        """The number of inputs of its convolutions that a state has for each channel."""
        return self.conv_kernel - 1 + self.heads_kernel - 1

    @property
    def num_mixed(self) -> int:
        """The number of channels of the convolutions of mixed_qkv."""
        return self.num_channels - self.num_late

    @property
    def num_late(self) -> int:
        """The number of values of mixed_qkv that are those of the token before: half of them."""
        return self.num_key_heads * self.value_dim // 2

    def weight_names(self, hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the canonical names of a layer's weights and their shapes, as `foreword.models.spec.weight_names`."""
        last = self.last_parts
        inputs = [*self.parts, *([(f"{name}_low", self.rank) for name, _ in last] if self.has_low_parts else last)]
        if self.kind in ("gated_delta", "short_conv"):
            inputs.append(("beta", self.num_values if self.kind == "short_conv" else self.num_heads))
        if self.kind == "mixed_qkv":
            yield from self._mixed_names(hidden)
            return
        for part, size in inputs:
            yield part, (size, hidden)
            if self.in_bias:
                yield in_bias_of(part), (size,)
        for part, size in last if self.has_low_parts else ():
            yield part, (size, self.rank)
        yield "conv", (self.num_channels, self.conv_kernel)
        if self.conv_bias:
            yield "conv_bias", (self.num_channels,)
        if self.kind == "mamba1":
            yield from self._selective_names()
        elif self.kind == "rg_lru":
            for name in GATES:
                yield name, (self.num_values, self.rank)
                yield f"{name}_bias", (self.num_values,)
            yield "a", (self.num_values,)
        elif self.kind != "short_conv":
            yield "dt_bias", (self.num_decays,)
            yield "a_log", (self.num_heads,)
            if self.kind == "mamba2":
                yield "skip", (self.num_heads,)
            if self.normed != "never":
                yield "norm", (self.norm_size,)
        yield "o", (hidden, self.num_values)
        if self.o_bias:
            yield "o_bias", (hidden,)

    @property
    def has_low_parts(self) -> bool:
        """True if z and dt are products of products of h."""
        return self.kind == "gated_delta" and self.rank > 0

    @property
    def last_parts(self) -> tuple[tuple[str, int], ...]:
        """The parts of a token besides the channels and beta: (z or dt, or v of mixed_qkv; number of outputs)."""
        if self.kind == "mixed_qkv":
            return (("v", self.num_late),)
        gate = (("z", self.num_values),)
        return (*gate, ("dt", self.num_decays)) if self.kind in ("mamba2", "gated_delta") else gate

    @property
    def inner_parts(self) -> tuple[tuple[str, int], ...]:
        """The products of v of mamba1 in their order: (name, number of outputs)."""
        return (("dt_low", self.rank), ("k", self.key_dim), ("q", self.key_dim)) if self.kind == "mamba1" else ()

    def _mixed_names(self, hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the names and shapes of mixed_qkv."""
        for part, size in (*self.parts, *self.last_parts):
            yield part, (size, hidden)
            if self.in_bias:
                yield in_bias_of(part), (size,)
        yield "conv", (self.num_mixed, self.conv_kernel)
        yield "conv_bias", (self.num_mixed,)
        yield "heads_conv", (self.num_mixed, self.value_dim, self.heads_kernel)
        yield "heads_conv_bias", (self.num_mixed,)

    def _selective_names(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the names and shapes of what mamba1 has besides products of h and the convolution."""
        for name, size in self.inner_parts:
            yield name, (size, self.num_values)
        for name, size in zip(INNER_NORMS, (self.rank, self.key_dim, self.key_dim), strict=True):
            if self.inner_eps is not None:
                yield name, (size,)
        yield "dt", (self.num_values, self.rank)
        yield "dt_bias", (self.num_values,)
        yield "a_log", (self.num_values, self.key_dim)
        yield "skip", (self.num_values,)


def in_bias_of(part: str) -> str:
    """Return the name of the bias of h W for a part, where dt_bias is another number."""
    return f"{part}_in_bias"
