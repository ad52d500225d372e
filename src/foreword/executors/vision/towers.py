"""The layers of an encoder of images, as NumPy or as native code runs them."""

from __future__ import annotations

import numpy as np

from foreword.arrays import F32, I64
from foreword.executors.encoder import EncoderLayers
from foreword.executors.functions import FloatWeights
from foreword.executors.native_encoder import native_core
from foreword.executors.options import NativeOptions
from foreword.executors.vision.encoder import Grid, Tower
from foreword.models.encoder_spec import EncoderSpec
from foreword.models.vision_spec import VisionSpec
from foreword.models.weights import Weights


def has_kernels(spec: EncoderSpec) -> bool:
    """Return whether native code computes the layers: layer norms, no windows, and no rotation by rows and columns."""
    ropes = [layer.rope for layer in spec.layers if layer.rope is not None]
    windowed = any(layer.is_windowed for layer in spec.layers)
    return not (spec.rms_norm or windowed or ropes or spec.gated or spec.activation == "quick_gelu")


def numpy_tower(spec: VisionSpec, weights: Weights) -> Tower:
    """Return the layers in float32 NumPy: the oracle of the native ones."""
    layers = EncoderLayers(spec.tower, FloatWeights(weights))

    def run(x: F32, grid: Grid) -> F32:
        n, count, hidden = x.shape
        places = np.stack(np.divmod(np.arange(count), grid.columns), 1)  # row and column
        order, starts, groups = np.arange(count), np.arange(n + 1) * count, None
        if spec.window:
            order, ends = _by_window(places, spec.window, grid)
            groups = np.concatenate([[0], *(i * count + ends for i in range(n))])
        flat = x[:, order].reshape(-1, hidden)
        found = layers.run(flat, np.tile(places[order], (n, 1)), starts, groups).reshape(x.shape)
        out = np.empty_like(found)
        out[:, order] = found
        return out

    return run


def native_tower(spec: VisionSpec, weights: Weights, options: NativeOptions) -> Tower:
    """Return the layers on the CPU kernels, if there are kernels for them. Errors are those of `NativeExecutor`."""
    core = native_core(spec.tower, weights, options, what="images")

    def run(x: F32, grid: Grid) -> F32:
        n, count, hidden = x.shape
        states = core.encode(
            num_tokens=n * count,
            num_reqs=n,
            input_ids=None,
            positions=np.tile(np.arange(count), n),
            query_start_loc=(np.arange(n + 1) * count).astype(np.int32),
            token_types=None,
            x=np.ascontiguousarray(x.reshape(-1, hidden)),
        )
        return states.reshape(x.shape).copy()

    return run


def _by_window(places: I64, window: int, grid: Grid) -> tuple[I64, I64]:
    """Return the patches of a tile, window by window, and the ends of the windows in this order."""
    rows, columns = (places // window).T
    windows = rows * -(-grid.columns // window) + columns
    order = np.argsort(windows, kind="stable")
    return order, np.cumsum(np.unique(windows, return_counts=True)[1])
