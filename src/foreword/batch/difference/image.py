"""The sender's image of the states as the receiver has them, and what differs from it."""

from __future__ import annotations

from operator import is_not
from typing import Any

import numpy as np

from foreword.arrays import I32, I64, AnyArray, Ints
from foreword.batch.difference.columns import (
    COMPUTED,
    DEFAULT,
    KNOWN,
    NO_ROWS,
    PREFILL,
    PROGRESS,
    ROPE,
    checksum_of,
    shared,
)
from foreword.batch.state.batch_update import BatchUpdate
from foreword.batch.state.request_states import RequestStates
from foreword.batch.state.sampling_columns import COLUMNS
from foreword.batch.step.slots import ragged_arange
from foreword.batch.values.sampling_params import SamplingParams


class Image:
    """The states as the other side has them after the last difference."""

    def __init__(self, states: RequestStates) -> None:
        R, groups = states.max_num_reqs, states.block_tables
        self.states = states
        self.progress = np.repeat(DEFAULT, R, axis=1)
        self._spare = self.progress.copy()
        self.generation = np.zeros(R, np.int64)
        self.num_blocks = np.zeros((len(groups), R), np.int32)
        self.content = np.zeros((len(groups), R), np.int64)
        self.tables = [np.full_like(t.table, t.null_block) for t in groups]
        self.token_ids = np.zeros(states.token_ids.shape, np.int32)
        self.version = -1
        self.stamp = np.zeros(R, np.int64)
        self.mrope: dict[int, I32] = {}

    def checksum(self) -> int:
        return checksum_of(self.progress, self.num_blocks)

    def restructure(self, update: BatchUpdate, added: I32, out: dict[str, AnyArray]) -> I32:
        """Removals, moves and admissions, here and into ``out``. The rows concerned."""
        if not (update or len(added)):
            return NO_ROWS
        removed = np.array(update.removed, np.int32)
        moves = np.array(update.moved, np.int32).reshape(-1, 2)
        source, target = moves[:, 0], moves[:, 1]
        self._clear(removed)
        if len(moves):
            n = int(self.progress[KNOWN, source].max())
            vacated = np.setdiff1d(source, target)
            for array in (self.progress.T, self.num_blocks.T, *self.tables, self.token_ids[:, :n]):
                array[target] = array[source]
            self.mrope = {int(t): m for s, t in moves.tolist() if (m := self.mrope.get(s)) is not None} | {
                row: m for row, m in self.mrope.items() if row not in source
            }
            self._clear(vacated)
            out["moves.from"], out["moves.to"] = source, target
        if len(removed):
            out["removed"] = removed
        if len(added):
            self._admit(added, out)
        return np.unique(np.concatenate((removed, source, target, added)))

    def _clear(self, rows: Ints) -> None:
        self.progress[:, rows] = DEFAULT
        self.num_blocks[:, rows] = 0
        for table, own in zip(self.states.block_tables, self.tables, strict=True):
            own[rows] = table.null_block
        for row in rows.tolist() if self.mrope else ():
            self.mrope.pop(row, None)

    def _admit(self, rows: I32, out: dict[str, AnyArray]) -> None:
        states, columns = self.states, self.states._columns
        known = np.minimum(columns["num_tokens"][rows], columns["prefill_len"][rows])
        computed = np.minimum(columns["num_computed_tokens"][rows], known - 1)
        at = np.repeat(rows, known), ragged_arange(known)
        out["admitted.rows"], out["admitted.token_ids"] = rows, states.token_ids[at]
        out["admitted.num_tokens"], out["admitted.prompt_len"] = shared(known), shared(columns["prompt_len"][rows])
        out["admitted.num_computed_tokens"] = shared(computed)
        if columns["lora_id"][rows].any():
            out["admitted.lora_id"] = columns["lora_id"][rows]
        self.token_ids[at] = out["admitted.token_ids"]
        for i, values in (
            (KNOWN, known),
            (PREFILL, known),
            (COMPUTED, computed),
            (ROPE, columns["rope_delta"][rows]),
        ):
            self.progress[i, rows] = values
        for g, table in enumerate(states.block_tables):
            held = table.num_blocks[rows]
            where = np.repeat(rows, held), ragged_arange(held)
            out[f"admitted.num_blocks.{g}"], out[f"admitted.block_ids.{g}"] = shared(held), table.table[where]
            self.num_blocks[g, rows] = held
            self.tables[g][where] = table.table[where]

    def compare_blocks(self, touched: I32, out: dict[str, AnyArray]) -> None:
        """Row generations and block tables: blocks appended, and rows with another content, entry by entry."""
        states = self.states
        freed = states.row_generation != self.generation
        freed[touched] = True
        if freed.any():
            rows = np.flatnonzero(freed)
            out["generation.rows"], out["generation.values"] = rows, shared(states.row_generation[rows])
            self.generation = states.row_generation.copy()
        for g, table in enumerate(states.block_tables):
            own, held = self.tables[g], self.num_blocks[g]
            renewed = table.content_id != self.content[g]
            grown = table.num_blocks != held
            if grown.any():
                rows = np.flatnonzero(grown & ~renewed)
                count, start = table.num_blocks[rows] - held[rows], held[rows]
                where = np.repeat(rows, count), np.repeat(start, count) + ragged_arange(count)
                if len(rows):
                    out[f"appended.{g}.rows"], out[f"appended.{g}.count"] = rows, shared(count)
                    out[f"appended.{g}.blocks"] = own[where] = table.table[where]
            if renewed.any():
                rows = np.flatnonzero(renewed)
                width = int(max(table.num_blocks[rows].max(), held[rows].max()))
                i, index = np.nonzero(table.table[rows, :width] != own[rows, :width])
                out[f"content.{g}.rows"], out[f"content.{g}.ids"] = rows, table.content_id[rows]
                out[f"content.{g}.num_blocks"] = shared(table.num_blocks[rows])
                if len(i):
                    out[f"entries.{g}.rows"], out[f"entries.{g}.index"] = rows[i], index
                    out[f"entries.{g}.blocks"] = own[rows[i], index] = table.table[rows[i], index]
                self.content[g, rows] = table.content_id[rows]
            held[:] = table.num_blocks

    def compare_progress(self, planned: I32, is_whole: bool, out: dict[str, AnyArray]) -> None:
        """Counts and tokens. The rows are those of the plan, unless others changed."""
        states, old = self.states, self.progress
        new = self._spare
        for i, name in enumerate(PROGRESS):
            new[i] = states._columns[name]
        differs = (new != old).any(0)
        rows = np.flatnonzero(differs)
        if is_whole and len(rows) == len(planned) and differs[planned].all():
            rows = planned.astype(np.intp)
        elif len(rows):
            out["changed.rows"] = rows
        if len(rows):
            delta = new[:, rows] - old[:, rows]
            for i in np.flatnonzero(delta.any(1)).tolist():
                out[f"changed.{list(PROGRESS)[i]}"] = shared(delta[i])
        seen = differs
        seen[planned] = True
        candidates = rows if int(np.count_nonzero(seen)) == len(rows) else np.flatnonzero(seen)
        self._compare_tokens(candidates, rows, new, out)
        self.progress, self._spare = new, old

    def _compare_tokens(self, candidates: I64, changed: I64, new: I32, out: dict[str, AnyArray]) -> None:
        """The first to the last differing token of each row. Tokens past the known ones of the image always differ."""
        if not len(candidates):
            return
        states, old = self.states, self.progress
        known = old[KNOWN, candidates]
        first = np.minimum(np.minimum(known, old[COMPUTED, candidates]), new[COMPUTED, candidates])
        count = np.maximum(new[KNOWN, candidates] - first, 0)
        position = np.repeat(first, count) + ragged_arange(count)
        of = np.repeat(np.arange(len(candidates)), count)
        tokens = states.token_ids[candidates[of], position]
        differing = np.flatnonzero((tokens != self.token_ids[candidates[of], position]) | (position >= known[of]))
        if not len(differing):
            return
        of = of[differing]
        begins = np.ones(len(of), np.bool_)
        np.not_equal(of[1:], of[:-1], out=begins[1:])
        if begins.all():  # one token per row, as in a decode step
            rows, start, length = candidates[of], position[differing], np.ones(len(of), np.int32)
            written, tokens = (rows, start), tokens[differing]
        else:
            ends = np.append(begins[1:], True)
            begin, of = differing[begins], of[begins]
            rows, start, length = candidates[of], position[begin], differing[ends] + 1 - begin
            local = ragged_arange(length)
            written = np.repeat(rows, length), np.repeat(start, length) + local
            tokens = tokens[np.repeat(begin, length) + local]
        self.token_ids[written] = tokens
        back = known[of] - start
        if len(rows) != len(changed) or (rows != changed).any():
            out["tokens.rows"] = rows
        if back.any():
            out["tokens.back"] = shared(back)
        out["tokens.count"], out["tokens.ids"] = shared(length), tokens

    def compare_sampling(self, added: I32, out: dict[str, AnyArray]) -> dict[int, SamplingParams]:
        """The sampling columns of rows admitted with parameters, and of rows whose parameters changed."""
        states, sampling = self.states, self.states.sampling
        if sampling.version == self.version and not len(added):
            return {}
        changed = (sampling.stamp != self.stamp) & states.live & sampling.is_set
        changed[added] = sampling.is_set[added]
        self.version, self.stamp = sampling.version, sampling.stamp.copy()
        rows = np.flatnonzero(changed)
        if len(rows):
            out["sampling.rows"] = rows
            for name, (_, default) in COLUMNS.items():
                column = getattr(sampling, name)[rows]
                if name == "needs" or (column != default).any():
                    out[f"sampling.{name}"] = shared(column)
        held = sampling.params
        return {row: held[row] for row in rows.tolist() if row in held} if held else {}

    def compare_mrope(self, added: I32) -> dict[int, I32]:
        """M-RoPE positions given to requests after their admission, by row."""
        now = self.states.extras.mrope_positions
        if len(now) == len(self.mrope) and not any(map(is_not, now.values(), map(self.mrope.get, now))):
            return {}
        new = set(added.tolist())
        staged = {row: m for row, m in now.items() if row not in new and self.mrope.get(row) is not m}
        self.mrope = dict(now)
        return staged


def extras_of(states: RequestStates, row: int) -> dict[str, Any]:
    """The fields of `NewRequest` that few requests have."""
    extras = states.extras
    found: dict[str, Any] = {
        "lora_request": states.loras.request(int(states.lora_id[row])),
        "prompt_embeds": extras.prompt_embeds.get(row),
        "mm_features": extras.mm_features.get(row),
        "mrope_positions": extras.mrope_positions.get(row),
        "mrope_delta": int(states.rope_delta[row]) or None,
        "encoder_len": int(states.encoder_len[row]) or None,
        "pooling_params": extras.pooling_params.get(row),
    }
    if found["prompt_embeds"] is not None and states.extras.is_token_id is not None:
        found["prompt_is_token_id"] = states.extras.is_token_id[row, : states.prompt_len[row]].copy()
    return {name: value for name, value in found.items() if value is not None}
