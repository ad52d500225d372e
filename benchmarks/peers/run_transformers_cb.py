"""transformers' continuous batching on the CPU: SDPA with a dense mask over all packed queries and keys, pages of 32.

`generate_batch` takes one output length for all prompts, which excludes W5; W7 needs a mask of 32 × 1,056 packed
queries over all their keys, which takes minutes.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import torch
from harness import main
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SLOW = "the dense mask over packed queries and keys takes minutes at this size on a CPU"


class TransformersCB:
    engine, package = "transformers CB", "transformers"
    cannot: ClassVar[dict[str, str]] = {
        "W4": SLOW,
        "W5": "generate_batch takes one output length for all prompts",
        "W7": SLOW,
    }

    def __init__(self, model: Path, weights: str, threads: int, longest: int) -> None:
        torch.set_num_threads(threads)
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=DTYPES[weights], attn_implementation="sdpa")
        self.model.eval()

    def generate(self, prompts: list[list[int]], output_lens: list[int], max_num_seqs: int) -> list[int]:
        outputs = self.model.generate_batch(
            prompts,
            generation_config=GenerationConfig(max_new_tokens=output_lens[0], do_sample=False, eos_token_id=-1),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=32, num_blocks=1280, max_batch_tokens=512, auto_switch_to_flash=False
            ),
        )
        return [len(output.generated_tokens) for output in outputs.values()]


if __name__ == "__main__":
    main(TransformersCB)
