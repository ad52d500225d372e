"""Explain a wrong entry in the words of the engine that is followed: batch indices, not rows."""

from __future__ import annotations

from foreword.batch import InputBatch
from foreword.shadow.comparison import Difference


def why(batch: InputBatch, name: str, group: int | None, difference: Difference) -> str:
    """Return a sentence about the entry of a tensor that differs; "" if the name of the tensor is sufficient."""
    b, index = difference.request, difference.index
    if b is None or not index:
        return ""
    if name in ("input_ids", "positions", "slot_mapping", "req_indices", "lora_tokens"):
        return _of_token(batch, name, group, b, index[0])
    if name == "block_table":
        return f"entry {index[-1]} of the blocks that the scheduler gave request {b} of the batch"
    computed, scheduled = int(batch.num_computed_tokens[b]), int(batch.num_scheduled_tokens[b])
    return f"request {b} of the batch: the scheduler said {computed} tokens computed, {scheduled} to compute"


def _of_token(batch: InputBatch, name: str, group: int | None, b: int, t: int) -> str:
    states, row = batch.states, int(batch.idx_mapping[b])
    position, known, prompt = int(batch.positions[t]), int(states.num_tokens[row]), int(states.prompt_len[row])
    if position >= known:
        kind = f"draft {position - known}"
    elif position < prompt:
        kind = f"prompt token {position}"
    else:
        kind = f"output token {position - prompt}"
    text = f"token {t} of the batch is {kind} of its request {b}, at position {position}"
    if name != "slot_mapping" or group is None:
        return text
    table = states.block_tables[group]
    entry, offset = divmod(position, table.tokens_per_block)
    return f"{text}: the scheduler gave it block {int(table.table[row, entry])} (entry {entry}), offset {offset}"
