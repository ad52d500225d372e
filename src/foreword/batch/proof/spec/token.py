"""The tensors of one entry per scheduled token, and of one entry per row of logits."""

from __future__ import annotations

from foreword.batch.proof.spec.tensor import Level, Relation, TensorSpec, step_tensor

TOKEN: tuple[TensorSpec, ...] = (
    step_tensor(
        name="req_indices",
        level=Level.TOKEN,
        definition="the request of the token, as batch index",
        producer="prepare_inputs",
        consumers=("attention", "adapter layers"),
        range=(0, "B-1"),
        relations=(
            Relation(
                "query_start_loc[req_indices[t]] ≤ t < query_start_loc[req_indices[t] + 1]",
                lambda s, x, g: s.b_of_token,
            ),
        ),
    ),
    step_tensor(
        name="positions",
        level=Level.TOKEN,
        definition="the position of the token in its request: right after what is computed",
        producer="prepare_inputs",
        consumers=("rotary embedding", "attention"),
        range=(0, "M-1"),
        relations=(
            Relation(
                "positions[t] = num_computed_tokens[b] + t − query_start_loc[b], b = req_indices[t]",
                lambda s, x, g: s.positions,
            ),
        ),
    ),
    step_tensor(
        name="input_ids",
        level=Level.TOKEN,
        definition="the token itself: of the prompt, the last sampled one, or a draft; 0 where it is not known yet",
        producer="prepare_inputs",
        consumers=("embedding",),
        range=(0, "V-1"),
        relations=(
            Relation(
                "input_ids[t] = states.token_ids[idx_mapping[b], positions[t]], b = req_indices[t]; 0 in flight",
                lambda s, x, g: s.input_ids(),
            ),
        ),
    ),
    step_tensor(
        name="slot_mapping",
        level=Level.TOKEN,
        definition="where the token's key and value go; −1: nowhere (padding, another rank's, a recurrent group's)",
        producer="prepare_inputs",
        consumers=("cache write",),
        range=(-1, None),
        relations=(
            Relation(
                "slot_mapping[t] = block_table[b, positions[t] // P] · S + offset; −1 where another rank owns it",
                lambda s, x, g: s.slots(g),
            ),
        ),
    ),
)

LOGIT: tuple[TensorSpec, ...] = (
    step_tensor(
        name="logits_indices",
        level=Level.LOGIT,
        definition="token rows to project to logits: the last 1 + drafts of each request",
        producer="prepare_inputs",
        consumers=("executor",),
        range=(0, "T-1"),
        relations=(
            Relation(
                "logits_indices[cu_num_logits[b] + j] = query_start_loc[b + 1] − 1 − num_draft_tokens[b] + j",
                lambda s, x, g: (s.loc[1:] - 1 - s.k)[s.b_of_logit] + s.local_pos,
            ),
        ),
    ),
    step_tensor(
        name="expanded_idx_mapping",
        level=Level.LOGIT,
        definition="logit row → state row",
        producer="prepare_inputs",
        consumers=("sampler",),
        range=(0, "R-1"),
        relations=(
            Relation(
                "expanded_idx_mapping[cu_num_logits[b] + j] = idx_mapping[b]", lambda s, x, g: s.rows[s.b_of_logit]
            ),
        ),
    ),
    step_tensor(
        name="expanded_local_pos",
        level=Level.LOGIT,
        definition="logit row → place among the logit rows of its request",
        producer="prepare_inputs",
        consumers=("sampler",),
        range=(0, "L-1"),
        relations=(Relation("expanded_local_pos[cu_num_logits[b] + j] = j", lambda s, x, g: s.local_pos),),
    ),
    step_tensor(
        name="target_logits_indices",
        level=Level.LOGIT,
        definition="the logit row that verifies each draft",
        producer="prepare_inputs",
        consumers=("verification",),
        range=(0, "L-1"),
        relations=(
            Relation(
                "target_logits_indices[cu_num_draft_tokens[b] + j] = cu_num_logits[b] + j",
                lambda s, x, g: s.cu_logits[s.b_of_draft] + s.draft_pos,
            ),
        ),
    ),
    step_tensor(
        name="bonus_logits_indices",
        level=Level.LOGIT,
        definition="the logit row that gives the token after all drafts: the last of each request",
        producer="prepare_inputs",
        consumers=("sampler", "verification"),
        range=(0, "L-1"),
        relations=(
            Relation("bonus_logits_indices[b] = cu_num_logits[b + 1] − 1", lambda s, x, g: s.cu_logits[1:] - 1),
        ),
    ),
    step_tensor(
        name="draft_token_ids",
        level=Level.LOGIT,
        definition="the drafts, request by request; −1 for one whose id is not known here",
        producer="scheduler",
        consumers=("verification",),
        range=(-1, "V-1"),
        relations=(
            Relation(
                "max(draft_token_ids[cu_num_draft_tokens[b] + j], 0) = "
                "states.token_ids[idx_mapping[b], states.num_tokens[…] + num_placeholders[b] + j]",
                lambda s, x, g: s.staged_drafts(x),
            ),
        ),
    ),
)

# Where each token comes from and goes to, made on demand: the attributes of `batch.explain(group)`.
EXPLAINED: tuple[TensorSpec, ...] = (
    TensorSpec(
        name="token_indices",
        level=Level.TOKEN,
        shape=("T",),
        dtype="int64",
        definition="index of the id in the flattened token table",
        producer="explain",
        consumers=("readers",),
        range=(0, None),
        attribute="explain",
        relations=(
            Relation(
                "token_indices[t] = idx_mapping[b] · M + positions[t]",
                lambda s, x, g: s.token_rows * s.M + s.positions,
            ),
        ),
    ),
    TensorSpec(
        name="block_table_indices",
        level=Level.TOKEN,
        shape=("T",),
        dtype="int64",
        definition="index of the block in the flattened block table (not token_indices // P: M need not be K·P)",
        producer="explain",
        consumers=("readers",),
        range=(0, None),
        per_group=True,
        attribute="explain",
        relations=(
            Relation(
                "block_table_indices[t] = idx_mapping[b] · K + positions[t] // P",
                lambda s, x, g: s.token_rows * s.table(g).width + s.positions // s.table(g).tokens_per_block,
            ),
        ),
    ),
    TensorSpec(
        name="block_numbers",
        level=Level.TOKEN,
        shape=("T",),
        dtype="int32",
        definition="the physical block",
        producer="explain",
        consumers=("readers",),
        range=(0, None),
        per_group=True,
        attribute="explain",
        relations=(
            Relation(
                "block_numbers[t] = states.block_table.flat[block_table_indices[t]]",
                lambda s, x, g: s.table(g).table[s.token_rows, s.positions // s.table(g).tokens_per_block],
            ),
        ),
    ),
    TensorSpec(
        name="block_offsets",
        level=Level.TOKEN,
        shape=("T",),
        dtype="int32",
        definition="the place in the block (under context parallelism: in this rank's part of it)",
        producer="explain",
        consumers=("readers",),
        range=(0, "P-1"),
        per_group=True,
        attribute="explain",
        relations=(
            Relation(
                "block_offsets[t] = positions[t] mod S; (offset // (I·n))·I + offset mod I under context parallelism",
                lambda s, x, g: s.block_offsets(g),
            ),
        ),
    ),
)
