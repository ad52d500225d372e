"""Attention by the device's kernels for executors whose steps are prepared on the host."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import torch

from foreword.arrays import I32, I64
from foreword.batch import InputBatch
from foreword.device.api import DeviceApi, Tensor
from foreword.device.attention import DeviceAttention, LayerCache
from foreword.device.layout import GROUP, GROUP_SIZE, HEADER, RECORD, GroupRecord, PacketHeader, PlanArrays, RowLayout
from foreword.executors.torch.attention import AttentionCall, GatheredAttention, PagedAttention
from foreword.executors.torch.cache import PagedCache
from foreword.executors.torch.shard import Shard

_DOT = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_NUM_COMPUTED = RECORD.index("num_computed_tokens")
_TABLES_AT = _NUM_COMPUTED + 1  # in a record: its block tables, one after the other


def paged_attention(cache: PagedCache, shard: Shard | None = None) -> PagedAttention:
    """Return the attention of a cache, by kernels on a GPU if Triton is installed. shard: see `GatheredAttention`."""
    if cache.device.type != "cuda" or find_spec("triton") is None:
        return GatheredAttention(cache, shard)
    from foreword.device.cuda import CudaDevice

    return KernelAttention(cache, CudaDevice(cache.device), shard)


def dot_type(dtype: torch.dtype, device: torch.device) -> str:
    """Return the type of the operands of products; float32 in Triton's interpreter, which has no sums of bfloat16."""
    return _DOT[dtype] if device.type == "cuda" else "float32"


class KernelAttention(GatheredAttention):
    """`PagedAttention` that reads the blocks where they are, in one launch per layer. One copy per step tells the
    kernels the requests and their block tables. Biases, chosen keys, tokens that see later ones, and positions that are
    spread over ranks are computed as `GatheredAttention` does.
    """

    def __init__(self, cache: PagedCache, api: DeviceApi, shard: Shard | None = None) -> None:
        super().__init__(cache, shard)
        self.api, self.dot = api, dot_type(cache.dtype, cache.device)
        self._rows: _StepRows | None = None
        self._is_causal = True
        self._layers: dict[tuple[int, ...], DeviceAttention] = {}

    def begin(self, batch: InputBatch, last_seen: I64 | None = None) -> None:
        """See `PagedAttention.begin`."""
        super().begin(batch, last_seen)
        self._is_causal = last_seen is None
        if self._rows is None or not self._rows.holds(batch):
            self._rows, self._layers = _StepRows(batch, self.api), {}
        self._rows.begin(batch)

    def attend(self, call: AttentionCall, queries: torch.Tensor) -> torch.Tensor:
        """See `PagedAttention.attend`."""
        rows, layer, of = self._rows, call.layer, self.cache.layers[call.layer]
        has_own_mask = call.bias is not None or call.slopes is not None or call.is_chosen
        if has_own_mask or not self._is_causal or self._current.is_spread(of.group):
            return super().attend(call, queries)
        assert rows is not None, "begin comes before attend"
        key = queries.shape[1], of.num_kv_heads, of.key_dim, of.value_dim, of.group
        attention = self._layers.get(key)
        if attention is None:
            heads, kv_heads, dim, value_dim, group = key
            attention = self._layers[key] = DeviceAttention(
                rows, heads=heads, kv_heads=kv_heads, dim=dim, value_dim=value_dim, group=group, dot=self.dot
            )
        out = queries.new_empty(*queries.shape[:2], of.value_dim)
        attention.attend(
            queries.contiguous(), LayerCache(self.cache.keys[layer], self.cache.values[layer]), out,
            num_tokens=len(queries), num_reqs=rows.num_reqs, scale=call.scale,
            window=call.chunk or call.window, chunked=call.chunk is not None,
            softcap=call.softcap or 0.0, sinks=call.sinks,
        )  # fmt: skip
        return out


class _StepRows:
    """The kernels' view of the requests of a step, in batch order: `AttendedRows` in one piece of memory.

    It has a packet without changes, then a record of each request with its block tables.
    """

    def __init__(self, batch: InputBatch, api: DeviceApi) -> None:
        states = batch.states
        self.api, self.num_reqs, self._states = api, 0, states
        self.tensors: dict[str, Tensor] = {}  # keys are written by torch
        self.max_num_batched_tokens = self.max_num_keys = 0
        R, tables = states.max_num_reqs, states.block_tables
        padded = PacketHeader(num_reqs_padded=R)
        records_at = sum(PlanArrays.sizes(padded))
        ends = np.cumsum([_TABLES_AT, *(table.width for table in tables)]).tolist()
        record_size, size = ends[-1], records_at + R * ends[-1]
        groups = np.zeros((len(tables), GROUP_SIZE), np.int32)
        for g, table in enumerate(tables):
            groups[g, : len(GROUP)] = GroupRecord(
                table_at=records_at + ends[g], num_blocks_entry=0, width=record_size,
                block_size=table.group.block_size, tokens_per_block=table.tokens_per_block,
            )  # fmt: skip
        self._ends = ends
        self.layout = RowLayout(size, records_at, record_size, groups, records_at)
        staged = api.pinned(size)
        self._staged = staged
        self._host: I32 = staged.numpy()
        self._plan = PlanArrays.of(self._host, padded)
        self.arena = self.packet = api.zeros((size,), "int32")
        self.groups = api.zeros(groups.shape, "int32")
        pinned_groups = api.pinned(groups.size)
        pinned_groups.numpy()[:] = groups.ravel()
        api.copy(self.groups.view(-1), pinned_groups)

    def holds(self, batch: InputBatch) -> bool:
        """Return whether the batch is of the same states."""
        return batch.states is self._states

    def begin(self, batch: InputBatch) -> None:
        """Copy the step to the device. The step before has ended."""
        self.num_reqs = B = batch.num_reqs
        self.max_num_keys = batch.max_seq_len
        R, T, at, plan = self._states.max_num_reqs, batch.num_tokens, self.layout.records_at, self._plan
        plan.header[: len(HEADER)] = PacketHeader(num_reqs=B, num_tokens=T, num_reqs_padded=R, num_tokens_padded=T)
        plan.rows[:B] = np.arange(B)
        plan.query_start[: B + 1] = batch.query_start_loc[: B + 1]
        end = at + B * self.layout.record_size
        records = self._host[at:end].reshape(B, -1)
        records[:, _NUM_COMPUTED] = batch.num_computed_tokens
        for g, table in enumerate(batch.block_table):
            records[:, self._ends[g] : self._ends[g + 1]] = table[:B]
        self.api.copy(self.arena[:end], self._staged[:end])
