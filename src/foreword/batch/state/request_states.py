"""The state of all live requests: one permanent row per request, from admission to removal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from operator import setitem
from typing import Any, Protocol

import numpy as np

from foreword.arrays import I32, I64, AnyArray, Bools, Ints
from foreword.batch.state.admission import check_block_ids, check_blocks, checked, checked_sampling, flat_int32
from foreword.batch.state.admission import token_ids as checked_token_ids
from foreword.batch.state.block_table import BlockTable, ContentIds
from foreword.batch.state.changes import Change, make
from foreword.batch.state.directory import Directory
from foreword.batch.state.extras import RowExtras
from foreword.batch.state.layout import ROWS
from foreword.batch.state.loras import LoraUsers
from foreword.batch.state.memory import zeros
from foreword.batch.state.overview import LiveRow, LiveRows
from foreword.batch.state.progress import Progress
from foreword.batch.state.sampling_columns import NUM_ADMISSIONS, SamplingColumns
from foreword.batch.values.kv_groups import ContextParallel, KVGroup
from foreword.batch.values.requests import NewRequest, NewRequests, TokenIds
from foreword.errors import CapacityError, ConfigError, RequestError
from foreword.integers import INT32_MAX, is_int32
from foreword.native import available, native


class RowObserver(Protocol):
    """Called by `RequestStates` for every row that a request enters, leaves, or exchanges with another."""

    def filled(self, row: int) -> None:
        """A request entered the row; its columns are complete."""

    def freed(self, row: int) -> None:
        """The row's request is about to leave; its id and columns are still valid."""

    def exchanged(self, a: int, b: int) -> None:
        """The two rows changed places."""


class Committable(Protocol):
    """A prepared step, as `RequestStates.commit` takes it: an `InputBatch`."""

    def _commit(self, states: RequestStates, sampled: Mapping[str, Sequence[int]] | I32) -> None: ...


class RequestStates:
    """All data that the input layer keeps between two steps, by row.

    `add_request` returns the row of a request. The row does not change (unless `condense` or `swap_rows` is called)
    until `remove_request` frees it for the next admission. The arrays have stable addresses for the object's life.

    token_ids            int32 [R, M]  prompt, then committed outputs; the drafts of a step follow the last one
    num_tokens           int32 [R]     known tokens: prompt + committed outputs
    num_computed_tokens  int32 [R]     tokens whose KV is in the cache once the steps in flight are done
    num_placeholders     int32 [R]     tokens that steps in flight will add at most; their ids are not known yet
    num_accepted_tokens  int32 [R]     tokens kept from the last committed step: accepted drafts + 1; 1 after admission
                                       and after a prompt chunk
    prompt_len           int32 [R]     length of the user's prompt
    prefill_len          int32 [R]     tokens to compute before sampling starts: prompt + outputs at admission
    last_sampled_token   int32 [R]     token_ids[row, num_tokens − 1] once something was sampled, else −1
    lora_id              int32 [R]     adapter, 0 for none; `loras` has the users of each
    rope_delta           int32 [R]     M-RoPE: number that a token past the staged positions adds to its position
    encoder_len          int32 [R]     encoder tokens of an encoder-decoder request, else 0
    row_generation       int64 [R]     times that the row was freed: separates a late result from a current one
    live                 bool [R]      whether the row holds a request
    block_tables         one `BlockTable` per KV group
    sampling             `SamplingColumns`: one array per parameter
    extras               `RowExtras`: values that few requests have, such as embeddings and multimodal features
    columns              the arrays [R] above by name
    has_special_groups   whether a KV group is recurrent or spread over ranks, which not every executor can run
    layout_version       grows when rows move

    null_block: the number that means "no block" in block tables. 0: block 0 is reserved, no request may write to it.
    −1: blocks are numbered from 0, and empty entries are −1. A scheduled token whose block is null is a PlanError.
    """

    num_tokens: I32
    num_computed_tokens: I32
    num_placeholders: I32
    num_accepted_tokens: I32
    prompt_len: I32
    prefill_len: I32
    last_sampled_token: I32
    lora_id: I32
    rope_delta: I32
    encoder_len: I32
    row_generation: I64
    live: Bools

    def __init__(
        self,
        *,
        max_num_reqs: int,
        max_model_len: int,
        vocab_size: int,
        kv_groups: Sequence[KVGroup],
        max_num_draft_tokens: int = 0,
        context_parallel: ContextParallel | None = None,
        null_block: int = 0,
    ) -> None:
        for name, value, low in (
            ("max_num_reqs", max_num_reqs, 1),
            ("max_model_len", max_model_len, 1),
            ("vocab_size", vocab_size, 1),
            ("max_num_draft_tokens", max_num_draft_tokens, 0),
        ):
            if not is_int32(value, low):
                raise ConfigError(f"{name}={value!r}: must be in [{low}, {INT32_MAX}]")
        if not isinstance(kv_groups, Sequence) or not all(isinstance(group, KVGroup) for group in kv_groups):
            raise ConfigError(f"kv_groups={kv_groups!r}: expected a list of KV groups; pass [KVGroup(block_size=16)]")
        if not kv_groups:
            raise ConfigError("kv_groups=[]: a model has at least one KV group; pass [KVGroup(block_size=16)]")
        if type(null_block) is not int or null_block not in (0, -1):
            raise ConfigError(f"null_block={null_block!r}: must be 0 (block 0 is reserved) or -1 (blocks from 0)")
        self.max_num_reqs = max_num_reqs
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.max_num_draft_tokens = max_num_draft_tokens
        self.context_parallel = context_parallel
        self.null_block = null_block
        self.token_ids = _unaliased_rows(max_num_reqs, max_model_len)
        content_ids = ContentIds()
        self.block_tables = tuple(
            BlockTable.allocate(
                group, context_parallel, max_num_reqs, max_model_len, null_block, content_ids, max_num_draft_tokens
            )
            for group in kv_groups
        )
        self.has_special_groups = any(t.group.recurrent or t.context_parallel is not None for t in self.block_tables)
        self.columns: dict[str, AnyArray] = {
            field.name: np.full(max_num_reqs, field.padding or 0, field.dtype) for field in ROWS
        }
        for name, column in self.columns.items():
            setattr(self, name, column)
        self._progress = Progress(self.token_ids, self.columns)
        self.sampling = SamplingColumns(max_num_reqs)
        self.extras = RowExtras()
        self.loras = LoraUsers()
        self.observers: list[RowObserver] = []
        self._adapters: dict[type, Any] = {}  # the data that an adapter keeps with these states, by its type
        self._step = 0  # number of prepared steps, for messages
        self.layout_version = 0
        self._directory = Directory(max_num_reqs)
        self._core = self.sampling.core = rows_core(
            {"next_content_id": content_ids.next, **self.native_arrays},
            self.sampling.native_layout(),
            self._directory,
            self.block_tables,
            vocab_size,
            max_num_draft_tokens,
        )

    # -- requests and rows -----------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._directory.rows)

    @property
    def native_arrays(self) -> dict[str, AnyArray]:
        """Return the arrays of tokens and progress by the names that native code has for them."""
        return {"token_ids": self.token_ids, "rewrites": self._progress.rewrites, **self.columns}

    def __contains__(self, req_id: object) -> bool:
        return isinstance(req_id, str) and req_id in self._directory.rows

    @property
    def req_ids(self) -> tuple[str, ...]:
        """Return the ids of the live requests, in order of admission."""
        return tuple(self._directory.rows)

    def __repr__(self) -> str:
        """Return the live requests as text: id, row, known and computed tokens."""
        some = [
            f"{rid!r} (row {row}): {self.num_tokens[row]} tokens, {self.num_computed_tokens[row]} computed"
            for rid, row in islice(self._directory.rows.items(), 8)
        ]
        more = [f"{len(self) - 8} more"] if len(self) > 8 else []
        return f"<RequestStates: {'; '.join([f'{len(self)} of {self.max_num_reqs} rows live', *some, *more])}>"

    def explain(self) -> LiveRows:
        """Return the live rows in order of admission, which can be printed as a table: tokens, progress and blocks of
        each request.
        """
        rows = (
            LiveRow(
                req_id=rid,
                row=row,
                prompt_len=int(self.prompt_len[row]),
                num_tokens=int(self.num_tokens[row]),
                num_computed_tokens=int(self.num_computed_tokens[row]),
                num_placeholders=int(self.num_placeholders[row]),
                blocks=tuple(tuple(t.table[row, : t.num_blocks[row]].tolist()) for t in self.block_tables),
            )
            for rid, row in self._directory.rows.items()
        )
        return LiveRows(tuple(rows), self.max_num_reqs)

    def row_of(self, req_id: str) -> int:
        """Return the request's row; RequestError for an unknown id."""
        return self._directory.row_of(req_id)

    def req_id_of(self, row: int) -> str:
        """Return the id of the request in a live row; CapacityError for a free row."""
        return self._directory.ids_of(np.array([row]))[0]

    def _find_req_id(self, row: int) -> str | None:
        """Return the id of the request in a row, for messages; None for a free row or a number outside [0, R)."""
        return self._directory.ids[row] if 0 <= row < self.max_num_reqs else None

    # -- admission and removal -------------------------------------------------------------------------------------

    def add_request(self, request: NewRequest) -> int:
        """Admit a request and return its row. Nothing is changed when this raises.

        Raises RequestError for bad values and CapacityError without a free row or past the end of a block-table row.
        """
        return self._admit([request], [{}])[0]

    def add_requests(self, new: NewRequests) -> I32:
        """Admit many requests at once, all or none. Return their rows, int32 [N]. Raise what `add_request` raises."""
        rows = np.empty(len(new.req_ids), np.int32)
        if self._core is None or new.lora_id is not None or not self._core.admit(
            new.req_ids, rows, new.token_ids, new.num_tokens, new.prompt_len, new.num_computed_tokens, new.block_ids,
            new.num_blocks, new.sampling,
        ):  # fmt: skip
            columns, requests = checked_sampling(new), new.split()
            sampling = [{name: values[i] for name, values in columns.items()} for i in range(len(requests))]
            return np.array(self._admit(requests, sampling), np.int32)
        for observer in self.observers:
            for row in rows.tolist():
                observer.filled(row)
        return rows

    def _admit(self, requests: Sequence[NewRequest], sampling: Sequence[Mapping[str, Any]]) -> list[int]:
        """Admit all requests or none, each with ``sampling_params`` or values by sampling column. Return their rows."""
        directory, first, changes = self._directory, self.sampling.num_admissions, list[Change]()
        entering: dict[str, int] = {}
        for i, request in enumerate(requests):
            rid = request.req_id
            directory.check_new(rid, entering)
            new = checked(
                request,
                max_model_len=self.max_model_len,
                vocab_size=self.vocab_size,
                tables=self.block_tables,
                loras=self.loras,
            )
            row = entering[rid] = directory.next_row(rid, i)
            values = {"live": True, "rope_delta": new.extras.rope_delta, "encoder_len": new.extras.encoder_len}
            changes += directory.enter(row, rid)
            changes += self._progress.begin(row, new.prompt, new.outputs, new.num_computed_tokens)
            if new.lora_id:
                values["lora_id"] = new.lora_id
                changes += self.loras.add(rid, new.lora_id, request.lora_request)
            changes += ((setitem, self.columns[name], row, value) for name, value in values.items())
            changes += self.extras.set(row, new.extras, self.token_ids.shape)
            for table, ids in zip(self.block_tables, new.blocks, strict=True):
                changes += table.start(row, ids)
            if new.params is not None:
                changes += self.sampling.set(row, new.params, self.vocab_size, first + i)
            elif sampling[i]:
                changes += self.sampling.set_given(row, sampling[i], first + i)
        make([*changes, (setitem, self.sampling.counters, NUM_ADMISSIONS, first + len(requests))])
        for row in entering.values():
            for observer in self.observers:
                observer.filled(row)
        return list(entering.values())

    def remove_rows(self, rows: Ints) -> None:
        """Free these rows. Raise CapacityError for a row that holds no request; then nothing changes."""
        rows = flat_int32(None, "rows", rows)
        if self.observers or not self._remove_native(rows):
            self._directory.ids_of(rows)
            self._remove(list(dict.fromkeys(rows.tolist())))

    def remove_request(self, req_id: str) -> bool:
        """Free the request's row. Return False for an unknown id, so removing twice is harmless."""
        if req_id not in self:
            return False
        self._remove([self._directory.rows[req_id]])
        return True

    def _remove_native(self, rows: I32) -> bool:
        """Return whether the native core removed the rows. If it is not built, or refuses, return False; then nothing
        changes.
        """
        # Native code does not have the values that few requests have.
        return not (self._core is None or self.loras or self.extras) and self._core.remove(rows)

    def _remove(self, rows: Sequence[int]) -> None:
        """Free different rows, all of them live."""
        for observer in self.observers:
            for row in rows:
                observer.freed(row)
        index = np.array(rows, np.int32)
        if self._remove_native(index):
            return
        changes: list[Change] = [(setitem, self.row_generation, index, self.row_generation[index] + 1)]
        for field in ROWS:
            if field.name != "row_generation":
                changes.append((setitem, self.columns[field.name], index, field.padding or 0))
        changes += self.loras.drop(self._directory.ids_of(index)) if self.loras else ()
        changes += self.sampling.reset(index)
        for row in rows:
            changes += self._directory.leave(row)
            changes += self.extras.clear(row)
            for table in self.block_tables:
                changes += table.start(row, index[:0])
        make(changes)

    # -- blocks ----------------------------------------------------------------------------------------------------

    def append_blocks(self, req_id: str, block_ids: Sequence[TokenIds]) -> None:
        """Append newly allocated blocks, one list per group. Raise CapacityError if they exceed the row."""
        row = self.row_of(req_id)
        held = [int(t.num_blocks[row]) for t in self.block_tables]
        blocks = check_blocks(req_id, block_ids, self.block_tables, held)
        make([c for table, ids in zip(self.block_tables, blocks, strict=True) for c in table.append(row, ids)])

    def append_blocks_rows(self, rows: I32, block_ids: I32, group: int = 0) -> None:
        """Append one new block for each entry of rows: table[rows[i], num_blocks[rows[i]]++] = block_ids[i], i
        ascending.

        Nothing changes on an error: CapacityError for a full or free row, RequestError for a number that is not a
        block.
        """
        core = self._core
        if core is not None and core.append(rows, block_ids, group):
            return
        rows, block_ids = flat_int32(None, "rows", rows), flat_int32(None, "block_ids", block_ids)
        if core is not None and core.append(rows, block_ids, group):  # as arrays of int32
            return
        if not 0 <= group < len(self.block_tables):
            raise CapacityError(f"group {group}: there are {len(self.block_tables)} KV groups, counted from 0")
        if len(rows) != len(block_ids):
            got, limit = f"{len(block_ids)} blocks", f"there are {len(rows)} rows"
            raise RequestError(None, "block_ids", got, limit, "Give one block per row.")
        table = self.block_tables[group]
        check_block_ids(None, "block_ids", block_ids, table)
        self._directory.ids_of(rows)
        order = np.argsort(rows, kind="stable")
        new = np.bincount(rows, minlength=self.max_num_reqs).astype(np.int32)
        held = table.num_blocks + new
        if (full := held > table.width).any():
            row = int(np.argmax(full))
            raise CapacityError(
                f"request {self._find_req_id(row)!r}: group {group} holds {table.width} blocks per row, "
                f"enough for max_model_len = {self.max_model_len}; it has {int(table.num_blocks[row])} "
                f"and {int(new[row])} more do not fit",
                request=self._find_req_id(row),
                tensor=f"block_table[{group}]",
                expected=table.width,
                got=int(held[row]),
            )
        nth = np.arange(len(rows)) - (np.cumsum(new) - new)[rows[order]]  # for a row that is named more than once
        at = rows[order], table.num_blocks[rows[order]] + nth
        make([(setitem, table.table, at, block_ids[order]), (setitem, table.num_blocks, slice(None), held)])

    def rewrite(
        self, req_id: str, token_ids: TokenIds, num_computed_tokens: int, block_ids: Sequence[TokenIds] | None = None
    ) -> None:
        """Replace the data of a request: its tokens (the prompt first), the number of computed tokens, and its blocks,
        one list per group; None: its present blocks. Followers of another engine use it if their data of a request is
        out of date.

        Batches prepared before must not be committed. Nothing changes on an error: RequestError for an unknown id, for
        fewer tokens than the prompt's or more than max_model_len, and for a count that leaves no token to compute;
        CapacityError past the end of a block-table row.
        """
        row = self.row_of(req_id)
        tokens = checked_token_ids(req_id, "token_ids", token_ids, self.vocab_size)
        prompt, known = int(self.prompt_len[row]), len(tokens)
        if not prompt <= known <= self.max_model_len:
            limit = f"must have the prompt's {prompt} tokens, and at most max_model_len = {self.max_model_len}"
            raise RequestError(req_id, "token_ids", f"{known} tokens", limit, "Give all known tokens.")
        if not is_int32(num_computed_tokens, 0) or num_computed_tokens >= known:
            limit, fix = f"must be in [0, {known - 1}]", "At least the last known token is computed by a later step."
            raise RequestError(req_id, "num_computed_tokens", num_computed_tokens, limit, fix)
        changes = self._progress.rewrite(row, tokens, num_computed_tokens)
        if block_ids is not None:
            blocks = check_blocks(req_id, block_ids, self.block_tables, [0] * len(self.block_tables))
            changes += [c for table, ids in zip(self.block_tables, blocks, strict=True) for c in table.start(row, ids)]
        make(changes)

    # -- after the step --------------------------------------------------------------------------------------------

    def commit(self, batch: Committable, sampled: Mapping[str, Sequence[int]] | I32) -> None:
        """Record what a step computed and sampled. See `foreword.batch.prepare.commit`."""
        batch._commit(self, sampled)

    # -- moving rows, for backends that need dense ones --------------------------------------------------------------

    def condense(self) -> list[tuple[int, int]]:
        """Make the live rows dense: 0 … len(self) − 1. While a free row is below the last live row, the last live row
        moves into the lowest free row. Return the moves (from, to) in their order.

        Batches prepared before can no longer be committed: commit first.
        """
        moves: list[tuple[int, int]] = []
        last = self.max_num_reqs - 1
        for hole in sorted(self._directory.free):
            while last > hole and not self.live[last]:
                last -= 1
            if last <= hole:
                break
            self._exchange(last, hole)
            moves.append((last, hole))
        if moves:
            self._directory.refill(self.live)
        return moves

    def swap_rows(self, first: int, second: int) -> None:
        """Exchange two rows, live or free. Batches prepared before can no longer be committed."""
        for row in (first, second):
            if not 0 <= row < self.max_num_reqs:
                raise CapacityError(f"row {row}: must be in [0, max_num_reqs = {self.max_num_reqs})")
        if first == second:
            return
        self._exchange(first, second)
        free = self._directory.free
        free[:] = [{first: second, second: first}.get(row, row) for row in free]

    def _row_arrays(self) -> list[AnyArray]:
        """Return every array whose entry of a row moves with it as a whole: all with rows as first axis, except those
        with positions.
        """
        tables = [array for t in self.block_tables for array in (t.table, t.num_blocks, t.content_id)]
        return [*self.columns.values(), *self.sampling.arrays(), *tables]

    def _exchange(self, a: int, b: int) -> None:
        tokens = int(max(self.num_tokens[a], self.num_tokens[b]))
        for array in (*self._row_arrays(), self.token_ids[:, :tokens]):
            array[[a, b]] = array[[b, a]]
        self.extras.exchange(a, b)
        self.sampling.exchange(a, b)
        self._directory.exchange(a, b)
        for observer in self.observers:
            observer.exchanged(a, b)
        self.layout_version += 1


def _unaliased_rows(max_num_reqs: int, max_model_len: int) -> I32:
    """Return int32 zeros [R, M] whose rows start an odd number of cache lines apart. A decode step reads one cache line
    of each row; if rows were 16 KiB apart, a thousand of these lines would share a few cache sets.
    """
    line, sizes = 16, f"max_num_reqs={max_num_reqs}, max_model_len={max_model_len}"
    rows: I32 = zeros((max_num_reqs, (-(-max_model_len // line) | 1) * line), "int32", sizes)[:, :max_model_len]
    return rows


def rows_core(
    rows: dict[str, AnyArray],
    sampling: dict[str, Any],
    directory: Directory,
    tables: Sequence[BlockTable],
    vocab_size: int,
    max_num_draft_tokens: int,
) -> Any:
    """Return the core, or None if the native module is not built."""
    if not available():
        return None
    core = native.RowsCore(rows, sampling, *directory.native, vocab_size, max_num_draft_tokens)
    for table in tables:
        core.add_table(
            table.table, table.num_blocks, table.content_id, table.holds_null, table.tokens_per_block, table.null_block
        )
    return core
