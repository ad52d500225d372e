"""The system-level state: one permanent row a request, from admission to the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from foreword.arrays import I32, AnyArray, Bools, Ints
from foreword.batch.features.lora import LoraUsers
from foreword.batch.prepare import commit as _commit
from foreword.batch.prepare.backends import native as _native
from foreword.batch.state.block_table import BlockTable, ContentIds
from foreword.batch.state.extras import RowExtras, check_extras, has_extras, shape_of
from foreword.batch.state.sampling_columns import SamplingColumns
from foreword.batch.state.sampling_metadata import MetadataCache
from foreword.batch.values.integers import INT32_MAX, as_int32, is_int32
from foreword.batch.values.kv_groups import ContextParallel, KVGroup
from foreword.batch.values.requests import NewRequest, NewRequests, TokenIds
from foreword.batch.values.sampling_params import SamplingParams
from foreword.errors import CapacityError, ConfigError, RequestError

if TYPE_CHECKING:
    from foreword.batch.adapters.preempted import Parked
    from foreword.batch.adapters.vllm_front import VllmFront
    from foreword.batch.prepare.inputs import InputBatch
    from foreword.batch.proof.checker import CacheChecker
    from foreword.batch.state.batch_update import RowWatcher


class RequestStates:
    """Everything the input layer knows between two steps, by row.

    A row is a handle: `add_request` returns it, it never moves (unless `condense` or `swap_rows` is called), and
    `remove_request` frees it for the next admission. The arrays below have stable addresses for the object's life.

    token_ids            int32 [R, M]  prompt, then committed outputs; the drafts of a step past the end
    num_tokens           int32 [R]     known tokens: prompt + committed outputs
    num_computed_tokens  int32 [R]     tokens whose KV is in the cache once the steps in flight are done
    num_placeholders     int32 [R]     tokens that steps in flight will add at most; their ids are not known yet
    prompt_len           int32 [R]     the user's prompt
    prefill_len          int32 [R]     what must be computed before sampling starts: prompt + outputs at admission
    last_sampled_token   int32 [R]     token_ids[row, num_tokens − 1] once something was sampled, else −1
    lora_id              int32 [R]     adapter, 0 for none; `loras` knows the users of each
    rope_delta           int32 [R]     M-RoPE: what a token past the staged positions adds to its position
    encoder_len          int32 [R]     encoder tokens of an encoder-decoder request, else 0
    row_generation       int64 [R]     how often the row was freed: tells a late result from a current one
    block_tables         one `BlockTable` a KV group
    sampling             `SamplingColumns`: one array a parameter
    extras               `RowExtras`: what few requests have, embeddings and multimodal features among it
    """

    def __init__(
        self,
        *,
        max_num_reqs: int,
        max_model_len: int,
        vocab_size: int,
        kv_groups: Sequence[KVGroup],
        max_num_draft_tokens: int = 0,
        context_parallel: ContextParallel | None = None,
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
            raise ConfigError(f"kv_groups={kv_groups!r}: is no list of KV groups; pass [KVGroup(block_size=16)]")
        if not kv_groups:
            raise ConfigError("kv_groups=[]: a model has at least one KV group; pass [KVGroup(block_size=16)]")
        self.max_num_reqs = max_num_reqs
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.max_num_draft_tokens = max_num_draft_tokens
        self.context_parallel = context_parallel
        self.content_ids = ContentIds()
        self.block_tables = tuple(
            BlockTable.allocate(g, context_parallel, max_num_reqs, max_model_len, self.content_ids) for g in kv_groups
        )
        self.token_ids = _unaliased_rows(max_num_reqs, max_model_len)
        self.num_tokens = np.zeros(max_num_reqs, np.int32)
        self.num_computed_tokens = np.zeros(max_num_reqs, np.int32)
        self.num_placeholders = np.zeros(max_num_reqs, np.int32)
        self.prompt_len = np.zeros(max_num_reqs, np.int32)
        self.prefill_len = np.zeros(max_num_reqs, np.int32)
        self.last_sampled_token = np.full(max_num_reqs, -1, np.int32)
        self.lora_id = np.zeros(max_num_reqs, np.int32)
        self.rope_delta = np.zeros(max_num_reqs, np.int32)
        self.encoder_len = np.zeros(max_num_reqs, np.int32)
        self.row_generation = np.zeros(max_num_reqs, np.int64)
        self.live = np.zeros(max_num_reqs, np.bool_)
        self.sampling = SamplingColumns(max_num_reqs)
        self.sampling_metadata = MetadataCache(self)
        self.extras = RowExtras()
        self.loras = LoraUsers()
        self.parked: dict[str, Parked] = {}  # preempted: known, without row and blocks
        self.watchers: list[RowWatcher] = []  # told of every row that is filled, freed or moved
        self.vllm_front: VllmFront | None = None  # see `foreword.batch.adapters.vllm`
        self.checker: CacheChecker | None = None  # made by the first step prepared with check="full"
        self.step = 0  # prepared steps, for messages
        self.layout_version = 0  # grows when rows move
        self._rows: dict[str, int] = {}
        self._req_ids: npt.NDArray[np.object_] = np.full(max_num_reqs, None, object)
        self._free = list(range(max_num_reqs - 1, -1, -1))  # the last serves the next request
        self.core = self.sampling.core = _native.rows_core(self)

    @property
    def directory(self) -> tuple[dict[str, int], int, list[int]]:
        """For native code: the map from id to row, the address of the ids by row (str or None, [R]), the free rows."""
        return self._rows, self._req_ids.ctypes.data, self._free

    # -- who is here -------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, req_id: object) -> bool:
        return req_id in self._rows

    @property
    def req_ids(self) -> tuple[str, ...]:
        """The live requests, in order of admission."""
        return tuple(self._rows)

    def row_of(self, req_id: str) -> int:
        """The request's row; RequestError for an unknown id."""
        row = self._rows.get(req_id)
        if row is None:
            raise RequestError(req_id, "req_id", req_id, "is not here", "Admit it with add_request first.")
        return row

    def req_id_of(self, row: int) -> str:
        """The id of the request in a live row; CapacityError for a free one."""
        return self.req_ids_of(np.array([row]))[0]

    def req_ids_of(self, rows: Ints) -> list[str]:
        """The ids of the requests in live rows; CapacityError for a free one."""
        if len(rows) and (rows.min() < 0 or rows.max() >= self.max_num_reqs):
            raise CapacityError(f"rows must be in [0, max_num_reqs = {self.max_num_reqs})")
        ids: list[str | None] = self._req_ids[rows].tolist()
        if None in ids:
            raise CapacityError(f"row {int(rows[ids.index(None)])} holds no request")
        return ids  # type: ignore[return-value]

    @property
    def is_token_id(self) -> Bools | None:
        """bool [R, M], False where the position is a prompt embedding; None until a request brings one."""
        return self.extras.is_token_id

    # -- admission and removal ---------------------------------------------------------------------------------

    def add_request(self, request: NewRequest) -> int:
        """Admit a request and return its row. Nothing is changed when this raises.

        Raises RequestError for bad values and CapacityError without a free row or past the end of a block-table row.
        """
        rid = request.req_id
        if not isinstance(rid, str):
            raise RequestError(None, "req_id", rid, "is no string", "Name requests by strings.")
        if rid in self._rows:
            raise RequestError(rid, "req_id", rid, "is here already", "Remove it first, or use another id.")
        prompt = self._prompt_ids(request)
        outputs = self.check_token_ids(rid, "output_token_ids", request.output_token_ids)
        known = len(prompt) + len(outputs)
        if known > self.max_model_len:
            raise RequestError(
                rid, "prompt_token_ids", f"{known} tokens", f"is longer than max_model_len = {self.max_model_len}",
                "Shorten it, or build RequestStates with a larger max_model_len.",
            )  # fmt: skip
        if not (is_int32(request.num_computed_tokens) and 0 <= request.num_computed_tokens < known):
            raise RequestError(
                rid, "num_computed_tokens", request.num_computed_tokens, f"must be in [0, {known - 1}]",
                "At least the last known token has to be computed to sample after it.",
            )  # fmt: skip
        if not is_int32(request.lora_id, 0):
            raise RequestError(
                rid, "lora_id", request.lora_id, "is no adapter's number", "Use 0 for none, or 1 and up."
            )
        params = request.sampling_params
        if params is not None:
            if not isinstance(params, SamplingParams):
                raise RequestError(rid, "sampling_params", params, "is no SamplingParams", "Pass one, or None.")
            params.check(rid, self.vocab_size)
        blocks = self._check_blocks(rid, request.block_ids, existing=[0] * len(self.block_tables))
        check_extras(request, len(prompt))
        if not self._free:
            raise CapacityError(f"request {rid!r}: all max_num_reqs = {self.max_num_reqs} rows are taken")

        row = self._free.pop()
        self._rows[rid] = row
        self._req_ids[row] = rid
        self.live[row] = True
        self.token_ids[row, : len(prompt)] = prompt
        self.token_ids[row, len(prompt) : known] = outputs
        self.num_tokens[row] = self.prefill_len[row] = known
        self.prompt_len[row] = len(prompt)
        self.num_computed_tokens[row] = request.num_computed_tokens
        self.last_sampled_token[row] = outputs[-1] if len(outputs) else -1
        if request.lora_id:
            self.lora_id[row] = request.lora_id
            self.loras.add(request.lora_id, rid)
        if has_extras(request):
            self.rope_delta[row] = request.mrope_delta
            self.encoder_len[row] = request.encoder_len
            self.extras.set(row, request, self.token_ids.shape)
        for table, ids in zip(self.block_tables, blocks, strict=True):
            table.start(row, ids)
        self.sampling.set(row, request.sampling_params, self.vocab_size)
        if self.parked:
            self.parked.pop(rid, None)
        for watcher in self.watchers:
            watcher.filled(row)
        return row

    def add_requests(self, new: NewRequests) -> I32:
        """Admit many requests at once and return their rows, int32 [N]. All or nothing; errors as in `add_request`."""
        rows = np.empty(len(new.req_ids), np.int32)
        if new.lora_id is not None or not self._admit(new, rows, new.sampling):
            new.check_columns()
            if not self._admit(new, rows):
                return self._add_one_by_one(new)
            if new.lora_id is not None:
                self.lora_id[rows] = new.lora_id
                for rid, lora_id in zip(new.req_ids, new.lora_id.tolist(), strict=True):
                    self.loras.add(lora_id, rid)
            if new.sampling is not None:
                self.sampling.set_columns(rows, new.sampling)
        if self.parked:
            for rid in new.req_ids:
                self.parked.pop(rid, None)
        for watcher in self.watchers:
            for row in rows.tolist():
                watcher.filled(row)
        return rows

    def _admit(
        self,
        new: NewRequests,
        rows: I32,
        sampling: Mapping[str, npt.NDArray[np.generic]] | None = None,
    ) -> bool:
        """Whether the native core admitted them; False, with nothing changed, without it, or where it refuses.

        sampling: columns for it to write as well; it refuses values that would have to be converted.
        """
        if self.core is None:
            return False
        version = self.sampling.version + (sampling is not None)
        try:
            done = bool(
                self.core.admit(
                    new.req_ids,
                    rows,
                    new.token_ids,
                    new.num_tokens,
                    new.prompt_len,
                    new.num_computed_tokens,
                    new.block_ids,
                    new.num_blocks,
                    self.content_ids.take(len(rows)),
                    sampling,
                    version,
                )
            )
        except TypeError:  # something that is no array
            return False
        if done:
            self.sampling.version = version
        return done

    def _add_one_by_one(self, new: NewRequests) -> I32:
        added: list[str] = []
        try:
            for request in new.split():
                self.add_request(request)
                added.append(request.req_id)
        except Exception:
            for req_id in reversed(added):  # so that the free rows are as they were
                self.remove_request(req_id)
            raise
        rows = np.array([self._rows[req_id] for req_id in added], np.int32)
        if new.sampling is not None:
            self.sampling.set_columns(rows, new.sampling)
        return rows

    def remove_rows(self, rows: I32) -> None:
        """Free these rows. CapacityError for a row that holds no request; then nothing changes."""
        rows = flat_int32(None, "rows", rows)
        if not self._remove(rows):
            for req_id in dict.fromkeys(self.req_ids_of(rows)):
                self.remove_request(req_id)

    def _remove(self, rows: I32) -> bool:
        """Whether the native core removed them; False, with nothing changed, without it, or where it refuses."""
        if self.core is None or self.loras or self.extras or self.watchers:  # what the native core does not know
            return False
        if not self.core.remove(rows, self.content_ids.take(len(rows)), self.sampling.version + 1):
            return False
        self.sampling.were_reset(rows.tolist() if self.sampling.params else ())
        return True

    def remove_request(self, req_id: str) -> bool:
        """Free the request's row, or forget a parked one. False for an unknown id, so removing twice is harmless."""
        row = self._rows.get(req_id)
        if row is None:
            return self.parked.pop(req_id, None) is not None
        if self._remove(np.array([row], np.int32)):
            return True
        del self._rows[req_id]
        for watcher in self.watchers:
            watcher.freed(row)
        self._req_ids[row] = None
        self.live[row] = False
        self.row_generation[row] += 1
        self.num_tokens[row] = self.num_computed_tokens[row] = self.num_placeholders[row] = 0
        self.prompt_len[row] = self.prefill_len[row] = 0
        self.last_sampled_token[row] = -1
        if lora_id := int(self.lora_id[row]):
            self.loras.drop(lora_id, req_id)
            self.lora_id[row] = 0
        if self.extras.clear(row):
            self.rope_delta[row] = self.encoder_len[row] = 0
        for table in self.block_tables:
            table.clear(row)
        self.sampling.set(row, None, self.vocab_size)
        self._free.append(row)
        return True

    # -- blocks ------------------------------------------------------------------------------------------------

    def append_blocks(self, req_id: str, block_ids: Sequence[TokenIds]) -> None:
        """Append newly allocated blocks, one list a group. CapacityError past a row's end, and no group changes."""
        row = self.row_of(req_id)
        held = [int(t.num_blocks[row]) for t in self.block_tables]
        for table, ids in zip(self.block_tables, self._check_blocks(req_id, block_ids, held), strict=True):
            table.append(row, ids)

    def append_blocks_rows(self, rows: I32, block_ids: I32, group: int = 0) -> None:
        """One new block for each entry of rows: table[rows[i], num_blocks[rows[i]]++] = block_ids[i], i ascending.

        Nothing changes on an error: CapacityError for a row that is full or holds no request, RequestError for what is
        no block.
        """
        rows, block_ids = flat_int32(None, "rows", rows), flat_int32(None, "block_ids", block_ids)
        if self.core is not None and self.core.append(rows, block_ids, group):
            return
        if not 0 <= group < len(self.block_tables):
            raise CapacityError(f"group {group}: there are {len(self.block_tables)} KV groups, counted from 0")
        if len(rows) != len(block_ids):
            raise RequestError(
                None, "block_ids", f"{len(block_ids)} blocks", f"there are {len(rows)} rows", "Give one each."
            )
        if len(block_ids) and block_ids.min() < 0:
            raise RequestError(None, "block_ids", int(block_ids.min()), "is no block", "Blocks are 0 or more.")
        self.req_ids_of(rows)
        table = self.block_tables[group]
        order = np.argsort(rows, kind="stable")
        new = np.bincount(rows, minlength=self.max_num_reqs)
        if (table.num_blocks + new > table.width).any():
            row = int(np.argmax(table.num_blocks + new > table.width))
            raise CapacityError(
                f"request {self._req_ids[row]!r}: group {group} holds {table.width} blocks a row, "
                f"enough for max_model_len = {self.max_model_len}; it has {int(table.num_blocks[row])} "
                f"and {int(new[row])} more do not fit"
            )
        nth = np.arange(len(rows)) - (np.cumsum(new) - new)[rows[order]]  # of a row named more than once
        table.table[rows[order], table.num_blocks[rows[order]] + nth] = block_ids[order]
        table.num_blocks[:] += new.astype(np.int32)

    # -- after the step ----------------------------------------------------------------------------------------

    def advance(self, batch: InputBatch) -> None:
        """Count a step as done before its samples are known, so that the next one can be prepared. See
        `foreword.batch.prepare.commit`.
        """
        _commit.advance(self, batch)

    def commit(self, batch: InputBatch, sampled: Mapping[str, Sequence[int]] | I32) -> None:
        """Record what a step computed and sampled. See `foreword.batch.prepare.commit`."""
        _commit.commit(self, batch, sampled)

    # -- moving rows, for backends that want dense ones ----------------------------------------------------------

    def condense(self) -> list[tuple[int, int]]:
        """Make the live rows dense: 0 … len(self) − 1. While there is a hole below the last live row, the last live
        row moves into the lowest hole. Returns the moves (from, to) in the order made.

        Batches prepared before can no longer be committed: commit first.
        """
        moves: list[tuple[int, int]] = []
        last = self.max_num_reqs - 1
        for hole in sorted(self._free):
            while last > hole and not self.live[last]:
                last -= 1
            if last <= hole:
                break
            self._exchange(last, hole)
            moves.append((last, hole))
        if moves:
            self._free[:] = [row for row in range(self.max_num_reqs - 1, -1, -1) if not self.live[row]]
        return moves

    def swap_rows(self, first: int, second: int) -> None:
        """Exchange two rows, live or free. Batches prepared before can no longer be committed."""
        for row in (first, second):
            if not 0 <= row < self.max_num_reqs:
                raise CapacityError(f"row {row}: must be in [0, max_num_reqs = {self.max_num_reqs})")
        if first == second:
            return
        self._exchange(first, second)
        self._free[:] = [{first: second, second: first}.get(row, row) for row in self._free]

    def row_arrays(self) -> list[AnyArray]:
        """Every array whose first axis is the row: what a row is made of, and so what moves with it."""
        arrays: list[AnyArray] = [
            self.num_tokens,
            self.num_computed_tokens,
            self.num_placeholders,
            self.prompt_len,
            self.prefill_len,
            self.last_sampled_token,
            self.lora_id,
            self.rope_delta,
            self.encoder_len,
            self.row_generation,
            self.live,
            *self.sampling.arrays(),
            *self.extras.arrays(),
        ]
        for table in self.block_tables:
            arrays += [table.table, table.num_blocks, table.content_id]
        return arrays

    def _exchange(self, a: int, b: int) -> None:
        tokens = int(max(self.num_tokens[a], self.num_tokens[b]))
        for array in (*self.row_arrays(), self.token_ids[:, :tokens]):
            array[[a, b]] = array[[b, a]]
        self.extras.exchange(a, b)
        self.sampling.exchange(a, b)
        for watcher in self.watchers:
            watcher.exchanged(a, b)
        ids = self._req_ids
        ids[a], ids[b] = ids[b], ids[a]
        for row in (a, b):
            rid = ids[row]
            if rid is not None:
                self._rows[rid] = row
        self.layout_version += 1

    # -- checks ------------------------------------------------------------------------------------------------

    def _prompt_ids(self, request: NewRequest) -> I32:
        if request.prompt_token_ids is None:
            if request.prompt_embeds is None:
                raise RequestError(
                    request.req_id, "prompt_token_ids", None, "is missing", "Give the prompt's token ids or embeddings."
                )
            shape = shape_of(request.prompt_embeds)
            if len(shape) != 2 or not shape[0]:
                raise RequestError(
                    request.req_id, "prompt_embeds", shape, "must be [tokens, hidden], with a token at least",
                    "Give one vector a position.",
                )  # fmt: skip
            return np.zeros(shape[0], np.int32)
        ids = self.check_token_ids(request.req_id, "prompt_token_ids", request.prompt_token_ids)
        if not len(ids):
            raise RequestError(request.req_id, "prompt_token_ids", [], "is empty", "Give at least one token.")
        return ids

    def check_token_ids(self, rid: str, field: str, ids: TokenIds) -> I32:
        """ids as int32 [n]; RequestError for one that the vocabulary has not."""
        out = flat_int32(rid, field, ids)
        if out.size and (out.min() < 0 or out.max() >= self.vocab_size):
            i = int(np.argmax((out < 0) | (out >= self.vocab_size)))
            raise RequestError(
                rid, f"{field}[{i}]", int(out[i]), f"is no token id, the vocabulary has {self.vocab_size}", "Remove it."
            )
        return out

    def _check_blocks(self, rid: str, block_ids: Sequence[TokenIds], existing: Sequence[int]) -> list[I32]:
        given = len(block_ids) if hasattr(block_ids, "__len__") else 0
        if given != len(self.block_tables):
            raise RequestError(
                rid, "block_ids", f"{given} lists", f"the model has {len(self.block_tables)} KV groups",
                "Give one list of blocks per group.",
            )  # fmt: skip
        blocks = [flat_int32(rid, f"block_ids[{g}]", ids) for g, ids in enumerate(block_ids)]
        for g, (table, ids, held) in enumerate(zip(self.block_tables, blocks, existing, strict=True)):
            if ids.size and ids.min() < 0:
                raise RequestError(rid, f"block_ids[{g}]", int(ids.min()), "is no block", "Blocks are 0 or more.")
            if held + len(ids) > table.width:
                raise CapacityError(
                    f"request {rid!r}: group {g} holds {table.width} blocks a row, enough for max_model_len = "
                    f"{self.max_model_len}; it has {held} and was given {len(ids)} more"
                )
        return blocks


def _unaliased_rows(rows: int, columns: int) -> I32:
    """int32 zeros [rows, columns] whose rows do not start a power of two apart: a decode step touches one cache line of
    each row, and at 16 KiB apart a thousand of them would share a handful of cache sets.
    """
    line = 16
    return np.zeros((rows, (columns // line + 2) * line), np.int32)[:, :columns]


def flat_int32(rid: str | None, field: str, ids: TokenIds) -> I32:
    """ids as int32 [n]; RequestError where they are not integers that fit."""
    array = as_int32(ids)
    if array is None or array.ndim != 1:
        raise RequestError(
            rid, field, ids, "must be a flat list of integers that fit int32", "Pass token or block ids."
        )
    return array
