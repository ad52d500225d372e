"""The tensors of a step of vLLM's first model runner, by the names of Foreword (docs/tensors.md).

This file needs vLLM alone. `foreword rerun --as-test` copies it into the test that it prints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

SAMPLING = {
    "sampling.temperature": "temperature_cpu",
    "sampling.top_p": "top_p_cpu",
    "sampling.top_k": "top_k_cpu",
    "sampling.frequency_penalty": "frequency_penalties_cpu",
    "sampling.presence_penalty": "presence_penalties_cpu",
    "sampling.repetition_penalty": "repetition_penalties_cpu",
}


def step_tensors(
    runner: Any,
    metadata: Mapping[str, Any],
    input_ids: Any,
    logits_indices: Any,
    drafts: Any,
    block_sizes: Sequence[int],
) -> dict[str, Any]:
    """Return what a step's model is about to read.

    metadata: of the layers of attention. input_ids: the model's argument, None where it gets embeddings alone: those
    of a multimodal model are made of the runner's ids.
    logits_indices, drafts: those that `_prepare_inputs` returned. block_sizes: of the scheduler, per KV group.
    """
    batch = runner.input_batch
    B = batch.num_reqs
    scheduled = runner.num_scheduled_tokens.np[:B]
    T = int(scheduled.sum())
    of_groups = [metadata.get(group.layer_names[0]) for group in runner.kv_cache_config.kv_cache_groups]
    first = next((m for m in of_groups if hasattr(m, "query_start_loc")), None)  # states have metadata of their own
    if input_ids is None and runner.supports_mm_inputs and not runner.enable_prompt_embeds:
        input_ids = runner.input_ids.gpu
    values: dict[str, Any] = {
        "input_ids": None if input_ids is None else input_ids[:T],
        "positions": runner.positions[:T],
        "num_tokens": T,
        "num_computed_tokens": runner.num_computed_tokens[:B],
        "num_scheduled_tokens": scheduled,
        "req_indices": runner.req_indices.np[:T],
        "discard_mask": runner.discard_request_mask.np[:B],
        "logits_indices": logits_indices,
        "slot_mapping": [slots_of(m, T) for m in of_groups[: len(block_sizes)]],
        "block_table": [
            table_of(getattr(m, "block_table", None), table, B, size)
            for m, table, size in zip(of_groups, batch.block_table.block_tables, block_sizes, strict=False)
        ],
    }
    if first is not None:
        values |= {
            "query_start_loc": first.query_start_loc[: B + 1],
            "seq_lens": first.seq_lens[:B],
            "max_query_len": first.max_query_len,
        }
    if not runner.is_pooling_model:
        values |= {name: getattr(batch, attribute)[:B] for name, attribute in SAMPLING.items()}
        values["sampling.top_k"] = top_k_of(values["sampling.top_k"], batch.vocab_size)
    if runner.uses_mrope:
        values["mrope_positions"] = runner.mrope_positions.gpu[:, :T]
    if drafts is not None:
        values |= drafts_of(drafts)
    if runner.lora_config:
        adapters = batch.request_lora_mapping[:B]
        values |= {"lora_requests": adapters, "lora_tokens": np.repeat(adapters, scheduled)}
    return {name: value for name, value in values.items() if value is not None}


def top_k_of(column: Any, vocab_size: int) -> Any:
    """Return top_k with 0 for all tokens; vLLM has the size of the vocabulary."""
    return np.where(column >= vocab_size, 0, column)


def drafts_of(metadata: Any) -> dict[str, Any]:
    """Return the tensors of a SpecDecodeMetadata. Offsets begin with 0 here."""
    lead = metadata.cu_num_draft_tokens.new_zeros(1)
    return {
        "num_draft_tokens": np.array(metadata.num_draft_tokens),
        "cu_num_draft_tokens": torch.cat([lead, metadata.cu_num_draft_tokens]),
        "cu_num_logits": torch.cat([lead, metadata.cu_num_sampled_tokens]),
        "target_logits_indices": metadata.target_logits_indices,
        "bonus_logits_indices": metadata.bonus_logits_indices,
        "draft_token_ids": metadata.draft_token_ids,
    }


def slots_of(metadata: Any, num_tokens: int) -> Any:
    """Return the slots of a group's tokens, None for layers whose tokens have none."""
    slots = getattr(metadata, "slot_mapping", None)
    return None if slots is None else slots[:num_tokens]


def table_of(read: Any, table: Any, num_reqs: int, block_size: int) -> Any:
    """Return the block table of a group as its layers read it, in blocks of the scheduler."""
    found = table.get_device_tensor(num_reqs) if read is None else read[:num_reqs]
    return unsplit(found, table.block_size, block_size)


def unsplit(table: Any, kernel_block_size: int, block_size: int) -> Any:
    """Return a table in blocks of block_size tokens of one whose blocks are parts of them."""
    parts = block_size // kernel_block_size
    return table if parts == 1 else table[:, ::parts] // parts
