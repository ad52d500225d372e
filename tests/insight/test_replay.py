"""`foreword replay`: the steps of a trace on another backend, and its outputs on a model."""

import json

import pytest
from recordings import record_ranges
from talking_model import write_adapter
from trace_lives import Life
from typer.testing import CliRunner

from foreword import LLM, SamplingParams
from foreword.batch.prepare.prepare import BACKENDS
from foreword.cli.app import app
from foreword.errors import ConfigError
from foreword.executors.numpy import NumpyExecutor
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
    assert alone.exit_code != 0
    assert "there is nothing to compare" in str(alone.exception)
    formats = "executor=native,weight_format=fp32,kv_format=fp32"
    both = CliRunner().invoke(app, ["replay", str(path), *options, "--against", formats, "--tolerance", "0.001"])
    assert both.exit_code == 0, both.output
    assert "36 tokens, 36 log-probabilities compared" in both.output


def test_a_greedy_recording_without_log_probabilities_is_compared_by_its_tokens(talker, tmp_path):
    path = tmp_path / "steps.jsonl"
    params = SamplingParams(temperature=0.0, max_tokens=12, detokenize=False)
    with LLM(talker, executor="numpy", record=str(path), max_model_len=64) as llm:
        tokens = [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, params)]
    options = ["--model", str(talker), "--executor", "numpy", "--max-model-len", "64"]
    same = CliRunner().invoke(app, ["replay", str(path), *options])
    assert same.exit_code == 0, same.output
    assert "0 log-probabilities compared and 36 greedy tokens\nno divergence" in same.output
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    fifth = [line for line in lines if isinstance(line.get("commit"), list)][5]
    fifth["commit"][2] = (fifth["commit"][2] + 1) % 50
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    planted = CliRunner().invoke(app, ["replay", str(path), *options])
    assert planted.exit_code == 1
    position = next(i for i, token in enumerate(tokens[2]) if i >= 5)
    assert f"output position {position}, token {fifth['commit'][2]}:" in planted.output


def test_a_fault_of_an_executor_is_named_by_request_position_and_both_distributions(recording, talker, monkeypatch):
    outputs = recorded_outputs(Trace.read(recording[0]))
    original, at = NumpyExecutor.compute, len(PROMPTS[1]) + 4  # only the second request gets so long

    def raised(executor, batch, logits_indices):
        logits = original(executor, batch, logits_indices).copy()
        logits[batch.positions[logits_indices] == at - 1, 7] += 60.0
        return logits

    sides = []
    for compute in (original, raised):
        monkeypatch.setattr(NumpyExecutor, "compute", compute)
        with LLM(talker, executor="numpy", max_model_len=64) as llm:
            sides.append(measure(llm, outputs, top=50))
    report = compare(outputs, *sides, tolerance=1e-4)
    assert (report.first.request, report.first.position) == (outputs[1].req_id, 4)
    best = [max(side, key=side.get) for side in (report.first.expected, report.first.got)]
    assert best == [report.first.token, 7]
    assert compare(outputs, sides[0], sides[0], tolerance=0.0).ok


def test_requests_with_adapters_are_replayed_with_them_or_refused_by_name(talker, tmp_path):
    path, adapter = tmp_path / "steps.jsonl", write_adapter(tmp_path / "law", talker, 1)
    params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=0, detokenize=False)
    with LLM(talker, executor="numpy", record=str(path), max_model_len=64, loras={"law": adapter}) as llm:
        llm.generate(PROMPTS, params, lora=[None, "law", None])
    outputs = recorded_outputs(Trace.read(path))
    assert [None if o.lora is None else (o.lora.name, o.lora.path) for o in outputs] == [
        None,
        ("law", str(adapter)),
        None,
    ]
    options = ["--model", str(talker), "--executor", "numpy", "--max-model-len", "64"]
    same = CliRunner().invoke(app, ["replay", str(path), *options])
    assert same.exit_code == 0, same.output
    assert "24 log-probabilities compared" in same.output
    adapter.rename(tmp_path / "moved")
    gone = CliRunner().invoke(app, ["replay", str(path), *options])
    assert f"request {outputs[1].req_id!r} used the adapter 'law', which is not at its path" in str(gone.exception)
    moved = CliRunner().invoke(app, ["replay", str(path), *options, "--adapter", f"law={tmp_path / 'moved'}"])
    assert moved.exit_code == 0, moved.output
    other = write_adapter(tmp_path / "other", talker, 2)
    wrong = CliRunner().invoke(app, ["replay", str(path), *options, "--adapter", f"law={other}"])
    assert wrong.exit_code == 1
    assert f"first divergence: request {outputs[1].req_id!r}" in wrong.output


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


def test_requests_with_bidirectional_ranges_are_not_compared(tmp_path):
    found = recorded_outputs(Trace.read(record_ranges(tmp_path / "steps.jsonl")))
    assert {output.req_id: output.is_text for output in found} == {"images": False, "text": True}
