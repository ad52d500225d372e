"""OpenVINO GenAI: continuous batching pipeline on the CPU, prefix cache on.

Weights: fp32 or bf16 (hints on one model in floats), int8 or int4 (weights only).
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import numpy as np
import openvino
import openvino_genai
from harness import main


class OpenVino:
    engine, package = "openvino-genai", "openvino-genai"
    cannot: ClassVar[dict[str, str]] = {}

    def __init__(self, model: Path, weights: str, threads: int, longest: int) -> None:
        self.model = str(model)
        self.properties = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
        if weights in ("fp32", "bf16"):  # otherwise OpenVINO chooses: bf16 if the processor supports it
            self.properties["INFERENCE_PRECISION_HINT"] = {"fp32": "f32", "bf16": "bf16"}[weights]
        self.max_num_seqs = 64
        self.pipeline = self._pipeline()

    def _pipeline(self) -> openvino_genai.ContinuousBatchingPipeline:
        config = openvino_genai.SchedulerConfig()
        config.max_num_seqs = self.max_num_seqs
        config.max_num_batched_tokens = 2048
        config.cache_size = 2
        config.enable_prefix_caching = True
        return openvino_genai.ContinuousBatchingPipeline(self.model, config, "CPU", self.properties)

    def generate(self, prompts: list[list[int]], output_lens: list[int], max_num_seqs: int) -> list[int]:
        if len(prompts) > max_num_seqs != self.max_num_seqs:  # W5: more requests than max_num_seqs
            self.max_num_seqs = max_num_seqs
            self.pipeline = self._pipeline()
        configs = []
        for n in output_lens:
            config = openvino_genai.GenerationConfig()
            config.max_new_tokens, config.ignore_eos, config.do_sample = n, True, False
            configs.append(config)
        ids = [openvino.Tensor(np.array([p], np.int64)) for p in prompts]
        results = self.pipeline.generate(ids, configs)
        return [len(result.m_generation_ids[0]) for result in results]


if __name__ == "__main__":
    main(OpenVino)
