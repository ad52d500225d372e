"""How long a step takes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class CostModel:
    """seconds(step) = step + token · scheduled tokens + context · Σ tokens that the requests of the step look back on.

    The defaults are of the order of an 8B model on one datacentre GPU.
    """

    step: float = 8e-3
    token: float = 4e-5
    context: float = 1.5e-8

    def seconds(self, num_tokens: int, num_context_tokens: int) -> float:
        return self.step + self.token * num_tokens + self.context * num_context_tokens

    def decode_seconds(self, num_steps: int, num_requests: int, num_context_tokens: int) -> float:
        """Σ seconds of ``num_steps`` decode steps of the same requests; num_context_tokens: of the first step."""
        growth = num_requests * num_steps * (num_steps - 1) // 2
        return num_steps * self.seconds(num_requests, num_context_tokens) + self.context * growth

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
