"""The tensors of one entry per scheduled token, and of one entry per row of logits."""

from __future__ import annotations

from functools import partial
from typing import Any

from foreword.batch.proof.spec.tensor import Level, Relation, TensorSpec, step_tensor

_token, _logit = partial(step_tensor, Level.TOKEN), partial(step_tensor, Level.LOGIT)


def _explained(name: str, definition: str, relation: Relation, **facts: Any) -> TensorSpec:
    return TensorSpec(
        name=name, level=Level.TOKEN, shape=("T",), definition=definition, relations=(relation,), attribute="explain",
        producer="explain", consumers="readers", **facts,
    )  # fmt: skip


# A row: name and definition, relations, then who makes and reads it.
# fmt: off
TOKEN: tuple[TensorSpec, ...] = (
    _token(
        "req_indices", "the request of the token, as batch index",
        Relation(
            "query_start_loc[req_indices[t]] ≤ t < query_start_loc[req_indices[t] + 1]",
            lambda s, x, g: s.b_of_token,
        ),
        consumers="attention, adapter layers", range=(0, "B-1"),
    ),
    _token(
        "positions", "the position of the token in its request. The first one follows the computed tokens",
        Relation(
            "positions[t] = num_computed_tokens[b] + t − query_start_loc[b], b = req_indices[t]",
            lambda s, x, g: s.positions,
        ),
        consumers="rotary embedding, attention", range=(0, "M-1"),
    ),
    _token(
        "input_ids", "the id of the token: a prompt token, the last sampled token, or a draft; 0 if it is not known "
        "yet",
        Relation(
            "input_ids[t] = states.token_ids[idx_mapping[b], positions[t]], b = req_indices[t]; 0 in flight",
            lambda s, x, g: s.input_ids(),
        ),
        consumers="embedding", range=(0, "V-1"),
    ),
    _token(
        "slot_mapping", "the slot to which the token's key and value are written; −1 for none (padding, another "
        "rank's token, a recurrent group)",
        Relation(
            "slot_mapping[t] = block_table[b, positions[t] // P] · S + offset; −1 where another rank owns it",
            lambda s, x, g: s.slots(g),
        ),
        consumers="cache write", range=(-1, None),
    ),
    _token(
        "bidirectional_ranges", "the range [start, stop) of positions in the request's bidirectional_ranges that "
        "contains the token, which then attends to the whole range; (0, 0) if there is none",
        Relation(
            "start ≤ positions[t] < stop of out[t] = (start, stop), a range of the request of token t",
            lambda s, x, g: s.bidirectional_ranges(),
        ),
        producer="bidirectional_ranges", consumers="attention", optional="a token in such a range",
        attribute="function",
    ),
)

LOGIT: tuple[TensorSpec, ...] = (
    _logit(
        "logits_indices", "the token rows that are projected to logits: the last 1 + drafts of each request",
        Relation(
            "logits_indices[cu_num_logits[b] + j] = query_start_loc[b + 1] − 1 − num_draft_tokens[b] + j",
            lambda s, x, g: (s.loc[1:] - 1 - s.k)[s.b_of_logit] + s.local_pos,
        ),
        consumers="executor", range=(0, "T-1"),
    ),
    _logit(
        "expanded_idx_mapping", "logit row → state row",
        Relation("expanded_idx_mapping[cu_num_logits[b] + j] = idx_mapping[b]", lambda s, x, g: s.rows[s.b_of_logit]),
        consumers="sampler", range=(0, "R-1"),
    ),
    _logit(
        "expanded_local_pos", "logit row → its index among the logit rows of its request",
        Relation("expanded_local_pos[cu_num_logits[b] + j] = j", lambda s, x, g: s.local_pos),
        consumers="sampler", range=(0, "L-1"),
    ),
    _logit(
        "target_logits_indices", "the logit row that verifies each draft",
        Relation(
            "target_logits_indices[cu_num_draft_tokens[b] + j] = cu_num_logits[b] + j",
            lambda s, x, g: s.cu_logits[s.b_of_draft] + s.draft_pos,
        ),
        consumers="verification", range=(0, "L-1"),
    ),
    _logit(
        "bonus_logits_indices", "the logit row that gives the token after all drafts: the last one of each request",
        Relation("bonus_logits_indices[b] = cu_num_logits[b + 1] − 1", lambda s, x, g: s.cu_logits[1:] - 1),
        consumers="sampler, verification", range=(0, "L-1"),
    ),
    _logit(
        "draft_token_ids", "the drafts, request by request; −1 for a draft whose id is not known here",
        Relation(
            "max(draft_token_ids[cu_num_draft_tokens[b] + j], 0) = "
            "states.token_ids[idx_mapping[b], states.num_tokens[…] + num_placeholders[b] + j]",
            lambda s, x, g: s.staged_drafts(x),
        ),
        producer="scheduler", consumers="verification", range=(-1, "V-1"),
    ),
)

# Where each token comes from and goes to, made on demand: the attributes of `batch.explain(group)`.
EXPLAINED: tuple[TensorSpec, ...] = (
    _explained(
        "token_indices", "index of the id in the flattened token table",
        Relation(
            "token_indices[t] = idx_mapping[b] · M + positions[t]",
            lambda s, x, g: s.token_rows * s.M + s.positions,
        ),
        dtype="int64", range=(0, None),
    ),
    _explained(
        "block_table_indices", "index of the block in the flattened block table (not token_indices // P: M need not "
        "be K·P)",
        Relation(
            "block_table_indices[t] = idx_mapping[b] · K + positions[t] // P",
            lambda s, x, g: s.token_rows * s.table(g).width + s.positions // s.table(g).tokens_per_block,
        ),
        dtype="int64", range=(0, None), per_group=True,
    ),
    _explained(
        "block_numbers", "the physical block",
        Relation(
            "block_numbers[t] = states.block_table.flat[block_table_indices[t]]",
            lambda s, x, g: s.table(g).table[s.token_rows, s.positions // s.table(g).tokens_per_block],
        ),
        dtype="int32", range=(0, None), per_group=True,
    ),
    _explained(
        "block_offsets", "the offset in the block (under context parallelism: in this rank's part of the block)",
        Relation(
            "block_offsets[t] = positions[t] mod S; (offset // (I·n))·I + offset mod I under context parallelism",
            lambda s, x, g: s.block_offsets(g),
        ),
        dtype="int32", range=(0, "P-1"), per_group=True,
    ),
)
