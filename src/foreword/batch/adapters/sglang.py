"""SGLang's `ForwardBatch` with its field names and dtypes: the fields that its attention backends read in a step
without drafts.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np

from foreword.arrays import I32, I64, Ints
from foreword.batch.adapters.page_size_one import token_tables
from foreword.batch.features.bidirectional import refuse_ranges
from foreword.batch.step.tensors import BatchTensors, filled, refuse_spread, refuse_wide
from foreword.errors import PlanError


class ForwardMode(Enum):
    """The kinds of step. A request decodes where it computes a token that was not known at its admission."""

    EXTEND = 1  # no request decodes
    DECODE = 2  # every request decodes
    MIXED = 3  # some do
    IDLE = 4  # there is none


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ForwardBatch:
    """One KV group of a step, by the names of SGLang 0.5.23. For request b with c computed and n scheduled tokens:

        forward_mode          as `ForwardMode` says
        batch_size            B
        input_ids             int64 [T]  the step's tokens
        positions             int64 [T]  c … c + n − 1 of each request
        seq_lens              int64 [B]  c + n; seq_lens_cpu is the same array, seq_lens_sum its sum
        orig_seq_lens         int32 [B]  max(c + n, prompt_len), the length without chunks
        req_pool_indices      int64 [B]  b's row of req_to_token
        req_to_token          int32 [rows, width]  b's key at position p < c + n is in slot
                                         req_to_token[req_pool_indices[b], p]
        out_cache_loc         int64 [T]  the slot of each token: req_to_token[req_pool_indices[b], positions[t]]
        rids                  the ids of the requests
        extend_num_tokens     T                                                                  each of
        extend_seq_lens       int32 [B]  n                                                       these is
        extend_prefix_lens    int32 [B]  c                                                       None in
        extend_start_loc      int32 [B]  the first row of b's tokens                             a DECODE

    In a group with blocks of one token req_to_token is the states' own table and req_pool_indices their rows, as in
    SGLang: nothing is copied. In others it is gathered, [B, max_seq_len], with 0 past the end and below the window, and
    req_pool_indices is 0 … B − 1.
    """

    forward_mode: ForwardMode
    batch_size: int
    input_ids: I64
    positions: I64
    seq_lens: I64
    seq_lens_sum: int
    orig_seq_lens: I32
    req_pool_indices: I64
    req_to_token: I32
    out_cache_loc: I64
    rids: list[str]
    extend_num_tokens: int | None = None
    extend_seq_lens: I32 | None = None
    extend_prefix_lens: I32 | None = None
    extend_start_loc: I32 | None = None

    @property
    def seq_lens_cpu(self) -> I64:
        return self.seq_lens


def sglang_forward_batch(batch: BatchTensors, group: int = 0) -> ForwardBatch:
    """Return the step as SGLang's `ForwardBatch`, without padding, at stable addresses; valid as long as the batch is.

    Raise PlanError for a step with drafts, which SGLang describes in `spec_info`, or with bidirectional ranges, for a
    group that is spread over ranks, and for slots that exceed int32.
    """
    refuse_spread(batch, group, "SGLang's ForwardBatch")
    refuse_ranges(batch, "SGLang's ForwardBatch")
    if len(batch.draft_token_ids):
        b = int(np.argmax(batch.num_draft_tokens > 0))
        raise PlanError("SGLang's ForwardBatch has no place for drafts: they are its spec_info", step=batch.step,
                        request=batch.req_ids[b], tensor="num_draft_tokens", index=b, expected=0,
                        got=int(batch.num_draft_tokens[b]))  # fmt: skip
    B, T, rows = batch.num_reqs, batch.num_tokens, batch.idx_mapping
    table = batch.states.block_tables[group]
    indices: Ints
    if table.tokens_per_block == 1:
        indices, slots = rows, table.table.view()
        slots.flags.writeable = False
    else:
        wide = token_tables(batch, group).req_to_token
        refuse_wide(batch, "req_to_token", int(wide.max(initial=0)))
        indices, slots = np.arange(B), batch.optional("req_to_token_int32", group)[:B, : batch.max_seq_len]
        slots[:] = wide
    seq_lens: I64 = filled(batch, "seq_lens_int64", batch.seq_lens[:B])
    orig_seq_lens: I32 = filled(batch, "orig_seq_lens", np.maximum(batch.seq_lens[:B], batch.states.prompt_len[rows]))
    num_decodes = B - int(np.count_nonzero(batch.is_prefilling))
    mode = ForwardMode.MIXED if num_decodes else ForwardMode.EXTEND
    if num_decodes == B:
        mode = ForwardMode.DECODE if B else ForwardMode.IDLE
    is_extend = mode in (ForwardMode.EXTEND, ForwardMode.MIXED)
    return ForwardBatch(
        forward_mode=mode,
        batch_size=B,
        input_ids=filled(batch, "input_ids_int64", batch.input_ids[:T]),
        positions=batch.positions[:T],
        seq_lens=seq_lens,
        seq_lens_sum=int(seq_lens.sum()),
        orig_seq_lens=orig_seq_lens,
        req_pool_indices=filled(batch, "req_pool_indices", indices, group),
        req_to_token=slots,
        out_cache_loc=batch.slot_mapping[group][:T],
        rids=batch.req_ids,
        extend_num_tokens=T if is_extend else None,
        extend_seq_lens=batch.num_scheduled_tokens if is_extend else None,
        extend_prefix_lens=batch.num_computed_tokens if is_extend else None,
        extend_start_loc=batch.query_start_loc[:B] if is_extend else None,
    )
