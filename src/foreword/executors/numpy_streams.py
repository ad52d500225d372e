"""Several residual streams in NumPy: see `StreamsSpec` and `ConnectionsSpec`."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from foreword.arrays import F32
from foreword.executors.functions import FloatWeights, LoraTokens, sigmoid
from foreword.models.spec import ConnectionsSpec, DecoderSpec, StreamsSpec


class _Decoder(Protocol):
    """The functions of a decoder that its streams need."""

    spec: DecoderSpec
    weight: FloatWeights

    def linear(self, x: F32, name: str, loras: LoraTokens, /) -> F32: ...

    def norm(self, x: F32, name: str) -> F32: ...


class NumpyStreams:
    """The streams of a step. values: float32 [streams, T, hidden], as they were predicted or corrected last.
    loras: the adapters of the step.
    """

    def __init__(self, of: _Decoder, spec: StreamsSpec, x: F32, loras: LoraTokens) -> None:
        self._of, self._spec, self._loras = of, spec, loras
        others = [_scaled(self._linear(x, f"stream_in.{k}"), x) for k in range(1, spec.num_streams)]
        self.values: F32 = np.stack([x, *others])

    def predict(self, p: str) -> F32:
        """Predict the streams, and return the first. p: the beginning of the names of a layer's weights."""
        count = self._spec.num_streams
        factors = self._linear(self._routed(self.values[0], p), p + "streams_predict").reshape(-1, count, count)
        self.values = self.values + np.einsum("tkj,jtd->ktd", factors, self.values)
        return self._first

    def laurel(self, h: F32, p: str) -> F32:
        """Return the branch beside attention, for its normed input h."""
        low = self._linear(self._linear(h, p + "laurel_left"), p + "laurel_right")
        return h + self._of.norm(low, p + "laurel_norm")

    def correct(self, x: F32, p: str) -> F32:
        """Correct the streams by what the layer made of the first, and return the first for the layer's own inputs."""
        factors = 1 + self._linear(self._routed(x, p), p + "streams_correct")
        self.values = self.values + factors.T[:, :, None] * (x - self.values[0])
        return self._first * self._of.weight(p + "streams_scale") if self._spec.scales_first else self._first

    def merged(self) -> F32:
        """Return the residual stream after the last layer."""
        first = total = self._first
        for k, other in enumerate(self.values[1:], 1):
            total = total + _scaled(self._linear(other, f"stream_out.{k}"), first)
        return total / np.float32(self._spec.num_streams)

    @property
    def _first(self) -> F32:
        first: F32 = self.values[0]
        return first

    def _linear(self, x: F32, name: str) -> F32:
        return self._of.linear(x, name, self._loras)

    def _routed(self, x: F32, p: str) -> F32:
        h = self._of.norm(x, p + "streams_norm") / np.float32(x.shape[1])
        return np.tanh(self._linear(h, p + "streams_router"))


class NumpyConnections:
    """The streams of a step with hyper-connections. values: float32 [T, streams, hidden]."""

    def __init__(self, of: _Decoder, spec: ConnectionsSpec, x: F32) -> None:
        self._of, self._spec = of, spec
        self.values: F32 = np.repeat(x[:, None], spec.num_streams, axis=1)
        self._post = np.zeros((len(x), spec.num_streams), np.float32)  # the factors of the last sum

    def collapsed(self, name: str) -> F32:
        """Return the sum of the streams that attention, the MLP or the head reads. name: of its matrix."""
        spec, weight = self._spec, self._of.weight
        flat = self.values.reshape(len(self.values), -1)
        mean = np.mean(np.square(flat), axis=-1, keepdims=True)
        mixes = flat @ weight(name).T / np.sqrt(mean + np.float32(self._of.spec.norm_eps))
        scales = np.repeat(weight(name + "_scale"), spec.num_streams)
        gates = sigmoid(mixes * scales + weight(name + "_base"))
        pre, post = gates[:, : spec.num_streams], gates[:, spec.num_streams :]
        self._post = np.float32(spec.magnitude) * post + np.float32(spec.eps)
        collapsed: F32 = np.einsum("tk,tkd->td", pre + np.float32(spec.eps), self.values)
        return collapsed

    def add(self, branch: F32) -> None:
        """Add what attention or the MLP made of the last sum to the streams."""
        self.values = self.values + self._post[:, :, None] * branch[:, None]


def _scaled(y: F32, x: F32) -> F32:
    """Return y with the magnitude of x."""
    of_y, of_x = (np.sqrt(np.mean(np.square(v), axis=-1, keepdims=True)) for v in (y, x))
    scaled: F32 = y * of_x / np.maximum(of_y, np.float32(1e-5**0.5))
    return scaled
