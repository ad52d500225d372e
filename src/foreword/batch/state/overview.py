"""The live rows for readers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

MAX_ROWS, MAX_BLOCKS = 32, 12  # rows of a printed table, then "…"


@dataclass(frozen=True, slots=True)
class LiveRow:
    """A request and its row: known, computed and placeholder tokens, its blocks per KV group."""

    req_id: str
    row: int
    prompt_len: int
    num_tokens: int
    num_computed_tokens: int
    num_placeholders: int
    blocks: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class LiveRows:
    """The result of `RequestStates.explain`: a copy, printable as a table."""

    rows: tuple[LiveRow, ...]
    max_num_reqs: int

    def __str__(self) -> str:
        head = ["request", "row", "prompt", "tokens", "computed", "in flight", "blocks"]
        cells = [head, *(_cells(row) for row in self.rows[:MAX_ROWS])]
        widths = np.max([[len(cell) for cell in line[:-1]] for line in cells], axis=0).tolist()
        lines = ["  ".join([*map(str.ljust, line[:-1], widths), line[-1]]) for line in cells]
        more = len(self.rows) - MAX_ROWS
        return "\n".join(
            [f"{len(self.rows)} of {self.max_num_reqs} rows hold a request", *lines, *([f"… {more} more"] * (more > 0))]
        )


def _cells(row: LiveRow) -> list[str]:
    numbers = row.row, row.prompt_len, row.num_tokens, row.num_computed_tokens, row.num_placeholders
    groups = (", ".join(map(str, blocks[:MAX_BLOCKS])) + ", …" * (len(blocks) > MAX_BLOCKS) for blocks in row.blocks)
    return [row.req_id, *map(str, numbers), "".join(f"[{blocks}]" for blocks in groups)]
