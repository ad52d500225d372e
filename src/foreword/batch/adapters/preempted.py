"""Preempted requests: out of their row and blocks, but known, so that they can come back without being sent again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from foreword.arrays import AnyArray
from foreword.batch.state.sampling_columns import COLUMNS
from foreword.batch.values.requests import NewRequest, TokenIds

if TYPE_CHECKING:
    from foreword.batch.state.request_states import RequestStates


@dataclass(frozen=True, slots=True, eq=False)
class Parked:
    """A preempted request as it would be admitted again. sampling: its columns, where it has no parameters object."""

    request: NewRequest
    sampling: dict[str, AnyArray] | None


def park(states: RequestStates, req_id: str) -> bool:
    """Preempt: free the request's row and keep what it was in `RequestStates.parked`. False for an unknown id."""
    if req_id not in states:
        return False
    row = states.row_of(req_id)
    prompt, known = int(states.prompt_len[row]), int(states.num_tokens[row])
    extras = states.extras
    embeds = extras.prompt_embeds.get(row)
    mask = None if states.is_token_id is None or embeds is None else states.is_token_id[row, :prompt].copy()
    tokens = states.token_ids[row, :known].copy()
    request = NewRequest(
        req_id,
        None if mask is not None and not mask.any() else tokens[:prompt],
        [[] for _ in states.block_tables],
        tokens[prompt:],
        0,
        states.sampling.params.get(row),
        int(states.lora_id[row]),
        embeds,
        prompt_is_token_id=mask,
        mm_features=extras.mm_features.get(row, ()),
        mrope_positions=extras.mrope_positions.get(row),
        mrope_delta=int(states.rope_delta[row]),
        encoder_len=int(states.encoder_len[row]),
        pooling_params=extras.pooling_params.get(row),
    )
    columns, sampling = states.sampling, None
    if columns.is_set[row] and request.sampling_params is None:
        sampling = {name: getattr(columns, name)[row : row + 1].copy() for name in COLUMNS}
    states.remove_request(req_id)
    states.parked[req_id] = Parked(request, sampling)
    return True


def resume(
    states: RequestStates,
    req_id: str,
    block_ids: Sequence[TokenIds],
    num_computed_tokens: int,
    output_token_ids: TokenIds | None = None,
) -> int:
    """Admit a parked request again, with other blocks, and return its row. Its outputs count as known tokens."""
    parked = states.parked[req_id]
    request = replace(parked.request, block_ids=block_ids, num_computed_tokens=num_computed_tokens)
    if output_token_ids is not None:
        request = replace(request, output_token_ids=output_token_ids)
    row = states.add_request(request)
    if parked.sampling is not None:
        states.sampling.set_columns(np.array([row], np.int32), parked.sampling)
    return row
