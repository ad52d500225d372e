"""The layers of an encoder of images, as NumPy or as native code runs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from foreword.arrays import F32, I64
from foreword.executors.encoder import EncoderLayers
from foreword.executors.functions import FloatWeights
from foreword.executors.native_encoder import native_core
from foreword.executors.options import NativeOptions
from foreword.executors.vision.encoder import Grid, Tower
from foreword.models.vision_spec import VisionSpec
from foreword.models.weights import Weights


class Layout(NamedTuple):
    """How the patches of n tiles of P are given to the layers.

    order: int64 [P], the patches of a tile, window by window. places: int64 [n P, 2], row and column of each. starts:
    [n + 1], the first patch of each tile, and n P. windows: the same of each window; None without windows.
    """

    order: I64
    places: I64
    starts: I64
    windows: I64 | None


def numpy_tower(spec: VisionSpec, weights: Weights) -> Tower:
    """Return the layers in float32 NumPy: the oracle of the native ones."""
    layers = EncoderLayers(spec.tower, FloatWeights(weights))

    def run(x: F32, layout: Layout) -> F32:
        return layers.run(x, layout.places, layout.starts, layout.windows)

    return _tower(spec, run)


def native_tower(spec: VisionSpec, weights: Weights, options: NativeOptions) -> Tower:
    """Return the layers on the CPU kernels. Errors are those of `NativeExecutor`."""
    core = native_core(spec.tower, weights, options, what="images")
    has_axes = any(layer.rope is not None and layer.rope.axes for layer in spec.tower.layers)
    is_windowed = any(layer.is_windowed for layer in spec.tower.layers)

    def run(x: F32, layout: Layout) -> F32:
        n = len(layout.starts) - 1
        states: F32 = core.encode(
            num_tokens=len(x),
            num_reqs=n,
            input_ids=None,
            positions=np.tile(np.arange(len(x) // n), n),
            query_start_loc=layout.starts.astype(np.int32),
            token_types=None,
            x=x,
            places=np.ascontiguousarray(layout.places.T) if has_axes else None,
            group_start_loc=layout.windows.astype(np.int32) if is_windowed and layout.windows is not None else None,
        )
        return states

    return _tower(spec, run)


def _tower(spec: VisionSpec, layers: Callable[[F32, Layout], F32]) -> Tower:
    def run(x: F32, grid: Grid) -> F32:
        layout = _layout(spec, len(x), grid)
        states = layers(np.ascontiguousarray(x[:, layout.order].reshape(-1, x.shape[2])), layout)
        out = np.empty_like(x)
        out[:, layout.order] = states.reshape(x.shape)
        return out

    return run


def _layout(spec: VisionSpec, n: int, grid: Grid) -> Layout:
    count = grid.rows * grid.columns
    places: I64 = np.stack(np.divmod(np.arange(count), grid.columns), 1)
    order, starts = np.arange(count), np.arange(n + 1) * count
    if not spec.window:
        return Layout(order, np.tile(places, (n, 1)), starts, None)
    rows, columns = (places // spec.window).T
    window = rows * -(-grid.columns // spec.window) + columns
    order = np.argsort(window, kind="stable")
    ends = np.cumsum(np.unique(window, return_counts=True)[1])
    windows = np.concatenate([[0], *(i * count + ends for i in range(n))])
    return Layout(order, np.tile(places[order], (n, 1)), starts, windows)
