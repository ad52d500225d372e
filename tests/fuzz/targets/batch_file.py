"""Lines of a batch file, and lines of an output that is continued."""

import json

from foreword.openai.batch_file import Results, batch_lines
from fuzz.mutations import mutate_bytes, mutate_json
from fuzz.target import Target

LINE = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}
RESULT = {"id": "batch_req_1", "custom_id": "a", "response": {"status_code": 200, "request_id": "r", "body": {}}}
FAILED = {"id": "batch_req_2", "custom_id": None, "response": None, "error": {"code": "invalid_json", "message": ""}}


def read(data, folder):
    for line in batch_lines(data.splitlines(keepends=True)):
        assert (line.error is None) == bool(line.url), line
        json.dumps(line.record(None, {"code": "x", "message": str(line.error)}))
    path = folder / "out.jsonl"
    path.write_bytes(data)
    with Results(str(path)) as results:
        num_done = len(results.done)
        results.write(FAILED)
    with Results(str(path)) as results:
        assert num_done <= len(results.done) <= num_done + 1


def mutate(rng, data):
    if rng.random() < 0.5:
        return mutate_bytes(rng, data)
    lines = data.splitlines()
    at = rng.randrange(len(lines))
    lines[at] = mutate_json(rng, lines[at])
    return b"\n".join(lines) + b"\n" * rng.randrange(2)


def lines(*entries):
    return b"".join(json.dumps(entry).encode() + b"\n" for entry in entries)


TARGET = Target(
    lambda: [lines({**RESULT, "error": None}, FAILED)], read, mutate, lambda: [lines(LINE, LINE), b"\0" * 9]
)
