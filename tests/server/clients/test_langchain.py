"""langchain-openai, unchanged."""

import pytest
from server_rig import TEMPLATE, serving, with_template

pytestmark = pytest.mark.filterwarnings("ignore")

TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 3}}\n</tool_call>'


def chat_of(server, **options):
    langchain = pytest.importorskip("langchain_openai")
    return langchain.ChatOpenAI(
        base_url=f"{server.url}/v1", api_key="secret", model="talker", temperature=0, max_retries=0, **options
    )


@pytest.mark.parametrize("options", [{"stream_usage": True}, {"use_responses_api": True}])
def test_a_chat_whole_and_streamed(server, options):
    chat = chat_of(server, max_tokens=8, **options)
    whole = chat.invoke([("system", "Be brief."), ("human", "Hi")])
    chunks = list(chat.stream([("system", "Be brief."), ("human", "Hi")]))
    assert whole.text == "".join(chunk.text for chunk in chunks)
    assert whole.usage_metadata["output_tokens"] == 8
    assert sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata) == 8


def test_a_batch(server):
    answers = chat_of(server, max_tokens=4).batch(["a", "b", "a"])
    assert answers[0].text == answers[2].text


def test_structured_output(server):
    schema = {
        "title": "pick",
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 1, "maximum": 99}},
        "required": ["a"],
        "additionalProperties": False,
    }
    found = chat_of(server, max_tokens=60).with_structured_output(schema, method="json_schema").invoke("Hi")
    assert set(found) == {"a"}


def test_a_completion(server):
    langchain = pytest.importorskip("langchain_openai")
    model = langchain.OpenAI(
        base_url=f"{server.url}/v1", api_key="secret", model="talker", temperature=0, max_tokens=6, max_retries=0
    )
    assert model.invoke("Once") == "".join(model.stream("Once"))


@pytest.mark.parametrize("options", [{}, {"use_responses_api": True}])
def test_a_tool_is_called_and_its_result_goes_back(talker, tmp_path, options):
    template = "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}" + TEMPLATE
    model = with_template(talker, tmp_path / "caller", template)
    with serving(model, script=CALL, api_key=("secret",)) as running:
        chat = chat_of(running, **options).bind_tools([TOOL])
        answer = chat.invoke("What is 3?")
        assert [(call["name"], call["args"]) for call in answer.tool_calls] == [("add", {"a": 3})]
        streamed = None
        for chunk in chat.stream("What is 3?"):
            streamed = chunk if streamed is None else streamed + chunk
        assert [(call["name"], call["args"]) for call in streamed.tool_calls] == [("add", {"a": 3})]
        result = {"role": "tool", "tool_call_id": answer.tool_calls[0]["id"], "content": "3"}
        assert chat.invoke([("human", "What is 3?"), answer, result]).tool_calls
