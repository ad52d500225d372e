"""Recurrent layers: which block holds the state a step starts from, and which takes the state it ends with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from foreword.arrays import I32

if TYPE_CHECKING:
    from foreword.batch.prepare.inputs import InputBatch


@dataclass(frozen=True, slots=True, eq=False)
class StateIndices:
    """Int32 [Bp] each, −1 on padding. read: the block with the state after the computed tokens, −1 where nothing is
    computed: start from the initial state. write: the block for the state after this step.

    Where read and write differ, the state moves on to a new block and the old one stays as it was, for prefix hits.
    """

    read: I32
    write: I32


def state_indices(batch: InputBatch, group: int = 0) -> StateIndices:
    """The state blocks of the step. With c computed and n scheduled tokens and P tokens a block-table entry:

    read = table[b, (c − 1) // P] if c > 0 else −1;  write = table[b, (c + n − 1) // P].

    In a recurrent group P is max_model_len: one block, read and written, and `foreword.cache` keeps copies of it. In an
    ordinary group the states stand at block borders, one each.
    """
    B, P = batch.num_reqs, batch.tokens_per_block(group)
    table, c = batch.block_table[group], batch.num_computed_tokens
    rows = np.arange(B)
    read, write = np.full((2, batch.num_reqs_padded), -1, np.int32)
    write[:B] = table[rows, (batch.seq_lens[:B] - 1) // P]
    read[:B] = np.where(c > 0, table[rows, np.maximum(c - 1, 0) // P], -1)
    return StateIndices(read, write)
