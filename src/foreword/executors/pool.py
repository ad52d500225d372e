"""The size of a KV pool, which an executor is made for."""

from __future__ import annotations

from dataclasses import dataclass

from foreword.batch import ContextParallel, KVGroup


@dataclass(frozen=True, slots=True)
class PoolSize:
    """The KV pool of a model. block_bytes: keys and values of one block in all its storage slots, on all ranks.

    max_num_seqs: requests that are computed at a time. context_parallel: the ranks that the groups are spread over.
    """

    max_model_len: int
    kv_groups: tuple[KVGroup, ...]
    block_bytes: int
    num_blocks: int
    max_num_seqs: int
    context_parallel: ContextParallel | None = None

    @property
    def block_size(self) -> int:
        """The tokens of a block of the storage that all groups share."""
        return self.kv_groups[0].block_size
