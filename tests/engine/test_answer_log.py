"""The log of prompts and answers."""

from __future__ import annotations

import errno
import json
import os
import warnings
from datetime import UTC, datetime

import pytest
from test_llm import tiny_model

from foreword import LLM, SamplingParams
from foreword.engine.answer_log import AnswerLog
from foreword.errors import ConfigError

PARAMS = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_request_that_ends_has_a_line_with_its_prompt_and_answers(tmp_path):
    path, before = tmp_path / "answers.jsonl", datetime.now(UTC)
    with LLM(tiny_model(), answer_log=str(path), max_num_seqs=4) as llm:
        outputs = llm.generate(["abc", "de"], [PARAMS, SamplingParams(n=2, max_tokens=2, ignore_eos=True)])
        for _ in llm.stream("f", PARAMS):
            break  # aborted
    found = sorted(lines(path), key=lambda line: line["num_prompt_tokens"], reverse=True)
    assert [line["prompt"] for line in found] == ["abc", "de", "f"]
    for line, output in zip(found, outputs, strict=False):
        assert line["num_prompt_tokens"] == len(output.prompt_token_ids)
        assert [(a["text"], a["num_tokens"], a["finish_reason"]) for a in line["answers"]] == [
            (one.text, one.num_tokens, "length") for one in output.outputs
        ]
        assert (line["model"], line["error"]) == ("tiny", None)
        assert line["seconds"] > 0
        assert (
            before.timestamp() - 1 <= datetime.fromisoformat(line["time"]).timestamp() <= datetime.now(UTC).timestamp()
        )
    assert found[2]["answers"][0]["finish_reason"] == "abort"


def test_without_the_option_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with LLM(tiny_model()) as llm:
        llm.generate("abc", PARAMS)
        assert not [one for one in llm.engine.observers.members if isinstance(one, AnswerLog)]
    assert not list(tmp_path.iterdir())


def test_only_the_owner_may_read_the_log_also_one_that_existed(tmp_path):
    path = tmp_path / "answers.jsonl"
    for mode in (0o600, 0o644):
        path.touch()
        path.chmod(mode)
        AnswerLog(path, 1000, "m")
        assert path.stat().st_mode & 0o777 == 0o600


def test_a_full_log_is_kept_once_and_both_stay_bounded(tmp_path):
    path, kept = tmp_path / "answers.jsonl", tmp_path / "answers.jsonl.1"
    with LLM(tiny_model(), answer_log=str(path), answer_log_bytes="1KiB") as llm:
        for _ in range(12):
            llm.generate("abc", PARAMS)
            assert path.stat().st_size <= 1024
    assert kept.stat().st_size <= 1024
    assert kept.stat().st_mode & 0o777 == 0o600
    assert all(line["prompt"] == "abc" for line in lines(path) + lines(kept))
    assert sorted(file.name for file in tmp_path.iterdir()) == [path.name, kept.name]


def test_a_line_longer_than_the_log_is_kept_whole(tmp_path):
    path = tmp_path / "answers.jsonl"
    with LLM(tiny_model(), answer_log=str(path), answer_log_bytes=1) as llm:
        llm.generate(["abc", "de"], PARAMS)
    assert {len(lines(path)), len(lines(tmp_path / "answers.jsonl.1"))} == {1}


@pytest.mark.parametrize("partial", [False, True])
def test_a_full_disk_is_said_once_and_harms_no_request(tmp_path, monkeypatch, partial):
    path, write, is_full = tmp_path / "answers.jsonl", os.write, True

    def full(handle, data):
        if not is_full:
            return write(handle, data)
        if partial:
            return write(handle, data[:7])
        raise OSError(errno.ENOSPC, "No space left on device")

    with LLM(tiny_model(), answer_log=str(path)) as llm:
        expected = llm.generate("abc", PARAMS)[0].text
        monkeypatch.setattr("foreword.engine.answer_log.os.write", full)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            assert [output.text for output in llm.generate(["abc"] * 3, PARAMS)] == [expected] * 3
        assert [str(w.message).partition(": answers")[0] for w in said] == [f"answer_log: {path}"]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert llm.generate("abc", PARAMS)[0].text == expected
        is_full = False
        assert llm.generate("de", PARAMS)
    assert [line["prompt"] for line in lines(path)] == ["abc", "de"]


def test_a_log_that_cannot_be_written_is_refused_at_the_start(tmp_path):
    with pytest.raises(ConfigError, match=r"answer_log='.*/no/answers': cannot be written \(No such file"):
        LLM(tiny_model(), answer_log=str(tmp_path / "no" / "answers"))
