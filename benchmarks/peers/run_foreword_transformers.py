"""Foreword's engine with the model of transformers as its executor. Weights: the dtype."""

from __future__ import annotations

from pathlib import Path

from harness import main
from run_foreword import Foreword

from foreword import LLM


class ForewordTransformers(Foreword):
    engine = "foreword, transformers"

    def __init__(self, model: Path, weights: str, threads: int, longest: int) -> None:
        self.options = {"model": str(model), "num_threads": threads, "max_model_len": max(4096, longest)}
        self.options |= {"executor": "transformers", "dtype": weights}
        self.max_num_seqs = 64
        self.llm = LLM(**self.options, max_num_seqs=64)


if __name__ == "__main__":
    main(ForewordTransformers)
