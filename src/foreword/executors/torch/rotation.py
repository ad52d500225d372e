"""Rotary embedding on tensors."""

from __future__ import annotations

from collections.abc import Mapping
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
        """Return x [T, heads, head_dim], rotated."""
        n = self.pairs
        swapped = torch.cat((x[..., n : 2 * n], x[..., :n], x[..., 2 * n :]), dim=-1)
        return torch.addcmul(x * self.cos, swapped, self.sin)

    def of_other_heads(self, x: Tensor) -> Tensor:
        """Return x [T, heads, dim], rotated, of heads of another size, whose first dimensions are the pairs."""
        n = 2 * self.pairs
        rotated = Rotation(self.pairs, self.cos[..., :n], self.sin[..., :n])(x[..., :n])
        return torch.cat((rotated, x[..., n:]), dim=-1)


class Rotaries:
    """The rotary embeddings of a model's heads on a device. head_dims: of the heads that each of them rotates."""

    def __init__(self, head_dims: Mapping[RopeSpec, int], device: torch.device) -> None:
        self._head_dims = head_dims
        self._frequencies = {
            rope: torch.tensor(rope.inv_freq, dtype=torch.float32, device=device) for rope in head_dims
        }

    def at(
        self, positions: Tensor, dtype: torch.dtype, mrope_positions: Tensor | None = None
    ) -> Mapping[RopeSpec, Rotation]:
        """Return the rotations of tokens at positions int64 [T].

        mrope_positions: int64 [components, T] for M-RoPE; None: every component is ``positions``.
        """
        rotations = {}
        for rope, frequencies in self._frequencies.items():
            at = positions.view(-1, 1)
            if rope.axes and mrope_positions is not None:
                at = mrope_positions[list(rope.axes)].T
            angles, n = at * frequencies, len(rope.inv_freq)
            cos, sin = angles.cos() * rope.scale, angles.sin() * rope.scale
            rest = (0, self._head_dims[rope] - 2 * n)
            cos, sin = pad(torch.cat((cos, cos), 1), rest, value=1), pad(torch.cat((-sin, sin), 1), rest)
            rotations[rope] = Rotation(n, cos.to(dtype)[:, None], sin.to(dtype)[:, None])
        return rotations
