"""Attention layers over the rows on a device: launches of the kernels K3 and K4, with the sizes that they take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from foreword.device.api import DeviceApi, Tensor
from foreword.device.layout import GROUP, RowLayout
from foreword.errors import ConfigError

_LEAST_KEYS = 256  # of a program, where several share the keys of a request
_MOST_SPLITS = 64
_REGISTERS = 1 << 16  # of a multiprocessor


def power_of_two(n: int, least: int = 16) -> int:
    """Return the least power of two that holds n entries, at least ``least``."""
    return max(least, 1 << (n - 1).bit_length())


class Tile(NamedTuple):
    """The tile of scores that a program of K4 computes at a time, and how the program is compiled.

    rows: queries times heads; a power of two, as keys.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int = 3

    @classmethod
    def of(cls, shared: int, dim: int, dot: str) -> Tile:
        """Return the tile for ``shared`` heads per key head and heads of ``dim``, with operands of the type ``dot``.

        With these sizes no register spills on sm_80 and sm_90, but a few with 8-bit keys of 512, and the shared memory
        fits every GPU from sm_80 on, 99 KiB: tools/device_table.py compiles the shapes of real models. Operands of 32
        bits have no tensor cores: loads of the next tile would take registers and save no time.
        """
        width = power_of_two(dim)
        if dot == "float32":
            return cls(16, 16, 16 if width == 256 else 8, 1)
        if width > 128:
            return cls(16, 16, 4 if width == 256 else 8)
        rows = min(power_of_two(shared), 64 if width <= 64 else 32)
        return cls(rows, 32, 4 if rows == 16 and width == dim else 8)

    @property
    def options(self) -> dict[str, int]:
        """Return the options of a launch. The compiler may use all registers of a multiprocessor: left to itself, it
        spills some so that more programs run at a time.
        """
        most = min(255, _REGISTERS // (32 * self.num_warps))
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "maxnreg": most}


def num_splits_for(programs: int, num_keys: int, multiprocessors: int) -> int:
    """Return how many programs share the keys of a request, so that two programs per multiprocessor have work: a power
    of two, and at least 256 keys for each.

    programs: of a step without splits. num_keys: of the longest request.
    """
    most = min(2 * multiprocessors // programs, num_keys // _LEAST_KEYS, _MOST_SPLITS)
    return 1 << (max(most, 1).bit_length() - 1)


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

    tensors: slot_mapping and positions, of keys that are written. max_num_keys: of a request.
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

    @property
    def max_num_keys(self) -> int: ...


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
        num_splits: int | None = None,
        dot: str = "float32",
    ) -> None:
        """num_splits: programs that share the keys of a request; None: see `num_splits_for`.
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
        self.tile = tile = Tile.of(shared, max(self.dim, self.value_dim), dot)
        heads_per_program = min(shared, tile.rows)
        self.queries_per_tile = tile.rows // heads_per_program
        self.programs_per_tile = kv_heads * -(-shared // heads_per_program)
        self.no_tensor = rows.api.zeros((1,), "float32")
        self.partial: Tensor = self.no_tensor
        most = (num_splits or 0) * rows.max_num_batched_tokens  # the most that splits · Tp can be
        if num_splits is None:  # splits ≤ 2 · multiprocessors / programs, and Tp ≤ tiles · queries per tile
            most = -(-2 * rows.api.multiprocessors * self.queries_per_tile // self.programs_per_tile)
        if num_splits != 1:
            self.partial = rows.api.zeros((most * heads * (self.value_dim + 2),), "float32")

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
            BLOCK_DIM=power_of_two(max(self.dim, self.value_dim)),
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
        block_value, tile = power_of_two(self.value_dim), self.tile
        num_tiles, splits = num_tokens // self.queries_per_tile + num_reqs, self.num_splits
        if splits is None:
            num_keys = min(rows.max_num_keys, (window or rows.max_num_keys) + self.queries_per_tile)
            splits = num_splits_for(num_tiles * self.programs_per_tile, num_keys, rows.api.multiprocessors)
        keys, values, scales = cache.keys, cache.values, cache.scales or (self.no_tensor, self.no_tensor)
        rows.api.launch(
            "attend", (num_tiles, self.programs_per_tile, splits), rows.arena, rows.packet, rows.groups, self.group,
            place.records_at, place.record_size, queries, keys, values,
            *scales, self.no_tensor if sinks is None else sinks, out, self.partial, scale, softcap, splits,
            keys.stride(0), values.stride(0), scales[0].stride(0), HEADS=self.heads,
            KV_HEADS=self.kv_heads, DIM=self.dim, VALUE_DIM=self.value_dim, WINDOW=window or 0, SOFTCAP=softcap > 0,
            SINKS=sinks is not None, SPLIT=splits > 1, FP8=cache.scales is not None, DOT=self.dot,
            BLOCK_M=tile.rows, BLOCK_N=tile.keys, BLOCK_DIM=power_of_two(self.dim), BLOCK_VALUE=block_value,
            **tile.options,
        )  # fmt: skip
        if splits > 1:
            rows.api.launch(
                "merge_splits", (num_tokens, self.heads), rows.packet, self.partial, out, splits, HEADS=self.heads,
                VALUE_DIM=self.value_dim, BLOCK_VALUE=block_value,
            )  # fmt: skip
