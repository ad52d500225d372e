"""mistral.rs through its Python package, on a GGUF file, with its own scheduler and prefix cache.

It takes text only. So each token id is replaced by a word that is one token with the space before it, different words
for different ids: a text has as many tokens as the prompt, which is checked, and the same shared prefix.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

from harness import main
from mistralrs import CompletionRequest, Runner, Which


class MistralRs:
    engine, package = "mistral.rs", "mistralrs"
    cannot: ClassVar[dict[str, str]] = {}

    def __init__(self, model: Path, weights: str, threads: int, longest: int) -> None:
        os.environ["RAYON_NUM_THREADS"] = str(threads)  # read at the first product
        self.runner = Runner(Which.GGUF(str(model.parent), model.name), max_seqs=64)
        self.words = self._words(4096)

    def _words(self, count: int) -> list[str]:
        """Return words that are one token after any other of them."""
        words: list[str] = []
        token = 0
        while len(words) < count:
            text = self.runner.detokenize_text([token], False, None)
            if text.startswith(" ") and text[1:].isascii() and text[1:].isalpha():
                words.append(text)
            token += 1
        return words

    def generate(self, prompts: list[list[int]], output_lens: list[int], max_num_seqs: int) -> list[int]:
        with ThreadPoolExecutor(max_num_seqs) as threads:
            return list(threads.map(self._complete, prompts, output_lens))

    def _complete(self, prompt: list[int], wanted: int) -> int:
        text = "".join(self.words[token % len(self.words)] for token in prompt)
        request = CompletionRequest(
            prompt=text, model="default", max_tokens=wanted, temperature=0.0, top_k=1, ignore_eos=True
        )
        usage = self.runner.send_completion_request(request).usage
        if usage.prompt_tokens != len(prompt):
            raise RuntimeError(f"mistral.rs read {usage.prompt_tokens} tokens, expected {len(prompt)}")
        return int(usage.completion_tokens)


if __name__ == "__main__":
    main(MistralRs)
