"""Track the content of each slot of a cache: the rule that the steps of any engine must follow.

The key and value of a position depend on its token and on all tokens before it, on the request's adapter and salt, and
on the images or sounds of its placeholders. A fingerprint of all of these is kept for each slot, from the step that
wrote it. After a step's writes,

    each slot that the step wrote holds the content that it wrote       (no two contents go to one slot)
    each slot that a request sees holds the content of its position     (read through the engine's own block table)

A write of a step counts before its reads, since a layer writes its keys before it attends: a request may read what
another one writes in the same step. Who wrote a slot does not matter, its content does. A slot with wrong content is
reported once until it is written again, and recording continues.

The strict policy, of a cache whose owner computes no prefix twice: a slot is read only if a step before wrote it, and
from the tokens on that a request was not admitted with, by the request itself.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from foreword.arrays import I32, I64, U64, AnyArray, Bools, Ints
from foreword.batch.proof.group_slots import ANY, NEVER, GroupSlots, GroupUse
from foreword.batch.state.request_states import RequestStates
from foreword.batch.step.slots import ragged_arange
from foreword.batch.step.tensors import BatchTensors
from foreword.seeds import MASK, STRIDE, mix64

MOST_NAMES = 1 << 16  # names of the last requests, to name the writer of a slot
UNSEEN = -1  # tokens that a request was admitted with, before a step of it was checked


@dataclass(frozen=True, slots=True)
class SlotFault:
    """A slot that does not hold what a request reads or wrote there: the first of ``count`` of this request and group.

    request: its index in the batch. entry: of its block-table row. writer: the request that wrote the slot last, None
    if no request did. is_written: whether the step writes the slot for this position, and another token of it too.
    is_stray: whether the slot, or the entry that leads to it, is not the one that the request's own blocks give.
    is_other: whether it holds other content. It is False under the strict policy for the same content of another
    request.
    """

    group: int
    request: int
    position: int
    entry: int
    slot: int
    count: int
    writer: str | None
    is_written: bool
    is_stray: bool
    is_other: bool


class CacheContents:
    """The content of every slot of a cache, updated with every step.

    num_blocks: the number of blocks of the cache, the null block included; None: as many as are used. uses: by KV
    group, see `GroupUse`.
    attached: slots never written count as right, where the engine ran before, or keys arrive from elsewhere.
    strict: see above. Then tokens that are computed at admission are in slots that hold them or were never written, or
    `share` declares them; a fault is found again in every step, and `undo` takes a step back.
    """

    def __init__(
        self,
        states: RequestStates,
        num_blocks: int | None,
        *,
        uses: Mapping[int, GroupUse] | None = None,
        attached: bool = False,
        strict: bool = False,
    ) -> None:
        self._states = states
        self._strict = strict
        self._brought: I64 = np.full(states.max_num_reqs, UNSEEN)  # tokens computed when the request was first seen
        self._shared: I64 = np.zeros(states.max_num_reqs, np.int64)  # tokens declared by `share`
        self._first_seen: I32 = np.zeros(0, np.int32)  # rows, in the step checked last
        self._prints: U64 = np.zeros(states.token_ids.shape, np.uint64)  # [R, M] of the content of each position
        self._settled: I64 = np.zeros(states.max_num_reqs, np.int64)  # positions whose print is that of known tokens
        self._entered: I64 = np.zeros(states.max_num_reqs, np.int64)  # positions whose print was made when it entered
        self._rewrites: I64 = np.full(states.max_num_reqs, -1, np.int64)  # those when a row's prints were made
        self._writers: I32 = np.zeros(states.max_num_reqs, np.int32)  # the number of the row's request
        self._names: dict[int, str] = {}
        self._count = 0
        self._salts: dict[str, str] = {}
        self.groups = [
            GroupSlots(g, table, (uses or {}).get(g, GroupUse()), num_blocks, attached, strict)
            for g, table in enumerate(states.block_tables)
        ]
        for req_id in states.req_ids:
            self.filled(states.row_of(req_id))
        states.observers.append(self)

    # -- called by the states --------------------------------------------------------------------------------------

    def filled(self, row: int) -> None:
        """Follow the admission of a request to the row."""
        self._count += 1
        self._writers[row] = self._count
        self._names[self._count] = self._states.req_id_of(row)
        self._names.pop(self._count - MOST_NAMES, None)
        self._brought[row], self._shared[row] = UNSEEN, 0
        self._fingerprint(row)

    def freed(self, row: int) -> None:
        """Follow the removal of the row's request."""
        self._salts.pop(self._states.req_id_of(row), None)

    def exchanged(self, a: int, b: int) -> None:
        """Follow the exchange of two rows."""
        columns = self._settled, self._entered, self._rewrites, self._writers, self._brought, self._shared
        arrays: list[AnyArray] = [self._prints, *columns]
        for array in (*arrays, *(group.proved for group in self.groups)):
            array[[a, b]] = array[[b, a]]

    def close(self) -> None:
        """Stop following the states."""
        self._states.observers.remove(self)

    # -- the content of requests -----------------------------------------------------------------------------------

    def salt(self, req_id: str, salt: str) -> None:
        """Declare that the request shares no content with requests of another salt. Raise RequestError for an unknown
        id.
        """
        row = self._states.row_of(req_id)
        self._salts[req_id] = salt
        self._fingerprint(row)

    def share(self, req_id: str, num_tokens: int) -> None:
        """Declare that the keys of the request's first tokens were written outside the steps checked."""
        row = self._states.row_of(req_id)
        self._shared[row] = num_tokens
        for group in self.groups:
            group.proved[row] = -1

    def bring(self, blocks: I32, group: int) -> None:
        """Declare that these blocks of a KV group were written outside the steps checked: they hold the tokens of the
        first request that is admitted with them.
        """
        slots = self.groups[group]
        if slots.has_slots:
            if (most := 1 + int(blocks.max(initial=0))) > slots.num_blocks:
                slots.grow(most)
            slots.bring(blocks)

    def _fingerprint(self, row: int) -> None:
        """Compute the prints of all known tokens of a row, from its beginning."""
        s = self._states
        known = int(s.num_tokens[row])
        mixed = _mixed(np.arange(known), s.token_ids[row, :known])
        for feature in s.extras.mm_features.get(row, ()):
            mixed[feature.offset : feature.offset + 1] += _of_text(feature.identifier)
        embeds, is_embedding = s.extras.prompt_embeds.get(row), s.extras.is_embedding
        if embeds is not None and is_embedding is not None:
            at = np.flatnonzero(is_embedding[row, : len(embeds)])  # elsewhere it has tokens, as other prompts
            mixed[at] += _spread([zlib.crc32(np.asarray(embeds[i]).tobytes()) for i in at])
        mixed[:1] += self._start(row)
        self._prints[row, :known] = np.cumsum(mixed, dtype=np.uint64)
        self._settled[row] = self._entered[row] = known
        self._rewrites[row] = s._progress.rewrites[row]
        for group in self.groups:
            group.proved[row] = -1

    def _start(self, row: int) -> np.uint64:
        """Return what the content of every position of the request depends on."""
        start = int(_spread([int(self._states.lora_id[row])])[0])
        if self._salts:
            start += int(_of_text(self._salts.get(self._states.req_id_of(row), "")))
        return np.uint64(start & MASK)

    def _step_prints(self, batch: BatchTensors) -> U64:
        """Return the content of each scheduled token, [T], and update the rows' prints for the positions up to them."""
        s, rows, T = self._states, batch.idx_mapping, batch.num_tokens
        c, ends = batch.num_computed_tokens, batch.seq_lens[: batch.num_reqs]
        for row in rows[self._rewrites[rows] != s._progress.rewrites[rows]].tolist():
            self._fingerprint(row)  # its tokens or its progress were changed outside a step
        prints: U64
        settled = self._settled[rows]
        if (settled < c).any():  # drafts that were accepted, or tokens that no step computed
            self._settle(rows, settled, c)
        positions, owner, extras = batch.positions[:T], batch.req_indices, s.extras.rows
        one_each = batch.num_reqs == T and c.all() and not batch.draft_token_ids.size
        if one_each and not (extras and (self._entered[rows] > c).any()):
            prints = self._prints[rows, c - 1] + _mixed(positions, batch.input_ids[:T])
            self._prints[rows, c] = prints
            self._settled[rows] = ends
            return prints
        total = np.cumsum(_mixed(positions, batch.input_ids[:T]), dtype=np.uint64)
        before = np.where(c > 0, self._prints[rows, np.maximum(c - 1, 0)], 0)
        if not c.all():
            for b in np.flatnonzero(c == 0).tolist():
                before[b] = self._start(int(rows[b]))
        starts = batch.query_start_loc[: batch.num_reqs]
        before[starts > 0] -= total[starts[starts > 0] - 1]
        prints = total + before[owner]
        for b in [b for b, row in enumerate(rows.tolist()) if row in extras] if extras else ():
            # The content of these requests is more than their tokens.
            first, end, at = int(starts[b]), int(batch.query_start_loc[b + 1]), int(c[b])
            of_prompt = self._prints[rows[b], at : min(at + end - first, int(self._entered[rows[b]]))]
            if size := len(of_prompt):
                prints[first + size : end] += of_prompt[-1:] - prints[first + size - 1 : first + size]
                prints[first : first + size] = of_prompt
        if batch.draft_token_ids.min(initial=0) < 0:
            for b in np.flatnonzero(batch.num_draft_tokens).tolist():
                drafts = batch.draft_token_ids[batch.cu_num_draft_tokens[b] : batch.cu_num_draft_tokens[b + 1]]
                if (drafts < 0).any():  # content that depends on an unknown draft equals any content
                    end = int(batch.query_start_loc[b + 1])
                    prints[end - len(drafts) + int(np.argmax(drafts < 0)) : end] = ANY
        alive = batch.row_generation != -1  # the row of a cancelled request may have another one
        at_rows, kept = rows[owner], alive[owner] if not alive.all() else slice(None)
        self._prints[at_rows[kept], positions[kept]] = prints[kept]
        self._settled[rows[alive]] = (ends - batch.num_draft_tokens)[alive]
        return prints

    def _settle(self, rows: I32, first: I64, computed: I32) -> None:
        """Compute the prints of positions first[b] … computed[b] − 1 from the tokens that are known there now."""
        late = first < computed
        rows, first = rows[late], first[late]
        counts = computed[late] - first
        at_rows = np.repeat(rows, counts)
        positions = np.repeat(first, counts) + ragged_arange(counts)
        total = np.cumsum(_mixed(positions, self._states.token_ids[at_rows, positions]), dtype=np.uint64)
        before = self._prints[rows, np.maximum(first - 1, 0)]
        for b in np.flatnonzero(first == 0).tolist():
            before[b] = self._start(int(rows[b]))
        starts = np.cumsum(counts) - counts
        before[starts > 0] -= total[starts[starts > 0] - 1]
        self._prints[at_rows, positions] = total + np.repeat(before, counts)
        for group in self.groups:
            group.proved[at_rows, positions // group.table.tokens_per_block] = -1

    # -- the check -------------------------------------------------------------------------------------------------

    def check(
        self,
        batch: BatchTensors,
        slot_mapping: Sequence[Ints | None] | None = None,
        block_table: Sequence[Ints | None] | None = None,
        *,
        read: bool = True,
    ) -> list[SlotFault]:
        """Record the writes of a step, and return the first wrong read or write of each request and group.

        slot_mapping, block_table: of each KV group what the engine's kernels write and read, [T] and [B, any width];
        None: as the definition has it. read: False records alone.
        """
        faults: list[SlotFault] = []
        prints, rows = self._step_prints(batch), batch.idx_mapping
        for g, group in enumerate(self.groups):
            if group.has_slots:
                theirs = None if slot_mapping is None else slot_mapping[g]
                table = None if block_table is None or not read else block_table[g]
                faults += self._check_group(batch, group, prints, theirs, table, read)
        first = (self._brought[rows] == UNSEEN) & (batch.row_generation != -1)
        self._first_seen = rows[first]
        self._brought[self._first_seen] = batch.num_computed_tokens[first]
        return faults

    def keep(self) -> None:
        """Begin a step that `undo` can take back. It is used with the strict policy only."""
        for group in self.groups:
            group.before.clear()

    def undo(self) -> None:
        """Take back everything that was recorded since `keep`."""
        for group in self.groups:
            group.undo()
        self._brought[self._first_seen], self._first_seen = UNSEEN, self._first_seen[:0]

    def reset(self) -> None:
        """Forget every slot: content that is live now counts as correct."""
        for group in self.groups:
            group.reset()
        self._brought[:] = UNSEEN

    def forget(self, slot_mapping: Sequence[Ints | None]) -> None:
        """Let the content of these slots of each KV group equal any content, because the request that wrote it is not
        followed.
        """
        for group, slots in zip(self.groups, slot_mapping, strict=True):
            if group.has_slots and slots is not None:
                at = np.asarray(slots).astype(np.int64, copy=False)
                at = at[(at >= 0) & (at < group.num_slots)]
                group.write(at, np.full(len(at), ANY), np.zeros(len(at), np.int32))

    def _check_group(
        self, batch: BatchTensors, group: GroupSlots, prints: U64, slots: Ints | None, table: Ints | None, read: bool
    ) -> list[SlotFault]:
        if group.grows:
            group.reserve(batch)
        if batch.block_ops:
            group.apply(batch.block_ops.zero, batch.block_ops.copies)
        reads_first = self._strict or group.use.ring is not None
        before = self._reads(batch, group, table) if reads_first and read else []
        written = self._writes(batch, group, prints, slots)
        return [*before, *written, *(self._reads(batch, group, table) if read and not reads_first else [])]

    def _writes(self, batch: BatchTensors, group: GroupSlots, prints: U64, theirs: Ints | None) -> list[SlotFault]:
        """Record the writes. Return a fault where the step writes two contents to one slot."""
        writers = self._writers[batch.idx_mapping[batch.req_indices]]
        ours = slots = group.use.slots_of(batch, group.index)
        stray = None
        if theirs is not None and len(theirs) >= len(ours):  # one that is too short is a difference of the tensor
            slots = np.asarray(theirs)[: len(ours)].astype(np.int64, copy=False)
            if (differ := slots != ours).any():
                stray = np.concatenate((ours[differ], slots[differ]))  # where a key is missing, and where it is not due
        tokens: AnyArray | None = None
        if slots.view(np.uint64).max(initial=0) >= group.num_slots:  # written nowhere, −1 included
            tokens = np.flatnonzero(slots.view(np.uint64) < group.num_slots)
            slots, prints, writers = slots[tokens], prints[tokens], writers[tokens]
        group.write(slots, prints, writers)
        if stray is not None:
            group.mark_stray(stray)
        held = group.content.take(slots)
        if not (lost := held != prints).any():
            return []
        i = np.flatnonzero(lost & (held != ANY) & (prints != ANY))
        tokens = i if tokens is None else tokens[i]
        faults = []
        owners, first, counts = np.unique(batch.req_indices[tokens], return_index=True, return_counts=True)
        for b, f, count in zip(owners.tolist(), first.tolist(), counts.tolist(), strict=True):
            position = int(batch.positions[tokens[f]])
            entry = group.entry_of(position)
            faults.append(self._fault(group, b, position, entry, int(slots[i[f]]), count, written=True, stray=False))
        return faults

    def _reads(self, batch: BatchTensors, group: GroupSlots, table: Ints | None) -> list[SlotFault]:
        """Return a fault where a slot that a request sees does not hold the content of its position."""
        rows, B = batch.idx_mapping, batch.num_reqs
        if not B:
            return []
        ours = group.table.table
        theirs: AnyArray = ours[rows] if table is None else np.asarray(table)[:B]
        before = self._strict or group.use.ring is not None  # the step's own keys are not read from the cache
        ends = batch.num_computed_tokens if before else batch.seq_lens[:B]
        width = min(group.width_of(int(ends.max())), theirs.shape[1], ours.shape[1])
        blocks = theirs[:, :width].astype(np.uint32)  # a negative number is above all others
        keys = group.versions.take(blocks, mode="clip")
        b, e = np.divmod(np.flatnonzero(group.changed(batch, keys, rows, width)), max(width, 1))
        group.proved[rows[b], e] = keys[b, e]
        positions = group.positions(e, ends[b])
        M = self._prints.shape[1]
        at = np.minimum(blocks[b, e].astype(np.int64), group.num_blocks)[:, None] * group.size + group.offsets_in_block
        held = group.content.take(at)
        wanted = self._prints.reshape(-1).take(rows[b].astype(np.int64)[:, None] * M + positions, mode="clip")
        seen = positions < ends[b][:, None]
        if group.is_limited:
            seen &= (positions >= group.use.lowest(group.table, batch.num_computed_tokens)[b][:, None]) & (
                positions >= 0
            )
        if self._strict:
            held = self._taken_over(batch, group, b, positions, at, held, wanted, seen)
        wrong = (held != wanted) & seen
        if self._strict:
            wrong |= self._of_others(batch, group, b, positions, at) & seen
        if not wrong.any():
            return []
        i, j = np.nonzero(wrong)
        if self._strict:
            group.proved[rows[b[i]], e[i]] = -1  # found again in the next step
        else:
            known = (held[i, j] != ANY) & (wanted[i, j] != ANY)
            i, j = i[known], j[known]
        faults = []
        requests, first, counts = np.unique(b[i], return_index=True, return_counts=True)
        for request, f, count in zip(requests.tolist(), first.tolist(), counts.tolist(), strict=True):
            entry, slot, position = int(e[i[f]]), int(at[i[f], j[f]]), int(positions[i[f], j[f]])
            stray = bool(theirs[request, entry] != ours[rows[request], entry])
            other = bool(held[i[f], j[f]] != wanted[i[f], j[f]])
            fault = self._fault(group, request, position, entry, slot, count, written=False, stray=stray)
            faults.append(fault if other else replace(fault, is_other=False))
        if not self._strict:
            group.excuse(at[i, j])
        return faults

    def _taken_over(
        self,
        batch: BatchTensors,
        group: GroupSlots,
        b: I64,
        positions: I64,
        at: I64,
        held: U64,
        wanted: U64,
        seen: Bools,
    ) -> U64:
        """Return the content of the slots after those that a request was admitted with were filled for it."""
        rows = batch.idx_mapping[b]
        first = self._brought[rows] == UNSEEN
        if not first.any():
            return held
        given = seen & first[:, None] & ((held == NEVER) | (positions < self._shared[rows][:, None]))
        group.write(at[given], wanted[given], np.broadcast_to(self._writers[rows][:, None], at.shape)[given])
        taken: U64 = group.content.take(at)
        return taken

    def _of_others(self, batch: BatchTensors, group: GroupSlots, b: I64, positions: I64, at: I64) -> Bools:
        """Return the slots past the tokens that a request was admitted with which another request wrote."""
        rows = batch.idx_mapping[b]
        brought = np.maximum(self._brought[rows], self._shared[rows])
        brought = np.where(self._brought[rows] == UNSEEN, batch.num_computed_tokens[b], brought)
        others: Bools = (group.writer.take(at) != self._writers[rows][:, None]) & (positions >= brought[:, None])
        return others

    def _fault(
        self, group: GroupSlots, b: int, position: int, entry: int, slot: int, count: int, *, written: bool, stray: bool
    ) -> SlotFault:
        writer = int(group.writer[slot])
        name = self._names.get(abs(writer), "an earlier request") if writer else None
        if group.content[slot] == NEVER:
            name = None
        return SlotFault(group.index, b, position, entry, slot, count, name, written, stray or writer < 0, True)


def _spread(values: Any) -> U64:
    """Spread over 64 bits, so that sums of different values differ."""
    mixed: U64 = mix64(np.asarray(values).astype(np.uint64) + np.uint64(STRIDE))
    return mixed


def _mixed(positions: AnyArray, tokens: AnyArray) -> U64:
    return _spread((positions.astype(np.uint64) << np.uint64(32)) | tokens.astype(np.uint64))


def _of_text(text: str) -> np.uint64:
    return np.uint64(hash(text) & MASK)
