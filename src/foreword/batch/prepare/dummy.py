"""A step that computes nothing, for capturing graphs, profiling and idle ranks."""

from __future__ import annotations

import numpy as np

from foreword.arrays import I32
from foreword.batch.prepare.backends import vectorized
from foreword.batch.prepare.input_batch import InputBatch
from foreword.batch.prepare.plan import padding
from foreword.batch.state.request_states import RequestStates
from foreword.batch.step.buffers import InputBuffers
from foreword.batch.step.layout import Scalars
from foreword.batch.values.attention import AttentionState
from foreword.batch.values.block_ops import BlockOps
from foreword.batch.values.plan import RaggedDrafts
from foreword.errors import CapacityError, PlanError


def make_dummy(
    states: RequestStates,
    buffers: InputBuffers,
    *,
    num_tokens: int,
    num_reqs: int,
    num_computed: int = 0,
    num_drafts: int = 0,
    context_block: int | None = None,
    pad_to: tuple[int | None, int | None] | None = None,
    gather_block_tables: bool = True,
) -> InputBatch:
    """Return a batch of ``num_reqs`` requests with ``num_tokens`` tokens, in the buffers that a real step would use.

    Request b has num_tokens // num_reqs tokens, the last num_tokens mod num_reqs requests one more, so none has more
    than ceil(num_tokens / num_reqs). Its tokens are 0, positions begin at ``num_computed``, and slots are −1: it reads
    no request's row and writes no key. It cannot be committed.

    num_computed: tokens of context per request, which attention reads from ``context_block`` (None: the null block,
    where block 0 is reserved); the states of a recurrent group are read from it and written to it. With a context and
    one token per request the step is a decode: DECODE_ONLY, is_decode True, uniform_decode_len 1.
    num_drafts: the number of each request's tokens that are drafts; the step then verifies them and has logits for
    each.
    pad_to: as for `prepare_inputs`.
    """
    if not 1 <= num_reqs <= num_tokens:
        raise PlanError("a dummy has at least one token per request", expected=f"1 … {num_tokens}", got=num_reqs)
    if num_reqs > states.max_num_reqs or num_tokens > buffers.max_num_batched_tokens:
        raise CapacityError(
            f"{num_reqs} requests, {num_tokens} tokens: the buffers hold {states.max_num_reqs} and "
            f"{buffers.max_num_batched_tokens}"
        )
    each, more = divmod(num_tokens, num_reqs)
    counts = np.full(num_reqs, each, np.int32)
    counts[num_reqs - more :] += 1
    room = states.max_model_len - int(counts[-1])
    if not 0 <= num_computed <= room:
        raise PlanError("a context that does not fit max_model_len", tensor="num_computed", expected=f"0 … {room}",
                        got=num_computed)  # fmt: skip
    if not 0 <= num_drafts <= min(states.max_num_draft_tokens, each - 1):
        raise PlanError("drafts need a token before them", tensor="num_drafts",
                        expected=f"0 … {min(states.max_num_draft_tokens, each - 1)}", got=num_drafts)  # fmt: skip
    if context_block is None:
        context_block = states.null_block
    if num_computed and context_block < 0:
        raise PlanError("a context needs a block that attention may read", tensor="context_block",
                        expected="the number of a block", got=context_block)  # fmt: skip
    drafts = None
    if num_drafts:
        drafts = RaggedDrafts(np.full(num_reqs, num_drafts, np.int32), np.full(num_reqs * num_drafts, -1, np.int32))
    rows, cancelled = np.arange(num_reqs, dtype=np.int32), np.ones(num_reqs, np.bool_)
    scalars = vectorized.run(states, buffers, (rows, counts, drafts, cancelled), padding(pad_to), gather_block_tables)
    if num_computed:
        scalars = _add_context(states, scalars, buffers, counts, num_computed, context_block, gather_block_tables)
    req_ids = [f"dummy {b}" for b in range(num_reqs)]
    batch = InputBatch(states, buffers, scalars, req_ids, gather_block_tables, BlockOps.NONE, vectorized.run)
    batch._close()
    return batch


def _add_context(
    states: RequestStates,
    scalars: Scalars,
    buffers: InputBuffers,
    counts: I32,
    num_computed: int,
    block: int,
    gather: bool,
) -> Scalars:
    """Give every request a context of ``num_computed`` tokens, which are all in one block."""
    B, T = len(counts), int(counts.sum())
    buffers["num_computed_tokens"][:B] = num_computed
    buffers["positions"][:T] += num_computed
    buffers["seq_lens"][:B] += num_computed
    for g, table in enumerate(states.block_tables if gather else ()):
        held = -(-(num_computed + counts) // table.tokens_per_block)
        width = int(held.max())
        buffers["block_table"][g][:B, :width][np.arange(width) < held[:, None]] = block
        buffers["num_blocks"][g][:B] = held
    if states.context_parallel is not None:
        buffers["dcp_local_seq_lens"][:B] = vectorized.local_seq_lens(buffers["seq_lens"][:B], states.context_parallel)
    state = AttentionState.CHUNKED_PREFILL
    if scalars.num_draft_tokens:
        state = AttentionState.SPEC_DECODING
    elif scalars.max_query_len == 1:
        state = AttentionState.DECODE_ONLY
    longest = num_computed + scalars.max_query_len
    scalars = scalars._replace(max_seq_len=longest, attention_state=int(state))
    buffers.scalars[:] = scalars
    return scalars
