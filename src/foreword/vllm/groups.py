"""Convert vLLM's KV cache groups to those of this library."""

from __future__ import annotations

from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    get_kv_cache_spec_sliding_window,
    iter_layer_specs,
)

from foreword.batch import GroupUse, KVGroup
from foreword.errors import ConfigError


def groups_of(config: KVCacheConfig) -> tuple[list[KVGroup], dict[int, GroupUse]]:
    """Return the KV groups of an engine, and the use of the blocks of the groups whose `KVGroup` does not define it.

    Raise ConfigError for a kind of group that cannot be followed.
    """
    groups: list[KVGroup] = []
    uses: dict[int, GroupUse] = {}
    for g, group in enumerate(config.kv_cache_groups):
        spec = group.kv_cache_spec
        kinds = list(iter_layer_specs(spec))
        if not all(_is_followed(kind) for kind in kinds):
            raise ConfigError(f"KV group {g} of kind {type(kinds[0]).__name__} cannot be followed")
        if isinstance(kinds[0], MambaSpec):
            groups.append(_of_states(g, kinds[0]))
            uses[g] = GroupUse(slots=False)
            continue
        if isinstance(kinds[0], ChunkedLocalAttentionSpec):
            uses[g] = GroupUse(chunk=kinds[0].attention_chunk_size)
        groups.append(KVGroup(spec.block_size, sliding_window=get_kv_cache_spec_sliding_window(spec)))
    return groups, uses


def _is_followed(spec: KVCacheSpec) -> bool:
    if isinstance(spec, MambaSpec):
        return True
    known = FullAttentionSpec | SlidingWindowSpec | ChunkedLocalAttentionSpec
    is_known: bool = isinstance(spec, known) and spec.uses_slot_mapping and not isinstance(spec, CrossAttentionSpec)
    return is_known and isinstance(spec, AttentionSpec)


def _of_states(g: int, spec: MambaSpec) -> KVGroup:
    """Return a group with a state per request or, where prefixes are cached, one at each border of blocks."""
    if spec.mamba_cache_mode != "none":
        return KVGroup(spec.block_size)
    if spec.num_speculative_blocks:
        raise ConfigError(f"KV group {g}: recurrent states with drafts cannot be followed in mamba_cache_mode=none")
    return KVGroup(spec.block_size, recurrent=True)
