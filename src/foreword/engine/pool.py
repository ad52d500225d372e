"""The size of the KV pool of a model."""

from __future__ import annotations

from foreword.batch import ContextParallel, KVGroup
from foreword.cache import cache_group
from foreword.engine.config import EngineConfig
from foreword.engine.memory import KV_POOL_BYTES, HostMemory
from foreword.errors import ConfigError
from foreword.executors.pool import PoolSize, batch_groups
from foreword.models.spec import DecoderSpec


def pool_size(
    spec: DecoderSpec,
    config: EngineConfig,
    memory: HostMemory | None = None,
    *,
    bytes_per_value: float = 4,
    context_parallel_size: int = 1,
) -> PoolSize:
    """Return blocks for max_num_seqs requests of max_model_len, within kv_cache_bytes; ConfigError if no request fits,
    or if the pool does not fit into the host's memory. memory: None for a pool elsewhere, or one that exists already.

    max_model_len: the spec's own unless configured. A longrope model can be configured for more; then all requests use
    the frequencies for long contexts (`DecoderSpec.for_length`).
    block_bytes = 2 · storage slots · block_size · key_size · bytes_per_value · context_parallel_size
    context_parallel_size: a block has block_size tokens on each of so many ranks.

    A block of a model with recurrent layers holds their states, too: block_size is then the least multiple of the
    configured one with as many bytes of keys and values as a state has, or that holds a whole request. With drafts, a
    request takes a block more for each draft and recurrent KV group, if they are free.
    """
    length = request_length(spec.max_model_len, spec.longest_model_len, config)
    token_bytes = round(2 * spec.key_size * bytes_per_value)
    state_bytes = 4 * spec.state_size
    multiple = min(-(-state_bytes // (config.block_size * token_bytes)), -(-length // config.block_size))
    block_size = config.block_size * max(multiple, 1)
    cp = ContextParallel(context_parallel_size, 0) if context_parallel_size > 1 else None
    groups = batch_groups(spec, block_size, context_parallel=cp is not None)
    block_bytes = context_parallel_size * spec.num_slots * max(block_size * token_bytes, state_bytes)
    return pool_of(length, groups, block_bytes, config, memory, cp)


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
) -> PoolSize:
    """Return a pool of blocks of so many bytes; see `pool_size`."""
    chunk = min(length, config.scheduler.max_num_batched_tokens + config.most_draft_tokens)
    one = sum(cache_group(g, context_parallel).most_blocks(length, chunk) for g in groups)
    drafted = config.num_speculated_tokens * sum(g.recurrent for g in groups)  # states after drafts
    most = config.scheduler.max_num_seqs
    num_blocks = config.num_blocks
    if num_blocks is None:
        pool_bytes = default_pool_bytes(config, memory, (1 + one) * block_bytes)
        num_blocks = min(1 + (one + drafted) * most, pool_bytes // block_bytes)
        if num_blocks < 1 + one:
            if memory is not None and config.kv_cache_bytes is None:
                memory.check((1 + one) * block_bytes, f"max_model_len={length}")
            raise ConfigError(
                f"kv_cache_bytes={pool_bytes}: one request of max_model_len={length} tokens needs "
                f"{(1 + one) * block_bytes}; give that many, or lower max_model_len"
            )
    if memory is not None and (config.num_blocks is not None or config.kv_cache_bytes is not None):
        given = f"kv_cache_bytes={config.kv_cache_bytes}" if config.num_blocks is None else f"num_blocks={num_blocks}"
        memory.check(num_blocks * block_bytes, given)
    return PoolSize(
        length, groups, block_bytes, num_blocks, most, config.scheduler.max_num_batched_tokens, context_parallel
    )
