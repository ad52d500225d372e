"""--adapter: of `foreword run`, `chat`, `batch` and `serve`."""

import json

import pytest
from talking_model import write_adapter
from typer.testing import CliRunner

from foreword import LLM, SamplingParams
from foreword.cli.app import app
from foreword.engine.loras import named_paths
from foreword.errors import ConfigError

PARAMS = SamplingParams(temperature=0.0, max_tokens=8)
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def adapters(talker, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    return {name: write_adapter(folder / name, talker, seed) for seed, name in enumerate(("law", "code"))}


@pytest.fixture(scope="module")
def answers(talker, adapters):
    with LLM(str(talker), loras=adapters) as llm:
        texts = {name: llm.chat(MESSAGES, PARAMS, lora=name)[0].outputs[0].text for name in (None, *adapters)}
    assert len(set(texts.values())) == 3
    return texts


def invoke(*arguments, **options):
    return CliRunner().invoke(app, list(map(str, arguments)), **options)


def given(adapters, *names):
    return [argument for name in names for argument in ("--adapter", f"{name}={adapters[name]}")]


@pytest.mark.parametrize("names", [(), ("law",), ("law", "code")])
def test_run_answers_with_the_last_adapter_that_is_given(talker, adapters, answers, names):
    result = invoke("run", "Hi", "-m", talker, "--max-tokens", 8, *given(adapters, *names))
    assert result.exit_code == 0, result.output
    assert result.stdout.strip() == answers[names[-1] if names else None]


def test_chat_answers_with_the_adapter(talker, adapters, answers):
    result = invoke("chat", "-m", talker, "--max-tokens", 8, *given(adapters, "law"), input="Hi\n")
    assert result.exit_code == 0, result.output
    assert answers["law"] in result.stdout


def test_the_lines_of_a_batch_name_adapters_as_their_models(talker, adapters, answers, tmp_path):
    lines = [
        {"custom_id": str(name), "method": "POST", "url": "/v1/chat/completions",
         "body": {"messages": MESSAGES, "max_tokens": 8, "temperature": 0} | ({"model": name} if name else {})}
        for name in (None, "law", "code", "unheard")
    ]  # fmt: skip
    (tmp_path / "in").write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = invoke(
        "batch", tmp_path / "in", tmp_path / "out", "-m", talker, "--ordered", *given(adapters, "law", "code")
    )
    assert result.exit_code == 1
    *found, refused = [json.loads(line)["response"] for line in (tmp_path / "out").read_text().splitlines()]
    assert [each["body"]["choices"][0]["message"]["content"] for each in found] == list(answers.values())
    assert [each["body"]["model"] for each in found][1:] == ["law", "code"]
    assert "'law' or 'code'" in refused["body"]["error"]["message"]


def test_an_adapter_that_vanished_fails_its_lines_alone(talker, tmp_path):
    paths = {name: write_adapter(tmp_path / name, talker, seed) for seed, name in enumerate(("law", "code"))}
    from foreword.openai.batch import Batch
    from foreword.openai.batch_file import batch_lines

    lines = [json.dumps({"custom_id": f"{name}{i}", "method": "POST", "url": "/v1/completions",
                         "body": {"prompt": ["Hi", "Ho"], "max_tokens": 4, "model": name}}).encode()
             for i in range(2) for name in ("law", "code")]  # fmt: skip
    with LLM(str(talker), loras=paths, lora_bytes=1) as llm:
        (paths["law"] / "adapter_config.json").unlink()
        records = {record["custom_id"]: record for record in Batch(llm, ["talker"]).run(batch_lines(lines))}
        assert not llm.engine.has_work
    codes = {name: record["response"]["status_code"] for name, record in records.items()}
    assert codes == {"law0": 400, "law1": 400, "code0": 200, "code1": 200}
    assert "cannot be read" in records["law0"]["response"]["body"]["error"]["message"]


@pytest.mark.parametrize("text", ["law", "law=", "=path", ""])
def test_an_adapter_is_given_as_name_and_path(talker, text):
    with pytest.raises(ConfigError, match="NAME=PATH"):
        named_paths([text])
    assert isinstance(invoke("run", "Hi", "-m", talker, "--adapter", text).exception, ConfigError)


def test_a_name_is_given_once():
    with pytest.raises(ConfigError, match="twice"):
        named_paths(["a=b", "a=c"])


def test_an_adapter_of_a_server_has_a_name_of_its_own(talker, adapters):
    result = invoke("serve", talker, "--port", 0, "--served-model-name", "law", *given(adapters, "law"))
    assert "'law': is the name of the model" in str(result.exception)
