"""The native sampler, where the native module is built. native/kernels/sampler.cpp defines the draw."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from foreword import _native
else:
    try:
        from foreword import _native
    except ImportError:  # not built: see available()
        _native = None


def available() -> bool:
    """Whether the native module is built here."""
    return _native is not None


def sample(
    logits: npt.NDArray[np.float32],
    temperature: npt.NDArray[np.float32],
    top_k: npt.NDArray[np.int32],
    top_p: npt.NDArray[np.float32],
    min_p: npt.NDArray[np.float32],
    seeds: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
    rows: npt.NDArray[np.int32],
    out: npt.NDArray[np.int32],
    threads: _native.CpuModel | None = None,
) -> None:
    """Draw a token for each row of logits [L, V] into out [L], as `Sampler` defines it, processors apart.

    Parameters are [R]; row i takes those at rows[i]. positions [L]: where each token will stand in its request.
    threads: whose threads draw beside the caller's, idle until then; the tokens are the same without.
    """
    _native.sample(logits, temperature, top_k, top_p, min_p, seeds, positions, rows, out, threads)
