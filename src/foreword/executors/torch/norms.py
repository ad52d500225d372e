"""Norms of the residual stream."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import layer_norm, rms_norm, silu

from foreword.executors.torch.loras import ProductChanges
from foreword.executors.torch.weights import Linear, Loader
from foreword.models.spec import DecoderSpec


class Norm:
    """A norm of the residual stream; without a name, its input itself.

    gate_rank: that of its gate; 0: it has none. products: those of the gate, which adapters may change.
    """

    def __init__(self, spec: DecoderSpec, name: str | None, load: Loader, gate_rank: int = 0) -> None:
        self.eps = spec.norm_eps
        self.weight = None if name is None else load(name)
        self.bias = load(f"{name}_bias") if name is not None and spec.layer_norm else None

        self.products: list[Linear] = [load.plain(f"{name}_{part}") for part in ("low", "high")] if gate_rank else []

    def __call__(self, x: Tensor, loras: ProductChanges | None = None) -> Tensor:
        if self.weight is None:
            return x
        if self.bias is not None:
            y = layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
        else:
            y = rms_norm(x, self.weight.shape, self.weight, self.eps)
        if not self.products:
            return y
        low, high = self.products
        return y * high(silu(low(y, loras)), loras).sigmoid()


def norms_around(
    spec: DecoderSpec, before: str, after: str, load: Loader, *, has_before: bool, has_after: bool, gate_rank: int
) -> tuple[Norm, Norm]:
    """Return the norms before and after a part of a layer. gate_rank: of the former."""
    return Norm(spec, before if has_before else None, load, gate_rank), Norm(spec, after if has_after else None, load)
