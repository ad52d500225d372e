"""Many arrivals, departures and blocks in one call are the same as one after the other."""

from dataclasses import replace

import numpy as np
import pytest
from batch_rig import states_of
from hypothesis import given
from hypothesis import strategies as st

from foreword.batch import CapacityError, KVGroup, NewRequest, NewRequests, RequestError, RequestStates
from foreword.batch.values.sampling_params import SamplingParams
from foreword.errors import ForewordError

M, VOCAB, ROWS, GROUPS = 12, 20, 5, (KVGroup(2), KVGroup(4))


def states(bulk: bool = True, native: bool = True) -> RequestStates:
    return states_of(*GROUPS, rows=ROWS, length=M, vocab_size=VOCAB, native=bulk and native)


def columns(requests: list[NewRequest], **changes: object) -> NewRequests:
    known = [[*r.prompt_token_ids, *r.output_token_ids] for r in requests]
    int32 = np.int32
    made = NewRequests(
        req_ids=[r.req_id for r in requests],
        token_ids=np.array([t for tokens in known for t in tokens], int32),
        num_tokens=np.array([len(tokens) for tokens in known], int32),
        prompt_len=np.array([len(r.prompt_token_ids) for r in requests], int32),
        num_computed_tokens=np.array([r.num_computed_tokens for r in requests], int32),
        block_ids=[np.array([b for r in requests for b in r.block_ids[g]], int32) for g in range(len(GROUPS))],
        num_blocks=[np.array([len(r.block_ids[g]) for r in requests], int32) for g in range(len(GROUPS))],
        sampling={
            "temperature": np.array([r.sampling_params.temperature for r in requests], np.float32),
            "top_p": np.array([r.sampling_params.top_p for r in requests], np.float32),
            "top_k": np.array([r.sampling_params.top_k for r in requests], int32),
        },
    )
    return replace(made, **changes)


def assert_same(a: RequestStates, b: RequestStates) -> None:
    assert a.req_ids == b.req_ids
    assert [a.row_of(r) for r in a.req_ids] == [b.row_of(r) for r in b.req_ids]
    assert np.array_equal(a.live, b.live)
    ours, theirs = a._row_arrays(), b._row_arrays()
    content = {id(t.content_id) for s in (a, b) for t in s.block_tables}
    for x, y in zip(ours, theirs, strict=True):
        if id(x) not in content:  # numbers that only have to be new
            np.testing.assert_array_equal(x, y)
    for row in np.flatnonzero(a.live):
        np.testing.assert_array_equal(a.token_ids[row, : a.num_tokens[row]], b.token_ids[row, : b.num_tokens[row]])


def snapshot(s: RequestStates) -> tuple[object, ...]:
    return s.req_ids, [array.tolist() for array in s._row_arrays()], list(s._directory.free)


@st.composite
def new_request(draw: st.DrawFn, name: str) -> NewRequest:
    """Mostly valid; now and then with one invalid value."""
    wrong = draw(st.sampled_from([None] * 12 + ["token", "long", "block", "computed", "blocks"]))
    known = draw(st.integers(1, M if wrong != "long" else M + 2)) if wrong != "long" else M + 1
    prompt = draw(st.integers(1, known))
    tokens = draw(st.lists(st.integers(0, VOCAB - 1), min_size=known, max_size=known))
    if wrong == "token":
        tokens[draw(st.integers(0, known - 1))] = draw(st.sampled_from([-1, VOCAB]))
    blocks = [[draw(st.integers(1, 90)) for _ in range(draw(st.integers(0, M // g.block_size)))] for g in GROUPS]
    if wrong == "block":
        blocks[0] = [-3]
    if wrong == "blocks":
        blocks[1] = list(range(1, 6))
    computed = known if wrong == "computed" else draw(st.integers(0, known - 1))
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.5])),
        top_p=draw(st.sampled_from([1.0, 0.5])),
        top_k=draw(st.integers(0, 3)),
    )
    return NewRequest(name, tokens[:prompt], blocks, tokens[prompt:], computed, params)


@given(data=st.data())
def test_bulk_calls_equal_single_ones(data: st.DataObject) -> None:
    bulk, numpy, single = states(), states(native=False), states(bulk=False)
    number = 0
    for _ in range(data.draw(st.integers(1, 6), label="rounds")):
        names = [f"r{number + i}" for i in range(data.draw(st.integers(0, 3)))]
        number += len(names)
        if data.draw(st.integers(0, 9)) == 0 and (single.req_ids or len(names) > 1):
            names[-1:] = [names[0] if len(names) > 1 else single.req_ids[0]]  # named twice, or here already
        new = [data.draw(new_request(name)) for name in names]
        refused = refused_one_by_one(single, new)
        for s in (bulk, numpy):
            before = snapshot(s)
            if refused:
                with pytest.raises(refused):
                    s.add_requests(columns(new))
                assert snapshot(s)[0] == before[0]
                assert snapshot(s)[2] == before[2]
            else:
                rows = s.add_requests(columns(new))
                assert rows.tolist() == [s.row_of(r.req_id) for r in new]
        gone = data.draw(st.lists(st.sampled_from(single.req_ids), unique=True) if single.req_ids else st.just([]))
        rows = np.array([single.row_of(r) for r in gone], np.int32)
        for s in (bulk, numpy):
            s.remove_rows(rows)
        for name in gone:
            single.remove_request(name)
        group = data.draw(st.integers(0, 1))
        grown = data.draw(st.lists(st.sampled_from(single.req_ids), max_size=6) if single.req_ids else st.just([]))
        rows = np.array([single.row_of(r) for r in grown], np.int32)
        table = single.block_tables[group]
        full = bool((table.num_blocks + np.bincount(rows, minlength=ROWS) > table.width).any())
        for s in (bulk, numpy):  # a row may be named more than once
            if full:
                with pytest.raises(CapacityError):
                    s.append_blocks_rows(rows, np.arange(100, 100 + len(rows), dtype=np.int32), group)
            else:
                s.append_blocks_rows(rows, np.arange(100, 100 + len(rows), dtype=np.int32), group)
        for i, name in enumerate(() if full else grown):
            single.append_blocks(name, [[100 + i] if g == group else [] for g in range(len(GROUPS))])
        assert_same(bulk, single)
        assert_same(numpy, single)


def refused_one_by_one(s: RequestStates, new: list[NewRequest]) -> type[ForewordError] | None:
    """Admit all or none; the error of the first that does not fit."""
    admitted = []
    for request in new:
        try:
            s.add_request(request)
        except ForewordError as error:
            for name in reversed(admitted):
                s.row_generation[s.row_of(name)] -= 1  # a call that is refused does not use a row
                s.remove_request(name)
            s.sampling.num_admissions -= len(
                admitted
            )  # a call that is refused leaves the seeds of later requests as they were
            return type(error)
        admitted.append(request.req_id)
    return None


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_tokens", np.array([2], np.int32)),
        ("num_tokens", np.array([2, 2], np.int32)),
        ("num_tokens", np.array([6, -1], np.int32)),
        ("prompt_len", np.array([2, 9], np.int32)),
        ("prompt_len", np.array([0, 1], np.int32)),
        ("num_computed_tokens", np.array([0, 0, 0], np.int32)),
        ("num_blocks", [np.array([1, 1], np.int32)]),
        ("num_blocks", [np.array([1, 1], np.int32), np.array([2, 1], np.int32)]),
        ("block_ids", [np.array([1, 2], np.int32)]),
    ],
)
def test_columns_that_do_not_fit_together_are_refused(native: bool, field: str, value: object) -> None:
    new = [
        NewRequest("a", [1, 2], [[1], [2]], sampling_params=SamplingParams()),
        NewRequest("b", [3, 4, 5], [[3], [4]], sampling_params=SamplingParams()),
    ]
    s = states(native=native)
    before = snapshot(s)
    with pytest.raises(RequestError, match=field.split("[")[0]):
        s.add_requests(columns(new, **{field: value}))
    assert snapshot(s) == before


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize(
    ("rows", "blocks", "group", "said"),
    [
        ([0], [7], 2, "group 2"),
        ([0], [7], -1, "group -1"),
        ([-1], [7], 0, "rows"),
        ([ROWS], [7], 0, "rows"),
        ([1], [7], 0, "row 1 holds no request"),
        ([0], [7, 8], 0, "2 blocks"),
        ([0], [-7], 0, "-7"),
        ([0.5], [7], 0, "integers"),
        ([0] * 7, [7] * 7, 0, "'a'"),
    ],
)
def test_blocks_for_what_is_not_there_are_refused_by_name(native, rows, blocks, group, said):
    s = states(native=native)
    s.add_request(NewRequest("a", [1], [[1], [2]]))
    before = snapshot(s)
    with pytest.raises(ForewordError, match=said):
        s.append_blocks_rows(np.array(rows), np.array(blocks), group)
    assert snapshot(s) == before


@pytest.mark.parametrize("convert", [np.float64, list, lambda values: np.repeat(values, 2)[::2]])
def test_sampling_values_that_have_to_be_converted_count_alike(convert):
    requests = [
        NewRequest(name, [1, 2], [[1], [2]], sampling_params=SamplingParams(temperature=t, top_k=k))
        for name, t, k in (("a", 0.5, 0), ("b", 0.0, 3))
    ]
    plain, converted = states(), states()
    columns_of_both = columns(requests)
    plain.add_requests(columns_of_both)
    sampling = {name: convert(values) for name, values in columns_of_both.sampling.items()}
    converted.add_requests(replace(columns_of_both, sampling=sampling))
    assert_same(plain, converted)
    np.testing.assert_array_equal(plain.sampling.stamp, converted.sampling.stamp)


@pytest.mark.parametrize(
    ("column", "said"),
    [
        ({"heat": np.ones(1)}, "heat"),
        ({"top_p": np.ones(2)}, "one entry per request"),
        ({"needs": np.ones(1)}, "needs"),
    ],
)
def test_sampling_columns_are_checked_before_anybody_is_admitted(column, said):
    s = states()
    before = snapshot(s)
    with pytest.raises(RequestError, match=said):
        s.add_requests(columns([NewRequest("a", [1], [[1], [2]], sampling_params=SamplingParams())], sampling=column))
    assert snapshot(s) == before


def test_a_row_named_twice_or_free_removes_nothing() -> None:
    for native in (True, False):
        s = states(native=native)
        rows = s.add_requests(columns([NewRequest("a", [1], [[1], [2]], sampling_params=SamplingParams())]))
        with pytest.raises(CapacityError):
            s.remove_rows(np.array([rows[0], 4], np.int32))
        assert s.req_ids == ("a",)
