"""The native sampler, where the native module is built. native/kernels/sampler.cpp defines the draw."""

from __future__ import annotations

from typing import TYPE_CHECKING

from foreword.arrays import F32, I32, I64

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
    logits: F32,
    temperature: F32,
    top_k: I32,
    top_p: F32,
    min_p: F32,
    seeds: I64,
    positions: I64,
    rows: I32,
    out: I32,
    threads: _native.CpuModel | None = None,
) -> None:
    """Draw a token for each row of logits [L, V] into out [L], as `Sampler` defines it, processors apart.

    Parameters are [R]; row i takes those at rows[i]. positions [L]: where each token will stand in its request.
    threads: whose threads draw beside the caller's, idle until then; the tokens are the same without.
    """
    _native.sample(logits, temperature, top_k, top_p, min_p, seeds, positions, rows, out, threads)
