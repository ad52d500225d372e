"""The search: conversations until one shows a difference that a second and third copy of it confirm."""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from foreword.blackbox.noise import Noise, measure
from foreword.blackbox.replay import Conversation, Difference, ServerError, Target, differences, leaked
from foreword.blackbox.scenarios import SCENARIOS, Draw, scenarios_of
from foreword.blackbox.server import Server
from foreword.blackbox.shrink import shrink

BLOCK_SIZES = (16, 32, 64, 128)
MAX_CHECKED = 6  # requests of a conversation that are also sent alone
MAX_FAILURES = 20  # conversations in a row in which a request failed
MAX_TRIALS = 200


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault, with the smallest conversation that shows it. difference: None for hits across salts.

    number: the number of the wrong request. num_shown, num_copies: num_shown of the last num_copies copies showed it.
    """

    scenario: str
    conversation: Conversation
    number: int
    difference: Difference | None
    num_cached: int
    num_shown: int
    num_copies: int


@dataclass(slots=True)
class Report:
    """The result of a search. failures: kind of failure → number of requests. unconfirmed: differences that did not
    occur again.
    """

    noise: Noise
    tolerance: float
    num_conversations: int = 0
    num_checked: int = 0
    unconfirmed: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    finding: Finding | None = None


@dataclass(frozen=True, slots=True)
class _Shown:
    """The observations of a copy of a conversation, by the requests' numbers: differences, and cached tokens of other
    salts.
    """

    differences: dict[int, Difference]
    leaks: dict[int, int]
    failures: dict[int, ServerError]

    @property
    def numbers(self) -> list[int]:
        return [*self.differences, *self.leaks]


@dataclass(frozen=True, slots=True)
class _Confirmed:
    """The number of copies that showed a fault, and the last one that did."""

    num_shown: int
    num_copies: int
    shown: _Shown


class Fuzzer:
    """Searches a server for faults. say: called with lines about the progress.

    block_sizes: the block sizes of the cache, or guesses. tolerance: in nats; None: it is measured. max_trials: the
    number of smaller conversations that are tried for a finding.
    """

    def __init__(
        self,
        server: Server,
        *,
        seed: int = 0,
        concurrency: int = 16,
        block_sizes: Sequence[int] = BLOCK_SIZES,
        tolerance: float | None = None,
        scenarios: Sequence[str] = (),
        max_trials: int = MAX_TRIALS,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._rng, self._seed, self._num_copies = random.Random(seed), seed, 0
        self.concurrency, self.block_sizes, self._say = concurrency, tuple(block_sizes), say
        self._max_trials = max_trials
        self._names = [name for name in scenarios_of(server) if not scenarios or name in scenarios]
        if not self._names:
            raise ServerError("no scenario left", "the server lacks what those asked for need")
        noise = measure(server, self._rng, concurrency)
        value = noise.tolerance if tolerance is None else tolerance
        if noise.texts_are_unstable and tolerance is None:
            value = 1.0  # without log-probabilities, distances are 0 or infinite
        self._server = replace(server, target=replace(server.target, tolerance=value))
        self.report = Report(noise, value)

    @property
    def target(self) -> Target:
        """The server with the tolerance of the search."""
        return self._server.target

    def run(self, *, seconds: float, max_conversations: int = 0) -> Report:
        """Hold conversations until one shows a fault, the time is over, or max_conversations were held (0: no limit).

        Raise ServerError if the server stops answering. A finding is also shrunk after the time is over, for at most
        the same time again or one minute, whichever is longer.
        """
        report, begin = self.report, time.monotonic()
        most, bad = max_conversations or math.inf, 0
        while time.monotonic() - begin < seconds and report.num_conversations < most:
            name = self._names[report.num_conversations % len(self._names)]
            conversation = self._drawn(name)
            shown = self._hold(conversation, self._checked(conversation))
            report.num_conversations += 1
            bad = bad + 1 if shown.failures else 0
            self._check_failures(shown, bad, conversation)
            if not shown.numbers:
                continue
            number = shown.numbers[0]
            self._say(f"{name}: request {number} of {len(conversation.asks)} is wrong; held again")
            confirmed = self._confirmed(conversation, number)
            if confirmed is None:
                report.unconfirmed += 1
                continue
            self._say("confirmed; looking for the smallest conversation that shows it")
            report.finding = self._shrunk(name, conversation, number, confirmed, time.monotonic() + max(60.0, seconds))
            break
        return report

    def _drawn(self, name: str) -> Conversation:
        fitting = [size for size in self.block_sizes if size <= self._server.max_words * self._server.tokens_per_word]
        size = self._rng.choice(fitting or [min(self.block_sizes)])
        return SCENARIOS[name](Draw(self._server, self._rng, size, self.concurrency))

    def _checked(self, conversation: Conversation) -> list[int]:
        """Return some requests that are read to their end, including the last one."""
        whole = [i for i, ask in enumerate(conversation.asks) if not ask.abort_after]
        return sorted([*self._rng.sample(whole[:-1], min(MAX_CHECKED, len(whole)) - 1), whole[-1]])

    def _hold(self, conversation: Conversation, numbers: list[int]) -> _Shown:
        """Hold a copy and compare these requests.

        If salts are in use and hits are counted, the counts of all requests are compared, too. Prompts are then not
        sent alone before the conversation, since they would be in the cache.
        """
        server, asks = self._server, conversation.asks
        counts = server.salts_are_promised and server.reports_hits and any(ask.salt for ask in asks)
        if counts and not server.target.cold_is_certain:
            numbers = []
        self._num_copies += 1
        copy = f"{self._seed} {self._num_copies} {time.time_ns()}"
        found, outcome = differences(server.target, copy, conversation, numbers)
        self.report.num_checked += len(numbers)
        self.report.failures.update(failure.kind for failure in outcome.failures.values())
        leaks = {i: leaked(asks, i, outcome) for i in range(len(asks))} if counts else {}
        return _Shown(found, {i: count for i, count in leaks.items() if count}, outcome.failures)

    def _check_failures(self, shown: _Shown, bad: int, conversation: Conversation) -> None:
        """Raise ServerError if the server has ended, or failed in too many conversations in a row."""
        failures = list(shown.failures.values())
        is_gone = len(failures) == len(conversation.asks) and all(failure.status == 0 for failure in failures)
        if is_gone or bad >= MAX_FAILURES:
            raise ServerError(failures[-1].kind, f"in {bad} conversations in a row; the last failure: {failures[-1]}")

    def _confirmed(self, conversation: Conversation, number: int) -> _Confirmed | None:
        """Hold further copies. Return None unless enough of them show the fault at this request.

        Two of three must show it, or all of six if texts are compared that sometimes differ without a fault.
        """
        copies, least = (6, 6) if self.report.noise.texts_are_unstable else (3, 2)
        held: list[_Shown] = []
        for i in range(copies):
            shown = self._hold(conversation, [number])
            held += [shown] if number in shown.numbers else []
            if len(held) + copies - i - 1 < least:
                return None
        return _Confirmed(len(held), copies, held[-1])

    def _shrunk(self, name: str, conversation: Conversation, number: int, best: _Confirmed, until: float) -> Finding:
        """Return the smallest conversation that was found within the time. Copies have confirmed each reduction."""
        trials = 0

        def goes_on() -> bool:
            return trials < self._max_trials and time.monotonic() < until

        def shows(candidate: Conversation, at: int) -> bool:
            nonlocal trials, best
            trials += 1
            try:
                confirmed = self._confirmed(candidate, at)
            except ServerError:
                return False
            best = confirmed or best
            return confirmed is not None

        small, at = shrink(conversation, number, shows, goes_on)
        return Finding(
            scenario=name,
            conversation=small,
            number=at,
            difference=best.shown.differences.get(at),
            num_cached=best.shown.leaks.get(at, 0),
            num_shown=best.num_shown,
            num_copies=best.num_copies,
        )
