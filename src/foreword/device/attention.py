"""Attention layers over the rows on a device: launches of the kernels K3 and K4, with the sizes that they take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from foreword.device.api import DeviceApi, Tensor
from foreword.device.layout import GROUP, RowLayout
from foreword.errors import ConfigError


def _power_of_two(n: int, least: int = 16) -> int:
    return max(least, 1 << (n - 1).bit_length())


class LayerCache(NamedTuple):
    """Keys and values [num_blocks, block_size, kv_heads, dim or value_dim] of one layer, blocks any distance apart and
    each contiguous, of any type that Triton loads.

    scales: of keys and of values that are uint8 (`foreword.device.kernels.fp8`), float32 [num_blocks, block_size,
    kv_heads], blocks equally far apart.
    """

    keys: Tensor
    values: Tensor
    scales: tuple[Tensor, Tensor] | None = None


class AttendedRows(Protocol):
    """What the kernels of a layer read, as `DeviceRows` has it.

    tensors: slot_mapping and positions, of keys that are written.
    """

    @property
    def api(self) -> DeviceApi: ...

    @property
    def layout(self) -> RowLayout: ...

    @property
    def arena(self) -> Tensor: ...

    @property
    def packet(self) -> Tensor: ...

    @property
    def groups(self) -> Tensor: ...

    @property
    def tensors(self) -> Mapping[str, Tensor]: ...

    @property
    def max_num_batched_tokens(self) -> int: ...


class DeviceAttention:
    """Layers of one shape that share a KV group. Sums are float32. A call is a launch, or two, and can be captured."""

    def __init__(
        self,
        rows: AttendedRows,
        *,
        heads: int,
        kv_heads: int,
        dim: int,
        value_dim: int | None = None,
        group: int = 0,
        num_splits: int = 1,
        dot: str = "float32",
    ) -> None:
        """num_splits: programs that share the keys of a request, for few requests with many keys.
        dot: the type of the products' operands, "bfloat16" for the tensor cores.

        ConfigError for a KV group that is spread over ranks, and for heads that do not share keys evenly.
        """
        if heads % kv_heads:
            raise ConfigError(f"{heads} heads share the keys of {kv_heads}: the first must be a multiple of the second")
        if rows.layout.groups[group, GROUP.index("cp_size")] > 1:
            raise ConfigError(f"KV group {group} is spread over ranks: attention reads the keys of one rank only")
        self.rows, self.group, self.num_splits, self.dot = rows, group, num_splits, dot
        self.heads, self.kv_heads, self.dim, self.value_dim = heads, kv_heads, dim, value_dim or dim
        shared = heads // kv_heads
        self.block_m = _power_of_two(shared)
        self.queries_per_tile = self.block_m // shared
        self.no_tensor = rows.api.zeros((1,), "float32")
        self.partial: Tensor = self.no_tensor
        if num_splits > 1:
            shape = num_splits, rows.max_num_batched_tokens, heads, self.value_dim + 2
            self.partial = rows.api.zeros(shape, "float32")

    def write(
        self,
        qkv: Tensor,
        queries: Tensor,
        cache: LayerCache,
        *,
        num_tokens: int,
        rope: tuple[Tensor, Tensor] | None = None,
        rope_rows: Tensor | None = None,
        norms: tuple[Tensor, Tensor] | None = None,
        eps: float = 0.0,
    ) -> None:
        """K3: the queries and keys of ``qkv`` [Tp, q | k | v | …] normed and rotated; keys and values into their slots.

        queries: [Tp, heads, dim], written. rope: cos, sin float32 [M, pairs], scale included; rope_rows: int64 [Tp],
        the row of each token in them, None: its position. norms: of queries and keys, [dim] each.
        """
        rows, keys, values = self.rows, cache.keys, cache.values
        scales = cache.scales or (self.no_tensor, self.no_tensor)
        cos, sin = rope or (self.no_tensor, self.no_tensor)
        q_norm, k_norm = norms or (self.no_tensor, self.no_tensor)
        rows.api.launch(
            "write_keys", (num_tokens, self.heads + 2 * self.kv_heads), rows.packet, qkv, queries, keys, values,
            *scales, rows.tensors["slot_mapping"][self.group],
            rows.tensors["positions"] if rope_rows is None else rope_rows, cos, sin, q_norm, k_norm, eps,
            qkv.stride(0), keys.shape[1], keys.stride(0), values.stride(0), scales[0].stride(0),
            HEADS=self.heads, KV_HEADS=self.kv_heads, DIM=self.dim, VALUE_DIM=self.value_dim,
            PAIRS=0 if rope is None else cos.shape[1], NORM=norms is not None, FP8=cache.scales is not None,
            BLOCK_DIM=_power_of_two(max(self.dim, self.value_dim)),
        )  # fmt: skip

    def attend(
        self,
        queries: Tensor,
        cache: LayerCache,
        out: Tensor,
        *,
        num_tokens: int,
        num_reqs: int,
        scale: float,
        window: int | None = None,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> None:
        """K4: out [Tp, heads, value_dim] of a step of these padded sizes. Entries of padding keep what they hold.

        window: a query at p sees the keys in (p − window, p]. softcap: scores are softcap · tanh(score / softcap); 0:
        as they are. sinks: [heads], scores without a value that take part in the softmax.
        """
        rows, place = self.rows, self.rows.layout
        block_value, splits = _power_of_two(self.value_dim), self.num_splits
        keys, values, scales = cache.keys, cache.values, cache.scales or (self.no_tensor, self.no_tensor)
        rows.api.launch(
            "attend", (num_tokens // self.queries_per_tile + num_reqs, self.kv_heads, splits), rows.arena, rows.packet,
            rows.groups, self.group, place.records_at, place.record_size, queries, keys, values,
            *scales, self.no_tensor if sinks is None else sinks, out, self.partial, scale, softcap, splits,
            keys.stride(0), values.stride(0), scales[0].stride(0), HEADS=self.heads,
            KV_HEADS=self.kv_heads, DIM=self.dim, VALUE_DIM=self.value_dim, WINDOW=window or 0, SOFTCAP=softcap > 0,
            SINKS=sinks is not None, SPLIT=splits > 1, FP8=cache.scales is not None, DOT=self.dot,
            BLOCK_M=self.block_m, BLOCK_N=32, BLOCK_DIM=_power_of_two(self.dim), BLOCK_VALUE=block_value,
        )  # fmt: skip
        if splits > 1:
            rows.api.launch(
                "merge_splits", (num_tokens, self.heads), rows.packet, self.partial, out, splits, HEADS=self.heads,
                VALUE_DIM=self.value_dim, BLOCK_VALUE=block_value,
            )  # fmt: skip
