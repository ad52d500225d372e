"""The layers of an encoder of images, as NumPy or as native code runs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from foreword.arrays import F32, I64
from foreword.executors.encoder import EncoderLayers
from foreword.executors.functions import FloatWeights
from foreword.executors.native_encoder import native_encoder
from foreword.executors.options import NativeOptions
from foreword.executors.vision.encoder import Grid, Tower
from foreword.models.encoder_spec import EncoderSpec, encoder_weight_names
from foreword.models.vision_spec import VisionSpec
from foreword.models.weights import FileWeights, Weights


class Layout(NamedTuple):
    """The order in which the layers get the patches of n tiles of P.

    order: int64 [P], the patches of a tile, window by window. places: int64 [n P, 2], row and column of each. starts:
    [n + 1], the first patch of each tile, and n P. windows: the same of each window; None without windows.
    """

    order: I64
    places: I64
    starts: I64
    windows: I64 | None


Part = Callable[[F32, Layout], F32]
"""Runs some of the layers: [n P, hidden] → [n P, hidden]."""


def numpy_tower(spec: VisionSpec, weights: Weights) -> Tower:
    """Return the layers in float32 NumPy: the oracle of the native ones."""
    return _tower(spec, [_numpy_part(*part) for part in _parts(spec, weights)])


def _numpy_part(spec: EncoderSpec, weights: Weights) -> Part:
    layers = EncoderLayers(spec, FloatWeights(weights))
    return lambda x, layout: layers.run(x, layout.places, layout.starts, layout.windows)


def native_tower(spec: VisionSpec, weights: Weights, options: NativeOptions) -> Tower:
    """Return the layers on the CPU kernels. Errors are those of `NativeExecutor`."""
    has_axes = any(layer.rope is not None and layer.rope.axes for layer in spec.tower.layers)

    def part(tower: EncoderSpec, own: Weights, number: int) -> Part:
        if not tower.layers:  # the last norm alone
            return _numpy_part(tower, own)
        core = native_encoder(tower, own, options, what=f"images {number}").core
        is_windowed = any(layer.is_windowed for layer in tower.layers)

        def run(x: F32, layout: Layout) -> F32:
            n, windows = len(layout.starts) - 1, layout.windows
            states: F32 = core.encode(
                num_tokens=len(x),
                num_reqs=n,
                input_ids=None,
                positions=np.tile(np.arange(len(x) // n), n),
                query_start_loc=layout.starts.astype(np.int32),
                token_types=None,
                x=x,
                places=np.ascontiguousarray(layout.places.T) if has_axes else None,
                group_start_loc=windows.astype(np.int32) if is_windowed and windows is not None else None,
            )
            return states

        return run

    return _tower(spec, [part(*one, number) for number, one in enumerate(_parts(spec, weights))])


def _parts(spec: VisionSpec, weights: Weights) -> list[tuple[EncoderSpec, Weights]]:
    """Return the layers up to each of feature_layers, and the rest, as encoders of their own with their weights."""
    tower = spec.tower
    if not spec.feature_layers:
        return [(tower, weights)]
    found: list[tuple[EncoderSpec, Weights]] = []
    ends = [*(layer + 1 for layer in spec.feature_layers), tower.num_layers]
    for first, end in pairwise([0, *ends]):
        is_last = len(found) == len(spec.feature_layers)  # a feature layer may be the last one, without the norm
        part = replace(tower, layers=tower.layers[first:end], has_final_norm=is_last and tower.has_final_norm)
        own = {name: weights[_renumbered(name, first)] for name, _ in encoder_weight_names(part)}
        if isinstance(weights, FileWeights):
            own = FileWeights(own, weights.files, weights.config)
        found.append((part, own))
    return found


def _renumbered(name: str, first: int) -> str:
    """Return the name of a weight of a part that begins with a layer, in the whole."""
    if not name.startswith("layers."):
        return name
    _, number, last = name.split(".", 2)
    return f"layers.{int(number) + first}.{last}"


def _tower(spec: VisionSpec, parts: Sequence[Part]) -> Tower:
    def run(x: F32, grid: Grid) -> list[F32]:
        layout, found = _layout(spec, len(x), grid), []
        states = np.ascontiguousarray(x[:, layout.order].reshape(-1, x.shape[2]))
        for part in parts:
            states = np.ascontiguousarray(part(states, layout))
            out = np.empty_like(x)
            out[:, layout.order] = states.reshape(x.shape)
            found.append(out)
        return found

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
