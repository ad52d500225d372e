"""`foreword inspect`: the numbers of a page and of a timeline are those of a replay."""

import gzip
import json
import re
import zlib
from base64 import b64decode

import pytest
from recordings import record_ranges
from trace_lives import Life

from foreword.batch import KVGroup
from foreword.insight import Replay, Step, Trace, TraceHeader, TraceWriter
from foreword.insight.page import write_page
from foreword.insight.perfetto import write_timeline

SEEDS = range(6)


def parts(page):
    """Everything that a page holds, by name."""
    found = re.findall(r'<script type="text/plain" id="(\w+)">([^<]*)</script>', page.read_text(encoding="utf-8"))
    return {name: json.loads(zlib.decompress(b64decode(text))) for name, text in found}


def steps_of(data):
    return [step for i in range(len(data["index"]["starts"])) for step in data[f"s{i}"]["steps"]]


def life(tmp_path, seed, num_steps=70, **options):
    return Life(tmp_path / "steps.jsonl", seed, tensors=False, **options).run(num_steps), tmp_path / "steps.jsonl"


def page_of(trace, tmp_path, **limits):
    out = tmp_path / "page.html"
    return write_page(trace, out, **limits), parts(out)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_page_has_the_tensors_of_the_replay(tmp_path, seed):
    _, path = life(tmp_path, seed)
    report, data = page_of(path, tmp_path)
    trace, ids = Trace.read(path), data["index"]["requests"]["ids"]
    replay, shown = Replay(trace.header, backend="loops"), iter(steps_of(data))
    for event in trace.events:
        batch = replay.apply(event)
        if not isinstance(event, Step):
            continue
        step = next(shown)
        tensors = step["tensors"]
        assert [ids[r] for r in step["requests"]] == list(batch.req_ids)
        for name in ("positions", "input_ids", "seq_lens", "query_start_loc", "logits_indices", "draft_token_ids"):
            assert tensors[name] == getattr(batch, name).tolist(), name
        for group, slots in enumerate(batch.slot_mapping):
            assert tensors["slot_mapping"][group] == slots.tolist()
            null = batch.states.null_block
            for b, req_id in enumerate(batch.req_ids):
                table = batch.states.block_tables[group].table[batch.states.row_of(req_id)].tolist()
                row = tensors["block_table"][group][b]
                below = next((e for e, n in enumerate(row) if n != null), 0)
                assert row[below:] == table[below : len(row)]
    assert next(shown, None) is None
    assert report.num_steps == replay.num_steps == len(data["index"]["steps"]["number"])


@pytest.mark.one_in(3)
@pytest.mark.parametrize("seed", SEEDS)
def test_the_content_of_a_block_is_what_the_slots_of_the_replay_say(tmp_path, seed):
    _, path = life(tmp_path, seed)
    _, data = page_of(path, tmp_path)
    index = data["index"]
    trace = Trace.read(path)
    replay, expected = Replay(trace.header, backend="loops"), {}
    for event in trace.events:
        batch = replay.apply(event)
        if isinstance(event, Step):
            for group, slots in enumerate(batch.slot_mapping):
                size = trace.header.kv_groups[group].block_size
                for t, slot in enumerate(slots[: batch.num_tokens].tolist()):
                    if slot >= 0:
                        owner = batch.req_ids[batch.req_indices[t]]
                        block = expected.setdefault(slot // size, {})
                        block[slot % size] = owner, int(batch.positions[t]), int(batch.input_ids[t])
    got = {}
    for i, block in enumerate(index["blocks"]["ids"]):
        part = data[f"b{i // index['blocks_per_part']}"]["blocks"][i % index["blocks_per_part"]]
        for _, request, _, offset, position, tokens in part:
            for k, token in enumerate(tokens):
                got.setdefault(block, {})[offset + k] = index["requests"]["ids"][request], position + k, token
    assert got == expected


@pytest.mark.parametrize("seed", SEEDS)
def test_the_holders_of_blocks_are_the_block_tables_of_the_replay(tmp_path, seed):
    lived, path = life(tmp_path, seed)
    _, data = page_of(path, tmp_path)
    index, held = data["index"], set()
    for block, log in zip(index["blocks"]["ids"], index["blocks"]["logs"], strict=True):
        for _, kind, request, group, entry in log:
            if kind in ("new", "reused"):
                held.add((index["requests"]["ids"][request], group, entry, block))
            elif kind == "left":
                held.remove((index["requests"]["ids"][request], group, entry, block))
    states, expected = lived.states, set()
    for req_id in states.req_ids:
        row = states.row_of(req_id)
        for group, table in enumerate(states.block_tables):
            for entry, block in enumerate(table.table[row, : table.num_blocks[row]].tolist()):
                expected.add((req_id, group, entry, block))
    missing = expected - held
    assert held <= expected
    assert all(states.block_tables[group].group.sliding_window is not None for _, group, _, _ in missing)


def test_a_cut_file_is_shown_up_to_the_damage(tmp_path):
    _, path = life(tmp_path, 1)
    cut = tmp_path / "cut.jsonl"
    cut.write_bytes(path.read_bytes()[:-4000])
    report, data = page_of(cut, tmp_path)
    assert 0 < report.num_steps < 70
    assert "cut.jsonl, line" in data["index"]["damage"]
    timeline = write_timeline(cut, tmp_path / "out.json")
    assert timeline.num_steps == report.num_steps
    assert str(timeline.damage) == str(report.damage)


def test_a_damaged_compressed_file_is_shown_up_to_the_damage(tmp_path):
    _, path = life(tmp_path, 1)
    bad = tmp_path / "bad.jsonl.gz"
    bad.write_bytes(gzip.compress(path.read_bytes())[:-600])
    report, data = page_of(bad, tmp_path)
    assert report.num_steps > 0
    assert "cut or damaged here" in data["index"]["damage"]


def test_a_page_of_a_trace_above_the_limit_says_where_it_ends(tmp_path):
    _, path = life(tmp_path, 2, 200)
    report, data = page_of(path, tmp_path, max_bytes=2000)
    assert 64 <= report.num_steps < 200
    assert "its limit of 2000 bytes" in data["index"]["damage"]


def test_names_in_a_trace_cannot_add_elements_to_a_page(tmp_path):
    name = "</script><img src=x>"
    path = tmp_path / f"{name.replace('/', '')}.jsonl"
    header = (
        '{"foreword_trace": 2, "max_num_reqs": 2, "max_num_batched_tokens": 8, "max_model_len": 16, '
        '"vocab_size": 9, "kv_groups": [{"block_size": 4}]}'
    )
    lines = [
        {"add": {"req_id": name, "prompt_token_ids": [1, 2], "block_ids": [[1]]}},
        {"step": {"num_scheduled_tokens": {name: 2}}},
        {"commit": {name: [3]}},
    ]
    path.write_text("\n".join([header, *map(json.dumps, lines), ""]))
    _, data = page_of(path, tmp_path)
    text = (tmp_path / "page.html").read_text()
    assert "<img" not in text
    assert data["index"]["requests"]["ids"] == [name]
    assert data["s0"]["steps"][0]["sampled"] == [[0, [3]]]


def test_omitted_token_ids_are_not_shown(tmp_path):
    _, path = life(tmp_path, 1, token_ids="omitted")
    _, data = page_of(path, tmp_path)
    assert all("input_ids" not in step["tensors"] for step in steps_of(data))


def test_a_request_that_only_waits_has_no_state_when_events_are_missing(tmp_path):
    path = tmp_path / "steps.jsonl"
    header = TraceHeader(
        max_num_reqs=2, max_num_batched_tokens=8, max_model_len=16, vocab_size=9, kv_groups=(KVGroup(4),)
    )
    with TraceWriter(path, header) as writer:
        writer.wait("a", "no_blocks need=9 free=4")
        writer.restart(1)
        writer.wait("b", "preemption")
    report, data = page_of(path, tmp_path)
    assert report.damage is None
    assert data["index"]["waits"] == [[0, 0, "no_blocks need=9 free=4"], [0, -1, ""], [0, 1, "preemption"]]
    assert data["index"]["requests"]["logs"] == [[], []]


def test_a_page_has_what_each_request_reused_and_why_not_more(tmp_path):
    path = tmp_path / "steps.jsonl"
    header = TraceHeader(
        max_num_reqs=4, max_num_batched_tokens=8, max_model_len=16, vocab_size=9, kv_groups=(KVGroup(4),)
    )
    with TraceWriter(path, header.beginning_at(7)) as writer:
        writer.add("running", [1, 2], [[1]], num_computed_tokens=1, cache_miss="differs at 0")
        writer.step(["running"], [1])
        writer.add("hit", [1, 2, 3, 4, 5, 6], [[2, 3]], num_computed_tokens=4, cache_miss="part_of_block at 5")
        writer.add("all", [1, 2, 3, 4, 5], [[2, 4]], num_computed_tokens=4)
    report, data = page_of(path, tmp_path)
    assert report.damage is None
    assert data["index"]["requests"]["logs"] == [
        [[0, "added", None, "differs at 0"]],  # how much of what is computed was reused, the trace does not say
        [[1, "added", 4, "part_of_block at 5"]],
        [[1, "added", 4, ""]],
    ]
    assert {"differs", "part_of_block"} <= data["index"]["misses"].keys()


def test_a_page_has_the_ranges_in_which_tokens_see_each_other(tmp_path):
    report, data = page_of(record_ranges(tmp_path / "steps.jsonl"), tmp_path)
    assert report.damage is None
    first, second = (step["tensors"]["bidirectional_ranges"] for step in steps_of(data))
    assert first == [[0, 0], *[[1, 5]] * 4, [0, 0], [0, 0], [0, 0]]
    assert second == [[0, 0], *[[7, 12]] * 5, [0, 0], [0, 0]]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_timeline_follows_the_trace_event_format(tmp_path, seed):
    _, path = life(tmp_path, seed)
    out = tmp_path / "timeline.json"
    report = write_timeline(path, out)
    events = json.loads(out.read_text())["traceEvents"]
    needed = {
        "X": {"ts", "dur"},
        "i": {"ts", "s"},
        "C": {"ts", "args"},
        "b": {"ts", "id", "cat"},
        "e": {"ts", "id", "cat"},
    }
    open_slices, last = {}, {}
    for event in events:
        assert {"ph", "name", "pid", "tid"} <= event.keys()
        if event["ph"] == "M":
            continue
        assert needed[event["ph"]] | {"ts"} <= event.keys()
        assert event["ts"] >= 0
        if event["ph"] == "X":  # slices of one track follow each other
            track = event["pid"], event["tid"]
            assert event["dur"] >= 0
            assert event["ts"] >= last.get(track, 0)
            last[track] = event["ts"] + event["dur"]
        elif event["ph"] == "b":
            assert open_slices.setdefault(event["id"], event["name"]) == event["name"]
        elif event["ph"] == "e":
            assert open_slices.pop(event["id"]) == event["name"]
    assert not open_slices
    trace = Trace.read(path)
    counts = [dict(zip(e.req_ids, map(int, e.counts), strict=True)) for e in trace.events if isinstance(e, Step)]
    assert [e["args"]["tokens"] for e in events if e["ph"] == "X" and e["tid"] == 1] == counts
    assert report.num_steps == len(counts)
