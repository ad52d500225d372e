"""Compute the memory of the host that an engine needs besides its KV pool, and the memory that is left for the pool."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace

from foreword.cache.tiers import QUEUE_BYTES
from foreword.engine.config import EngineConfig
from foreword.errors import ConfigError
from foreword.machine import memory_bytes, own_memory_bytes

KV_POOL_BYTES = 2 << 30
"""The default size of a pool, if enough memory is left."""
_STEPS = 2  # number of steps in flight, each with separate buffers
_ROW_BYTES = 512  # per request: columns of the rows, tensors of a step
_TOKEN_BYTES = 64  # per token of a step: tensors of a step
_OTHERS = "max_num_batched_tokens, max_num_seqs or max_model_len"


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Memory besides a KV pool, in bytes.

    usable: the memory of the machine that the process may use, within its control groups. needed: memory that every
    run needs, by its use. on_demand: the largest memory that some requests need, by its use. num_engines: the number of
    engines that share it. limit: a description of "usable" for messages.
    """

    usable: int
    needed: Mapping[str, int]
    on_demand: Mapping[str, int]
    num_engines: int = 1
    limit: str = "memory that the machine has or its container may use"

    def pool_bytes(self, least: int, num_pools: int = 1) -> int:
        """Return the default size of one of ``num_pools`` pools of each engine.

        With A the usable memory without the needed one, and B the memory that is also left without the one on demand,
        it is an equal part of max(B, A / 2), at most KV_POOL_BYTES, and at least ``least`` bytes if A has them.
        """
        left = self.usable - sum(self.needed.values())
        part = max(left - sum(self.on_demand.values()), left // 2) // (num_pools * self.num_engines)
        return min(KV_POOL_BYTES, max(part, min(least, left)))

    def check(self, pool_bytes: int, setting: str) -> None:
        """Raise ConfigError if a pool and the needed memory do not fit. Warn if they fit, but not together with the
        memory on demand. setting: the setting that gave the pool its size, for the message.
        """
        if pool_bytes + sum(self.needed.values()) > self.usable:
            raise ConfigError(f"{setting}: {self._text(pool_bytes, self.needed)}. {self._fix()}")
        if pool_bytes + sum((*self.needed.values(), *self.on_demand.values())) > self.usable:
            text = self._text(pool_bytes, {**self.needed, **self.on_demand})
            fix = f"Lower the pool, {_OTHERS}, or lora_bytes or grammar_cache_bytes"
            warnings.warn(f"{setting}: {text}, if requests use all of it. {fix}", stacklevel=2)

    def beside(self, name: str, size: int) -> HostMemory:
        """Return the memory with another needed part."""
        return replace(self, needed={**self.needed, name: size})

    def _text(self, pool_bytes: int, beside: Mapping[str, int]) -> str:
        """Return "a KV pool of 3.0 GiB, weights 1.0 GiB … are 4.2 GiB, of 4.0 GiB that …"."""
        large = [f"{name} {size_text(size)}" for name, size in beside.items() if size >= 1 << 20]
        parts = ", ".join(large) or "what has less than 1 MiB each"
        total = size_text(pool_bytes + sum(beside.values()))
        return (
            f"a KV pool of {size_text(pool_bytes)} and, beside it, {parts} are {total}, of {size_text(self.usable)} of "
            f"{self.limit}"
        )

    def _fix(self) -> str:
        left = self.usable - sum(self.needed.values())
        given = f"Give at most {size_text(left)}, or lower" if left >= 1 << 20 else "Lower"
        return f"{given} {_OTHERS}"


def host_memory(
    config: EngineConfig, *, weights: int, activations: int, vocab_size: int, length: int, num_groups: int
) -> HostMemory | None:
    """Return the memory of an engine; None if the system does not report the size of its memory.

    weights, activations: bytes, as the executor holds them. length: max_model_len. num_groups: KV groups.
    With R = max_num_seqs, N = max_num_batched_tokens, M = length, V = vocab_size, d draft tokens, block size S:

    process        resident memory before, without pages of files
    rows           4 R M + 4 R M / S per group + 512 R, and for each of two steps in flight the same tables + 64 N
    logits         4 V · min(N, R)
    on demand      logits of drafts 4 V · min(N, R (1 + d)) without those above, copies of logits that processors change
                   4 V · min(N, R), log-probabilities of prompts 4 V N, LoRA adapters lora_bytes, grammars
                   grammar_cache_bytes, blocks outside the pool host_cache_bytes and, with cache_dir, those that wait to
                   be written
    """
    usable = memory_bytes()
    if usable is None:
        return None
    limits = config.scheduler
    rows, tokens = limits.max_num_seqs, limits.max_num_batched_tokens
    tables = 4 * rows * -(-length // config.block_size) * num_groups + _ROW_BYTES * rows
    logits = 4 * vocab_size * min(tokens, rows)
    needed = {
        "process": own_memory_bytes(),
        "weights": weights,
        "rows": 4 * rows * length + tables + _STEPS * (tables + _TOKEN_BYTES * tokens),
        "activations": activations,
        "logits": logits,
    }
    on_demand = {
        "logits of drafts": 4 * vocab_size * min(tokens, rows * (1 + config.most_draft_tokens)) - logits,
        "changed logits": logits,
        "log-probabilities of prompts": 4 * vocab_size * tokens if config.max_logprobs else 0,
        "LoRA adapters": config.lora_bytes,
        "grammars": config.grammar_cache_bytes,
        "KV blocks outside the pool": config.host_cache_bytes + (QUEUE_BYTES if config.cache_dir is not None else 0),
    }
    return HostMemory(usable, needed, on_demand)


def size_text(size: int) -> str:
    """Return "1.5 GiB", "12 MiB" or "0.5 MiB"."""
    if size >= 1 << 30:
        return f"{size / 2**30:.1f} GiB"
    return f"{size / 2**20:.0f} MiB" if size >= 10 << 20 else f"{size / 2**20:.1f} MiB"
