"""Inputs that layers have of their own, and several residual streams, on tensors: `PerLayerSpec`, `StreamsSpec`,
`ConnectionsSpec`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, rms_norm

from foreword.executors.torch.loras import ProductChanges
from foreword.executors.torch.norms import Norm
from foreword.executors.torch.weights import Loader
from foreword.models.spec import ConnectionsSpec, DecoderSpec, PerLayerSpec, StreamsSpec


class PerLayerInputs:
    """The inputs of each layer of its own, for the first layer's input: see `PerLayerSpec`."""

    def __init__(self, spec: DecoderSpec, of: PerLayerSpec, load: Loader) -> None:
        self.of = of
        self.embed, self.norm = load("per_layer_embed"), load("per_layer_norm")
        self.project = load.plain("per_layer_in")

    def __call__(self, x: Tensor, input_ids: Tensor, loras: ProductChanges | None) -> Tensor:
        """Return the input of each layer, [T, layers, size]."""
        of = self.of
        own = embedding(torch.where(input_ids < of.vocab_size, input_ids, 0), self.embed).unflatten(1, (-1, of.size))
        of_x = self.project(x, loras).unflatten(1, (-1, of.size))
        of_x = rms_norm(of_x, self.norm.shape, self.norm, of.norm_eps)
        return of.scale * (of_x + of.embedding_scale * own)


class Streams:
    """The streams of a model before the first and after the last layer: see `StreamsSpec`. products: those that
    adapters may change.
    """

    def __init__(self, of: StreamsSpec, load: Loader) -> None:
        others = range(1, of.num_streams)
        self.into, self.out = ([load.plain(f"{name}.{k}") for k in others] for name in ("stream_in", "stream_out"))
        self.products = [*self.into, *self.out]

    def begin(self, x: Tensor, loras: ProductChanges | None) -> Tensor:
        """Make the streams from the embeddings: [T, hidden] → [streams, T, hidden]."""
        return torch.stack([x, *(_scaled_like(product(x, loras), x) for product in self.into)])

    def merged(self, streams: Tensor, loras: ProductChanges | None) -> Tensor:
        """Return the mean of the streams: [streams, T, hidden] → [T, hidden]."""
        first = streams[0]
        products = zip(self.out, streams[1:], strict=True)
        others = (_scaled_like(product(x, loras), first) for product, x in products)
        return torch.stack([first, *others]).mean(0)


def _scaled_like(y: Tensor, x: Tensor) -> Tensor:
    """Return y with the magnitude of x."""
    of_y, of_x = (v.float().square().mean(-1, keepdim=True).sqrt() for v in (y, x))
    return (y * of_x / of_y.clamp_min(1e-5**0.5)).to(x.dtype)


class StreamUpdate:
    """Predicts and corrects the streams in one layer, and computes what it has beside attention. products: those that
    adapters may change.
    """

    def __init__(self, spec: DecoderSpec, of: StreamsSpec, prefix: str, load: Loader) -> None:
        self.count = of.num_streams
        self.norm, self.laurel_norm = (
            Norm(spec, prefix + "streams_norm", load),
            Norm(spec, prefix + "laurel_norm", load),
        )
        names = ("streams_router", "streams_predict", "streams_correct", "laurel_left", "laurel_right")
        self.products = [load.plain(prefix + name) for name in names]
        self.router, self._predict, self._correct, self.left, self.right = self.products
        self.scale = load(prefix + "streams_scale") if of.scales_first else None

    def _routed(self, x: Tensor, loras: ProductChanges | None) -> Tensor:
        return torch.tanh(self.router(self.norm(x) / x.shape[1], loras))

    def predict(self, streams: Tensor, loras: ProductChanges | None) -> Tensor:
        factors = self._predict(self._routed(streams[0], loras), loras).unflatten(1, (self.count, self.count))
        return streams + torch.einsum("tkj,jtd->ktd", factors, streams)

    def correct(self, predicted: Tensor, x: Tensor, loras: ProductChanges | None) -> Tensor:
        """Correct the predicted streams by x, the output of the layer for the first stream."""
        factors = 1 + self._correct(self._routed(x, loras), loras)
        return predicted + factors.T[:, :, None] * (x - predicted[0])

    def laurel(self, h: Tensor, loras: ProductChanges | None) -> Tensor:
        return h + self.laurel_norm(self.right(self.left(h, loras), loras))


class Connection:
    """The sum of the streams that attention, the MLP or the head reads, and its output, which is added to them:
    `ConnectionsSpec`. name: of its matrix. The factors are computed in float32, which the weights are, too.
    """

    def __init__(self, spec: DecoderSpec, of: ConnectionsSpec, name: str, load: Loader) -> None:
        self.of, self.eps = of, spec.norm_eps
        self.matrix, self.base, scales = (load(name + end, torch.float32) for end in ("", "_base", "_scale"))
        self.scales = scales.repeat_interleave(of.num_streams)

    def collapsed(self, streams: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum [T, hidden] of the streams [T, streams, hidden], and the factors [T, streams] with which
        `added` takes what is made of it; without columns for the head.
        """
        flat = streams.flatten(1).float()
        mixes = linear(flat, self.matrix) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + self.eps)
        pre, post = (mixes * self.scales + self.base).sigmoid().tensor_split([self.of.num_streams], dim=1)
        x = torch.einsum("tk,tkd->td", pre + self.of.eps, streams.float())
        return x.to(streams.dtype), self.of.magnitude * post + self.of.eps


def added(streams: Tensor, factors: Tensor, branch: Tensor) -> Tensor:
    """Return the streams after a branch is added to each. factors: see `Connection.collapsed`."""
    return (streams.float() + factors[:, :, None] * branch[:, None].float()).to(streams.dtype)
