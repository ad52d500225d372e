"""`foreword batch`: every line of the input has one result, whatever happens in between."""

import functools
import io
import json
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from processes import Terminal, run, start
from talking_model import failing_llm, write_talking_model
from typer.testing import CliRunner

import foreword.engine.chat
from foreword import LLM, SamplingParams
from foreword.cli.app import app
from foreword.errors import ConfigError, ForewordError
from foreword.openai.batch import Batch
from foreword.openai.batch_file import Results, batch_lines

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def line(custom_id: str, body: object = None, url: str = CHAT, **more: object) -> dict[str, object]:
    if body is None:
        body = {"messages": [{"role": "user", "content": custom_id}], "max_tokens": 5, "temperature": 0}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body, **more}


def text_line(custom_id: str, prompt: object, **fields: object) -> dict[str, object]:
    return line(custom_id, {"prompt": prompt, "max_tokens": 5, "temperature": 0, **fields}, TEXT)


def write(path: Path, *lines: object) -> Path:
    """A batch file of these lines; strings are written as they are."""
    path.write_text("".join((entry if isinstance(entry, str) else json.dumps(entry)) + "\n" for entry in lines))
    return path


def batch(*arguments: object, status: int = 0, input: str | None = None) -> str:
    """The output of `foreword batch` in this process."""
    result = CliRunner().invoke(app, ["batch", *map(str, arguments)], input=input)
    if isinstance(result.exception, ForewordError):
        raise result.exception
    assert result.exit_code == status, result.output
    return result.stdout


def records(path: Path) -> dict[str, dict]:
    """The results by custom_id, of which there is one each."""
    found = [json.loads(text) for text in path.read_text().splitlines()]
    assert len({record["custom_id"] for record in found}) == len(found)
    return {record["custom_id"]: record for record in found}


@pytest.fixture
def paths(tmp_path):
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


@pytest.fixture(scope="module")
def llm(talker):
    return LLM(str(talker))


def answer_to(llm: LLM, text: str, max_tokens: int = 5) -> str:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    return llm.chat([{"role": "user", "content": text}], params)[0].outputs[0].text


def test_each_request_has_the_answer_of_the_library(talker, llm, paths):
    source, out = paths
    write(
        source,
        *(line(f"r{i}") for i in range(5)),
        text_line("text", ["ab", "c", [100, 101]], n=2),
        text_line("likely", "ab", logprobs=1, echo=True),
    )
    assert batch(source, out, "-m", talker) == ""
    found = records(out)
    for i in range(5):
        record = found[f"r{i}"]
        assert list(record) == ["id", "custom_id", "response", "error"]
        assert (record["id"], record["error"]) == (f"batch_req_{i + 1}", None)
        assert record["response"]["status_code"] == 200
        body = record["response"]["body"]
        assert body["choices"][0]["message"]["content"] == answer_to(llm, f"r{i}")
        assert (body["object"], body["model"]) == ("chat.completion", str(talker))
    params = SamplingParams(temperature=0.0, max_tokens=5)
    texts = [output.outputs[0].text for output in llm.generate(["ab", "c", [100, 101]], params)]
    choices = found["text"]["response"]["body"]["choices"]
    assert [choice["text"] for choice in choices] == [text for text in texts for _ in range(2)]
    (choice,) = found["likely"]["response"]["body"]["choices"]
    assert choice["text"] == "ab" + texts[0]
    assert choice["logprobs"]["tokens"] == list("ab" + texts[0])


BAD = {
    "{": "invalid_json",
    "[]": "invalid_json",
    "\udcff": "invalid_json",
    "[" * 100_000: "invalid_json",
    '{"custom_id": 5}': "invalid_custom_id",
    "{}": "invalid_custom_id",
    json.dumps(line("method") | {"method": "GET"}): "invalid_request",
    json.dumps(line("url", url="/v1/embeddings")): "invalid_request",
    json.dumps(line("extra", priority=1)): "invalid_request",
}
REFUSED = {
    "no-body": (None, "body"),
    "model": ({"model": "other", "messages": [{"role": "user", "content": "a"}]}, "model"),
    "unknown": ({"messages": [{"role": "user", "content": "a"}], "temprature": 1}, "temprature"),
    "role": ({"messages": [{"role": "no one", "content": "a"}]}, "messages[0].role"),
    "range": ({"messages": [{"role": "user", "content": "a"}], "top_p": 7}, "top_p"),
    "stream": ({"messages": [{"role": "user", "content": "a"}], "stream": True}, "stream"),
    "tools": (
        {"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function", "function": {"name": 1}}]},
        "tools[0].function.name",
    ),
    "surrogate": ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
    "vocabulary": ({"messages": [{"role": "user", "content": "a"}], "stop_token_ids": [10**6]}, "stop_token_ids"),
}


def test_the_answer_log_has_the_text_of_each_prompt(talker, llm, paths, tmp_path):
    source, out = paths
    log = tmp_path / "log.jsonl"
    write(source, line("chat"), text_line("text", "ab"), text_line("ids", [100, 101]))
    batch(source, out, "-m", talker, "--answer-log", log)
    chat = llm.chat([{"role": "user", "content": "chat"}], SamplingParams(max_tokens=1))[0].prompt
    assert {json.loads(entry)["prompt"] for entry in log.read_text().splitlines()} == {chat, "ab", None}


def test_a_bad_line_is_one_error_line_and_harms_no_other(talker, llm, paths):
    source, out = paths
    bad = [*BAD, *({**line(name), "body": body} for name, (body, _) in REFUSED.items()), line("good")]
    mixed = [entry for i, text in enumerate(bad) for entry in (text, "", line(f"good{i}"))]
    with source.open("wb") as file:
        for entry in [*mixed, line("good")]:
            text = entry if isinstance(entry, str) else json.dumps(entry)
            file.write(text.encode(errors="surrogateescape") + b"\n")
    batch(source, out, "-m", talker, status=1)
    found = [json.loads(text) for text in out.read_text().splitlines()]
    by_number = {int(record["id"].rpartition("_")[2]): record for record in found}
    assert len(by_number) == len(found) == 2 * len(bad) + 1
    for i, code in enumerate(BAD.values()):
        record = by_number[3 * i + 1]
        assert (record["response"], record["error"]["code"]) == (None, code)
        assert f"line {3 * i + 1}" in record["error"]["message"]
    for i, (name, (_, field)) in enumerate(REFUSED.items(), len(BAD)):
        record = by_number[3 * i + 1]
        assert (record["custom_id"], record["error"], record["response"]["status_code"]) == (name, None, 400)
        assert record["response"]["body"]["error"]["param"] == field
    for i in range(len(bad)):
        body = by_number[3 * i + 3]["response"]["body"]
        assert body["choices"][0]["message"]["content"] == answer_to(llm, f"good{i}")
    duplicate = by_number[3 * len(bad) + 1]
    assert (duplicate["custom_id"], duplicate["error"]["code"]) == ("good", "duplicate_custom_id")


def test_a_second_run_does_nothing_and_has_the_same_status(talker, paths):
    source, out = paths
    write(source, line("a"), "{", line("a"), line("b"))
    batch(source, out, "-m", talker, status=1)
    before = out.read_bytes()
    batch(source, out, "-m", talker, status=1)
    assert out.read_bytes() == before
    write(source, line("a"), line("c"), line("a"), line("b"))  # one line was corrected
    batch(source, out, "-m", talker, status=1)
    assert out.read_bytes().startswith(before)
    assert [json.loads(text)["custom_id"] for text in out.read_text().splitlines()[4:]] == ["c"]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("cut", [1, 10, 15, 20, 150, 300])
def test_a_torn_line_is_cut_and_done_again(talker, paths, cut):
    source, out = paths
    write(source, line("a"), line("b"))
    batch(source, out, "-m", talker, "--ordered")
    first, second = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(first + second[:cut])
    batch(source, out, "-m", talker)
    assert list(records(out)) == ["a", "b"]
    assert out.read_bytes().startswith(first)


@pytest.mark.parametrize(
    "content", ["Dear diary", '{"id": 5}\n', "\n", '{"a": 1}', "[]\n", json.dumps(line("a")) + "\n"]
)
def test_another_file_is_never_appended_to(talker, paths, content):
    source, out = paths
    write(source, line("a"))
    out.write_text(content)
    with pytest.raises(ConfigError, match=r"out\.jsonl: line 1"):
        batch(source, out, "-m", talker)
    assert out.read_text() == content


def test_files_that_cannot_be_used_are_refused(talker, paths, tmp_path):
    source, out = paths
    with pytest.raises(ConfigError, match="cannot be read"):
        batch(source, out, "-m", talker)
    write(source, line("a"))
    with pytest.raises(ConfigError, match="is the input and the output"):
        batch(source, source, "-m", talker)
    with pytest.raises(ConfigError, match="cannot be written"):
        batch(source, tmp_path / "missing" / "out", "-m", talker)
    with Results(str(out)), pytest.raises(ConfigError, match="another process writes"):
        batch(source, out, "-m", talker)


@pytest.mark.long
def test_standard_streams(talker, paths):
    source, _ = paths
    write(source, line("a"), line("b"))
    for arguments, given in (((source, "-"), None), (("-", "-"), source.read_text())):
        found = [json.loads(text) for text in batch(*arguments, "-m", talker, "--ordered", input=given).splitlines()]
        assert [record["custom_id"] for record in found] == ["a", "b"]
    status, out, error = run("batch", "-", "-", "-m", talker, input=source.read_bytes())
    assert (status, len(out.splitlines()), error) == (0, 2, "")


def test_other_names_of_the_model(talker, paths):
    source, out = paths
    body = {"model": "gpt-4o", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    write(source, line("a", body))
    batch(source, out, "-m", talker, "--served-model-name", "gpt-4o")
    assert records(out)["a"]["response"]["body"]["model"] == "gpt-4o"


def test_a_request_that_fails_while_it_runs_is_one_error_line(talker, llm, paths, monkeypatch):
    source, out = paths
    monkeypatch.setattr("foreword.cli.batch.LLM", failing_llm)
    write(source, line("a"), line("b!"), text_line("c", ["c", "d!"]), line("d"))
    batch(source, out, "-m", talker, "--max-model-len", 64, status=1)
    found = records(out)
    for name in ("b!", "c"):
        response = found[name]["response"]
        assert (response["status_code"], response["body"]["error"]["type"]) == (500, "server_error")
    for name in ("a", "d"):
        body = found[name]["response"]["body"]
        assert body["choices"][0]["message"]["content"][:3] == answer_to(llm, name)[:3]


@pytest.mark.parametrize(
    "place", ["openai.batch.make_chat", "openai.batch.chat_completion", "engine.chat.ChatReader.read"]
)
def test_a_line_that_makes_the_program_fail_is_one_error_line(talker, llm, monkeypatch, place, capfd):
    batch, number = Batch(llm, ["talker"]), 0

    def fail_at_the_second(*arguments, **named):
        nonlocal number
        number += 1
        if number == 2:
            raise TypeError("unexpected")
        return known(*arguments, **named)

    known = functools.reduce(getattr, place.split("."), foreword)
    monkeypatch.setattr(f"foreword.{place}", fail_at_the_second)
    lines = [json.dumps(line(f"{i}")).encode() for i in range(4)]
    found = {record["custom_id"]: record["response"] for record in batch.run(batch_lines(lines))}
    statuses = Counter(response["status_code"] for response in found.values())
    assert statuses == {200: 3, 500: 1}
    (failed,) = (response["body"]["error"] for response in found.values() if response["status_code"] == 500)
    assert "TypeError: unexpected" in failed["message"]
    assert "Traceback" in capfd.readouterr().err
    assert not llm.engine.has_work
    assert llm.engine.cache.pool.num_used == 0


def test_prompts_of_a_line_that_fails_leave_the_engine(llm, monkeypatch):
    batch = Batch(llm, ["talker"])
    number = 0

    def fail_once(self, output):
        nonlocal number
        number += 1
        if number == 1:
            raise TypeError("unexpected")
        return output

    monkeypatch.setattr("foreword.engine.checked_request.CheckedRequest.read", fail_once)
    lines = [text_line("a", ["b", "c", "d"]), text_line("e", "f")]
    found = list(batch.run(batch_lines([json.dumps(one).encode() for one in lines])))
    assert [(one["custom_id"], one["response"]["status_code"]) for one in found] == [("a", 500), ("e", 200)]
    assert not llm.engine.has_work
    assert llm.engine.cache.pool.num_used == 0


def test_failed_lines_are_done_again_on_request(talker, paths, monkeypatch):
    source, out = paths
    write(source, line("a"), line("b!"), "{", line("c", {"messages": []}), line("d"))
    with monkeypatch.context() as patch:
        patch.setattr("foreword.cli.batch.LLM", failing_llm)
        batch(source, out, "-m", talker, "--max-model-len", 64, status=1)
    before = {name: json.dumps(record) for name, record in records(out).items()}
    out.chmod(0o640)
    write(source, line("a"), line("b!"), line("e"), line("c", {"messages": []}), line("d"))
    batch(source, out, "-m", talker, "--retry-errors", status=1)
    found = records(out)
    statuses = {name: record["response"]["status_code"] for name, record in found.items()}
    assert statuses == {"a": 200, "b!": 200, "c": 400, "d": 200, "e": 200}
    assert all(json.dumps(found[name]) == before[name] for name in ("a", "d"))
    assert out.stat().st_mode & 0o777 == 0o640
    assert sorted(path.name for path in out.parent.iterdir()) == [source.name, out.name]


@pytest.mark.parametrize("moment", ["os.fsync", "shutil.copymode", "pathlib.Path.replace"])
def test_an_interrupted_removal_of_errors_changes_nothing(talker, paths, monkeypatch, moment):
    source, out = paths
    write(source, line("a"), "{")
    batch(source, out, "-m", talker, status=1)
    before = out.read_bytes()

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(moment, interrupt)
        with pytest.raises(KeyboardInterrupt):
            Results(str(out), retry_errors=True)
    assert (out.read_bytes(), len(list(out.parent.iterdir()))) == (before, 2)
    with Results(str(out), retry_errors=True) as results:
        assert results.done == {"id a"}
        with pytest.raises(ConfigError, match="another process writes"):
            Results(str(out))


def test_only_a_file_has_errors_to_retry(talker, paths):
    source, out = paths
    write(source, line("a"))
    with pytest.raises(ConfigError, match="has no earlier results"):
        batch(source, "-", "-m", talker, "--retry-errors")
    out.write_text("Dear diary")
    with pytest.raises(ConfigError, match=r"out\.jsonl: line 1"):
        batch(source, out, "-m", talker, "--retry-errors")
    assert out.read_text() == "Dear diary"


@pytest.mark.parametrize("ordered", [True, False])
def test_lines_are_read_as_they_are_needed_and_reported_in_order(talker, ordered):
    llm = LLM(str(talker), max_num_seqs=3)
    most = 2 * 3
    num_read = num_reported = 0

    def lines():
        nonlocal num_read
        for i in range(40):
            num_read += 1
            assert num_read - num_reported <= most + 1
            body = {"prompt": "a", "max_tokens": 1 + (i * 7) % 11, "temperature": 0}
            yield json.dumps(line(str(i), body, TEXT)).encode()

    order = []
    for record in Batch(llm, ["m"], ordered=ordered).run(batch_lines(lines())):
        num_reported += 1
        order.append(int(record["custom_id"]))
        assert llm.engine.num_unfinished <= most
    assert sorted(order) == list(range(40))
    assert (order == sorted(order)) == ordered
    assert not llm.engine.has_work


def test_a_batch_file_is_read_lazily():
    class Endless(io.RawIOBase):
        def __next__(self) -> bytes:
            return b"{\n"

    lines = batch_lines(Endless())
    assert [next(lines).number for _ in range(3)] == [1, 2, 3]


@pytest.mark.long
def test_killed_at_any_moment_and_continued_nothing_is_lost_or_done_twice(talker, paths):
    source, out = paths
    count = 40
    entries = [text_line(f"r{i}", "abc", max_tokens=200 + 10 * (i % 7)) for i in range(count)]
    write(source, *entries[:20], "{", line("r3"), *entries[20:])
    random.seed(7)
    arguments = ("batch", source, out, "-m", talker, "--max-num-seqs", 4)
    kills = 0
    for _ in range(30):
        lines_before = out.read_bytes().count(b"\n") if out.exists() else 0
        with start(*arguments) as process:
            # Killed some results later: between two results, or in the middle of one.
            until = time.monotonic() + 60
            wanted = lines_before + random.randint(8, 18)
            while process.poll() is None and (out.read_bytes().count(b"\n") if out.exists() else 0) < wanted:
                assert time.monotonic() < until
                time.sleep(0.001)
            process.send_signal(signal.SIGKILL)
            process.communicate(timeout=60)
        if process.returncode != -signal.SIGKILL:
            break
        kills += 1
        if kills % 2:  # as if the kill had come inside a write
            data = out.read_bytes()
            out.write_bytes(data[: len(data) - random.randint(1, 200)])
    assert (process.returncode, kills >= 2) == (1, True)
    found = [json.loads(text) for text in out.read_text().splitlines()]
    assert len(found) == count + 2
    ids = Counter(record["id"] for record in found)
    assert set(ids.values()) == {1}
    good = {record["custom_id"] for record in found if record["response"] is not None}
    assert good == {f"r{i}" for i in range(count)}
    assert sorted(record["error"]["code"] for record in found if record["error"]) == [
        "duplicate_custom_id", "invalid_json",
    ]  # fmt: skip


def test_ctrl_c_ends_it_and_the_same_command_continues(tmp_path, paths):
    source, out = paths
    model = write_talking_model(tmp_path / "model")
    write(source, *(text_line(f"r{i}", "abc", max_tokens=5 if i < 3 else 100_000) for i in range(4)))
    with Terminal("batch", source, out, "-m", model) as terminal:
        until = time.monotonic() + 60
        while not out.exists() or out.read_bytes().count(b"\n") < 3:
            assert time.monotonic() < until
            time.sleep(0.01)
        terminal.send("\x03")
        assert terminal.end() == 130
    assert "the same command continues" in terminal.plain
    write(source, *(text_line(f"r{i}", "abc") for i in range(4)))
    batch(source, out, "-m", model)
    assert sorted(records(out)) == ["r0", "r1", "r2", "r3"]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("columns", [100, 40, 20])
def test_a_terminal_shows_progress_and_a_summary(talker, paths, columns):
    source, out = paths
    write(source, *(line(f"r{i}") for i in range(8)), "{")
    with Terminal("batch", source, out, "-m", talker, columns=columns) as terminal:
        assert terminal.end() == 1
    if columns == 100:
        assert "9/9" in terminal.plain
        assert "tokens/s" in terminal.plain
    assert "9 lines in" in terminal.plain
    assert "errors: 1" in terminal.plain
    with Terminal("batch", source, out, "-m", talker, "--quiet", columns=columns) as terminal:
        assert terminal.end() == 1
    assert terminal.shown == ""


def test_no_colour_where_it_is_not_wanted(talker, paths):
    source, out = paths
    write(source, line("a"))
    with Terminal("batch", source, out, "-m", talker, env={"NO_COLOR": "1"}) as terminal:
        assert terminal.end() == 0
    assert not any(f"\x1b[{code}" in terminal.shown for code in ("2m", "3", "9", "38"))


@pytest.mark.long
def test_a_reader_that_leaves_ends_it_in_silence(talker, paths):
    source, _ = paths
    write(source, *(text_line(f"r{i}", "abc", max_tokens=50 * (i + 1)) for i in range(200)))
    with start("batch", source, "-", "-m", talker) as process:
        os.read(process.stdout.fileno(), 1)
        process.stdout.close()
        assert (process.wait(60), process.stderr.read()) == (1, b"")
