"""Preempted requests of a vLLM scheduler. They have neither row nor blocks, and are kept so that they can be resumed by
id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from foreword.arrays import AnyArray
from foreword.batch.state.request_states import RequestStates
from foreword.batch.state.sampling_columns import GIVEN
from foreword.batch.values.requests import NewRequest, TokenIds


@dataclass(frozen=True, slots=True, eq=False)
class PreemptedRequest:
    """A preempted request as it would be admitted again.

    sampling: its columns, if it has no parameters object. seed: the given or derived seed that it draws with.
    """

    request: NewRequest
    sampling: dict[str, AnyArray] | None
    seed: int


def preempt(states: RequestStates, req_id: str) -> PreemptedRequest:
    """Free the request's row and return the request. Raise RequestError for an unknown id."""
    row = states.row_of(req_id)
    prompt, known = int(states.prompt_len[row]), int(states.num_tokens[row])
    extras, lora_id = states.extras, int(states.lora_id[row])
    embeds = extras.prompt_embeds.get(row)
    mask = None if extras.is_embedding is None or embeds is None else ~extras.is_embedding[row, :prompt]
    tokens = states.token_ids[row, :known].copy()
    request = NewRequest(
        req_id,
        None if mask is not None and not mask.any() else tokens[:prompt],
        [[] for _ in states.block_tables],
        tokens[prompt:],
        0,
        states.sampling.params.get(row),
        lora_id,
        embeds,
        prompt_is_token_id=mask,
        mm_features=extras.mm_features.get(row, ()),
        mrope_positions=extras.mrope_positions.get(row),
        mrope_delta=int(states.rope_delta[row]),
        bidirectional_ranges=extras.bidirectional_ranges.get(row, ()),
        encoder_len=int(states.encoder_len[row]),
        encoder_input=extras.encoder_inputs.get(row),
        pooling_params=extras.pooling_params.get(row),
        lora_request=states.loras.request(lora_id),
    )
    columns, sampling = states.sampling, None
    if columns.is_set[row] and request.sampling_params is None:
        sampling = {name: getattr(columns, name)[row : row + 1].copy() for name in GIVEN}
    seed = int(columns.seed[row])
    states.remove_request(req_id)
    return PreemptedRequest(request, sampling, seed)


def resume(
    states: RequestStates,
    preempted: PreemptedRequest,
    block_ids: Sequence[TokenIds],
    num_computed_tokens: int,
    output_token_ids: TokenIds | None = None,
) -> int:
    """Admit a preempted request again, with other blocks, and return its row. Its outputs count as known tokens."""
    request = replace(preempted.request, block_ids=block_ids, num_computed_tokens=num_computed_tokens)
    if output_token_ids is not None:
        request = replace(request, output_token_ids=output_token_ids)
    row = states.add_request(request)
    if preempted.sampling is not None:
        states.sampling.set_columns(np.array([row], np.int32), preempted.sampling)
    states.sampling.seed[row] = preempted.seed
    return row
