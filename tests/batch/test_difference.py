"""A second process prepares every step from bytes alone: equal tensors, equal states, on every backend."""

import random
import re
import struct
import zlib
from dataclasses import replace

import numpy as np
import pytest
import test_random_traces
import test_vllm_apply
from batch_rig import BACKENDS, every_backend, states_and_buffers

from foreword.batch import (
    BatchUpdates,
    BlockOps,
    ContextParallel,
    DifferenceRecorder,
    InputBuffers,
    KVGroup,
    LoraRequest,
    MultiModalFeature,
    NewRequest,
    NewRequests,
    PlanError,
    PoolingParams,
    RequestError,
    RequestStates,
    SamplingParams,
    StepDifference,
    advance,
    apply_difference,
    encoder_seq_lens,
    mm_inputs,
    mrope_positions,
    pooling_metadata,
    prepare_inputs,
    prompt_embeds,
    resolve,
    sampling_metadata,
    stage_mrope_positions,
)
from foreword.batch.difference.encoding import pack, unpack
from foreword.batch.state import request_states
from foreword.batch.state.sampling_columns import COLUMNS
from foreword.batch.step.layout import EXTENTS, STEP, Scalars
from foreword.errors import ForewordError


def like(states: RequestStates, **changed) -> RequestStates:
    """New states of the same shape."""
    given = {
        "max_num_reqs": states.max_num_reqs,
        "max_model_len": states.max_model_len,
        "vocab_size": states.vocab_size,
        "kv_groups": [t.group for t in states.block_tables],
        "max_num_draft_tokens": states.max_num_draft_tokens,
        "context_parallel": states.context_parallel,
        "null_block": states.null_block,
    }
    return RequestStates(**given | changed)


class Mirror:
    """Follows some states through bytes, and compares every step."""

    def __init__(self, states: RequestStates) -> None:
        self.recorder = DifferenceRecorder(states)
        self.states = like(states)
        self.buffers: dict[int, InputBuffers] = {}
        self.is_late = len(states) > 0
        self.sizes: list[int] = []

    def follow(self, batch):
        data = self.recorder.take(batch).to_bytes()
        self.sizes.append(len(data))
        buffers = self.buffers.get(id(batch.buffers))
        if buffers is None:
            buffers = InputBuffers.for_states(self.states, batch.buffers.max_num_batched_tokens)
            self.buffers[id(batch.buffers)] = buffers
        mine = apply_difference(self.states, StepDifference.from_bytes(data), buffers, backend=batch._backend)
        assert_equal_steps(batch, mine)
        assert_equal_states(batch.states, self.states)
        return mine


def assert_equal_steps(batch, mine) -> None:
    """Every tensor of the step; those with a pad value to the end of their buffers."""
    assert mine.step == batch.step
    assert mine.is_gathered == batch.is_gathered
    for name in ("zero", "copies"):
        assert np.array_equal(getattr(mine.block_ops, name), getattr(batch.block_ops, name))
    scalars = Scalars(*batch.buffers.scalars.tolist())
    for field in STEP:
        if field.name in ("samples", "written"):  # these belong to other steps
            continue
        if field.name in ("block_table", "num_blocks", "num_nulled", "content_id") and not batch.is_gathered:
            continue
        got, want = mine.buffers[field.name], batch.buffers[field.name]
        for a, b in zip(got, want, strict=True) if field.per_group else ((got, want),):
            if field.padding is None and field.name != "scalars":
                extent = EXTENTS[field.shape[0]]
                size = getattr(scalars, extent.scalar) + extent.extra
                a, b = a[:size], b[:size]
            if field.name == "query_start_loc":
                a, b = a[: scalars.num_reqs_padded + 1], b[: scalars.num_reqs_padded + 1]
            assert np.array_equal(a, b), field.name


def assert_equal_states(states: RequestStates, mine: RequestStates) -> None:
    assert mine.req_ids == states.req_ids
    assert [mine.row_of(rid) for rid in mine.req_ids] == [states.row_of(rid) for rid in states.req_ids]
    assert mine.sampling.num_admissions == states.sampling.num_admissions
    for name, column in states.columns.items():
        assert np.array_equal(getattr(mine, name), column), name
    for a, b in zip(mine.block_tables, states.block_tables, strict=True):
        for name in ("table", "num_blocks", "content_id"):
            assert np.array_equal(getattr(a, name), getattr(b, name)), name
    for row in map(states.row_of, states.req_ids):
        known = states.num_tokens[row]
        assert np.array_equal(mine.token_ids[row, :known], states.token_ids[row, :known])
    for name in (*COLUMNS, "is_set"):
        live = states.live
        assert np.array_equal(getattr(mine.sampling, name)[live], getattr(states.sampling, name)[live]), name
    assert mine.sampling.params == states.sampling.params
    assert mine.loras.in_use == states.loras.in_use
    for a, b in zip(mine.extras.sparse(), states.extras.sparse(), strict=True):
        assert a.keys() == b.keys()
    assert np.array_equal(mine.extras.is_embedding, states.extras.is_embedding)


def following(mirrors: dict, start: int, call):
    """``call`` with every batch that it returns, or gets, followed by the mirror of its states from a step on."""

    def wrapped(first, *args, **kw):
        result = call(first, *args, **kw)
        batch = first if result is None else result
        if batch.step >= start:
            mirrors.setdefault(id(batch.states), None) or mirrors.update({id(batch.states): Mirror(batch.states)})
            mirrors[id(batch.states)].follow(batch)
        return result

    return wrapped


# -- whole lives -------------------------------------------------------------------------------------------------------


@pytest.mark.one_in(13)
@pytest.mark.parametrize("seed", range(int(test_random_traces.EXAMPLES or 20)))
def test_a_mirror_prepares_every_step_of_random_lives(monkeypatch, seed):
    """Arrivals, chunks, prefix hits, drafts, both orders, padding, windows, ranks, moves, preemption, steps that are
    resolved; a recorder that is attached late begins with all live requests. `test_random_traces` compares the steps of
    the same lives with the model.
    """
    mirrors: dict[int, Mirror] = {}
    start = 1 if seed % 3 else 10
    for name, call in (("prepare_inputs", prepare_inputs), ("resolve", resolve)):
        monkeypatch.setattr(test_random_traces, name, following(mirrors, start, call))
    for name in ("compare", "compare_pages"):
        monkeypatch.setattr(test_random_traces, name, lambda *_: None)
    test_random_traces.test_every_tensor_of_every_step_equals_the_model(seed)
    assert len(mirrors) == len(BACKENDS)


@pytest.mark.one_in(7)
@pytest.mark.parametrize("way", ["native", "python"])
@pytest.mark.parametrize("generation", [1, 2])
def test_a_mirror_follows_a_vllm_scheduler(monkeypatch, generation, way):
    """Finished, preempted and resumed ids, tokens taken back, computed tokens corrected."""
    mirrors: dict[int, Mirror] = {}
    monkeypatch.setattr(test_vllm_apply, "prepare_inputs", following(mirrors, 1, prepare_inputs))
    test_vllm_apply.test_random_schedules_prepare_what_a_dictionary_of_requests_says(
        generation, "plan", way, monkeypatch
    )
    assert mirrors


def test_tokens_that_a_scheduler_sends_or_takes_back_reach_the_mirror():
    states, buffers = test_vllm_apply.make()
    mirror, new = Mirror(states), test_vllm_apply.new_data
    given = [new("a", [1, 2, 3], ([1, 2, 3], [1, 2, 3, 4, 5]))]

    def step(output) -> None:
        mirror.follow(prepare_inputs(states, test_vllm_apply.apply(states, output), buffers))

    step(test_vllm_apply.output(given, scheduled={"a": 3}))
    cached = test_vllm_apply.cached_data([("a", None, 3, 2)])
    cached.new_token_ids = [[7, 8]]
    step(test_vllm_apply.output(cached=cached, scheduled={"a": 2}))
    cached = test_vllm_apply.cached_data([("a", None, 3, 1)])
    step(test_vllm_apply.output(cached=cached, scheduled={"a": 1}))
    cached = test_vllm_apply.cached_data([("a", None, 3, 2)])
    cached.new_token_ids = [[9, 9]]
    step(test_vllm_apply.output(cached=cached, scheduled={"a": 2}))
    cached.new_token_ids = [[6, 9]]  # another token, equal counts
    step(test_vllm_apply.output(cached=cached, scheduled={"a": 2}))
    assert mirror.states.token_ids[mirror.states.row_of("a"), :5].tolist() == [1, 2, 3, 6, 9]


# -- what requests bring -----------------------------------------------------------------------------------------------


def make(**settings) -> tuple[RequestStates, InputBuffers]:
    groups = settings.pop("kv_groups", (KVGroup(4), KVGroup(2, sliding_window=5)))
    given = {"rows": 6, "length": 40, "vocab_size": 100} | settings
    return states_and_buffers(*groups, drafts=2, tokens=80, **given)


def blocks_of(states: RequestStates, serial: int) -> list[list[int]]:
    return [[100 * serial + k + 1 for k in range(t.width)] for t in states.block_tables]


RARE = {
    "sampled": {"sampling_params": SamplingParams(temperature=0.7, top_p=0.9, stop=("x",), max_tokens=None)},
    "biased": {
        "sampling_params": SamplingParams(
            logit_bias={3: -float("inf"), 5: 1.5},
            bad_words_token_ids=((1, 2), (3,)),
            allowed_token_ids=(4, 5),
            structured_outputs={"json": {"type": "object"}},
            extra_args={"a": [1, 2.5, None]},
            seed=-(2**63),
        )
    },
    "embeds": {"prompt_token_ids": None, "prompt_embeds": np.arange(18, dtype=np.float16).reshape(6, 3)},
    "mixed": {"prompt_embeds": np.ones((6, 3), np.float32), "prompt_is_token_id": np.arange(6) % 2 == 0},
    "images": {
        "mm_features": (
            MultiModalFeature("cat", 0, 2),
            MultiModalFeature("dog", 2, 3, np.array([True, False, True]), "video"),
        ),
        "mrope_positions": np.arange(12, dtype=np.int32).reshape(2, 6),
        "mrope_delta": -2,
    },
    "encoder": {"encoder_len": 17},
    "pooled": {"pooling_params": PoolingParams(task="score", dimensions=4, normalize=False)},
    "adapter": {"lora_request": LoraRequest(3, "poet", "/poet")},
}


@pytest.mark.parametrize("late", [False, True])
@every_backend
def test_everything_a_request_brings_reaches_the_mirror(backend, late):
    states, buffers = make(rows=9)
    mirror = None if late else Mirror(states)
    for i, (rid, values) in enumerate(RARE.items()):
        request = NewRequest(rid, [1, 2, 3, 4, 5, 6], blocks_of(states, i + 1))
        states.add_request(replace(request, **values))
    mirror = mirror or Mirror(states)
    for n in (4, 2, 1):
        batch = prepare_inputs(states, dict.fromkeys(RARE, n), buffers, backend=backend)
        mine = mirror.follow(batch)
        for ours, theirs in zip(prompt_embeds(batch), prompt_embeds(mine), strict=True):
            assert np.array_equal(ours, theirs)
            assert ours.dtype == theirs.dtype
        assert mm_inputs(mine).slices == mm_inputs(batch).slices
        assert np.array_equal(mrope_positions(mine, 2), mrope_positions(batch, 2))
        assert np.array_equal(encoder_seq_lens(mine), encoder_seq_lens(batch))
        assert pooling_metadata(mine).params == pooling_metadata(batch).params
        ours, theirs = sampling_metadata(batch), sampling_metadata(mine)
        assert np.array_equal(ours.seed, theirs.seed)
        assert ours.params == theirs.params
        assert [len(x) for x in ours.logit_bias()] == [len(x) for x in theirs.logit_bias()]
        states.commit(batch, np.full(len(RARE), 9 if n < 4 else -1, np.int32))
    assert mirror.states.loras.request(3) == LoraRequest(3, "poet", "/poet")
    for rid in list(RARE)[::2]:
        states.remove_request(rid)
    states.condense()
    mirror.follow(prepare_inputs(states, dict.fromkeys(list(RARE)[1::2], 1), buffers, backend=backend))


def test_values_changed_after_the_admission_reach_the_mirror():
    states, buffers = make()
    mirror = Mirror(states)
    for i, rid in enumerate("abc"):
        states.add_request(NewRequest(rid, [1, 2, 3, 4], blocks_of(states, i + 1)))
    mirror.follow(prepare_inputs(states, {"a": 1, "b": 1}, buffers))
    stage_mrope_positions(states, "b", np.arange(8).reshape(2, 4), 3)
    states.sampling.set_columns(np.array([states.row_of("c")], np.int32), {"temperature": np.array([0.5])})
    states.swap_rows(states.row_of("b"), 5)
    batch = prepare_inputs(states, {"b": 4, "c": 1}, buffers)
    mine = mirror.follow(batch)
    assert np.array_equal(mrope_positions(mine, 2), mrope_positions(batch, 2))
    stage_mrope_positions(states, "b", np.ones((2, 4), int), -1)
    batch = prepare_inputs(states, {"b": 4, "c": 1}, buffers)
    assert np.array_equal(mrope_positions(mirror.follow(batch), 2), mrope_positions(batch, 2))


@pytest.mark.parametrize("sampling", [None, {"temperature": np.linspace(0, 1, 5, dtype=np.float32)}])
@pytest.mark.parametrize("lora_id", [None, np.array([0, 1, 1, 0, 2], np.int32)])
def test_requests_admitted_as_columns_reach_the_mirror(sampling, lora_id):
    states, buffers = make()
    mirror = Mirror(states)
    lengths = np.array([3, 1, 4, 1, 5], np.int32)
    blocks = np.full(5, 2, np.int32), np.full(5, 3, np.int32)
    states.add_request(NewRequest("first", [1], blocks_of(states, 9)))
    new = NewRequests(
        req_ids=["b", "a", "d", "c", "e"],
        token_ids=np.arange(14, dtype=np.int32),
        num_tokens=lengths,
        block_ids=[np.arange(1, 1 + n.sum(), dtype=np.int32) for n in blocks],
        num_blocks=blocks,
        lora_id=lora_id,
        sampling=sampling,
    )
    states.add_requests(new)
    batch = prepare_inputs(states, dict.fromkeys(new.req_ids, 1), buffers)
    mine = mirror.follow(batch)
    if sampling is not None:
        assert np.array_equal(sampling_metadata(mine).seed, sampling_metadata(batch).seed)


@pytest.mark.one_in(11)
@pytest.mark.parametrize("null_block", [0, -1])
@every_backend
@pytest.mark.parametrize("seed", range(4))
def test_replaced_and_nulled_blocks_reach_the_mirror(backend, null_block, seed):
    """Copies on write, entries nulled below a window by method or in the arrays, rows given other blocks, block ops."""
    rng = random.Random(seed)
    states, buffers = make(null_block=null_block)
    mirror, serial = Mirror(states), 0
    for _ in range(40):
        while len(states) < 5 and rng.random() < 0.6:
            serial += 1
            states.add_request(NewRequest(f"r{serial}", [1, 2, 3], blocks_of(states, serial)))
        plan = {}
        for rid in states.req_ids:
            row = states.row_of(rid)
            c, v = int(states.num_computed_tokens[row]), int(states.num_tokens[row])
            if v > 36 or rng.random() < 0.1:
                states.remove_request(rid)
                continue
            plan[rid] = v - c
            full, window = states.block_tables
            match rng.randrange(6):
                case 0:
                    full.replace(row, rng.randrange(full.num_blocks[row]), rng.randint(1, 999))
                case 1:
                    window.replace(row, max(c - 5, 0) // 2, rng.randint(1, 999))
                case 2:
                    dead = max(c - 4, 0) // 2
                    window.table[row, :dead] = null_block
                    window.content_id[row] = window.ids.take()
                case 3:
                    full.start(row, np.arange(1, full.width - rng.randrange(2) + 1, dtype=np.int32))
                case 4:
                    states.swap_rows(row, rng.randrange(6))
        ops = BlockOps.of([5], [(1, 2), (3, 4)], null_block=null_block) if rng.random() < 0.5 else BlockOps.of()
        gather = rng.random() < 0.8
        batch = prepare_inputs(states, plan, buffers, backend=backend, gather_block_tables=gather, block_ops=ops)
        mirror.follow(batch)
        states.commit(batch, np.array([rng.randrange(100) for _ in plan], np.int32))


def test_a_mirror_on_another_rank_writes_its_own_slots():
    groups = [KVGroup(4, context_parallel=True)]
    states, buffers = make(kv_groups=groups, context_parallel=ContextParallel(2, 0))
    other = like(states, context_parallel=ContextParallel(2, 1))
    recorder = DifferenceRecorder(states)
    states.add_request(NewRequest("a", [1, 2, 3, 4], [[1]]))
    batch = prepare_inputs(states, {"a": 4}, buffers)
    mine = apply_difference(other, recorder.take(batch), InputBuffers.for_states(other, 80))
    assert batch.slot_mapping[0].tolist() == [4, -1, 5, -1]
    assert mine.slot_mapping[0].tolist() == [-1, 4, -1, 5]


def test_a_mirror_without_native_rows_follows_states_with_them(monkeypatch):
    """Removals, moves and admissions of rows in NumPy on one side; columns that only one of them resets."""
    states, buffers = make()
    with monkeypatch.context() as patch:
        patch.setattr(request_states, "rows_core", lambda *given: None)
        mirror = Mirror(states)
    assert mirror.states._core is None
    for serial in range(1, 12):
        if len(states) == 3:
            states.remove_request(states.req_ids[0])
        states.condense()
        states.add_request(NewRequest(f"r{serial}", [1, 2, 3], blocks_of(states, serial)))
        stage_mrope_positions(states, f"r{serial}", np.ones((2, 3), int), serial)
        mirror.follow(prepare_inputs(states, {f"r{serial}": 3}, buffers))


def test_observers_of_the_mirror_see_the_same_changes():
    states, buffers = make()
    mirror = Mirror(states)
    mine, theirs = BatchUpdates(mirror.states), BatchUpdates(states)
    for i, rid in enumerate("abcd"):
        states.add_request(NewRequest(rid, [1, 2], blocks_of(states, i + 1)))
    for removed in ("", "a", "c"):
        states.remove_request(removed)
        states.condense()
        mirror.follow(prepare_inputs(states, {"d": 1}, buffers))
        ours, same = mine.take(), theirs.take()
        assert (ours.removed, ours.moved) == (same.removed, same.moved)
        assert [(a.row, a.req_id) for a in ours.added] == [(a.row, a.req_id) for a in same.added]


# -- bytes -------------------------------------------------------------------------------------------------------------


def decoding(num_reqs: int) -> tuple[RequestStates, InputBuffers, Mirror]:
    """Requests that decode one token per step, with blocks for all steps, after the first of them."""
    states, buffers = make(rows=num_reqs, length=4096, vocab_size=150_000, kv_groups=[KVGroup(16)])
    buffers = InputBuffers.for_states(states, max_num_batched_tokens=4 * num_reqs)
    mirror = Mirror(states)
    for i in range(num_reqs):
        states.add_request(NewRequest(f"request-{i:06}", [1, 2, 3], [list(range(9 * i + 1, 9 * i + 10))]))
    for step in range(3):
        rows = np.arange(num_reqs, dtype=np.int32)
        batch = prepare_inputs(states, (rows, np.full(num_reqs, 1 if step else 3, np.int32)), buffers)
        mirror.follow(batch)
        states.commit(batch, np.arange(num_reqs, dtype=np.int32) * 97 + step)
    return states, buffers, mirror


@pytest.mark.parametrize("num_reqs", [1, 64, 256, 1000])
def test_a_steady_decode_step_is_a_few_bytes_per_request(num_reqs):
    _, _, mirror = decoding(num_reqs)
    assert mirror.sizes[-1] <= 400 + 6 * num_reqs  # a row and a token


def test_a_refused_byte_string_names_what_is_wrong():
    states, buffers = make()
    recorder = DifferenceRecorder(states)
    for i, (rid, values) in enumerate(list(RARE.items())[:6]):
        states.add_request(replace(NewRequest(rid, [1, 2, 3, 4, 5, 6], blocks_of(states, i + 1)), **values))
    data = recorder.take(prepare_inputs(states, {"sampled": 3}, buffers)).to_bytes()
    for end in range(0, len(data), 7):
        with pytest.raises(PlanError):
            StepDifference.from_bytes(data[:end])
    for at in range(len(data)):
        with pytest.raises(PlanError):
            StepDifference.from_bytes(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :])
    for wrong, name in ((b"JUNK" + data[4:], "magic"), (data[:4] + b"\x03" + data[5:], "version")):
        with pytest.raises(PlanError, match=name):
            StepDifference.from_bytes(wrong)


@pytest.mark.one_in(7)
@pytest.mark.parametrize("seed", range(6))
def test_bytes_with_a_valid_checksum_and_wrong_content_give_a_typed_error_or_a_step(seed):
    rng = random.Random(seed)
    states, buffers = make()
    recorder = DifferenceRecorder(states)
    for i, (rid, values) in enumerate(list(RARE.items())[:6]):
        states.add_request(replace(NewRequest(rid, [1, 2, 3, 4, 5, 6], blocks_of(states, i + 1)), **values))
    first = recorder.take(prepare_inputs(states, {"sampled": 3}, buffers)).to_bytes()
    states.remove_request("embeds")
    states.condense()
    second = recorder.take(prepare_inputs(states, {"biased": 6}, buffers, draft_tokens=None)).to_bytes()
    refused = 0
    for _ in range(250):
        which = rng.randrange(2)
        body = bytearray((first, second)[which][16:])
        for _ in range(rng.randint(1, 3)):
            body[rng.randrange(len(body))] = rng.randrange(256)
        changed = (first, second)[which][:12] + struct.pack("<I", zlib.crc32(body)) + bytes(body)
        mine = like(states)
        mine_buffers = InputBuffers.for_states(mine, 80)
        try:
            if which:
                apply_difference(mine, StepDifference.from_bytes(first), mine_buffers)
            apply_difference(mine, StepDifference.from_bytes(changed), mine_buffers)
        except ForewordError:
            refused += 1
    assert refused


@pytest.mark.parametrize(
    ("described", "name"),
    [
        ('["plan.rows","i8",1099511627775]', "plan.rows"),  # larger than the bytes
        ('["plan.rows","i4",0],["plan.rows","i4",0]', "plan.rows"),
        ('["plan.rows","i4"]', "plan.rows"),
        ('["plan.rows","i4",0,0,0,0,0]', "plan.rows"),
        ('["plan.rows","i4",-1]', "plan.rows"),
        ('["plan.rows","x4",0]', "plan.rows"),
        ('["plan.rows",4,0]', "plan.rows"),
        ('[7,"i4",0]', "7"),
    ],
)
def test_a_description_of_an_array_that_is_wrong_is_refused_by_its_name(described, name):
    text = f'{{"step":1,"num_admissions":0,"arrays":[{described}]}}'.encode()
    data = struct.pack("<4sIII", b"FWSD", 2, len(text), zlib.crc32(text)) + text
    with pytest.raises(PlanError, match=f"arrays: {re.escape(name)}"):
        StepDifference.from_bytes(data)


def test_arrays_of_any_type_and_size_return_equal():
    rng = np.random.default_rng(0)
    given = {
        "float": rng.random((3, 2), np.float32),
        "flags": np.array([True, False]),
        "equal": np.full(9, -7),
        "many": np.full(2**16 + 1, 3),
        "table": np.full((3, 4), 70_000),
        "wide": np.array([-1, 2**63 - 1]),
        "unsigned": np.array([0, 2**32]),
        "columns": np.arange(6).reshape(2, 3).T,
    }
    _, found = unpack(pack({}, given))
    for name, array in given.items():
        assert np.array_equal(found[name], array), name
        assert found[name].shape == array.shape
    assert len(pack({}, {"equal": np.full(9, 3)})) < len(pack({}, {"other": np.arange(9)}))
    with pytest.raises(PlanError, match="complex"):
        pack({}, {"complex": np.ones(2, complex)})


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("removed", [9]),
        ("swaps", [0]),
        ("swaps", [0, 1] * 7),
        ("swaps", [0, 6]),
        ("admitted.rows", [0]),
        ("admitted.num_tokens", [0]),
        ("admitted.token_ids", [100]),
        ("admitted.block_ids.0", [*range(9), -1]),
        ("entries.0.at", [10**6]),
        ("entries.0.blocks", [-1]),
        ("rows.1", [6]),
        ("num_tokens.0", [-9]),
        ("num_tokens.0", [1, 1]),
        ("num_blocks.0.0", [100]),
        ("num_tokens.7", [1]),
        ("resent.0", [30]),
        ("tokens", [5, 5]),
        ("tokens", [100]),
        ("needs.0", [2**20]),
        ("mrope_positions.5", [[1]]),
        ("mrope_positions.x", [[1]]),
        ("plan.rows", [6]),
        ("plan.counts", [99]),
        ("plan.cancelled", [2]),
        ("drafts.ids", [1]),
        ("ops.copies", [1]),
        ("other", [1]),
    ],
)
def test_an_array_with_a_wrong_value_is_refused_by_name(name, wrong):
    """A difference with an admission and a sampled token, of which one array is wrong."""
    states, buffers = make()
    mirror = Mirror(states)
    states.add_request(NewRequest("a", [1, 2], blocks_of(states, 1)))
    mirror.follow(batch := prepare_inputs(states, {"a": 2}, buffers))
    states.commit(batch, {"a": [3]})
    states.add_request(NewRequest("b", [1], blocks_of(states, 2)))
    difference = mirror.recorder.take(prepare_inputs(states, {"a": 1}, buffers))
    changed = replace(difference, arrays={**difference.arrays, name: np.array(wrong)})
    named = {"admitted.num_tokens": "prompt_len", "admitted.token_ids": "100", "admitted.block_ids.0": "-1",
             "plan.counts": "num_scheduled_tokens", "resent.0": "resent"}.get(name, name)  # fmt: skip
    with pytest.raises(ForewordError, match="row 6" if wrong == [0, 6] else re.escape(named)):
        apply_difference(mirror.states, StepDifference.from_bytes(changed.to_bytes()), mirror.buffers[id(buffers)])


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_a_difference_is_applied_once_in_order_to_states_that_follow():
    states, buffers, mirror = decoding(4)
    batch = prepare_inputs(states, {"request-000001": 1}, buffers)
    difference = mirror.recorder.take(batch)
    [mine] = mirror.buffers.values()
    states.commit(batch, np.array([7], np.int32))
    later = mirror.recorder.take(prepare_inputs(states, {"request-000001": 1}, buffers))
    with pytest.raises(PlanError, match="follow"):
        apply_difference(mirror.states, later, mine)
    apply_difference(mirror.states, difference, mine)
    with pytest.raises(PlanError, match="follow"):
        apply_difference(mirror.states, difference, mine)
    apply_difference(mirror.states, later, mine)
    assert_equal_states(states, mirror.states)


def test_a_snapshot_needs_new_states_of_the_same_shape():
    states, buffers, mirror = decoding(2)
    snapshot = DifferenceRecorder(states).take(prepare_inputs(states, {}, buffers))
    assert snapshot.is_snapshot
    assert snapshot.req_ids == states.req_ids
    with pytest.raises(PlanError, match="new states"):
        apply_difference(mirror.states, snapshot, next(iter(mirror.buffers.values())))
    other = like(states, vocab_size=7)
    with pytest.raises(PlanError, match="vocab_size"):
        apply_difference(other, snapshot, InputBuffers.for_states(other, 8))
    with pytest.raises(PlanError, match="other states"):
        apply_difference(other, snapshot, buffers)


def test_a_difference_is_taken_before_the_states_change():
    states, buffers, mirror = decoding(3)
    batch = prepare_inputs(states, {"request-000001": 1}, buffers)
    with pytest.raises(PlanError, match="other states"):
        Mirror(mirror.states).recorder.take(batch)
    advance(states, batch)
    with pytest.raises(PlanError, match="advanced"):
        mirror.recorder.take(batch)
    states.commit(batch, np.array([1], np.int32))
    batch = prepare_inputs(states, {"request-000001": 1}, buffers)
    states.append_blocks("request-000001", [[77]])
    with pytest.raises(PlanError, match="changed"):
        mirror.recorder.take(batch)
    batch = prepare_inputs(states, {"request-000001": 1}, buffers)
    states.remove_request("request-000001")
    with pytest.raises(PlanError, match="changed"):
        mirror.recorder.take(batch)


def test_parameters_that_json_cannot_hold_are_named():
    states, buffers = make()
    recorder = DifferenceRecorder(states)
    params = SamplingParams(extra_args={"callback": object()})
    states.add_request(NewRequest("a", [1], [[1], [1]], sampling_params=params))
    difference = recorder.take(prepare_inputs(states, {"a": 1}, buffers))
    with pytest.raises(RequestError, match="extra_args"):
        difference.to_bytes()
    other = like(states)
    apply_difference(other, difference, InputBuffers.for_states(other, 80))
    assert other.sampling.params[0] is params


def test_a_closed_recorder_follows_nothing():
    states, _ = make()
    recorder = DifferenceRecorder(states)
    recorder.close()
    assert not states.observers
