"""Recurrent layers on tensors: `foreword.models.recurrent`, one token of every request at a time.

The large products are of the model's dtype; rates, convolution and states are float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import gelu, rms_norm, silu, softplus

from foreword.executors.torch.step import PagedStep, RecurrentStep
from foreword.executors.torch.weights import Linear, Loader
from foreword.models.recurrent import GATES, INNER_NORMS, RecurrentSpec, in_bias_of
from foreword.models.spec import DecoderSpec


class RecurrentLayer:
    """A recurrent layer, for its normed input [T, hidden]."""

    def __init__(self, own: RecurrentSpec, spec: DecoderSpec, index: int, load: Loader) -> None:
        prefix = f"{spec.prefix_of(index)}state."
        self.index, self.group = state_place(spec, index)
        self.spec, self.is_delta = own, own.kind == "gated_delta"
        self.eps = spec.norm_eps if own.norm_eps is None else own.norm_eps
        self.is_short = own.kind == "short_conv"
        self.has_small_rates = not (own.channel_decays or own.has_low_parts)  # which are computed in float32
        last = [name for name, _ in own.last_parts if name == "z" or not self.has_small_rates]
        lows = [f"{name}_low" for name in last] if own.has_low_parts else last
        parts = [*(name for name, _ in own.parts), *lows, *(["beta"] if self.is_short else [])]
        self.inputs = load.linear(prefix, parts)
        self.last = [load.linear(prefix, [name]) for name in last] if own.has_low_parts else []
        self.bias = self._in_biases(prefix, parts, load)
        self.output = load.linear(prefix, ["o"], biases=["o"] if own.o_bias else ())
        self.products = [self.inputs, self.output]
        self.conv = load(prefix + "conv", torch.float32)
        self.conv_bias = load(prefix + "conv_bias", torch.float32) if own.conv_bias else None
        if self.is_short:
            return
        if own.kind == "mamba1":
            self._load_selective(prefix, load)
            return
        if own.kind == "rg_lru":
            self.gates = [load(prefix + name, torch.float32).unflatten(0, (own.num_blocks, -1)) for name in GATES]
            self.gate_biases = [load(f"{prefix}{name}_bias", torch.float32) for name in GATES]
            self.rate = 8 * softplus(load(prefix + "a", torch.float32))
            return
        rates = [*(["dt"] if self.has_small_rates else []), *(["beta"] if self.is_delta else [])]
        self.rates = load.linear(prefix, rates, dtype=torch.float32)
        self.rates_bias = self._in_biases(prefix, rates, load)
        self.products += [*self.last, self.rates]
        self.scales: Tensor | None = None  # factors of the outputs of ``inputs``
        if own.scales is not None:
            sizes = [*own.parts, ("z", own.num_values)]
            self.scales = torch.cat([torch.full((size,), own.scale_of(name)) for name, size in sizes]).to(load.device)
        self.dt_bias = load(prefix + "dt_bias", torch.float32)
        self.rate = load(prefix + "a_log", torch.float32).exp()[:, None]
        self.norm = None if own.normed == "never" else load(prefix + "norm", torch.float32)
        self.skip = None if self.is_delta else load(prefix + "skip", torch.float32)

    def _in_biases(self, prefix: str, parts: Sequence[str], load: Loader) -> Tensor | None:
        """Return the biases of the layer's inputs side by side; None if it has none."""
        if not self.spec.in_bias:
            return None
        return torch.cat([load(prefix + in_bias_of(part), torch.float32) for part in parts])

    def __call__(self, x: Tensor, inputs: PagedStep) -> Tensor:
        own, step = self.spec, inputs.recurrent
        assert step is not None
        h = x[step.tokens]
        projected = product(self.inputs, h, inputs).float()
        if self.bias is not None:
            projected += self.bias
        if own.scales is not None:
            projected *= self.scales
        of_gate = own.rank if own.has_low_parts else own.num_values
        u, z, rest = projected.tensor_split((own.num_channels, own.num_channels + of_gate), dim=1)
        if self.is_short:
            return self._short(h, u * rest, z, inputs, step)
        if own.kind == "mamba1":
            return self._selective(h, u, z, inputs, step)
        if own.kind == "rg_lru":
            return self._gated_linear(h, u, z, inputs, step)
        if self.last:
            lows = zip(self.last, (z, rest), strict=True)
            z, rest = (product(second, low.to(h.dtype), inputs).float() for second, low in lows)
        rates = product(self.rates, h.float(), inputs)
        if self.rates_bias is not None:
            rates += self.rates_bias
        if own.scales is not None:
            rates *= own.scale_of("dt")
        beta = rates
        if self.has_small_rates:
            rest, beta = rates.tensor_split((own.num_heads,), dim=1)
        steps = (rest + self.dt_bias).unflatten(1, (own.num_heads, -1))  # [T, heads, 1 or key_dim]
        dt = softplus(steps).clamp(min=own.least_step)
        log_decay = -self.rate * dt if own.least_log is None else own.least_log * (self.rate * steps).sigmoid()
        decay, beta = log_decay.exp(), own.write_scale * beta.sigmoid() if self.is_delta else dt

        states, written = step.states[self.index], step.written[self.group]
        state = states[step.read[self.group]].masked_fill(step.is_new[:, None], 0)
        size = own.num_values * own.key_dim
        matrices = state[:, :size].contiguous().view(-1, own.num_heads, own.key_dim, own.value_dim)
        known = torch.cat((state[:, size:].reshape(-1, own.num_channels), u))
        window, kept = step.convolution(own.conv_kernel)
        y, after = self._scan(self._convolve(known, window), decay, beta, matrices, step)
        states[written, :size] = after.flatten(1)
        states[written, size:] = known[kept].flatten(1)

        out = torch.empty_like(h)
        gate = z.sigmoid() if own.sigmoid_gate else silu(z)
        out[step.tokens] = product(self.output, self._gated(y, gate).to(h.dtype), inputs)
        return out

    def _short(self, h: Tensor, u: Tensor, z: Tensor, inputs: PagedStep, step: RecurrentStep) -> Tensor:
        """Return the output of short_conv [T, hidden] for its channels u and its gate z."""
        own, states = self.spec, step.states[self.index]
        past = states[step.read[self.group]].masked_fill(step.is_new[:, None], 0)
        known = torch.cat((past.reshape(-1, own.num_channels), u))
        window, kept = step.convolution(own.conv_kernel)
        states[step.written[self.group]] = known[kept].flatten(1)
        out = torch.empty_like(h)
        out[step.tokens] = product(self.output, (self._weighted(known, window) * z).to(h.dtype), inputs)
        return out

    def _load_selective(self, prefix: str, load: Loader) -> None:
        """Load what only mamba1 has, in float32."""
        own = self.spec
        self.inner = load.linear(prefix, [name for name, _ in own.inner_parts], dtype=torch.float32)
        self.dt = load.linear(prefix, ["dt"], dtype=torch.float32)
        self.products += [self.inner, self.dt]
        norms = INNER_NORMS if own.inner_eps is not None else ()
        self.inner_norms = [load(prefix + name, torch.float32) for name in norms]
        self.dt_bias, self.skip = (load(prefix + name, torch.float32) for name in ("dt_bias", "skip"))
        self.rate = load(prefix + "a_log", torch.float32).exp().T.contiguous()  # [key_dim, channels]

    def _selective(self, h: Tensor, u: Tensor, z: Tensor, inputs: PagedStep, step: RecurrentStep) -> Tensor:
        """Return the output of mamba1 [T, hidden] for its channels u and its gate z."""
        own, states, size = self.spec, step.states[self.index], self.spec.num_values * self.spec.key_dim
        state = states[step.read[self.group]].masked_fill(step.is_new[:, None], 0)
        matrices = state[:, :size].contiguous().view(-1, own.key_dim, own.value_dim)
        known = torch.cat((state[:, size:].reshape(-1, own.num_channels), u))
        window, kept = step.convolution(own.conv_kernel)
        v = self._convolve(known, window)
        parts = list(product(self.inner, v, inputs).split([size for _, size in own.inner_parts], dim=1))
        if own.inner_eps is not None:
            eps, pairs = own.inner_eps, zip(parts, self.inner_norms, strict=True)
            parts = [rms_norm(part, weight.shape, weight, eps) for part, weight in pairs]
        low, k, q = parts
        dt = softplus(product(self.dt, low, inputs) + self.dt_bias)
        new, y, drafted = dt * v, torch.empty_like(v), []
        for t, (start, end) in enumerate(pairwise(step.begins)):
            rows, s = slice(start, end), matrices[: end - start]
            s.mul_(torch.exp(-self.rate * dt[rows, None])).addcmul_(k[rows, :, None], new[rows, None])
            torch.bmm(q[rows, None], s, out=y[rows, None])
            if t in step.before_drafts:
                drafted.append(matrices[step.before_drafts[t]])
        written = step.written[self.group]
        states[written, :size] = torch.cat((matrices, *drafted)).flatten(1)
        states[written, size:] = known[kept].flatten(1)
        out = torch.empty_like(h)
        out[step.tokens] = product(self.output, ((y + self.skip * v) * silu(z)).to(h.dtype), inputs)
        return out

    def _gated_linear(self, h: Tensor, u: Tensor, z: Tensor, inputs: PagedStep, step: RecurrentStep) -> Tensor:
        """Return the output of rg_lru [T, hidden] for its channels u and its gate z."""
        own, states, size = self.spec, step.states[self.index], self.spec.num_values
        state = states[step.read[self.group]].masked_fill(step.is_new[:, None], 0)
        values, known = state[:, :size].clone(), torch.cat((state[:, size:].reshape(-1, own.num_channels), u))
        window, kept = step.convolution(own.conv_kernel)
        v = self._weighted(known, window)
        blocks = v.unflatten(1, (own.num_blocks, own.rank))
        products = (torch.einsum("tbi,boi->tbo", blocks, matrix).flatten(1) for matrix in self.gates)
        write, forget = ((x + bias).sigmoid() for x, bias in zip(products, self.gate_biases, strict=True))
        log_a, first = -self.rate * forget, step.begins[1]
        scale = torch.sqrt(-torch.expm1(2 * log_a))
        scale[:first].masked_fill_(step.is_new[:first, None], 1)
        decay, y, drafted = torch.exp(log_a), scale * write * v, []
        for t, (start, end) in enumerate(pairwise(step.begins)):
            y[start:end] = values[: end - start].mul_(decay[start:end]).add_(y[start:end])
            if t in step.before_drafts:
                drafted.append(values[step.before_drafts[t]])
        written = step.written[self.group]
        states[written, :size] = torch.cat((values, *drafted))
        states[written, size:] = known[kept].flatten(1)
        out = torch.empty_like(h)
        out[step.tokens] = product(self.output, (y * gelu(z, approximate="tanh")).to(h.dtype), inputs)
        return out

    def _convolve(self, known: Tensor, window: Tensor) -> Tensor:
        """Return silu of the causal convolution, per channel, [T, channels]."""
        return silu(self._weighted(known, window))

    def _weighted(self, known: Tensor, window: Tensor) -> Tensor:
        """Return the causal convolution, per channel. [T, channels]"""
        out = known[window[:, 0]] * self.conv[:, 0]
        for i in range(1, self.spec.conv_kernel):
            out.addcmul_(known[window[:, i]], self.conv[:, i])
        return out if self.conv_bias is None else out + self.conv_bias

    def _scan(
        self, u: Tensor, decay: Tensor, beta: Tensor, matrices: Tensor, step: RecurrentStep
    ) -> tuple[Tensor, Tensor]:
        """Return y [T, heads, value_dim], and the matrices that are kept [kept, heads, key_dim, value_dim].

        matrices: [requests, heads, key_dim, value_dim] before the step, written too.
        decay: [T, heads, 1 or key_dim]. beta: of as many numbers as T · heads, the factor of what is written.
        """
        own = self.spec
        parts = dict(zip((name for name, _ in own.parts), u.split([size for _, size in own.parts], dim=1), strict=True))
        q, k = (parts[name].unflatten(1, (own.num_key_heads, own.key_dim)) for name in "qk")
        if self.is_delta:
            q, k = unit(q) * own.key_dim**-0.5, unit(k)
        per_key = own.num_heads // own.num_key_heads
        q, k = (x.repeat(1, per_key, 1) if own.tiled else x.repeat_interleave(per_key, dim=1) for x in (q, k))
        q, k = q.flatten(0, 1), k.flatten(0, 1)  # [T · heads, key_dim]
        v = parts["v"].reshape(-1, 1, own.value_dim)  # [T · heads, 1, value_dim]
        decay, beta = decay.reshape(len(v), -1, 1), beta.reshape(-1, 1, 1)
        new = beta * v
        y = torch.empty_like(v)
        state = matrices.view(-1, own.key_dim, own.value_dim)
        drafted = []
        for t, (start, end) in enumerate(pairwise(begin * own.num_heads for begin in step.begins)):
            rows = slice(start, end)
            s = state[: end - start].mul_(decay[rows])
            if self.is_delta:
                new[rows] -= beta[rows] * torch.bmm(k[rows, None], s)
            s.baddbmm_(k[rows, :, None], new[rows])
            torch.bmm(q[rows, None], s, out=y[rows])
            if t in step.before_drafts:
                drafted.append(matrices[step.before_drafts[t]])
        if self.skip is not None:
            y = y + self.skip.repeat(len(u))[:, None, None] * v
        return y.view(len(u), own.num_heads, own.value_dim), torch.cat((matrices, *drafted)) if drafted else matrices

    def _gated(self, y: Tensor, gate: Tensor) -> Tensor:
        """Return the gated and normed outputs [T, num_values]. gate: [T, num_values]"""
        if self.norm is None:
            return y.flatten(1) * gate
        if self.is_delta:
            return rms_norm(y, self.norm.shape, self.norm, self.eps).flatten(1) * gate
        is_first = self.spec.normed == "first"
        parts = 1 if self.spec.joint_norm else self.spec.num_key_heads
        out = (y.flatten(1) if is_first else y.flatten(1) * gate).unflatten(1, (parts, -1))
        out = rms_norm(out, out.shape[2:], None, self.eps).flatten(1) * self.norm
        return out * gate if is_first else out


def state_place(spec: DecoderSpec, index: int) -> tuple[int, int]:
    """Return the number of a layer among the recurrent ones, whose states the cache has so, and its KV group."""
    number = sum(layer.recurrent is not None for layer in spec.layers[:index])
    return number, next(g for g, group in enumerate(spec.kv_groups()) if index in group.layers)


def product(of: Linear, x: Tensor, inputs: PagedStep) -> Tensor:
    """Return a product of rows that are in the order of `RecurrentStep.tokens`, with the changes of the step's
    adapters.
    """
    if inputs.loras is None:
        return of(x)
    assert inputs.recurrent is not None
    in_order = torch.empty_like(x)
    in_order[inputs.recurrent.tokens] = x
    return of(in_order, inputs.loras)[inputs.recurrent.tokens]


def unit(x: Tensor) -> Tensor:
    """Return x / sqrt(Σ x² + 1e-6) over the last axis."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
