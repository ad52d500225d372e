"""Norms of the residual stream."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import layer_norm, rms_norm

from foreword.executors.torch.weights import Loader
from foreword.models.spec import DecoderSpec


class Norm:
    """A norm of the residual stream; without a name, its input itself."""

    def __init__(self, spec: DecoderSpec, name: str | None, load: Loader) -> None:
        self.eps = spec.norm_eps
        self.weight = None if name is None else load(name)
        self.bias = load(f"{name}_bias") if name is not None and spec.layer_norm else None

    def __call__(self, x: Tensor) -> Tensor:
        if self.weight is None:
            return x
        if self.bias is not None:
            return layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
        return rms_norm(x, self.weight.shape, self.weight, self.eps)


def norms_around(
    spec: DecoderSpec, before: str, after: str, load: Loader, *, has_before: bool, has_after: bool
) -> tuple[Norm, Norm]:
    """Return the norms before and after a part of a layer."""
    return Norm(spec, before if has_before else None, load), Norm(spec, after if has_after else None, load)
