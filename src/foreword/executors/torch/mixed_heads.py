"""Queries, keys and values of attention that pass convolutions: mixed_qkv of `foreword.models.recurrent`."""

from __future__ import annotations

import torch
from torch import Tensor

from foreword.executors.torch.recurrent import product, state_place
from foreword.executors.torch.shard import Shard
from foreword.executors.torch.step import PagedStep
from foreword.executors.torch.weights import Loader
from foreword.models.recurrent import RecurrentSpec, in_bias_of
from foreword.models.spec import DecoderSpec, HeadShape


class MixedHeads:
    """A layer of kind mixed_qkv, for its normed input [T, hidden]. Its output is q, k and v side by side, of all heads.

    The convolutions are float32.
    """

    def __init__(self, own: RecurrentSpec, spec: DecoderSpec, index: int, load: Loader) -> None:
        prefix = f"{spec.prefix_of(index)}state."
        self.spec, (self.index, self.group) = own, state_place(spec, index)
        parts = (*own.parts, *own.last_parts)
        self.inputs = load.linear(prefix, [name for name, _ in parts])
        self.products = [self.inputs]
        self.bias = self.late_bias = torch.zeros((), device=load.device)
        if own.in_bias:
            biases = {name: load(prefix + in_bias_of(name), torch.float32) for name, _ in parts}
            self.late_bias, biases["late_v"] = biases["late_v"], torch.zeros_like(biases["late_v"])
            self.bias = torch.cat([biases[name] for name, _ in parts])
        self.conv, self.conv_bias, self.heads_bias = (
            load(prefix + name, torch.float32) for name in ("conv", "conv_bias", "heads_conv_bias")
        )
        of_heads = load(prefix + "heads_conv", torch.float32)
        self.heads_conv = of_heads.reshape(-1, own.value_dim, own.value_dim, own.heads_kernel)

    def __call__(self, x: Tensor, inputs: PagedStep) -> Tensor:
        own, step = self.spec, inputs.recurrent
        assert step is not None
        projected = product(self.inputs, x[step.tokens], inputs).float() + self.bias
        u, v = projected.tensor_split((own.num_channels,), dim=1)
        states = step.states[self.index]
        past = states[step.read[self.group]].masked_fill(step.is_new[:, None], 0)
        known = torch.cat((past.reshape(-1, own.num_channels), u))
        window, kept = step.convolution(own.num_inputs + 1)
        states[step.written[self.group]] = known[kept].flatten(1)
        late = known[window[:, -2], own.num_mixed :] + self.late_bias
        parts = u[:, : own.num_mixed].tensor_split((own.num_values,), dim=1)
        q, k = (part.reshape(len(u), own.num_key_heads, -1, own.value_dim) for part in parts)
        rest = (q + k) * 0.5
        rest = torch.cat((rest.flatten(1), rest.mean(2).flatten(1)), 1)
        mixed = self._convolved(known[:, : own.num_mixed], window) + self.heads_bias + rest
        out = torch.empty(len(x), mixed.shape[1] + 2 * own.num_late, dtype=x.dtype, device=x.device)
        out[step.tokens] = torch.cat((mixed, v, late), 1).to(x.dtype)
        return out

    def _convolved(self, known: Tensor, window: Tensor) -> Tensor:
        """Return both convolutions, without the bias of the second one, [T, heads · head size]."""
        own, sums = self.spec, []
        for tap in range(own.heads_kernel):
            inner = known[window[:, tap]] * self.conv[:, 0]
            for i in range(1, own.conv_kernel):
                inner.addcmul_(known[window[:, tap + i]], self.conv[:, i])
            sums.append((inner + self.conv_bias).reshape(len(inner), -1, own.value_dim))
        return torch.einsum("tihc,hoci->tho", torch.stack(sums, 1), self.heads_conv).flatten(1)


class TakenHeads:
    """The heads of one rank of what `MixedHeads` returns, in the place of a product of a layer's input. heads: those of
    the rank. outputs: of q, k and v.
    """

    def __init__(self, heads: HeadShape, shard: Shard, load: Loader) -> None:
        sizes = [heads.num_heads * heads.head_dim, *[heads.num_kv_heads * heads.head_dim] * 2]
        self.outputs = [range(size) for size in sizes]
        self._columns: Tensor | None = None
        if shard.size > 1:
            starts = [shard.size * sum(sizes[:i]) + shard.rank * size for i, size in enumerate(sizes)]
            own = [torch.arange(start, start + size) for start, size in zip(starts, sizes, strict=True)]
            self._columns = torch.cat(own).to(load.device)

    def __call__(self, heads: Tensor, loras: object) -> Tensor:
        """Return [T, heads of q, k and v]. Adapters change nothing here."""
        return heads if self._columns is None else heads[:, self._columns]
