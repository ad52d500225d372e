"""The inputs that few steps have beside tokens, taken out of a batch for any executor."""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

import numpy as np

from foreword.arrays import I64, AnyArray
from foreword.batch import (
    InputBatch,
    LoraMapping,
    bidirectional_ranges,
    lora_mapping,
    mrope_positions,
    prefilling_with,
    prompt_embeds,
)
from foreword.errors import EngineError, PlanError
from foreword.executors.executor import Capability, Executor


class StepInputs(NamedTuple):
    """The prompt embeddings and the M-RoPE positions of a step of T tokens.

    embeds: int64 [N] tokens, ascending, and their vectors [N, hidden_size + extra_size] in place of embedding rows;
    None if there are none.
    mrope: int64 [mrope_dims, T], contiguous; None if every dimension is the position of the token.
    """

    embeds: tuple[I64, AnyArray] | None = None
    mrope: I64 | None = None

    @classmethod
    def of(cls, batch: InputBatch, executor: Executor, *, adds_rope_delta: bool = False) -> StepInputs:
        """Return the inputs of a batch; `TEXT` itself if it has none of them.

        adds_rope_delta: whether the executor itself adds ``rope_delta`` of each request to the positions; then mrope is
        None except in steps that compute prompts with positions of their own.

        Raise RequestError for embeddings or positions of other sizes than the model's.
        """
        states = batch.states
        extras, embeds, mrope = states.extras, None, None
        if extras.prompt_embeds:
            given = prompt_embeds(batch, executor.hidden_size + executor.extra_size)
            embeds = given if len(given[0]) else None
        if executor.mrope_dims and (
            prefilling_with(extras.mrope_positions, batch)
            or (not adds_rope_delta and states.rope_delta[batch.idx_mapping].any())
        ):
            mrope = np.ascontiguousarray(mrope_positions(batch, executor.mrope_dims)[:, : batch.num_tokens])
        return TEXT if embeds is None and mrope is None else cls(embeds, mrope)


def last_seen(batch: InputBatch, embeds: tuple[I64, AnyArray] | None = None) -> I64 | None:
    """Return the position of the last key that each token of a step sees, int64 [T]; None if no token of a
    bidirectional range is in the step, and ``embeds`` is None.

    embeds: tokens and their vectors, whose last value is how many positions after its own a vector sees. Equal values
    are those of one span or range, whose tokens see each other, as far as the window reaches: the step has all of them
    that are not computed. A model has either such vectors or ranges.
    """
    if embeds is None:
        ranges = bidirectional_ranges(batch)
        T = batch.num_tokens
        return None if ranges is None else np.maximum(batch.positions[:T], ranges[:T, 1] - 1)
    tokens, vectors = embeds
    seen = batch.positions[: batch.num_tokens].copy()
    seen[tokens] += vectors[:, -1].astype(np.int64)
    return seen


def check_whole(batch: InputBatch) -> None:
    """Raise PlanError for a request of which the step computes only a part, or that generates."""
    states = batch.states
    partial = batch.num_scheduled_tokens != states.prompt_len[batch.idx_mapping]
    if partial.any():
        b = int(partial.argmax())
        raise PlanError(
            "the model computes whole texts: schedule them with chunked_prefill=False",
            step=batch.step,
            request=batch.req_ids[b],
            tensor="num_scheduled_tokens",
            got=int(batch.num_scheduled_tokens[b]),
        )
    if len(states.extras.pooling_params) < batch.num_reqs:
        raise EngineError("a model that computes whole texts has no logits: every request needs pooling_params")


TEXT = StepInputs()
"""A step whose inputs are token ids and positions alone."""


def input_capabilities(hidden_size: int, mrope_dims: int, *, prefix_lm: bool = False) -> set[Capability]:
    """Return the capabilities of an executor with these sizes, see `Executor`, of a model that is a `prefix_lm`."""
    has = {
        Capability.PROMPT_EMBEDS: hidden_size > 0,
        Capability.MROPE: mrope_dims > 0,
        Capability.BIDIRECTIONAL: prefix_lm,
    }
    return {capability for capability, is_read in has.items() if is_read}


def step_adapters(batch: InputBatch, held: Container[int]) -> LoraMapping | None:
    """Return the LoRA adapters of a batch, None if no token has one. held: the numbers of the executor's adapters.

    Raise PlanError for a number that is not held.
    """
    if not batch.states.loras:
        return None
    mapping = lora_mapping(batch)
    for lora_id in mapping.active:
        if lora_id not in held:
            raise PlanError("no adapter has this number", step=batch.step, tensor="lora_id", got=lora_id)
    return mapping if mapping.active else None
