"""vLLM's second model runner without a model: see `foreword.vllm.bare_runner`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import set_current_vllm_config
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.gpu.sample.output import SamplerOutput

from foreword.vllm.bare_runner import BareModel, Sizes, cache_config_of, platform_runner, scheduler_output

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as Runner
else:
    Runner = object


class SecondModel(BareModel, torch.nn.Module):  # type: ignore[misc]  # torch is Any where it is not installed
    """A model without layers, whose modules the runner iterates over."""

    def forward(self, positions: torch.Tensor, **_: Any) -> torch.Tensor:
        return torch.zeros(positions.shape[-1], 1, device=positions.device)

    def get_mrope_input_positions(
        self, input_tokens: Sequence[int], mm_features: Sequence[Any]
    ) -> tuple[torch.Tensor, int]:
        """Return the rotary positions of a prompt, and of the outputs that a resumed request has."""
        positions, delta = super().get_mrope_input_positions(input_tokens, mm_features)
        later = torch.arange(positions.shape[1], len(input_tokens)) + delta
        return torch.cat([positions, later.expand(len(positions), -1)], dim=1), delta


class GivenDrafts:
    """A speculator that proposes nothing: the drafts of a decision are written into the rows before its step."""

    draft_logits = None
    pcp_manager = None
    supports_mm_inputs = False

    def __init__(self, most: int) -> None:
        self._most = most

    def init_cudagraph_manager(self, _: Any) -> None:
        pass

    def propose(self, input_batch: Any, *_: Any, **__: Any) -> torch.Tensor:
        return torch.zeros(input_batch.num_reqs, self._most, dtype=torch.int64, device=input_batch.idx_mapping.device)


class BareSecondRunner(Runner):  # type: ignore[misc]  # vLLM's classes are Any
    """The runner of a platform without its model. Its samples are taken from ``forced``, {req_id: tokens}.

    rotary: the rotary positions of the requests that the step admits. req_ids: the requests of the last step, in batch
    order.
    """

    forced: Mapping[str, Sequence[int]]
    rotary: Mapping[str, tuple[Sequence[Sequence[int]], int] | None]
    req_ids: list[str]
    speculator: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.speculator is not None:
            self.speculator = GivenDrafts(self.num_speculative_steps)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        add_request = self.model_state.add_request

        def add(req_index: int, data: Any) -> None:
            self.model.rotary = self.rotary[data.req_id]
            add_request(req_index, data)

        self.model_state.add_request = add

    def load_lora_model(self, model: Any, *_: Any) -> Any:
        return model

    def _set_active_loras(self, *_: Any, **__: Any) -> None:
        pass

    def prepare_attn(self, input_batch: Any) -> Any:
        self.req_ids = list(input_batch.req_ids)
        return super().prepare_attn(input_batch)

    def sample(self, hidden_states: Any, input_batch: Any, _: Any) -> tuple[SamplerOutput, torch.Tensor, torch.Tensor]:
        given = [list(self.forced.get(req_id, ())) for req_id in input_batch.req_ids]
        num_logits = input_batch.cu_num_logits.diff()[: len(given)]
        ids = torch.zeros(len(given), 1 + self.num_speculative_steps, dtype=torch.int64)
        for b, tokens in enumerate(given):
            ids[b, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
        num_sampled = torch.tensor([len(tokens) for tokens in given], dtype=torch.int32).to(self.device)
        num_rejected = torch.where(num_sampled > 0, num_logits - num_sampled, 0).to(torch.int32)
        return SamplerOutput(ids.to(self.device), None, None, num_sampled, num_rejected), num_sampled, num_rejected

    def run(self, decision: Mapping[str, Any]) -> None:
        """Prepare a step, and return its samples."""
        self.forced = decision["sampled"]
        self.rotary = {one["req_id"]: one["rotary"] for one in decision["new"]}
        rows = self.req_states.req_id_to_index
        with torch.inference_mode():
            for req_id, ids in decision["drafts"].items():
                if req_id in rows:
                    drafts = torch.tensor(ids, device=self.device).clamp(min=0)  # -1 where they are not recorded
                    self.req_states.draft_tokens[rows[req_id], : len(ids)] = drafts
            self.execute_model(scheduler_output(decision))
            if (output := self.sample_tokens(None)) is not None:
                output.get_output()


def bare_second_runner(sizes: Sizes, hooks: Callable[[type], type] = lambda runner_class: runner_class) -> Any:
    """Return this platform's second runner without a model, with new memory. hooks: a function that returns a subclass
    of its class.

    Where Triton is missing, its kernels are replaced by the functions of this package.
    """
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    from foreword.vllm.registration import plugin  # it imports the kernels' modules

    plugin()
    runner_class, vllm_config, device = platform_runner(sizes, "ngram_gpu")
    vllm_config.cache_config.kv_cache_layout = next(iter(KVCacheLayout)).name  # any: no cache is allocated
    bare = hooks(type(f"Bare{runner_class.__name__}", (BareSecondRunner, runner_class), {}))
    with set_current_vllm_config(vllm_config):
        runner = bare(vllm_config, device)
        runner.load_model(model=SecondModel())
        runner.initialize_kv_cache(cache_config_of(sizes))
    return runner
