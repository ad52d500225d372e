"""llama.cpp's server code inside the process, through xllamacpp: its own slots, batches and prefix cache.

Each request is a call of its own from a thread, at most `max_num_seqs` at a time, as clients of the server would make.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import xllamacpp
from harness import main
from llama_batches import MAX_BATCH, context_of


class XLlamaCpp:
    engine, package = "xllamacpp", "xllamacpp"
    cannot: ClassVar[dict[str, str]] = {}

    def __init__(self, model: Path, weights: str, threads: int, longest: int) -> None:
        self.model, self.threads, self.longest = model, threads, longest
        self.max_num_seqs = 1
        self.server = self._server()

    def _server(self) -> xllamacpp.Server:
        params = xllamacpp.CommonParams()
        params.model.path = str(self.model)
        params.n_parallel = self.max_num_seqs
        params.n_ctx = context_of(self.max_num_seqs, self.longest)
        params.n_batch, params.n_ubatch = MAX_BATCH, 512
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = self.threads
        params.kv_unified = False
        params.verbosity = -1
        return xllamacpp.Server(params)

    def generate(self, prompts: list[list[int]], output_lens: list[int], max_num_seqs: int) -> list[int]:
        if max_num_seqs != self.max_num_seqs:
            del self.server
            self.max_num_seqs = max_num_seqs
            self.server = self._server()
        with ThreadPoolExecutor(max_num_seqs) as threads:
            return list(threads.map(self._complete, prompts, output_lens))

    def _complete(self, prompt: list[int], wanted: int) -> int:
        body = {"prompt": prompt, "max_tokens": wanted, "temperature": 0, "ignore_eos": True}
        answer = self.server.handle_completions(body)
        if "usage" not in answer:
            raise RuntimeError(f"xllamacpp: {answer}")
        return int(answer["usage"]["completion_tokens"])


if __name__ == "__main__":
    main(XLlamaCpp)
