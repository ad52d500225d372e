"""Limit the work that the server takes on at the same time. What goes beyond is refused at once, with the time to
come back.
"""

from __future__ import annotations

import time
from collections import Counter
from math import ceil

from foreword.server.config import ServerConfig
from foreword.server.errors import HttpError
from foreword.server.failures import ANSWER_TOO_LARGE, FULL
from foreword.server.key_limits import KeyUses

LARGE_ANSWER = 64 << 20  # bytes: smaller answers are not counted
LONGEST_WAIT = 60  # largest number of seconds in Retry-After


class Admission:
    """Counts the completions in progress (being tokenized, waiting or running), the tokens of their prompts and the
    memory of large answers.

    A request with more completions or tokens than a limit is refused only while there are others, else served alone.
    One whose answer may take more memory than the limit is always refused. num_refused: by the limit that was reached.
    keys: what each API key uses, within its own limits.
    """

    def __init__(self, max_requests: int, max_prompt_tokens: int, max_answer_bytes: int) -> None:
        self._max_requests, self._max_prompt_tokens = max_requests, max_prompt_tokens
        self._max_answer_bytes = max_answer_bytes
        self.num_requests = self.num_prompt_tokens = self.num_answer_bytes = 0
        self.num_refused: Counter[str] = Counter()
        self.keys = KeyUses({})
        self._seconds = 1.0  # that a request takes, the latest ones counting most

    @classmethod
    def of(cls, config: ServerConfig) -> Admission:
        """Return one with the limits of a server."""
        found = cls(config.max_requests, config.max_prompt_tokens, config.max_answer_bytes)
        found.keys = KeyUses(config.key_limits)
        return found

    def enter(self, num_requests: int) -> Place:
        """Return a place for some completions, which must be left at the end. Raise HttpError 429 if there is none."""
        if self.num_requests and self.num_requests + num_requests > self._max_requests:
            self._refuse("requests", f"{self.num_requests} requests are in progress, of max_requests")
        self.num_requests += num_requests
        return Place(self, num_requests)

    def add_tokens(self, count: int) -> None:
        """Raise HttpError 429 if the prompts in progress have too many tokens."""
        if self.num_prompt_tokens and self.num_prompt_tokens + count > self._max_prompt_tokens:
            self._refuse("tokens", f"prompts in progress have {self.num_prompt_tokens} tokens, of max_prompt_tokens")
        self.num_prompt_tokens += count

    def check_bytes(self, count: int) -> None:
        """Raise HttpError 400 if an answer may take more memory than allowed."""
        limit = self._max_answer_bytes
        if count > limit:
            reason = f"the answer may take {count} bytes of memory, more than max_answer_bytes = {limit}"
            fix = "Ask for fewer prompts, completions (n), tokens (max_tokens) or log-probabilities"
            raise HttpError(ANSWER_TOO_LARGE, f"{reason}. {fix}", param="max_tokens")

    def has_room(self, count: int) -> bool:
        """Return whether there is memory for an answer beside those in progress."""
        return count < LARGE_ANSWER or self.num_answer_bytes + count <= self._max_answer_bytes

    def add_bytes(self, count: int) -> int:
        """Count the memory of an answer, if it is large, and return what was counted. Raise HttpError 400 if it is more
        than allowed, 429 if the answers in progress take the rest.
        """
        self.check_bytes(count)
        if count < LARGE_ANSWER:
            return 0
        if not self.has_room(count):
            self._refuse("bytes", f"answers in progress may take {self.num_answer_bytes} bytes, of max_answer_bytes")
        self.num_answer_bytes += count
        return count

    def leave(self, num_requests: int, num_prompt_tokens: int, seconds: float) -> None:
        self.num_requests -= num_requests
        self.num_prompt_tokens -= num_prompt_tokens
        self._seconds += 0.1 * (seconds - self._seconds)

    def _refuse(self, limit: str, reason: str) -> None:
        self.num_refused[limit] += 1
        wait = min(ceil(self._seconds / max(self.num_requests, 1)), LONGEST_WAIT)
        raise HttpError(FULL, f"the server is full: {reason}. Try again", headers={"Retry-After": str(max(wait, 1))})


class Place:
    """The share of the limits that one request has taken. Leaving and ending twice is harmless."""

    __slots__ = ("_admission", "_num_bytes", "_num_requests", "_num_tokens", "_started")

    def __init__(self, admission: Admission, num_requests: int) -> None:
        self._admission, self._num_requests, self._num_tokens, self._num_bytes = admission, num_requests, 0, 0
        self._started = time.perf_counter()

    def add_tokens(self, count: int) -> None:
        self._admission.add_tokens(count)
        self._num_tokens += count

    def add_bytes(self, count: int) -> None:
        """See `Admission.add_bytes`."""
        self._num_bytes += self._admission.add_bytes(count)

    def leave(self) -> None:
        """Give back what the engine has done."""
        if self._num_requests:
            seconds = time.perf_counter() - self._started
            self._admission.leave(self._num_requests, self._num_tokens, seconds)
            self._num_requests = 0

    def end(self) -> None:
        """Give back the memory of the answer, which the client has got, and all else."""
        self.leave()
        self._admission.num_answer_bytes -= self._num_bytes
        self._num_bytes = 0
