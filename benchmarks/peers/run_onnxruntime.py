"""onnxruntime-genai: static batches of prompts of one length.

Weights: int4 (blocks of 32, 8-bit arithmetic, the output projection too) or fp32.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import ClassVar

import numpy as np
import onnxruntime_genai
from harness import main


class OnnxRuntime:
    engine, package = "onnxruntime-genai", "onnxruntime-genai"
    cannot: ClassVar[dict[str, str]] = {
        "W4": "batches are limited to 32",
        "W5": "batches are static and need prompts of one length",
        "W7": "rows of a batch share no prefix",
    }

    def __init__(self, model: Path, weights: str, threads: int, longest: int) -> None:
        config = onnxruntime_genai.Config(str(model))
        config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}))
        self.model = onnxruntime_genai.Model(config)

    def generate(self, prompts: list[list[int]], output_lens: list[int], max_num_seqs: int) -> list[int]:
        length = len(prompts[0]) + output_lens[0]
        params = onnxruntime_genai.GeneratorParams(self.model)
        params.set_search_options(batch_size=len(prompts), min_length=length, max_length=length, do_sample=False)
        generator = onnxruntime_genai.Generator(self.model, params)
        generator.append_tokens(np.array(prompts, np.int32))
        while not generator.is_done():
            generator.generate_next_token()
        return [len(generator.get_sequence(i)) - len(p) for i, p in enumerate(prompts)]


if __name__ == "__main__":
    main(OnnxRuntime)
