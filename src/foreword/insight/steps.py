"""A prepared step as JSON, for other programs."""

from __future__ import annotations

import json
from typing import Any

from foreword.batch import InputBatch, RequestStates

_ARRAYS = (
    "idx_mapping",
    "num_scheduled_tokens",
    "num_computed_tokens",
    "query_start_loc",
    "seq_lens",
    "req_indices",
    "positions",
    "input_ids",
    "logits_indices",
)
_DERIVED = ("token_indices", "block_table_indices", "block_numbers", "block_offsets")


def step_as_json(batch: InputBatch, states: RequestStates) -> str:
    """One line: the step's scalars and tensors by name; a tensor per KV group is a list of tensors."""
    step: dict[str, Any] = {
        "step": batch.step,
        "num_reqs": batch.num_reqs,
        "num_tokens": batch.num_tokens,
        "max_query_len": batch.max_query_len,
        "max_seq_len": batch.max_seq_len,
        "attention_state": batch.attention_state.name,
        "req_ids": batch.req_ids,
    }
    step |= {name: getattr(batch, name).tolist() for name in _ARRAYS}
    explained = [batch.explain(group=g) for g in range(len(states.block_tables))]
    step |= {name: [getattr(e, name).tolist() for e in explained] for name in _DERIVED}
    step["slot_mapping"] = [slots.tolist() for slots in batch.slot_mapping]
    step["block_table"] = [table.tolist() for table in batch.block_table]
    return json.dumps(step)
