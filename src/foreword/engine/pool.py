"""The size of the KV pool of a model."""

from __future__ import annotations

import sys
import warnings

from foreword.batch import ContextParallel, KVGroup
from foreword.cache import cache_group
from foreword.engine.config import EngineConfig
from foreword.engine.memory import KV_POOL_BYTES, HostMemory
from foreword.errors import ConfigError
from foreword.executors.pool import PoolSize, batch_groups
from foreword.models.spec import DecoderSpec

_SNAPSHOTS = 3
"""The snapshots of a request for which a pool has room if it can: one at each kind of position."""


def pool_size(
    spec: DecoderSpec,
    config: EngineConfig,
    memory: HostMemory | None = None,
    *,
    bytes_per_value: float = 4,
    state_bytes: int = 0,
    context_parallel_size: int = 1,
) -> PoolSize:
    """Return blocks for max_num_seqs requests of max_model_len, within kv_cache_bytes; ConfigError if no request fits,
    or if the pool does not fit into the host's memory. memory: None for a pool elsewhere, or one that exists already.

    max_model_len: the spec's own unless configured. A longrope model can be configured for more; then all requests use
    the frequencies for long contexts (`DecoderSpec.for_length`).
    block_bytes = storage slots · block_size · token_size · bytes_per_value · context_parallel_size
    context_parallel_size: a block has block_size tokens on each of so many ranks.

    state_bytes: the size of the state of one request in all recurrent layers, on one rank. States have slots of their
    own, see `pool_of`; those of a model without keys are its blocks.
    """
    length = request_length(spec.max_model_len, spec.longest_model_len, config)
    cp = ContextParallel(context_parallel_size, 0) if context_parallel_size > 1 else None
    groups = batch_groups(spec, config.block_size, context_parallel=cp is not None)
    token_bytes = round(spec.token_size * bytes_per_value)
    block_bytes = context_parallel_size * spec.num_slots * config.block_size * token_bytes
    of_states = context_parallel_size * state_bytes
    if not spec.num_slots:
        return pool_of(length, groups, of_states, config, memory, cp)
    return pool_of(length, groups, block_bytes, config, memory, cp, state_bytes=of_states)


def default_pool_bytes(config: EngineConfig, memory: HostMemory | None, least: int) -> int:
    """Return kv_cache_bytes, by default what `HostMemory` leaves. least: the bytes that the smallest pool needs.

    The pools of a model and of its draft model, or of its head that drafts, share what is left. For a pool elsewhere,
    such as on a GPU, the default is KV_POOL_BYTES.
    """
    if config.kv_cache_bytes is not None:
        return config.kv_cache_bytes
    has_other = config.speculation is not None and config.speculation.method in ("draft_model", "head")
    return KV_POOL_BYTES if memory is None else memory.pool_bytes(least, 2 if has_other else 1)


def request_length(usual: int, longest: int, config: EngineConfig) -> int:
    """Return the configured max_model_len, or the usual one. Raise ConfigError if it is above the longest."""
    length = config.max_model_len or usual
    if length > longest:
        raise ConfigError(f"max_model_len={length}: the model was made for {longest} tokens; use at most that")
    return length


def pool_of(
    length: int,
    groups: tuple[KVGroup, ...],
    block_bytes: int,
    config: EngineConfig,
    memory: HostMemory | None = None,
    context_parallel: ContextParallel | None = None,
    *,
    state_bytes: int = 0,
) -> PoolSize:
    """Return a pool of blocks of so many bytes; see `pool_size`. state_bytes: the size of a state that is in a slot of
    its own; 0: the states of recurrent groups are blocks.

    With R = max_num_seqs, d drafts and g recurrent KV groups, there are R · g · (1 + d) slots for the states of
    requests, and others for snapshots, which have half as many bytes as the blocks, and are at least those of one
    request. Within kv_cache_bytes, the slots of requests have at most half of it, and the rest is divided 2 : 1, or so
    that one request has its snapshots. A given num_blocks is that of blocks alone. Warn if no snapshot has room.
    """
    chunk = min(length, config.scheduler.max_num_batched_tokens + config.most_draft_tokens)
    rules = [cache_group(g, context_parallel) for g in groups if not (g.recurrent and state_bytes)]
    one, most = sum(group.most_blocks(length, chunk) for group in rules), config.scheduler.max_num_seqs
    own_states = sum(g.recurrent for g in groups)
    drafted = config.num_speculated_tokens * own_states  # states after drafts
    snapshots = _SNAPSHOTS * own_states if config.reuses_prefixes else 0
    wanted = most * (own_states + drafted) if state_bytes else 0
    in_blocks = one if state_bytes else one + drafted + snapshots
    least = (1 + one) * block_bytes + own_states * state_bytes
    num_blocks, most_states = config.num_blocks, sys.maxsize
    if num_blocks is None:
        pool_bytes = default_pool_bytes(config, memory, least)
        if pool_bytes < least:
            if memory is not None and config.kv_cache_bytes is None:
                memory.check(least, f"max_model_len={length}")
            raise ConfigError(
                f"kv_cache_bytes={pool_bytes}: one request of max_model_len={length} tokens needs "
                f"{least}; give that many, or lower max_model_len"
            )
        of_blocks = pool_bytes
        if state_bytes:
            wanted = min(wanted, max(own_states, pool_bytes // 2 // state_bytes))
            of_blocks = pool_bytes - wanted * state_bytes
            of_blocks -= min(of_blocks, max(of_blocks // 3, snapshots * state_bytes)) if snapshots else 0
        num_blocks = max(1 + one, min(1 + in_blocks * most, of_blocks // block_bytes))
        if state_bytes:
            most_states = (pool_bytes - num_blocks * block_bytes) // state_bytes
    num_states = 0
    if state_bytes:
        kept = max(snapshots, num_blocks * block_bytes // (2 * state_bytes)) if snapshots else 0
        num_states = min(wanted + kept, most_states)
    if snapshots and (num_states if state_bytes else num_blocks - 1) <= own_states:
        what = "the pool has room for the states of one request alone, so no prefix is reused"
        warnings.warn(f"{_given(config)}: {what}. Give more, or prefix_caching=False", stacklevel=2)
    size = PoolSize(
        length,
        groups,
        block_bytes,
        num_blocks,
        most,
        config.scheduler.max_num_batched_tokens,
        context_parallel,
        num_states,
        state_bytes,
    )
    if memory is not None and (config.num_blocks is not None or config.kv_cache_bytes is not None):
        memory.check(size.num_bytes, _given(config))
    return size


def _given(config: EngineConfig) -> str:
    """Return the setting that gave a pool its size, and its value."""
    if config.num_blocks is not None:
        return f"num_blocks={config.num_blocks}"
    return "the default kv_cache_bytes" if config.kv_cache_bytes is None else f"kv_cache_bytes={config.kv_cache_bytes}"
