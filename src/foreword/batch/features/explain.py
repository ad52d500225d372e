"""Explain one step: the derived tensors, as attributes and as printed tables."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foreword.arrays import I32, I64
from foreword.batch.features.tables import Tables, TextOf, TokenSources, sentence_of, tables_of
from foreword.batch.step.tensors import BatchTensors


@dataclass(frozen=True, slots=True, eq=False)
class Explanation:
    """The result of `InputBatch.explain`: copies, valid after the next step.

    token_indices        int64 [T]  row(b)·M + position: index of its id in the flattened token table
    block_table_indices  int64 [T]  row(b)·K + position // P: index of its block in the flattened block table
    block_numbers        int32 [T]  block_table.flat[block_table_indices]
    block_offsets        int32 [T]  position mod S (with context parallelism: the offset inside this rank's block)

    names: the rows and scalars that the text shows; most are tensors of the specification
    (`foreword.batch.proof.spec`).
    """

    group: int
    token_indices: I64
    block_table_indices: I64
    block_numbers: I32
    block_offsets: I32
    text: str
    names: tuple[str, ...]

    @classmethod
    def of(
        cls,
        batch: BatchTensors,
        group: int = 0,
        token: int | None = None,
        width: int | None = None,
        text_of: TextOf | None = None,
    ) -> Explanation:
        states = batch.states
        if not 0 <= group < len(states.block_tables):
            raise IndexError(f"group={group}: the model has {len(states.block_tables)} KV groups")
        T = batch.num_tokens
        sources = token_sources(batch, group)
        if token is None:
            shown = tables_of(batch, group, sources, width, text_of)
        elif 0 <= token < T:
            shown = Tables(sentence_of(batch, group, token, sources, text_of), ())
        else:
            raise IndexError(f"token={token}: this step has tokens 0 … {T - 1}")
        return cls(group, *sources, *shown)

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        from foreword.markup import preformatted  # imported here because few programs are notebooks

        return preformatted(self.text)


def token_sources(batch: BatchTensors, group: int) -> TokenSources:
    """Return where each token of the step comes from and goes to in this KV group."""
    states = batch.states
    table = states.block_tables[group]
    positions, b = batch.positions[: batch.num_tokens], batch.req_indices
    rows = batch.idx_mapping[b].astype(np.int64)
    entries, offsets = np.divmod(positions, table.tokens_per_block)
    if (cp := table.context_parallel) is not None:
        offsets = offsets // (cp.interleave * cp.size) * cp.interleave + offsets % cp.interleave
    return TokenSources(
        token_indices=rows * states.max_model_len + positions,
        block_table_indices=rows * table.width + entries,
        block_numbers=table.table[rows, entries],
        block_offsets=offsets.astype(np.int32),
    )
