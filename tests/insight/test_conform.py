"""Traces of steps: golden traces, recorded traces, and the reports of their replay."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from foreword.batch import InputBuffers, KVGroup, NewRequest, PlanError, RequestStates, SamplingParams, prepare_inputs
from foreword.batch.prepare.prepare import BACKENDS
from foreword.bench.engine_host import NothingModel
from foreword.engine import Engine, EngineConfig
from foreword.engine.speculation import SpeculationConfig
from foreword.insight import conform, golden
from foreword.insight.record import StepInspector
from foreword.scheduler import SchedulerConfig
from foreword.trace.recorder import TraceRecorder
from foreword.trace.tensors import RECORDED

GOLDEN = conform.golden_vectors()


def test_the_shipped_traces_are_those_of_the_defining_backend(tmp_path):
    made = golden.main(tmp_path)
    assert [p.name for p in GOLDEN] == sorted(p.name for p in made)
    for path in made:
        assert path.read_text() == (conform.VECTORS / path.name).read_text(), path.name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("path", GOLDEN, ids=lambda p: p.stem)
def test_every_backend_conforms(path, backend):
    report = conform.run(path, backend=backend)
    assert report.ok, str(report)
    assert report.num_steps >= 3


def test_the_golden_traces_hold_every_tensor():
    seen = {
        name
        for path in GOLDEN
        for line in path.read_text().splitlines()
        for name in json.loads(line).get("tensors", ())
    }
    assert seen == {"req_ids"} | {spec.name for spec in RECORDED}


def changed(value):
    """The value with its last number incremented."""
    if isinstance(value, list):
        for i in reversed(range(len(value))):
            new = changed(value[i])
            if new is not None:
                return [*value[:i], new, *value[i + 1 :]]
        return None
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int) else value + "?"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("path", GOLDEN, ids=lambda p: p.stem)
def test_a_changed_number_is_reported_with_its_index(path, tmp_path):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    number = max(i for i, line in enumerate(lines) if "step" in line)
    for name, value in lines[number]["tensors"].items():
        new = changed(value)
        if new is None:
            continue
        copy = tmp_path / "changed.jsonl"
        tensors = {**lines[number]["tensors"], name: new}
        copy.write_text("\n".join(map(json.dumps, [*lines[:number], {**lines[number], "tensors": tensors}])))
        report = conform.run(copy)
        assert [d.tensor for d in report.differences] == [name]
        assert report.differences[0].line == number + 1
        assert f"line {number + 1}, step {report.num_steps}: {name}" in str(report)


def test_padding_may_be_omitted_and_must_hold_the_padding_value(tmp_path):
    path = conform.VECTORS / "chunks_and_decodes.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    at = next(i for i, line in enumerate(lines) if "pad_to" in line.get("step", {}))
    tensors = lines[at]["tensors"]
    short = {name: tensors[name][:3] for name in ("positions", "seq_lens", "input_ids")}
    short["query_start_loc"] = tensors["query_start_loc"][:4]
    long = {"positions": [*tensors["positions"], 0, 0], "query_start_loc": [*tensors["query_start_loc"], 3]}
    stale = {"positions": [*tensors["positions"], 0, 7]}
    copy = tmp_path / "padded.jsonl"
    for given, wrong in ((short, []), (long, []), (stale, [("positions", (9,), 0, 7)])):
        copy.write_text("\n".join(map(json.dumps, [*lines[:at], {**lines[at], "tensors": given}])))
        found = [(d.tensor, d.index, d.expected, d.got) for d in conform.run(copy).differences]
        assert found == wrong


def test_a_trace_may_have_tables_of_another_width_and_derived_tensors(tmp_path):
    lines = [
        {
            "foreword_trace": 1,
            "max_num_reqs": 2,
            "max_num_batched_tokens": 8,
            "max_model_len": 12,
            "vocab_size": 9,
            "kv_groups": [{"block_size": 2}],
        },
        {"add": {"req_id": "a", "prompt_token_ids": [1, 2, 3], "block_ids": [[4, 5]]}},
        {"step": {"num_scheduled_tokens": {"a": 3}}, "tensors": {}},
    ]
    path = tmp_path / "hand.jsonl"
    for table, found in (
        ([[4, 5]], []),
        ([[4, 5] + 10 * [0]], []),
        ([[4, 5, 0], [0, 0, 0]], []),
        ([[4]], [((0, 0, 1), 5, 0)]),
        ([[4, 5, 6]], [((0, 0, 2), 0, 6)]),
        ([[4, 5], [6]], [((0, 1, 0), 0, 6)]),
    ):
        lines[2]["tensors"] = {"block_table": [table], "block_numbers": [[4, 4, 5]], "block_offsets": [[0, 1, 0]]}
        path.write_text("\n".join(map(json.dumps, lines)))
        assert [(d.index, d.expected, d.got) for d in conform.run(path).differences] == found
    lines[2]["tensors"] = {"block_offsets": [[0, 1, 1]]}
    path.write_text("\n".join(map(json.dumps, lines)))
    assert "block_offsets[0, 2] (request 'a'): expected 0, got 1" in str(conform.run(path))


@pytest.mark.parametrize(
    ("line", "message"),
    [({"foreword_trace": 9}, "the first line must hold"), ({"remove": "a"}, "the first line must hold")],
)
def test_a_trace_without_a_header_is_refused(line, message, tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(line))
    with pytest.raises(PlanError, match=f"line 1: .*{message}"):
        conform.run(path)


@pytest.mark.parametrize(
    "line",
    [
        '{"nonsense": 1}',
        "[1]",
        "{",
        '{"commit": {"a": [1]}}',
        '{"remove": "a"}',
        '{"remove": "a", "commit": {}}',
        '{"append_blocks": "a"}',
        '{"append_blocks": {"req_id": "a", "block_ids": [[1]]}}',
        '{"add": {"req_id": "a", "prompt": [1]}}',
        '{"step": {"num_scheduled_tokens": {"a": 1}}}',
        '{"add": [1]}',
        '{"add": {"prompt_token_ids": [1], "block_ids": [[]]}}',
        '{"step": {}}',
        '{"step": 3}',
        '{"step": {"num_scheduled_tokens": {}, "pad_to": 4}}',
    ],
)
def test_a_line_that_cannot_be_replayed_is_named_without_names_of_python(line, tmp_path):
    path = tmp_path / "bad.jsonl"
    header = GOLDEN[0].read_text().splitlines()[0]
    path.write_text(f"{header}\n\n{line}\n")
    with pytest.raises(PlanError, match="line 3: ") as raised:
        conform.run(path)
    assert not re.search(r"\w+Error|__init__", str(raised.value))


def test_a_tensor_that_cannot_be_compared_is_reported_and_the_others_are_compared(tmp_path):
    lines = [json.loads(line) for line in (conform.VECTORS / "chunks_and_decodes.jsonl").read_text().splitlines()]
    steps = [i for i, line in enumerate(lines) if "step" in line]
    tensors = lines[steps[0]]["tensors"]
    strange = {"logits": [], "positions": 3, "dcp_local_seq_lens": [1], "num_tokens": tensors["num_tokens"] + 1}
    lines[steps[0]]["tensors"] = tensors | strange
    lines[steps[1]]["tensors"]["num_tokens"] += 1
    path = tmp_path / "strange.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    report = conform.run(path)
    assert report.num_steps == len(steps)
    assert {(d.step, d.tensor) for d in report.differences} == {(1, name) for name in strange} | {(2, "num_tokens")}
    assert f"line {steps[0] + 1}, step 1: logits: expected the name of a tensor" in str(report)
    assert "positions: expected a list, got 3" in str(report)
    assert "dcp_local_seq_lens: expected no such tensor without context parallelism in the first line" in str(report)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_model_len": 2**31 - 1}, "above the limit of 268435456"),
        ({"max_num_batched_tokens": 2**31 - 1}, "above the limit of 268435456"),
        ({"max_num_draft_tokens": 2**31 - 1}, "above the limit of 268435456"),
        ({"max_model_len": 2**31}, "max_model_len=2147483648: must be in"),
        ({"max_num_reqs": "4"}, "max_num_reqs='4': must be in"),
        ({"kv_groups": [{"block_size": 4}] * 257}, "257 groups, above the limit of 256"),
    ],
)
def test_a_header_that_asks_for_too_much_memory_is_refused(changes, message, tmp_path):
    header, *lines = GOLDEN[0].read_text().splitlines()
    path = tmp_path / "large.jsonl"
    path.write_text("\n".join([json.dumps({**json.loads(header), **changes}), *lines]))
    with pytest.raises(PlanError, match=f"line 1: .*{message}"):
        conform.run(path)


def test_a_replay_needs_rows_for_its_requests_alone(tmp_path):
    header, *lines = GOLDEN[0].read_text().splitlines()
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join([json.dumps({**json.loads(header), "max_num_reqs": 2**31 - 1}), *lines]))
    assert conform.run(path).ok


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    for name in ("missing.jsonl", "binary.jsonl", "."):
        with pytest.raises(PlanError, match=r"^/"):
            conform.run(tmp_path / name)


def test_an_empty_trace_is_refused(tmp_path):
    path = tmp_path / "empty.jsonl"
    path.write_text("")
    with pytest.raises(PlanError, match="the trace is empty"):
        conform.run(path)


def test_a_recorded_run_replays(tmp_path: Path):
    path = tmp_path / "run.jsonl"
    states = RequestStates(
        max_num_reqs=2, max_model_len=9, vocab_size=50, kv_groups=[KVGroup(2)], max_num_draft_tokens=1
    )
    buffers = InputBuffers.for_states(states, 8)
    with TraceRecorder(path, states, buffers.max_num_batched_tokens) as trace:
        states.add_request(NewRequest("a", [1, 2, 3], [[1, 2]]))
        for plan, drafts, blocks, sampled in (
            ({"a": 3}, None, [], {"a": [4]}),
            ({"a": 2}, {"a": [5]}, [3], np.array([[5, 6]], np.int32)),
            ({"a": 1}, None, [], np.array([7], np.int32)),
        ):
            states.append_blocks("a", [blocks])
            batch = prepare_inputs(states, plan, buffers, draft_tokens=drafts)
            trace.step(batch)
            states.commit(batch, sampled)
            trace.commit(batch, sampled)
        states.swap_rows(0, 1)
        states.remove_request("a")
    report = conform.run(path)
    assert report.ok
    assert report.num_steps == 3
    kinds = [next(iter(json.loads(line))) for line in path.read_text().splitlines()]
    assert kinds == [
        "foreword_trace",
        "add",
        "step",
        "commit",
        "append_blocks",
        "step",
        "commit",
        "step",
        "commit",
        "remove",
    ]


class GatheredNothing(NothingModel):
    reads_gathered_tables = True


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_the_steps_of_an_engine_replay(tmp_path: Path, async_scheduling: bool):
    path = tmp_path / "engine.jsonl"
    scheduler = SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=16)
    engine = Engine(
        GatheredNothing(48, 64),
        vocab_size=64,
        max_model_len=64,
        kv_groups=[KVGroup(4)],
        num_blocks=65,
        config=EngineConfig(
            scheduler=scheduler,
            async_scheduling=async_scheduling,
            speculation=SpeculationConfig(num_tokens=2),
            record=str(path),
            record_tensors=1,
        ),
    )
    inspector = StepInspector(2)
    engine.observers.add(inspector)
    for i in range(5):
        params = SamplingParams(temperature=0.0, max_tokens=4 + i, detokenize=False)
        engine.add_request(str(i), [1 + j % 9 for j in range(5 + 7 * i)], params)
    while engine.has_work:
        engine.step()
    engine.close()
    report = conform.run(path)
    assert report.ok
    assert report.num_steps > 8
    kinds = [next(iter(json.loads(line))) for line in path.read_text().splitlines()]
    assert kinds.count("add") == kinds.count("remove") == 5
    assert kinds.count("commit") == report.num_steps
    assert len(inspector.shown) == 2
    assert "input_ids" in inspector.shown[0]


def test_recording_starts_with_no_requests(tmp_path):
    states = RequestStates(max_num_reqs=1, max_model_len=4, vocab_size=9, kv_groups=[KVGroup(2)])
    states.add_request(NewRequest("a", [1], [[1]]))
    with pytest.raises(ValueError, match="starts with no requests"):
        TraceRecorder(tmp_path / "t.jsonl", states, 4)
