"""The attention context of nano-vllm: one for prefill, one for decode. A mixed step is a prefill with block tables."""

from __future__ import annotations

from dataclasses import dataclass

from foreword.arrays import I32
from foreword.batch.features.bidirectional import refuse_ranges
from foreword.batch.features.paged import flash_attn_varlen
from foreword.batch.step.tensors import BatchTensors, filled, refuse_spread
from foreword.batch.values.attention import AttentionState


@dataclass(frozen=True, slots=True, eq=False)
class Context:
    """The values that nano-vllm's attention layers read.

    Prefill: cu_seqlens_q, cu_seqlens_k int32 [B + 1], and block_tables only if some key is in the cache already
    (otherwise the keys are the step's own). Decode: context_lens int32 [B] and block_tables.
    block_tables: int32 [B, longest row], padded with −1. slot_mapping: int32 [T].
    """

    is_prefill: bool
    slot_mapping: I32
    cu_seqlens_q: I32 | None = None
    cu_seqlens_k: I32 | None = None
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    context_lens: I32 | None = None
    block_tables: I32 | None = None


def nano_vllm_context(batch: BatchTensors, group: int = 0) -> Context:
    """Return the step as nano-vllm prepares it, without input_ids and positions; valid as long as the batch is."""
    refuse_spread(batch, group, "nano-vllm's context")
    refuse_ranges(batch, "nano-vllm's context")
    varlen = flash_attn_varlen(batch, group)
    slots: I32 = filled(batch, "slot_mapping_int32", batch.slot_mapping[group][: batch.num_tokens], group)
    if batch.attention_state is AttentionState.DECODE_ONLY:
        context_lens = batch.seq_lens[: batch.num_reqs]
        return Context(False, slots, context_lens=context_lens, block_tables=varlen.block_table)
    cached = bool(varlen.cu_seqlens_k[-1] > varlen.cu_seqlens_q[-1])
    return Context(
        True,
        slots,
        varlen.cu_seqlens_q,
        varlen.cu_seqlens_k,
        varlen.max_seqlen_q,
        varlen.max_seqlen_k,
        block_tables=varlen.block_table if cached else None,
    )
