"""Lines that a user types become messages and commands; texts become settings; messages can be taken back and saved."""

import json
from dataclasses import fields

import pytest

from foreword import SamplingParams
from foreword.cli.chat_input import Command, Message, read
from foreword.cli.conversation import Conversation
from foreword.cli.sampling_options import FIELDS, OF_ONE_PROMPT, setting
from foreword.errors import ConfigError, ForewordError, RequestError


def read_all(text: str) -> list[Message | Command | None]:
    """Return what all lines of a text say, and whether each line that continues a message was asked for as such."""
    lines, found = text.split("\n"), []
    while lines:
        found.append(read(lambda continues: lines.pop(0)))
    return found


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("Hi", [Message("Hi")]),
        ("  Hi there ", [Message("Hi there")]),
        ("", [None]),
        ("   ", [None]),
        ("a\nb", [Message("a"), Message("b")]),
        ("a\\\nb\\\nc\nd", [Message("a\nb\nc"), Message("d")]),
        ('"""\na\n\n  b\n"""\nc', [Message("a\n\n  b"), Message("c")]),
        ('"""a\nb"""', [Message("a\nb")]),
        ('"""a"""', [Message("a")]),
        ('"""\n/exit\n"""', [Message("/exit")]),
        ("//etc is a folder", [Message("/etc is a folder")]),
        ("/help", [Command("help")]),
        ("  /set temperature 0.7 ", [Command("set", "temperature 0.7")]),
        ("/system Be brief.\\\nBe kind.", [Command("system", "Be brief.\nBe kind.")]),
    ],
)
def test_lines_are_messages_or_commands(typed, expected):
    assert read_all(typed) == expected


def test_a_line_that_continues_is_asked_for_as_such():
    asked = []

    def next_line(continues: bool) -> str:
        asked.append(continues)
        return ["a\\", "b\\", "c"][len(asked) - 1]

    read(next_line)
    assert asked == [False, True, True]


def test_an_argument_is_split_as_in_a_shell():
    assert Command("set", 'stop "a b" c').words == ["stop", "a b", "c"]
    with pytest.raises(RequestError, match=r"/set = .*: No closing quotation"):
        _ = Command("set", 'stop "a').words


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("temperature 0.7", ("temperature", 0.7)),
        ("--top-k 5", ("top_k", 5)),
        ("max_tokens none", ("max_tokens", None)),
        ("stop a bc", ("stop", ("a", "bc"))),
        ("stop none", ("stop", None)),
        ("ignore_eos on", ("ignore_eos", True)),
        ("skip-special-tokens OFF", ("skip_special_tokens", False)),
        ("logit_bias 5=-1 7=0.5", ("logit_bias", {5: -1.0, 7: 0.5})),
        ("bad_words_token_ids 1,2 3", ("bad_words_token_ids", ((1, 2), (3,)))),
        ("stop_token_ids 3 4", ("stop_token_ids", (3, 4))),
    ],
)
def test_a_setting_is_a_name_and_a_value(typed, expected):
    name, *words = typed.split()
    assert setting(name, words) == expected
    SamplingParams(**dict([expected]))


@pytest.mark.parametrize(
    ("typed", "field", "message"),
    [
        ("temprature 1", "temprature", "Did you mean 'temperature'"),
        ("n 2", "n", "is not a setting of a conversation"),
        ("temperature warm", "temperature", "expected X"),
        ("temperature 1 2", "temperature", "expected one value"),
        ("ignore_eos 1", "ignore_eos", "expected on|off"),
        ("logit_bias 5", "logit_bias", "expected ID=X"),
        ("top_k " + "9" * 5000, "top_k", "expected N"),
    ],
)
def test_a_wrong_setting_is_named(typed, field, message):
    name, *words = typed.split()
    with pytest.raises(RequestError) as caught:
        setting(name, words)
    assert caught.value.field == field
    assert message in str(caught.value)


def test_every_sampling_parameter_is_an_option():
    """But those that a text answer has no use for."""
    others = {"detokenize", "structured_outputs"}
    assert set(FIELDS) | others == {field.name for field in fields(SamplingParams)}
    assert set(OF_ONE_PROMPT) < set(FIELDS)


def talk(*texts: str, system: str | None = None) -> Conversation:
    conversation = Conversation(system)
    roles = ("user", "assistant")
    conversation.messages += [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return conversation


def test_the_system_prompt_is_the_first_message():
    conversation = talk("a", "b", system="s")
    assert conversation.messages[0] == {"role": "system", "content": "s"}
    conversation.system = "t"
    assert [m["content"] for m in conversation.messages] == ["t", "a", "b"]
    conversation.clear()
    assert conversation.messages == [{"role": "system", "content": "t"}]
    conversation.system = None
    assert (conversation.messages, conversation.system) == ([], None)


def test_the_question_is_found():
    assert talk().up_to_question() is None
    assert talk(system="s").up_to_question() is None
    for conversation in (talk("a", "b", "c", "d"), talk("a", "b", "c")):
        assert [m["content"] for m in conversation.up_to_question()] == ["a", "b", "c"]
    assert talk("a").waits
    assert not talk("a", "b").waits


def test_a_saved_conversation_is_loaded(tmp_path):
    path = tmp_path / "talk.json"
    saved, loaded = talk("a", "é\nb", system="s"), talk("other")
    saved.save(path)
    saved.save(path)
    loaded.load(path)
    assert loaded.messages == saved.messages == json.loads(path.read_text())


@pytest.mark.parametrize("content", ["", "{}", "5", "[5]", '[{"role": 5}]', "[]", '[{"role": "user"}]', "\udcff"])
def test_a_file_without_messages_is_neither_loaded_nor_overwritten(tmp_path, content):
    path = tmp_path / "other.txt"
    path.write_bytes(content.encode(errors="surrogateescape"))
    conversation = talk("a")
    for change in (conversation.load, conversation.save):
        with pytest.raises(ForewordError):
            change(path)
    assert path.read_bytes() == content.encode(errors="surrogateescape")
    assert conversation.messages == talk("a").messages


def test_files_that_cannot_be_used_are_named(tmp_path):
    for change in (talk("a").load, talk("a").save):
        with pytest.raises(ConfigError, match="missing"):
            change(tmp_path / "missing" / "talk.json")
