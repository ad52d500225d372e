"""Functions of arrays that the reference executor is written in, in float32."""

from __future__ import annotations

import numpy as np

from foreword.arrays import F32


def rms_norm(x: F32, eps: float) -> F32:
    """x / sqrt(mean(x²) + eps) over the last axis."""
    mean_square: F32 = np.mean(np.square(x), axis=-1, keepdims=True)
    scaled: F32 = x / np.sqrt(mean_square + np.float32(eps))
    return scaled


def softmax(x: F32) -> F32:
    """exp(x − max) / Σ over the last axis."""
    e: F32 = np.exp(x - x.max(-1, keepdims=True))
    total: F32 = e.sum(-1, keepdims=True)
    return e / total


def sigmoid(x: F32) -> F32:
    """1 / (1 + exp(−x)), without overflow."""
    one = np.float32(1)
    out: F32 = one / (one + np.exp(-np.maximum(x, np.float32(-87))))
    return out


def silu(x: F32) -> F32:
    """x * sigmoid(x)"""
    return x * sigmoid(x)


def gelu_tanh(x: F32) -> F32:
    """x/2 * (1 + tanh(sqrt(2/π) * (x + 0.044715 x³)))"""
    inner: F32 = np.float32(np.sqrt(2 / np.pi)) * (x + np.float32(0.044715) * x**3)
    out: F32 = np.float32(0.5) * x * (1 + np.tanh(inner))
    return out


def cap(x: F32, limit: float | None) -> F32:
    """limit * tanh(x / limit); x itself for None."""
    return x if limit is None else np.float32(limit) * np.tanh(x / np.float32(limit))
