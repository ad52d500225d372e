"""Grammars of requests, with limits of size and time."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import cached_property, partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, NoReturn, TypeVar

import numpy as np

from foreword.batch import SamplingParams, StructuredOutputs
from foreword.errors import RequestError
from foreword.sampling import Grammar
from foreword.sampling.masks import num_words
from foreword.structured.thinking import Thinking, ThinkingEnd
from foreword.structured.trial import MEMORY_BYTES, STACK_BYTES, BusyError, TooLargeError, Trial
from foreword.structured.vocabulary import TokenizerBytes, Vocabulary

if TYPE_CHECKING:
    from foreword.structured.backend import Backend

T = TypeVar("T")

MAX_CHARS = 1 << 17
COMPILE_SECONDS = 10.0
MAX_CACHED = 256


class GrammarCompiler:
    """Makes the grammars of one model's requests. May be used from any thread.

    vocab_size: of the model's logits. The tables of the vocabulary are made on first use (0.3 s for 49,152 tokens), and
    the latest compiled grammars are kept.
    """

    def __init__(self, tokenizer: TokenizerBytes, *, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self._tokenizer, self._vocab_size, self._eos_token_ids = tokenizer, vocab_size, frozenset(eos_token_ids)
        self._lock = threading.RLock()
        self._compiled: OrderedDict[StructuredOutputs, Grammar] = OrderedDict()

    def grammar(self, request_id: str, params: SamplingParams) -> Grammar | None:
        """What the parameters ask for, None for nothing. RequestError, with the reason, if it cannot be made."""
        grammar, value = None, params.structured_outputs
        if value is not None:
            grammar = self._matcher(request_id, StructuredOutputs.of(value, request_id))
        if params.thinking_end is None:
            return grammar
        return Thinking(self._thinking_end(request_id, params, has_grammar=grammar is not None), grammar)

    def _matcher(self, request_id: str, value: StructuredOutputs) -> Grammar:
        def refuse(reason: str, fix: str) -> NoReturn:
            raise value.refusal(request_id, reason, fix)

        with self._lock:
            if (known := self._compiled.get(value)) is not None:
                self._compiled.move_to_end(value)
                return known.copy()
        if len(value.text) > MAX_CHARS:
            refuse(f"has {len(value.text)} characters, more than {MAX_CHARS}", "Use a smaller one.")
        if not self._eos_token_ids:
            refuse("the model has no end token, which ends such an output", "Use another model.")
        try:
            backend, trial = self._made_backend()
        except ImportError:
            refuse("needs llguidance, which is not installed", "Run pip install 'foreword[grammar]'.")
        try:
            trial.compile(replace(value, origin=None, parts=()), COMPILE_SECONDS)
            made = in_deep_thread(partial(backend.compile, value), COMPILE_SECONDS)
        except BusyError:
            refuse(f"waited {COMPILE_SECONDS:g} s for others to be compiled", "Try again later.")
        except MemoryError:
            raise
        except Exception as error:
            for part in value.parts:
                self._matcher(request_id, part)  # raises the error of the part that cannot be compiled
            if isinstance(error, TimeoutError):
                refuse(f"takes more than {COMPILE_SECONDS:g} s to compile", "Use a simpler one.")
            if isinstance(error, TooLargeError):
                refuse(f"takes more than {MEMORY_BYTES >> 20} MiB to compile", "Use a simpler one.")
            reason = "cannot be compiled: " + " ".join(str(error).split())
            refuse(reason, "See docs/structured-outputs.md for what is supported.")
        with self._lock:
            self._compiled[value] = made
            if len(self._compiled) > MAX_CACHED:
                self._compiled.popitem(last=False)
        return made.copy()

    def _made_backend(self) -> tuple[Backend, Trial]:
        with self._lock:
            return self._backend

    @cached_property
    def _backend(self) -> tuple[Backend, Trial]:
        from foreword.structured.backend import Backend  # needs llguidance, which is optional

        return Backend(self._vocabulary), Trial(self._vocabulary)

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return Vocabulary(self._tokenizer, vocab_size=self._vocab_size, eos_token_ids=self._eos_token_ids)

    def _thinking_end(self, request_id: str, params: SamplingParams, *, has_grammar: bool) -> ThinkingEnd:
        with self._lock:
            vocabulary = self._vocabulary
        end, budget = params.thinking_end, params.thinking_budget
        if isinstance(end, str):
            text = end.encode(errors="ignore")
            tokens = vocabulary(end) if text.decode() == end else []
        else:
            tokens = [int(end or 0)]
            text = vocabulary.bytes_of(tokens)
        if not text or not tokens:
            fix = "Give a text that the model's tokens can make."
            raise RequestError(request_id, "thinking_end", end, "is not a text of the model's vocabulary", fix)
        start = params.thinking_start
        if isinstance(start, str):
            found = vocabulary(start)
            if len(found) != 1:
                fix = "Give the text of one token, or leave it out if every output begins with thinking."
                raise RequestError(
                    request_id, "thinking_start", start, "is not one token of the model's vocabulary", fix
                )
            start = found[0]
        allowed = np.arange(32 * num_words(self._vocab_size)) < self._tokenizer.vocab_size
        if has_grammar:  # else the output could end before it
            allowed[list(self._eos_token_ids)] = False
        words = np.packbits(allowed, bitorder="little").view("<i4")
        return ThinkingEnd(text, tokens, budget, words, vocabulary.tokens, start)


def in_deep_thread(work: Callable[[], T], seconds: float) -> T:
    """The result of ``work()``, or its error, from a thread with a large stack; TimeoutError after these seconds, while
    the thread continues.
    """
    outcome: SimpleQueue[tuple[T | None, Exception | None]] = SimpleQueue()

    def run() -> None:
        try:
            outcome.put((work(), None))
        except BaseException as error:
            # No interrupt comes here: what is no Exception is a panic in llguidance.
            outcome.put((None, error if isinstance(error, Exception) else RuntimeError(str(error))))

    with _starting:
        usual = threading.stack_size(STACK_BYTES)
        try:
            threading.Thread(target=run, name="foreword-compile", daemon=True).start()
        finally:
            threading.stack_size(usual)
    try:
        result, error = outcome.get(timeout=seconds)
    except Empty:
        raise TimeoutError from None
    if error is not None:
        raise error
    return result  # type: ignore[return-value]


_starting = threading.Lock()  # the size of new stacks is one setting of the process
