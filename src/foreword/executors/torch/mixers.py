"""Layers that read a step over paged keys and values: attention, and the choice between it and a recurrence."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from foreword.executors.torch.attention import AttentionCall
from foreword.executors.torch.decoder import AttentionWeights, Mixer, compiled
from foreword.executors.torch.loras import ProductChanges
from foreword.executors.torch.recurrent import RecurrentLayer
from foreword.executors.torch.rotation import Rotation
from foreword.executors.torch.step import PagedStep
from foreword.executors.torch.weights import Loader
from foreword.models.spec import DecoderSpec


def paged_mixer(spec: DecoderSpec, index: int, load: Loader, *, compile: bool = False) -> Mixer[PagedStep]:
    """Make the mixer of a layer. compile: its projections run through torch.compile in steps without adapters."""
    recurrent = spec.layers[index].recurrent
    if recurrent is not None:
        return RecurrentLayer(recurrent, spec, index, load)
    return PagedLayer(spec, index, load, compile=compile)


class PagedLayer(AttentionWeights):
    """Attention of one layer over paged keys and values, for its normed input [T, hidden]."""

    def __init__(self, spec: DecoderSpec, index: int, load: Loader, *, compile: bool) -> None:
        super().__init__(spec, index, load)
        self._call = AttentionCall(self.index, spec.query_scale, self.layer.sliding_window, softcap=spec.attn_softcap)
        q, k, v = map(len, self.inputs.outputs[:3])
        self._ends = q + k, q + k + v  # of q with k, and of v, in the outputs of ``inputs``
        self._heads = spec.num_heads, spec.num_kv_heads
        self._qk_norm: Tensor | None = None  # [heads of q and k, head_dim]
        if self.norms is not None:
            norms = zip(self.norms, self._heads, strict=True)
            self._qk_norm = torch.cat([weight.expand(count, -1) for weight, count in norms])
        self._project = compiled(PagedLayer._projected) if compile else PagedLayer._projected

    def __call__(self, h: Tensor, step: PagedStep) -> Tensor:
        rope = self.layer.rope
        q, k, v, gate = self._project(self, h, None if rope is None else step.rotations[rope], step.loras)
        step.attention.write(self.index, k, v)
        a = step.attention.attend(self._call, q).flatten(1)
        return self.output(a * gate.sigmoid() if self.spec.attn_gate else a, step.loras)

    def _projected(
        self, h: Tensor, rotation: Rotation | None, loras: ProductChanges | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys, values [T, heads, head_dim], and the gate [T, heads · head_dim], or 0 columns without one."""
        spec = self.spec
        qk, v, gate = self.inputs(h, loras).tensor_split(self._ends, dim=1)
        qk = qk.unflatten(1, (-1, spec.head_dim))
        if self._qk_norm is not None:
            qk = rms_norm(qk, (spec.head_dim,), None, spec.norm_eps) * self._qk_norm
        if rotation is not None:
            qk = rotation(qk)
        q, k = qk.split(self._heads, dim=1)
        return q, k, v.unflatten(1, (-1, spec.head_dim)), gate
