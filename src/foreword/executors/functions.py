"""Elementary functions on float32 arrays, and weights as such, which the reference executors are written in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from foreword.arrays import F32, I64
from foreword.models.spec import XIELU
from foreword.models.weights import Weights

LoraFloats = Mapping[str, tuple[F32, F32]]
"""Weight name → A and scale · B of an adapter."""
LoraTokens = Sequence[tuple[LoraFloats, I64]]
"""Each adapter of a step, and its tokens."""


class FloatWeights:
    """Weights as float32, each dequantised once. names: other names of some of them → their own."""

    def __init__(self, weights: Weights, names: Mapping[str, str] = MappingProxyType({})) -> None:
        self._weights, self._names = weights, names
        self._floats: dict[str, F32] = {}

    def __call__(self, name: str) -> F32:
        name = self._names.get(name, name)
        if name not in self._floats:
            self._floats[name] = self._weights[name].dequantize()
        return self._floats[name]


def rms_norm(x: F32, eps: float) -> F32:
    """Return x / sqrt(mean(x²) + eps) over the last axis."""
    mean_square: F32 = np.mean(np.square(x), axis=-1, keepdims=True)
    scaled: F32 = x / np.sqrt(mean_square + np.float32(eps))
    return scaled


def layer_norm(x: F32, weight: F32, bias: F32 | None, eps: float) -> F32:
    """Return (x − mean) / sqrt(variance + eps) * weight + bias over the last axis."""
    centred: F32 = x - x.mean(-1, keepdims=True)
    out: F32 = centred / np.sqrt(np.square(centred).mean(-1, keepdims=True) + np.float32(eps)) * weight
    return out if bias is None else out + bias


def softmax(x: F32, sinks: F32 | None = None) -> F32:
    """Return exp(x − max) / Σ over the last axis. ``sinks`` [..., 1] are further elements of it, which are not
    returned.
    """
    largest: F32 = x.max(-1, keepdims=True)
    if sinks is not None:
        largest = np.maximum(largest, sinks)
    e: F32 = np.exp(x - largest)
    total: F32 = e.sum(-1, keepdims=True)
    return e / (total if sinks is None else total + np.exp(sinks - largest))


def sigmoid(x: F32) -> F32:
    """Return 1 / (1 + exp(−x)), without overflow."""
    one = np.float32(1)
    return one / (one + np.exp(-np.maximum(x, np.float32(-87))))


def softplus(x: F32) -> F32:
    """Return ln(1 + exp(x)), without overflow."""
    out: F32 = np.logaddexp(np.float32(0), x)
    return out


def silu(x: F32) -> F32:
    """Return x * sigmoid(x)."""
    return x * sigmoid(x)


def product(x: F32, name: str, weight: FloatWeights, loras: LoraTokens) -> F32:
    """Return x Wᵀ, plus scale · (x Aᵀ) Bᵀ for the tokens of each adapter. name: of W."""
    out: F32 = x @ weight(name).T
    for pairs, tokens in loras:
        if name in pairs:
            a, b = pairs[name]
            out[tokens] += x[tokens] @ a.T @ b.T
    return out


def gelu_tanh(x: F32) -> F32:
    """Return x/2 * (1 + tanh(sqrt(2/π) * (x + 0.044715 x³)))."""
    inner: F32 = np.float32(np.sqrt(2 / np.pi)) * (x + np.float32(0.044715) * x**3)
    out: F32 = np.float32(0.5) * x * (1 + np.tanh(inner))
    return out


def cap(x: F32, limit: float | None) -> F32:
    """Return limit * tanh(x / limit), and x itself for None."""
    return x if limit is None else np.float32(limit) * np.tanh(x / np.float32(limit))


def gelu(x: F32) -> F32:
    """Return x/2 * (1 + erf(x / sqrt(2))), with erf to 1.5e-7: Abramowitz and Stegun 7.1.26."""
    z = np.abs(x, dtype=np.float64) / np.sqrt(2)
    t = 1 / (1 + 0.3275911 * z)
    tail = t * np.polyval([1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592], t) * np.exp(-z * z)
    out: F32 = (np.maximum(x, 0) - np.abs(x) * tail / 2).astype(np.float32)
    return out


def relu(x: F32) -> F32:
    """Return max(x, 0)."""
    return np.maximum(x, np.float32(0))


def relu2(x: F32) -> F32:
    """Return max(x, 0)²."""
    return np.square(relu(x))


def xielu_numbers(weight: Callable[[str], F32], prefix: str) -> F32:
    """Return the factors above and below 0 of a layer's xIELU (`foreword.models.spec`), its beta and its eps."""
    alpha_p, alpha_n, beta, eps = (weight(prefix + name)[0] for name in XIELU)
    return np.array([np.logaddexp(0, alpha_p), beta + np.logaddexp(0, alpha_n), beta, eps], np.float32)


def xielu(x: F32, numbers: F32) -> F32:
    """Return xIELU with the numbers of `xielu_numbers`."""
    above, below, beta, eps = numbers
    out: F32 = np.where(x > 0, above * x * x, below * (np.expm1(np.minimum(x, eps)) - x)) + beta * x
    return out


def rounded(x: F32) -> F32:
    """Return x of each token in 8 bits: round(s x) / s with s = 127 / max(|x|), and at least 1e-5 as the maximum."""
    scale = np.float32(127) / np.maximum(np.abs(x).max(-1, keepdims=True), np.float32(1e-5))
    out: F32 = np.rint(x * scale) / scale
    return out


def identity(x: F32) -> F32:
    """Return x."""
    return x


def quick_gelu(x: F32) -> F32:
    """Return x sigmoid(1.702 x)."""
    return x * sigmoid(np.float32(1.702) * x)


ACTIVATIONS: dict[str, Callable[[F32], F32]] = {
    "tanh": np.tanh,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "relu": relu,
    "relu2": relu2,
    "silu": silu,
    "quick_gelu": quick_gelu,
    "softmax": softmax,
    "sigmoid": sigmoid,
    "identity": identity,
}
