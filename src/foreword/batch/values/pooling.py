"""Parameters and state of a pooling request (embedding, score, classification)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from foreword.arrays import AnyArray


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """How to turn a request's hidden states into its result.

    task: the pooler's name. dimensions: keep the first of them (None: all). normalize: to unit length.
    """

    task: str = "embed"
    dimensions: int | None = None
    normalize: bool = True


@dataclass(slots=True, eq=False)
class PoolingState:
    """The hidden states of a pooling request's earlier chunks, for poolers that need all of them.

    chunks: arrays [n_i, hidden] in prompt order. The state begins empty at each admission.
    """

    chunks: list[AnyArray] = field(default_factory=list)

    def append(self, hidden_states: AnyArray) -> None:
        """Keep the hidden states of one chunk."""
        self.chunks.append(hidden_states)

    def take(self) -> AnyArray:
        """All chunks as one array [prompt_len, hidden]; the state is empty afterwards."""
        chunks, self.chunks = self.chunks, []
        return np.concatenate(chunks)
