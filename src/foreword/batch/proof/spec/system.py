"""The tensors that live as long as the engine: one row per request, in `RequestStates`."""

from __future__ import annotations

import numpy as np

from foreword.arrays import AnyArray
from foreword.batch.proof.spec.step import Step
from foreword.batch.proof.spec.tensor import Level, Relation, TensorSpec, row_tensor
from foreword.batch.state.sampling_columns import Need


def _sampling(
    name: str,
    dtype: str,
    definition: str,
    range: tuple[int | float | str, int | float | str | None] | None,
    padding: int | float,
) -> TensorSpec:
    return TensorSpec(
        name=name,
        level=Level.SYSTEM,
        shape=("R",),
        dtype=dtype,
        definition=definition,
        producer="add_request",
        consumers=("sampler",),
        padding=padding,
        range=range,
        attribute=f"sampling.{name}",
    )


def _needs(step: Step, needs: AnyArray) -> AnyArray:
    """The flags that follow from columns, by their definition; flags that follow from parameters objects unchanged."""
    c = step.states.sampling
    derived = {
        Need.GREEDY: ~(c.temperature > 0),
        Need.RANDOM: c.temperature > 0,
        Need.TOP_P: c.top_p < 1,
        Need.TOP_K: c.top_k > 0,
        Need.MIN_P: c.min_p > 0,
        Need.PENALTIES: (c.presence_penalty != 0) | (c.frequency_penalty != 0) | (c.repetition_penalty != 1),
        Need.LOGPROBS: c.num_logprobs >= 0,
        Need.PROMPT_LOGPROBS: c.num_prompt_logprobs >= 0,
        Need.MIN_TOKENS: c.min_tokens > 0,
    }
    for flag, present in derived.items():
        needs = np.where(present, needs | int(flag), needs & ~int(flag))
    return needs


SYSTEM: tuple[TensorSpec, ...] = (
    row_tensor(
        name="live",
        definition="whether the row holds a request",
        producer="add_request, remove_request",
        consumers=("prepare_inputs",),
        relations=(Relation("live[row] = some request has this row", lambda s, x, g: s.live),),
    ),
    row_tensor(
        name="num_tokens",
        definition="known tokens: prompt and committed outputs",
        producer="add_request, commit",
        consumers=("prepare_inputs", "scheduler"),
        range=(1, "M"),
    ),
    TensorSpec(
        name="token_ids",
        level=Level.SYSTEM,
        shape=("R", "M"),
        dtype="int32",
        definition="every known token of a request: prompt, then committed outputs; drafts are staged past them",
        producer="add_request, commit",
        consumers=("prepare_inputs", "sampler"),
        relations=(
            Relation(
                "0 ≤ token_ids[row, j] ≤ V − 1 for j < num_tokens[row]",
                lambda s, x, g: np.where(
                    np.arange(x.shape[1]) < s.state("num_tokens")[:, None], np.clip(x, 0, s.V - 1), x
                ),
            ),
        ),
    ),
    TensorSpec(
        name="is_token_id",
        level=Level.SYSTEM,
        shape=("R", "M"),
        dtype="bool",
        definition="false where the position is a prompt embedding, whose token id is not read",
        producer="add_request",
        consumers=("embedding layer", "penalties"),
        padding=True,
        optional="prompt embeddings",
        relations=(
            Relation(
                "is_token_id[row, j] for j ≥ prompt_len[row]",
                lambda s, x, g: x | (s.live[:, None] & (np.arange(x.shape[1]) >= s.state("prompt_len")[:, None])),
            ),
        ),
    ),
    row_tensor(
        name="prefill_len",
        definition="what must be computed before sampling starts: prompt, and after a resume the outputs it brought",
        producer="add_request",
        consumers=("prepare_inputs",),
        range=(1, "M"),
        relations=(
            Relation(
                "prompt_len ≤ prefill_len ≤ num_tokens",
                lambda s, x, g: s.where_live(np.clip(x, s.state("prompt_len"), s.state("num_tokens")), x),
            ),
        ),
    ),
    row_tensor(
        name="prompt_len",
        definition="the user's prompt",
        producer="add_request",
        consumers=("prepare_inputs", "sampler"),
        range=(1, "M"),
        relations=(
            Relation(
                "1 ≤ prompt_len ≤ num_tokens",
                lambda s, x, g: s.where_live(np.clip(x, 1, s.state("num_tokens")), x),
            ),
        ),
    ),
    row_tensor(
        name="num_accepted_tokens",
        definition="tokens kept of the last committed step: accepted drafts + 1; 1 after admission and a prompt chunk",
        producer="add_request, commit",
        consumers=("recurrent layers with drafts",),
        range=(1, None),
    ),
    row_tensor(
        name="num_placeholders",
        definition="tokens after the known ones that a step in flight is about to sample",
        producer="advance, commit",
        consumers=("prepare_inputs",),
        range=(0, "M"),
    ),
    row_tensor(
        name="num_computed_tokens",
        definition="tokens whose keys and values are in the cache",
        producer="add_request, commit",
        consumers=("prepare_inputs", "scheduler"),
        range=(0, "M"),
        relations=(
            Relation(
                "0 ≤ num_computed_tokens ≤ num_tokens + num_placeholders",
                lambda s, x, g: s.where_live(np.clip(x, 0, s.state("num_tokens") + s.state("num_placeholders")), x),
            ),
        ),
    ),
    row_tensor(
        name="last_sampled_token",
        definition="the last output, −1 before there is one",
        producer="add_request, commit",
        consumers=("device-side decode",),
        range=(-1, "V-1"),
        relations=(
            Relation(
                "last_sampled_token = token_ids[row, num_tokens − 1] if num_tokens > prompt_len else −1",
                lambda s, x, g: s.where_live(s.last_sampled(), x),
            ),
        ),
    ),
    row_tensor(
        name="lora_id",
        definition="adapter, 0 for none",
        producer="add_request",
        consumers=("adapter layers",),
        range=(0, None),
        relations=(
            Relation(
                "lora_id[row] = the adapter that counts the request among its users",
                lambda s, x, g: s.where_live(s.adapters(), x),
            ),
        ),
    ),
    row_tensor(
        name="rope_delta",
        definition="what tokens after the prompt add to their rotary position (multi-dimensional positions)",
        producer="add_request",
        consumers=("rotary embedding",),
    ),
    row_tensor(
        name="encoder_len",
        definition="tokens of the encoder that the request attends to",
        producer="add_request",
        consumers=("cross attention",),
        range=(0, None),
    ),
    row_tensor(
        name="row_generation",
        definition="how often the row was freed: separates a late result from a current one",
        producer="add_request, remove_request",
        consumers=("commit",),
        range=(0, None),
    ),
    TensorSpec(
        name="block_table",
        level=Level.SYSTEM,
        shape=("R", "K"),
        dtype="int32",
        definition="logical block → physical block: entry k of a row holds positions k·P … k·P + P − 1; or null_block",
        producer="add_request, append_blocks",
        consumers=("prepare_inputs", "attention kernels that need no gathered copy"),
        per_group=True,
        attribute="block_tables.table",
        relations=(
            Relation(
                "blocks are min(null_block, 0) or more", lambda s, x, g: np.maximum(x, min(s.states.null_block, 0))
            ),
            Relation(
                "block_table[row, k] = null_block for k ≥ num_blocks[row]",
                lambda s, x, g: np.where(
                    np.arange(x.shape[1]) < s.table(g).num_blocks[:, None], x, s.states.null_block
                ),
            ),
        ),
    ),
    TensorSpec(
        name="num_blocks",
        level=Level.SYSTEM,
        shape=("R",),
        dtype="int32",
        definition="entries of the row that are the request's",
        producer="add_request, append_blocks",
        consumers=("prepare_inputs", "cache"),
        padding=0,
        per_group=True,
        range=(0, "K"),
        attribute="block_tables.num_blocks",
        relations=(
            Relation(
                "ceil(num_computed_tokens / P) ≤ num_blocks ≤ K",
                lambda s, x, g: s.where_live(
                    np.clip(x, -(-s.state("num_computed_tokens") // s.table(g).tokens_per_block), s.table(g).width), x
                ),
            ),
        ),
    ),
    _sampling("temperature", "float32", "0 is greedy", (0.0, 100.0), 0.0),
    _sampling(
        "top_p", "float32", "the smallest set of the likeliest tokens with this much probability", (0.0, 1.0), 1.0
    ),
    _sampling("top_k", "int32", "the likeliest tokens kept, 0 for all", (0, "V-1"), 0),
    _sampling("min_p", "float32", "tokens with at least this share of the largest probability", (0.0, 1.0), 0.0),
    _sampling("presence_penalty", "float32", "subtracted once from the logit of an output's token", (-2.0, 2.0), 0.0),
    _sampling("frequency_penalty", "float32", "subtracted for each time a token was output", (-2.0, 2.0), 0.0),
    _sampling("repetition_penalty", "float32", "divides positive, multiplies negative logits", (0.0, 100.0), 1.0),
    _sampling("seed", "int64", "of the request's own random numbers", None, 0),
    _sampling("min_tokens", "int32", "no end before this many outputs", (0, None), 0),
    _sampling("num_logprobs", "int32", "alternatives requested with each token, −1 for none", (-1, "V"), -1),
    _sampling("num_prompt_logprobs", "int32", "the same for the prompt's tokens", (-1, "V"), -1),
    TensorSpec(
        name="needs",
        level=Level.SYSTEM,
        shape=("R",),
        dtype="int32",
        definition="the `Need` flags of the row: what its sampling needs, so that a step skips what no row needs",
        producer="add_request",
        consumers=("sampling metadata",),
        padding=int(Need.GREEDY),
        attribute="sampling.needs",
        relations=(
            Relation(
                "each flag that follows from a column is set by that column",
                lambda s, x, g: s.where_live(_needs(s, x), x),
            ),
        ),
    ),
)
