"""llama.cpp through the C interface of llama-cpp-python, with all sequences in one context.

The `Llama` class of the package runs one sequence at a time, so this runner batches: each call of `llama_decode` gets
one token per running sequence and prompt tokens up to 2,048 in total; greedy choice in NumPy. Sequences share no
prefix, as in its server.
"""

from __future__ import annotations

import ctypes
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import llama_cpp
import numpy as np
from harness import main

MAX_BATCH = 2048
CONTEXT_OF_ONE = 2304  # the longest request, of W6


@dataclass(slots=True)
class Sequence:
    prompt: list[int]
    wanted: int
    index: int
    computed: int = 0
    tokens: list[int] = field(default_factory=list)


class LlamaCpp:
    engine, package = "llama.cpp", "llama_cpp_python"
    cannot: ClassVar[dict[str, str]] = {}

    def __init__(self, model: Path, weights: str, threads: int) -> None:
        llama_cpp.llama_backend_init()
        self._log = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self._log, ctypes.c_void_p(0))
        self.model = llama_cpp.llama_model_load_from_file(str(model).encode(), llama_cpp.llama_model_default_params())
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.threads = threads
        self.batch = llama_cpp.llama_batch_init(MAX_BATCH, 0, 1)
        self.contexts: dict[int, ctypes.c_void_p] = {}

    def _context(self, num_seqs: int) -> ctypes.c_void_p:
        """A context with a separate cache per sequence, which is faster for large batches."""
        if num_seqs not in self.contexts:
            params = llama_cpp.llama_context_default_params()
            params.n_ctx = CONTEXT_OF_ONE * num_seqs
            params.n_batch = MAX_BATCH
            params.n_ubatch = 512
            params.n_seq_max = num_seqs
            params.n_threads = params.n_threads_batch = self.threads
            params.kv_unified = False
            self.contexts[num_seqs] = llama_cpp.llama_init_from_model(self.model, params)
        return self.contexts[num_seqs]

    def generate(self, prompts: list[list[int]], output_lens: list[int], max_num_seqs: int) -> list[int]:
        context = self._context(max_num_seqs)
        memory = llama_cpp.llama_get_memory(context)
        llama_cpp.llama_memory_clear(memory, False)
        waiting = deque(Sequence(p, n, i) for i, (p, n) in enumerate(zip(prompts, output_lens, strict=True)))
        running: dict[int, Sequence] = {}
        counts = [0] * len(prompts)
        while waiting or running:
            for slot in range(max_num_seqs):
                if slot not in running and waiting:
                    running[slot] = waiting.popleft()
            rows = self._fill(running)
            if llama_cpp.llama_decode(context, self.batch):
                raise RuntimeError("llama_decode failed")
            for row, slot in rows:
                sequence = running[slot]
                sequence.tokens.append(self._greedy(context, row))
                if len(sequence.tokens) == sequence.wanted:
                    counts[sequence.index] = len(sequence.tokens)
                    llama_cpp.llama_memory_seq_rm(memory, slot, -1, -1)
                    del running[slot]
        return counts

    def _fill(self, running: dict[int, Sequence]) -> list[tuple[int, int]]:
        """Fill the batch. Returns (row of logits, slot) of the sequences that get a token."""
        batch, t, rows = self.batch, 0, []
        for slot, s in sorted(running.items(), key=lambda item: not item[1].tokens):  # decodes first
            known = s.prompt if not s.tokens else s.tokens[-1:]
            start = s.computed if not s.tokens else 0
            count = min(len(known) - start, MAX_BATCH - t)
            for i in range(count):
                batch.token[t] = known[start + i]
                batch.pos[t] = s.computed + i
                batch.n_seq_id[t] = 1
                batch.seq_id[t][0] = slot
                batch.logits[t] = 0
                t += 1
            s.computed += count
            if count and start + count == len(known):
                batch.logits[t - 1] = 1
                rows.append((t - 1, slot))
        batch.n_tokens = t
        return rows

    def _greedy(self, context: ctypes.c_void_p, row: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(context, row)
        return int(np.ctypeslib.as_array(logits, (self.vocab_size,)).argmax())


if __name__ == "__main__":
    main(LlamaCpp)
