"""The file of a trace: what is written is read, and damage is named."""

import gzip
import json
from dataclasses import fields, replace

import numpy as np
import pytest
from trace_lives import VOCAB, Life

from foreword.batch import (
    InputBuffers,
    KVGroup,
    MultiModalFeature,
    NewRequest,
    PlanError,
    RequestStates,
    bidirectional_ranges,
    mrope_positions,
    prepare_inputs,
    stage_mrope_positions,
)
from foreword.insight import Add, Commit, Event, Replay, Step, Trace, TraceHeader, TraceReader, TraceWriter, conform
from foreword.trace.events import KINDS
from foreword.trace.project import shortened, with_requests
from foreword.trace.recorder import TraceRecorder
from foreword.trace.writer import older

HEADER = TraceHeader(
    max_num_reqs=4,
    max_num_batched_tokens=16,
    max_model_len=32,
    vocab_size=VOCAB,
    kv_groups=(KVGroup(4), KVGroup(2, sliding_window=3)),
    max_num_draft_tokens=2,
    engine="some engine 1.2",
    started=1.5e9,
)


def values(event):
    """The fields of an event as plain values."""
    return {f.name: plain(getattr(event, f.name)) for f in fields(event) if f.name != "line"}


def plain(value):
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    return {key: plain(item) for key, item in value.items()} if isinstance(value, dict) else value


def write_all(writer):
    """One event of each kind, with every field."""
    writer.arrive("a", 3, time=0.25)
    writer.add(
        "a", np.array([1, 2, 3]), [[1], [2, 3]], [4], 2, prefill_len=3, lora_id=3, cache_salt="salt",
        cache_miss="differs at 2", bidirectional_ranges=np.array([[0, 2]]),
        mrope_positions=np.array([[0, 1], [0, 2], [0, 1]]), mrope_delta=-1,
        extras={"sampling_params": {"temperature": 0.5}, "mm_features": [{"identifier": "x", "offset": 0}]},
    )  # fmt: skip
    writer.append_blocks("a", [np.array([9]), []])
    writer.step(
        ["a"], np.array([4]), draft_tokens={"a": [5, 6]}, pad_to=(8, None), order="decode_first", zero=[3],
        copies=np.array([[1, 9]]), tensors={"input_ids": np.array([3, 4, 5, 6]), "num_tokens": np.int64(4)}, time=0.5,
    )  # fmt: skip
    writer.commit({"a": np.array([5, 7])}, {"a": [-0.5, -1.25]}, model_ms=3.5, host_us=20)
    writer.correct("a", num_tokens=4, token_ids=(4, [8]), num_computed_tokens=3, block_ids=[[1, 2], [3]])
    writer.remove("a", preempted=True)
    writer.fail("out of memory", time=1.0)
    writer.end("a", "stop", time=1.5)
    writer.restart(7, "events were lost")
    writer.wait("b", "no_blocks need=9 free=4")
    writer.wait()


def recorded(tmp_path, name="steps.jsonl"):
    """The events as they were given, and the file's name."""
    given: list[Event] = []
    with TraceWriter(tmp_path / name, HEADER) as writer:
        original, writer.write = writer.write, lambda event: (given.append(event), original(event))[1]
        write_all(writer)
    return given, tmp_path / name


@pytest.mark.smoke
@pytest.mark.parametrize("name", ["steps.jsonl", "steps.jsonl.gz"])
def test_what_is_written_is_read(tmp_path, name):
    given, path = recorded(tmp_path, name)
    reader = TraceReader(path)
    assert reader.header == HEADER
    assert {type(event) for event in given} == set(KINDS.values())
    assert [values(event) for event in reader] == [values(event) for event in given]
    assert [event.line for event in reader] == list(range(2, 2 + len(given)))
    assert (path.read_bytes()[:2] == b"\x1f\x8b") == name.endswith(".gz")


def test_the_short_forms_of_steps_and_samples_mean_the_same(tmp_path):
    path = tmp_path / "steps.jsonl"
    with TraceWriter(path, HEADER) as writer:
        writer.step(["a", "b"], [1, 1])
        writer.commit({"a": [5], "b": [6]})
        writer.commit(np.array([[5, -1], [-1, -1]]))
        writer.step(["a", "b"], [1, 2])
    lines = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    assert lines[0] == {"step": {"num_scheduled_tokens": ["a", "b"]}}
    assert lines[1:3] == [{"commit": [5, 6]}, {"commit": {"a": [5]}}]
    step, commit, *_, other = TraceReader(path)
    assert (step.req_ids, step.counts, other.counts) == (["a", "b"], [1, 1], [1, 2])
    assert commit.tokens == {"a": [5], "b": [6]}


@pytest.mark.parametrize("seed", range(12))
def test_a_random_life_replays_with_every_tensor(tmp_path, seed):
    path = tmp_path / "life.jsonl.gz"
    Life(path, seed).run(25)
    report = conform.run(path)
    assert report.ok, str(report)
    assert report.num_steps == 25
    assert report.num_tensors > 25 * 15


@pytest.mark.parametrize("token_ids", ["hashed", "omitted"])
def test_a_trace_without_its_token_ids_replays(tmp_path, token_ids):
    life = Life(tmp_path / "life.jsonl", 3, token_ids=token_ids).run(15)
    plain_life = Life(tmp_path / "plain.jsonl", 3).run(15)
    report = conform.run(tmp_path / "life.jsonl")
    assert report.ok, str(report)
    assert plain_life.next_id == life.next_id
    both = [[e for e in TraceReader(tmp_path / name) if isinstance(e, Add)] for name in ("plain.jsonl", "life.jsonl")]
    for as_it_was, covered in zip(*both, strict=True):
        if token_ids == "omitted":
            assert covered.prompt_token_ids == len(as_it_was.prompt_token_ids)
        elif len(set(as_it_was.prompt_token_ids)) > 3:
            assert covered.prompt_token_ids != as_it_was.prompt_token_ids
            pairs = set(zip(as_it_was.prompt_token_ids, covered.prompt_token_ids, strict=True))
            assert len(pairs) == len(set(as_it_was.prompt_token_ids)) == len(set(covered.prompt_token_ids))
    if token_ids == "omitted":
        assert "input_ids" not in (tmp_path / "life.jsonl").read_text()


def test_covered_traces_have_no_texts_of_requests(tmp_path):
    for token_ids in ("hashed", "omitted"):
        path = tmp_path / f"{token_ids}.jsonl"
        with TraceWriter(path, replace(HEADER, token_ids=token_ids)) as writer:
            extras = {
                "sampling_params": {"temperature": 0.5, "stop": ["secret"], "stop_token_ids": [98765432, 98765433]}
            }
            writer.add("a", [1], [[], []], cache_salt="secret", extras=extras)
        text = path.read_text()
        assert "secret" not in text
        assert "98765432" not in text
        assert '"temperature":0.5' in text


@pytest.mark.parametrize("token_ids", ["plain", "hashed", "omitted"])
def test_a_replay_has_the_bidirectional_ranges_of_the_recorded_requests(tmp_path, token_ids):
    """From the beginning, from a later step on, and with the first tokens of the request left out."""
    path, ranges = tmp_path / "steps.jsonl", [(1, 3), (5, 9)]
    states = RequestStates(max_num_reqs=2, max_model_len=16, vocab_size=VOCAB, kv_groups=(KVGroup(4),))
    buffers, seen = InputBuffers.for_states(states, 16), []
    with TraceRecorder(path, states, 16, token_ids=token_ids) as trace:
        states.add_request(NewRequest("a", list(range(10)), [[1, 2, 3]], bidirectional_ranges=ranges))
        for plan in ({"a": 4}, {"a": 1}, {"a": 5}):
            batch = prepare_inputs(states, plan, buffers)
            trace.step(batch, {})
            seen.append(None if (found := bidirectional_ranges(batch)) is None else found.tolist())
            sampled = {"a": [7]} if len(seen) == 3 else {}
            states.commit(batch, sampled)
            trace.commit(batch, sampled)
    assert seen == [[[0, 0], [1, 3], [1, 3], [0, 0]], None, [[5, 9]] * 4 + [[0, 0]]]
    whole = Trace.read(path)
    later = Replay.rebase(whole, 1)
    shorter = None if token_ids == "omitted" else Trace(later.header, shortened(later.header, later.events, 0))
    for trace, expected in ((whole, seen), (later, seen[1:]), (shorter, [None, [[1, 5]] * 4 + [[0, 0]]])):
        if trace is not None:
            replay = Replay(trace.header)
            batches = (batch for event in trace.events if (batch := replay.apply(event)) is not None)
            found = [None if (one := bidirectional_ranges(batch)) is None else one.tolist() for batch in batches]
            assert found == expected


@pytest.mark.parametrize("token_ids", ["plain", "hashed", "omitted"])
def test_a_replay_has_the_rotary_positions_that_a_request_was_given_after_its_admission(tmp_path, token_ids):
    """From the beginning, from a later step on, with the first tokens left out, and of one request of two."""
    path, rotary = tmp_path / "steps.jsonl", np.array([[0, 1, 2, 2, 2, 3], [0, 1, 2, 3, 4, 5], [0, 1, 2, 2, 3, 3]])
    states = RequestStates(max_num_reqs=2, max_model_len=16, vocab_size=VOCAB, kv_groups=(KVGroup(4),))
    buffers, seen, images = InputBuffers.for_states(states, 16), [], [MultiModalFeature("cat", 4, 1)]
    with TraceRecorder(path, states, 16, token_ids=token_ids) as trace:
        states.add_request(NewRequest("text", [1, 2, 3, 4, 5, 6], [[4, 5]]))
        states.add_request(NewRequest("image", list(range(6)), [[1, 2]], mm_features=images))
        stage_mrope_positions(states, "image", rotary, -2)
        for plan in ({"text": 3, "image": 4}, {"text": 3, "image": 2}, {"text": 1, "image": 1}):
            batch = prepare_inputs(states, plan, buffers)
            seen.append(mrope_positions(batch).copy())
            trace.step(batch, {"mrope_positions": seen[-1]})
            sampled = {} if len(seen) == 1 else {"text": [7], "image": [8]}
            states.commit(batch, sampled)
            trace.commit(batch, sampled)
    assert [found[1].tolist() for found in seen] == [[0, 1, 2, 0, 1, 2, 3], [3, 4, 5, 4, 5], [6, 4]]
    whole = Trace.read(path)
    assert conform.run(path).ok
    later = Replay.rebase(whole, 1)
    cut = Trace(whole.header, with_requests(whole.events, ["image"]))
    of_image = [found[:, starts:] for found, starts in zip(seen, (3, 3, 1), strict=True)]
    expected = [(whole, seen), (later, seen[1:]), (cut, of_image)]
    if token_ids != "omitted":
        without = [replace(event, tensors={}) if isinstance(event, Step) else event for event in later.events]
        at = next(i for i, event in enumerate(without) if isinstance(event, Add) and event.req_id == "image")
        expected.append((Trace(later.header, shortened(later.header, without, at)), seen[1:]))
    for trace, steps in expected:
        replay = Replay(trace.header)
        batches = (batch for event in trace.events if (batch := replay.apply(event)) is not None)
        assert [mrope_positions(batch).tolist() for batch in batches] == [one.tolist() for one in steps]
    tensors = [event.tensors["mrope_positions"] for event in cut.events if isinstance(event, Step)]
    assert [np.asarray(one).tolist() for one in tensors] == [one.tolist() for one in of_image]


def test_a_rotary_position_that_differs_is_named_with_its_request(tmp_path):
    path = tmp_path / "steps.jsonl"
    with TraceWriter(path, HEADER) as writer:
        writer.add("a", [1, 2], [[1], [2]])
        writer.add("b", [1, 2], [[3], [4]], mrope_positions=[[0, 5], [0, 6], [0, 7]], mrope_delta=6)
        writer.step(["a", "b"], [2, 2], tensors={"mrope_positions": [[0, 1, 0, 5], [0, 1, 0, 5], [0, 1, 0, 7]]})
    [found] = conform.run(path).differences
    assert (found.index, found.request, found.expected, found.got) == ((1, 3), "b", 6, 5)


def test_ranges_outside_of_the_prompt_cannot_be_replayed(tmp_path):
    path = tmp_path / "steps.jsonl"
    with TraceWriter(path, HEADER) as writer:
        writer.add("a", [1, 2, 3], [[1], [2, 3]], bidirectional_ranges=[[1, 4]])
    assert "bidirectional_ranges" in str(conform.run(path, strict=False))


@pytest.mark.parametrize("token_ids", ["plain", "hashed", "omitted"])
def test_without_token_ids_a_trace_does_not_tell_of_content_under_another_salt(tmp_path, token_ids):
    path, misses = tmp_path / "steps.jsonl", ["salt at 4", "never_computed at 4", "differs at 2", ""]
    with TraceWriter(path, replace(HEADER, token_ids=token_ids)) as writer:
        for i, miss in enumerate(misses):
            writer.add(str(i), [1], [[], []], cache_miss=miss)
    expected = misses if token_ids != "omitted" else [misses[1], *misses[1:]]
    assert [event.cache_miss for event in TraceReader(path)] == expected


@pytest.mark.parametrize("name", ["steps.jsonl", "steps.jsonl.gz"])
def test_a_file_cut_anywhere_can_be_read_up_to_the_cut(tmp_path, name):
    whole = tmp_path / name
    Life(whole, 1).run(6)
    data, events = whole.read_bytes(), list(TraceReader(whole))
    cut, lengths = tmp_path / ("cut" + name[5:]), set()
    for size in range(800, len(data), max(len(data) // 40, 1)):
        cut.write_bytes(data[:size])
        trace = Trace.read(cut)
        assert [values(e) for e in trace.events] == [values(e) for e in events[: len(trace.events)]]
        if trace.damage is None:
            assert data[:size].endswith(b"}") or data[:size].endswith(b"\n")
        else:
            assert f"line {len(trace.events) + 2}" in str(trace.damage)
            report = conform.run(cut, strict=False)
            assert not report.ok
            assert not report.differences
            assert "the replay ended early" in str(report)
        lengths.add(len(trace.events))
    assert len(lengths) > 3


def test_a_damaged_line_is_named_and_the_lines_before_it_are_compared(tmp_path):
    path = tmp_path / "life.jsonl"
    Life(path, 2).run(8)
    lines = path.read_bytes().splitlines(keepends=True)
    steps = [i for i, line in enumerate(lines) if line.startswith(b'{"step"')]
    lines[steps[5]] = lines[steps[5]].replace(b":", b";", 3)
    path.write_bytes(b"".join(lines))
    with pytest.raises(PlanError, match=f"line {steps[5] + 1}: not valid JSON"):
        conform.run(path)
    report = conform.run(path, strict=False)
    assert report.num_steps == 5
    assert f"line {steps[5] + 1}" in str(report)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"step": {"num_scheduled_tokens": ["a", "a"]}}, "each id once"),
        ({"step": {"num_scheduled_tokens": {"a": 1.5}}}, "counts=.*list of integers"),
        ({"step": {"num_scheduled_tokens": {"a": 1}}, "tensor": {}}, "unknown key 'tensor' beside 'step'"),
        ({"step": {"num_scheduled_tokens": {"a": 1}, "draft_tokens": {"a": "x"}}}, r"draft_tokens\['a'\]='x'"),
        ({"step": {"num_scheduled_tokens": {"a": 1}, "copies": [[1]]}}, "a list of pairs"),
        ({"remove": {"req_id": "a", "preempted": 1}}, "true or false"),
        ({"correct": {"req_id": "a", "token_ids": [1]}}, r"\[position, ids\]"),
        ({"append_blocks": {"req_id": "a", "block_ids": [[1]]}}, "each of the 2 KV groups"),
        ({"commit": [1, 2]}, "2 tokens for the 0 requests of the last step"),
        ({"add": {"req_id": "a", "block_ids": []}}, "the field 'prompt_token_ids' is missing"),
        ({"end": {"req_id": "a", "reason": 3}}, "a string"),
        (
            {"add": {"req_id": "a", "prompt_token_ids": [1], "block_ids": [[], []], "bidirectional_ranges": [1, 2]}},
            "a list of pairs",
        ),
        ({"append_blocks": {"req_id": "a", "block_ids": [[2**31], []]}}, "integers of 32 bits"),
        ({"restart": {"first_step": -1}}, "0 or more"),
        ({"arrive": {"req_id": "a", "num_prompt_tokens": 1, "time": 10**400}}, "a number below"),
        ({"arrive": {"req_id": "a", "num_prompt_tokens": 1, "time": float("nan")}}, "a number below"),
    ],
)
def test_a_line_of_another_form_is_refused_with_what_is_expected(tmp_path, line, message):
    path = tmp_path / "bad.jsonl"
    path.write_text("\n".join(map(json.dumps, [HEADER.as_json(), line])))
    with pytest.raises(PlanError, match=f"line 2: .*{message}"):
        list(TraceReader(path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"foreword_trace": 3}, "reads, 1 or 2; it is 3"),
        ({"foreword_trace": True}, "reads, 1 or 2"),
        ({"speed": 1}, "unknown key 'speed'"),
        ({"token_ids": "secret"}, "must be one of plain, hashed, omitted"),
        ({"started": "now"}, "another type"),
        ({"kv_groups": 3}, "an object per KV group"),
    ],
)
def test_a_foreign_header_is_refused(tmp_path, changes, message):
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(HEADER.as_json() | changes))
    with pytest.raises(PlanError, match=f"line 1: .*{message}"):
        TraceReader(path)


def test_a_trace_of_version_1_is_read_with_what_others_added(tmp_path):
    path = tmp_path / "old.jsonl"
    header = HEADER.as_json() | {"foreword_trace": 1, "author": "another engine"}
    lines = [
        header,
        {"add": {"req_id": "a", "prompt_token_ids": [1, 2], "block_ids": [[1], [2]]}},
        {"step": {"num_scheduled_tokens": {"a": 2}}, "tensors": {"input_ids": [1, 2]}, "note": "first"},
        {"commit": {"a": [3]}},
        {"remove": "a"},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    assert conform.run(path).ok


def test_entries_below_a_window_may_have_any_value_and_those_above_not(tmp_path):
    path = tmp_path / "window.jsonl"
    header = replace(HEADER, kv_groups=(KVGroup(2, sliding_window=3),), engine="", started=None)
    for table, wrong in (([9, 9, 3, 4], None), ([9, 9, 3, 9], (0, 0, 3)), ([9, 9, 9, 4], (0, 0, 2))):
        with TraceWriter(path, header) as writer:
            writer.add("a", list(range(8)), [[1, 2, 3, 4]], num_computed_tokens=7)
            writer.step(["a"], [1], tensors={"block_table": [[table]]})
        assert [d.index for d in conform.run(path).differences] == ([] if wrong is None else [wrong])


def test_a_group_without_slots_has_none_in_place_of_them(tmp_path):
    path = tmp_path / "states.jsonl"
    for slots, wrong in (([None, [2, 3]], []), ([None, [2, 9]], [(1, 1)])):
        with TraceWriter(path, HEADER) as writer:
            writer.add("a", [1, 2], [[1], [1]])
            writer.step(["a"], [2], tensors={"slot_mapping": slots})
        assert [d.index for d in conform.run(path).differences] == wrong


@pytest.mark.parametrize("value", [[2**63, -1], [1, 2**64], [1, None], [1, "x"], [[1], [2]], [1, 2, 3], {}, "x", 7])
def test_a_tensor_of_any_other_form_is_a_difference(tmp_path, value):
    path = tmp_path / "steps.jsonl"
    with TraceWriter(path, HEADER) as writer:
        writer.add("a", [1, 2], [[1], [2]])
        writer.step(["a"], [2], tensors={"input_ids": value, "req_indices": value, "slot_mapping": [value, value]})
    assert {d.tensor for d in conform.run(path).differences} == {"input_ids", "req_indices", "slot_mapping"}


def test_a_writer_with_a_size_begins_a_new_part_that_replays_alone(tmp_path):
    path, states = tmp_path / "steps.jsonl", HEADER.new_states(4)
    writer = TraceWriter(path, TraceHeader.of_states(states, 16), max_bytes=4000)
    live = {}
    for step in range(100):
        if step % 10 == 0:
            for req_id in live:
                writer.remove(req_id)
            live = {f"r{step}": 3, f"s{step}": 5}
            for req_id, known in live.items():
                writer.add(req_id, list(range(known)), [[step + 1], []], prefill_len=known)
        writer.step(list(live), [1] * 2)
        if writer.is_full:
            writer.rotate([Add(req_id=r, prompt_token_ids=[1] * n, block_ids=[[], []]) for r, n in live.items()])
    writer.close()
    parts = [Trace.read(p) for p in (older(path), path)]
    steps = [sum(isinstance(event, Step) for event in part.events) for part in parts]
    assert [type(event) for event in parts[1].events[:2]] == [Add, Add]
    assert parts[1].header.first_step == parts[0].header.first_step + steps[0] == 101 - steps[1]
    assert parts[0].header.first_step > 1
    assert 2000 <= path.stat().st_size + older(path).stat().st_size < 4200


@pytest.mark.parametrize("seed", range(3))
def test_a_trace_from_its_kth_step_on_replays(tmp_path, seed):
    path = tmp_path / "life.jsonl"
    Life(path, seed).run(12)
    trace = Trace.read(path)
    for k in range(12):
        rest = Replay.rebase(trace, k)
        assert rest.header.first_step == k + 1
        with TraceWriter(tmp_path / "rest.jsonl", rest.header) as writer:
            for event in rest.events:
                writer.write(event)
        report = conform.run(tmp_path / "rest.jsonl")
        assert report.ok, str(report)
        assert report.num_steps == 12 - k
    with pytest.raises(PlanError, match="no step 12"):
        Replay.rebase(trace, 12)


def test_states_of_a_header_are_those_that_it_was_made_of():
    states = RequestStates(max_num_reqs=3, max_model_len=9, vocab_size=7, kv_groups=[KVGroup(2)], null_block=-1)
    header = TraceHeader.of_states(states, 5)
    assert TraceHeader.from_json(json.loads(json.dumps(header.as_json()))) == header
    assert repr(header.new_states(3)) == repr(states)


def test_a_compressed_file_with_other_bytes_is_refused(tmp_path):
    path = tmp_path / "steps.jsonl.gz"
    path.write_bytes(b"no gzip")
    with pytest.raises(PlanError, match="line 1: the compressed file is cut or damaged"):
        TraceReader(path)
    path.write_bytes(gzip.compress(b"{}"))
    with pytest.raises(PlanError, match="line 1: the first line must hold"):
        TraceReader(path)


def test_the_first_tokens_of_steps_are_counted_by_commits(tmp_path):
    """A prompt chunk has no sample in the trace, though its engine drew one."""
    path = tmp_path / "life.jsonl"
    Life(path, 7).run(15)
    known = {}
    for event in TraceReader(path):
        if isinstance(event, Step):
            known = dict(zip(event.req_ids, event.counts, strict=True))
        if isinstance(event, Commit):
            assert event.tokens.keys() <= known.keys()
