"""Compute masks and forced tokens of grammars in a thread.

A mask is computed while the model runs. No signal interrupts a grammar here, because only the main thread gets signals.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from foreword.arrays import I32
from foreword.batch import InputBatch
from foreword.engine.planner_thread import PlannerThread
from foreword.sampling import Grammar, TokenMasks, token_masks


class GrammarThread:
    """A thread that starts with its first work."""

    def __init__(self) -> None:
        self._thread: PlannerThread[None] | None = None
        self._masks: TokenMasks | None = None  # the result of the latest step

    def masks(self, batch: InputBatch, grammars: Mapping[int, Grammar], vocab_size: int) -> TokenMasks | None:
        """Return `token_masks`, whose words are computed from now on. The grammars must not be used before `wait`."""
        self._masks = token_masks(batch, grammars, vocab_size, self._start)
        return self._masks

    def wait(self) -> None:
        """Wait until the masks of the step are computed, even if no sampler has read them."""
        if self._masks is not None:
            self._masks.wait()
            self._masks = None

    def forced_tokens(self, grammars: Sequence[Grammar], limits: Sequence[int], width: int) -> I32:
        """Return at most limits[i] ≤ width forced tokens of each grammar i: int32 [n, width] padded with −1."""
        found = np.full((len(grammars), width), -1, np.int32)
        self._start(partial(_fill_forced, grammars, limits, found))()
        return found

    def reset(self) -> None:
        """Stop all computations, including those that an interrupt left unfinished."""
        if self._thread is not None:
            self._thread.settle()
        self._masks = None

    def close(self) -> None:
        if self._thread is not None:
            self._thread.close()
            self._thread = None

    def _start(self, work: Callable[[], None]) -> Callable[[], None]:
        if self._thread is None:
            self._thread = PlannerThread()
        self._thread.start(work)
        return partial(_result, self._thread)


def _result(thread: PlannerThread[None]) -> None:
    _, error = thread.wait()
    if error is not None:
        raise error


def _fill_forced(grammars: Sequence[Grammar], limits: Sequence[int], found: I32) -> None:
    for i, grammar in enumerate(grammars):
        try:
            tokens = grammar.forced_tokens(limits[i])
        except MemoryError:
            raise
        except Exception:  # its mask reports the error
            continue
        found[i, : len(tokens)] = tokens
