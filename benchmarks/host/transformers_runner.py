"""Input preparation of transformers' continuous batching, over its own paged cache."""

from __future__ import annotations

from typing import Any

import torch
from transformers import ContinuousBatchingConfig, LlamaConfig
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessorList
from transformers.generation.continuous_batching.distributed import DistributedHelper
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs
from transformers.generation.continuous_batching.requests import FutureRequestState, RequestState, RequestStatus
from transformers.generation.logits_process import LogitsProcessorList

from foreword.bench.traffic import MAX_MODEL_LEN, MAX_NUM_TOKENS, VOCAB_SIZE, Step, Workload
from host.contenders import Tensors

PAGE_SIZE = 256  # the default


class TransformersRunner:
    """prepare: `prepare_batch_tensors` and `get_model_kwargs`. Selecting requests and allocating pages belong to its
    scheduler and are not timed; `RequestState.update_and_check_completion`, its commit, is not called.

    Attention is set to flash, its fastest case: no dense masks, and block tables in steps of one token per request.
    """

    name = "transformers CB"

    def __init__(self, workload: Workload) -> None:
        config = LlamaConfig(
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
            head_dim=16,
            vocab_size=VOCAB_SIZE,
            max_position_embeddings=MAX_MODEL_LEN,
        )
        config._attn_implementation = "flash_attention_2"
        batching = ContinuousBatchingConfig(
            page_size=PAGE_SIZE,
            num_blocks=workload.max_num_reqs * (MAX_MODEL_LEN // PAGE_SIZE),
            max_batch_tokens=MAX_NUM_TOKENS,
            max_requests_per_batch=workload.max_num_reqs,
            max_blocks_per_request=MAX_MODEL_LEN // PAGE_SIZE,
            max_memory_percent=0.9,
            allow_block_sharing=False,
            use_async_batching=False,
            use_cuda_graph=(False, False),
        )
        device, dtype = torch.device("cpu"), torch.bfloat16
        self.cache = PagedAttentionCache(config, batching, device, DistributedHelper(None, None), dtype)
        self.processors = ContinuousBatchingLogitsProcessorList(LogitsProcessorList())
        self.inputs = ContinuousBatchingIOs(self.cache, config, batching, device, dtype, self.processors)
        self.states: dict[int, RequestState] = {}

    def take(self, step: Step, output: Any) -> None:
        self.step = step
        for r in step.departed.tolist():
            self.cache.free_blocks(str(r))
            del self.states[r]
        a, token = step.arrived, 0
        for r, n, computed in zip(a.numbers.tolist(), a.num_tokens.tolist(), a.num_computed.tolist(), strict=True):
            state = RequestState(str(r), a.tokens[token : token + n].tolist(), max_new_tokens=MAX_MODEL_LEN)
            self._give_pages(state, computed)
            state.remaining_prefill_tokens = state.initial_tokens[computed:]
            state.position_offset = computed
            state.status = RequestStatus.DECODING
            self.states[r] = state
            token += n
        self.batch = [
            self._scheduled(self.states[r], n)
            for r, n in zip(step.scheduled.tolist(), step.num_scheduled.tolist(), strict=True)
        ]
        self.longest = max(f.state.position_offset for f in self.batch)
        self.read = sum(f.state.position_offset for f in self.batch)

    def _scheduled(self, state: RequestState, count: int) -> FutureRequestState:
        if state.remaining_prefill_tokens:
            state.tokens_to_process = state.remaining_prefill_tokens[:count]
            state.remaining_prefill_tokens = state.remaining_prefill_tokens[count:]
        self._give_pages(state, count)
        return FutureRequestState(state, not state.remaining_prefill_tokens, {}, count)

    def _give_pages(self, state: RequestState, count: int) -> None:
        if count and not self.cache.can_store_request_tokens(state, count):
            raise RuntimeError("the paged cache is full")

    def prepare(self) -> object:
        one_each = self.step.num_scheduled.size == int(self.step.num_scheduled.sum())
        self.inputs.prepare_batch_tensors(
            self.batch, self.processors, one_each, int(self.step.num_scheduled.sum()), self.read, False
        )
        self.kwargs = self.inputs.get_model_kwargs()
        return self.kwargs

    def tensors(self) -> Tensors:
        return {
            "input_ids": self.kwargs["input_ids"][0].numpy(),
            "positions": self.kwargs["position_ids"][0].numpy(),
            "query_start_loc": self.kwargs["cu_seq_lens_q"].numpy(),
        }

    def ready(self) -> None:
        for future, sampled in zip(self.batch, self.step.sampled[:, 0].tolist(), strict=True):
            if future.has_new_token:
                future.state.update_and_check_completion(sampled, None)

    def commit(self) -> None:
        pass
