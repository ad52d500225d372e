"""The decisions of a trace as vLLM's scheduler tells them: `vllm.apply` makes the trace's own steps of them."""

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from foreword.batch import ContextParallel, InputBuffers, KVGroup, prepare_inputs
from foreword.batch.adapters import vllm
from foreword.errors import PlanError
from foreword.insight import Trace, TraceHeader, TraceWriter
from foreword.trace.replay import Replay
from foreword.vllm.decisions import check_header, decisions

HEADER = TraceHeader(
    max_num_reqs=4, max_num_batched_tokens=32, max_model_len=64, vocab_size=100, kv_groups=(KVGroup(4),),
    max_num_draft_tokens=2, engine="vLLM 0.32.0, first model runner",
)  # fmt: skip


SECOND = replace(HEADER, engine="vLLM 0.32.0, second model runner")


@pytest.fixture
def traced(tmp_path):
    """Write a trace with a function of its writer, and read it."""

    def made(write, header=HEADER):
        path = tmp_path / "steps.jsonl"
        with TraceWriter(path, header) as writer:
            write(writer)
        return Trace.read(path)

    return made


def traffic(writer):
    """A chunked prompt, drafts, an end and a new request in the same step, a preemption and a return."""
    writer.add("a", [5, 6, 7, 8, 9], [[1]], extras={"sampling_params": {"temperature": 0.5, "max_tokens": 3}})
    writer.step(["a"], [3])
    writer.commit({})
    writer.append_blocks("a", [[2]])
    writer.add("b", [1, 2], [[3]], lora_id=7)
    writer.step(["a", "b"], [2, 2])
    writer.commit({"a": [10], "b": [11]})
    writer.append_blocks("b", [[4]])
    writer.step(["b", "a"], [3, 2], draft_tokens={"b": [12, 13], "a": [14]})
    writer.commit({"b": [12, 20], "a": [15]})
    writer.remove("b", preempted=True)
    writer.step(["a"], [1])
    writer.commit({"a": [16]})
    writer.remove("a")
    writer.add("b", [1, 2], [[6, 7]], [11, 12, 20])
    writer.add("a", [30], [[8]])
    writer.step(["b", "a"], [5, 1])
    writer.commit({"b": [21], "a": [31]})
    writer.step(["a", "b"], [1, 1])
    writer.commit({"a": [32], "b": [22]})


def output_of(decision):
    """A SchedulerOutput with the fields that `vllm.apply` reads."""
    new = [
        SimpleNamespace(
            req_id=one["req_id"], prompt_token_ids=one["prompt_token_ids"], block_ids=one["block_ids"],
            num_computed_tokens=one["num_computed_tokens"], mm_features=[], sampling_params=None, pooling_params=None,
            lora_request=None, prompt_embeds=None,
            prefill_token_ids=one["prompt_token_ids"] + one["output_token_ids"],
        )
        for one in decision["new"]
    ]  # fmt: skip
    cached = decision["cached"]
    return SimpleNamespace(
        scheduled_new_reqs=new,
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[one["req_id"] for one in cached],
            resumed_req_ids={one["req_id"] for one in cached if one["resumed"]},
            new_token_ids=[],
            all_token_ids={one["req_id"]: one["all_token_ids"] for one in cached if one["resumed"]},
            new_block_ids=[one["block_ids"] for one in cached],
            num_computed_tokens=[one["num_computed_tokens"] for one in cached],
            num_output_tokens=[one["num_output_tokens"] for one in cached],
        ),
        num_scheduled_tokens=decision["counts"],
        total_num_scheduled_tokens=sum(decision["counts"].values()),
        scheduled_spec_decode_tokens=decision["drafts"],
        finished_req_ids=set(decision["finished"]),
        preempted_req_ids=set(decision["preempted"]),
        scheduled_encoder_inputs={},
        free_encoder_mm_hashes=[],
    )


@pytest.mark.parametrize("header", [HEADER, SECOND], ids=["first", "second"])
def test_steps_prepared_from_the_decisions_are_those_of_the_trace(traced, header):
    trace = traced(traffic, header)
    told, states = list(decisions(trace)), HEADER.new_states(4)
    buffers, replay, steps = InputBuffers.for_states(states, 32), Replay(HEADER), 0
    for event in trace.events:
        expected = replay.apply(event)
        if expected is None:
            continue
        decision = told[steps]
        steps += 1
        applied = vllm.apply(states, output_of(decision))
        batch = prepare_inputs(
            states, {r: applied[r] for r in expected.req_ids}, buffers, draft_tokens=decision["drafts"] or None
        )
        for name in ("input_ids", "positions", "query_start_loc", "seq_lens", "logits_indices", "draft_token_ids"):
            assert np.array_equal(getattr(batch, name), getattr(expected, name)), (steps, name)
        assert np.array_equal(batch.slot_mapping[0], expected.slot_mapping[0]), steps
        states.commit(batch, decision["sampled"])
    assert steps == len(told) == 6


def test_ends_preemptions_and_returns_are_told_where_vllm_tells_them(traced):
    told = list(decisions(traced(traffic)))
    assert [one["req_id"] for one in told[1]["new"]] == ["b"]
    assert told[1]["new"][0]["adapter"] == ("adapter-7", 7, "unknown")
    assert told[0]["new"][0]["sampling"] == {"temperature": 0.5}
    assert told[3]["preempted"] == ["b"]
    back = next(one for one in told[4]["cached"] if one["req_id"] == "b")
    assert (back["resumed"], back["block_ids"], back["num_output_tokens"]) == (True, [[6, 7]], 3)
    assert told[4]["finished"] == ["a"]
    assert [one["req_id"] for one in told[4]["new"]] == ["a"]


def test_the_second_runner_is_told_a_return_as_a_new_request_with_its_outputs(traced):
    told = list(decisions(traced(traffic, SECOND)))
    back = next(one for one in told[4]["new"] if one["req_id"] == "b")
    assert (back["prompt_token_ids"], back["output_token_ids"]) == ([1, 2], [11, 12, 20])
    assert told[4]["cached"] == []
    known = next(one for one in told[5]["cached"] if one["req_id"] == "b")
    assert (known["num_computed_tokens"], known["num_output_tokens"]) == (5, 4)


@pytest.mark.parametrize("header", [HEADER, SECOND], ids=["first", "second"])
def test_images_are_told_with_their_identifiers_and_rotary_positions(traced, header):
    def write(writer):
        features = [{"identifier": "x", "offset": 1, "length": 2}]
        rotary = {"mrope_positions": [[0, 1, 1], [0, 1, 2], [0, 1, 1]], "mrope_delta": -1}
        extras = {"mm_features": features}
        writer.add("a", [1, 7, 7], [[1, 2]], [8, 9], extras=extras, bidirectional_ranges=[(1, 3)], **rotary)
        writer.step(["a"], [5])

    [decision] = decisions(traced(write, header))
    [new] = decision["new"]
    assert new["features"] == [{"identifier": "x", "offset": 1, "length": 2, "modality": "image"}]
    outputs = [2, 3] if header is HEADER else []  # they are part of the prompt there
    assert new["prompt_token_ids"] == [1, 7, 7, *[8, 9][: len(outputs)]]
    assert new["rotary"] == ([[0, 1, 1, *outputs], [0, 1, 2, *outputs], [0, 1, 1, *outputs]], -1)


def test_blocks_of_a_request_that_waits_are_told_with_its_next_step(traced):
    def write(writer):
        writer.add("a", [1, 2, 3, 4], [[1]])
        writer.add("b", [1], [[2]])
        writer.step(["a", "b"], [4, 1])
        writer.commit({"a": [5], "b": [6]})
        writer.append_blocks("a", [[3]])
        writer.step(["b"], [1])
        writer.commit({"b": [7]})
        writer.step(["a"], [1])

    told = list(decisions(traced(write)))
    assert [one["block_ids"] for step in told[1:] for one in step["cached"]] == [None, [[3]]]


def pooled(writer):
    writer.add("a", [1], [[1]], extras={"pooling_params": {"task": "embed"}})
    writer.step(["a"], [1])


def without_commit(writer):
    writer.add("a", [1, 2], [[1]])
    writer.step(["a"], [1])
    writer.step(["a"], [1])


def without_a_sample(writer):
    writer.add("a", [1], [[1]])
    writer.step(["a"], [1])
    writer.commit({})
    writer.step(["a"], [1])


def corrected(writer):
    writer.add("a", [1, 2], [[1]])
    writer.correct("a", block_ids=[[2]])
    writer.step(["a"], [1])


def failed(writer):
    writer.add("a", [1], [[1]])
    writer.step(["a"], [1])
    writer.fail("out of memory")


@pytest.mark.parametrize(
    ("write", "says"),
    [
        (pooled, "a request with pooling_params"),
        (without_commit, "has no commit"),
        (without_a_sample, "a sample is missing"),
        (corrected, "cannot be told to vLLM's runner"),
        (failed, "a step failed"),
    ],
)
def test_what_a_runner_without_a_model_cannot_be_told_is_refused(traced, write, says):
    with pytest.raises(PlanError, match=says):
        list(decisions(traced(write)))


@pytest.mark.parametrize(
    ("changes", "says"),
    [({"null_block": -1}, "null block"), ({"context_parallel": ContextParallel(2, 0)}, "context parallelism")],
)
def test_engines_that_a_runner_without_a_model_cannot_stand_for_are_refused(changes, says):
    with pytest.raises(PlanError, match=says):
        check_header(replace(HEADER, **changes))


def test_without_vllm_the_command_says_so(tmp_path):
    path = tmp_path / "steps.jsonl"
    with TraceWriter(path, HEADER) as writer:
        traffic(writer)
    code = "import sys; sys.modules['vllm'] = None; from foreword.cli.app import main; main()"
    command = [sys.executable, "-c", code, "rerun", str(path), "--engine", "vllm"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert "vLLM cannot be imported here" in done.stderr
