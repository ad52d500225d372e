"""Compile the grammars of requests within limits of size and time."""

from __future__ import annotations

import json
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import cached_property, partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from foreword.batch import SamplingParams, StructuredOutputs
from foreword.errors import RequestError
from foreword.installation import install
from foreword.sampling import Grammar
from foreword.sampling.masks import num_words
from foreword.structured.places import Place, refused_place
from foreword.structured.thinking import Thinking, ThinkingEnd
from foreword.structured.trial import MEMORY_BYTES, STACK_BYTES, BusyError, TooLargeError, Trial
from foreword.structured.vocabulary import TokenizerBytes, Vocabulary

if TYPE_CHECKING:
    from foreword.structured.backend import Backend

T = TypeVar("T")

COMPILE_SECONDS = 10.0
QUICK_SECONDS = 0.5
"""The time after which a grammar no longer makes quicker ones wait: see `GrammarCompiler.settle`."""
TRY_AGAIN = "Try again later."
TIMEOUT_HOLDS = 60.0  # seconds
WHOLE = Place("", None)
MAX_CACHED = 256
CACHE_BYTES = 256 << 20


class _Refusal(NamedTuple):
    """The reason why a grammar is refused. seconds: how long the refusal is cached; a grammar that took too long may
    compile in time when the machine is less busy. place: the part of a JSON schema that is refused.
    """

    reason: str
    fix: str
    seconds: float = math.inf
    place: Place = WHOLE


class _Known(NamedTuple):
    """A cached outcome, its memory in bytes, and the time of the monotonic clock until which it is valid."""

    made: Grammar | _Refusal
    num_bytes: int
    until: float


class GrammarCompiler:
    """Make the grammars of one model's requests. It may be used from any thread.

    vocab_size: the number of the model's logits. cache_bytes: the memory for compiled grammars, of which the most
    recently used are kept. The reasons why grammars cannot be compiled are cached, too. The tables of the vocabulary
    are made on first use (0.3 s for 49,152 tokens).
    """

    def __init__(
        self,
        tokenizer: TokenizerBytes,
        *,
        vocab_size: int,
        eos_token_ids: Collection[int],
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        self._tokenizer, self._vocab_size, self._eos_token_ids = tokenizer, vocab_size, frozenset(eos_token_ids)
        self._cache_bytes = cache_bytes
        self._lock = threading.RLock()
        self._known: OrderedDict[StructuredOutputs, _Known] = OrderedDict()
        self._num_bytes = 0

    def grammar(self, request_id: str, params: SamplingParams) -> Grammar | None:
        """Return the grammar of the parameters, or None if they have none. Raise a RequestError with the reason if it
        cannot be made.
        """
        grammar, given, must_follow = None, params.structured_outputs, False
        if given is not None:
            value = StructuredOutputs.of(given, request_id)
            grammar = self._matcher(request_id, value)
            # One that tools alone ask for allows an answer without a call, and a call may end the thinking.
            must_follow = value.origin is None or value.origin.field != "tools"
        if params.thinking_end is None:
            return grammar
        return Thinking(self._thinking_end(request_id, params, must_follow=must_follow), grammar)

    def settle(self, params: SamplingParams, seconds: float) -> bool:
        """Compile the constraint, so that `grammar` has the outcome at once. Return False if this takes longer than the
        given seconds.
        """
        value = params.structured_outputs
        return value is None or self._outcome(StructuredOutputs.of(value), seconds) is not None

    def _matcher(self, request_id: str, value: StructuredOutputs) -> Grammar:
        outcome = self._outcome(value, COMPILE_SECONDS)
        if outcome is None:
            outcome = _Refusal(f"takes more than {COMPILE_SECONDS:g} s to compile", "Use a simpler one.")
        if not isinstance(outcome, _Refusal):
            return outcome.copy()
        for part in value.parts:
            self._matcher(request_id, part)  # raises the error of the part that cannot be compiled
        raise value.refusal(request_id, outcome.reason, outcome.fix, *outcome.place)

    def _outcome(self, value: StructuredOutputs, seconds: float) -> Grammar | _Refusal | None:
        """Return the grammar or the refusal, or None if compiling takes longer than the given seconds."""
        with self._lock:
            known = self._known.get(value)
            if known is not None and time.monotonic() < known.until:
                self._known.move_to_end(value)
                return known.made
        made, num_bytes = self._compiled(value, seconds)
        if made is not None and not (isinstance(made, _Refusal) and made.fix == TRY_AGAIN):
            self._keep(value, made, num_bytes + len(value.text))
        return made

    def _compiled(self, value: StructuredOutputs, seconds: float) -> tuple[Grammar | _Refusal | None, int]:
        """Return the outcome, as `_outcome` does, with the memory of the grammar."""
        if len(value.text) > value.MAX_CHARS:
            reason = f"has {len(value.text)} characters, more than {value.MAX_CHARS}"
            return _Refusal(reason, "Use a smaller one."), 0
        if not self._eos_token_ids:
            return _Refusal("the model has no end token, which ends such an output", "Use another model."), 0
        try:
            backend, quick, patient = self._made_backend()
        except ImportError:
            return _Refusal("needs llguidance, which is not installed", install("grammar")), 0
        trial = quick if seconds < COMPILE_SECONDS else patient
        try:
            num_bytes = trial.compile(replace(value, origin=None, parts=()), seconds)
            return in_deep_thread(partial(backend.compile, value), COMPILE_SECONDS), num_bytes
        except BusyError:
            return _Refusal(f"waited {seconds:g} s for others to be compiled", TRY_AGAIN), 0
        except TimeoutError:
            if seconds < COMPILE_SECONDS:
                return None, 0
            reason = f"takes more than {COMPILE_SECONDS:g} s to compile"
            return _Refusal(reason, "Use a simpler one.", TIMEOUT_HOLDS), 0
        except TooLargeError:
            return _Refusal(f"takes more than {MEMORY_BYTES >> 20} MiB to compile", "Use a simpler one."), 0
        except MemoryError:
            raise
        except Exception as error:
            place = self._place(value, str(error), backend, trial) if value.kind == "json" else WHOLE
            reason = "cannot be compiled: " + " ".join(str(error).split())
            return _Refusal(reason, "See docs/structured-outputs.md for what is supported.", place=place), 0

    def _place(self, value: StructuredOutputs, reason: str, backend: Backend, trial: Trial) -> Place:
        """Return the part of a schema that is refused for this reason."""

        def refusal(text: str) -> str | None:
            part = replace(value, text=text, origin=None, parts=())
            trial.compile(part, QUICK_SECONDS)
            try:
                in_deep_thread(partial(backend.compile, part), QUICK_SECONDS)
            except ValueError as error:
                return str(error)
            return None

        try:
            return refused_place(json.loads(value.text), reason, refusal, QUICK_SECONDS)
        except (BusyError, TimeoutError, TooLargeError, ValueError, RecursionError):  # a part takes longer than all
            return WHOLE

    def _keep(self, value: StructuredOutputs, made: Grammar | _Refusal, num_bytes: int) -> None:
        """Cache an outcome, and drop the least recently used ones while they take too much memory."""
        with self._lock:
            if (before := self._known.pop(value, None)) is not None:
                self._num_bytes -= before.num_bytes
            until = time.monotonic() + (made.seconds if isinstance(made, _Refusal) else math.inf)
            self._known[replace(value, origin=None, parts=())] = _Known(made, num_bytes, until)
            self._num_bytes += num_bytes
            while self._known and (len(self._known) > MAX_CACHED or self._num_bytes > self._cache_bytes):
                self._num_bytes -= self._known.popitem(last=False)[1].num_bytes

    def _made_backend(self) -> tuple[Backend, Trial, Trial]:
        """Return the backend, and the processes that try to compile: one for short trials, one for long trials."""
        with self._lock:
            return self._backend

    @cached_property
    def _backend(self) -> tuple[Backend, Trial, Trial]:
        from foreword.structured.backend import Backend  # needs llguidance, which is optional

        return Backend(self._vocabulary), Trial(self._vocabulary), Trial(self._vocabulary)

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return Vocabulary(self._tokenizer, vocab_size=self._vocab_size, eos_token_ids=self._eos_token_ids)

    def _thinking_end(self, request_id: str, params: SamplingParams, *, must_follow: bool) -> ThinkingEnd:
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
        if must_follow:  # otherwise the output could end before the grammar
            allowed[list(self._eos_token_ids)] = False
        words = np.packbits(allowed, bitorder="little").view("<i4")
        return ThinkingEnd(text, tokens, budget, words, vocabulary.tokens, start)


def in_deep_thread(work: Callable[[], T], seconds: float) -> T:
    """Run ``work()`` in a thread with a large stack. Return its result or raise its error; raise TimeoutError after
    these seconds, while the thread continues.
    """
    outcome: SimpleQueue[tuple[T | None, Exception | None]] = SimpleQueue()

    def run() -> None:
        try:
            outcome.put((work(), None))
        except BaseException as error:
            # Interrupts do not reach this thread: a BaseException that is not an Exception is a panic in llguidance.
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


_starting = threading.Lock()  # the stack size of new threads is a setting of the whole process
