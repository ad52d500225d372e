"""Rotary embedding on tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from foreword.models.spec import RopeSpec


@dataclass(frozen=True, slots=True)
class Rotation:
    """Rotates the pairs (j, j + pairs) of the first dimensions of a head by the angles of the tokens of a step.

    cos, sin: [T, 1, head_dim], the identity for the dimensions that are not rotated; sin is negative for the first of a
    pair.
    """

    pairs: int
    cos: Tensor
    sin: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, heads, head_dim], rotated."""
        n = self.pairs
        swapped = torch.cat((x[..., n : 2 * n], x[..., :n], x[..., 2 * n :]), dim=-1)
        return torch.addcmul(x * self.cos, swapped, self.sin)


class Rotary:
    """A rotary embedding of heads on a device."""

    def __init__(self, rope: RopeSpec, head_dim: int, device: torch.device) -> None:
        self.rope, self.head_dim = rope, head_dim
        self.frequencies = torch.tensor(rope.inv_freq, dtype=torch.float32, device=device)

    def at(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """The rotation of tokens at positions int64 [T], or with M-RoPE [components, T]."""
        rope, n = self.rope, len(self.rope.inv_freq)
        angles = (positions[list(rope.axes)].T if rope.axes else positions.view(-1, 1)) * self.frequencies
        cos, sin = angles.cos() * rope.scale, angles.sin() * rope.scale
        rest = (0, self.head_dim - 2 * n)
        cos, sin = pad(torch.cat((cos, cos), 1), rest, value=1), pad(torch.cat((-sin, sin), 1), rest)
        return Rotation(n, cos.to(dtype)[:, None], sin.to(dtype)[:, None])
