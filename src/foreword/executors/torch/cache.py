"""Paged keys and values as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from foreword.arrays import I32
from foreword.executors.torch.tensors import as_tensor


@dataclass(frozen=True, slots=True)
class KVLayer:
    """The keys and values of one attention call of the model: which KV group they belong to, and their shape.

    slot: the storage slot of a block, unique within the group.
    """

    group: int
    slot: int
    num_kv_heads: int
    key_dim: int
    value_dim: int


class PagedCache:
    """Keys and values of every layer, in blocks.

    A block has one storage slot per layer of a KV group. A block belongs to one group at a time, so all groups share
    the pool, and slot j is as large as the largest layer that uses it.

    keys, values: of each layer, views [num_blocks, block_size, num_kv_heads, key_dim or value_dim].
    """

    def __init__(
        self,
        layers: Sequence[KVLayer],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.layers, self.block_size, self.device = tuple(layers), block_size, torch.device(device)
        self._slots = [
            torch.zeros(num_blocks, size, dtype=dtype, device=device) for size in slot_sizes(layers, block_size)
        ]
        self.keys, self.values = [], []
        for layer in self.layers:
            keys, values = (block_size * layer.num_kv_heads * dim for dim in (layer.key_dim, layer.value_dim))
            shape = block_size, layer.num_kv_heads
            slot = self._slots[layer.slot]
            self.keys.append(slot[:, :keys].unflatten(1, (*shape, layer.key_dim)))
            self.values.append(slot[:, keys : keys + values].unflatten(1, (*shape, layer.value_dim)))

    def copy_blocks(self, sources: I32, destinations: I32) -> None:
        """Copy whole blocks in every layer. All sources are read before any destination is written."""
        read, written = (as_tensor(blocks, self.device) for blocks in (sources, destinations))
        for slot in self._slots:
            slot.index_copy_(0, written.long(), slot[read])

    def zero_blocks(self, blocks: I32) -> None:
        """Fill whole blocks with zeros in every layer."""
        for slot in self._slots:
            slot.index_fill_(0, as_tensor(blocks, self.device).long(), 0)


def slot_sizes(layers: Sequence[KVLayer], block_size: int) -> list[int]:
    """The numbers that each storage slot of a block holds, keys and values."""
    sizes = [0] * (1 + max((layer.slot for layer in layers), default=-1))
    for layer in layers:
        size = block_size * layer.num_kv_heads * (layer.key_dim + layer.value_dim)
        sizes[layer.slot] = max(sizes[layer.slot], size)
    return sizes
