"""vLLM's second model runner (`vllm.v1.worker.gpu`) on a CPU: its Python, with kernels that do nothing."""

from __future__ import annotations

import sys
from types import FunctionType
from typing import Any

import vllm.config.vllm
from vllm.triton_utils import triton
from vllm.v1.worker.gpu.dp_utils import dispatch_cg_and_sync_dp

from foreword.bench.traffic import Step, Workload
from host.contenders import Tensors
from host.vllm_runner import small_llama


class VllmV2Runner:
    """Call what its `execute_model` calls before the forward pass, except for attention backends' own metadata. The
    triton kernels are replaced, so that its tensors hold nothing and are not compared; nothing is committed, because it
    records samples in kernels.

    The environment must have VLLM_USE_V2_MODEL_RUNNER=1 before vLLM's first import.
    """

    name = "vllm V2"

    def __init__(self, workload: Workload) -> None:
        vllm.config.vllm.HAS_TRITON = True  # its kernels are not needed
        triton.next_power_of_2 = lambda n: 1 << max(n - 1, 0).bit_length()  # without a GPU vLLM has no triton
        self.llm = small_llama(workload)
        _replace_kernels()
        worker = self.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
        self.runner = worker.model_runner
        for groups in self.runner.attn_groups:
            for group in groups:
                for builder in group.metadata_builders:
                    builder.build = _common_metadata

    def take(self, step: Step, output: Any) -> None:
        self.output = output

    def prepare(self) -> object:
        runner, output = self.runner, self.output
        runner.update_pp_decode_requests()
        runner.finish_requests(output)
        runner.free_states(output)
        runner.add_requests(output)
        runner.update_requests(output)
        runner.block_tables.apply_staged_writes()
        state, uniform = runner.gather_batch_req_state(output, False)
        longest = None if state.has_prefill else max(output.num_scheduled_tokens.values())
        size, _ = dispatch_cg_and_sync_dp(
            runner.cudagraph_manager,
            len(output.num_scheduled_tokens),
            state.num_tokens,
            uniform,
            runner.dp_size,
            runner.dp_rank,
            max_query_len=longest,
            parallel_config=runner.parallel_config,
            uniform_decode=uniform == runner.decode_query_len,
        )
        batch = runner.prepare_inputs(output, state, size, 0)
        tables, slots = runner.prepare_attn(batch)
        return runner.model_state.prepare_attn(
            batch, size.cg_mode, tables, slots, runner.attn_groups, runner.kv_cache_config
        )

    def tensors(self) -> Tensors:
        return {}

    def ready(self) -> None:
        pass

    def commit(self) -> None:
        pass


class _Nothing:
    """A kernel whose launch does nothing."""

    def __getitem__(self, grid: Any) -> _Nothing:
        return self

    def __call__(self, *_: Any, **__: Any) -> None:
        pass


def _replace_kernels() -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith("vllm.v1.worker.gpu."):
            for attribute, value in list(vars(module).items()):
                if attribute.endswith("_kernel") and isinstance(value, FunctionType):
                    setattr(module, attribute, _Nothing())


def _common_metadata(*_: Any, **arguments: Any) -> Any:
    return arguments.get("common_attn_metadata")
