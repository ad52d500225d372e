"""Differences taken from one process's states."""

from __future__ import annotations

from operator import is_not
from typing import Any

import numpy as np

from foreword.arrays import I32, AnyArray, Bools
from foreword.batch.difference.arrays import Arrays
from foreword.batch.difference.mirror import admit, checksum, columns, geometry, mirror_of, remove, spans
from foreword.batch.difference.value import StepDifference
from foreword.batch.prepare.input_batch import InputBatch
from foreword.batch.state.batch_update import BatchUpdate, BatchUpdates
from foreword.batch.state.request_states import RequestStates
from foreword.batch.step.slots import ragged_arange
from foreword.errors import PlanError


class DifferenceRecorder:
    """Follows some states from its construction on. Call `close` at the end.

    The first difference is a snapshot with all live requests. `take` is called for each prepared step, right after
    `prepare_inputs` or, for a step prepared early, after `resolve`: before the states change again.

    It keeps the states as the receiver has them, in `RequestStates` of its own. `take` makes the changes of rows there
    as the receiver will, then compares all rows' columns, O(R), the block tables of the rows with other blocks, and the
    tokens of the rows that changed or are scheduled, from their computed tokens on.
    """

    def __init__(self, states: RequestStates) -> None:
        self._states = states
        self._mirror = mirror = mirror_of(states)
        self._updates = BatchUpdates(states)
        self._is_first = True
        ours, theirs = columns(states), columns(mirror)
        self._columns = [(name, ours[name][0], theirs[name][0]) for name in ours]

    def close(self) -> None:
        """Stop following the states."""
        self._updates.close()

    def take(self, batch: InputBatch) -> StepDifference:
        """Return the difference between the last step taken and this one.

        Raise PlanError for a batch of other states, one that was advanced or committed, and one whose states changed
        since.
        """
        states, mirror, is_first = self._states, self._mirror, self._is_first
        rows, cancelled = self._plan_of(batch)
        base = None if is_first else checksum(mirror)
        self._is_first = False
        update = self._updates.take_all() if is_first else self._updates.take()
        out: dict[str, AnyArray] = {
            "plan.rows": rows,
            "plan.counts": batch.num_scheduled_tokens.copy(),
            "ops.zero": batch.block_ops.zero,
            "ops.copies": batch.block_ops.copies.ravel(),
        }
        if cancelled.any():
            out["plan.cancelled"] = cancelled
        if len(batch.draft_token_ids):
            out |= {"drafts.counts": batch.num_draft_tokens.copy(), "drafts.ids": batch.draft_token_ids.copy()}
        if update:
            self._rearrange(update, out)
        req_ids = states.req_ids[len(states) - len(update.added) :] if update.added else ()
        added = [states.row_of(req_id) for req_id in req_ids]
        extras = tuple(_extras_of(states, row) for row in added)
        extras = extras if any(extras) else ()
        if added:
            self._write_admissions(np.array(added, np.int32), out)
            admit(mirror, Arrays(out), req_ids, extras)
        self._compare_tables(out)
        self._compare_mrope(out)
        self._compare_columns(rows, self._compare_tokens(rows, out), out)
        tokens, reqs = batch.num_tokens_padded, batch.num_reqs_padded
        return StepDifference(
            step=batch.step,
            base=base,
            base_seed=states.sampling.base_seed,
            num_admissions=states.sampling.num_admissions,
            gather=batch.is_gathered,
            pad_to=(tokens if tokens != batch.num_tokens else -1, reqs if reqs != batch.num_reqs else -1),
            geometry=geometry(states) if is_first else None,
            req_ids=req_ids,
            extras=extras,
            arrays={name: values for name, values in out.items() if values.size},
        )

    def _plan_of(self, batch: InputBatch) -> tuple[I32, Bools]:
        """Return the step's rows, and which of its requests are cancelled."""
        states = self._states
        if batch.states is not states:
            raise PlanError("this batch was prepared from other states", step=batch.step)
        batch._check_open()
        rows, generation, computed = batch.idx_mapping.copy(), batch.row_generation, batch.num_computed_tokens
        cancelled = generation < 0
        changed = (states.row_generation[rows] != generation) | (states.num_computed_tokens[rows] != computed)
        if batch.is_gathered:
            for table, held in zip(states.block_tables, batch.num_blocks, strict=True):
                changed |= table.num_blocks[rows] != held
        changed &= ~cancelled
        if changed.any():
            b = int(np.argmax(changed))
            raise PlanError("the states changed since the step was prepared or resolved: take its difference first",
                            step=batch.step, index=b, got=f"row {rows[b]}")  # fmt: skip
        return rows, cancelled

    def _rearrange(self, update: BatchUpdate, out: dict[str, AnyArray]) -> None:
        """Remove rows, then exchange rows until every request is in its own."""
        mirror, swaps = self._mirror, []
        removed = np.array(update.removed, np.int32)
        out["removed"] = removed = removed[mirror.live[removed]]
        remove(mirror, removed)
        for _, target in update.moved:
            row = mirror.row_of(self._states.req_id_of(target))
            if row != target:
                mirror.swap_rows(row, target)
                swaps += [row, target]
        out["swaps"] = np.array(swaps, np.int32)

    def _write_admissions(self, rows: I32, out: dict[str, AnyArray]) -> None:
        states = self._states
        known, lora_id = states.num_tokens[rows], states.lora_id[rows]
        out |= {
            "admitted.rows": rows,
            "admitted.token_ids": states.token_ids[np.repeat(rows, known), ragged_arange(known)],
            "admitted.num_tokens": known,
            "admitted.prompt_len": states.prompt_len[rows],
            "admitted.num_computed_tokens": np.minimum(states.num_computed_tokens[rows], known - 1),
        }
        if lora_id.any():
            out["admitted.lora_id"] = lora_id
        for g, table in enumerate(states.block_tables):
            held = out[f"admitted.num_blocks.{g}"] = table.num_blocks[rows]
            out[f"admitted.block_ids.{g}"] = table.table[np.repeat(rows, held), ragged_arange(held)]

    def _compare_tables(self, out: dict[str, AnyArray]) -> None:
        for g, (ours, theirs) in enumerate(zip(self._states.block_tables, self._mirror.block_tables, strict=True)):
            rows = np.flatnonzero((ours.num_blocks != theirs.num_blocks) | (ours.content_id != theirs.content_id))
            if len(rows):
                width = max(ours.num_blocks[rows].max(), theirs.num_blocks[rows].max())
                i, index = np.nonzero(ours.table[rows, :width] != theirs.table[rows, :width])
                at = rows[i], index
                out[f"entries.{g}.at"] = at[0] * ours.width + index
                out[f"entries.{g}.blocks"] = theirs.table[at] = ours.table[at]

    def _compare_mrope(self, out: dict[str, AnyArray]) -> None:
        ours, theirs = self._states.extras.mrope_positions, self._mirror.extras.mrope_positions
        if any(map(is_not, ours.values(), map(theirs.get, ours))):
            for row, positions in ours.items():
                if theirs.get(row) is not positions:
                    out[f"mrope_positions.{row}"] = positions
                    self._mirror.extras.stage_mrope(row, positions)

    def _compare_tokens(self, planned: I32, out: dict[str, AnyArray]) -> I32:
        """Write each row's tokens from the first that the receiver lacks. Returns how many replace others, [R]."""
        ours, theirs = self._states, self._mirror
        before, known = theirs.num_tokens, ours.num_tokens
        seen = (before != known) | (theirs.num_computed_tokens != ours.num_computed_tokens)
        seen[planned] = True
        both = np.minimum(before, known)
        first = np.minimum(both, np.minimum(theirs.num_computed_tokens, ours.num_computed_tokens))
        at = spans(np.where(seen, first, both), both)
        differs = ours.token_ids[at] != theirs.token_ids[at]
        resent = np.zeros_like(before)
        if differs.any():
            rows, position = at[0][differs], at[1][differs]
            np.maximum.at(resent, rows, before[rows] - position)
        at = spans(before - resent, known)
        out["tokens"] = theirs.token_ids[at] = ours.token_ids[at]
        return resent

    def _compare_columns(self, planned: I32, resent: I32, out: dict[str, AnyArray]) -> None:
        """Collect what is added to the columns, in the rows that changed. Equal sets of rows are sent once."""
        sets = {np.sort(planned).astype(np.intp).tobytes(): 0}
        for name, ours, theirs in [*self._columns, ("resent", resent, np.zeros_like(resent))]:
            if ours.tobytes() == theirs.tobytes():
                continue
            rows = np.flatnonzero(ours != theirs)
            k = sets.setdefault(rows.tobytes(), len(sets))
            if k:
                out[f"rows.{k}"] = rows
            out[f"{name}.{k}"] = ours[rows] - theirs[rows]
            theirs[:] = ours


def _extras_of(states: RequestStates, row: int) -> dict[str, Any]:
    """Return the fields of `NewRequest` that no array of the difference holds, prompt embeddings among them."""
    extras = states.extras
    found: dict[str, Any] = {
        "sampling_params": states.sampling.params.get(row),
        "lora_request": states.loras.request(int(states.lora_id[row])),
        "prompt_embeds": extras.prompt_embeds.get(row),
        "mm_features": extras.mm_features.get(row),
        "bidirectional_ranges": extras.bidirectional_ranges.get(row),
        "encoder_input": extras.encoder_inputs.get(row),
        "pooling_params": extras.pooling_params.get(row),
    }
    if found["prompt_embeds"] is not None and states.extras.is_embedding is not None:
        found["prompt_is_token_id"] = ~states.extras.is_embedding[row, : states.prompt_len[row]]
    return {name: value for name, value in found.items() if value is not None}
