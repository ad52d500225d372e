"""Recurrent layers: the block with the state that a step starts from, and the blocks for the states after it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foreword.arrays import I32
from foreword.batch.step.tensors import BatchTensors


@dataclass(frozen=True, slots=True, eq=False)
class StateIndices:
    """The blocks of recurrent states in a step, int32 [Bp], −1 on padding. read: the block with the state after the
    computed tokens, −1 where nothing is computed: start from the initial state. write: the block for the state after
    the tokens of this step that are known. drafts: [Bp, max_num_draft_tokens], the block for the state after each
    draft, −1 after the last.

    Where read and write differ, the state moves on to a new block and the old one keeps its content, for prefix hits.
    Read every state before any is written: the next step starts from the state after the drafts that were accepted.
    """

    read: I32
    write: I32
    drafts: I32


def state_indices(batch: BatchTensors, group: int = 0) -> StateIndices:
    """Return the state blocks of the step. In a recurrent group, with a = num_accepted_tokens and k drafts, they are
    entries of the request's row:

    read = table[b, a − 1] if something is computed else −1;  write = table[b, 0];  drafts[i] = table[b, 1 + i], i < k.

    `foreword.cache` keeps copies of states. In an ordinary group the states are at block borders, one each, and a step
    has no drafts. With c computed and n scheduled tokens and P tokens per block-table entry:

    read = table[b, (c − 1) // P] if c > 0 else −1;  write = table[b, (c + n − 1) // P].
    """
    B, Bp, states = batch.num_reqs, batch.num_reqs_padded, batch.states
    block_table, table, c = states.block_tables[group], batch.block_table[group], batch.num_computed_tokens
    rows, P = np.arange(B), block_table.tokens_per_block
    read, write = batch.optional("state_read", group)[:Bp], batch.optional("state_write", group)[:Bp]
    drafts = batch.optional("state_drafts", group)[:Bp]
    before, drafts[:] = np.maximum(c - 1, 0) // P, -1
    if block_table.group.recurrent:
        before = np.where(c > 0, states.num_accepted_tokens[batch.idx_mapping] - 1, 0)
        is_draft = np.arange(drafts.shape[1]) < batch.num_draft_tokens[:, None]
        drafts[:B] = np.where(is_draft, table[:B, 1:], -1)
    write[:B] = table[rows, (batch.seq_lens[:B] - 1) // P]
    read[:B] = np.where(c > 0, table[rows, before], -1)
    read[B:] = write[B:] = -1
    return StateIndices(read, write, drafts)
