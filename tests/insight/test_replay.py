"""`foreword replay`: the steps of a trace on another backend, and its outputs on a model."""

import json

import pytest
from trace_lives import Life
from typer.testing import CliRunner

from foreword import LLM, SamplingParams
from foreword.batch.prepare.prepare import BACKENDS
from foreword.cli.app import app
from foreword.errors import ConfigError
from foreword.insight import Trace
from foreword.insight.outputs import compare, measure, recorded, recorded_outputs
from foreword.insight.steps import replay_steps

PROMPTS = [[5, 6, 7], [9] * 20, [3, 1]]


@pytest.fixture(scope="module")
def recording(talker, tmp_path_factory):
    """A trace of three requests on a tiny model, and their outputs."""
    path = tmp_path_factory.mktemp("traces") / "steps.jsonl"
    params = SamplingParams(temperature=0.9, seed=4, max_tokens=12, logprobs=0, detokenize=False)
    with LLM(talker, executor="numpy", record=str(path), max_model_len=64, num_blocks=12) as llm:
        outputs = llm.generate(PROMPTS, params)
    return path, [list(output.outputs[0].token_ids) for output in outputs]


def changed(path, out, change):
    """The trace with the log-probabilities of commits changed."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if "logprobs" in line:
            change(line)
    out.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return out


def test_every_tensor_of_steps_recorded_without_tensors_is_compared(tmp_path):
    path = tmp_path / "life.jsonl"
    Life(path, 2, tensors=False).run(10)
    report = replay_steps(path, backend="numpy")
    assert report.ok, str(report)
    assert report.num_tensors > 10 * 15


def test_a_wrong_backend_is_named_with_the_tensor_and_the_request(tmp_path, monkeypatch):
    path = tmp_path / "life.jsonl"
    Life(path, 2, tensors=False).run(10)
    original = BACKENDS["numpy"]

    def wrong(states, buffers, *others):
        scalars = original(states, buffers, *others)
        buffers.arrays["positions"][0] += 1
        return scalars

    monkeypatch.setitem(BACKENDS, "numpy", wrong)
    report = replay_steps(path, backend="numpy")
    assert {d.tensor for d in report.differences} >= {"positions"}
    assert "request 'r" in str(report.differences[0])


def test_the_outputs_of_a_trace_are_those_of_its_requests(recording):
    path, tokens = recording
    outputs = recorded_outputs(Trace.read(path))
    assert [list(output.prompt_token_ids) for output in outputs] == PROMPTS
    assert [list(output.token_ids) for output in outputs] == tokens
    assert all(value is not None for output in outputs for value in output.logprobs)


def test_the_model_of_a_trace_has_its_log_probabilities_and_another_has_not(recording, talker):
    outputs = recorded_outputs(Trace.read(recording[0]))
    with LLM(talker, executor="numpy", max_model_len=64) as llm:
        same = compare(outputs, recorded(outputs), measure(llm, outputs), tolerance=1e-4)
        assert same.ok, str(same)
        assert same.num_compared == same.num_tokens == 36
    with LLM(talker, executor="native", weight_format="q4", max_model_len=64) as llm:
        other = compare(outputs, recorded(outputs), measure(llm, outputs), tolerance=1e-7)
    assert not other.ok
    assert other.largest > 0


def test_the_first_divergence_is_named_with_both_distributions(recording, talker, tmp_path):
    path, tokens = recording
    seen = []

    def change(line):
        for req_id, values in line["logprobs"].items():
            if req_id == sorted(line["logprobs"])[1] and len(seen) < 5:
                seen.append(values)
            if len(seen) == 5 and values is seen[-1]:
                values[0] -= 1.0

    wrong = changed(path, tmp_path / "wrong.jsonl", change)
    done = CliRunner().invoke(
        app, ["replay", str(wrong), "--model", str(talker), "--executor", "numpy", "--max-model-len", "64"]
    )
    assert done.exit_code == 1, done.output
    assert f"output position 4, token {tokens[1][4]}:" in done.output
    assert "expected" in done.output
    assert "got" in done.output


def test_two_executors_are_compared_where_the_trace_has_no_log_probabilities(recording, talker, tmp_path):
    path = changed(recording[0], tmp_path / "bare.jsonl", lambda line: line.pop("logprobs"))
    options = ["--model", str(talker), "--executor", "numpy", "--max-model-len", "64"]
    alone = CliRunner().invoke(app, ["replay", str(path), *options])
    assert "36 tokens, 0 log-probabilities compared" in alone.output
    formats = "executor=native,weight_format=fp32,kv_format=fp32"
    both = CliRunner().invoke(app, ["replay", str(path), *options, "--against", formats, "--tolerance", "0.001"])
    assert both.exit_code == 0, both.output
    assert "36 tokens, 36 log-probabilities compared" in both.output


def test_a_command_without_a_model_compares_tensors(recording):
    done = CliRunner().invoke(app, ["replay", str(recording[0]), "--backend", "numpy"])
    assert done.exit_code == 0, done.output
    assert "all as defined" in done.output


@pytest.mark.parametrize(
    "arguments",
    [
        ["--against", "executor=numpy"],
        ["--tolerance", "0.1"],
        ["--executor", "numpy"],
        ["--model", "none.gguf", "--backend", "numpy"],
        ["--backend", "x"],
    ],
)
def test_options_that_do_nothing_are_refused(recording, arguments):
    assert CliRunner().invoke(app, ["replay", str(recording[0]), *arguments]).exit_code == 2


def test_hashed_tokens_cannot_be_given_to_a_model(tmp_path):
    Life(tmp_path / "life.jsonl", 2, token_ids="hashed").run(3)
    with pytest.raises(ConfigError, match="hashed token ids"):
        recorded_outputs(Trace.read(tmp_path / "life.jsonl"))
