"""The base of executors that run a decoder over a paged cache."""

from __future__ import annotations

from foreword.arrays import I32
from foreword.executors.host import HostExecutor
from foreword.executors.inputs import input_capabilities
from foreword.executors.pooling import Pooler
from foreword.executors.stores import AdapterStore, BlockStore
from foreword.models.lora import LoraAdapter
from foreword.sampling import Sampler


class PagedExecutor(HostExecutor):
    """A `HostExecutor` whose blocks are in ``cache`` and whose LoRA adapters are in ``adapters``."""

    cache: BlockStore
    adapters: AdapterStore

    def __init__(
        self,
        cache: BlockStore,
        adapters: AdapterStore,
        sampler: Sampler | None = None,
        *,
        pooler: Pooler | None = None,
        hidden_size: int = 0,
        extra_size: int = 0,
        mrope_dims: int = 0,
    ) -> None:
        """hidden_size, extra_size, mrope_dims: see `Executor`."""
        super().__init__(sampler, pooler=pooler)
        self.cache, self.adapters = cache, adapters
        self.hidden_size, self.extra_size, self.mrope_dims = hidden_size, extra_size, mrope_dims
        self.capabilities |= input_capabilities(hidden_size, mrope_dims)

    def copy_blocks(self, sources: I32, destinations: I32) -> None:
        """See `BlockStore.copy_blocks`."""
        self.cache.copy_blocks(sources, destinations)

    def zero_blocks(self, blocks: I32) -> None:
        """See `BlockStore.zero_blocks`."""
        self.cache.zero_blocks(blocks)

    def load_lora(self, lora_id: int, adapter: LoraAdapter) -> int:
        """See `LoraExecutor.load_lora`."""
        return self.adapters.load(lora_id, adapter)

    def drop_lora(self, lora_id: int) -> None:
        """See `LoraExecutor.drop_lora`."""
        self.adapters.drop(lora_id)
