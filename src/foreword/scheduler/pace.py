"""The largest number of prompt tokens of a step in which other requests stream their answers."""

from __future__ import annotations

from math import inf

OVERHEAD = 8.0  # cost of a step apart from its tokens, in tokens of requests that decode: a first estimate
LEAST = 4  # prompt tokens of a step, whatever was measured, so that prompts end
GAIN = 0.1  # share of its weight that what is known of the cost of decoding loses with each step
GAIN_OF_PROMPTS = 0.3  # and what is known of that of prompts
LARGEST_SURPRISE = 2.0  # factor between both; larger ones are caused by other programs on the processor
LARGEST_DELAY = 0.25  # share of the expected time; larger ones are caused by other programs, or by a wrong estimate
CAUTION = 7.0  # mean delays that are left free: 1 % of normal times exceed their mean by 5.8, and estimates vary too
MOST_MIXED = 32  # steps with prompts in a row; the next one has none, so that its time is the cost of decoding


class PromptPace:
    """Bounds the prompt tokens of a step so that they take at most a share of its time.

    A step with d tokens of requests that decode and p of prompts is expected to take decode · (overhead + d) + prompt ·
    p seconds. Steps without prompts correct decode, steps with both correct prompt. Until there are such, both are
    estimated from any step. The bound is for nearly all steps, not for their mean: it is lower, the more prompts take
    longer than expected.

    is_limited: false for the share 1.
    """

    def __init__(self, share: float, overhead: float = OVERHEAD) -> None:
        self.is_limited = share < 1
        self._factor = share / (1 - share) if share < 1 else inf
        self._overhead = overhead
        self._decode = self._prompt = 0.0
        self._delay = 0.0  # mean of what prompts took longer than expected, 0 if they did not, relative to it
        self._num_decoded = 0  # steps without prompts that were measured
        self._num_mixed = 0  # steps with prompts since the last of these
        self._knows_prompts = False  # whether a step with both was measured

    def limit(self, num_decoding: int) -> int:
        """Return the largest number of prompt tokens of a step with so many tokens of requests that decode."""
        if self._num_mixed >= MOST_MIXED:
            return 0
        relative = self._decode / self._prompt if self._prompt else 1.0
        factor = self._factor / (1 + CAUTION * self._delay)
        return max(int(min(factor * relative * (self._overhead + num_decoding), 2**31)), LEAST)

    def measure(self, num_decoding: int, num_prompt: int, seconds: float) -> None:
        """Learn from the time of a step with so many tokens of requests that decode, and of prompts."""
        if seconds <= 0:
            return
        if not self._prompt:
            self._decode = self._prompt = seconds / (self._overhead + num_decoding + num_prompt)
        of_decode, of_prompt = self._decode * (self._overhead + num_decoding), self._prompt * num_prompt
        if not num_prompt:
            seen = seconds / of_decode
            if self._num_decoded:
                seen = min(max(seen, 1 / LARGEST_SURPRISE), LARGEST_SURPRISE)
            gain = max(1 - (1 - GAIN) ** (1 + self._num_mixed), 1 / (1 + self._num_decoded))
            self._num_decoded, self._num_mixed = self._num_decoded + 1, 0
            self._decode *= 1 - gain + gain * seen  # above 0, however short the step was
        elif num_decoding:
            seen = min(max((seconds - of_decode) / of_prompt, 1 / LARGEST_SURPRISE), LARGEST_SURPRISE)
            gain = GAIN_OF_PROMPTS * min(of_prompt / (self._factor * of_decode), 1.0)  # short times are the least exact
            self._prompt *= 1 + gain * (seen - 1)
            self._delay += gain * (min(max(seen - 1, 0.0), LARGEST_DELAY) - self._delay)
            self._num_mixed, self._knows_prompts = self._num_mixed + 1, True
        elif not self._knows_prompts:
            self._prompt = max(seconds - of_decode, seconds / 2) / num_prompt
