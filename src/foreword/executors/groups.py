"""The KV groups of the batch layer for a model."""

from __future__ import annotations

from typing import Protocol

from foreword.batch import KVGroup
from foreword.models.spec import KVGroupSpec


class HasKVGroups(Protocol):
    """A model's layers, such as a `DecoderSpec`."""

    def kv_groups(self) -> tuple[KVGroupSpec, ...]: ...


def batch_groups(spec: HasKVGroups, block_size: int, *, context_parallel: bool = False) -> tuple[KVGroup, ...]:
    """One `KVGroup` for each of ``spec.kv_groups()``. context_parallel: those with keys and values are spread."""
    return tuple(
        KVGroup(
            block_size,
            sliding_window=group.sliding_window,
            context_parallel=context_parallel and not group.recurrent,
            recurrent=group.recurrent,
        )
        for group in spec.kv_groups()
    )
