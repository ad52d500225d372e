"""What an executor keeps between steps: blocks of keys, values and states, and LoRA adapters."""

from __future__ import annotations

from typing import Protocol

from foreword.arrays import I32
from foreword.batch import BlockOps
from foreword.models.lora import LoraAdapter


class BlockStore(Protocol):
    """The memory of an executor's blocks, of every layer."""

    def copy_blocks(self, sources: I32, destinations: I32) -> None:
        """Copy whole blocks in every layer. All sources are read before any destination is written."""
        ...

    def zero_blocks(self, blocks: I32) -> None:
        """Fill whole blocks with zeros in every layer."""
        ...


class AdapterStore(Protocol):
    """The LoRA adapters that an executor holds, by their numbers."""

    def load(self, lora_id: int, adapter: LoraAdapter) -> int:
        """Hold an adapter under a number that is free. Return the bytes that it takes."""
        ...

    def drop(self, lora_id: int) -> None:
        """Free an adapter that no request uses, if it is held."""
        ...


def apply_block_ops(ops: BlockOps, store: BlockStore) -> None:
    """Zero blocks, then copy blocks. All copies are read before any is written."""
    if len(ops.zero):
        store.zero_blocks(ops.zero)
    if len(ops.copies):
        store.copy_blocks(ops.copies[:, 0].copy(), ops.copies[:, 1].copy())
