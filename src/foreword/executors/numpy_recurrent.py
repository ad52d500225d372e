"""Recurrent layers in float32 NumPy, token by token: `foreword.models.recurrent` line by line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from foreword.arrays import F32
from foreword.batch import InputBatch, state_indices
from foreword.executors.functions import gelu_tanh, rms_norm, sigmoid, silu, softplus
from foreword.models.recurrent import GATES, INNER_NORMS, RecurrentSpec, in_bias_of

StateRun = tuple[slice, int, int]
"""Consecutive tokens of a request after which its state is kept, the entry of the states that it is read from, −1 for a
new request, and the one that it is written to.
"""


Product = Callable[[F32, str, slice], F32]
"""Multiplies numbers of some tokens by a matrix, by its name: x Wᵀ, with the changes of the tokens' adapters."""


def recurrent_layer(
    h: F32,
    weight: Callable[[str], F32],
    product: Product,
    spec: RecurrentSpec,
    norm_eps: float,
    states: F32,
    runs: Sequence[StateRun],
) -> F32:
    """Return the layer's output [T, hidden] before the residual sum, or of mixed_qkv q, k and v side by side; h: its
    normed input [T, hidden].

    states: float32 [number, ≥ state_size]: read and written as ``runs`` say, see `state_runs`.
    """
    if spec.kind == "short_conv":
        return _short_conv(h, weight, product, spec, states, runs)
    if spec.kind == "mamba1":
        return _selective(h, weight, product, spec, states, runs)
    if spec.kind == "mixed_qkv":
        return _mixed_heads(h, weight, product, spec, states, runs)
    if spec.kind == "rg_lru":
        return _gated_linear(h, weight, product, spec, states, runs)
    inputs = {
        name: _input(h, name, spec, weight, product) * np.float32(spec.scale_of(name))
        for name in ("q", "k", "v", "z", "dt")
    }
    u = np.concatenate([inputs[part] for part, _ in spec.parts], axis=1)  # [T, channels]
    steps = (inputs["dt"] + weight("dt_bias")).reshape(len(h), spec.num_heads, -1)  # [T, heads, 1 or key_dim]
    rates, dt = np.exp(weight("a_log"))[:, None], np.maximum(softplus(steps), spec.least_step)
    decay = np.exp(-rates * dt if spec.least_log is None else np.float32(spec.least_log) * sigmoid(rates * steps))
    beta = dt[..., 0]
    if spec.kind == "gated_delta":
        beta = np.float32(spec.write_scale) * sigmoid(_input(h, "beta", spec, weight, product))
    y = np.empty((len(h), spec.num_heads, spec.value_dim), np.float32)
    matrix_size = spec.num_values * spec.key_dim
    for tokens, state in _with_states(runs, states[:, : spec.state_size]):
        matrices = state[:matrix_size].reshape(spec.num_heads, spec.key_dim, spec.value_dim)
        past = state[matrix_size:].reshape(-1, spec.num_channels)
        known = np.concatenate([past, u[tokens]])
        past[:] = known[len(known) - len(past) :]
        y[tokens] = scan(convolve(known, spec, weight), decay[tokens], beta[tokens], matrices, spec, weight)
    gate = sigmoid(inputs["z"]) if spec.sigmoid_gate else silu(inputs["z"])
    norm_eps = norm_eps if spec.norm_eps is None else spec.norm_eps
    out: F32
    if spec.kind == "mamba2":
        out = y.reshape(gate.shape) * (1 if spec.normed == "first" else gate)
        if spec.normed != "never":
            parts = out.reshape(len(h), 1 if spec.joint_norm else spec.num_key_heads, -1)
            out = rms_norm(parts, norm_eps).reshape(gate.shape) * weight("norm")
        out = out * gate if spec.normed == "first" else out
    else:
        out = (rms_norm(y, norm_eps) * weight("norm")).reshape(gate.shape) * gate
    return _output(out, spec, weight, product)


def _input(h: F32, name: str, spec: RecurrentSpec, weight: Callable[[str], F32], product: Product) -> F32:
    """Return h W of a part, plus the bias if it has one; h Wlow W of a part that has both."""
    tokens = slice(0, len(h))
    if spec.has_low_parts and name in ("z", "dt"):
        h = product(h, f"{name}_low", tokens)
    out = product(h, name, tokens)
    return out + weight(in_bias_of(name)) if spec.in_bias else out


def _output(y: F32, spec: RecurrentSpec, weight: Callable[[str], F32], product: Product) -> F32:
    out = product(y, "o", slice(0, len(y)))
    return out + weight("o_bias") if spec.o_bias else out


def state_runs(batch: InputBatch, group: int, first: int) -> list[StateRun]:
    """Return the runs of a step for the layers of a KV group, in the order of their tokens. first: the block that is
    entry 0 of the states.
    """
    runs: list[StateRun] = []
    blocks = state_indices(batch, group)
    for b in range(batch.num_reqs):
        num_drafts, end = int(batch.num_draft_tokens[b]), int(batch.query_start_loc[b + 1])
        first_draft, after = end - num_drafts, int(blocks.write[b]) - first
        before = int(blocks.read[b]) - first if blocks.read[b] >= 0 else -1
        runs.append((slice(int(batch.query_start_loc[b]), first_draft), before, after))
        for t, block in enumerate(blocks.drafts[b, :num_drafts].tolist(), first_draft):
            before, after = after, block - first
            runs.append((slice(t, t + 1), before, after))
    return runs


def _with_states(runs: Sequence[StateRun], states: F32) -> Iterator[tuple[slice, F32]]:
    """Yield the tokens of each run, and the state before them, to be replaced by the state after them."""
    for tokens, before, after in runs:
        if before != after:
            states[after] = 0 if before < 0 else states[before]
        yield tokens, states[after]


def _short_conv(
    h: F32, weight: Callable[[str], F32], product: Product, spec: RecurrentSpec, states: F32, runs: Sequence[StateRun]
) -> F32:
    """See `recurrent_layer`."""
    write, v, z = (_input(h, name, spec, weight, product) for name in ("beta", "v", "z"))  # [T, channels]
    u = write * v
    y = np.empty_like(u)
    for tokens, state in _with_states(runs, states[:, : spec.state_size]):
        past = state.reshape(-1, spec.num_channels)
        known = np.concatenate([past, u[tokens]])
        past[:] = known[len(known) - len(past) :]
        y[tokens] = _weighted(known, spec, weight)
    return _output(y * z, spec, weight, product)


def _selective(
    h: F32, weight: Callable[[str], F32], product: Product, spec: RecurrentSpec, states: F32, runs: Sequence[StateRun]
) -> F32:
    """See `recurrent_layer`."""
    u, z = (_input(h, name, spec, weight, product) for name in ("v", "z"))  # [T, channels]
    y, rates, matrix_size = np.empty_like(u), np.exp(weight("a_log")).T, spec.num_values * spec.key_dim
    for tokens, state in _with_states(runs, states[:, : spec.state_size]):
        matrix = state[:matrix_size].reshape(spec.key_dim, spec.value_dim)
        past = state[matrix_size:].reshape(-1, spec.num_channels)
        known = np.concatenate([past, u[tokens]])
        past[:] = known[len(known) - len(past) :]
        v = convolve(known, spec, weight)
        r, k, q = (product(v, name, tokens) for name, _ in spec.inner_parts)
        if spec.inner_eps is not None:
            r, k, q = (
                rms_norm(x, spec.inner_eps) * weight(name) for x, name in zip((r, k, q), INNER_NORMS, strict=True)
            )
        dt = softplus(np.add(product(r, "dt", tokens), weight("dt_bias"), dtype=np.float32))  # [T, channels]
        for t in range(len(v)):
            matrix *= np.exp(-rates * dt[t])
            matrix += k[t][:, None] * (dt[t] * v[t])
            y[tokens][t] = q[t] @ matrix
        y[tokens] += weight("skip") * v
    return _output(y * silu(z), spec, weight, product)


def _gated_linear(
    h: F32, weight: Callable[[str], F32], product: Product, spec: RecurrentSpec, states: F32, runs: Sequence[StateRun]
) -> F32:
    """See `recurrent_layer`."""
    u, z = (_input(h, name, spec, weight, product) for name in ("v", "z"))  # [T, channels]
    y, rate = np.empty_like(u), np.float32(8) * softplus(weight("a"))
    matrices = [weight(name).reshape(spec.num_blocks, spec.rank, spec.rank) for name in GATES]
    for (_, before, _), (tokens, state) in zip(runs, _with_states(runs, states[:, : spec.state_size]), strict=True):
        last, past = state[: spec.num_values], state[spec.num_values :].reshape(-1, spec.num_channels)
        known = np.concatenate([past, u[tokens]])
        past[:] = known[len(known) - len(past) :]
        v = _weighted(known, spec, weight)
        blocks = v.reshape(len(v), spec.num_blocks, spec.rank)
        write, forget = (
            sigmoid(np.einsum("tbi,boi->tbo", blocks, matrix).reshape(v.shape) + weight(f"{name}_bias"))
            for name, matrix in zip(GATES, matrices, strict=True)
        )
        log_a = -rate * forget
        scale = np.sqrt(-np.expm1(2 * log_a))
        if before < 0:
            scale[:1] = 1
        decay, new = np.exp(log_a), scale * write * v
        for t in range(len(v)):
            last[:] = decay[t] * last + new[t]
            y[tokens][t] = last
    return _output(y * gelu_tanh(z), spec, weight, product)


def _mixed_heads(
    h: F32, weight: Callable[[str], F32], product: Product, spec: RecurrentSpec, states: F32, runs: Sequence[StateRun]
) -> F32:
    """See `recurrent_layer`."""
    tokens, dim, num_key_heads = slice(0, len(h)), spec.value_dim, spec.num_key_heads
    q, k, v = (_input(h, name, spec, weight, product) for name in ("q", "k", "v"))
    u = np.concatenate([q, k, product(h, "late_v", tokens)], axis=1)
    mixed, late = np.empty((len(h), spec.num_mixed), np.float32), np.empty((len(h), spec.num_late), np.float32)
    for run, state in _with_states(runs, states[:, : spec.state_size]):
        past = state.reshape(-1, spec.num_channels)
        known = np.concatenate([past, u[run]])
        past[:] = known[len(known) - len(past) :]
        late[run] = known[len(past) - 1 : -1, spec.num_mixed :]
        inner = _weighted(known[:, : spec.num_mixed], spec, weight)
        windows = np.lib.stride_tricks.sliding_window_view(inner, spec.heads_kernel, axis=0)
        windows = windows.reshape(len(windows), -1, dim, spec.heads_kernel)
        of_heads = weight("heads_conv").reshape(-1, dim, dim, spec.heads_kernel)
        mixed[run] = np.einsum("thci,hoci->tho", windows, of_heads, optimize=True).reshape(len(windows), -1)
    mixed += weight("heads_conv_bias")
    if spec.in_bias:
        late += weight(in_bias_of("late_v"))
    own = q.reshape(len(h), num_key_heads, -1, dim), k.reshape(len(h), num_key_heads, 1, dim)
    rest = (own[0] + own[1]) * np.float32(0.5)
    mixed += np.concatenate([rest.reshape(len(h), -1), rest.mean(2).reshape(len(h), -1)], axis=1)
    return np.concatenate([mixed, v, late], axis=1)


def _weighted(u: F32, spec: RecurrentSpec, weight: Callable[[str], F32]) -> F32:
    """Return the causal convolution of u [conv_kernel − 1 + T, channels], per channel. [T, channels]"""
    windows = np.lib.stride_tricks.sliding_window_view(u, spec.conv_kernel, axis=0)  # [T, channels, conv_kernel]
    out: F32 = np.einsum("tck,ck->tc", windows, weight("conv"))
    return out + weight("conv_bias") if spec.conv_bias else out


def convolve(u: F32, spec: RecurrentSpec, weight: Callable[[str], F32]) -> F32:
    """Return silu of the causal convolution over u [conv_kernel − 1 + T, channels], per channel, as [T, channels]."""
    return silu(_weighted(u, spec, weight))


def scan(u: F32, decay: F32, beta: F32, states: F32, spec: RecurrentSpec, weight: Callable[[str], F32]) -> F32:
    """Return y [T, heads, value_dim] of one request; states [heads, key_dim, value_dim] is read and written.

    decay: [T, heads, 1 or key_dim]; beta: [T, heads], the factor of what is written: dt or write_scale sigmoid(h
    Wbeta).
    """
    ends = np.cumsum([size for _, size in spec.parts])
    parts = dict(zip((name for name, _ in spec.parts), np.split(u, ends[:-1], axis=1), strict=True))
    heads = np.arange(spec.num_heads)
    key_heads = heads % spec.num_key_heads if spec.tiled else heads // (spec.num_heads // spec.num_key_heads)
    q, k = (parts[x].reshape(len(u), -1, spec.key_dim)[:, key_heads] for x in "qk")
    v = parts["v"].reshape(len(u), spec.num_heads, spec.value_dim)
    delta = spec.kind == "gated_delta"
    if delta:
        q, k = unit(q) * np.float32(spec.key_dim**-0.5), unit(k)
    y = np.empty_like(v)
    for t in range(len(u)):
        states *= decay[t, :, :, None]
        new = v[t] - np.einsum("hkv,hk->hv", states, k[t]) if delta else v[t]
        states += k[t][:, :, None] * (beta[t, :, None] * new)[:, None, :]
        y[t] = np.einsum("hkv,hk->hv", states, q[t])
    return y if delta else y + weight("skip")[:, None] * v


def unit(x: F32) -> F32:
    """Return x / sqrt(Σ x² + 1e-6) over the last axis."""
    out: F32 = x / np.sqrt(np.square(x).sum(-1, keepdims=True) + np.float32(1e-6))
    return out
