"""A prepared step: its tensors, and the operations that may happen to it once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from foreword.arrays import I32
from foreword.batch.features.explain import Explanation
from foreword.batch.features.masks import attention_mask
from foreword.batch.features.paged import flash_attn_varlen, flashinfer_plan, kernel_block_table
from foreword.batch.prepare.commit import commits, counts_as_done, sample_table
from foreword.batch.state.changes import make
from foreword.batch.state.request_states import RequestStates
from foreword.batch.step.layout import Scalars
from foreword.batch.step.tensors import ADVANCED, COMMITTED, PREPARED, BatchTensors
from foreword.errors import PlanError


class InputBatch(BatchTensors):
    """The tensors of one step, in batch order, valid until the next `prepare_inputs` on the same buffers.

    Tensors that few steps need, and the arguments of other kernels, are computed by functions of a batch: see
    ``features`` and ``adapters``.
    """

    __slots__ = ()

    attention_mask = attention_mask
    to_flash_attn = flash_attn_varlen
    to_flashinfer = flashinfer_plan
    kernel_block_table = kernel_block_table

    def explain(
        self,
        group: int = 0,
        *,
        token: int | None = None,
        width: int | None = None,
        text_of: Callable[[int], str] | None = None,
    ) -> Explanation:
        """Return the step's derived tensors, which can be printed as tables; with ``token``, as one sentence about that
        token.

        width: largest number of characters in a row of the tables; values that do not fit are left out. text_of:
        returns the text of a token id, for a row of the tables.
        """
        return Explanation.of(self, group, token, width, text_of)

    def _repr_html_(self) -> str:
        from foreword.markup import table  # imported here because few programs are notebooks

        headings = ("request", "scheduled", "computed before", "length after", "prefilling", "first token", "drafts")
        columns = (
            self.num_scheduled_tokens, self.num_computed_tokens, self.seq_lens, self.is_prefilling,
            self.query_start_loc, self.num_draft_tokens,
        )  # fmt: skip
        rows = zip(self.req_ids, *(column.tolist() for column in columns), strict=False)
        return table(repr(self).strip("<>"), headings, rows)

    # -- once per step ---------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        """Raise PlanError for a stale batch, and for one that was advanced or committed."""
        if self._generation != self.buffers.generation:
            self._check_alive()
        if self._stage != PREPARED:
            raise PlanError("this batch was advanced or committed before", step=self.step)

    def _advance(self, states: RequestStates) -> None:
        """See `foreword.batch.advance`."""
        self._check_current(states)
        self._check_open()
        make([*counts_as_done(states, self), (setattr, self, "_stage", ADVANCED)])

    def _commit(self, states: RequestStates, sampled: Mapping[str, Sequence[int]] | I32) -> None:
        """See `RequestStates.commit`."""
        self._check_current(states)
        core, advanced = self.buffers.core, self._stage == ADVANCED
        # One statement, so that no step is committed without a record of it.
        self._stage = COMMITTED if core is not None and core.commit(sampled, advanced) else self._stage
        if self._stage == COMMITTED:
            return
        table = np.ascontiguousarray(sample_table(states, self, sampled))
        if table is not sampled:
            self._stage = COMMITTED if core is not None and core.commit(table, advanced) else self._stage
        if self._stage != COMMITTED:  # NumPy names the rule that a refused table breaks
            make([*commits(states, self, table, advanced), (setattr, self, "_stage", COMMITTED)])

    def _close(self) -> None:
        """Make the batch refuse a commit, because it computes nothing."""
        self._stage = COMMITTED

    def _update(self, scalars: Scalars) -> None:
        """Take over the step's scalars after `resolve` has written the buffers."""
        self.scalars, self._generation = scalars, self.buffers.generation

    def _check_current(self, states: RequestStates) -> None:
        if self._generation != self.buffers.generation:
            self._check_alive()
        if states is not self.states:
            raise PlanError("this batch was prepared from other states", step=self.step)
        if self._layout != states.layout_version:
            raise PlanError("rows moved between prepare_inputs and commit: commit first", step=self.step)
        if self._stage == COMMITTED:
            raise PlanError("this batch was committed before", step=self.step)
        if self.scalars.num_unresolved:
            raise PlanError("this batch needs samples that are not known yet: commit the step before, then resolve "
                            "this one", step=self.step)  # fmt: skip

    def __repr__(self) -> str:
        if self._generation != self.buffers.generation:
            return f"<InputBatch of step {self.step}, replaced>"
        return (
            f"<InputBatch of step {self.step}: {self.num_reqs} requests, {self.num_tokens} tokens, "
            f"{self.attention_state.name}>"
        )
