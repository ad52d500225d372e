"""Prompts with embeddings, alone or mixed with tokens: find the scheduled tokens that read a vector instead of an
id.
"""

from __future__ import annotations

import numpy as np

from foreword.arrays import I64, AnyArray, Bools
from foreword.batch.features.multimodal import prefilling_with
from foreword.batch.state.request_states import RequestStates
from foreword.batch.step.tensors import BatchTensors
from foreword.errors import RequestError


def is_token_ids(batch: BatchTensors) -> Bools:
    """Return bool [Tp]: True if the input is in input_ids, False if it is a prompt embedding. Padding is True."""
    out: Bools = batch.optional("is_token_ids")[: batch.num_tokens_padded]
    out[:] = True
    mask = batch.states.extras.is_embedding
    if mask is not None:
        T = batch.num_tokens
        np.logical_not(mask[batch.idx_mapping[batch.req_indices], batch.positions[:T]], out=out[:T])
    return out


def prompt_embeds(batch: BatchTensors, hidden_size: int | None = None) -> tuple[I64, AnyArray]:
    """Return (token rows int64 [N], ascending; vectors [N, hidden]): inputs_embeds[token rows] = vectors.

    N is the number of scheduled tokens for which is_token_ids is False. If N is 0, the vectors are float32 [0,
    hidden_size].
    hidden_size: that of the model; embeddings of another width raise RequestError. With None, any width is allowed.
    The cost is O(N + B), and nothing without embeddings.
    """
    staged, mask = batch.states.extras.prompt_embeds, batch.states.extras.is_embedding
    rows: list[I64] = []
    vectors: list[AnyArray] = []
    for b in prefilling_with(staged, batch):
        row, c, first = int(batch.idx_mapping[b]), int(batch.num_computed_tokens[b]), int(batch.query_start_loc[b])
        embeds = staged[row]
        if hidden_size is not None and embeds.shape[1] != hidden_size:
            reason, fix = f"the model's embeddings have {hidden_size} values", "Give vectors of that width."
            raise RequestError(batch.req_ids[b], "prompt_embeds", embeds.shape, reason, fix)
        n = min(int(batch.num_scheduled_tokens[b]), len(embeds) - c)
        if n <= 0:
            continue
        assert mask is not None
        local = np.flatnonzero(mask[row, c : c + n])
        rows.append(first + local)
        vectors.append(embeds[c + local])
    if not rows:
        return np.zeros(0, np.int64), np.zeros((0, hidden_size or 0), np.float32)
    return np.concatenate(rows), np.concatenate(vectors)


def get_token_id(states: RequestStates, req_id: str, position: int) -> int:
    """Return the token at a position of a request. Raise RequestError past its known tokens, and for an embedding."""
    row, mask = states.row_of(req_id), states.extras.is_embedding
    known = int(states.num_tokens[row])
    if not 0 <= position < known:
        raise RequestError(req_id, "position", position, f"must be in [0, {known - 1}]", "Ask for a known token.")
    if mask is not None and mask[row, position]:
        reason = "was given as a prompt embedding and has no token id"
        raise RequestError(req_id, "position", position, reason, "Read states.extras.prompt_embeds instead.")
    return int(states.token_ids[row, position])
