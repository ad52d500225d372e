"""Where a step's tensors live: allocated once, written every step, at addresses that never change."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from foreword.arrays import AnyArray
from foreword.batch.values.integers import is_int32
from foreword.errors import ConfigError

if TYPE_CHECKING:
    from foreword.batch.state.request_states import RequestStates

PAD_SLOT_ID = -1
NULL_BLOCK_ID = 0


class InputBuffers:
    """The buffers that `prepare_inputs` writes and an `InputBatch` views.

    Everything past a step's own entries holds the pad value at all times (ids, positions, lengths 0; slots −1; block
    entries 0), so nothing of a larger earlier batch can be read, and clearing costs what the earlier batch wrote.

    A batch is valid until the next `prepare_inputs` on its buffers. To keep two steps in flight use two of these
    (`foreword.batch.prepare.ring`).

    max_num_batched_tokens bounds T and Tp; the states' max_num_reqs bounds B and Bp.
    """

    __slots__ = (
        "block_table",
        "block_table_content",
        "block_table_nulled",
        "block_table_written",
        "bonus_logits_indices",
        "cu_num_draft_tokens",
        "cu_num_logits",
        "dcp_local_seq_lens",
        "draft_token_ids",
        "expanded_idx_mapping",
        "expanded_local_pos",
        "generation",
        "idx_mapping",
        "input_ids",
        "is_prefilling",
        "logits_indices",
        "max_num_batched_tokens",
        "max_num_reqs",
        "native",
        "num_computed_tokens",
        "num_draft_tokens",
        "num_placeholders",
        "num_scheduled_tokens",
        "positions",
        "query_start_loc",
        "req_indices",
        "row_generation",
        "samples",
        "seq_lens",
        "slot_mapping",
        "states",
        "target_logits_indices",
        "views",
        "written",
    )

    def __init__(self, states: RequestStates, *, max_num_batched_tokens: int) -> None:
        if not is_int32(max_num_batched_tokens, 1):
            raise ConfigError(f"max_num_batched_tokens={max_num_batched_tokens!r}: must be at least 1")
        reqs, tokens = states.max_num_reqs, max_num_batched_tokens
        drafts = states.max_num_draft_tokens
        logits = min(tokens, reqs * (1 + drafts))
        self.states = states
        self.max_num_reqs = reqs
        self.max_num_batched_tokens = tokens
        self.generation = 0

        self.idx_mapping = np.zeros(reqs, np.int32)
        self.num_scheduled_tokens = np.zeros(reqs, np.int32)
        self.num_draft_tokens = np.zeros(reqs, np.int32)
        self.num_computed_tokens = np.zeros(reqs, np.int32)
        self.num_placeholders = np.zeros(reqs, np.int32)
        self.is_prefilling = np.zeros(reqs, np.bool_)
        self.samples = np.zeros(reqs, np.bool_)  # of an advanced step: rows whose samples count
        self.row_generation = np.zeros(reqs, np.int64)
        self.query_start_loc = np.zeros(reqs + 1, np.int32)
        self.seq_lens = np.zeros(reqs, np.int32)
        self.dcp_local_seq_lens = np.zeros(reqs, np.int32)
        self.cu_num_logits = np.zeros(reqs + 1, np.int32)
        self.cu_num_draft_tokens = np.zeros(reqs + 1, np.int32)
        self.block_table = tuple(np.zeros((reqs, t.width), np.int32) for t in states.block_tables)
        # Of each gathered row: entries written, entries nulled below the window, and which content it copies (0: none).
        self.block_table_written = tuple(np.zeros(reqs, np.int32) for _ in states.block_tables)
        self.block_table_nulled = tuple(np.zeros(reqs, np.int32) for _ in states.block_tables)
        self.block_table_content = tuple(np.zeros(reqs, np.int64) for _ in states.block_tables)

        self.req_indices = np.zeros(tokens, np.int32)
        self.positions = np.zeros(tokens, np.int64)
        self.input_ids = np.zeros(tokens, np.int32)
        self.slot_mapping = tuple(np.full(tokens, PAD_SLOT_ID, np.int64) for _ in states.block_tables)

        self.logits_indices = np.zeros(logits, np.int64)
        self.expanded_idx_mapping = np.zeros(logits, np.int32)
        self.expanded_local_pos = np.zeros(logits, np.int32)
        self.target_logits_indices = np.zeros(reqs * drafts, np.int64)
        self.bonus_logits_indices = np.zeros(reqs, np.int64)
        self.draft_token_ids = np.zeros(reqs * drafts, np.int32)

        # What the next step has to clear: tokens and requests of the last step, requests of the last gathered one.
        self.written = np.zeros(3, np.int64)
        self.views = {name: _read_only(getattr(self, name)) for name in ARRAYS}
        self.native: Any = None

    @classmethod
    def for_states(cls, states: RequestStates, max_num_batched_tokens: int) -> InputBuffers:
        """Buffers that fit ``states``, for steps of up to ``max_num_batched_tokens`` tokens, padding included."""
        return cls(states, max_num_batched_tokens=max_num_batched_tokens)


# What a batch may view.
ARRAYS = (
    "idx_mapping",
    "num_scheduled_tokens",
    "num_draft_tokens",
    "num_computed_tokens",
    "num_placeholders",
    "is_prefilling",
    "row_generation",
    "query_start_loc",
    "seq_lens",
    "dcp_local_seq_lens",
    "cu_num_logits",
    "cu_num_draft_tokens",
    "block_table",
    "block_table_written",
    "req_indices",
    "positions",
    "input_ids",
    "slot_mapping",
    "logits_indices",
    "expanded_idx_mapping",
    "expanded_local_pos",
    "target_logits_indices",
    "bonus_logits_indices",
    "draft_token_ids",
)


def _read_only(value: AnyArray | tuple[AnyArray, ...]) -> Any:
    if isinstance(value, tuple):
        return tuple(_read_only(a) for a in value)
    view = value.view()
    view.flags.writeable = False
    return view
