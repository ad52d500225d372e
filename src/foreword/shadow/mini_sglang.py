"""mini-sglang under a shadow.

llm = LLM(path)  # which is a Scheduler
shadow = follow(llm, on_finding=log_finding)
llm.generate(prompts, sampling_params)
print(shadow.report())
"""

from __future__ import annotations

from typing import Any

import numpy as np

from foreword.arrays import AnyArray
from foreword.batch import KVGroup, RequestStates
from foreword.shadow.following import Following, on_cpu
from foreword.shadow.shadow import Scheduled, Shadow


def follow(scheduler: Any, **settings: Any) -> Shadow:
    """Follow every step of a `Scheduler`, with or without overlap. Return the shadow.

    The cache has one KV group with blocks of one token, since the page table has a slot per token. settings: those of
    `Shadow`. Tensors on a GPU are copied to the host when a step is launched; the copy waits for the work that computes
    them.
    """
    engine, table = scheduler.engine, scheduler.engine.page_table
    rows, length = table.shape
    states = RequestStates(
        max_num_reqs=2 * rows,
        max_model_len=length,
        vocab_size=2**31 - 1,  # the engine does not provide it here
        kv_groups=[KVGroup(1)],
        null_block=-1,
    )
    shadow = Shadow(
        states,
        max_num_batched_tokens=max(scheduler.prefill_budget, rows),
        num_blocks=engine.num_pages * engine.ctx.page_size,
        **settings,
    )
    following, known = Following(shadow), set[str]()
    forward_batch, process_last_data = engine.forward_batch, scheduler._process_last_data

    def followed_forward(batch: Any, args: Any) -> Any:
        pending = scheduler.prefill_manager.pending_list
        whole = {id(waiting.chunked_req): waiting.input_ids for waiting in pending if waiting.chunked_req is not None}
        live = {str(req.uid) for req in (*batch.reqs, *scheduler.decode_manager.running_reqs)}
        live.update(str(waiting.uid) for waiting in pending)
        gone = known - live
        known.difference_update(gone)
        known.update(str(req.uid) for req in batch.reqs)
        longest = max(req.device_len for req in batch.reqs)
        slots = on_cpu(table[:, :longest][[req.table_idx for req in batch.reqs]])
        requests = [
            scheduled(req, whole.get(id(req), req.input_ids), slots[b, : req.device_len])
            for b, req in enumerate(batch.reqs)
        ]
        following.prepared(requests, tensors_of(batch, engine.ctx.page_size), gone)
        return forward_batch(batch, args)

    def followed_process(last_data: Any) -> None:
        process_last_data(last_data)
        if last_data is not None:
            batch, tokens = last_data[0].batch, on_cpu(last_data[1].next_tokens_cpu).tolist()
            following.sampled({str(req.uid): [token] for req, token in zip(batch.reqs, tokens, strict=False)})

    engine.forward_batch = followed_forward
    scheduler._process_last_data = followed_process
    return shadow


def scheduled(req: Any, prompt: Any, slots: AnyArray) -> Scheduled:
    """Return the step of a `Req`. prompt: the whole prompt, if the request has only a part."""
    tokens = on_cpu(prompt)
    return Scheduled(str(req.uid), tokens, len(tokens), req.cached_len, req.device_len - req.cached_len, [slots])


def tensors_of(batch: Any, page_size: int) -> dict[str, Any]:
    """Return the tensors of a `Batch` by Foreword's names, without those of the dummies that pad it."""
    computed = np.array([req.cached_len for req in batch.reqs], np.int64)
    lengths = np.array([req.device_len for req in batch.reqs], np.int64)
    B, T, metadata = len(batch.reqs), int((lengths - computed).sum()), batch.attn_metadata
    tensors: dict[str, Any] = {
        "input_ids": on_cpu(batch.input_ids)[:T],
        "positions": on_cpu(batch.positions)[:T],
        "slot_mapping": [on_cpu(batch.out_loc)[:T]],
    }
    if hasattr(metadata, "indices"):  # FlashInfer
        tensors["query_start_loc"] = on_cpu(metadata.cu_seqlens_q_cpu)[: B + 1]
        tensors["seq_lens"] = on_cpu(metadata.seq_lens_cpu)[:B]
        tensors["read_slots"] = [on_cpu(metadata.indices)[: int(lengths.sum())]]
    else:  # FlashAttention
        tensors["query_start_loc"] = on_cpu(metadata.cu_seqlens_q)[: B + 1]
        tensors["seq_lens"] = on_cpu(metadata.cache_seqlens)[:B]
        pages = on_cpu(metadata.page_table)[:B].astype(np.int64)
        slots = (pages[:, :, None] * page_size + np.arange(page_size)).reshape(B, -1)
        tensors["read_slots"] = [slots[np.arange(slots.shape[1]) < lengths[:, None]]]
    return tensors
