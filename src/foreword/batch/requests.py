"""What the scheduler says when it admits a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from foreword.errors import RequestError

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
        """The same as one `NewRequest` each (without ``sampling``, which has no parameters object).

        RequestError for columns that do not have one entry a request, or that do not add up.
        """
        self._check()
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

    def _check(self) -> None:
        count = len(self.req_ids)
        columns = {"num_tokens": self.num_tokens, "prompt_len": self.prompt_len, "lora_id": self.lora_id}
        columns |= {"num_computed_tokens": self.num_computed_tokens}
        columns |= {f"num_blocks[{g}]": held for g, held in enumerate(self.num_blocks)}
        for name, column in columns.items():
            if column is not None and len(column) != count:
                raise RequestError(
                    None, name, f"{len(column)} entries", f"there are {count} requests", "Give one each."
                )
        if len(self.block_ids) != len(self.num_blocks):
            raise RequestError(
                None, "num_blocks", f"{len(self.num_blocks)} arrays", f"block_ids has {len(self.block_ids)}",
                "Give one of either for each KV group.",
            )  # fmt: skip
        sums = [("token_ids", self.token_ids, "num_tokens", self.num_tokens)]
        for g, (ids, held) in enumerate(zip(self.block_ids, self.num_blocks, strict=True)):
            sums.append((f"block_ids[{g}]", ids, f"num_blocks[{g}]", held))
        for name, values, count_name, counts in sums:
            if (counts < 0).any() or int(counts.sum()) != len(values):
                raise RequestError(
                    None, name, f"{len(values)} entries", f"{count_name} adds up to {int(counts.sum())}, none below 0",
                    "Make them agree.",
                )  # fmt: skip
        if self.prompt_len is not None and ((self.prompt_len < 1) | (self.prompt_len > self.num_tokens)).any():
            i = int(np.argmax((self.prompt_len < 1) | (self.prompt_len > self.num_tokens)))
            raise RequestError(
                self.req_ids[i], "prompt_len", int(self.prompt_len[i]),
                f"must be in [1, num_tokens = {int(self.num_tokens[i])}]", "Count the prompt's own tokens.",
            )  # fmt: skip
