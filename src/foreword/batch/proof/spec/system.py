"""The tensors that live as long as the engine: one row per request, in `RequestStates`."""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import Any

import numpy as np

from foreword.arrays import AnyArray
from foreword.batch.proof.spec.step import Step
from foreword.batch.proof.spec.tensor import Level, Relation, TensorSpec, row_tensor
from foreword.batch.state.sampling_columns import COLUMNS, FLAG_RULES
from foreword.batch.values.parameters import Need, Parameter
from foreword.batch.values.sampling_params import PARAMETERS
from foreword.integers import INT32_MAX


def _system(name: str, definition: str, *relations: Relation, **facts: Any) -> TensorSpec:
    return TensorSpec(name=name, level=Level.SYSTEM, definition=definition, relations=relations, **facts)


_STORED: dict[str, tuple[str | None, str]] = {
    "top_k": (None, "V-1"),
    "num_logprobs": (
        "the number of most likely tokens whose log-probabilities are returned with each output token, −1 for none",
        "V",
    ),
    "num_prompt_logprobs": (
        "the number of most likely tokens whose log-probabilities are returned with each prompt token, −1 for none",
        "V",
    ),
}
"""Columns whose value differs from the parameter's: column → definition (None: the parameter's), and the largest value.
"""


def _sampling(row: Parameter) -> TensorSpec:
    """Return the column of a sampling parameter. Its dtype, range and padding come from the table."""
    assert row.column is not None
    name = row.column.name
    dtype, neutral = COLUMNS[name]
    definition, most = _STORED.get(name, (None, None))
    low = row.least if row.above is None else row.above
    low = 0 if name == "top_k" else low  # −1, which means all as 0 does, is stored as 0
    limits: tuple[float, float | str | None] | None = None
    if low is not None and name != "seed":  # any int64
        limits = low, most or (None if row.most == INT32_MAX else row.most)
    return _system(
        name, definition or row.help.removesuffix("."), shape=("R",), dtype=np.dtype(dtype).name, padding=neutral,
        producer="add_request", consumers="sampler", range=limits, attribute=f"sampling.{name}",
    )  # fmt: skip


def _needs(step: Step, needs: AnyArray) -> AnyArray:
    """Return the flags that follow from columns, by `FLAG_RULES`, and unchanged those of parameters objects."""
    columns, derived = step.states.sampling, reduce(or_, (rule.flag for rule in FLAG_RULES))
    flags: AnyArray = columns.flags(lambda name: getattr(columns, name))
    return needs & ~derived | flags


# A row: name and definition, relations, then who makes and reads it.
# fmt: off
SYSTEM: tuple[TensorSpec, ...] = (
    row_tensor(
        "live", "whether the row holds a request",
        Relation("live[row] = some request has this row", lambda s, x, g: s.live),
        producer="add_request, remove_request", consumers="prepare_inputs",
    ),
    row_tensor(
        "num_tokens", "known tokens: prompt and committed outputs",
        producer="add_request, commit", consumers="prepare_inputs, scheduler", range=(1, "M"),
    ),
    _system(
        "token_ids", "all known tokens of a request: the prompt, then committed outputs. Drafts are written after "
        "them",
        Relation(
            "0 ≤ token_ids[row, j] ≤ V − 1 for j < num_tokens[row]",
            lambda s, x, g: np.where(np.arange(x.shape[1]) < s.state("num_tokens")[:, None], np.clip(x, 0, s.V - 1), x),
        ),
        shape=("R", "M"), dtype="int32", producer="add_request, commit", consumers="prepare_inputs, sampler",
    ),
    _system(
        "is_embedding", "true if the position holds a prompt embedding; its token id is then not read",
        Relation(
            "not is_embedding[row, j] for j ≥ prompt_len[row]",
            lambda s, x, g: x & ~(s.live[:, None] & (np.arange(x.shape[1]) >= s.state("prompt_len")[:, None])),
        ),
        shape=("R", "M"), dtype="bool", producer="add_request", consumers="embedding layer, penalties", padding=False,
        optional="prompt embeddings", attribute="extras.is_embedding",
    ),
    row_tensor(
        "prefill_len", "the number of tokens that must be computed before sampling starts: the prompt, and after a "
        "resume also the outputs that the request had",
        Relation(
            "prompt_len ≤ prefill_len ≤ num_tokens",
            lambda s, x, g: s.where_live(np.clip(x, s.state("prompt_len"), s.state("num_tokens")), x),
        ),
        producer="add_request", consumers="prepare_inputs", range=(1, "M"),
    ),
    row_tensor(
        "prompt_len", "the length of the user's prompt",
        Relation("1 ≤ prompt_len ≤ num_tokens", lambda s, x, g: s.where_live(np.clip(x, 1, s.state("num_tokens")), x)),
        producer="add_request", consumers="prepare_inputs, sampler", range=(1, "M"),
    ),
    row_tensor(
        "num_accepted_tokens", "the number of tokens kept from the last committed step: accepted drafts + 1. It is 1 "
        "after admission and after a chunk of the prompt",
        producer="add_request, commit", consumers="recurrent layers with drafts", range=(1, None),
    ),
    row_tensor(
        "num_placeholders", "the number of tokens after the known ones that a step in flight is about to sample",
        producer="advance, commit", consumers="prepare_inputs", range=(0, "M"),
    ),
    row_tensor(
        "num_computed_tokens", "the number of tokens whose keys and values are in the cache",
        Relation(
            "0 ≤ num_computed_tokens ≤ num_tokens + num_placeholders",
            lambda s, x, g: s.where_live(np.clip(x, 0, s.state("num_tokens") + s.state("num_placeholders")), x),
        ),
        producer="add_request, commit", consumers="prepare_inputs, scheduler", range=(0, "M"),
    ),
    row_tensor(
        "last_sampled_token", "the last output token; −1 if there is none yet",
        Relation(
            "last_sampled_token = token_ids[row, num_tokens − 1] if num_tokens > prompt_len else −1",
            lambda s, x, g: s.where_live(s.last_sampled(), x),
        ),
        producer="add_request, commit", consumers="device-side decode", range=(-1, "V-1"),
    ),
    row_tensor(
        "lora_id", "the number of the adapter, 0 for none",
        Relation(
            "lora_id[row] = the id of the adapter that the request uses",
            lambda s, x, g: s.where_live(s.adapters(), x),
        ),
        producer="add_request", consumers="adapter layers", range=(0, None),
    ),
    row_tensor(
        "rope_delta", "the number that tokens after the prompt add to their rotary position (multi-dimensional "
        "positions)",
        producer="add_request", consumers="rotary embedding",
    ),
    row_tensor(
        "encoder_len", "the number of encoder tokens that the request attends to",
        producer="add_request", consumers="cross attention", range=(0, None),
    ),
    row_tensor(
        "row_generation", "the number of times that the row was freed, which separates a late result from a current "
        "one",
        producer="add_request, remove_request", consumers="commit", range=(0, None),
    ),
    _system(
        "block_table", "logical block → physical block: entry k of a row holds positions k·P … k·P + P − 1; or "
        "null_block",
        Relation("blocks are min(null_block, 0) or more", lambda s, x, g: np.maximum(x, min(s.states.null_block, 0))),
        Relation(
            "block_table[row, k] = null_block for k ≥ num_blocks[row]",
            lambda s, x, g: np.where(np.arange(x.shape[1]) < s.table(g).num_blocks[:, None], x, s.states.null_block),
        ),
        shape=("R", "K"), dtype="int32", producer="add_request, append_blocks",
        consumers="prepare_inputs, attention kernels that need no gathered copy", per_group=True,
        attribute="block_tables.table",
    ),
    _system(
        "num_blocks", "the number of entries of the row that belong to the request",
        Relation(
            "ceil(num_computed_tokens / P) ≤ num_blocks ≤ K",
            lambda s, x, g: s.where_live(
                np.clip(x, -(-s.state("num_computed_tokens") // s.table(g).tokens_per_block), s.table(g).width), x
            ),
        ),
        shape=("R",), dtype="int32", producer="add_request, append_blocks", consumers="prepare_inputs, cache",
        padding=0, per_group=True, range=(0, "K"), attribute="block_tables.num_blocks",
    ),
    *(_sampling(row) for row in PARAMETERS if row.column is not None),
    _system(
        "needs", "the `Need` flags of the row, which say what its sampling needs, so that a step skips everything "
        "that no row needs",
        Relation(
            "each flag that follows from a column is set by that column",
            lambda s, x, g: s.where_live(_needs(s, x), x),
        ),
        shape=("R",), dtype="int32", producer="add_request", consumers="sampling metadata", padding=int(Need.GREEDY),
        attribute="sampling.needs",
    ),
)
