"""One step for readers: the derived tensors, as attributes and as printed tables."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from foreword.arrays import I32, I64
from foreword.batch.features.masks import attention_mask
from foreword.batch.step.tensors import BatchTensors
from foreword.batch.values.attention import AttentionState
from foreword.names import counted

WIDTH = 178  # characters of a printed row, without which a row shows fewer of its values
LABEL, SHAPE = 22, 12  # characters before the values
MAX_ROWS = 16


@dataclass(frozen=True, slots=True, eq=False)
class Explanation:
    """The result of `InputBatch.explain`: copies, valid after the next step.

    token_indices        int64 [T]  row(b)·M + position: index of its id in the flattened token table
    block_table_indices  int64 [T]  row(b)·K + position // P: index of its block in the flattened block table
    block_numbers        int32 [T]  block_table.flat[block_table_indices]
    block_offsets        int32 [T]  position mod S (with context parallelism: the offset inside this rank's block)
    """

    group: int
    token_indices: I64
    block_table_indices: I64
    block_numbers: I32
    block_offsets: I32
    text: str

    @classmethod
    def of(cls, batch: BatchTensors, group: int = 0, token: int | None = None, width: int | None = None) -> Explanation:
        states = batch.states
        if not 0 <= group < len(states.block_tables):
            raise IndexError(f"group={group}: the model has {len(states.block_tables)} KV groups")
        T = batch.num_tokens
        sources = token_sources(batch, group)
        if token is None:
            text = _tables(batch, group, sources, width or WIDTH)
        elif 0 <= token < T:
            text = _sentence(batch, group, token, sources)
        else:
            raise IndexError(f"token={token}: this step has tokens 0 … {T - 1}")
        return cls(group, *sources, text)

    def __str__(self) -> str:
        return self.text


class TokenSources(NamedTuple):
    """The arrays of an `Explanation`."""

    token_indices: I64
    block_table_indices: I64
    block_numbers: I32
    block_offsets: I32


def token_sources(batch: BatchTensors, group: int) -> TokenSources:
    """Where each token of the step comes from and goes to in this KV group."""
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


class _Row(NamedTuple):
    """A printed row: its label, its formula or shape, and its values."""

    label: str
    shape: str
    values: Iterable[object]


def _rows(rows: Iterable[_Row], width: int) -> list[str]:
    """Return the lines of rows whose values stand below each other, as many of them as the width has room for."""
    table = [(row, list(map(str, row.values))) for row in rows]
    size = max([4, *(len(cell) for _, cells in table for cell in cells)])
    most = max((width - LABEL - SHAPE) // (size + 2), 2)
    lines = []
    for row, cells in table:
        if (left_out := len(cells) - most) > 0:
            mark = f"… {left_out + 2} more …"
            kept = max(most - 1 - -(-(len(mark) + 2) // (size + 2)), 0)
            mark = f"… {len(cells) - kept - 1} more …"
            cells = [*cells[:kept], mark, cells[-1]]
        lines.append(f"  {row.label:<{LABEL}}{row.shape:<{SHAPE}}{'  '.join(f'{cell:>{size}}' for cell in cells)}")
    return lines


def _tables(batch: BatchTensors, group: int, sources: TokenSources, width: int) -> str:
    states = batch.states
    table, B, T = states.block_tables[group], batch.num_reqs, batch.num_tokens
    S, M, K = table.group.block_size, states.max_model_len, table.width
    tokens = [
        _Row("token t", "", range(T)),
        _Row("req_indices", "b", batch.req_indices),
        _Row("positions", "p", batch.positions[:T]),
        _Row("token_indices", f"r·{M}+p", sources.token_indices),
        _Row("input_ids", "", batch.input_ids[:T]),
        _Row("block_table_indices", f"r·{K}+p/{table.tokens_per_block}", sources.block_table_indices),
        _Row("block_numbers", "n", sources.block_numbers),
        _Row("block_offsets", "o", sources.block_offsets),
        _Row("slot_mapping", f"n·{S}+o", batch.slot_mapping[group][:T]),
    ]
    requests = [
        _Row("req_ids", "", batch.req_ids),
        _Row("idx_mapping", "row r", batch.idx_mapping),
        _Row("num_scheduled_tokens", "", batch.num_scheduled_tokens),
        _Row("num_computed_tokens", "", batch.num_computed_tokens),
        _Row("query_start_loc", "[B+1]", batch.query_start_loc),
        _Row("seq_lens", "", batch.seq_lens),
        _Row("logits_indices", "[L]", batch.logits_indices),
    ]
    blocks, ends = [], []
    for b, row in list(enumerate(batch.idx_mapping))[:MAX_ROWS]:
        shown = max(int(table.num_blocks[row]) + 1, min(K, 8))  # then only nulls follow
        blocks.append(_Row(f"request {batch.req_ids[b]}", "", table.table[row, :shown]))
        ends.append("  …" if shown < K else "")
    return "\n".join(
        [
            f"step {batch.step}: {counted(B, 'request')}, {counted(T, 'token')}, {batch.attention_state.name}"
            + (f", KV group {group}" if len(states.block_tables) > 1 else ""),
            "",
            f"Tokens [T={T}]: where each one comes from and where its key and value go",
            *_rows(tokens, width),
            "",
            f"Requests [B={B}]",
            *_rows(requests, width),
            f"  max_query_len {batch.max_query_len}, max_seq_len {batch.max_seq_len}",
            "",
            f"Block table [B, K={K}] ({states.null_block}: no block; S={S} tokens per block)",
            *map("".join, zip(_rows(blocks, width - 3), ends, strict=True)),
            *([f"  … {B - MAX_ROWS} more"] if B > MAX_ROWS else []),
            "",
            *_mask(batch, group, width),
        ]
    )


def _mask(batch: BatchTensors, group: int, width: int) -> list[str]:
    if batch.attention_state is AttentionState.DECODE_ONLY:
        return ["Attention mask: none (each request's one token sees all of its keys)"]
    rows, keys = (
        (batch.max_query_len,) * 2
        if batch.attention_state is AttentionState.PREFILL_NO_CACHE
        else (batch.num_tokens, batch.max_seq_len)
    )
    shared = ", one for all requests" if batch.attention_state is AttentionState.PREFILL_NO_CACHE else ""
    line = f"Attention mask [{rows}, {keys}]{shared}"
    if rows > 2 * MAX_ROWS or keys > min(4 * MAX_ROWS, (width - 1) // 2):
        return [f"{line}: too large to be shown"]
    mask = attention_mask(batch, group)
    assert mask is not None
    return [f"{line} (x: visible)"] + ["  " + " ".join("x" if v else "." for v in row) for row in mask]


def _sentence(batch: BatchTensors, group: int, t: int, sources: TokenSources) -> str:
    states = batch.states
    b, p = int(batch.req_indices[t]), int(batch.positions[t])
    row, rid = int(batch.idx_mapping[b]), batch.req_ids[b]
    first, last = int(batch.query_start_loc[b]), int(batch.query_start_loc[b + 1]) - 1
    k, v = int(batch.num_draft_tokens[b]), int(states.num_tokens[row])
    if t > last - k:
        kind = f"draft {t - last + k - 1}"
    elif p < states.prompt_len[row]:
        kind = f"prompt token {p}"
    else:
        kind = f"output token {p - int(states.prompt_len[row])}"
    table, slot = states.block_tables[group], int(batch.slot_mapping[group][t])
    goes = (
        f"go to slot {slot}: entry {p // table.tokens_per_block} of its block-table row is block "
        f"{int(sources.block_numbers[t])}, offset {int(sources.block_offsets[t])}"
        if slot >= 0
        else "are not written: the group keeps one state per request"
        if table.group.recurrent
        else "are kept by another rank of the context-parallel group"
    )
    logits = np.flatnonzero(batch.logits_indices == t)
    projected = f" Its hidden state is logit row {int(logits[0])}." if len(logits) else ""
    chunk = f" (token {t - first} of the {last - first + 1} scheduled, {v} known)"
    return (
        f"Token {t} is {kind} of request {rid!r}, position {p}{chunk}; its id {int(batch.input_ids[t])} is read from "
        f"entry {int(sources.token_indices[t])} of the token table (row {row}); its key and value {goes}.{projected}"
    )
