"""The tensors of one entry per request (batch order), and the scalars of a step."""

from __future__ import annotations

import numpy as np

from foreword.batch.proof.spec.tensor import Level, Relation, TensorSpec, step_tensor

REQUEST: tuple[TensorSpec, ...] = (
    TensorSpec(
        name="num_reqs",
        level=Level.STEP,
        shape=(),
        dtype="int64",
        definition="B, requests of the step",
        producer="prepare_inputs",
        consumers=("everything",),
        range=(0, "R"),
        relations=(Relation("B = the number of requests with seq_lens > 0", lambda s, x, g: s.B),),
    ),
    TensorSpec(
        name="num_tokens",
        level=Level.STEP,
        shape=(),
        dtype="int64",
        definition="T, tokens of the step, drafts included",
        producer="prepare_inputs",
        consumers=("everything",),
        range=("B", None),
        relations=(Relation("T = Σ num_scheduled_tokens", lambda s, x, g: s.T),),
    ),
    TensorSpec(
        name="num_reqs_padded",
        level=Level.STEP,
        shape=(),
        dtype="int64",
        definition="Bp, requests after padding for a captured graph",
        producer="prepare_inputs(pad_to=)",
        consumers=("graph replay",),
        range=("B", "R"),
    ),
    TensorSpec(
        name="num_tokens_padded",
        level=Level.STEP,
        shape=(),
        dtype="int64",
        definition="Tp, tokens after padding for a captured graph",
        producer="prepare_inputs(pad_to=)",
        consumers=("graph replay",),
        range=("T", None),
    ),
    TensorSpec(
        name="max_query_len",
        level=Level.STEP,
        shape=(),
        dtype="int64",
        definition="the longest query of the step",
        producer="prepare_inputs",
        consumers=("attention",),
        range=(0, "T"),
        relations=(Relation("max(num_scheduled_tokens), 0 without requests", lambda s, x, g: s.n.max(initial=0)),),
    ),
    TensorSpec(
        name="max_seq_len",
        level=Level.STEP,
        shape=(),
        dtype="int64",
        definition="the largest number of keys that a request of the step attends to",
        producer="prepare_inputs",
        consumers=("attention",),
        range=(0, "M"),
        relations=(Relation("max(seq_lens), 0 without requests", lambda s, x, g: (s.c + s.n).max(initial=0)),),
    ),
    TensorSpec(
        name="attention_state",
        level=Level.STEP,
        shape=(),
        dtype="int64",
        definition="the kind of step: PREFILL_NO_CACHE 0, PREFILL_CACHE_HIT 1, DECODE_ONLY 2, CHUNKED_PREFILL 3, "
        "SPEC_DECODING 4",
        producer="prepare_inputs",
        consumers=("attention",),
        range=(0, 4),
        relations=(
            Relation(
                "the first that holds: any drafts → 4; all num_scheduled = 1 and num_computed > 0 → 2; "
                "all num_computed = 0 → 0; all num_computed < prompt_len ≤ seq_lens → 1; else 3",
                lambda s, x, g: s.attention_state(),
            ),
        ),
    ),
    step_tensor(
        name="idx_mapping",
        level=Level.REQUEST,
        definition="batch row → state row; each row at most once",
        producer="prepare_inputs",
        consumers=("sampler", "kernels that read the state's own tables"),
        range=(0, "R-1"),
        relations=(Relation("idx_mapping[b] = the row that request b's other tensors are of", lambda s, x, g: s.rows),),
    ),
    step_tensor(
        name="row_generation",
        level=Level.REQUEST,
        definition="the generation of the row when the step was prepared; −1 for a request removed since, which keeps "
        "its tokens in a step in flight and is cancelled: starts at 0, tokens are 0, slots −1, blocks null",
        producer="prepare_inputs",
        consumers=("commit",),
        relations=(
            Relation(
                "row_generation[b] = states.row_generation[idx_mapping[b]]",
                lambda s, x, g: np.where(s.cancelled, -1, s.state("row_generation")[s.rows]),
            ),
        ),
    ),
    step_tensor(
        name="num_computed_tokens",
        level=Level.REQUEST,
        definition="tokens of the request whose keys and values are in the cache before the step",
        producer="prepare_inputs",
        consumers=("attention", "commit"),
        range=(0, "M-1"),
        relations=(
            Relation("num_computed_tokens[b] = states.num_computed_tokens[idx_mapping[b]]", lambda s, x, g: s.c),
        ),
    ),
    step_tensor(
        name="num_placeholders",
        level=Level.REQUEST,
        definition="tokens of the request that a step in flight is about to sample: after the known ones, read as 0",
        producer="prepare_inputs",
        consumers=("resolve",),
        range=(0, "M"),
        relations=(
            Relation("num_placeholders[b] = states.num_placeholders[idx_mapping[b]]", lambda s, x, g: s.in_flight),
        ),
    ),
    step_tensor(
        name="num_scheduled_tokens",
        level=Level.REQUEST,
        definition="query length of the request, its drafts included",
        producer="scheduler",
        consumers=("attention", "commit"),
        range=(1, "T"),
        relations=(
            Relation(
                "num_scheduled_tokens[b] = query_start_loc[b + 1] − query_start_loc[b] = seq_lens[b] − "
                "num_computed_tokens[b]",
                lambda s, x, g: s.n,
            ),
        ),
    ),
    step_tensor(
        name="num_draft_tokens",
        level=Level.REQUEST,
        definition="how many of the scheduled tokens are drafts to verify: the last ones",
        producer="scheduler",
        consumers=("sampler", "commit"),
        range=(0, "T"),
        relations=(
            Relation(
                "num_draft_tokens[b] = cu_num_draft_tokens[b + 1] − cu_num_draft_tokens[b] = "
                "cu_num_logits[b + 1] − cu_num_logits[b] − 1",
                lambda s, x, g: s.k,
            ),
        ),
    ),
    step_tensor(
        name="query_start_loc",
        level=Level.REQUEST,
        definition="the tokens of request b are [query_start_loc[b], query_start_loc[b + 1]); padding is empty",
        producer="prepare_inputs",
        consumers=("attention",),
        range=(0, "T"),
        relations=(Relation("query_start_loc[b] = Σ num_scheduled_tokens[: b]", lambda s, x, g: s.loc),),
    ),
    step_tensor(
        name="seq_lens",
        level=Level.REQUEST,
        definition="keys of the request after the step: the context and the query",
        producer="prepare_inputs",
        consumers=("attention",),
        range=(1, "M"),
        relations=(
            Relation("seq_lens[b] = num_computed_tokens[b] + num_scheduled_tokens[b]", lambda s, x, g: s.c + s.n),
        ),
    ),
    step_tensor(
        name="is_prefilling",
        level=Level.REQUEST,
        definition="whether the step starts before the end of what must be computed first",
        producer="prepare_inputs",
        consumers=("attention", "sampler"),
        relations=(
            Relation(
                "is_prefilling[b] = num_computed_tokens[b] < states.prefill_len[idx_mapping[b]]",
                lambda s, x, g: s.c < s.of_rows("prefill_len"),
            ),
        ),
    ),
    step_tensor(
        name="dcp_local_seq_lens",
        level=Level.REQUEST,
        definition="this rank's share of seq_lens; over all ranks it sums to them",
        producer="prepare_inputs",
        consumers=("attention",),
        range=(0, "M"),
        optional="context parallelism",
        relations=(
            Relation(
                "dcp_local_seq_lens[b] = #{p < seq_lens[b] : (p // interleave) mod size = rank}",
                lambda s, x, g: s.local_seq_lens(),
            ),
        ),
    ),
    step_tensor(
        name="block_table",
        level=Level.REQUEST,
        definition="the requests' rows of the group's block table, null past the end and below the sliding window",
        producer="prepare_inputs(gather_block_tables=True)",
        consumers=("attention",),
        range=(0, None),
        optional="gathered block tables",
        relations=(
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
        ),
    ),
    step_tensor(
        name="num_blocks",
        level=Level.REQUEST,
        definition="entries of the gathered row that are the request's",
        producer="prepare_inputs(gather_block_tables=True)",
        consumers=("adapters",),
        range=(0, "K"),
        optional="gathered block tables",
        relations=(
            Relation(
                "num_blocks[b] = states.num_blocks[idx_mapping[b]]",
                lambda s, x, g: s.num_blocks(g),
            ),
        ),
    ),
    step_tensor(
        name="cu_num_logits",
        level=Level.REQUEST,
        definition="the logit rows of request b are [cu_num_logits[b], cu_num_logits[b + 1])",
        producer="prepare_inputs",
        consumers=("sampler",),
        range=(0, "L"),
        relations=(Relation("cu_num_logits[b] = Σ (1 + num_draft_tokens)[: b]", lambda s, x, g: s.cu_logits),),
    ),
    step_tensor(
        name="cu_num_draft_tokens",
        level=Level.REQUEST,
        definition="the drafts of request b are [cu_num_draft_tokens[b], cu_num_draft_tokens[b + 1])",
        producer="prepare_inputs",
        consumers=("verification",),
        range=(0, "D"),
        relations=(Relation("cu_num_draft_tokens[b] = Σ num_draft_tokens[: b]", lambda s, x, g: s.cu_drafts),),
    ),
)
