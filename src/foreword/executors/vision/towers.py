"""The layers of an encoder of images, as NumPy or as native code runs them."""

from __future__ import annotations

import numpy as np

from foreword.arrays import F32
from foreword.executors.encoder import EncoderLayers
from foreword.executors.functions import FloatWeights
from foreword.executors.native_encoder import native_core
from foreword.executors.options import NativeOptions
from foreword.executors.vision.encoder import Tower
from foreword.models.encoder_spec import EncoderSpec
from foreword.models.weights import Weights


def numpy_tower(spec: EncoderSpec, weights: Weights) -> Tower:
    """Return the layers in float32 NumPy: the oracle of the native ones."""
    layers = EncoderLayers(spec, FloatWeights(weights))

    def run(x: F32) -> F32:
        n, count, hidden = x.shape
        positions, starts = np.tile(np.arange(count), n), np.arange(n + 1) * count
        return layers.run(x.reshape(-1, hidden), positions, starts).reshape(x.shape)

    return run


def native_tower(spec: EncoderSpec, weights: Weights, options: NativeOptions) -> Tower:
    """Return the layers on the CPU kernels. Errors are those of `NativeExecutor`."""
    core = native_core(spec, weights, options, what="images")

    def run(x: F32) -> F32:
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
