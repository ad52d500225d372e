"""The step in one native call. The plan's checks run in the same pass; what they find is told by `plan.check`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from foreword.arrays import I32, I64, AnyArray
from foreword.batch.prepare import plan as _plan
from foreword.batch.prepare.backends import Scalars
from foreword.batch.prepare.buffers import ARRAYS
from foreword.batch.prepare.plan import Plan
from foreword.batch.state.sampling_columns import COLUMNS
from foreword.errors import ConfigError
from foreword.native import available
from foreword.native import native as _native

if TYPE_CHECKING:
    from foreword.batch.prepare.buffers import InputBuffers
    from foreword.batch.state.request_states import RequestStates


def run(
    states: RequestStates, buffers: InputBuffers, plan: Plan, padded: tuple[int | None, int | None], gather: bool
) -> Scalars:
    result = core_of(states, buffers).prepare(
        plan.rows,
        plan.num_scheduled,
        plan.num_drafts,
        plan.draft_ids,
        -1 if padded[0] is None else padded[0],
        -1 if padded[1] is None else padded[1],
        gather,
        plan.inert,
    )
    if result is None:
        _plan.check(states, buffers, plan, padded)
        raise AssertionError("the native core refused a plan that plan.check accepts")
    return Scalars._make(result)


def core_of(states: RequestStates, buffers: InputBuffers) -> Any:
    """The native core over these arrays, made when it is first asked for."""
    if buffers.native is None:
        buffers.native = _bind(states, buffers)
    return buffers.native


def _bind(states: RequestStates, buffers: InputBuffers) -> Any:
    if not available():
        raise ConfigError("backend='native': the native module is not built; run `pip install .`, or use 'numpy'")
    core = _native.StepCore(
        {name: getattr(states, name) for name in _STATE_ARRAYS},
        {name: getattr(buffers, name) for name in _BUFFER_ARRAYS},
        states.vocab_size,
        states.max_num_draft_tokens,
        states.context_parallel is not None,
    )
    for g, table in enumerate(states.block_tables):
        cp = table.context_parallel
        core.add_group(
            table.table,
            table.num_blocks,
            table.content_id,
            buffers.block_table[g],
            buffers.block_table_written[g],
            buffers.block_table_nulled[g],
            buffers.block_table_content[g],
            buffers.slot_mapping[g],
            table.tokens_per_block if table.group.recurrent else table.group.block_size,
            table.group.sliding_window or 0,
            *((cp.size, cp.rank, cp.interleave) if cp is not None else (1, 0, 1)),
            table.group.recurrent,
        )
    if states.context_parallel is not None:
        cp = states.context_parallel
        core.set_context_parallel(cp.size, cp.rank, cp.interleave)
    return core


def sampling_probe(needs: I32, stamp: I64) -> Any:
    """Tells which of the last batches asked about a batch is, or None where it is not built."""
    return None if not available() else _native.SamplingProbe(needs, stamp)


def vllm_front(states: RequestStates, arrays: dict[str, AnyArray]) -> Any:
    """The native core that reads vLLM-shaped scheduler output, or None where it is not built."""
    if states.core is None:
        return None
    return _native.VllmFront(states.core, arrays)


def rows_core(states: RequestStates) -> Any:
    """The native core for bulk changes of rows, or None where it is not built."""
    if not available():
        return None
    core = _native.RowsCore(
        {name: getattr(states, name) for name in _STATE_ARRAYS},
        {name: getattr(states.sampling, name) for name in (*COLUMNS, "stamp", "is_set")},
        *states.directory,
        states.vocab_size,
        states.max_num_draft_tokens,
    )
    for table in states.block_tables:
        core.add_table(table.table, table.num_blocks, table.content_id)
    return core


_PER_GROUP = ("block_table", "block_table_written", "slot_mapping")  # these come with their group
_BUFFER_ARRAYS = (*(name for name in ARRAYS if name not in _PER_GROUP), "samples", "written")
_STATE_ARRAYS = (
    "token_ids",
    "num_tokens",
    "num_computed_tokens",
    "num_placeholders",
    "prompt_len",
    "prefill_len",
    "last_sampled_token",
    "lora_id",
    "row_generation",
    "live",
)
