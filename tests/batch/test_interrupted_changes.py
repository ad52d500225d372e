"""An exception at any line of the batch layer leaves the states as before the call or as after it."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import batch_rig
import numpy as np
import pytest
from batch_scenes import TENSOR_NAMES

from foreword.batch import (
    InputBatch,
    InputBuffers,
    KVGroup,
    LoraRequest,
    MultiModalFeature,
    NewRequest,
    NewRequests,
    PoolingParams,
    SamplingParams,
    StaleBatchError,
    advance,
    resolve,
    validate,
)


class Interrupted(BaseException):
    """Like KeyboardInterrupt: no ``except Exception`` stops it."""


def interrupted(call: Callable[[], object], nth: int) -> bool:
    """Run it, with `Interrupted` raised at the nth line of foreword.batch; False if it ended before."""
    left = nth

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal left
        if "/foreword/batch/" not in frame.f_code.co_filename:
            return None
        if event == "line":
            left -= 1
            if left == 0:
                raise Interrupted
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except Interrupted:
        return True
    finally:
        sys.settrace(before)
    return False


class World(batch_rig.World):
    """Requests of all kinds: "plain", "rich" with what few requests have, "late" whose row was freed once, and a step
    that is prepared. Native code makes the changes of rows, or Python.
    """

    def __init__(self, core: bool, backend: str) -> None:
        super().__init__(KVGroup(2), KVGroup(4, sliding_window=4), rows=6, drafts=2, tokens=16, native=core)
        self.backend = backend
        self.early = InputBuffers.for_states(self.states, 16)
        self.add("gone", [1], [[9], [9]])
        self.add("plain", [1, 2, 3], [[1, 2], [3]], sampling_params=SamplingParams(temperature=0.5))
        self.states.remove_request("gone")
        self.add("late", [4, 5], [[4, 5, 13], [6, 14]], output_token_ids=[6], num_computed_tokens=2)
        self.batch = self.prepare({"plain": 3, "late": 3}, self.early, draft_tokens={"late": [7, 8]})

    def add_rich(self) -> None:
        self.states.add_request(
            NewRequest(
                "rich", [7, 8, 9], [[10, 11], [12]], [1], 1, SamplingParams(logit_bias={3: 1.0}), 5,
                np.ones((3, 2), np.float32), prompt_is_token_id=np.array([True, False, True]),
                mm_features=[MultiModalFeature("image", 0, 2)], mrope_positions=np.ones((3, 4), np.int32),
                mrope_delta=2, encoder_len=4, pooling_params=PoolingParams(), lora_request=LoraRequest(5, "law"),
            )
        )  # fmt: skip

    def add_columns(self, dtype: type = np.float32, lora: list[int] | None = None) -> None:
        two = np.full(2, 2, np.int32)
        self.states.add_requests(
            NewRequests(
                req_ids=["x", "y"], token_ids=np.arange(4, dtype=np.int32), num_tokens=two, block_ids=[two, two],
                num_blocks=[two // 2, two // 2], sampling={"temperature": np.full(2, 0.5, dtype)},
                lora_id=None if lora is None else np.array(lora, np.int32),
            )
        )  # fmt: skip

    def prepare(self, plan: dict[str, int], buffers: InputBuffers | None = None, **how: Any) -> InputBatch:
        return super().prepare(plan, buffers, backend=self.backend, **how)

    def commit(self, batch: InputBatch) -> None:
        self.states.commit(batch, {"plain": [11], "late": [7, 12]})

    def commit_array(self) -> None:
        self.states.commit(self.batch, np.array([[11, -1, -1], [7, 8, 12]], np.int32))

    def rows(self, *names: str) -> np.ndarray:
        return np.array([self.states.row_of(name) for name in names], np.int32)

    def picture(self) -> dict[str, object]:
        """All that later calls depend on. Left out are numbers that only have to be new, and what no request owns."""
        s, sampling, extras = self.states, self.states.sampling, self.states.extras
        new = {id(table.content_id) for table in s.block_tables}
        dense = [array.tolist() for array in (*s.columns.values(), *sampling.arrays())]
        dense += [a.tolist() for t in s.block_tables for a in (t.table, t.num_blocks) if id(a) not in new]
        return {
            "arrays": dense,
            "tokens": {rid: s.token_ids[s.row_of(rid), : s.num_tokens[s.row_of(rid)]].tolist() for rid in s.req_ids},
            "directory": (dict(s._directory.rows), s._directory.ids.tolist(), list(s._directory.free)),
            "extras": [{row: str(value) for row, value in values.items()} for values in extras.sparse()],
            "rows with extras": sorted(extras.rows),
            "embeddings": None if s.extras.is_embedding is None else s.extras.is_embedding.tolist(),
            "params": dict(sampling.params),
            "adapters": {a: (s.loras.users(a), s.loras.request(a)) for a in s.loras.in_use},
            "adapter names": dict(s.loras._requests),
            "admissions": sampling.num_admissions,
            "stage": self.batch._stage,
        }

    def finish(self) -> None:
        """A step of all requests, checked against the specification."""
        if not self.batch.is_committed:
            self.commit(self.batch)
        s = self.states
        left = {rid: int(s.num_tokens[s.row_of(rid)] - s.num_computed_tokens[s.row_of(rid)]) for rid in s.req_ids}
        batch = self.prepare(left)
        validate(batch)
        s.commit(batch, {rid: [3] for rid in left})


OPERATIONS: dict[str, Callable[[World], object]] = {
    "add_request": lambda w: w.states.add_request(NewRequest("new", [1, 2], [[20], [21]])),
    "add_request with everything": World.add_rich,
    "add_requests": World.add_columns,
    "add_requests, converted": lambda w: w.add_columns(np.float64),
    "add_requests with adapters": lambda w: w.add_columns(lora=[3, 3]),
    "append_blocks": lambda w: w.states.append_blocks("plain", [[21, 22], [23]]),
    "append_blocks_rows": lambda w: w.states.append_blocks_rows(w.rows("late", "late"), np.array([21, 22], np.int32)),
    "remove_request": lambda w: w.states.remove_request("plain"),
    "remove_request with everything": lambda w: w.states.remove_request("rich"),
    "remove_rows": lambda w: w.states.remove_rows(w.rows("late", "plain")),
    "commit": lambda w: w.commit(w.batch),
    "commit of an array": World.commit_array,
    "advance": lambda w: advance(w.states, w.batch),
    "prepare_inputs": lambda w: w.prepare({"late": 3, "plain": 3}, w.early, draft_tokens={"late": [9, 9]}),
}


def world(operation: str, core: bool, backend: str, advanced: bool = False) -> World:
    made = World(core, backend)
    if operation == "remove_request with everything":
        made.add_rich()
    if advanced:
        advance(made.states, made.batch)
    return made


@pytest.mark.one_in(15)
@pytest.mark.parametrize(("core", "backend"), [(True, "native"), (False, "numpy")])
@pytest.mark.parametrize(
    ("operation", "advanced"), [*((o, False) for o in OPERATIONS), ("commit", True), ("commit of an array", True)]
)
def test_an_interrupt_at_any_line_leaves_the_states_as_before_or_as_after(operation, advanced, core, backend):
    run = OPERATIONS[operation]
    w, done = world(operation, core, backend, advanced), world(operation, core, backend, advanced)
    run(done)
    before, after = w.picture(), done.picture()
    for nth in range(1, 5000):
        if not interrupted(lambda w=w: run(w), nth):
            assert w.picture() == after
            break
        now = w.picture()
        assert now in (before, after), nth
        if now == before and nth % 10:
            continue  # the next interrupt of the same call
        if now == before:
            again = run(w)
            w.batch = again if isinstance(again, InputBatch) else w.batch
            assert w.picture() == after
        w.finish()
        w = world(operation, core, backend, advanced)
    assert nth > 3


@pytest.mark.one_in(9)
@pytest.mark.parametrize("backend", ["native", "numpy", "loops"])
@pytest.mark.parametrize("what", ["prepare", "resolve"])
def test_a_batch_whose_tensors_were_overwritten_in_part_is_stale(what, backend):
    """The batch before has its tensors, or it cannot be read; and a step prepared anew is right."""
    for nth in range(1, 5000, 23 if backend == "loops" else 1):
        w = World(True, backend)
        old = w.batch
        if what == "resolve":
            advance(w.states, w.batch)
            old = w.prepare({"plain": 1, "late": 1})
            w.commit(w.batch)
        before = tensors(old)
        if what == "prepare":
            ended = not interrupted(lambda w=w: w.prepare({"plain": 2}, w.early), nth)
        else:
            ended = not interrupted(lambda old=old: resolve(old), nth)
        if ended:
            break
        try:
            now = tensors(old)
        except StaleBatchError:
            continue
        if now != before:
            resolve(old)
            assert now == tensors(old), nth
    assert nth > 10


def tensors(batch: InputBatch) -> dict[str, str]:
    return {name: str(getattr(batch, name)) for name in TENSOR_NAMES}


class Refusing:
    """An observer that raises in one of its calls."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, called: str) -> Callable[..., None]:
        def call(*rows: int) -> None:
            if called == self.name:
                raise MemoryError(called)

        return call


@pytest.mark.parametrize("core", [True, False])
@pytest.mark.parametrize("operation", [o for o in OPERATIONS if o.startswith(("add", "remove"))])
def test_an_observer_that_raises_leaves_the_states_as_before_or_as_after(operation, core):
    run, w, done = OPERATIONS[operation], world(operation, core, "numpy"), world(operation, core, "numpy")
    run(done)
    before = w.picture()
    w.states.observers.append(Refusing("filled" if operation.startswith("add") else "freed"))
    with pytest.raises(MemoryError):
        run(w)
    w.states.observers.clear()
    assert w.picture() == (done.picture() if operation.startswith("add") else before)
    w.finish()
