"""Foreword's own engine. Weights: a weight format; "weights/cache" with the KV cache's format, otherwise bf16; and
"weights/cache/preallocated", where the cache's memory is provided at the start, as vLLM's is.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import ClassVar

from harness import main

from foreword import LLM, SamplingParams


class Foreword:
    engine, package = "foreword", "foreword"
    cannot: ClassVar[dict[str, str]] = {}

    def __init__(self, model: Path, weights: str, threads: int, longest: int) -> None:
        weight_format, kv_format, *rest = weights.split("/") if "/" in weights else (weights, "bf16")
        if rest not in ([], ["preallocated"]):
            raise ValueError(f"--weights {weights}: expected weights, weights/cache or weights/cache/preallocated")
        self.options = {"model": str(model), "num_threads": threads, "max_model_len": max(4096, longest)}
        self.options |= {"weight_format": weight_format, "kv_format": kv_format, "preallocate_kv": bool(rest)}
        self.max_num_seqs = 64
        self.llm = LLM(**self.options, max_num_seqs=64)

    def generate(self, prompts: list[list[int]], output_lens: list[int], max_num_seqs: int) -> list[int]:
        if len(prompts) > max_num_seqs != self.max_num_seqs:  # W5: more requests than max_num_seqs
            self.max_num_seqs = max_num_seqs
            self.llm.close()
            del self.llm  # so that its weights and cache are not in memory beside those of the next one
            gc.collect()
            self.llm = LLM(**self.options, max_num_seqs=max_num_seqs)
        params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False) for n in output_lens]
        outputs = self.llm.generate(prompts, params, progress=False)
        return [len(output.outputs[0].token_ids) for output in outputs]


if __name__ == "__main__":
    main(Foreword)
