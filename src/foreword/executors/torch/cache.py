"""Paged keys and values as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from foreword.arrays import I32, U8, Bools
from foreword.executors.torch.tensors import as_tensor


@dataclass(frozen=True, slots=True)
class KVLayer:
    """The keys and values of one attention call of the model: which KV group they belong to, and their shape.

    slot: the storage slot of a block, unique within the group. values_are_keys: the keys are the values too, and are
    stored once. index_dim: the numbers of a token's key of the indexer, 0 without one.
    """

    group: int
    slot: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    values_are_keys: bool = False
    index_dim: int = 0

    @property
    def num_stored(self) -> int:
        """The number of vectors that are stored of a token and head, which have a scale each."""
        return 1 if self.values_are_keys else 2

    @property
    def stored_value_dim(self) -> int:
        """The numbers of a head's value that are stored beside its key."""
        return 0 if self.values_are_keys else self.value_dim


@dataclass(frozen=True, slots=True)
class StateLayer:
    """The states of one recurrent layer: ``size`` float32 numbers per request. group, slot: as `KVLayer`."""

    group: int
    slot: int
    size: int


class PagedCache:
    """A `BlockStore` of keys and values of every layer with attention, keys of indexers, and states of every recurrent
    layer.

    A block has one storage slot per layer of a KV group. A block belongs to one group at a time, so all groups share
    the pool, and slot j is as large as the largest layer that uses it. The numbers of states follow those of blocks, if
    there are ``num_states``; else a state is in a block. first_state: the number of the first state.

    keys, values: for each of ``layers``, views [num_blocks, block_size, num_kv_heads, key_dim or value_dim].
    index_keys: the same, of indexers, views [num_blocks, block_size, index_dim].
    states: of each of ``recurrent``, float32 [number of states, size].
    scales: of each of ``layers`` with dtype torch.float8_e4m3fn, whose keys and values are these codes as uint8: those
    of keys and those of values, views float32 [num_blocks, block_size, num_kv_heads]. Empty for another dtype. Such a
    cache has no keys of indexers.

    Raise MemoryError if the blocks do not fit.
    """

    def __init__(
        self,
        layers: Sequence[KVLayer],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        recurrent: Sequence[StateLayer] = (),
        num_states: int = 0,
    ) -> None:
        self.layers, self.block_size, self.dtype, self.device = tuple(layers), block_size, dtype, torch.device(device)
        has_scales = dtype is torch.float8_e4m3fn
        sizes = slot_sizes(layers, block_size, dtype, () if num_states else recurrent)
        dtype = torch.uint8 if has_scales else dtype
        self.num_blocks, self.first_state = num_blocks, num_blocks if num_states else 0
        try:
            self._slots = [torch.zeros(num_blocks, size, dtype=dtype, device=device) for size in sizes]
            if num_states:
                self.states = [torch.zeros(num_states, of.size, device=device) for of in recurrent]
            else:
                self.states = [self._slots[of.slot].view(torch.float32)[:, : of.size] for of in recurrent]
        except RuntimeError:
            raise MemoryError(f"the KV pool of {num_blocks} blocks does not fit: use fewer") from None
        self.keys, self.values, self.index_keys = [], [], []
        self.scales: list[tuple[torch.Tensor, torch.Tensor]] = []
        for layer in self.layers:
            keys, values = (block_size * layer.num_kv_heads * dim for dim in (layer.key_dim, layer.stored_value_dim))
            shape = block_size, layer.num_kv_heads
            slot = self._slots[layer.slot]
            self.keys.append(slot[:, :keys].unflatten(1, (*shape, layer.key_dim)))
            if layer.values_are_keys:
                self.values.append(self.keys[-1])
            else:
                self.values.append(slot[:, keys : keys + values].unflatten(1, (*shape, layer.value_dim)))
            end = keys + values
            index = slot[:, end : end + block_size * layer.index_dim]
            self.index_keys.append(index.unflatten(1, (block_size, layer.index_dim)))
            if has_scales:
                count, first = block_size * layer.num_kv_heads, -(-end // 4)
                of_layer = slot.view(torch.float32)[:, first : first + layer.num_stored * count]
                scales = of_layer.unflatten(1, (layer.num_stored, *shape))
                self.scales.append((scales[:, 0], scales[:, -1]))

    def copy_blocks(self, sources: I32, destinations: I32) -> None:
        """See `BlockStore.copy_blocks`."""
        for memory, first, own in self._parts(sources):
            read, written = (as_tensor(blocks[own] - first, self.device) for blocks in (sources, destinations))
            for slot in memory:
                slot.index_copy_(0, written.long(), slot[read])

    def zero_blocks(self, blocks: I32) -> None:
        """See `BlockStore.zero_blocks`."""
        for memory, first, own in self._parts(blocks):
            zeroed = as_tensor(blocks[own] - first, self.device).long()
            for slot in memory:
                slot.index_fill_(0, zeroed, 0)

    @property
    def block_bytes(self) -> int:
        return _bytes_of_one(self._slots)

    @property
    def state_bytes(self) -> int:
        return _bytes_of_one(self.states) if self.first_state else 0

    def read_blocks(self, blocks: I32, data: U8) -> None:
        """See `TransferStore.read_blocks`."""
        start = 0
        for memory, first, _ in self._parts(blocks):
            read = as_tensor(blocks - first, self.device)
            for slot in memory:
                part = slot[read].view(torch.uint8).cpu().numpy()
                data[:, start : start + part.shape[1]] = part
                start += part.shape[1]

    def write_blocks(self, blocks: I32, data: U8) -> None:
        """See `TransferStore.write_blocks`."""
        start = 0
        for memory, first, _ in self._parts(blocks):
            written = as_tensor(blocks - first, self.device).long()
            for slot in memory:
                size = slot.shape[1] * slot.dtype.itemsize
                part = torch.from_numpy(data[:, start : start + size].copy()).view(slot.dtype)
                slot.index_copy_(0, written, part.to(self.device))
                start += size

    def _parts(self, blocks: I32) -> list[tuple[list[torch.Tensor], int, Bools]]:
        """Return the memory of blocks and that of states, if some of these numbers are theirs: the tensors, the number
        of their first entry, and which of the numbers are theirs.
        """
        is_block = blocks < self.num_blocks
        if is_block.all():
            return [(self._slots, 0, is_block)]
        found = [(self._slots, 0, is_block), (self.states, self.first_state, ~is_block)]
        return [part for part in found if part[2].any()]


def _bytes_of_one(memory: Sequence[torch.Tensor]) -> int:
    return sum(slot.shape[1] * slot.dtype.itemsize for slot in memory)


def slot_sizes(
    layers: Sequence[KVLayer], block_size: int, dtype: torch.dtype, recurrent: Sequence[StateLayer] = ()
) -> list[int]:
    """Return the numbers that each storage slot of a block holds, in ``dtype``: keys and values with their scales and
    the keys of an indexer, or a state.
    """
    slots = [layer.slot for layer in layers] + [of.slot for of in recurrent]
    sizes = [0] * (1 + max(slots, default=-1))
    for layer in layers:
        size = block_size * (layer.num_kv_heads * (layer.key_dim + layer.stored_value_dim) + layer.index_dim)
        if dtype is torch.float8_e4m3fn:
            size = -(-size // 4) * 4 + layer.num_stored * 4 * block_size * layer.num_kv_heads
        sizes[layer.slot] = max(sizes[layer.slot], size)
    per_float = torch.float32.itemsize // dtype.itemsize
    for of in recurrent:
        sizes[of.slot] = max(sizes[of.slot], of.size * per_float)
    return [-(-size // per_float) * per_float for size in sizes]
