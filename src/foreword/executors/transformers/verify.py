"""A comparison of paged steps with the model's own forward pass, at load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from foreword.arrays import F32
from foreword.batch import InputBuffers, NewRequest, RequestStates, prepare_inputs
from foreword.errors import ModelError
from foreword.executors.groups import batch_groups
from foreword.executors.transformers.executor import TransformersExecutor
from foreword.executors.transformers.interface import attention_of, forward
from foreword.executors.transformers.trace import Trace

BLOCK_SIZE = 4
PROMPTS = {"a": (3, 4, 5, 6, 7, 8, 9, 10, 11), "b": (12, 3, 9, 4, 7, 14)}
STEPS: Sequence[Mapping[str, int]] = ({"a": 4, "b": 1}, {"a": 1}, {"a": 3, "b": 4}, {"a": 1, "b": 1})
"""Chunks of two prompts, mixed with steps of one token. Each prompt has one token more, so that nothing is sampled."""


def first_position(model: PreTrainedModel, trace: Trace) -> int:
    """The position of a first token, with which chunked steps of two requests give the logits of the model's own
    forward pass. ModelError if there is none.
    """
    with torch.inference_mode(), attention_of(model, "eager"):
        ids = {name: torch.tensor([prompt], device=model.device) for name, prompt in PROMPTS.items()}
        expected = {name: forward(model, input_ids=tokens)[-1].float().cpu().numpy() for name, tokens in ids.items()}
    padding = getattr(model.config.get_text_config(decoder=True), "pad_token_id", None)
    distances = []
    for first in (0,) if padding is None else (0, padding + 1):
        computed = _last_logits(model, trace, first)
        distances.append(max(distance(computed[name], expected[name]) for name in PROMPTS))
        if distances[-1] < (1e-3 if model.dtype == torch.float32 else 0.2):
            return first
    raise ModelError(f"its logits differ from those of its own forward pass, by {min(distances):.2g} of their norm")


def distance(computed: F32, expected: F32) -> float:
    """‖computed − expected‖ / ‖expected − its mean‖."""
    return float(np.linalg.norm(computed - expected) / np.linalg.norm(expected - expected.mean()))


def _last_logits(model: PreTrainedModel, trace: Trace, first: int) -> dict[str, F32]:
    """The logits at the last token of each prompt."""
    groups = batch_groups(trace, BLOCK_SIZE)
    num_blocks = 1 + len(groups) * 6
    states = RequestStates(max_num_reqs=2, max_model_len=12, vocab_size=trace.vocab_size, kv_groups=groups)
    buffers = InputBuffers.for_states(states, max_num_batched_tokens=16)
    executor = TransformersExecutor(model, trace, num_blocks=num_blocks, block_size=BLOCK_SIZE, first_position=first)
    try:
        free = list(range(1, num_blocks))
        for name, prompt in PROMPTS.items():
            blocks = [[free.pop() for _ in range(3)] for _ in groups]
            states.add_request(NewRequest(name, prompt_token_ids=(*prompt, 1), block_ids=blocks))
        logits: dict[str, F32] = {}
        for step in STEPS:
            batch = prepare_inputs(states, step, buffers)
            computed = executor.compute(batch, batch.query_start_loc[1:].astype(np.int64) - 1)
            logits |= {name: row.copy() for name, row in zip(batch.req_ids, computed, strict=True)}
            states.commit(batch, {})
        return logits
    finally:
        executor.close()
