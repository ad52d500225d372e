"""Traces of steps, shown: as a page, and as a timeline."""

import json

from foreword.insight.page import write_page
from foreword.insight.perfetto import write_timeline
from foreword.trace.reader import TraceReader
from fuzz.mutations import DEEP, mutate_lines
from fuzz.target import Target
from fuzz.targets import conform


def valid():
    return [conform.recorded(), conform.every_kind()]


def hostile():
    header, *lines = conform.every_kind().splitlines()
    added = {"add": {"req_id": "</script><script>", "prompt_token_ids": [1], "block_ids": [[2**31 - 1]]}}
    sampled = {"commit": {f"r{i}": [1] for i in range(1000)}}
    return [
        b"\n".join([header, json.dumps(added).encode(), *lines]),
        b"\n".join([header, *lines[:5], json.dumps(sampled).encode()]),
        b"\n".join([header, *[b'{"wait": {"req_id": "x", "reason": "y"}}'] * 10_000]),
        b"\n".join([header, *lines, b"[" * DEEP]),
        b"\n".join([header, *lines])[:-40],
        json.dumps({**json.loads(header), "foreword_trace": 99}).encode(),
    ]


def read(data, folder):
    """Both show what can be read of a file, and both name the same damage."""
    path = folder / "steps.jsonl"
    path.write_bytes(data)
    TraceReader(path)  # raises if not even the first line can be used
    page, timeline = write_page(path, folder / "page.html"), write_timeline(path, folder / "timeline.json")
    assert page.num_steps == timeline.num_steps
    assert str(page.damage) == str(timeline.damage)
    if page.damage is not None:
        raise page.damage


TARGET = Target(valid, read, mutate_lines, hostile, memory=3 << 29)
