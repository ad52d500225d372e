"""What the scheduler says when it admits a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from foreword.batch.multimodal import MultiModalFeature
    from foreword.batch.pooling import PoolingParams
    from foreword.batch.sampling import SamplingParams

TokenIds = Sequence[int] | npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True, eq=False)
class NewRequest:
    """A request as admitted, new or resumed (a resumed one brings the outputs it had).

    block_ids: one list of physical blocks per KV group, covering the cached prefix and what is allocated so far.
    num_computed_tokens: tokens whose KV is already in those blocks (a prefix hit); fewer than prompt + outputs.
    prompt_embeds: [prompt_len, hidden] in place of prompt_token_ids (None), or beside them with
    prompt_is_token_id [prompt_len] bool saying which positions are tokens.
    mm_features: the encoder inputs of the prompt. mrope_positions: int32 [dims, tokens], rotary positions of the first
    tokens; mrope_delta: what later tokens add to their position. encoder_len: tokens of an encoder-decoder's encoder.
    pooling_params: what to make of the hidden states, in place of sampling_params.
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
    mm_features: Sequence[MultiModalFeature] = field(default=(), kw_only=True)
    mrope_positions: npt.NDArray[np.integer] | None = field(default=None, kw_only=True)
    mrope_delta: int = field(default=0, kw_only=True)
    encoder_len: int = field(default=0, kw_only=True)
    pooling_params: PoolingParams | None = field(default=None, kw_only=True)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class NewRequests:
    """Many arrivals as columns, for `RequestStates.add_requests`: N requests, nothing of Python's per request.

    token_ids: int32, every request's known tokens (prompt, then outputs), one request after the other.
    num_tokens: int32 [N], how many of them are request i's. prompt_len: int32 [N]; None: all of them are prompt.
    block_ids, num_blocks: one array a KV group, in the same way. num_computed_tokens: int32 [N]; None: 0.
    sampling: column name (as in `sampling_columns.COLUMNS`) → [N]; columns not named keep the default (greedy).
    """

    req_ids: Sequence[str]
    token_ids: npt.NDArray[np.int32]
    num_tokens: npt.NDArray[np.int32]
    block_ids: Sequence[npt.NDArray[np.int32]]
    num_blocks: Sequence[npt.NDArray[np.int32]]
    prompt_len: npt.NDArray[np.int32] | None = None
    num_computed_tokens: npt.NDArray[np.int32] | None = None
    lora_id: npt.NDArray[np.int32] | None = None
    sampling: Mapping[str, npt.NDArray[np.generic]] | None = None

    def split(self) -> list[NewRequest]:
        """The same as one `NewRequest` each (without ``sampling``, which has no parameters object)."""
        starts = np.cumsum(self.num_tokens) - self.num_tokens
        block_starts = [np.cumsum(n) - n for n in self.num_blocks]
        requests = []
        for i, req_id in enumerate(self.req_ids):
            tokens = self.token_ids[starts[i] : starts[i] + self.num_tokens[i]]
            prompt = len(tokens) if self.prompt_len is None else int(self.prompt_len[i])
            blocks = [
                ids[at[i] : at[i] + n[i]]
                for ids, n, at in zip(self.block_ids, self.num_blocks, block_starts, strict=True)
            ]
            computed = 0 if self.num_computed_tokens is None else int(self.num_computed_tokens[i])
            lora = 0 if self.lora_id is None else int(self.lora_id[i])
            requests.append(NewRequest(req_id, tokens[:prompt], blocks, tokens[prompt:], computed, lora_id=lora))
        return requests
