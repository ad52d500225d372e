"""The tensors of one entry per request (batch order), and the scalars of a step."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from foreword.batch.proof.spec.tensor import Level, Relation, TensorSpec, step_tensor

_request = partial(step_tensor, Level.REQUEST)


def _scalar(name: str, definition: str, *relations: Relation, **facts: Any) -> TensorSpec:
    return TensorSpec(
        name=name, level=Level.STEP, shape=(), dtype="int64", definition=definition, relations=relations, **facts
    )


# A row: name and definition, relations, then who makes and reads it.
# fmt: off
REQUEST: tuple[TensorSpec, ...] = (
    _scalar(
        "num_reqs", "B, requests of the step",
        Relation("B = the number of requests with seq_lens > 0", lambda s, x, g: s.B),
        consumers="everything", range=(0, "R"),
    ),
    _scalar(
        "num_tokens", "T, tokens of the step, drafts included",
        Relation("T = Σ num_scheduled_tokens", lambda s, x, g: s.T),
        consumers="everything", range=("B", None),
    ),
    _scalar(
        "num_reqs_padded", "Bp, requests after padding for a captured graph",
        producer="prepare_inputs(pad_to=)", consumers="graph replay", range=("B", "R"),
    ),
    _scalar(
        "num_tokens_padded", "Tp, tokens after padding for a captured graph",
        producer="prepare_inputs(pad_to=)", consumers="graph replay", range=("T", None),
    ),
    _scalar(
        "max_query_len", "the number of tokens of the longest query of the step",
        Relation("max(num_scheduled_tokens), 0 without requests", lambda s, x, g: s.n.max(initial=0)),
        consumers="attention", range=(0, "T"),
    ),
    _scalar(
        "max_seq_len", "the largest number of keys that a request of the step attends to",
        Relation("max(seq_lens), 0 without requests", lambda s, x, g: (s.c + s.n).max(initial=0)),
        consumers="attention", range=(0, "M"),
    ),
    _scalar(
        "attention_state", "the kind of step: PREFILL_NO_CACHE 0, PREFILL_CACHE_HIT 1, DECODE_ONLY 2, CHUNKED_PREFILL "
        "3, SPEC_DECODING 4",
        Relation(
            "the first that holds: any drafts → 4; all num_scheduled = 1 and num_computed > 0 → 2; "
            "all num_computed = 0 → 0; all num_computed < prompt_len ≤ seq_lens → 1; else 3",
            lambda s, x, g: s.attention_state(),
        ),
        consumers="attention", range=(0, 4),
    ),
    _request(
        "idx_mapping", "batch row → state row; each row at most once",
        Relation("idx_mapping[b] = the row that request b's other tensors are of", lambda s, x, g: s.rows),
        consumers="sampler, kernels that read the state's own tables", range=(0, "R-1"),
    ),
    _request(
        "row_generation", "the generation of the row when the step was prepared, or −1 if the request was removed "
        "while an earlier step with it ran. Such a request keeps its tokens in this step, with ids and positions 0, "
        "slots −1 and null blocks",
        Relation(
            "row_generation[b] = states.row_generation[idx_mapping[b]]",
            lambda s, x, g: np.where(s.cancelled, -1, s.state("row_generation")[s.rows]),
        ),
        consumers="commit",
    ),
    _request(
        "num_computed_tokens", "the number of tokens of the request whose keys and values are in the cache before "
        "the step",
        Relation("num_computed_tokens[b] = states.num_computed_tokens[idx_mapping[b]]", lambda s, x, g: s.c),
        consumers="attention, commit", range=(0, "M-1"),
    ),
    _request(
        "num_placeholders", "the number of tokens of the request that a step in flight is about to sample. They "
        "follow the known tokens and are read as 0",
        Relation("num_placeholders[b] = states.num_placeholders[idx_mapping[b]]", lambda s, x, g: s.in_flight),
        consumers="resolve", range=(0, "M"),
    ),
    _request(
        "num_scheduled_tokens", "the query length of the request, drafts included",
        Relation(
            "num_scheduled_tokens[b] = query_start_loc[b + 1] − query_start_loc[b] = seq_lens[b] − "
            "num_computed_tokens[b]",
            lambda s, x, g: s.n,
        ),
        producer="scheduler", consumers="attention, commit", range=(1, "T"),
    ),
    _request(
        "num_draft_tokens", "the number of drafts to verify. They are the last of the scheduled tokens, after "
        "`admit_drafts` has removed some",
        Relation(
            "num_draft_tokens[b] = cu_num_draft_tokens[b + 1] − cu_num_draft_tokens[b] = "
            "cu_num_logits[b + 1] − cu_num_logits[b] − 1",
            lambda s, x, g: s.k,
        ),
        producer="scheduler", consumers="sampler, commit", range=(0, "T"),
    ),
    _request(
        "query_start_loc", "the tokens of request b are [query_start_loc[b], query_start_loc[b + 1]); padding is empty",
        Relation("query_start_loc[b] = Σ num_scheduled_tokens[: b]", lambda s, x, g: s.loc),
        consumers="attention", range=(0, "T"),
    ),
    _request(
        "seq_lens", "the number of keys of the request after the step: context and query",
        Relation("seq_lens[b] = num_computed_tokens[b] + num_scheduled_tokens[b]", lambda s, x, g: s.c + s.n),
        consumers="attention", range=(1, "M"),
    ),
    _request(
        "is_prefilling", "whether the step starts before all tokens of prefill_len are computed",
        Relation(
            "is_prefilling[b] = num_computed_tokens[b] < states.prefill_len[idx_mapping[b]]",
            lambda s, x, g: s.c < s.of_rows("prefill_len"),
        ),
        consumers="attention, sampler",
    ),
    _request(
        "dcp_local_seq_lens", "this rank's share of seq_lens. The sum over all ranks is seq_lens",
        Relation(
            "dcp_local_seq_lens[b] = #{p < seq_lens[b] : (p // interleave) mod size = rank}",
            lambda s, x, g: s.local_seq_lens(),
        ),
        consumers="attention", range=(0, "M"), optional="context parallelism",
    ),
    _request(
        "block_table", "the requests' rows of the group's block table. Entries past the end and below the sliding "
        "window are null",
        Relation(
            "block_table[b, k] = states.block_table[idx_mapping[b], k] where held and not below the window",
            lambda s, x, g: np.where(s.held(g) & ~s.below_window(g), s.table(g).table[s.rows], x),
        ),
        Relation(
            "block_table[b, k] = null_block for k ≥ num_blocks[b]",
            lambda s, x, g: np.where(s.held(g), x, s.states.null_block),
        ),
        Relation(
            "block_table[b, k] = null_block where (k + 1)·P ≤ num_computed_tokens[b] − W + 1, for a window W ≥ 2",
            lambda s, x, g: np.where(s.below_window(g) & s.held(g), s.states.null_block, x),
        ),
        producer="prepare_inputs(gather_block_tables=True)", consumers="attention", range=(0, None),
        optional="gathered block tables",
    ),
    _request(
        "num_blocks", "the number of entries of the gathered row that belong to the request",
        Relation("num_blocks[b] = states.num_blocks[idx_mapping[b]]", lambda s, x, g: s.num_blocks(g)),
        producer="prepare_inputs(gather_block_tables=True)", consumers="adapters", range=(0, "K"),
        optional="gathered block tables",
    ),
    _request(
        "cu_num_logits", "the logit rows of request b are [cu_num_logits[b], cu_num_logits[b + 1])",
        Relation("cu_num_logits[b] = Σ (1 + num_draft_tokens)[: b]", lambda s, x, g: s.cu_logits),
        consumers="sampler", range=(0, "L"),
    ),
    _request(
        "cu_num_draft_tokens", "the drafts of request b are [cu_num_draft_tokens[b], cu_num_draft_tokens[b + 1])",
        Relation("cu_num_draft_tokens[b] = Σ num_draft_tokens[: b]", lambda s, x, g: s.cu_drafts),
        consumers="verification", range=(0, "D"),
    ),
)
