"""The layout of rows in the device's memory, and of a step in its packet. All entries are int32.

Tokens [R, M], an array of its own, which may be in the host's memory and have more than 2^31 entries

    `RequestStates.token_ids`; ~id where the position is a prompt embedding, whose token id counts for nothing

Arena

    records  [R, record]  of each row: progress, sampling parameters (floats as bits), adapter and rotary offset, blocks
                          held per KV group
    tables   [R, K]       of each KV group, `BlockTable.table`; entries past the blocks held hold anything

Packet, for B requests padded to Bp, T tokens, D drafts

    header       [16]      `PacketHeader`
    rows         [Bp]      row of each request; ~row for a cancelled one; padding 0
    query_start  [Bp + 1]  padding T
    cu_drafts    [Bp + 1]  drafts of the requests before; padding D
    owner        [T]       request of each token
    draft_ids    [D]       −1: not known, read as token 0
    runs         [n, 3]    (to, length, from): arena[to : to + length] = packet[from : from + length]; to = ~row: the
                           tokens of this row from position packet[from − 1] on, in place of entries of the arena
    payload                what the runs read

native/batch/packet.cpp writes packets, `PlanArrays` has their parts on the host, and
`foreword.device.kernels.places` on the device.
"""

from __future__ import annotations

from collections import namedtuple
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from foreword.arrays import I32
from foreword.batch import RequestStates
from foreword.batch.step.layout import FIELDS, GATHERED, Field
from foreword.errors import ConfigError
from foreword.integers import INT32_MAX


class PacketHeader(NamedTuple):
    """The first entries of a packet."""

    num_reqs: int = 0
    num_tokens: int = 0
    num_reqs_padded: int = 0
    num_tokens_padded: int = 0
    num_logits: int = 0
    num_draft_tokens: int = 0
    num_runs: int = 0
    runs_at: int = 0


HEADER = PacketHeader._fields
HEADER_SIZE = 16
NO_TOKEN = -2
"""The value of the first sample of a request whose logits give no token."""

PROGRESS = ("num_tokens", "num_computed_tokens", "prefill_len", "prompt_len")
SAMPLING = (
    "needs",
    "temperature",
    "top_p",
    "min_p",
    "top_k",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "seed",  # two entries, the low one first
)
INPUTS = ("lora_id", "rope_delta")
"""The fields of a request that are sent whenever they differ from the device's."""

RECORD = (*PROGRESS, *SAMPLING, "seed_high", *INPUTS)
"""The entries of a row's record. The blocks held, one entry per KV group, follow."""


class GroupRecord(NamedTuple):
    """The record of a KV group that kernels read. Window 0 means no sliding window, rank −1 that the group has no
    slots.
    """

    table_at: int
    num_blocks_entry: int
    width: int
    block_size: int
    tokens_per_block: int
    cp_size: int = 1
    cp_rank: int = 0
    cp_interleave: int = 1
    sliding_window: int = 0


GROUP = GroupRecord._fields
GROUP_SIZE = 16

DEVICE_FIELDS = {
    **{name: field for name, field in FIELDS.items() if field.on_device},
    "rope_positions": Field("rope_positions", ("Tp",), "int64", 0),  # positions + rope_delta
}
"""The tensors that the kernels make: the tensors of the step's table that are on the device, and the rotary positions.
"""

PREPARED = tuple(name for name in DEVICE_FIELDS if name not in GATHERED)
"""The tensors that `prepare_step` makes; `gather_tables` makes the others."""

StepTensors = namedtuple("StepTensors", PREPARED)  # type: ignore[misc]  # mypy wants the names written here
"""A value of each of `PREPARED`, by name. The kernel takes its pointers as one such argument."""


class PlanArrays(NamedTuple):
    """The parts of a packet before its runs, as views of host memory."""

    header: I32
    rows: I32
    query_start: I32
    cu_drafts: I32
    owner: I32
    draft_ids: I32

    @staticmethod
    def sizes(step: PacketHeader) -> tuple[int, ...]:
        """Return the number of entries of each part."""
        Bp = step.num_reqs_padded
        return HEADER_SIZE, Bp, Bp + 1, Bp + 1, step.num_tokens, step.num_draft_tokens

    @classmethod
    def of(cls, packet: I32, step: PacketHeader) -> PlanArrays:
        """Return the parts of the packet of a step with these numbers."""
        sizes = cls.sizes(step)
        return cls(*(packet[end - size : end] for end, size in zip(accumulate(sizes), sizes, strict=True)))


class RowLayout(NamedTuple):
    """The offsets of the tables in the arena of some states.

    size: the number of entries. records_at: the first entry of the records. record_size: the entries of a record.
    groups: int32 [G, GROUP_SIZE], the `GroupRecord` of each KV group.
    max_packet: the entries of a packet that can hold any plan and the changes of at least one row.
    """

    size: int
    records_at: int
    record_size: int
    groups: I32
    max_packet: int

    @classmethod
    def of(cls, states: RequestStates, max_num_batched_tokens: int) -> RowLayout:
        """Raise ConfigError for records and block tables that one arena of 2^31 entries does not hold."""
        R, M, tables = states.max_num_reqs, states.max_model_len, states.block_tables
        record_size = -(-(len(RECORD) + len(tables)) // 16) * 16
        groups = np.zeros((len(tables), GROUP_SIZE), np.int64)
        end, changes = R * record_size, 4 * 3 + 2 + record_size + M
        for g, table in enumerate(tables):
            cp, group = table.context_parallel, table.group
            spread = (cp.size, cp.rank, cp.interleave) if cp is not None else (1, -1 if group.recurrent else 0, 1)
            groups[g, : len(GROUP)] = GroupRecord(
                end, len(RECORD) + g, table.width, group.block_size, table.tokens_per_block, *spread,
                group.sliding_window or 0,
            )  # fmt: skip
            end += R * table.width
            changes += 7 + table.width
        if end > INT32_MAX:
            raise ConfigError(
                f"max_num_seqs={R}, max_model_len={M}: the block tables and records of the rows have {end} entries on "
                f"the device, the most is {INT32_MAX}; use fewer or shorter rows, or a larger block_size"
            )
        largest = PacketHeader(
            num_reqs_padded=R, num_tokens=max_num_batched_tokens, num_draft_tokens=R * states.max_num_draft_tokens
        )
        plan = sum(PlanArrays.sizes(largest))
        return cls(end, 0, record_size, groups.astype(np.int32), plan + changes + 16 * R)
