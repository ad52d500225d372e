"""transformers' `generate` on static batches, padded on the left, with SDPA attention.

W5 runs in batches of 32 in the given order, each until its longest output is complete; surplus tokens are not counted.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import torch
from harness import main
from transformers import AutoModelForCausalLM

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Transformers:
    engine, package = "transformers", "transformers"
    cannot: ClassVar[dict[str, str]] = {"W7": "rows of a batch share no prefix in generate"}

    def __init__(self, model: Path, weights: str, threads: int, longest: int) -> None:
        torch.set_num_threads(threads)
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=DTYPES[weights], attn_implementation="sdpa")
        self.model.eval()

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], output_lens: list[int], max_num_seqs: int) -> list[int]:
        counts = []
        for first in range(0, len(prompts), max_num_seqs):
            batch, wanted = prompts[first : first + max_num_seqs], output_lens[first : first + max_num_seqs]
            width = max(map(len, batch))
            ids = torch.tensor([[0] * (width - len(p)) + p for p in batch])
            mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in batch])
            out = self.model.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=False,
                min_new_tokens=max(wanted),
                max_new_tokens=max(wanted),
                pad_token_id=0,
            )
            counts += [min(n, out.shape[1] - width) for n in wanted]
        return counts


if __name__ == "__main__":
    main(Transformers)
