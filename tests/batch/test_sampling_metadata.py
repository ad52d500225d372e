"""Sampling metadata, row moves and row changes, against dictionaries of requests."""

import copy
import dataclasses
import pickle
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from batch_rig import states_and_buffers

from foreword.batch import (
    KVGroup,
    MultiModalFeature,
    NewRequest,
    PoolingParams,
    RequestError,
    SamplingParams,
    StepNeeds,
    prepare_inputs,
    sampling_metadata,
    step_needs,
)
from foreword.batch.state import sampling_metadata as metadata_module
from foreword.batch.state.batch_update import BatchUpdates
from foreword.batch.state.changes import make as make_changes
from foreword.batch.state.sampling_columns import COLUMNS, FLAG_RULES, GIVEN, SamplingColumns
from foreword.batch.state.sampling_metadata import token_counts
from foreword.batch.values.parameters import Need
from foreword.native import available
from foreword.seeds import derived_seed

V = 50
make = partial(states_and_buffers, KVGroup(4), rows=6, length=32, vocab_size=V, tokens=128)


@pytest.fixture(params=[available(), False], ids=["native", "python"])
def is_native(request, monkeypatch):
    """Return whether native code makes the metadata."""
    monkeypatch.setattr(metadata_module, "available", lambda: request.param)


natively_or_not = pytest.mark.usefixtures("is_native")


def random_params(rng):
    def maybe(value, otherwise):
        return value if rng.random() < 0.3 else otherwise

    if rng.random() < 0.2:
        return None
    ids = rng.choice(V, 3, replace=False).tolist()
    return SamplingParams(
        temperature=maybe(0.0, 0.8),
        top_p=maybe(0.9, 1.0),
        top_k=maybe(int(rng.integers(1, 80)), 0),
        min_p=maybe(0.1, 0.0),
        presence_penalty=maybe(0.5, 0.0),
        frequency_penalty=maybe(-0.5, 0.0),
        repetition_penalty=maybe(1.2, 1.0),
        typical_p=maybe(0.5, 1.0),
        top_n_sigma=maybe(1.5, 0.0),
        xtc_probability=maybe(0.5, 0.0),
        dry_multiplier=maybe(0.8, 0.0),
        seed=maybe(int(rng.integers(1000)), None),
        min_tokens=maybe(2, 0),
        logprobs=maybe(int(rng.integers(-1, 4)), None),
        prompt_logprobs=maybe(2, None),
        bad_words_token_ids=maybe(((1, 2), (3,)), ()),
        allowed_token_ids=maybe(ids, None),
        logit_bias=maybe({ids[0]: 1.5, ids[1]: -2.0}, None),
        stop_token_ids=(4, 5),
        structured_outputs=maybe({"regex": "a"}, None),
    )


def random_request(rng, rid):
    prompt, outputs = rng.integers(1, V, rng.integers(2, 12)), rng.integers(1, V, rng.integers(0, 5))
    extras = {}
    if rng.random() < 0.3:
        extras["prompt_embeds"] = rng.standard_normal((len(prompt), 2))
        extras["prompt_is_token_id"] = rng.random(len(prompt)) < 0.5
    if rng.random() < 0.3:
        extras["mm_features"] = (MultiModalFeature(rid, 0, 2),)
    if rng.random() < 0.3:
        extras |= {"mrope_positions": rng.integers(0, 9, (3, len(prompt))), "mrope_delta": int(rng.integers(-3, 3))}
    if rng.random() < 0.3:
        extras["encoder_len"] = int(rng.integers(1, 9))
    if rng.random() < 0.2:
        extras["pooling_params"] = PoolingParams()
    return NewRequest(
        rid, prompt, [rng.integers(1, 90, 8)], outputs, int(rng.integers(0, len(prompt) + len(outputs))),
        random_params(rng), int(rng.integers(0, 3)), **extras,
    )  # fmt: skip


# -- flags and parameters


@natively_or_not
def test_flags_and_parameters_are_those_of_the_requests_in_batch_order():
    rng = np.random.default_rng(0)
    for _ in range(60):
        states, buffers = make()
        params = {str(r): random_params(rng) for r in range(int(rng.integers(1, 7)))}
        for rid, p in params.items():
            states.add_request(NewRequest(rid, [1, 2], [[1]], sampling_params=p))
        order = rng.permutation(list(params)).tolist()
        m = sampling_metadata(prepare_inputs(states, dict.fromkeys(order, 1), buffers))
        # a row is greedy by default; a request with parameters follows them
        ps = [params[rid] or SamplingParams(temperature=0.0) for rid in order]
        assert m.all_greedy == all(p.temperature == 0 for p in ps)
        assert m.all_random == all(p.temperature > 0 for p in ps)
        defaults = {
            "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0, "top_n_sigma": 0.0, "xtc_probability": 0.0,
            "dry_multiplier": 0.0,
        }  # fmt: skip
        for name, off in defaults.items():
            values = [getattr(p, name) for p in ps]
            got = getattr(m, name)
            assert (got is None) == all(v == off for v in values)
            assert got is None or np.allclose(got, values)
        top_k = [p.top_k if p.top_k < V else 0 for p in ps]
        assert (m.top_k is None) == (not any(top_k))
        assert m.top_k is None or m.top_k.tolist() == top_k
        penalties = [(p.presence_penalty, p.frequency_penalty, p.repetition_penalty) for p in ps]
        assert m.needs_penalties == any(x != (0, 0, 1) for x in penalties)
        if m.needs_penalties:
            got = (m.presence_penalty, m.frequency_penalty, m.repetition_penalty)
            assert np.allclose(np.array(got).T, penalties)
        assert m.temperature is None or np.allclose(m.temperature, [p.temperature for p in ps])
        if m.seed is not None:
            stored = [int(states.sampling.seed[states.row_of(rid)]) for rid in order]
            assert m.seed.tolist() == stored
            assert all(s == p.seed for s, p in zip(stored, ps, strict=True) if p.seed is not None)
        logprobs = [-1 if p.logprobs is None else V if p.logprobs == -1 else p.logprobs for p in ps]
        assert m.max_num_logprobs == max(logprobs)
        assert (m.num_prompt_logprobs is None) == all(p.prompt_logprobs is None for p in ps)
        assert m.has_structured_output == any(p.structured_outputs for p in ps)
        assert m.bad_words() == {b: p.bad_words_token_ids for b, p in enumerate(ps) if p.bad_words_token_ids}
        assert m.end_token_ids() == {b: (4, 5) for b, p in enumerate(ps) if p.min_tokens}
        bias = np.zeros((len(ps), V))
        at = m.logit_bias()
        bias[at[0], at[1]] = at[2]
        for b, p in enumerate(ps):
            assert {t: bias[b, t] for t in np.flatnonzero(bias[b])} == (p.logit_bias or {})
        mask = m.allowed_token_ids_mask()
        assert (mask is None) == all(p.allowed_token_ids is None for p in ps)
        for b, p in enumerate(ps if mask is not None else []):
            allowed = range(V) if p.allowed_token_ids is None else p.allowed_token_ids
            assert set(np.flatnonzero(mask[b])) == set(allowed)


def test_a_plain_greedy_batch_is_plain_and_holds_no_arrays():
    states, buffers = make()
    states.add_request(NewRequest("a", [1], [[1]], sampling_params=SamplingParams(temperature=0.0)))
    m = sampling_metadata(prepare_inputs(states, {"a": 1}, buffers))
    assert m.is_plain
    assert all(getattr(m, name) is None for name in COLUMNS if name != "needs")


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1e-46}, {"top_p": 1 - 1e-12}, {"min_p": 1e-46}, {"presence_penalty": 1e-46},
        {"repetition_penalty": 1 + 1e-12}, {"top_k": V}, {"logprobs": V + 9, "prompt_logprobs": 2**40},
    ],
)  # fmt: skip
def test_flags_are_those_of_the_values_as_stored(params):
    states, buffers = make()
    states.add_request(NewRequest("a", [1], [[1]], sampling_params=SamplingParams(**params)))
    batch = prepare_inputs(states, {"a": 1}, buffers, check="full")
    metadata = sampling_metadata(batch)
    assert metadata.all_greedy == (states.sampling.temperature[0] == 0)
    assert metadata.top_p is metadata.top_k is metadata.min_p is metadata.presence_penalty is None
    assert metadata.max_num_logprobs == (V if "logprobs" in params else -1)


@natively_or_not
def test_the_needs_of_a_step_are_its_flags_and_the_numbers_of_log_probabilities():
    assert [f.name for f in dataclasses.fields(StepNeeds)] == [
        "rows", "needs", "num_logprobs", "num_prompt_logprobs"
    ]  # fmt: skip
    rng = np.random.default_rng(0)
    for _ in range(30):
        states, buffers = make()
        names = [str(r) for r in range(int(rng.integers(1, 7)))]
        for name in names:
            states.add_request(NewRequest(name, [1, 2], [[1]], sampling_params=random_params(rng)))
        batch = prepare_inputs(states, dict.fromkeys(names, 1), buffers)
        needs, all_of_them = step_needs(batch), sampling_metadata(batch)
        assert type(needs) is StepNeeds
        assert needs.needs == all_of_them.needs == np.bitwise_or.reduce(states.sampling.needs[batch.idx_mapping])
        for name in ("rows", "num_logprobs", "num_prompt_logprobs"):
            np.testing.assert_array_equal(getattr(needs, name), getattr(all_of_them, name), err_msg=name)


def test_an_attribute_of_metadata_is_a_column_or_does_not_exist():
    states, buffers = make()
    states.add_request(NewRequest("a", [1], [[1]], sampling_params=SamplingParams(top_p=0.5)))
    metadata = sampling_metadata(prepare_inputs(states, {"a": 1}, buffers))
    assert [name for name in GIVEN if getattr(metadata, name) is not None] == ["temperature", "top_p", "seed"]
    with pytest.raises(AttributeError, match="temprature"):
        metadata.temprature  # noqa: B018


def test_columns_given_in_bulk_count_like_parameters():
    states, buffers = make()
    states.add_request(NewRequest("a", [1], [[1]]))
    row = np.array([states.row_of("a")], np.int32)
    states.sampling.set_columns(row, {"temperature": np.array([0.5], np.float32), "top_k": np.array([3], np.int32)})
    m = sampling_metadata(prepare_inputs(states, {"a": 1}, buffers))
    assert (m.all_random, m.top_k.tolist()) == (True, [3])


@pytest.mark.parametrize("value", [-1.0, 0.0, 0.5, 1.0, 2.0, float("nan")])
def test_native_and_python_columns_have_equal_flags_and_defaults(value):
    (states, _), python = make(), SamplingColumns(6)
    rows = np.array([4, 1], np.int32)
    for name in sorted({rule.column for rule in FLAG_RULES}):
        dtype = COLUMNS[name][0]
        if np.issubdtype(dtype, np.integer) and value != value:
            continue
        for columns in (states.sampling, python):
            columns.set_columns(rows, {name: np.full(2, value, dtype)})
        assert states.sampling.needs.tolist() == python.needs.tolist(), name
    for rid in "abcde":
        states.add_request(NewRequest(rid, [1], [[1]]))
    states.remove_rows(np.flatnonzero(states.live).astype(np.int32))
    make_changes(python.reset(np.arange(6)))
    for name, (_, default) in COLUMNS.items():
        assert getattr(states.sampling, name).tolist() == getattr(python, name).tolist() == [default] * 6


def test_every_row_is_greedy_or_random():
    columns = SamplingColumns(3)
    columns.set_columns(np.arange(3), {"temperature": np.array([0, 0.5, np.nan], np.float32)})
    assert columns.needs.tolist() == [Need.GREEDY, Need.RANDOM, Need.GREEDY]


def test_requests_without_a_seed_get_one_from_their_admission():
    one, named = SamplingColumns(100, base_seed=7), SamplingColumns(100, base_seed=7)
    for first in (20, 0):
        for row in range(100):
            make_changes(one.set(row, SamplingParams(), V, admission=row + first))
            make_changes(named.set_given(row, {"temperature": 0.5}, admission=row + first))
        assert one.seed.tolist() == named.seed.tolist() == [derived_seed(7, first + n) for n in range(100)]
        assert len(set(one.seed.tolist())) == 100
    make_changes(one.set(0, SamplingParams(seed=5), V, admission=9))
    make_changes(named.set_given(0, {"temperature": 0.5, "seed": 5}, admission=9))
    assert one.seed[0] == named.seed[0] == 5


# -- when it is rebuilt


@natively_or_not
@pytest.mark.parametrize("is_own", [True, False])
def test_metadata_is_the_same_object_until_members_or_parameters_change(is_own):
    states, buffers = make()
    for rid in "abc":
        states.add_request(NewRequest(rid, [1, 2, 3, 4], [[1]], sampling_params=SamplingParams(temperature=0.5)))

    def metadata(*ids):
        batch = prepare_inputs(states, dict.fromkeys(ids, 1), buffers)
        return step_needs(batch) if is_own else sampling_metadata(batch)

    first = metadata("a", "b")
    assert metadata("a", "b") is first
    states.add_request(NewRequest("d", [1], [[1]], sampling_params=SamplingParams()))
    assert metadata("a", "b") is first  # a request that is not in the batch
    assert metadata("b", "a") is not first
    assert metadata("a", "b", "c") is not first
    states.remove_request("a")
    states.add_request(NewRequest("a", [1, 2, 3], [[1]], sampling_params=SamplingParams(temperature=0.25)))
    again = metadata("a", "b")
    assert again is not first
    if not is_own:
        assert again.temperature.tolist() == [0.25, 0.5]
        assert first.temperature.tolist() == [0.5, 0.5]


@natively_or_not
@pytest.mark.parametrize("seed", range(20))
def test_metadata_has_the_columns_of_its_rows_that_one_of_them_needs(seed):
    rng = np.random.default_rng(seed)
    rows, columns = np.zeros(70, np.int32), make(rows=70)[0].sampling
    cache = metadata_module.metadata_cache(columns, V, rows)
    for count in rng.integers(0, 71, 20):
        set_rows = rng.permutation(70)[: rng.integers(1, 70)].astype(np.int32)
        given = rng.choice(list(GIVEN), rng.integers(0, 4), replace=False)
        values = {name: rng.integers(0, 9, len(set_rows)).astype(COLUMNS[name][0]) for name in given.tolist()}
        columns.set_columns(set_rows, values)
        rows[:count] = rng.permutation(70)[:count]
        got, want = cache.get(count), metadata_module.build_metadata(columns, V, rows[:count].copy())
        assert (got.needs, got.vocab_size, got.params) == (want.needs, want.vocab_size, want.params)
        assert list(got.arrays) == list(want.arrays)
        for name in ("rows", *GIVEN):
            mine, other = getattr(got, name), getattr(want, name)
            if other is None:
                assert mine is None, name
            else:
                assert mine.dtype == other.dtype, name
                np.testing.assert_array_equal(mine, other, err_msg=name)


@natively_or_not
def test_metadata_that_could_not_be_made_is_made_by_the_next_call(monkeypatch):
    states, buffers = make()
    for rid in "abc":
        states.add_request(
            NewRequest(rid, [1, 2], [[1]], sampling_params=SamplingParams(logit_bias={ord(rid) - 90: 1}))
        )
    rows = np.array([states.row_of(rid) for rid in "abc"], np.int32)
    cache = metadata_module.metadata_cache(states.sampling, V, rows)
    cache.get(1), cache.get(2)

    def out_of_memory(*_, **__):
        raise MemoryError

    with monkeypatch.context() as failing:
        failing.setattr(metadata_module, "SamplingMetadata", out_of_memory)
        for _ in range(2):
            with pytest.raises(MemoryError):
                cache.get(3)
    assert cache.get(3).logit_bias()[1].tolist() == [7, 8, 9]
    assert sampling_metadata(prepare_inputs(states, {"c": 1}, buffers)).logit_bias()[1].tolist() == [9]


def test_rows_that_were_set_together_and_swapped_are_other_parameters():
    states, buffers = make()
    for rid in "ab":
        states.add_request(NewRequest(rid, [1, 2, 3, 4], [[1]]))
    rows = np.array([states.row_of(r) for r in "ab"], np.int32)
    states.sampling.set_columns(rows, {"temperature": np.array([0.5, 0.25], np.float32)})
    counts = np.ones(2, np.int32)
    assert sampling_metadata(prepare_inputs(states, (rows, counts), buffers)).temperature.tolist() == [0.5, 0.25]
    states.swap_rows(*rows.tolist())
    assert sampling_metadata(prepare_inputs(states, (rows, counts), buffers)).temperature.tolist() == [0.25, 0.5]


def test_two_batches_in_turn_keep_their_metadata():
    states, buffers = make()
    for rid in "ab":
        states.add_request(NewRequest(rid, [1, 2, 3, 4], [[1]], sampling_params=SamplingParams()))
    seen = {id(sampling_metadata(prepare_inputs(states, {r: 1}, buffers))) for r in "abababab"}
    assert len(seen) == 2


@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
def test_a_row_has_another_stamp_after_every_change_of_its_parameters(native):
    """A stamp that a row had before would give it the metadata that was cached then."""
    rng = np.random.default_rng(3)
    states, _ = make(native=native)
    columns, seen = states.sampling, {row: {0} for row in range(6)}
    before = dict.fromkeys(range(6), (0, ()))
    changes = 0
    for i in range(300):
        match rng.choice(["add", "remove", "set", "swap"]):
            case "add" if len(states) < 6:
                states.add_request(NewRequest(str(i), [1], [[1]], sampling_params=random_params(rng)))
            case "remove" if len(states):
                states.remove_rows(np.array([states.row_of(str(rng.choice(states.req_ids)))], np.int32))
            case "set" if len(states):
                row = np.array([states.row_of(str(rng.choice(states.req_ids)))], np.int32)
                columns.set_columns(row, {"temperature": rng.random(1, np.float32)})
            case "swap":
                states.swap_rows(int(rng.integers(6)), int(rng.integers(6)))
        for row in range(6):
            values = tuple(getattr(columns, name)[row].item() for name in COLUMNS)
            stamp = int(columns.stamp[row])
            if values != before[row][1] and i:
                assert stamp not in seen[row]
                changes += 1
            before[row] = stamp, values
            seen[row].add(stamp)
    assert changes > 100


def test_a_greedy_request_in_the_row_of_one_that_drew_at_random_is_greedy():
    states, buffers = make()
    params = SamplingParams(temperature=0.8)
    for name in ("random", "other"):
        states.add_request(NewRequest(name, [1], [[1]], sampling_params=params))
    row = states.row_of("random")
    batch = prepare_inputs(states, {"random": 1}, buffers)
    assert sampling_metadata(batch).temperature.tolist() == [np.float32(0.8)]
    states.remove_request("random")
    assert states.add_request(NewRequest("greedy", [1], [[1]])) == row
    batch = prepare_inputs(states, {"greedy": 1}, buffers)
    assert sampling_metadata(batch).all_greedy
    assert step_needs(batch).needs == Need.GREEDY


# -- penalties


def test_penalties_count_resumed_outputs_as_outputs_and_skip_embeddings():
    states, buffers = make()
    params = SamplingParams(repetition_penalty=1.3)
    states.add_request(NewRequest("a", [1, 2, 2], [[1, 2]], [7, 7, 9], sampling_params=params))
    states.add_request(NewRequest("b", [3], [[3]]))
    embeds, mask = np.ones((2, 2)), np.array([False, True])
    states.add_request(
        NewRequest("c", [4, 5], [[4]], sampling_params=params, prompt_embeds=embeds, prompt_is_token_id=mask)
    )
    batch = prepare_inputs(states, {"a": 6, "b": 1, "c": 2}, buffers)
    s = states
    counts = token_counts(sampling_metadata(batch), s.token_ids, s.prompt_len, s.num_tokens, s.extras.is_embedding)
    assert counts.batch_indices.tolist() == [0, 2]
    assert np.flatnonzero(counts.in_prompt[0]).tolist() == [1, 2]
    assert np.flatnonzero(counts.in_prompt[1]).tolist() == [5]
    assert {t: counts.in_output[0, t] for t in np.flatnonzero(counts.in_output[0])} == {7: 2, 9: 1}
    assert not counts.in_output[1].any()


# -- moving rows


def picture(states, rid):
    """Everything that the states hold of a request, whatever its row."""
    row = states.row_of(rid)
    known = int(states.num_tokens[row])
    dense = {
        name: getattr(states, name)[row].item()
        for name in ("num_tokens", "num_computed_tokens", "prompt_len", "prefill_len", "last_sampled_token", "lora_id",
                     "rope_delta", "encoder_len", "live")
    }  # fmt: skip
    dense |= {name: getattr(states.sampling, name)[row].item() for name in (*COLUMNS, "is_set")}
    sparse = [
        id(values[row]) if row in values else None for values in (*states.extras.sparse(), states.sampling.params)
    ]
    mask = None if states.extras.is_embedding is None else states.extras.is_embedding[row].tolist()
    blocks = [(t.table[row].tolist(), int(t.num_blocks[row])) for t in states.block_tables]
    return dense, states.token_ids[row, :known].tolist(), sparse, mask, blocks, states.loras.users(dense["lora_id"])


@pytest.mark.parametrize("seed", range(10))
def test_after_any_moves_every_field_is_that_of_its_request(seed):
    rng = np.random.default_rng(seed)
    states, _ = make()
    # make the lazily made arrays first, so that pictures before and after have the same parts
    states.add_request(NewRequest("x", None, [[]], prompt_embeds=np.ones((1, 2))))
    states.remove_request("x")
    pictures, count = {}, 0
    for _ in range(150):
        match rng.choice(["add", "remove", "swap", "condense"], p=[0.4, 0.25, 0.25, 0.1]):
            case "add" if len(states) < 6:
                rid = f"r{count}"
                count += 1
                states.add_request(random_request(rng, rid))
            case "remove" if len(states):
                states.remove_request(str(rng.choice(states.req_ids)))
            case "swap":
                states.swap_rows(int(rng.integers(6)), int(rng.integers(6)))
            case "condense":
                states.condense()
                assert states.live.tolist() == [True] * len(states) + [False] * (6 - len(states))
            case _:
                continue
        for rid in states.req_ids:
            new = picture(states, rid)
            assert pictures.setdefault(rid, new)[:5] == new[:5]
        assert sorted(states._directory.free) == np.flatnonzero(~states.live).tolist()
    for rid in states.req_ids:  # and a row without its request is like a new one
        states.remove_request(rid)
    for values in (*states.extras.sparse(), states.sampling.params):
        assert not values
    for name, (_, default) in COLUMNS.items():
        assert (getattr(states.sampling, name) == np.float32(default)).all()
    assert not states.rope_delta.any()
    assert not states.encoder_len.any()
    assert not states.lora_id.any()
    assert states.loras.in_use == ()
    assert not states.extras.is_embedding.any()


# -- changes of rows for processors


@pytest.mark.parametrize("seed", range(10))
def test_updates_applied_in_order_give_the_request_of_each_row(seed):
    rng = np.random.default_rng(seed)
    states, _ = make()
    states.add_request(NewRequest("early", [1], [[1]]))
    updates, mine, count = BatchUpdates(states), {states.row_of("early"): "early"}, 0
    for _ in range(300):
        match rng.choice(["add", "remove", "swap", "condense", "take"], p=[0.3, 0.2, 0.2, 0.1, 0.2]):
            case "add" if len(states) < 6:
                states.add_request(NewRequest(f"r{count}", [1, 2], [[1]], [3]))
                count += 1
            case "remove" if len(states):
                states.remove_request(str(rng.choice(states.req_ids)))
            case "swap":
                states.swap_rows(int(rng.integers(6)), int(rng.integers(6)))
            case "condense":
                states.condense()
            case "take":
                change = updates.take()
                for row in change.removed:
                    del mine[row]
                moved = {to: mine.pop(origin) for origin, to in change.moved}
                mine |= moved
                for row in change.added:
                    assert row.row not in mine
                    mine[row.row] = row.req_id
                    assert row.prompt_token_ids.tolist() in ([1, 2], [1])
                assert mine == {states.row_of(rid): rid for rid in states.req_ids}
                assert not updates.take()
            case _:
                pass
    updates.close()
    assert not states.observers


def test_a_request_added_and_removed_between_two_calls_is_left_out():
    states, _ = make()
    updates = BatchUpdates(states)
    states.add_request(NewRequest("a", [1], [[1]]))
    states.remove_request("a")
    assert not updates.take()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seed", "x"), ("seed", 1.5), ("n", None), ("n", 2.0), ("best_of", "3"), ("top_k", None), ("max_tokens", "4"),
        ("min_tokens", 0.5), ("logprobs", True + 0.5), ("prompt_logprobs", "all"), ("temperature", "hot"),
        ("temperature", None), ("top_p", [0.5]), ("repetition_penalty", float("nan")), ("stop", 5), ("stop", [1]),
        ("stop_token_ids", ["a"]), ("allowed_token_ids", [1.5]), ("logit_bias", {"a": 1.0}),
        ("logit_bias", [1, 2]), ("logit_bias", {5: "x"}), ("logit_bias", {5: float("nan")}),
        ("logit_bias", {5: float("inf")}), ("logit_bias", {5: 1e300}), ("stop_token_ids", 5),
        ("bad_words_token_ids", [5]), ("bad_words_token_ids", 5), ("repetition_penalty", 1e-46),
        ("min_tokens", 2**40), ("extra_args", ["a"]), ("extra_args", {1: "a"}), ("temperature", 10**400),
        ("allowed_token_ids", {1: 2}), ("stop_token_ids", iter(int, 1)), ("allowed_token_ids", np.array(3)),
        ("bad_words_token_ids", [{1: 2}]), ("bad_words_token_ids", range(10**12)), ("stop_token_ids", b"ab"),
        ("ignore_eos", np.ones(2)), ("detokenize", "no"), ("typical_p", 0), ("typical_p", 1.5), ("typical_p", "x"),
        ("top_n_sigma", -2), ("top_n_sigma", float("nan")), ("xtc_probability", 1.01), ("xtc_threshold", -0.1),
        ("dry_multiplier", -1), ("dry_base", 0.5), ("dry_allowed_length", 0), ("dry_allowed_length", 1.5),
        ("dry_range", -2), ("dry_range", None), ("dry_sequence_breakers", "ab"), ("dry_sequence_breakers", [""]),
        ("dry_sequence_breakers", 0), ("dry_breaker_token_ids", [-1]), ("dry_breaker_token_ids", 3),
        ("max_tokens", 0), ("temperature", -1.0), ("temperature", float("nan")), ("n", 0), ("allowed_token_ids", []),
        ("bad_words", "abc"), ("bad_words", [5]), ("bad_words", ["a", ""]), ("bad_words_token_ids", [[1], []]),
        ("dry_base", 0.9), ("typical_p", 0.0),
    ],
)  # fmt: skip
def test_a_parameter_of_the_wrong_type_is_refused_by_name_where_it_is_made(field, value):
    with pytest.raises(RequestError, match=f"^{field} = "):
        SamplingParams(**{field: value})
    with pytest.raises(RequestError, match=f"^{field} = "):
        replace(SamplingParams(), **{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop_token_ids", [3, 100]), ("allowed_token_ids", [100]), ("dry_breaker_token_ids", [100]),
        ("bad_words_token_ids", [[1], [2, 100]]), ("logit_bias", {100: 1.0}), ("thinking_start", 100),
        ("thinking_end", 100),
    ],
)  # fmt: skip
def test_a_token_beyond_the_vocabulary_is_refused_by_name(field, value):
    params = SamplingParams(**{"thinking_end": "x", field: value})
    params.check("r", 101)
    with pytest.raises(RequestError, match=rf"request 'r': {field} = 100: expected a token id in \[0, 100\)"):
        params.check("r", 100)


def test_a_mapping_that_was_changed_is_checked_again():
    params = SamplingParams(logit_bias={5: 1.0}, extra_args={"a": 1})
    params.check("r", 100)
    params.logit_bias[5] = "x"
    with pytest.raises(RequestError, match="request 'r': logit_bias = 'x'"):
        params.check("r", 100)
    params.logit_bias[5] = 2.0
    params.extra_args[7] = 1
    with pytest.raises(RequestError, match="request 'r': extra_args = "):
        params.check("r", 100)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda params: pickle.loads(pickle.dumps(params))])
def test_copies_have_the_values_and_are_not_checked_again(copied, monkeypatch):
    params = SamplingParams(
        temperature=0.5, stop=["a"], stop_token_ids=[3], logit_bias={5: 1.0}, structured_outputs={"regex": "a"}
    )
    monkeypatch.setattr(SamplingParams, "__post_init__", lambda self: pytest.fail("is checked again"))
    assert copied(params) == params


def test_numbers_of_other_types_are_taken():
    SamplingParams(temperature=np.float32(0.5), seed=np.int64(3), max_tokens=np.int32(4)).check("r", 100)
    SamplingParams(allowed_token_ids=np.array([3, 4]), stop_token_ids=range(3), bad_words_token_ids=[(1, 2)]).check(
        "r", 9
    )
