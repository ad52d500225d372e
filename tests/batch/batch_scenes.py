"""A few steps that together show every tensor, and how to reach the memory behind each one."""

from dataclasses import dataclass

import numpy as np

from foreword.batch import (
    ContextParallel,
    InputBatch,
    InputBuffers,
    KVGroup,
    NewRequest,
    RequestStates,
    SamplingParams,
    advance,
    prepare_inputs,
    resolve,
)
from foreword.batch.step.layout import STEP

TENSOR_NAMES = [f.name for f in STEP if f.name in dir(InputBatch) and f.name != "scalars"]
"""The tensors of `layout.STEP` that a batch has."""

SCENES = (
    "mixed",
    "drafts",
    "context parallel",
    "decode only",
    "not gathered",
    "empty",
    "in flight",
    "cancelled",
    "recurrent",
    "embeddings",
    "ranges",
)


@dataclass
class Scene:
    states: RequestStates
    buffers: InputBuffers
    batch: InputBatch


def scene(name: str, backend: str = "numpy") -> Scene:
    """A step over rows in another order than the batch, with a live row that is not scheduled and a free one."""
    cp = ContextParallel(size=2, rank=1, interleave=2) if name == "context parallel" else None
    states = RequestStates(
        max_num_reqs=6,
        max_model_len=13,
        vocab_size=50,
        kv_groups=[KVGroup(2, context_parallel=cp is not None), KVGroup(4, sliding_window=3)]
        + [KVGroup(1, recurrent=True)] * (name == "recurrent"),
        max_num_draft_tokens=3,
        context_parallel=cp,
    )
    blocks = iter(range(1, 100))

    def add(rid: str, prompt: list[int], outputs: tuple[int, ...] = (), computed: int = 0, room: int = 13) -> None:
        ids = [[next(blocks) for _ in range(-(-room // t.tokens_per_block))] for t in states.block_tables]
        params = SamplingParams(temperature=0.5, seed=7, logprobs=2)
        embeds = np.ones((len(prompt), 2), np.float32) if name == "embeddings" and rid == "b" else None
        ranges = {"b": [(1, 3), (3, 6), (8, 10)], "a": [(0, 1)]}.get(rid, ()) if name == "ranges" else ()
        states.add_request(
            NewRequest(rid, prompt, ids, outputs, computed, params, prompt_embeds=embeds, bidirectional_ranges=ranges)
        )

    add("gone", [1])
    add("a", [11, 12, 13], (14, 15), 4, room=12)
    add("waits", [21, 22], (23,), 2)
    add("b", [31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41], (), 0 if name != "decode only" else 10, room=12)
    add("c", [1, 2, 3, 4, 5, 6, 7, 8, 9], (10,), 9)
    states.remove_request("gone")
    buffers = InputBuffers.for_states(states, max_num_batched_tokens=16)
    if name in ("in flight", "cancelled", "recurrent"):
        return _in_flight(states, buffers, backend, remove=name == "cancelled")
    states._step = 41
    if name == "empty":
        plan, drafts = {}, None
    elif name == "drafts":
        plan, drafts = {"c": 4, "b": 5, "a": 1}, {"c": [7, 0, 9]}
    elif name == "decode only":
        plan, drafts = {"c": 1, "a": 1, "b": 1}, None
    else:
        plan, drafts = {"b": 7, "a": 1, "c": 1}, None
    batch = prepare_inputs(
        states, plan, buffers, draft_tokens=drafts, pad_to=(12, 5), backend=backend,
        gather_block_tables=name != "not gathered",
    )  # fmt: skip
    return Scene(states, buffers, batch)


def _in_flight(states: RequestStates, buffers: InputBuffers, backend: str, *, remove: bool) -> Scene:
    """A step on top of one whose samples are not known; or, with those known, after one of its requests was removed."""
    early = InputBuffers.for_states(states, max_num_batched_tokens=16)
    first = prepare_inputs(states, {"a": 4, "c": 1}, early, draft_tokens={"a": [3, 4, 5]}, backend=backend)
    advance(states, first)
    states._step = 41
    drafts = {"a": [-1, 7]}
    plan = {"b": 5, "c": 1, "a": 3} if remove else {"b": 5, "a": 3, "c": 1}
    second = prepare_inputs(states, plan, buffers, draft_tokens=drafts, pad_to=(12, 5), backend=backend)
    if remove:
        states.commit(first, {"a": [3, 4], "c": [6]})
        states.remove_request("c")
        resolve(second)
    return Scene(states, buffers, second)
