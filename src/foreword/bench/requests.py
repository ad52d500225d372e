"""Workloads of the engine benchmarks: fixed token ids and lengths, so that all engines do the same work.

W1       1 × (128 in, 128 out)            W2, W3, W4   8, 32, 64 × (128, 128)
W5       64 requests, 32 … 512 in, 32 … 256 out, 32 at once
W6, W8, W9   one prompt of 2,048, 8,191, 32,767 tokens, 1 out: the last two fill 8,192 and 32,768 positions
W7       32 requests sharing 1,024 tokens, 32 of their own, 32 out, at once
"""

from __future__ import annotations

import random
from dataclasses import dataclass

LOWEST_ID, HIGHEST_ID = 1000, 49000  # no control tokens in SmolLM2's vocabulary
_BATCHES = {"W1": 1, "W2": 8, "W3": 32, "W4": 64}
PROMPTS = {"W6": 2048, "W8": 8191, "W9": 32767}
"""Workload of one prompt → the prompt's tokens."""
NAMES = tuple(sorted((*_BATCHES, *PROMPTS, "W5", "W7")))


@dataclass(frozen=True, slots=True)
class Requests:
    """Prompts as token ids, output length of each, and maximum number of concurrent requests."""

    name: str
    prompts: list[list[int]]
    output_lens: list[int]
    max_num_seqs: int

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def num_output_tokens(self) -> int:
        return sum(self.output_lens)

    @property
    def longest(self) -> int:
        """Return the tokens of the longest request, its output included."""
        return max(len(p) + n for p, n in zip(self.prompts, self.output_lens, strict=True))


def make(name: str, repeat: int = 0, vocab_size: int = HIGHEST_ID) -> Requests:
    """Return a workload by name. ``repeat`` changes ids but not lengths, so that no repeat hits a prefix cache."""
    rng = random.Random(f"{name}/{repeat}")
    highest = min(HIGHEST_ID, vocab_size)

    def ids(count: int) -> list[int]:
        return [rng.randrange(min(LOWEST_ID, highest // 2), highest) for _ in range(count)]

    if name in _BATCHES:
        n = _BATCHES[name]
        return Requests(name, [ids(128) for _ in range(n)], [128] * n, n)
    if name == "W5":
        lengths_rng = random.Random(0)
        lengths = [(lengths_rng.randint(32, 512), lengths_rng.randint(32, 256)) for _ in range(64)]
        return Requests(name, [ids(n) for n, _ in lengths], [out for _, out in lengths], 32)
    if name in PROMPTS:
        return Requests(name, [ids(PROMPTS[name])], [1], 1)
    if name == "W7":
        shared = ids(1024)
        return Requests(name, [shared + ids(32) for _ in range(32)], [32] * 32, 32)
    raise KeyError(name)
