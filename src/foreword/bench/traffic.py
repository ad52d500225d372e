"""The steps of the host benchmark, generated in advance and equal for all contenders.

S1  decode of R requests at about 1,000 tokens of context
S2  63 decodes and a chunk of a 4,000-token prompt, 2,048 tokens per step; a new prompt in every second step
S3  16 prompts of 512 tokens, each computed in one step; per step 16 arrive and 16 leave
S4  256 requests; per step 13 finish and 13 with 512-token prompts arrive
S5  decode of R requests with 4 drafts each, of which 0 … 4 are accepted
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass

import numpy as np

from foreword.arrays import I32

BLOCK_SIZE = 16
MAX_MODEL_LEN = 4096
VOCAB_SIZE = 32000
MAX_NUM_TOKENS = 8192
TEMPERATURE, TOP_P = 0.8, 0.95  # the parameters of every request


@dataclass(frozen=True, slots=True, eq=False)
class Arrivals:
    """N requests as columns: numbers, flat tokens and blocks with counts per request, computed tokens."""

    numbers: I32
    tokens: I32
    num_tokens: I32
    blocks: I32
    num_blocks: I32
    num_computed: I32


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """A scheduler's decisions for one step, and its samples. Requests are unique numbers.

    appended, new_blocks: one block each. scheduled, num_scheduled: batch order. drafts: [B, D] or None.
    sampled: [B, D + 1], padded with −1.
    """

    departed: I32
    arrived: Arrivals
    appended: I32
    new_blocks: I32
    scheduled: I32
    num_scheduled: I32
    drafts: I32 | None
    sampled: I32


@dataclass(slots=True, eq=False)
class _Request:
    number: int
    known: int
    computed: int
    blocks: int


@dataclass(frozen=True, slots=True)
class Workload:
    """Parameters of the steps. decodes: number of requests with context. prompts: number of prompts in progress, of
    ``prompt_len`` tokens each. chunk: largest number of tokens of a prompt per step. churn: number of requests replaced
    per step.
    """

    name: str
    decodes: int
    prompts: int = 0
    prompt_len: int = 512
    chunk: int = MAX_MODEL_LEN
    churn: int = 0
    num_drafts: int = 0

    @property
    def max_num_reqs(self) -> int:
        return self.decodes + self.prompts + self.churn

    def steps(self, count: int, seed: int = 0) -> Iterator[Step]:
        """Return ``count`` steps; the first one admits the decoding requests."""
        rng = np.random.default_rng(seed)
        next_number, next_block = 0, 1

        def admit(known: int, computed: int) -> _Request:
            nonlocal next_number, next_block
            request = _Request(next_number, known, computed, -(-known // BLOCK_SIZE))
            next_number += 1
            next_block += request.blocks
            return request

        def decoding() -> _Request:
            context = int(rng.integers(900, 1100))
            return admit(context, context - 1)

        def columns(requests: list[_Request]) -> Arrivals:
            numbers, n, computed, num_blocks = (
                np.array([astuple(r) for r in requests], np.int32).reshape(-1, 4).T.copy()
            )
            tokens = rng.integers(0, VOCAB_SIZE, int(n.sum()), dtype=np.int32)
            blocks = np.arange(next_block - int(num_blocks.sum()), next_block, dtype=np.int32)
            return Arrivals(numbers, tokens, n, blocks, num_blocks, computed)

        live: list[_Request] = []
        for t in range(count):
            full = [r for r in live if r.known > MAX_MODEL_LEN - 2 * (self.num_drafts + 2)]
            departed = full + [r for r in live if r not in full][: self.churn]
            if self.prompts:
                departed += [r for r in live if r.number >= self.decodes and r.computed >= self.prompt_len]
            arrived = [decoding() for _ in (full if t else range(self.decodes))]
            if t:
                arrived += [admit(self.prompt_len, 0) for _ in range(self.churn)]
            live = [r for r in live if r not in departed]
            in_prompt = sum(r.number >= self.decodes for r in live)
            arrived += [admit(self.prompt_len, 0) for _ in range(self.prompts - in_prompt)]
            live += arrived
            admitted = columns(arrived)
            counts = np.array([min(r.known - r.computed, self.chunk) for r in live], np.int32)
            k = self.num_drafts
            appended, new_blocks, sampled = [], [], np.full((len(live), k + 1), -1, np.int32)
            for b, r in enumerate(live):
                while r.blocks * BLOCK_SIZE < r.computed + counts[b] + k:
                    appended.append(r.number)
                    new_blocks.append(next_block)
                    next_block += 1
                    r.blocks += 1
                accepted = int(rng.integers(0, k + 1)) if k else 0
                if r.computed + counts[b] == r.known:
                    sampled[b, : accepted + 1] = rng.integers(0, VOCAB_SIZE, accepted + 1)
                    r.known += accepted + 1
                r.computed += int(counts[b]) + accepted
            yield Step(
                np.array([r.number for r in departed], np.int32),
                admitted,
                np.array(appended, np.int32),
                np.array(new_blocks, np.int32),
                np.array([r.number for r in live], np.int32),
                counts + np.int32(k),
                rng.integers(0, VOCAB_SIZE, (len(live), k), dtype=np.int32) if k else None,
                sampled,
            )


WORKLOADS = (
    *(Workload(f"S1 decode {r}", r) for r in (1, 8, 64, 256, 1024)),
    Workload("S2 63 decodes + chunk", 63, prompts=1, prompt_len=4000, chunk=2048),
    Workload("S3 16 x 512 prefill", 0, prompts=16),
    Workload("S4 256, 5 % churn", 256, churn=13),
    Workload("S5 64, 4 drafts", 64, num_drafts=4),
    Workload("S5 256, 4 drafts", 256, num_drafts=4),
)
