"""`llm`, which reads servers that speak as OpenAI's from extra-openai-models.yaml."""

import os
import subprocess
import sys

import pytest


@pytest.fixture
def llm(server, tmp_path):
    """The command; its arguments → what it prints."""
    pytest.importorskip("llm")
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: tiny\n  model_name: talker\n  api_base: {server.url}/v1\n  api_key_name: tiny\n"
        "  supports_schema: true\n  supports_tools: true\n"
    )
    (tmp_path / "keys.json").write_text('{"tiny": "secret"}')

    def run(*arguments: str) -> str:
        environment = {**os.environ, "LLM_USER_PATH": str(tmp_path), "NO_PROXY": "127.0.0.1"}
        command = [sys.executable, "-m", "llm", *arguments]
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, stdin=subprocess.DEVNULL, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_a_prompt_whole_streamed_and_continued(llm, server):
    asked = ("-m", "tiny", "-o", "temperature", "0", "-o", "max_tokens", "8")
    whole = llm(*asked, "-s", "Be brief.", "Hi", "--no-stream")
    assert len(whole.strip()) == 8
    assert llm(*asked, "-s", "Be brief.", "Hi") == whole
    assert len(llm(*asked, "-c", "And then?").strip()) == 8


def test_a_schema(llm):
    schema = (
        '{"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"], "additionalProperties": false}'
    )
    assert llm("-m", "tiny", "--schema", schema, "Hi", "--no-stream").strip().replace(" ", "") == '{"a":"x"}'
