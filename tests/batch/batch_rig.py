"""States, buffers and steps: what the tests of this folder have in common."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from batch_scenes import TENSOR_NAMES

from foreword.batch import InputBatch, InputBuffers, KVGroup, NewRequest, RequestStates, prepare_inputs
from foreword.batch.prepare.prepare import BACKENDS as FUNCTIONS

BACKENDS = tuple(FUNCTIONS)
every_backend = pytest.mark.parametrize("backend", BACKENDS)
every_check = pytest.mark.parametrize("check", ["off", "bounds", "full"])


def states_of(
    *groups: KVGroup, rows: int = 4, length: int = 12, drafts: int = 0, native: bool = True, **settings: Any
) -> RequestStates:
    """Return states of ``rows`` requests of ``length`` tokens, by default with one group with blocks of 2 tokens.

    native: whether native code changes rows.
    """
    states = RequestStates(
        max_num_reqs=rows,
        max_model_len=length,
        kv_groups=groups or (KVGroup(2),),
        max_num_draft_tokens=drafts,
        **{"vocab_size": 50} | settings,
    )
    if not native:
        states._core = states.sampling.core = None
    return states


def states_and_buffers(*groups: KVGroup, tokens: int = 64, **settings: Any) -> tuple[RequestStates, InputBuffers]:
    """Return states and buffers for steps of ``tokens``; ``settings`` are those of `states_of`."""
    states = states_of(*groups, **settings)
    return states, InputBuffers.for_states(states, tokens)


class World:
    """States, their buffers, and an allocator that gives no block twice."""

    def __init__(self, *groups: KVGroup, tokens: int = 64, **settings: Any) -> None:
        self.states, self.buffers = states_and_buffers(*groups, tokens=tokens, **settings)
        self.next_block = 1

    def blocks(self, room: int | None = None) -> list[list[int]]:
        """Return new blocks of each group for ``room`` tokens, by default for the longest request."""
        found = []
        for table in self.states.block_tables:
            count = -(-(room or self.states.max_model_len) // table.tokens_per_block)
            found.append(list(range(self.next_block, self.next_block + count)))
            self.next_block += count
        return found

    def add(
        self,
        rid: str,
        prompt: Sequence[int] | None,
        blocks: Sequence[Sequence[int]] | None = None,
        room: int | None = None,
        **fields: Any,
    ) -> int:
        """Admit a request, with new blocks for ``room`` tokens unless ``blocks`` are given. Return its row."""
        return self.states.add_request(NewRequest(rid, prompt, blocks or self.blocks(room), **fields))

    def prepare(self, plan: Any, buffers: InputBuffers | None = None, **how: Any) -> InputBatch:
        """Prepare a step; ``how`` is passed to `prepare_inputs`."""
        return prepare_inputs(self.states, plan, buffers or self.buffers, **how)

    def step(self, plan: Any, sampled: Mapping[str, Sequence[int]] | None = None, **how: Any) -> InputBatch:
        """Prepare a step, and commit the samples if there are some."""
        batch = self.prepare(plan, **how)
        if sampled is not None:
            self.states.commit(batch, sampled)
        return batch


def arrays(value: np.ndarray | tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
    """Return the arrays of a tensor, one per group if it has groups."""
    return value if isinstance(value, tuple) else (value,)


def tensors(batch: InputBatch) -> dict[str, list]:
    """Return every tensor of a step as lists."""
    return {name: [a.tolist() for a in arrays(getattr(batch, name)) if a is not None] for name in TENSOR_NAMES}


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def picture(states: RequestStates) -> list[object]:
    """Return all that the states hold about rows, as lists."""
    held = states.req_ids, states._step, list(states._directory.free), len(states.extras)
    return [*held, *(array.tolist() for array in states._row_arrays())]
