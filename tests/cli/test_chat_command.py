"""`foreword chat` through a pipe and on a terminal."""

import json
import re
import time

import pytest
from processes import Terminal, run

from foreword import LLM, SamplingParams
from foreword.cli.chat import COMMANDS

SHORT = ("--max-tokens", "20")
ENDLESS = ("--max-tokens", "100000")


@pytest.fixture(scope="module")
def expected(talker):
    """The greedy answers to messages of one conversation, by the library."""
    llm = LLM(str(talker))

    def answers(*texts: str, system: str | None = None, **params) -> list[str]:
        messages = [{"role": "system", "content": system}] if system is not None else []
        for text in texts:
            messages.append({"role": "user", "content": text})
            given = SamplingParams(**{"temperature": 0.0, "max_tokens": 20, **params})
            messages.append({"role": "assistant", "content": llm.chat(messages, given)[0].outputs[0].text})
        return [message["content"] for message in messages if message["role"] == "assistant"]

    return answers


def piped(talker, *lines: str, status: int = 0, options=SHORT) -> list[str]:
    """The lines of output for these lines of input."""
    code, out, error = run("chat", "-m", talker, *options, input=("\n".join(lines) + "\n").encode())
    assert (code, "Traceback" in error) == (status, False), error
    return out.splitlines()


@pytest.fixture
def answered(run_here, talker):
    """Return what `piped` returns, by a chat in this process, which reads the lines from a file."""

    def lines_of(*lines: str, options=SHORT) -> list[str]:
        code, out, error = run_here("chat", "-m", talker, *options, input=("\n".join(lines) + "\n").encode())
        assert code == 0, error
        return out.splitlines()

    return lines_of


@pytest.mark.long
def test_each_line_of_a_pipe_is_a_turn_that_knows_the_others(talker, expected):
    assert piped(talker, "Hi", "", "you", "there") == expected("Hi", "you", "there")
    assert piped(talker, "a\\", "b", '"""', "c", '"""') == expected("a\nb", "c")
    assert piped(talker, "Hi", options=(*SHORT, "--system", "Be brief.")) == expected("Hi", system="Be brief.")


def test_commands_change_the_conversation(answered, expected, tmp_path):
    path = tmp_path / "talk.json"
    first, second = expected("Hi", "you")
    shown = answered("Hi", "you", "/retry", "/undo", f"/save {path}", "you", "/clear", "Hi", "/exit", "never")
    assert shown == [
        first, second, second, "removed: you", "saved 2 messages", second,
        "removed all messages but the system prompt", first,
    ]  # fmt: skip
    assert [message["content"] for message in json.loads(path.read_text())] == ["Hi", first]
    assert answered(f"/load {path}", "you") == ["loaded 2 messages", second]
    assert answered("you", options=(*SHORT, "--load", path)) == [second]


def test_settings_and_the_system_prompt(answered, expected):
    shown = answered("/set max_tokens 7", "/set stop odz", "/set stop", "Hi", "/system Be brief.", "Hi", "/set")
    assert shown[:2] == [f"{'max_tokens':<27} 7", f"{'stop':<27} ('odz',)"]
    assert shown[3] == expected("Hi", max_tokens=7, stop=["odz"])[0]
    assert shown[4] == "system prompt: Be brief."
    assert f"{'temperature':<27} 0.0" in shown
    assert answered('/system ""') == ["system prompt: none"]


def test_another_model_goes_on(run_here, answered, talker, expected):
    _, second = expected("Hi", "you")
    assert answered("Hi", f"/model {talker}", "you")[2] == second
    code, _, error = run_here("chat", "-m", talker, input=b"/model none.gguf\n")
    assert code == 2
    assert "none.gguf" in error


def test_why_and_stats_tell_what_was_reused(answered):
    shown = "\n".join(answered("/why", "Hi", "you", "/why", "/stats"))
    assert shown.startswith("nothing was computed yet\n")
    num_first = len("_Hi__") + 20  # roles and ends of messages are a token each
    num_second = num_first + len("__you__")
    assert f"reused {num_first - 1} of {num_second}" in shown  # the last sampled token was never computed
    assert (
        f"the {num_first} tokens of the turn before: the first {num_first} are the beginning of the prompt; the last"
        in shown
    )
    assert f"prompt tokens      {5 + num_second}, {num_first - 1} of them reused" in shown


def test_help_lists_every_command_within_80_columns(talker):
    shown = piped(talker, "/help")
    assert {line.split()[0] for line in shown if line.startswith("/")} == {f"/{name}" for name in (*COMMANDS, "exit")}
    assert max(map(len, shown)) <= 80


ERRORS = {
    "/hepl": "Did you mean /help?",
    "/set temperature hot": "temperature = 'hot': expected X",
    "/set temperature -1": "temperature = -1.0: must be from 0 to 100",
    "/load none.json": "none.json: cannot be read",
    "/set max_tokens 0": "max_tokens = 0: must be ≥ 1. Use 1 or more, or ",
    "/foo": "command = '/foo': is not known. /help lists them",
    "/save": "/save = '': needs a file",
    "/undo": "there is no message to remove",
    "/retry": "there is no message to answer",
}
"""A line that a chat cannot use as its first → what it answers."""


@pytest.mark.parametrize(
    ("line", "message"),
    [*ERRORS.items(), ("x" * 200_000, "conversation = '1 messages': does not fit")],
    ids=lambda text: text[:20],
)
def test_an_error_ends_a_pipe(run_here, talker, line, message):
    code, out, error = run_here("chat", "-m", talker, *SHORT, input=f"{line}\nHi\n".encode())
    assert (code, out) == (2, "")
    assert message in error


def test_no_error_ends_a_terminal(talker, expected):
    with Terminal("chat", "-m", talker, *SHORT, columns=200) as terminal:
        for line, message in ERRORS.items():
            start = len(terminal.plain)
            terminal.answer_prompt(f"{line}\n")
            terminal.read_until(re.escape(message), after=start)
        for text in ("Hi\n", "\x04"):
            terminal.answer_prompt(text)
        assert terminal.end() == 0
    assert expected("Hi")[0] in terminal.plain


def test_a_conversation_that_is_full_says_so_and_stays(talker):
    shown = run("chat", "-m", talker, "--max-model-len", "64", "--max-tokens", "30", input=b"Hi\nHow are you\nHi\n")
    assert shown[0] == 2
    assert "stopped at max_model_len = 64" in shown[2]  # the second answer
    assert "does not fit" in shown[2]
    assert "/undo or /clear" in shown[2]
    with Terminal("chat", "-m", talker, "--max-model-len", "64", "--max-tokens", "30", columns=200) as terminal:
        for text in ("Hi\n", "How are you\n", "x" * 20 + "\n", "/undo\n", "Hi\n", "\x04"):
            terminal.answer_prompt(text)
        assert terminal.end() == 0
    assert terminal.plain.index("does not fit") < terminal.plain.index("removed: How are you")


def test_a_turn_tells_its_speed_and_what_was_reused(talker):
    with Terminal("chat", "-m", talker, *SHORT, columns=120) as terminal:
        for text in ("Hi\n", "you\n", "\x04"):
            terminal.answer_prompt(text)
        assert terminal.end() == 0
    assert "/help lists the commands" in terminal.plain
    assert re.search(
        r"\n5 prompt tokens, .* · 20 output tokens, .*\n(.*\n)+32 prompt tokens \(24 reused\), .* · 20 output tokens, ",
        terminal.plain.replace("\r", ""),
    )


def test_ctrl_c_ends_the_answer_and_keeps_its_beginning(talker, expected, tmp_path):
    path = tmp_path / "talk.json"
    with Terminal("chat", "-m", talker, *ENDLESS, columns=200) as terminal:
        terminal.answer_prompt("Hi\n")
        terminal.read_until("[a-z]{40}")
        terminal.send("\x03")
        terminal.answer_prompt(f"/save {path}\n")
        terminal.interrupt_prompt("Ctrl-C again")
        terminal.interrupt_prompt()
        assert terminal.end() == 130
    assert re.search("interrupted.*saved 2 messages.*Ctrl-C again", terminal.plain, re.S)
    (_, answer) = (message["content"] for message in json.loads(path.read_text()))
    assert len(answer) >= 40
    assert answer == expected("Hi", max_tokens=len(answer))[0]
    assert re.sub(r"\s", "", answer) in re.sub(r"\s|\^C", "", terminal.plain)


def private_files(folder) -> dict[str, int]:
    """The files of chats that were kept → their permissions."""
    return {path.name: path.stat().st_mode & 0o777 for path in (folder / "state" / "foreword").glob("*")}


def test_ctrl_c_empties_a_line_and_ends_the_chat_in_an_empty_one_alone(talker, expected):
    pytest.importorskip("readline")
    with Terminal("chat", "-m", talker, *SHORT, columns=200) as terminal:
        terminal.answer_prompt("Hi\n")
        terminal.interrupt_prompt("Ctrl-C again")
        for text in ("yo", '""" some\nlines'):  # which disarm it
            terminal.answer_prompt(text)
            terminal.read_until(re.escape(text.splitlines()[-1]))
            time.sleep(0.3)
            terminal.send("\x03")
        terminal.answer_prompt("you\n")
        terminal.interrupt_prompt("(?s)Ctrl-C again.*Ctrl-C again")
        terminal.interrupt_prompt()
        assert terminal.end() == 130
    assert expected("Hi", "you")[1] in terminal.plain
    assert "the conversation is not saved: /save FILE does it; `foreword chat --continue` goes on" in terminal.plain
    assert "interrupted" in terminal.plain


@pytest.mark.one_in(3)
@pytest.mark.parametrize("end", ["/exit\n", "\x04", "kill"])
def test_a_conversation_goes_on_after_any_end(talker, expected, tmp_path, end):
    with Terminal("chat", "-m", talker, *SHORT, columns=200) as terminal:
        terminal.answer_prompt("Hi\n")
        terminal.answer_prompt("" if end == "kill" else end)
        if end == "kill":
            terminal.process.kill()
        else:
            assert terminal.end() == 0
            assert "`foreword chat --continue` goes on with this conversation" in terminal.plain
    assert private_files(tmp_path) == {"chat-history": 0o600, "last-chat.json": 0o600}
    assert (tmp_path / "state" / "foreword").stat().st_mode & 0o777 == 0o700
    with Terminal("chat", "-m", talker, *SHORT, "--continue", columns=200) as terminal:
        terminal.answer_prompt("")  # the last exchange is shown as it was, with its prompt
        terminal.answer_prompt("you\n")
        terminal.answer_prompt("\x04")
        assert terminal.end() == 0
    shown = terminal.plain.replace("\r", "")
    first, second = expected("Hi", "you")
    assert f"the conversation has 2 messages; it ends with\n>>> Hi\n{first}\n" in shown
    assert second in shown


@pytest.mark.long
def test_what_was_typed_is_recalled_in_the_next_chat(talker, expected, tmp_path):
    pytest.importorskip("readline")
    history = tmp_path / "state" / "foreword" / "chat-history"
    history.parent.mkdir(parents=True)
    history.write_text("old\n" * 3000)
    history.chmod(0o644)
    for typed in ("Hi\n", "\x1b[A\n"):  # up
        with Terminal("chat", "-m", talker, *SHORT, columns=200) as terminal:
            terminal.answer_prompt(typed)
            terminal.answer_prompt("\x04")
            assert terminal.end() == 0
        assert expected("Hi")[0] in terminal.plain
    assert history.read_text() == "old\n" * 1000 + "Hi\nHi\n"
    assert private_files(tmp_path)["chat-history"] == 0o600


@pytest.mark.long
def test_nothing_is_kept_without_a_history_nor_of_a_pipe(talker, tmp_path):
    with Terminal("chat", "-m", talker, *SHORT, "--no-history", columns=200) as terminal:
        terminal.answer_prompt("Hi\n")
        terminal.answer_prompt("\x04")
        assert terminal.end() == 0
    assert "the conversation is not saved: /save FILE does it" in terminal.plain
    assert "--continue" not in terminal.plain
    piped(talker, "Hi")
    assert private_files(tmp_path) == {}
    code, _, error = run("chat", "-m", talker, "--continue", input=b"Hi\n")
    assert code == 2
    assert "no conversation was kept" in error


def test_a_folder_that_cannot_be_written_is_reported_once(talker, expected, tmp_path):
    (tmp_path / "state").write_text("a file")
    with Terminal("chat", "-m", talker, *SHORT, columns=200) as terminal:
        for text in ("Hi\n", "you\n", "\x04"):
            terminal.answer_prompt(text)
        assert terminal.end() == 0
    assert terminal.plain.count("nothing is kept for later chats") == 1
    assert expected("Hi", "you")[1] in terminal.plain


def test_a_loaded_conversation_is_shown(talker, tmp_path):
    path = tmp_path / "talk.json"
    path.write_text(json.dumps([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello you"}] * 2))
    with Terminal("chat", "-m", talker, *SHORT, "--load", path, columns=200) as terminal:
        terminal.answer_prompt("")  # the last exchange is shown as it was, with its prompt
        terminal.answer_prompt("\x04")
        assert terminal.end() == 0
    assert "the conversation has 4 messages; it ends with\n>>> Hi\nHello you\n" in terminal.plain.replace("\r", "")
    assert "--continue" not in terminal.plain  # it is in its file


def test_a_line_can_be_edited_and_recalled(talker, expected):
    pytest.importorskip("readline")
    with Terminal("chat", "-m", talker, *SHORT) as terminal:
        for text in ("Ho\x7fi\n", "/undo\n", "\x1b[A\x1b[A\n", "\x04"):  # up, twice: the message again
            terminal.answer_prompt(text)
        assert terminal.end() == 0
    assert terminal.plain.count(expected("Hi")[0]) == 2
    assert "removed: Hi" in terminal.plain
