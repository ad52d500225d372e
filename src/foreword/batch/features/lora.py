"""LoRA adapters of a step: the adapter of every request, token and logit row. 0 means no adapter."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foreword.arrays import I32
from foreword.batch.step.tensors import BatchTensors


@dataclass(frozen=True, slots=True, eq=False)
class LoraMapping:
    """Adapters of one step. requests: int32 [B]; tokens: int32 [Tp], 0 on padding; logits: int32 [L];
    active: the adapters of this step, ascending, without 0. `RequestStates.loras` has their names and paths.
    """

    requests: I32
    tokens: I32
    logits: I32
    active: tuple[int, ...]


def lora_mapping(batch: BatchTensors) -> LoraMapping:
    """Return the adapter of each request, of each of its tokens, and of each of its logit rows."""
    lora_id, T = batch.states.lora_id, batch.num_tokens
    requests: I32 = batch.optional("lora_requests")[: batch.num_reqs]
    tokens: I32 = batch.optional("lora_tokens")[: batch.num_tokens_padded]
    logits: I32 = batch.optional("lora_logits")[: len(batch.logits_indices)]
    np.take(lora_id, batch.idx_mapping, out=requests)
    np.take(requests, batch.req_indices, out=tokens[:T])
    tokens[T:] = 0
    np.take(lora_id, batch.expanded_idx_mapping, out=logits)
    return LoraMapping(requests, tokens, logits, tuple(int(i) for i in np.unique(requests) if i))
