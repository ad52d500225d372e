"""How long a step takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import overload

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class CostModel:
    """seconds(step) = step + token · scheduled tokens + context · Σ tokens that the requests of the step look back on.

    The defaults are of the order of an 8B model on one datacentre GPU.
    """

    step: float = 8e-3
    token: float = 4e-5
    context: float = 1.5e-8

    @overload
    def seconds(self, num_tokens: int, num_context_tokens: int) -> float: ...
    @overload
    def seconds(self, num_tokens: int, num_context_tokens: Tokens) -> npt.NDArray[np.float64]: ...
    def seconds(self, num_tokens: int, num_context_tokens: int | Tokens) -> float | npt.NDArray[np.float64]:
        """One step, or one for each entry of num_context_tokens."""
        fixed = self.step + self.token * num_tokens
        if isinstance(num_context_tokens, int):
            return fixed + self.context * num_context_tokens
        return fixed + self.context * num_context_tokens.astype(np.float64)

    @classmethod
    def fitted(
        cls,
        num_tokens: npt.NDArray[np.integer],
        num_context_tokens: npt.NDArray[np.integer],
        seconds: npt.NDArray[np.floating],
    ) -> CostModel:
        """The least-squares fit to measured steps, one entry a step; no coefficient below 0."""
        columns = np.stack([np.ones(len(seconds)), num_tokens, num_context_tokens], 1).astype(np.float64)
        scale = np.maximum(np.abs(columns).max(0), 1e-12)
        fit = np.linalg.lstsq(columns / scale, np.asarray(seconds, np.float64), rcond=None)[0] / scale
        return cls(*(max(float(c), 0.0) for c in fit))
