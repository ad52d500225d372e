"""An encoder input of a prompt: an image, a clip, a sound."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foreword.arrays import Bools
from foreword.errors import RequestError
from foreword.integers import is_int32


@dataclass(frozen=True, slots=True, eq=False)
class MultiModalFeature:
    """One encoder input of a prompt.

    identifier: the name of its output in the encoder cache (a content hash).
    offset, length: the placeholder range [offset, offset + length) of prompt positions.
    is_embed: bool [length], False where a position of the range keeps its token (a separator); None: all are embedded.
    The encoder output has one row per embedded position, in order.
    """

    identifier: str
    offset: int
    length: int
    is_embed: Bools | None = None
    modality: str = "image"

    @property
    def num_embeds(self) -> int:
        """Rows of the encoder output."""
        return self.length if self.is_embed is None else int(np.count_nonzero(self.is_embed))

    def check(self, req_id: str, prompt_len: int) -> None:
        """RequestError for a range outside the prompt or a mask of another length."""
        if not (is_int32(self.offset, 0) and is_int32(self.length, 1) and self.offset + self.length <= prompt_len):
            got, limit = (self.offset, self.length), f"(offset, length) must be inside the prompt's {prompt_len} tokens"
            raise RequestError(req_id, "mm_features", got, limit, "Give the placeholder range of prompt_token_ids.")
        if self.is_embed is not None and np.shape(self.is_embed) != (self.length,):
            got, limit = np.shape(self.is_embed), f"is_embed must have {self.length} entries"
            raise RequestError(req_id, "mm_features", got, limit, "Give one truth value per placeholder.")
