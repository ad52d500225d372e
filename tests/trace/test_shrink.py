"""A trace is shrunk to few requests and steps that still show the fault, of the tensors or of an engine."""

from dataclasses import replace

import numpy as np
import pytest
from dense_engine import FAULTS, failing
from trace_lives import Life
from typer.testing import CliRunner

from foreword.batch import KVGroup
from foreword.cli.app import app
from foreword.errors import ConfigError
from foreword.insight import Step, Trace, TraceHeader, TraceWriter, conform
from foreword.trace.events import Add
from foreword.trace.project import num_steps, requests_of, with_requests
from foreword.trace.shrink import Shrinker, evidence, minimal


@pytest.fixture(scope="module")
def life(tmp_path_factory):
    """A trace of 40 steps with drafts, preemptions and corrections, in one KV group."""
    path = tmp_path_factory.mktemp("lives") / "life.jsonl"
    for seed in range(100):
        made = Life(path, seed)
        if made.states.max_num_draft_tokens and made.states.max_num_reqs == 5 and len(made.states.block_tables) == 1:
            made.run(40)
            return Trace.read(path)
        made.trace.close()
    raise AssertionError


def write(trace, path):
    with TraceWriter(path, trace.header) as writer:
        for event in trace.events:
            writer.write(event)
    return path


@pytest.mark.parametrize("seed", range(4))
def test_each_request_of_a_trace_alone_conforms(tmp_path, seed):
    Life(tmp_path / "life.jsonl", seed).run(15)
    trace = Trace.read(tmp_path / "life.jsonl")
    ids = requests_of(trace.events)
    for kept in (ids[:1], ids[1:4], ids[::2]):
        report = conform.run(
            write(Trace(trace.header, with_requests(trace.events, set(kept))), tmp_path / "part.jsonl")
        )
        assert report.ok, str(report)
        assert report.num_tensors > 0


@pytest.mark.parametrize(
    "name", ["slot_mapping", "input_ids", "positions", "seq_lens", "logits_indices", "req_indices", "query_start_loc"]
)
def test_the_evidence_of_a_wrong_tensor_is_one_step_of_one_request(life, name, tmp_path):
    steps = [i for i, event in enumerate(life.events) if isinstance(event, Step) and len(event.req_ids) > 2]
    at = steps[len(steps) // 2]
    value = life.events[at].tensors[name]
    array = np.array(value)
    array.flat[array.size // 2] += 1
    wrong = replace(life.events[at], tensors={**life.events[at].tensors, name: array.tolist()})
    trace = Trace(life.header, [*life.events[:at], wrong, *life.events[at + 1 :]])
    shrinker = Shrinker(evidence(name))
    small = shrinker.shrink(trace, tensor=name)
    assert len(requests_of(small.events)) == 1
    assert num_steps(small.events) == 1
    assert [list(event.tensors) for event in small.events if isinstance(event, Step)] == [[name]]
    (difference,) = conform.run(write(small, tmp_path / "small.jsonl")).differences
    assert difference.tensor == name
    assert difference.request in (*requests_of(small.events), None)
    assert shrinker.num_tries < 80


@pytest.mark.parametrize("fault", FAULTS)
def test_the_cause_of_a_fault_is_few_requests_and_steps(life, fault):
    assert failing(None)(life) is None
    test = failing(fault)
    shrinker = Shrinker(test)
    small = shrinker.shrink(life, keep_tensors=False)
    assert test(small) is not None
    assert failing(None)(small) is None
    assert len([event for event in small.events if isinstance(event, Add)]) <= 3
    assert num_steps(small.events) <= 5
    assert len(small.events) <= 12
    assert shrinker.num_tries < 400


def test_a_trace_that_does_not_fail_is_refused(life):
    with pytest.raises(ConfigError, match="nothing to shrink"):
        Shrinker(evidence()).shrink(life)


def test_a_minimal_part_fails_and_lacks_nothing():
    for needed in ({3}, {0, 19}, {4, 5, 6}, set(range(0, 20, 3))):
        assert set(minimal(range(20), lambda part, needed=needed: needed <= set(part))) == needed


@pytest.fixture
def wrong(life, tmp_path):
    """A trace in a file of which one slot differs."""
    at = [i for i, event in enumerate(life.events) if isinstance(event, Step) and len(event.req_ids) > 2][5]
    slots = np.array(life.events[at].tensors["slot_mapping"])
    slots[0, 1] += 1
    step = replace(life.events[at], tensors={**life.events[at].tensors, "slot_mapping": slots.tolist()})
    return write(Trace(life.header, [*life.events[:at], step, *life.events[at + 1 :]]), tmp_path / "wrong.jsonl")


def test_the_command_writes_a_small_trace_and_a_test_of_it(wrong, tmp_path):
    out = tmp_path / "small.jsonl"
    done = CliRunner().invoke(app, ["shrink", str(wrong), "--tensor", "slot_mapping", "-o", str(out), "--as-test"])
    assert done.exit_code == 0, done.output
    assert "1 requests, 1 steps" in done.stderr
    assert not conform.run(out).ok
    scope = {}
    exec(done.stdout, scope)
    (tmp_path / "t").mkdir()
    with pytest.raises(AssertionError, match="slot_mapping"):
        scope["test_the_recorded_tensors_are_as_defined"](tmp_path / "t")


def test_the_command_shrinks_the_cause_that_a_function_finds(life, tmp_path):
    path = write(life, tmp_path / "life.jsonl")
    done = CliRunner().invoke(app, ["shrink", str(path), "--failing", "dense_engine:moved_row", "--as-test"])
    assert done.exit_code == 0, done.output
    scope = {}
    exec(done.stdout, scope)
    with pytest.raises(AssertionError):
        scope["test_the_steps_do_not_fail"](tmp_path)


def test_the_command_shrinks_with_another_command(tmp_path):
    path, out = tmp_path / "steps.jsonl", tmp_path / "small.jsonl"
    header = TraceHeader(
        max_num_reqs=4, max_num_batched_tokens=8, max_model_len=16, vocab_size=9, kv_groups=(KVGroup(4),)
    )
    with TraceWriter(path, header) as writer:
        for req_id in "abc":
            writer.add(req_id, [1, 2], [[ord(req_id)]])
        writer.step("abc", [2, 2, 2])
    command = "sh -c '! grep -q req_id...b $0' {}"
    done = CliRunner().invoke(app, ["shrink", str(path), "--failing", command, "-o", str(out), "--as-test"])
    assert done.exit_code == 0, (done.output, done.exception)
    assert requests_of(Trace.read(out).events) == ["b"]
    exec(done.stdout, scope := {})
    with pytest.raises(AssertionError):
        scope["test_the_steps_do_not_fail"](tmp_path)


@pytest.mark.parametrize(
    ("failing", "message"),
    [
        ("missing.module:fails", "cannot be imported"),
        ("no-such-command-here", "cannot be run"),
        ("'", "is not a command"),
    ],
)
def test_a_test_that_cannot_be_made_is_refused(wrong, failing, message, tmp_path):
    done = CliRunner().invoke(app, ["shrink", str(wrong), "--failing", failing, "-o", str(tmp_path / "out")])
    assert message in str(done.exception)
