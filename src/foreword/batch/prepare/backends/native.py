"""Prepare the step in one native call, checks included. `plan.check` names the rule that a refused plan breaks."""

from __future__ import annotations

from foreword.batch.prepare.plan import Padding, check
from foreword.batch.state.request_states import RequestStates
from foreword.batch.step.buffers import InputBuffers
from foreword.batch.step.layout import Scalars
from foreword.batch.values.plan import Plan, RaggedDrafts, ragged
from foreword.errors import ConfigError, PlanError
from foreword.native import available, native


def run(states: RequestStates, buffers: InputBuffers, plan: Plan, pad: Padding, gather: bool) -> Scalars:
    """Prepare a step in one call of native code."""
    core = buffers.core
    if core is None:
        core = buffers.core = _bind(states, buffers)
    rows, num_scheduled, drafts, cancelled = plan
    scalars: Scalars | None
    buffers.generation += 1
    if cancelled is None and type(drafts) is not RaggedDrafts:
        scalars = core.prepare(rows, num_scheduled, drafts, pad[0], pad[1], gather)
    else:
        scalars = core.prepare_ragged(rows, num_scheduled, *ragged(plan), pad[0], pad[1], gather, cancelled)
    if scalars is not None:
        return scalars
    buffers.generation -= 1  # nothing was written
    accepted = check(states, buffers, plan, pad)  # raises, unless the core refused the arrays' types
    if all(mine is given for mine, given in zip(accepted, plan, strict=True)):
        raise PlanError("the native backend refused a plan that breaks no rule", step=states._step + 1)
    return run(states, buffers, accepted, pad, gather)


def _bind(states: RequestStates, buffers: InputBuffers) -> native.StepCore:
    if not available():
        raise ConfigError("backend='native': the native module is not built; run `pip install .`, or use 'numpy'")
    arrays = buffers.arrays
    single = {name: array for name, array in arrays.items() if not isinstance(array, tuple)}
    cp = states.context_parallel
    core = native.StepCore(states.native_arrays, single, states.vocab_size, states.max_num_draft_tokens, Scalars)
    if cp is not None:
        core.set_context_parallel(cp.size, cp.rank, cp.interleave)
    for g, table in enumerate(states.block_tables):
        spread = table.context_parallel
        core.add_group(
            {
                "table": table.table,
                "num_blocks": table.num_blocks,
                "content_id": table.content_id,
                "holds_null": table.holds_null,
            },
            {name: array[g] for name, array in arrays.items() if isinstance(array, tuple)},
            block_size=table.group.block_size,
            tokens_per_block=table.tokens_per_block,
            sliding_window=table.group.sliding_window or 0,
            context_parallel=(spread.size, spread.rank, spread.interleave) if spread is not None else (1, 0, 1),
            recurrent=table.group.recurrent,
            null_block=table.null_block,
        )
    return core
