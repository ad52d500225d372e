"""Callers whose objects change while they are read get an error or a copy: no wrong table, no crash."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import pytest

from foreword.batch import InputBuffers, KVGroup, NewRequest, NewRequests, RequestStates, prepare_inputs
from foreword.batch.adapters import vllm
from foreword.errors import ForewordError


def states_of(max_num_reqs=8, block_size=1, **options) -> RequestStates:
    groups = [KVGroup(block_size=block_size)]
    return RequestStates(max_num_reqs=max_num_reqs, max_model_len=64, vocab_size=1000, kv_groups=groups, **options)


class NewData:
    """A request as vLLM's NewRequestData. effect: runs when ``prompt_embeds`` is read."""

    mm_features = ()
    sampling_params = pooling_params = lora_request = prefill_token_ids = None
    num_computed_tokens = 0

    def __init__(self, req_id: str, effect=lambda: None) -> None:
        self.req_id, self.prompt_token_ids, self._effect = req_id, [1, 2, 3], effect

    @property
    def prompt_embeds(self) -> None:
        self._effect()

    @property
    def block_ids(self) -> tuple[list[int]]:
        return ([1, 2, 3],)


class Cached:
    """Running requests, whose new blocks are lists that no other code holds."""

    resumed_req_ids = frozenset()
    new_token_ids = ()

    def __init__(self, req_ids=(), num_computed_tokens=()) -> None:
        self.req_ids, self.num_computed_tokens = list(req_ids), list(num_computed_tokens)
        self.num_output_tokens = [0] * len(self.req_ids)

    @property
    def new_block_ids(self) -> list[tuple[list[int]]]:
        return [([k + 100 * i for k in (1, 2)],) for i in range(len(self.req_ids))]


def output(new=(), cached=None, scheduled=None, drafts=None) -> SimpleNamespace:
    scheduled = {} if scheduled is None else scheduled
    return SimpleNamespace(
        scheduled_new_reqs=new if isinstance(new, list) else list(new),
        scheduled_cached_reqs=cached or Cached(),
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=len(scheduled),
        scheduled_spec_decode_tokens=drafts or {},
        scheduled_encoder_inputs={},
        num_common_prefix_blocks=[],
        finished_req_ids=set(),
        free_encoder_mm_hashes=[],
        preempted_req_ids=set(),
    )


def test_blocks_of_a_property_reach_the_table():
    states = states_of()
    ids = [f"r{i}" for i in range(4)]
    vllm.apply(states, output(new=[NewData(i) for i in ids], scheduled=dict.fromkeys(ids, 3)))
    vllm.apply(states, output(cached=Cached(ids, [0] * 4), scheduled=dict.fromkeys(ids, 3)))
    table = states.block_tables[0]
    for i, req_id in enumerate(ids):
        row = states.row_of(req_id)
        assert table.table[row, : table.num_blocks[row]].tolist() == [1, 2, 3, 1 + 100 * i, 2 + 100 * i]


def test_a_list_of_requests_that_is_cleared_while_it_is_read_is_read_whole_or_refused():
    requests: list[NewData] = []

    def clear() -> None:
        requests.clear()
        [object() for _ in range(1000)]  # so that freed memory is used again

    for _ in range(50):
        states = states_of()
        requests[:] = [NewData(f"q{i}", clear) for i in range(4)]
        try:
            vllm.apply(states, output(new=requests, scheduled={f"q{i}": 3 for i in range(4)}))
        except ForewordError:
            continue
        assert all(states.token_ids[states.row_of(f"q{i}"), :3].tolist() == [1, 2, 3] for i in range(4))


class Text(str):
    """A string whose comparison runs code."""

    effect = staticmethod(lambda: None)
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Text.effect()
        return str.__eq__(self, other)


@pytest.mark.parametrize("place", ["plan", "drafts", "cached"])
def test_ids_whose_comparison_changes_the_plan_are_read_safely(place):
    states = states_of(max_num_draft_tokens=2)
    ids = [f"r{i}" for i in range(8)]
    vllm.apply(states, output(new=[NewData(i) for i in ids], scheduled=dict.fromkeys(ids, 3)))
    plan, drafts, cached = dict.fromkeys(ids, 1), {}, Cached(ids, [0] * 8)
    Text.effect = staticmethod(lambda: [plan.setdefault(f"z{len(plan)}", 1) for _ in range(200)])
    if place == "plan":
        plan = {Text(i): 1 for i in reversed(ids)}
    elif place == "drafts":
        drafts = {Text(i): [1] for i in ids}
    else:
        cached.req_ids = [Text(i) for i in ids]
    try:
        for _ in range(5):
            with suppress(ForewordError, RuntimeError):  # an error of the adapter or of a changing dict: no crash
                vllm.apply(states, output(cached=cached, scheduled=plan, drafts=drafts))
    finally:
        Text.effect = staticmethod(lambda: None)


def test_an_id_of_a_subclass_of_str_is_refused():
    with pytest.raises(ForewordError, match=r"expected a string.*str\(id\)"):
        states_of().add_request(NewRequest(Text("a"), [1], [[1]]))


def test_columns_that_another_thread_changes_are_copied_or_refused():
    num_reqs = 2000
    states = states_of(max_num_reqs=num_reqs, block_size=4)
    good, bad = np.full(num_reqs, 4, np.int32), np.full(num_reqs, 2**30, np.int32)
    lengths, stop = good.copy(), threading.Event()

    def change() -> None:
        while not stop.is_set():
            np.copyto(lengths, bad)
            np.copyto(lengths, good)

    thread = threading.Thread(target=change)
    thread.start()
    outcomes = set()
    try:
        until = time.monotonic() + 20
        while len(outcomes) < 2 and time.monotonic() < until:
            np.copyto(lengths, good)
            columns = NewRequests(
                req_ids=[str(i) for i in range(num_reqs)],
                token_ids=np.ones(4 * num_reqs, np.int32),
                num_tokens=lengths,
                block_ids=[np.ones(num_reqs, np.int32)],
                num_blocks=[np.ones(num_reqs, np.int32)],
            )
            try:
                rows = states.add_requests(columns)
            except (ForewordError, ValueError):
                outcomes.add("refused")
            else:
                assert (states.num_tokens[rows] == 4).all()
                states.remove_rows(rows)
                outcomes.add("admitted")
    finally:
        stop.set()
        thread.join()
    assert "admitted" in outcomes


@pytest.mark.parametrize(("column", "value"), [("num_computed_tokens", -(10**9)), ("num_computed_tokens", 2**29)])
@pytest.mark.parametrize("backend", ["native", "numpy"])
def test_progress_that_a_caller_overwrites_is_refused(column, value, backend):
    states = states_of()
    states.add_request(NewRequest("a", [1, 2, 3], [[1, 2, 3]]))
    getattr(states, column)[0] = value
    with pytest.raises((ForewordError, IndexError, ValueError)):
        prepare_inputs(states, {"a": 1}, InputBuffers.for_states(states, 64), backend=backend)


def test_more_blocks_than_a_row_has_are_not_read():
    states = states_of()
    states.add_request(NewRequest("a", [1, 2, 3], [[1, 2, 3]]))
    states.block_tables[0].num_blocks[0] = 2**30
    with pytest.raises(ForewordError):
        prepare_inputs(states, {"a": 1}, InputBuffers.for_states(states, 64), backend="native")


class Emptying:
    """An iterable without values that empties a list when its length is asked for."""

    def __init__(self, values: list) -> None:
        self._values = values

    def __len__(self) -> int:
        self._values.clear()
        return 0


@pytest.mark.parametrize("place", ["req_ids", "num_computed_tokens"])
def test_lists_of_running_requests_that_are_emptied_while_they_are_counted_are_refused(place):
    states = states_of()
    ids = [f"r{i}" for i in range(8)]
    vllm.apply(states, output(new=[NewData(i) for i in ids], scheduled=dict.fromkeys(ids, 3)))
    cached = Cached(ids, [0] * 8)
    cached.num_output_tokens = Emptying(getattr(cached, place))
    with suppress(ForewordError, IndexError, ValueError):
        vllm.apply(states, output(cached=cached, scheduled=dict.fromkeys(ids, 3)))
    assert states.block_tables[0].num_blocks[:8].tolist() == [3] * 8


def test_a_plan_that_grows_beyond_the_rows_while_requests_are_read_is_refused():
    states = states_of(max_num_reqs=2)
    vllm.apply(states, output(new=[NewData("a")], scheduled={"a": 3}))
    plan = {"a": 1}

    class Growing(Cached):
        @property
        def new_block_ids(self):
            plan.update({str(i): 1 for i in range(10_000)})
            return [None]

    with pytest.raises(ForewordError):
        vllm.apply(states, output(cached=Growing(["a"], [0]), scheduled=plan))


@pytest.mark.parametrize("num_inner", [0, 1, 3])
def test_requests_whose_reading_applies_another_output_are_admitted_each_with_its_own_tokens(num_inner):
    states = states_of(max_num_reqs=32)
    vllm.apply(states, output())
    applied = []

    def apply_another() -> None:
        if not applied:
            applied.append(True)
            names = [f"inner{i}" for i in range(num_inner)]
            vllm.apply(states, output(new=[NewData(name) for name in names], scheduled=dict.fromkeys(names, 3)))

    names = [f"r{i}" for i in range(4)]
    new = [NewData(name, apply_another if i == 2 else lambda: None) for i, name in enumerate(names)]
    for i, one in enumerate(new):
        one.prompt_token_ids = [i + 1] * 3
    vllm.apply(states, output(new=new, scheduled=dict.fromkeys(names, 3)))
    for i, name in enumerate(names):
        row = states.row_of(name)
        assert states.token_ids[row, :3].tolist() == [i + 1] * 3
        assert states.num_tokens[row] == 3


@pytest.mark.parametrize("value", [2**30, -(2**30)])
def test_a_count_of_blocks_that_a_caller_overwrites_writes_beside_no_row(value):
    states = states_of()
    rows = [states.add_request(NewRequest(name, [1, 2, 3], [[1, 2, 3]])) for name in "abc"]
    table = states.block_tables[0]
    before = table.table[rows[0]].copy()
    table.num_blocks[rows[1]] = value
    with pytest.raises((ForewordError, IndexError, ValueError)):
        states.append_blocks_rows(np.array([rows[1]], np.int32), np.array([4], np.int32))
    states.remove_rows(np.array([rows[1]], np.int32))
    assert (table.table[rows[0]] == before).all()
    assert (table.table[rows[2], :3] == [1, 2, 3]).all()


def test_known_tokens_that_a_caller_overwrites_are_refused():
    states = states_of()
    states.add_request(NewRequest("a", [1, 2, 3], [[1, 2, 3]]))
    states.num_tokens[0] = 2**30
    with pytest.raises(ForewordError):
        prepare_inputs(states, {"a": 1}, InputBuffers.for_states(states, 64), backend="native")


def test_parameters_given_as_the_columns_themselves_are_copied():
    states, other = states_of(), states_of()

    def columns(names: str, temperature) -> NewRequests:
        count = len(names)
        return NewRequests(
            req_ids=list(names),
            token_ids=np.ones(count, np.int32),
            num_tokens=np.ones(count, np.int32),
            block_ids=[np.ones(count, np.int32)],
            num_blocks=[np.ones(count, np.int32)],
            sampling={"temperature": temperature},
        )

    for one in (states, other):
        one.add_requests(columns("ab", np.array([0.1, 0.2], np.float32)))
        one.remove_rows(np.array([0, 1], np.int32))  # so that the next request gets row 1
        one.sampling.temperature[:2] = [0.5, 0.6]
    column = states.sampling.temperature[:2]
    other.add_requests(columns("cd", column.copy()))
    states.add_requests(columns("cd", column))
    assert states.sampling.temperature[:2].tolist() == other.sampling.temperature[:2].tolist()
    assert len(set(column.tolist())) == 2
