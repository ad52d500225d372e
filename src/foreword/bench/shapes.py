"""Steps of given shapes, for measuring an executor alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, islice

import numpy as np

from foreword.arrays import I32
from foreword.batch import KVGroup, NewRequest, RequestStates


@dataclass(frozen=True, slots=True)
class Shape:
    """``num_reqs`` requests that each compute ``num_new`` tokens after ``num_computed``."""

    num_reqs: int
    num_new: int
    num_computed: int

    @property
    def num_tokens(self) -> int:
        return self.num_reqs * self.num_new

    @property
    def length(self) -> int:
        """Return the number of tokens of each request."""
        return self.num_computed + self.num_new

    @property
    def num_context_tokens(self) -> int:
        return self.num_reqs * self.length

    def num_blocks(self, kv_groups: Sequence[KVGroup]) -> int:
        """Return the number of blocks of a pool for the requests, the null block included, if states are in blocks."""
        return 1 + self.num_reqs * sum(self._held(kv_groups))

    def fits(self, kv_groups: Sequence[KVGroup], num_blocks: int, num_states: int) -> bool:
        """Return whether a pool has blocks for the requests, and slots for their states. num_states: the number of
        slots; 0: states are in blocks.
        """
        states = self.num_reqs * sum(group.recurrent for group in kv_groups) if num_states else 0
        return self.num_blocks(kv_groups) - states <= num_blocks and states <= num_states

    def _held(self, kv_groups: Sequence[KVGroup]) -> list[int]:
        """Return the number of blocks of one request in each group."""
        return [-(-self.length // group.tokens_per_block(None, self.length)) for group in kv_groups]

    def admit(
        self, *, vocab_size: int, max_model_len: int, kv_groups: Sequence[KVGroup], first_state: int = 1
    ) -> tuple[RequestStates, tuple[I32, I32]]:
        """Return states with the requests, and the plan of the step as rows and counts.

        Every request has its own blocks, so that its context is read from memory. Its tokens are random. first_state:
        the number of the first slot of a state that is not in a block.
        """
        states = RequestStates(
            max_num_reqs=self.num_reqs, max_model_len=max_model_len, vocab_size=vocab_size, kv_groups=list(kv_groups)
        )
        random, blocks, slots = np.random.default_rng(0), count(1), count(first_state)
        for i in range(self.num_reqs):
            prompt = random.integers(0, vocab_size, self.length)
            ids = [
                list(islice(slots if group.recurrent and first_state > 1 else blocks, n))
                for n, group in zip(self._held(kv_groups), kv_groups, strict=True)
            ]
            states.add_request(NewRequest(str(i), prompt, ids, num_computed_tokens=self.num_computed))
        rows = np.arange(self.num_reqs, dtype=np.int32)
        return states, (rows, np.full(self.num_reqs, self.num_new, np.int32))
