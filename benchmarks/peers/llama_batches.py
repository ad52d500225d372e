"""Sequences of one llama.cpp context, batched for `llama_decode`: what the packages of llama.cpp and its forks share.

Each call of `llama_decode` gets one token per running sequence and prompt tokens up to 2,048 in total; the choice is
greedy, in NumPy. Sequences share no prefix, as in the server of llama.cpp.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

MAX_BATCH = 2048
CONTEXT_OF_ONE = 2304  # the context of one of several sequences; a request of W6 fits, too


@dataclass(slots=True)
class Sequence:
    prompt: list[int]
    wanted: int
    index: int
    computed: int = 0
    tokens: list[int] = field(default_factory=list)


def context_of(num_seqs: int, longest: int) -> int:
    """Return the tokens of a context for so many sequences, in which one alone may have ``longest`` tokens.

    Longer prompts than W6 are alone, so the contexts of many sequences need not have room for one of them in each.
    """
    return max(CONTEXT_OF_ONE * num_seqs, longest)


class LlamaBatches(ABC):
    """api: the module with the functions of llama.cpp's C interface. A context is kept per number of sequences."""

    cannot: ClassVar[dict[str, str]] = {}

    def __init__(self, api: Any, vocab_size: int, longest: int) -> None:
        self.api, self.vocab_size, self.longest = api, vocab_size, longest
        self.batch = api.llama_batch_init(MAX_BATCH, 0, 1)
        self.contexts: dict[int, Any] = {}

    @abstractmethod
    def new_context(self, num_seqs: int) -> Any:
        """Return a context for this number of sequences, see `sized`."""

    def sized(self, params: Any, num_seqs: int, threads: int) -> Any:
        """Set the sizes and threads of a context's parameters, and return them."""
        params.n_ctx = context_of(num_seqs, self.longest)
        params.n_batch, params.n_ubatch = MAX_BATCH, 512
        params.n_seq_max = num_seqs
        params.n_threads = params.n_threads_batch = threads
        return params

    @abstractmethod
    def clear(self, context: Any) -> None:
        """Empty the cache of a context."""

    @abstractmethod
    def remove(self, context: Any, slot: int) -> None:
        """Remove one sequence from the cache."""

    def generate(self, prompts: list[list[int]], output_lens: list[int], max_num_seqs: int) -> list[int]:
        if max_num_seqs not in self.contexts:
            self.contexts[max_num_seqs] = self.new_context(max_num_seqs)
        context = self.contexts[max_num_seqs]
        self.clear(context)
        waiting = deque(Sequence(p, n, i) for i, (p, n) in enumerate(zip(prompts, output_lens, strict=True)))
        running: dict[int, Sequence] = {}
        counts = [0] * len(prompts)
        while waiting or running:
            for slot in range(max_num_seqs):
                if slot not in running and waiting:
                    running[slot] = waiting.popleft()
            rows = self._fill(running)
            if self.api.llama_decode(context, self.batch):
                raise RuntimeError("llama_decode failed")
            for row, slot in rows:
                sequence = running[slot]
                sequence.tokens.append(self._greedy(context, row))
                if len(sequence.tokens) == sequence.wanted:
                    counts[sequence.index] = len(sequence.tokens)
                    self.remove(context, slot)
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

    def _greedy(self, context: Any, row: int) -> int:
        logits = self.api.llama_get_logits_ith(context, row)
        return int(np.ctypeslib.as_array(logits, (self.vocab_size,)).argmax())
