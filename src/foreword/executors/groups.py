"""The KV groups of the batch layer for a model."""

from __future__ import annotations

from foreword.batch import KVGroup
from foreword.models.spec import DecoderSpec


def batch_groups(spec: DecoderSpec, block_size: int) -> tuple[KVGroup, ...]:
    """One `KVGroup` for each of ``spec.kv_groups()``, all with this block size."""
    return tuple(
        KVGroup(block_size, sliding_window=group.sliding_window, recurrent=group.recurrent)
        for group in spec.kv_groups()
    )
