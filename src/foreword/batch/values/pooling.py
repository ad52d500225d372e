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
    """The way in which a request's hidden states become its result.

    task: "embed": a vector of the text. "token_embed": a vector of each token. With the model's head: "classify", the
    probabilities of its labels; "score", one number; "reward", the outputs of the head.
    pooling: the hidden states that are used: "last" token, "mean" of all tokens, "cls" the first token, "step" the
    tokens step_tag_id, "all" tokens; None: the model's default, or "all" for token_embed.
    dimensions: the number of leading dimensions of an embedding that are kept (None: all). normalize: whether
    embeddings are scaled to unit length.
    step_tag_id: the token that ends a step, for "step".
    first_text_len: the number of tokens of the first of two texts; tokens after it have token type 1 (None: one text).
    truncate_prompt_tokens: a longer prompt is cut to this many tokens: its first ones, and its special tokens at the
    end. -1: as many as the model supports. None: a longer prompt is refused.
    prompt_name: the name of the model's prompt that comes before a text to embed; "": no prompt; None: the default.
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
        """Return its pooling, or the model's default ``own``."""
        return self.pooling or ("all" if self.task == "token_embed" else own)


@dataclass(slots=True, eq=False)
class PoolingState:
    """The state of a pooler after the earlier chunks of a request.

    chunks: arrays [n_i, hidden] in prompt order. The state begins empty at each admission.
    """

    chunks: list[AnyArray] = field(default_factory=list)

    def append(self, hidden_states: AnyArray) -> None:
        """Add the hidden states of one chunk."""
        self.chunks.append(hidden_states)

    def take(self) -> AnyArray:
        """Return all chunks as one array [prompt_len, hidden], and clear the state."""
        chunks, self.chunks = self.chunks, []
        return np.concatenate(chunks)
