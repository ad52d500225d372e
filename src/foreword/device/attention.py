"""Attention layers over the rows on a device: launches of the kernels K3 and K4, and the choice of their sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from foreword.device.api import DeviceApi, Tensor
from foreword.device.layout import GROUP, RowLayout
from foreword.errors import ConfigError

MOST_OF_FLOAT32 = 512
"""The size of the largest head, as a power of two, with operands of 32 bits."""
_LEAST_KEYS = 256  # per program, where several share the keys of a request
_MOST_SPLITS = 64
_REGISTERS = 1 << 16  # registers of a multiprocessor
_PROGRAMS = 4  # per multiprocessor, that splits aim at
_PROMPT_TOKENS = 16  # tokens per request on average, from which a step has the tile of prompts


def power_of_two(n: int, least: int = 16) -> int:
    """Return the least power of two that holds n entries, at least ``least``."""
    return max(least, 1 << (n - 1).bit_length())


class Tile(NamedTuple):
    """The tile of scores that a program of K4 computes at a time, and how the program is compiled.

    rows: queries times heads. Rows and keys are powers of two.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int = 3

    @classmethod
    def of(
        cls, shared: int, dim: int, dot: str, *, prompts: bool = False, fp8: bool = False, large: bool = False
    ) -> Tile:
        """Return the tile for ``shared`` heads per key head and heads of ``dim``, with operands of the type ``dot``.

        prompts: whether the step has long prompts, whose time is that of the products; in others it is that of reading
        keys. fp8: whether keys and values have 8 bits. large: see `DeviceApi.large_tiles`.

        tools/device_table.py compiles the shapes of real models. Without ``large`` the shared memory fits every GPU
        from sm_80 on, 99 KiB, and no register spills on sm_80 and sm_90; ``large`` are the fastest tiles that were
        measured on an H100. Operands of 32 bits have no tensor cores: loads of the next
        tile would take registers and save no time. Raise ConfigError for wider heads with these than `MOST_OF_FLOAT32`.
        """
        width = power_of_two(dim)
        if dot == "float32":
            if width > MOST_OF_FLOAT32:
                raise ConfigError(
                    f"heads of {dim} numbers: tiles of 32 bits take more shared memory than many GPUs have; use "
                    "dtype='bf16', or executor='torch'"
                )
            return cls(16, 16, 16 if width == 256 else 8, 1)
        if width > 256:
            return cls(16, 16, 8)
        if prompts and large:
            if width <= 64:
                return cls(64, 32, 4) if fp8 else cls(128, 32, 8)
            return cls(128, 64 if width == 128 else 32, 8, 2)
        if width == 256:
            return cls(16, 32, 4, 2) if large else cls(16, 16, 4)
        rows = min(power_of_two(shared), 64 if width <= 64 else 32)
        if rows > 16 or width != dim:
            return cls(rows, 32, 8)
        if large:
            return cls(16, 128, 4, 2) if fp8 or width <= 64 else cls(16, 64, 4)
        return cls(16, 32, 4)

    @property
    def options(self) -> dict[str, int]:
        """Return the options of a launch. They let the compiler use all registers of a multiprocessor; by default it
        spills some so that more programs run at a time.
        """
        most = min(255, _REGISTERS // (32 * self.num_warps))
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "maxnreg": most}


def num_splits_for(programs: int, num_keys: int, multiprocessors: int) -> int:
    """Return the number of programs that share the keys of a request: a power of two, such that about four programs per
    multiprocessor have work, and each has at least 256 keys.

    programs: the programs of a step without splits. num_keys: the keys of the longest request.
    """
    most = min(_PROGRAMS * multiprocessors // programs, num_keys // _LEAST_KEYS, _MOST_SPLITS)
    return 1 << (max(most, 1).bit_length() - 1)


class _Tiling(NamedTuple):
    """The division of a step's queries: tokens of a request per tile, and programs per tile."""

    queries: int
    programs: int

    @classmethod
    def of(cls, tile: Tile, shared: int, kv_heads: int) -> _Tiling:
        heads = min(shared, tile.rows)  # heads per program
        return cls(tile.rows // heads, kv_heads * -(-shared // heads))


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
    """The inputs of a layer's kernels, in the form of `DeviceRows`.

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
    """Layers of one shape that share a KV group. Sums are float32. A call makes one or two launches, and can be
    captured.
    """

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
        """Choose the kernels of a layer. ``num_splits`` is the number of programs that share the keys of a request
        (None: see `num_splits_for`), ``dot`` the type of the products' operands, "bfloat16" for the tensor cores.

        Raise ConfigError for a KV group that is spread over ranks, and for heads that do not share keys evenly.
        """
        if heads % kv_heads:
            raise ConfigError(f"{heads} heads share the keys of {kv_heads}: the first must be a multiple of the second")
        if rows.layout.groups[group, GROUP.index("cp_size")] > 1:
            raise ConfigError(f"KV group {group} is spread over ranks: attention reads the keys of one rank only")
        self.rows, self.group, self.num_splits, self.dot = rows, group, num_splits, dot
        self.heads, self.kv_heads, self.dim, self.value_dim = heads, kv_heads, dim, value_dim or dim
        shared = heads // kv_heads
        width, large = max(self.dim, self.value_dim), rows.api.large_tiles
        self._tiles = {
            (prompts, fp8): Tile.of(shared, width, dot, prompts=prompts, fp8=fp8, large=large)
            for prompts in (False, True)
            for fp8 in (False, True)
        }
        self._tilings = {key: _Tiling.of(tile, shared, kv_heads) for key, tile in self._tiles.items()}
        self.no_tensor = rows.api.zeros((1,), "float32")
        self.partial: Tensor = self.no_tensor
        most = (num_splits or 0) * rows.max_num_batched_tokens  # the most that splits · Tp can be
        if num_splits is None:  # splits ≤ _PROGRAMS · multiprocessors / programs, and Tp ≤ tiles · queries of a tile
            programs = _PROGRAMS * rows.api.multiprocessors
            most = max(-(-programs * tiling.queries // tiling.programs) for tiling in self._tilings.values())
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
        values_are_keys: bool = False,
    ) -> None:
        """Launch K3: norm and rotate the queries and keys of ``qkv`` [Tp, q | k | v | …], and write keys and values to
        their slots.

        queries: [Tp, heads, dim], written. rope: cos, sin float32 [M, pairs], scale included; rope_rows: int64 [Tp],
        the row of each token in them, None: its position. norms: of queries and keys, [dim] each. values_are_keys: the
        keys are the values too, and ``qkv`` ends with them.
        """
        rows, keys, values = self.rows, cache.keys, cache.values
        scales = cache.scales or (self.no_tensor, self.no_tensor)
        cos, sin = rope or (self.no_tensor, self.no_tensor)
        q_norm, k_norm = norms or (self.no_tensor, self.no_tensor)
        num_heads = self.heads + (1 if values_are_keys else 2) * self.kv_heads
        rows.api.launch(
            "write_keys", (num_tokens, num_heads), rows.packet, qkv, queries, keys, values,
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
        chunked: bool = False,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> None:
        """Launch K4: compute out [Tp, heads, value_dim] of a step of these padded sizes. Entries of padding do not
        change.

        window: a query at p sees the keys in (p − window, p], if chunked those in [p − p mod window, p]. softcap:
        scores are softcap · tanh(score / softcap); 0: as they are. sinks: [heads], scores without a value that take
        part in the softmax.
        """
        rows, place = self.rows, self.rows.layout
        prompts, fp8 = num_tokens >= _PROMPT_TOKENS * num_reqs, cache.scales is not None
        block_value, tile, tiling = power_of_two(self.value_dim), self._tiles[prompts, fp8], self._tilings[prompts, fp8]
        num_tiles, splits = num_tokens // tiling.queries + num_reqs, self.num_splits
        if splits is None:
            num_keys = min(rows.max_num_keys, (window or rows.max_num_keys) + tiling.queries)
            splits = num_splits_for(num_tiles * tiling.programs, num_keys, rows.api.multiprocessors)
        keys, values, scales = cache.keys, cache.values, cache.scales or (self.no_tensor, self.no_tensor)
        rows.api.launch(
            "attend", (num_tiles, tiling.programs, splits), rows.arena, rows.packet, rows.groups, self.group,
            place.records_at, place.record_size, queries, keys, values,
            *scales, self.no_tensor if sinks is None else sinks, out, self.partial, scale, softcap, splits,
            keys.stride(0), values.stride(0), scales[0].stride(0), HEADS=self.heads,
            KV_HEADS=self.kv_heads, DIM=self.dim, VALUE_DIM=self.value_dim, WINDOW=window or 0, CHUNKED=chunked,
            SOFTCAP=softcap > 0, SINKS=sinks is not None, SPLIT=splits > 1, FP8=fp8,
            FP8_UNIT=fp8 and rows.api.converts_fp8, DOT=self.dot, BLOCK_M=tile.rows, BLOCK_N=tile.keys,
            BLOCK_DIM=power_of_two(self.dim), BLOCK_VALUE=block_value,
            **tile.options,
        )  # fmt: skip
        if splits > 1:
            rows.api.launch(
                "merge_splits", (num_tokens, self.heads), rows.packet, self.partial, out, splits, HEADS=self.heads,
                VALUE_DIM=self.value_dim, BLOCK_VALUE=block_value,
            )  # fmt: skip
