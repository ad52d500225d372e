"""What the scheduler says when it admits a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from foreword.batch.sampling import SamplingParams

TokenIds = Sequence[int] | npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True, eq=False)
class NewRequest:
    """A request as admitted, new or resumed (a resumed one brings the outputs it had).

    block_ids: one list of physical blocks per KV group, covering the cached prefix and what is allocated so far.
    num_computed_tokens: tokens whose KV is already in those blocks (a prefix hit); fewer than prompt + outputs.
    prompt_embeds: [prompt_len, hidden] in place of prompt_token_ids (None), or beside them with
    prompt_is_token_id [prompt_len] bool saying which positions are tokens.
    """

    req_id: str
    prompt_token_ids: TokenIds | None
    block_ids: Sequence[TokenIds]
    output_token_ids: TokenIds = ()
    num_computed_tokens: int = 0
    sampling_params: SamplingParams | None = None
    lora_id: int = 0
    prompt_embeds: npt.NDArray[np.floating] | None = None
    prompt_is_token_id: npt.NDArray[np.bool_] | None = field(default=None, kw_only=True)
