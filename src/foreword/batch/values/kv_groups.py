"""KV groups and context parallelism: how positions map to blocks, as two small values."""

from __future__ import annotations

from dataclasses import dataclass

from foreword.errors import ConfigError
from foreword.integers import INT32_MAX, is_int32


@dataclass(frozen=True, slots=True)
class ContextParallel:
    """The KV of a request spread over ``size`` ranks, ``interleave`` consecutive tokens at a time.

    owner(position) = (position // interleave) mod size. This process is ``rank``.
    """

    size: int
    rank: int
    interleave: int = 1

    def __post_init__(self) -> None:
        if not (is_int32(self.size, 1) and is_int32(self.interleave, 1)):
            raise ConfigError(
                f"ContextParallel(size={self.size!r}, interleave={self.interleave!r}): both must be in [1, {INT32_MAX}]"
            )
        if self.size * self.interleave > INT32_MAX:
            raise ConfigError(
                f"ContextParallel(size={self.size}, interleave={self.interleave}): the product must be in "
                f"[1, {INT32_MAX}]; use a smaller interleave"
            )
        if not (is_int32(self.rank, 0) and self.rank < self.size):
            raise ConfigError(f"ContextParallel(rank={self.rank}): must be in [0, size={self.size})")


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share one block table.

    block_size: S, tokens of one allocation block (on one rank).
    kernel_block_size: the attention kernel's block, a divisor of S; None: S. See `InputBatch.kernel_block_table`.
    sliding_window: W, a query at position p sees keys in (p − W, p]; None: all keys up to p.
    context_parallel: whether this group's KV is spread over the ranks (False: each rank holds all of it).
    recurrent: the layers keep a state, not keys: one block per request holds it, in a step with drafts one more for
        each of these, and no token has a slot (−1). See `foreword.batch.features.recurrent`. A prefix cache can keep
        the state after multiples of block_size tokens.
    """

    block_size: int
    kernel_block_size: int | None = None
    sliding_window: int | None = None
    context_parallel: bool = False
    recurrent: bool = False

    def __post_init__(self) -> None:
        if not is_int32(self.block_size, 1):
            raise ConfigError(f"KVGroup(block_size={self.block_size!r}): must be in [1, {INT32_MAX}]")
        k = self.kernel_block_size
        if k is not None and (not is_int32(k, 1) or self.block_size % k):
            raise ConfigError(f"KVGroup(kernel_block_size={k}): must divide block_size={self.block_size}")
        if self.sliding_window is not None and not is_int32(self.sliding_window, 1):
            raise ConfigError(
                f"KVGroup(sliding_window={self.sliding_window!r}): must be in [1, {INT32_MAX}], or None for no window"
            )
        if self.recurrent and (self.sliding_window is not None or self.context_parallel):
            raise ConfigError("KVGroup(recurrent=True): a state has no window and is not spread over ranks")

    def tokens_per_block(self, cp: ContextParallel | None, max_model_len: int) -> int:
        """Return the number of positions that a block-table entry covers: S; S·n if spread over n ranks; all if
        recurrent.
        """
        if self.recurrent:
            return max_model_len
        return self.block_size * (cp.size if cp is not None and self.context_parallel else 1)

    def check_context_parallel(self, cp: ContextParallel | None) -> None:
        """Raise ConfigError if a spread group has no ranks or too large blocks, or if ``interleave`` does not divide a
        block.
        """
        if not self.context_parallel:
            return
        if cp is None:
            raise ConfigError(
                "KVGroup(context_parallel=True) needs RequestStates(context_parallel=ContextParallel(...))"
            )
        if self.block_size * cp.size > INT32_MAX:
            raise ConfigError(
                f"KVGroup(block_size={self.block_size}): one block of each of {cp.size} ranks has "
                f"{self.block_size * cp.size} tokens, the most is {INT32_MAX}; use a smaller block_size"
            )
        if self.block_size % cp.interleave:
            raise ConfigError(
                f"ContextParallel(interleave={cp.interleave}): must divide the group's block_size={self.block_size}"
            )
