"""The tensors that live as long as the engine: one row per request, in `RequestStates`."""

from __future__ import annotations

from typing import Any

import numpy as np

from foreword.arrays import AnyArray
from foreword.batch.proof.spec.step import Step
from foreword.batch.proof.spec.tensor import Level, Relation, TensorSpec, row_tensor
from foreword.batch.state.sampling_columns import COLUMNS, Need


def _system(name: str, definition: str, *relations: Relation, **facts: Any) -> TensorSpec:
    return TensorSpec(name=name, level=Level.SYSTEM, definition=definition, relations=relations, **facts)


def _sampling(
    name: str, definition: str, *relations: Relation, range: tuple[float | str, float | str | None] | None = None
) -> TensorSpec:
    """A column of `SamplingColumns`: dtype and padding are those of `COLUMNS`."""
    dtype, default = COLUMNS[name]
    return _system(
        name, definition, *relations, shape=("R",), dtype=dtype.__name__, producer="add_request", consumers="sampler",
        padding=dtype(default).item(), range=range, attribute=f"sampling.{name}",
    )  # fmt: skip


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
        Need.TYPICAL_P: c.typical_p < 1,
        Need.TOP_N_SIGMA: c.top_n_sigma > 0,
        Need.XTC: c.xtc_probability > 0,
        Need.DRY: c.dry_multiplier > 0,
        Need.LOGPROBS: c.num_logprobs >= 0,
        Need.PROMPT_LOGPROBS: c.num_prompt_logprobs >= 0,
        Need.MIN_TOKENS: c.min_tokens > 0,
    }
    for flag, present in derived.items():
        needs = np.where(present, needs | int(flag), needs & ~int(flag))
    return needs


SYSTEM: tuple[TensorSpec, ...] = (
    row_tensor(
        "live",
        "whether the row holds a request",
        Relation("live[row] = some request has this row", lambda s, x, g: s.live),
        producer="add_request, remove_request",
        consumers="prepare_inputs",
    ),
    row_tensor(
        "num_tokens",
        "known tokens: prompt and committed outputs",
        producer="add_request, commit",
        consumers="prepare_inputs, scheduler",
        range=(1, "M"),
    ),
    _system(
        "token_ids",
        "every known token of a request: prompt, then committed outputs; drafts are staged past them",
        Relation(
            "0 ≤ token_ids[row, j] ≤ V − 1 for j < num_tokens[row]",
            lambda s, x, g: np.where(np.arange(x.shape[1]) < s.state("num_tokens")[:, None], np.clip(x, 0, s.V - 1), x),
        ),
        shape=("R", "M"),
        dtype="int32",
        producer="add_request, commit",
        consumers="prepare_inputs, sampler",
    ),
    _system(
        "is_token_id",
        "false where the position is a prompt embedding, whose token id is not read",
        Relation(
            "is_token_id[row, j] for j ≥ prompt_len[row]",
            lambda s, x, g: x | (s.live[:, None] & (np.arange(x.shape[1]) >= s.state("prompt_len")[:, None])),
        ),
        shape=("R", "M"),
        dtype="bool",
        producer="add_request",
        consumers="embedding layer, penalties",
        padding=True,
        optional="prompt embeddings",
        attribute="extras.is_token_id",
    ),
    row_tensor(
        "prefill_len",
        "what must be computed before sampling starts: prompt, and after a resume the outputs it brought",
        Relation(
            "prompt_len ≤ prefill_len ≤ num_tokens",
            lambda s, x, g: s.where_live(np.clip(x, s.state("prompt_len"), s.state("num_tokens")), x),
        ),
        producer="add_request",
        consumers="prepare_inputs",
        range=(1, "M"),
    ),
    row_tensor(
        "prompt_len",
        "the user's prompt",
        Relation(
            "1 ≤ prompt_len ≤ num_tokens",
            lambda s, x, g: s.where_live(np.clip(x, 1, s.state("num_tokens")), x),
        ),
        producer="add_request",
        consumers="prepare_inputs, sampler",
        range=(1, "M"),
    ),
    row_tensor(
        "num_accepted_tokens",
        "tokens kept of the last committed step: accepted drafts + 1; 1 after admission and a prompt chunk",
        producer="add_request, commit",
        consumers="recurrent layers with drafts",
        range=(1, None),
    ),
    row_tensor(
        "num_placeholders",
        "tokens after the known ones that a step in flight is about to sample",
        producer="advance, commit",
        consumers="prepare_inputs",
        range=(0, "M"),
    ),
    row_tensor(
        "num_computed_tokens",
        "tokens whose keys and values are in the cache",
        Relation(
            "0 ≤ num_computed_tokens ≤ num_tokens + num_placeholders",
            lambda s, x, g: s.where_live(np.clip(x, 0, s.state("num_tokens") + s.state("num_placeholders")), x),
        ),
        producer="add_request, commit",
        consumers="prepare_inputs, scheduler",
        range=(0, "M"),
    ),
    row_tensor(
        "last_sampled_token",
        "the last output, −1 before there is one",
        Relation(
            "last_sampled_token = token_ids[row, num_tokens − 1] if num_tokens > prompt_len else −1",
            lambda s, x, g: s.where_live(s.last_sampled(), x),
        ),
        producer="add_request, commit",
        consumers="device-side decode",
        range=(-1, "V-1"),
    ),
    row_tensor(
        "lora_id",
        "adapter, 0 for none",
        Relation(
            "lora_id[row] = the adapter that counts the request among its users",
            lambda s, x, g: s.where_live(s.adapters(), x),
        ),
        producer="add_request",
        consumers="adapter layers",
        range=(0, None),
    ),
    row_tensor(
        "rope_delta",
        "what tokens after the prompt add to their rotary position (multi-dimensional positions)",
        producer="add_request",
        consumers="rotary embedding",
    ),
    row_tensor(
        "encoder_len",
        "tokens of the encoder that the request attends to",
        producer="add_request",
        consumers="cross attention",
        range=(0, None),
    ),
    row_tensor(
        "row_generation",
        "how often the row was freed: separates a late result from a current one",
        producer="add_request, remove_request",
        consumers="commit",
        range=(0, None),
    ),
    _system(
        "block_table",
        "logical block → physical block: entry k of a row holds positions k·P … k·P + P − 1; or null_block",
        Relation("blocks are min(null_block, 0) or more", lambda s, x, g: np.maximum(x, min(s.states.null_block, 0))),
        Relation(
            "block_table[row, k] = null_block for k ≥ num_blocks[row]",
            lambda s, x, g: np.where(np.arange(x.shape[1]) < s.table(g).num_blocks[:, None], x, s.states.null_block),
        ),
        shape=("R", "K"),
        dtype="int32",
        producer="add_request, append_blocks",
        consumers="prepare_inputs, attention kernels that need no gathered copy",
        per_group=True,
        attribute="block_tables.table",
    ),
    _system(
        "num_blocks",
        "entries of the row that are the request's",
        Relation(
            "ceil(num_computed_tokens / P) ≤ num_blocks ≤ K",
            lambda s, x, g: s.where_live(
                np.clip(x, -(-s.state("num_computed_tokens") // s.table(g).tokens_per_block), s.table(g).width), x
            ),
        ),
        shape=("R",),
        dtype="int32",
        producer="add_request, append_blocks",
        consumers="prepare_inputs, cache",
        padding=0,
        per_group=True,
        range=(0, "K"),
        attribute="block_tables.num_blocks",
    ),
    _sampling("temperature", "0 is greedy", range=(0.0, 100.0)),
    _sampling("top_p", "the smallest set of the likeliest tokens with this much probability", range=(0.0, 1.0)),
    _sampling("top_k", "the likeliest tokens kept, 0 for all", range=(0, "V-1")),
    _sampling("min_p", "tokens with at least this share of the largest probability", range=(0.0, 1.0)),
    _sampling("presence_penalty", "subtracted once from the logit of an output's token", range=(-2.0, 2.0)),
    _sampling("frequency_penalty", "subtracted for each time a token was output", range=(-2.0, 2.0)),
    _sampling("repetition_penalty", "divides positive, multiplies negative logits", range=(0.0, 100.0)),
    _sampling("typical_p", "the smallest set of the most typical tokens with this much probability", range=(0.0, 1.0)),
    _sampling("top_n_sigma", "standard deviations of the logits below the largest, 0 for all", range=(-1.0, 1000.0)),
    _sampling("xtc_probability", "how often the likeliest tokens are dropped", range=(0.0, 1.0)),
    _sampling("xtc_threshold", "the probability of tokens that may be dropped", range=(0.0, 1.0)),
    _sampling("dry_multiplier", "the penalty of the shortest repetition, 0 for none", range=(0.0, 1000.0)),
    _sampling("dry_base", "the factor of the penalty for each further token", range=(1.0, 1000.0)),
    _sampling("dry_allowed_length", "the shortest repetition that is penalized", range=(1, None)),
    _sampling("dry_range", "the latest tokens that are searched, −1 for all", range=(-1, None)),
    _sampling("seed", "of the request's own random numbers"),
    _sampling("min_tokens", "no end before this many outputs", range=(0, None)),
    _sampling("num_logprobs", "alternatives requested with each token, −1 for none", range=(-1, "V")),
    _sampling("num_prompt_logprobs", "the same for the prompt's tokens", range=(-1, "V")),
    _system(
        "needs",
        "the `Need` flags of the row: what its sampling needs, so that a step skips what no row needs",
        Relation(
            "each flag that follows from a column is set by that column",
            lambda s, x, g: s.where_live(_needs(s, x), x),
        ),
        shape=("R",),
        dtype="int32",
        producer="add_request",
        consumers="sampling metadata",
        padding=int(Need.GREEDY),
        attribute="sampling.needs",
    ),
)
