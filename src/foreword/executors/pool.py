"""The size of a KV pool, which an executor is made for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from foreword.batch import ContextParallel, KVGroup
from foreword.errors import ConfigError
from foreword.models.spec import KVGroupSpec


@runtime_checkable
class HasPool(Protocol):
    """An executor that tells the size of its KV pool, so that a smaller one than the engine's is refused. It may
    have ``num_states`` too, see `PoolSize`; without, it has none.
    """

    num_blocks: int
    block_size: int


@dataclass(frozen=True, slots=True)
class PoolSize:
    """The KV pool of a model. block_bytes: keys and values of one block in all its storage slots, on all ranks.

    num_states: slots for the states of recurrent layers, whose numbers follow those of blocks; 0 without such layers,
    and for a model without keys, whose blocks are states. state_bytes: the states of one request in all such layers.
    max_num_seqs: requests that are computed at a time. max_num_batched_tokens: tokens of a step. context_parallel: the
    ranks that the groups are spread over.
    """

    max_model_len: int
    kv_groups: tuple[KVGroup, ...]
    block_bytes: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    context_parallel: ContextParallel | None = None
    num_states: int = 0
    state_bytes: int = 0

    @property
    def block_size(self) -> int:
        """The tokens of a block of the storage that all groups share."""
        return self.kv_groups[0].block_size

    @property
    def num_bytes(self) -> int:
        """The bytes of all blocks and states."""
        return self.num_blocks * self.block_bytes + self.num_states * self.state_bytes

    def check(self, executor: object) -> None:
        """Raise ConfigError if an executor tells that its pool has fewer blocks, or blocks of another size, or fewer
        states, or states with other numbers.
        """
        if not isinstance(executor, HasPool):
            return
        num_states = getattr(executor, "num_states", 0)
        if num_states < self.num_states or (num_states and executor.num_blocks != self.num_blocks):
            raise ConfigError(
                f"executor={type(executor).__name__}: its pool has {num_states} states after {executor.num_blocks} "
                f"blocks, the engine needs {self.num_states} after {self.num_blocks}; make it with "
                f"num_blocks={self.num_blocks}, num_states={self.num_states}"
            )
        if executor.num_blocks < self.num_blocks or executor.block_size != self.block_size:
            own = f"num_blocks={executor.num_blocks}, block_size={executor.block_size}"
            raise ConfigError(
                f"executor={type(executor).__name__}: its pool has {executor.num_blocks} blocks of "
                f"{executor.block_size} tokens, the engine needs {self.num_blocks} of {self.block_size}; give {own} as "
                "options, or make a larger one"
            )


class HasKVGroups(Protocol):
    """A model's layers, such as a `DecoderSpec`."""

    def kv_groups(self) -> tuple[KVGroupSpec, ...]: ...


def batch_groups(spec: HasKVGroups, block_size: int, *, context_parallel: bool = False) -> tuple[KVGroup, ...]:
    """Return one `KVGroup` for each of ``spec.kv_groups()``. context_parallel: whether keys and values are spread over
    ranks.
    """
    return tuple(
        KVGroup(
            block_size,
            sliding_window=group.sliding_window,
            context_parallel=context_parallel and not group.recurrent,
            recurrent=group.recurrent,
        )
        for group in spec.kv_groups()
    )
