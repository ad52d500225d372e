"""vLLM's model runner, called as by its `execute_model`."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm import LLM
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.outputs import SamplerOutput

from foreword.bench.traffic import BLOCK_SIZE, MAX_MODEL_LEN, MAX_NUM_TOKENS, VOCAB_SIZE, Step, Workload
from host.contenders import Tensors

I64 = npt.NDArray[np.int64]


class VllmRunner:
    """`_update_states`, `_prepare_inputs`, padding, slot mappings and the metadata common to all attention backends;
    then `_bookkeeping_sync`. The metadata builders of the backends are not timed, as for Foreword.
    """

    name = "vllm"

    def __init__(self, workload: Workload) -> None:
        self.llm = small_llama(workload)
        worker = self.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
        self.runner = worker.model_runner
        for groups in self.runner.attn_groups:
            for group in groups:
                group.build_metadata = _common_metadata

    def take(self, step: Step, output: Any) -> None:
        self.step, self.output = step, output

    def prepare(self) -> object:
        runner, output = self.runner, self.output
        num_tokens = output.total_num_scheduled_tokens
        runner._update_states(output)
        num_reqs = runner.input_batch.num_reqs
        counts = [output.num_scheduled_tokens[r] for r in runner.input_batch.req_ids]
        num_scheduled = np.array(counts, dtype=np.int32)
        longest = int(num_scheduled.max())
        self.logits_indices, self.spec, most_sampled = runner._prepare_inputs(output, num_scheduled)
        runner._determine_batch_execution_and_padding(
            num_tokens=num_tokens,
            num_reqs=num_reqs,
            num_scheduled_tokens_np=num_scheduled,
            max_num_scheduled_tokens=longest,
            num_encoder_reqs=0,
            allow_microbatching=runner._allow_microbatching(num_reqs, num_scheduled),
        )
        slots, _ = runner._get_slot_mappings(
            num_tokens_padded=num_tokens, num_reqs_padded=num_reqs, num_tokens_unpadded=num_tokens
        )
        self.metadata, _ = runner._build_attention_metadata(
            num_tokens=num_tokens,
            num_reqs=num_reqs,
            max_query_len=longest,
            logits_indices=self.logits_indices,
            max_num_sampled_tokens=most_sampled,
            use_spec_decode=self.spec is not None,
            num_scheduled_tokens=output.num_scheduled_tokens,
            slot_mappings=slots,
        )
        return self.metadata

    def tensors(self) -> Tensors:
        order = self._order()
        metadata = next(iter(self.metadata.values()))
        loc = metadata.query_start_loc.numpy()
        tokens = _ranges(loc, order)
        place = np.empty_like(tokens)
        place[tokens] = np.arange(len(tokens))
        drafts = np.zeros(len(order), np.int64) if self.spec is None else np.array(self.spec.num_draft_tokens)
        logits = _ranges(np.concatenate([[0], np.cumsum(drafts + 1)]), order)
        return {
            "input_ids": self.runner.input_ids.gpu.numpy()[tokens],
            "positions": self.runner.positions.numpy()[tokens],
            "slot_mapping": metadata.slot_mapping.numpy()[tokens],
            "query_start_loc": np.concatenate([[0], np.cumsum(np.diff(loc)[order])]),
            "seq_lens": metadata.seq_lens.numpy()[order],
            "logits_indices": place[self.logits_indices.numpy()[logits]],
        }

    def ready(self) -> None:
        sampled = np.empty_like(self.step.sampled)
        sampled[self._order()] = self.step.sampled
        if self.spec is None:
            sampled = np.maximum(
                sampled, 0
            )  # its sampler also samples for partial prompts; the token is discarded later
        self.sampled = SamplerOutput(sampled_token_ids=torch.from_numpy(sampled), logprobs_tensors=None)
        self.hidden = torch.zeros(self.output.total_num_scheduled_tokens, 1)

    def commit(self) -> object:
        num_tokens = self.output.total_num_scheduled_tokens
        return self.runner._bookkeeping_sync(self.output, self.sampled, None, self.hidden, num_tokens)

    def _order(self) -> I64:
        """Return the index of each request of the step in vLLM's batch, [B]."""
        place = {r: i for i, r in enumerate(self.runner.input_batch.req_ids)}
        return np.array([place[r] for r in self.output.num_scheduled_tokens], np.int64)


def _common_metadata(common: Any, *_: Any, **__: Any) -> Any:
    return common


def _ranges(loc: npt.NDArray[Any], order: I64) -> I64:
    """Return loc[b] … loc[b + 1] − 1 for each b of ``order``, concatenated."""
    return np.concatenate([np.arange(loc[b], loc[b + 1]) for b in order])


def small_llama(workload: Workload) -> LLM:
    """Return vLLM's engine for two layers of dummy weights, which are never run."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": MAX_MODEL_LEN,
        "vocab_size": VOCAB_SIZE,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "bfloat16",
    }
    drafting = {"method": "ngram", "num_speculative_tokens": workload.num_drafts, "prompt_lookup_max": 2}
    with tempfile.TemporaryDirectory() as model:
        (Path(model) / "config.json").write_text(json.dumps(config))
        # vLLM's CPU kernels, which never run here, need blocks of 32; the steps have blocks of 16.
        CPUAttentionBackend.get_supported_kernel_block_sizes = staticmethod(lambda *_: [MultipleOf(BLOCK_SIZE)])
        return LLM(
            model=model,
            load_format="dummy",
            skip_tokenizer_init=True,
            enforce_eager=True,
            async_scheduling=False,
            enable_prefix_caching=False,
            block_size=BLOCK_SIZE,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=workload.max_num_reqs,
            max_num_batched_tokens=MAX_NUM_TOKENS,
            num_gpu_blocks_override=2 * MAX_MODEL_LEN // BLOCK_SIZE,  # the cache itself is not accessed
            speculative_config=drafting if workload.num_drafts else None,
            disable_log_stats=True,
        )
