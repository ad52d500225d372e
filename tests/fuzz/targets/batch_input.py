"""Whole batch files, answered by a model: each line with content gets one record, and none fails the program."""

import json
import tempfile
from functools import cache
from pathlib import Path

from talking_model import TEMPLATE, write_talking_model

from foreword import LLM
from foreword.openai.batch import Batch
from foreword.openai.batch_file import batch_lines
from fuzz.mutations import mutate_lines
from fuzz.target import Target
from fuzz.targets.openai_body import CHAT, COMPLETION

LIMITS = {"max_tokens": 2, "n": 1, "stream": False, "stream_options": None, "model": None, "priority": 0}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "properties": {"a": {}}}}}
BODIES = {
    "/v1/completions": ({**COMPLETION, **LIMITS}, {"prompt": [1, 2], "max_tokens": 1, "response_format": SCHEMA}),
    "/v1/chat/completions": (
        {**{k: v for k, v in CHAT.items() if k != "max_completion_tokens"}, **LIMITS, "response_format": None},
        {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "structured_outputs": {"regex": "[ab]{1,3}"}},
    ),
}
CALLER = "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}" + TEMPLATE


def valid():
    bodies = [(url, body) for url, both in BODIES.items() for body in both]
    lines = [{"custom_id": str(i), "method": "POST", "url": url, "body": body} for i, (url, body) in enumerate(bodies)]
    return [b"".join(json.dumps(line).encode() + b"\n" for line in lines)]


@cache
def model():
    with tempfile.TemporaryDirectory() as folder:
        written = write_talking_model(Path(folder) / "model")
        settings = json.loads((written / "tokenizer_config.json").read_text())
        (written / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": CALLER}))
        return LLM(str(written), max_model_len=256, kv_cache_bytes=8 << 20, num_threads=1, max_num_seqs=8)


def read(data, folder):
    lines = data.splitlines(keepends=True)
    expected = sum(bool(line.strip()) for line in lines)
    records = list(Batch(model(), ["m"]).run(batch_lines(lines)))
    assert len(records) == expected, (len(records), expected)
    for record in records:
        text = json.dumps(record)
        assert "the program failed" not in text, text
        status = record["response"]["status_code"] if record["response"] else 400
        assert status == 200 or 400 <= status < 500, text
    assert not model().engine.has_work


TARGET = Target(valid, read, mutate_lines, memory=3 << 30)
