"""The tables of one step as text, in lines of a given width."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple
from unicodedata import combining, east_asian_width

import numpy as np

from foreword.arrays import I32, I64, AnyArray
from foreword.batch.features.bidirectional import bidirectional_ranges
from foreword.batch.features.masks import attention_mask
from foreword.batch.step.tensors import BatchTensors
from foreword.batch.values.attention import AttentionState
from foreword.names import counted

WIDTH = 178  # characters of a printed row, without which a row shows fewer of its values
LABEL, SHAPE = 22, 12  # characters before the values
MAX_ROWS = 16
MAX_TEXTS, SHORT = 256, 5  # tokens of a request whose texts are shown; characters of one in a column

TextOf = Callable[[int], str]
"""The text of a token id."""


class TokenSources(NamedTuple):
    """The source and destination of each token of a step: the arrays of an `Explanation`."""

    token_indices: I64
    block_table_indices: I64
    block_numbers: I32
    block_offsets: I32


class _Row(NamedTuple):
    """A printed row: its label, its formula or shape, and its values."""

    label: str
    shape: str
    values: Sequence[object] | AnyArray


def columns_of(text: str) -> int:
    """Return the columns of a terminal that a text takes: two for each wide character, such as those of Chinese."""
    return sum(0 if combining(c) else 2 if east_asian_width(c) in "WF" else 1 for c in text)


def _size(rows: Iterable[_Row]) -> int:
    """Return the columns of the terminal that the widest value of these rows takes, at least 4."""
    return max([4, *(columns_of(str(value)) for row in rows for value in row.values)])


def _rows(rows: Iterable[_Row], width: int, starts: Sequence[int] = ()) -> list[str]:
    """Return the lines of rows whose values stand below each other, as many of them as the width has room for.

    starts: the columns at which the parts of the rows begin. Where not all columns fit, the first and the last ones of
    each part are shown, with "…" between them, if at least these fit.
    """
    table = [(row, list(map(str, row.values))) for row in rows]
    size = _size(row for row, _ in table)
    most = max((width - LABEL - SHAPE) // (size + 2), 2)
    lines = []
    for row, cells in table:
        kept = _ends(starts, len(cells), most) if starts and len(cells) > most else None
        if kept is not None:
            cells = [text for i, j in pairwise([-1, *kept]) for text in (["…"] * (j > i + 1) + [cells[j]])]
        elif (left_out := len(cells) - most) > 0:
            mark = f"… {left_out + 2} more …"
            first = max(most - 1 - -(-(len(mark) + 2) // (size + 2)), 0)
            mark = f"… {len(cells) - first - 1} more …"
            cells = [*cells[:first], mark, cells[-1]]
        padded = "  ".join(" " * (size - columns_of(cell)) + cell for cell in cells)
        lines.append(f"  {row.label:<{LABEL}}{row.shape:<{SHAPE}}{padded}")
    return lines


def _ends(starts: Sequence[int], count: int, most: int) -> list[int] | None:
    """Return columns to show, with at least the first and the last one of each part. None if these do not fit.

    Each gap between two columns takes the room of one.
    """
    parts = list(pairwise([*starts, count]))
    sizes = [min(end - start, 3) for start, end in parts]  # first, gap or second, last
    if (room := most - sum(sizes)) < 0:
        return None
    for i, (start, end) in enumerate(parts):
        more = min(end - start - sizes[i], room)
        sizes[i], room = sizes[i] + more, room - more
    kept: list[int] = []
    for (start, end), size in zip(parts, sizes, strict=True):
        kept += range(start, end) if size == end - start else [*range(start, start + size - 2), end - 1]
    return kept


class Tables(NamedTuple):
    """The text of a step's tables, and the names of the tensors in it."""

    text: str
    names: tuple[str, ...]


def tables_of(
    batch: BatchTensors, group: int, sources: TokenSources, width: int | None, text_of: TextOf | None
) -> Tables:
    """Return the tables of a step for a KV group. text_of: adds a row with the text of each token."""
    width = width or WIDTH
    states = batch.states
    table, B, T = states.block_tables[group], batch.num_reqs, batch.num_tokens
    S, M, K = table.group.block_size, states.max_model_len, table.width
    texts = [] if text_of is None else list(map(text_of, batch.input_ids[:T].tolist()))
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
    are_shown = T * (2 + max(_size(tokens), *map(columns_of, texts), 0)) <= width - LABEL - SHAPE
    if texts:
        tokens.insert(1, _Row("text", "", texts if are_shown else [_cut(text) for text in texts]))
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
    lines = [
        f"step {batch.step}: {counted(B, 'request')}, {counted(T, 'token')}, {batch.attention_state.name}"
        + (f", KV group {group}" if len(states.block_tables) > 1 else ""),
        "",
        f"Tokens [T={T}]: where each one comes from and where its key and value go",
        *_rows(tokens, width, batch.query_start_loc[:B].tolist()),
        *([] if are_shown else _texts(batch, texts, width)),
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
    names = (*(row.label for row in (*requests, *tokens)), "max_query_len", "max_seq_len", "block_table")
    return Tables("\n".join(lines), names)


def _cut(text: str) -> str:
    return text if len(text) <= SHORT else text[: SHORT - 1] + "…"


def _texts(batch: BatchTensors, texts: list[str], width: int) -> Iterator[str]:
    """Yield the texts of all tokens, request by request, where the columns have no room for them."""
    for b, (start, end) in enumerate(pairwise(batch.query_start_loc[: batch.num_reqs + 1].tolist())):
        if b == MAX_ROWS:
            return
        shown = "|".join(texts[start : min(end, start + MAX_TEXTS)]) + ("|…" if end - start > MAX_TEXTS else "")
        label = f"  text of request {batch.req_ids[b]}"[: LABEL + 1]
        for at in range(0, len(shown), room := max(width - LABEL - 2, 8)):
            yield (" " * (LABEL + 2) if at else f"{label:<{LABEL + 2}}") + shown[at : at + room]


def _mask(batch: BatchTensors, group: int, width: int) -> list[str]:
    if batch.attention_state is AttentionState.DECODE_ONLY:
        return ["Attention mask: none (each request's one token sees all of its keys)"]
    is_shared = batch.attention_state is AttentionState.PREFILL_NO_CACHE and bidirectional_ranges(batch) is None
    rows, keys = (batch.max_query_len,) * 2 if is_shared else (batch.num_tokens, batch.max_seq_len)
    shared = ", one for all requests" if is_shared else ""
    line = f"Attention mask [{rows}, {keys}]{shared}"
    if rows > 2 * MAX_ROWS or keys > min(4 * MAX_ROWS, (width - 1) // 2):
        return [f"{line}: too large to be shown"]
    mask = attention_mask(batch, group)
    assert mask is not None
    return [f"{line} (x: visible)"] + ["  " + " ".join("x" if v else "." for v in row) for row in mask]


def sentence_of(batch: BatchTensors, group: int, t: int, sources: TokenSources, text_of: TextOf | None) -> str:
    """Return where one token of a step comes from and where it goes, as sentences."""
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
    token_id = int(batch.input_ids[t])
    text = "" if text_of is None else f" ({text_of(token_id)})"
    return (
        f"Token {t} is {kind} of request {rid!r}, position {p}{chunk}; its id {token_id}{text} is read from "
        f"entry {int(sources.token_indices[t])} of the token table (row {row}); its key and value {goes}.{projected}"
    )
