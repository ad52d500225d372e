"""A mirror of the rows of states on a device, and the tensors of steps that are made there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from foreword.arrays import I64, AnyArray
from foreword.batch import BatchTensors, InputBuffers, RequestStates
from foreword.batch.step.layout import EXTENTS, GATHERED, Scalars, shape_of
from foreword.device import layout
from foreword.device.api import DeviceApi, Tensor
from foreword.device.layout import DEVICE_FIELDS, PREPARED, RowLayout, StepTensors
from foreword.device.ring import PacketRing, PacketSlot
from foreword.errors import ConfigError, PlanError
from foreword.native import available, native

_BLOCK = 128
_APPLY_PROGRAMS = 64
MOST_DEVICE_TOKENS = 1 << 28
"""The largest number of entries of a token table that is in the device's memory by default: 1 GiB."""

TokenTable = Literal["auto", "device", "host"]


class DeviceRows:
    """A mirror of ``states`` in device memory. The host's states are authoritative; they are only read here.

    A step is `send`, `prepare`, the model, `commit`, in this order in the device's stream; then the same step is
    committed to the states, with the same samples. `send` finds the data that the device lacks by the numbers that the
    states replace with every change: new requests, new blocks, changed blocks, changed sampling parameters. A row whose
    progress differs from every result of its last step, as after a failure between the two commits, is sent again.

    tensors: name → tensor of the device, as large as any step needs, at a stable address:
        those of `foreword.batch.InputBatch` by the same names; slot_mapping is [G, max_num_batched_tokens];
        lora_tokens: int32 [T], the adapter of each token; rope_positions: int64 [T], position + rope_delta;
        block_table, num_blocks: one per KV group, made by `gather`;
        sampled: int32 [R · (1 + max_num_draft_tokens)], what `commit` reads.
    max_num_keys: the largest number of keys of a request.
    sampled: the same as ``tensors["sampled"]``. arena, tokens, packet: int32, see `foreword.device.layout`.
    """

    def __init__(
        self,
        states: RequestStates,
        api: DeviceApi,
        *,
        max_num_batched_tokens: int,
        depth: int = 2,
        token_table: TokenTable = "auto",
    ) -> None:
        """Allocate the rows for ``depth`` steps in flight. The memory of the tokens, 4 · R · M bytes, is on the device
        or, with ``token_table``, on the host, where kernels read it in place; auto chooses the host above
        `MOST_DEVICE_TOKENS`.

        Raise ConfigError without the native module, and if records and block tables exceed an arena. Raise MemoryError
        if the memory does not suffice.
        """
        if not available():
            raise ConfigError("a device needs the native module, which writes the packets; run `pip install .`")
        self.states, self.api, self.max_num_batched_tokens = states, api, max_num_batched_tokens
        self.layout = place = RowLayout.of(states, max_num_batched_tokens)
        self._max_packet = place.max_packet
        self.width, self.max_num_keys = 1 + states.max_num_draft_tokens, states.max_model_len
        R, T, G = states.max_num_reqs, max_num_batched_tokens, len(states.block_tables)
        self.arena, self.packet = api.zeros((place.size,), "int32"), api.zeros((place.max_packet,), "int32")
        self.tokens = _token_table(states, api, token_table)
        self.groups = api.zeros(place.groups.shape, "int32")
        staged = api.pinned(place.groups.size)
        api.to_host(staged)[:] = place.groups.ravel()
        api.copy(self.groups.reshape(-1), staged)
        self.tensors: dict[str, Any] = {"sampled": api.zeros((R * self.width,), "int32")}
        for name in PREPARED:
            field = DEVICE_FIELDS[name]
            shape = shape_of(field, states, T)
            self.tensors[name] = api.zeros((G, *shape) if field.per_group else shape, field.dtype)
        self.max_num_logits = len(self.tensors["logits_indices"])
        self.sampled = self.tensors["sampled"]
        self.ring = PacketRing(api, depth=depth, packet_size=place.max_packet, sampled_size=R * self.width)
        self._arguments = (
            self.arena, self.tokens, self.packet, self.groups, states.max_model_len, place.records_at,
            place.record_size, T, self.max_num_logits,
        )  # fmt: skip
        self._outputs = StepTensors(*(self.tensors[name] for name in PREPARED))
        cp = states.context_parallel
        self._ranks = (cp.size, cp.rank, cp.interleave) if cp is not None else (1, 0, 1)
        self._core = core = native.PacketCore(
            states.native_arrays,
            states.sampling.stamp,
            [getattr(states.sampling, name) for name in layout.SAMPLING],
            [getattr(states, name) for name in layout.INPUTS],
            T,
            place.records_at,
            place.record_size,
        )
        for table, values in zip(states.block_tables, place.groups[:, : len(layout.GROUP)].tolist(), strict=True):
            group = layout.GroupRecord(*values)
            held_at = place.records_at + group.num_blocks_entry
            core.add_table(table.table, table.num_blocks, table.content_id, group.table_at, held_at)
        core.forget()
        self._row_order, self._has_embeddings = states.layout_version, False

    def forget(self) -> None:
        """Send every row again with the next packet. Call it after an error of the device."""
        self._core.forget()

    def follow_host(self) -> None:
        """Take the tokens and the progress of a step's rows from the states, with every packet: for steps that
        `RequestStates.commit` alone commits. Steps cannot be sent ahead of the samples that they read.
        """
        self._core.follows_host = True

    def known_rows(self) -> I64:
        """Return `RequestStates.row_generation` of the rows that the device has, −1 for others, int64 [R]."""
        moved = self.states.layout_version != self._row_order
        known: I64 = np.array(self._core.generations(), np.int64)
        return np.full_like(known, -1) if moved else known

    def send(self, buffers: InputBuffers) -> PacketSlot:
        """Copy the packet of the step in these buffers to the device: its current plan, and the changes since the
        packet before.

        Return the slot of the step; call its `PacketSlot.launched` after the last copy of the step. Changes that
        exceed a packet, such as many long requests that arrive at once, take several copies, each after the one before.
        Raise ConfigError for buffers of other states, and for larger ones than the tensors were made for.
        """
        if buffers.states is not self.states or buffers.max_num_batched_tokens > self.max_num_batched_tokens:
            raise self._refused(buffers)
        if not self._has_embeddings and (mask := self.states.extras.is_embedding) is not None:
            self._core.set_embeddings(mask)
            self._has_embeddings = True
        if self.states.layout_version != self._row_order:  # rows moved
            self._core.forget()
            self._row_order = self.states.layout_version
        source = buffers.attach(_step_buffers, _step_buffers)
        slot = self.ring.acquire()
        while True:
            length = self._core.pack(source, slot.packet_array)
            size = min((abs(length) + 255) & -256, self._max_packet)
            self.api.copy(*slot.packet_to(self.packet, size))
            if length > 0:
                return slot
            self.apply()
            slot.open()  # waits: another slot may hold samples that were not read

    def _refused(self, buffers: InputBuffers) -> ConfigError:
        if buffers.states is not self.states:
            return ConfigError("buffers: are of other states than the rows on the device; make a DeviceRows for each")
        return ConfigError(
            f"buffers: hold steps of {buffers.max_num_batched_tokens} tokens, the rows on the device steps of "
            f"{self.max_num_batched_tokens}; make DeviceRows with the max_num_batched_tokens of the largest buffers"
        )

    # -- launches, which may be captured -------------------------------------------------------------------------------

    def apply(self) -> None:
        """Launch K0: apply the packet's changes to the rows."""
        self.api.launch(
            "apply_runs", (_APPLY_PROGRAMS,), self.arena, self.tokens, self.packet, self.states.max_model_len, BLOCK=256
        )

    def prepare(self, num_tokens: int, num_reqs: int) -> None:
        """Launch K0 and K1: make every tensor of a step of these padded sizes."""
        self.apply()
        programs = -(-num_tokens // _BLOCK)
        grid = (programs - (-(num_reqs + 1) // _BLOCK),)
        self.api.launch(
            "prepare_step", grid, *self._arguments, programs, self._outputs, *self._ranks,
            G=len(self.states.block_tables), WIDTH=self.width, BLOCK=_BLOCK,
        )  # fmt: skip

    def gather(self, num_reqs: int) -> None:
        """Launch K2: gather the block tables in batch order, for kernels that do not read the rows. The first call
        allocates.
        """
        states, place = self.states, self.layout
        tables = states.block_tables
        if "block_table" not in self.tensors:
            for field in (DEVICE_FIELDS[name] for name in GATHERED):
                shapes = (shape_of(field, states, self.max_num_batched_tokens, group=g) for g in range(len(tables)))
                self.tensors[field.name] = [self.api.zeros(shape, field.dtype) for shape in shapes]
        for g, table in enumerate(tables):
            self.api.launch(
                "gather_tables", (max(num_reqs, 1), -(-table.width // _BLOCK)), self.arena, self.packet, self.groups, g,
                place.records_at, place.record_size, table.null_block, self.tensors["block_table"][g],
                self.tensors["num_blocks"][g], BLOCK=_BLOCK,
            )  # fmt: skip

    def commit(self, num_reqs: int) -> None:
        """Launch K6: commit ``tensors["sampled"]``, read as [num_reqs, 1 + max_num_draft_tokens], to the rows."""
        place = self.layout
        self.api.launch(
            "commit_samples", (-(-max(num_reqs, 1) // _BLOCK),), self.arena, self.tokens, self.packet,
            self.tensors["sampled"], self.states.max_model_len, place.records_at, place.record_size,
            WIDTH=self.width, BLOCK=_BLOCK,
        )  # fmt: skip

    # -- reading back, for tests and checks ---------------------------------------------------------------------------

    def read_back(self, buffers: InputBuffers) -> dict[str, AnyArray | list[AnyArray]]:
        """Wait for the device, and return `views` as NumPy arrays."""
        views = self.views(buffers)
        return {
            name: list(map(self._copy_of, view)) if isinstance(view, list) else self._copy_of(view)
            for name, view in views.items()
        }

    def views(self, buffers: InputBuffers) -> dict[str, Tensor | list[Tensor]]:
        """Return the tensors that the device prepared last, of the sizes of the step in ``buffers``: a list of one per
        KV group of slot_mapping, and of block_table and num_blocks where `gather` ran.
        """
        step = Scalars(*buffers.scalars.tolist())
        found: dict[str, Tensor | list[Tensor]] = {}
        for name, values in self.tensors.items():
            if name == "sampled" or (name == "dcp_local_seq_lens" and self.states.context_parallel is None):
                continue
            field = DEVICE_FIELDS[name]
            extent, per_group = EXTENTS[field.shape[0]], field.per_group
            size = getattr(step, extent.scalar) + extent.extra
            found[name] = [v[:size] for v in values] if per_group else values[:size]
        return found

    def _copy_of(self, x: Tensor) -> AnyArray:
        return np.array(self.api.to_host(x))

    def check(self, batch: BatchTensors) -> None:
        """Compare the tensors that the device prepared last with those of the host's batch, which must be resolved.
        Raise PlanError for the first that differs.
        """
        compare(self.read_back(batch.buffers), batch)


def _token_table(states: RequestStates, api: DeviceApi, place: TokenTable) -> Tensor:
    """Return the token table, int32 [R · M], in memory of the device or of the host."""
    R, M = states.max_num_reqs, states.max_model_len
    if place == "auto":
        place = "host" if R * M > MOST_DEVICE_TOKENS else "device"
    try:
        return (api.zeros if place == "device" else api.mapped)((R * M,), "int32")
    except MemoryError:
        other = "; use token_table='host'" if place == "device" else ""
        raise MemoryError(
            f"max_num_seqs={R}, max_model_len={M}: the tokens of the rows take {4 * R * M} bytes of the {place}'s "
            f"memory, which are not free{other or '; use fewer or shorter rows'}"
        ) from None


def compare(found: Mapping[str, AnyArray | list[AnyArray]], batch: BatchTensors) -> None:
    """Raise PlanError for the first tensor of `DeviceRows.read_back` that differs from the host's resolved batch."""
    for name, values in found.items():
        if name in GATHERED and not batch.is_gathered:
            continue
        expected = _expected(batch, name)
        pairs = zip(values, expected, strict=True) if isinstance(values, list) else [(values, expected)]
        for g, (mine, theirs) in enumerate(pairs):
            if (differs := mine != theirs).any():
                at = tuple(np.argwhere(differs)[0])
                raise PlanError(
                    "the device prepared another step than the host", step=batch.step,
                    tensor=f"{name}[{g}]" if isinstance(values, list) else name, index=int(at[0]),
                    expected=theirs[at].item(), got=mine[at].item(),
                )  # fmt: skip


def _expected(batch: BatchTensors, name: str) -> AnyArray | tuple[AnyArray, ...]:
    """Return the host's tensor of this name."""
    column = {"lora_tokens": batch.states.lora_id, "rope_positions": batch.states.rope_delta}.get(name)
    if column is None:
        expected: AnyArray | tuple[AnyArray, ...] = getattr(batch, name)
        return expected
    of_tokens = np.zeros(batch.num_tokens_padded, column.dtype)
    of_requests = np.where(batch.row_generation >= 0, column[batch.idx_mapping], 0)
    of_tokens[: batch.num_tokens] = of_requests[batch.req_indices]
    return of_tokens if name == "lora_tokens" else batch.positions + of_tokens


def _step_buffers(buffers: InputBuffers) -> native.StepBuffers:
    return native.StepBuffers({name: array for name, array in buffers.arrays.items() if not isinstance(array, tuple)})
