"""`foreword run`: where the prompt comes from, what is printed, and when."""

import json
import os
import re
import signal
import subprocess

import pytest
from processes import Terminal, run, start
from talking_model import failing_llm
from typer.testing import CliRunner

from foreword import LLM, SamplingParams
from foreword.batch.values.sampling_params import PARAMETERS
from foreword.cli.app import app
from foreword.errors import ForewordError
from foreword.sampling import BadLogitsError

ENDLESS = ("--max-tokens", "100000")


def invoke(*arguments: object) -> str:
    """The output of `foreword run` in this process, whose standard input has nothing."""
    result = CliRunner().invoke(app, ["run", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


@pytest.fixture(scope="module")
def expected(talker):
    """The model's greedy answer to messages, or to a text, by the library."""
    llm = LLM(str(talker))

    def answer(prompt, **params) -> str:
        given = SamplingParams(**{"temperature": 0.0, "max_tokens": 20, **params})
        outputs = llm.generate(prompt, given) if isinstance(prompt, str) else llm.chat(prompt, given)
        return outputs[0].outputs[0].text

    return answer


def user(text: str, system: str | None = None) -> list[dict[str, str]]:
    first = [{"role": "system", "content": system}] if system is not None else []
    return [*first, {"role": "user", "content": text}]


def test_the_answer_is_that_of_the_library(talker, expected):
    for arguments, prompt, params in (
        (["Hi"], user("Hi"), {}),
        (["Hi", "--system", "Be brief."], user("Hi", "Be brief."), {}),
        (["Hi", "--raw"], "Hi", {}),
        (["Hi", "--stop", "odz", "--stop", "qq"], user("Hi"), {"stop": ["odz", "qq"]}),
        (["Hi", "--logit-bias", "122=9", "--logit-bias", "121=8"], user("Hi"), {"logit_bias": {122: 9, 121: 8}}),
        (["Hi", "--temperature", "0.9", "--seed", "3"], user("Hi"), {"temperature": 0.9, "seed": 3}),
        (["Hi", "--bad-words-token-ids", "109,111"], user("Hi"), {"bad_words_token_ids": [[109, 111]]}),
        (["Hi", "--allowed-token-ids", "112"], user("Hi"), {"allowed_token_ids": [112]}),
    ):
        assert invoke(*arguments, "-m", talker, "--max-tokens", 20) == expected(prompt, **params) + "\n"


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    ("arguments", "given", "prompt"),
    [
        ([], "Hi\n", "Hi"),
        (["-"], "Hi\r\n", "Hi"),
        (["Sum:"], "a\nb\n", "Sum:\n\na\nb"),
        (["Sum:"], "", "Sum:"),
        (["Sum:"], "\ufeffé\n", "Sum:\n\né"),
    ],
)
def test_standard_input_is_the_prompt_or_follows_it(talker, expected, arguments, given, prompt):
    common = ("run", *arguments, "-m", talker, "--max-tokens", 20)
    assert run(*common, input=given.encode()) == (0, expected(user(prompt)) + "\n", "")


def test_a_file_is_standard_input_too(talker, expected, tmp_path):
    (tmp_path / "in.txt").write_text("Hi\n")
    with (tmp_path / "in.txt").open() as file, start("run", "-m", talker, "--max-tokens", 20, stdin=file) as process:
        assert process.communicate(timeout=60) == ((expected(user("Hi")) + "\n").encode(), b"")


@pytest.mark.parametrize(
    ("arguments", "given", "status", "message"),
    [
        ([], b"", 2, "prompt = '': is empty"),
        (["-"], b"\n", 2, "prompt = '': is empty"),
        (["-"], b"abc\xff", 2, "standard input = b'\\xff': is not UTF-8 at byte 3"),
        (["Hi", "--raw", "--system", "x"], b"", 2, "--system: --raw is given, and it needs one"),
        (["Hi", "--logit-bias", "x"], b"", 2, "logit_bias = 'x': expected ID=X"),
        (["Hi", "--extra-args", "a=b"], b"", 2, "extra_args = 'a=b': expected NAME=JSON"),
        (["Hi", "--extra-args", "a=[5]"], b"", 2, "extra_args = 'a': no logits processor reads it"),
        (["Hi", "--json-schema", "none.json"], b"", 2, "none.json: cannot be read"),
        (["Hi" * 100, "--max-model-len", "64"], b"", 2, "max_model_len is 64"),
    ],
)
def test_what_cannot_be_answered_is_refused_in_one_line(run_here, talker, arguments, given, status, message):
    code, out, error = run_here("run", *arguments, "-m", talker, input=given)
    assert (code, out) == (status, "")
    assert message in error
    assert error.startswith("foreword: ")
    assert error.count("\n") == 1


@pytest.mark.long
def test_an_open_pipe_without_data_is_reported(talker):
    with start("run", "Hi", "-m", talker, "--max-tokens", 5) as process:
        assert b"waiting for standard input; with </dev/null" in process.stderr.readline()
        out, _ = process.communicate(timeout=60)
    assert len(out) == 6


def test_without_a_prompt_on_a_terminal_the_usage_is_shown(talker):
    with Terminal("run", "-m", talker) as terminal:
        assert terminal.end() == 2
    assert "foreword chat" in terminal.plain


def test_the_json_form_has_everything(talker, expected):
    result = json.loads(invoke("Hi", "-m", talker, "--max-tokens", 5, "--json", "--n", 2, "--logprobs", 1))
    text = expected(user("Hi"), max_tokens=5)
    assert result["prompt"] == "Hi"
    assert result["text"] == text
    assert bytes(result["token_ids"]).decode() == text
    assert result["finish_reason"] == "length"
    assert result["steps"] == []
    assert [completion["text"] for completion in result["completions"]] == [text, text]
    assert all(max(found.values()) <= 0 for found in result["logprobs"])
    timings = result["timings"]
    assert (timings["num_prompt_tokens"], timings["num_output_tokens"]) == (len(result["prompt_token_ids"]), 10)
    assert all(timings[f"{name}_tokens_per_second"] > 0 for name in ("prompt", "output"))


def test_several_answers_are_numbered(talker, expected):
    text = expected(user("Hi"), max_tokens=5)
    shown = invoke("Hi", "-m", talker, "--max-tokens", 5, "--n", 2)
    assert shown == f"--- 1 of 2 ---\n{text}\n--- 2 of 2 ---\n{text}\n"


def test_explain_shows_the_steps_below_the_answer(talker):
    shown = invoke("Hi", "-m", talker, "--max-tokens", 5, "--explain", "--steps", 1)
    assert re.search(r"^[a-z]{5}\n\nstep 1: 1 request", shown)


def test_explain_shows_the_text_of_each_token_and_what_a_step_sampled(talker):
    shown = invoke("Hi", "-m", talker, "--max-tokens", 5, "--explain", "--steps", 2)
    answer = shown[:5]
    texts = [line.split()[1:] for line in shown.splitlines() if line.startswith("  text  ")]
    assert texts[0][:1] != []
    assert texts[1] == [answer[0]]
    assert re.search(rf"request \S+: \d+ more computed, \d+ in all; sampled {ord(answer[0])} \({answer[0]}\)", shown)


def test_structured_outputs_are_passed_to_the_engine(talker, tmp_path):
    (tmp_path / "schema.json").write_text('{"type": "object"}')
    try:
        shown = invoke("Hi", "-m", talker, "--max-tokens", 5, "--json-schema", tmp_path / "schema.json")
    except ForewordError as error:
        assert "structured_outputs" in str(error)  # noqa: PT017
    else:
        assert shown.startswith("{")


def test_every_flag_of_a_parameter_has_its_opposite(talker, monkeypatch):
    found = []

    class Answers(LLM):
        def chat_stream(self, messages, params, **options):
            found.append(params)
            return iter(())

    monkeypatch.setattr("foreword.cli.run.LLM", Answers)
    flags = [row.name for row in PARAMETERS if row.type == "bool" and row.name != "detokenize"]
    for prefix in ("", "no-"):
        given = [f"--{prefix}{name.replace('_', '-')}" for name in flags]
        assert CliRunner().invoke(app, ["run", "Hi", "-m", str(talker), *given]).exit_code == 130
    for params, value in zip(found, (True, False), strict=True):
        assert {getattr(params, name) for name in flags} == {value}


def test_a_file_has_parameters_as_texts_and_as_values_of_its_own(talker, monkeypatch, tmp_path):
    found, file = [], tmp_path / "options.toml"

    class Answers(LLM):
        def chat_stream(self, messages, params, **options):
            found.append(params)
            return iter(())

    monkeypatch.setattr("foreword.cli.run.LLM", Answers)
    arguments = ["run", "Hi", "-m", str(talker), "--config", str(file)]
    file.write_text('bad_words_token_ids = [[1, 2], "3"]\nlogit_bias = ["3=1.5"]\nignore_eos = true\ntemperature = 1\n')
    assert CliRunner().invoke(app, arguments).exit_code == 130
    expected = {"bad_words_token_ids": ((1, 2), (3,)), "logit_bias": {3: 1.5}, "ignore_eos": True, "temperature": 1.0}
    assert {name: getattr(found[0], name) for name in expected} == expected
    file.write_text("logit_bias = [3]\n")
    assert "logit_bias = 3: expected ID=X" in str(CliRunner().invoke(app, arguments).exception)


def test_a_schema_is_a_file_or_a_text(talker, monkeypatch, tmp_path):
    found = []

    class Answers(LLM):
        def chat_stream(self, messages, params, **options):
            found.append((params.structured_outputs.kind, params.structured_outputs.text))
            return iter(())

    monkeypatch.setattr("foreword.cli.run.LLM", Answers)
    (tmp_path / "schema.json").write_text('{"type": "object"}')
    for given in (str(tmp_path / "schema.json"), ' {"type": "object"}'):
        assert CliRunner().invoke(app, ["run", "Hi", "-m", str(talker), "--json-schema", given]).exit_code == 130
    assert found == [("json", '{"type": "object"}')] * 2
    wrong = CliRunner().invoke(app, ["run", "Hi", "-m", str(talker), "--json-schema", "{type}"])
    assert "--json-schema: not valid JSON" in str(wrong.exception)


def test_a_request_that_fails_is_an_error_after_what_there_is(talker, monkeypatch):
    monkeypatch.setattr("foreword.cli.run.LLM", failing_llm)
    result = CliRunner().invoke(app, ["run", "Hi!", "-m", str(talker), "--max-model-len", "64"])
    assert isinstance(result.exception, BadLogitsError)
    assert not result.stdout.strip()


@pytest.mark.parametrize("piped", [True, False])
def test_tokens_are_shown_as_they_come(talker, piped):
    if piped:
        with start("run", "Hi", "-m", talker, *ENDLESS, stdin=subprocess.DEVNULL) as process:
            first = os.read(process.stdout.fileno(), 1)
            assert process.poll() is None
            process.kill()
        assert first.isalpha()
    else:
        with Terminal("run", "Hi", "-m", talker, *ENDLESS) as terminal:
            terminal.read_until("[a-z]{40}")
            assert terminal.process.poll() is None


def test_ctrl_c_keeps_what_there_is(talker, expected):
    with Terminal("run", "Hi", "-m", talker, *ENDLESS) as terminal:
        terminal.read_until("[a-z]{40}")
        terminal.send("\x03")
        assert terminal.end() == 130
    answer, *notes = terminal.plain.replace("^C", "").replace("\r", "").split("\n")
    assert len(answer) >= 40
    assert answer == expected(user("Hi"), max_tokens=len(answer))
    assert "interrupted" in " ".join(notes)


def test_an_interrupted_json_result_is_whole(talker):
    for seconds in (0.5, 4, 30):  # until there is some text
        with start("run", "Hi", "-m", talker, *ENDLESS, "--json", "--explain", stdin=subprocess.DEVNULL) as process:
            assert process.stderr.readline()  # the memory in use: the model is loaded
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(seconds)
            process.send_signal(signal.SIGINT)
            out, _ = process.communicate(timeout=60)
        result = json.loads(out)
        if result["text"]:
            break
    assert process.returncode == 130
    assert result["finish_reason"] == "abort"
    assert result["text"]


def test_a_reader_that_leaves_ends_the_answer_in_silence(talker):
    with start("run", "Hi", "-m", talker, *ENDLESS, stdin=subprocess.DEVNULL) as process:
        os.read(process.stdout.fileno(), 1)
        process.stdout.close()
        assert (process.wait(60), process.stderr.read()) == (1, b"")


def test_the_speed_is_a_dim_line_after_the_answer(talker):
    with Terminal("run", "Hi", "-m", talker, "--max-tokens", 20, columns=120) as terminal:
        assert terminal.end() == 0
    answer, line = terminal.shown.replace("\r", "").rstrip("\n").split("\n")
    assert re.fullmatch("[a-z]{20}", answer)
    number = r"[\d.]+"
    assert re.fullmatch(
        rf"\x1b\[2m5 prompt tokens, {number}/s · 20 output tokens, {number}/s · first after {number} s"
        r" · stopped at max_tokens = 20\x1b\[0m",
        line,
    )


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_no_escape_sequences_where_they_are_not_wanted(talker, environment):
    with Terminal("run", "Hi", "-m", talker, "--max-tokens", 20, env=environment) as terminal:
        assert terminal.end() == 0
    assert "\x1b" not in terminal.shown
    assert "5 prompt tokens" in terminal.shown


def test_an_answer_cannot_command_the_terminal(talker):
    arguments = ("run", "Hi", "-m", talker, "--max-tokens", 5, "--logit-bias", "27=1000", "--quiet")
    with Terminal(*arguments) as terminal:
        assert terminal.end() == 0
    assert terminal.shown == "\ufffd" * 5 + "\r\n"
    assert run(*arguments) == (0, "\x1b" * 5 + "\n", "")


def test_a_narrow_window_has_one_part_per_line(talker):
    with Terminal("run", "Hi", "-m", talker, "--max-tokens", 20, columns=40) as terminal:
        assert terminal.end() == 0
    lines = terminal.plain.replace("\r", "").rstrip("\n").split("\n")
    assert [line.split(",")[0] for line in lines[1:3]] == ["5 prompt tokens", "20 output tokens"]
    assert max(map(len, lines)) <= 40


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("option", "shows"), [("--quiet", False), ("--json", False), ("--verbose", True)])
def test_the_line_can_be_left_out_or_asked_for(run_here, talker, option, shows):
    with Terminal("run", "Hi", "-m", talker, "--max-tokens", 5, option) as terminal:
        assert terminal.end() == 0
    assert ("prompt tokens" in terminal.plain) == shows
    _, _, error = run_here("run", "Hi", "-m", talker, "--max-tokens", 5, option)
    assert ("prompt tokens" in error) == shows


@pytest.mark.long
@pytest.mark.model
def test_the_default_model_answers_in_a_pipe():
    status, out, error = run("run", "What is the capital of France? Answer in one sentence.", "--max-tokens", 16)
    assert (status, out, error) == (0, "The capital of France is Paris.\n", "")


def test_a_recording_has_the_end_of_the_request(talker, tmp_path):
    file = tmp_path / "steps.jsonl"
    status, _, error = run("run", "Hi", "-m", talker, "--max-tokens", "3", "--record", file)
    assert status == 0, error
    assert "end" in json.loads(file.read_text().splitlines()[-1])
