"""The native core for bulk changes of rows, over the arrays of one `RequestStates`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foreword.arrays import AnyArray
from foreword.batch.state.block_table import BlockTable
from foreword.batch.state.directory import Directory
from foreword.native import available, native


def rows_core(
    rows: dict[str, AnyArray],
    sampling: dict[str, Any],
    directory: Directory,
    tables: Sequence[BlockTable],
    vocab_size: int,
    max_num_draft_tokens: int,
) -> Any:
    """The core, or None where the native module is not built."""
    if not available():
        return None
    core = native.RowsCore(rows, sampling, *directory.native, vocab_size, max_num_draft_tokens)
    for table in tables:
        core.add_table(table.table, table.num_blocks, table.content_id, table.holds_null, table.null_block)
    return core
