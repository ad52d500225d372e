"""nano-vllm under a shadow.

llm = LLM(path, enforce_eager=True)
shadow = follow(llm.model_runner, get_context, on_finding=log_finding)
llm.generate(prompts, sampling_params)
print(shadow.report())
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from foreword.batch import KVGroup, RequestStates
from foreword.shadow.following import Following, on_cpu
from foreword.shadow.shadow import Scheduled, Shadow


def follow(runner: Any, get_context: Callable[[], Any], **settings: Any) -> Shadow:
    """Follow every step of a `ModelRunner`, that of rank 0 if there are several. Return the shadow.

    get_context: nano-vllm's function that returns the context which its attention layers read.
    settings: those of `Shadow`. Tensors on a GPU are copied to the host, which waits for the copies of the step.
    """
    config = runner.config
    states = RequestStates(
        # requests that continue to run during a prefill, and the requests of the prefill
        max_num_reqs=2 * config.max_num_seqs,
        max_model_len=config.max_model_len,
        vocab_size=config.hf_config.vocab_size,
        kv_groups=[KVGroup(runner.block_size)],
        null_block=-1,
    )
    shadow = Shadow(
        states,
        max_num_batched_tokens=max(config.max_num_batched_tokens, config.max_num_seqs),
        num_blocks=config.num_kvcache_blocks,
        **settings,
    )
    following, known = Following(shadow), dict[str, Any]()
    prepare_prefill, prepare_decode, run = runner.prepare_prefill, runner.prepare_decode, runner.run

    def prepared(seqs: Sequence[Any], made: tuple[Any, Any]) -> tuple[Any, Any]:
        gone = [req_id for req_id, seq in known.items() if not seq.block_table]  # finished or preempted
        for req_id in gone:
            del known[req_id]
        known.update((str(seq.seq_id), seq) for seq in seqs)
        following.prepared([scheduled(seq) for seq in seqs], tensors_of(*made, get_context()), gone)
        return made

    def followed_run(seqs: Sequence[Any], is_prefill: bool) -> list[int]:
        tokens: list[int] = run(seqs, is_prefill)
        following.sampled({str(seq.seq_id): [token] for seq, token in zip(seqs, tokens, strict=True)})
        return tokens

    runner.prepare_prefill = lambda seqs: prepared(seqs, prepare_prefill(seqs))
    runner.prepare_decode = lambda seqs: prepared(seqs, prepare_decode(seqs))
    runner.run = followed_run
    return shadow


def scheduled(seq: Any) -> Scheduled:
    """Return the step of a `Sequence`."""
    return Scheduled(
        str(seq.seq_id),
        seq.token_ids,
        seq.num_prompt_tokens,
        seq.num_cached_tokens,
        seq.num_scheduled_tokens,
        [list(seq.block_table)],
    )


def tensors_of(input_ids: Any, positions: Any, context: Any) -> dict[str, Any]:
    """Return the tensors of a prefill or a decode, by Foreword's names."""
    tensors: dict[str, Any] = {
        "input_ids": on_cpu(input_ids),
        "positions": on_cpu(positions),
        "slot_mapping": [on_cpu(context.slot_mapping)],
    }
    if context.is_prefill:
        tensors |= {
            "query_start_loc": on_cpu(context.cu_seqlens_q),
            "seq_lens": np.diff(on_cpu(context.cu_seqlens_k)),
            "max_query_len": int(context.max_seqlen_q),
            "max_seq_len": int(context.max_seqlen_k),
        }
    else:
        tensors["seq_lens"] = on_cpu(context.context_lens)
    if context.block_tables is not None:
        tensors["block_table"] = [on_cpu(context.block_tables)]
    return tensors
