"""Parameters and state of a pooling request (embedding, score, classification)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from foreword.arrays import AnyArray

PoolingTask = Literal["embed", "token_embed", "classify", "score", "reward"]
PoolingType = Literal["last", "mean", "cls", "step", "all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """The way from a request's hidden states to its result.

    task: "embed" a vector of the text, "token_embed" one of each token; through the model's head "classify" the
        probabilities of its labels, "score" one number, "reward" the head's outputs as they are.
    pooling: which hidden states: "last" token, "mean" of all, "cls" the first token, "step" those of the tokens
        step_tag_id, "all"; None: the model's own, and "all" for token_embed.
    dimensions: keep the first of an embedding (None: all). normalize: embeddings to unit length.
    step_tag_id: the token that ends a step, with "step".
    first_text_len: tokens of the first of two texts; those after it have token type 1 (None: one text).
    truncate_prompt_tokens: keep that many tokens of a longer prompt, its first ones and its special tokens at the end;
        -1: as many as the model takes (None: a longer prompt is refused).
    prompt_name: which of the model's own prompts comes before a text to embed; "": none (None: its default).
    """

    task: PoolingTask = "embed"
    pooling: PoolingType | None = None
    dimensions: int | None = None
    normalize: bool = True
    step_tag_id: int | None = None
    first_text_len: int | None = None
    truncate_prompt_tokens: int | None = None
    prompt_name: str | None = None

    def pooling_or(self, own: PoolingType) -> PoolingType:
        """Its pooling, where the model's own is ``own``."""
        return self.pooling or ("all" if self.task == "token_embed" else own)


@dataclass(slots=True, eq=False)
class PoolingState:
    """The state of a pooler after the earlier chunks of a request.

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
