"""Recurrent layers: the block with the state that a step starts from, and the block for the state after it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foreword.arrays import I32
from foreword.batch.step.tensors import BatchTensors


@dataclass(frozen=True, slots=True, eq=False)
class StateIndices:
    """int32 [Bp] each, −1 on padding. read: the block with the state after the computed tokens, −1 where nothing is
    computed: start from the initial state. write: the block for the state after this step.

    Where read and write differ, the state moves on to a new block and the old one keeps its content, for prefix hits.
    """

    read: I32
    write: I32


def state_indices(batch: BatchTensors, group: int = 0) -> StateIndices:
    """The state blocks of the step. With c computed and n scheduled tokens and P tokens per block-table entry:

    read = table[b, (c − 1) // P] if c > 0 else −1;  write = table[b, (c + n − 1) // P].

    In a recurrent group P is max_model_len: one block, read and written, and `foreword.cache` keeps copies of it. In an
    ordinary group the states are at block borders, one each.
    """
    B, Bp, P = batch.num_reqs, batch.num_reqs_padded, batch.states.block_tables[group].tokens_per_block
    table, c = batch.block_table[group], batch.num_computed_tokens
    rows = np.arange(B)
    read, write = batch.optional("state_read", group)[:Bp], batch.optional("state_write", group)[:Bp]
    write[:B] = table[rows, (batch.seq_lens[:B] - 1) // P]
    read[:B] = np.where(c > 0, table[rows, np.maximum(c - 1, 0) // P], -1)
    read[B:] = write[B:] = -1
    return StateIndices(read, write)
