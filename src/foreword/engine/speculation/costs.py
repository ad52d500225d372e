"""The measured cost of steps, and a limit on what wrong drafts may cost."""

from __future__ import annotations

import math

import numpy as np

from foreword.arrays import F64

MOST_SEEN = 10.0  # steps of a size that count: one more changes its cost by at least a share of 1 / 11
LARGEST_SURPRISE = 0.5  # a difference of logarithms; larger ones are caused by other programs on the processor
REACH = 1.5  # a measurement with n tokens also concerns steps of n / REACH to n · REACH tokens
LOSS = 0.00125  # share of the time of steps by which the credit grows, and as much again the reserve
FIRST_CREDIT, LARGEST_CREDIT = 0.75, 8.0  # in steps without drafts
LARGEST_RESERVE = 0.5
UNVERIFIED = 0.25  # what a draft that was not verified and would have been right moves from the reserve, per row


class StepCosts:
    """The cost of a step that only decodes, by its number of tokens, at most ``most``.

    It begins as max(overhead + n, saturated · n) for n tokens, and is corrected by the times of steps: two in a row
    with the same requests and with n and m tokens give the ratio of the costs of n and m. The context, and the speed of
    the machine, which hardly change between two steps, do not matter.
    """

    def __init__(self, most: int, *, overhead: float = 18.0, saturated: float = 2.8) -> None:
        n = np.maximum(np.arange(most + 1.0), 1.0)
        self.log_cost = np.log(np.maximum(overhead + n, saturated * n))
        self._log_size = np.log(n) / np.log(REACH)
        self._seen = np.zeros(most + 1)  # steps measured
        self._last = 0, 0.0  # tokens and seconds of the last step, 0 tokens for one that cannot be compared

    def relative(self, num_tokens: int, num_more: int) -> F64:
        """Return the costs of steps with num_tokens + 0 … num_more tokens, relative to the first: [num_more + 1].

        At least 1: more tokens never cost less, whatever was measured.
        """
        return np.exp(np.maximum(self.logarithms(num_tokens, num_more), 0.0))

    def ratio(self, num_tokens: int, num_more: int) -> float:
        """Return the last of `relative`."""
        return math.exp(max(float(self.log_cost[num_tokens + num_more] - self.log_cost[num_tokens]), 0.0))

    def logarithms(self, num_tokens: int, num_more: int, *, every: int = 1) -> F64:
        """Return the logarithms of the costs of steps with num_tokens + 0, every, 2 · every … num_more tokens, relative
        to the first.
        """
        found = self.log_cost[num_tokens : num_tokens + num_more + 1 : every]
        relative: F64 = found - found[0]
        return relative

    def measure(self, num_tokens: int, seconds: float, *, follows: bool) -> None:
        """Learn from a step that only decoded. follows: whether the last one measured was the step before, with the
        same requests.
        """
        before, seconds_before = self._last
        self._last = num_tokens, seconds
        if follows and before not in (0, num_tokens) and seconds > 0 and seconds_before > 0:
            known = self.log_cost[num_tokens] - self.log_cost[before]
            surprise = np.log(seconds / seconds_before) - known
            surprise = min(max(surprise, -LARGEST_SURPRISE), LARGEST_SURPRISE)
            weight, weight_before = 1 / (1 + self._seen[num_tokens]), 1 / (1 + self._seen[before])
            step = surprise * max(weight, weight_before) / (weight + weight_before)
            self._correct(num_tokens, step * weight)
            self._correct(before, -step * weight_before)
            self._seen[[num_tokens, before]] = np.minimum(self._seen[[num_tokens, before]] + 1, MOST_SEEN)

    def _correct(self, num_tokens: int, step: float) -> None:
        """Correct the cost of a size, and of others near it the more, the less is known about them."""
        low, high = int(num_tokens / REACH), int(num_tokens * REACH) + 1
        distance = np.abs(self._log_size[low:high] - self._log_size[num_tokens])
        share = np.maximum(1 - distance, 0) / (1 + self._seen[low:high])
        share[num_tokens - low] = 1
        self.log_cost[low:high] += step * share


class Credit:
    """The limit of what drafts cost, in steps without drafts: what drafts gained before, and a share of the time.

    steps: the credit. Drafts that are all wrong cost at most that much; what they gain is added, up to
    `LARGEST_CREDIT`. reserve: becomes credit while drafts that are not verified would have been right. Each step adds
    `LOSS` to both.

    So whatever drafts are right, in n steps they cost at most 2 · `LOSS` · n and what both were before, which is
    `FIRST_CREDIT` + `LARGEST_RESERVE` at most for a request that is alone. This holds as far as the costs are known.
    """

    def __init__(self) -> None:
        self.steps, self.reserve = FIRST_CREDIT, LARGEST_RESERVE

    def start(self) -> None:
        """Begin with a request, which need not repeat what those before it did."""
        self.steps = min(self.steps, FIRST_CREDIT)

    def add(self, gain: float) -> None:
        """Record that a step gained so many steps by its drafts; a loss is negative."""
        steps = self.steps + LOSS + gain
        self.steps = min(steps, LARGEST_CREDIT)
        self.reserve = min(self.reserve + LOSS + steps - self.steps, LARGEST_RESERVE)

    def add_unverified(self, right: float) -> None:
        """Record a step without drafts. right: the number of drafts per row that would have been right, less those that
        would have been wrong.
        """
        self.add(0.0)
        moved = min(UNVERIFIED * right, LARGEST_CREDIT - self.steps, self.reserve)
        if moved > 0:
            self.steps, self.reserve = self.steps + moved, self.reserve - moved
