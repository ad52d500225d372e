"""An engine with mini-sglang's data structures under a shadow."""

import pytest
from mini_engine import MiniEngine
from slot_engine import Request

from foreword.shadow.mini_sglang import follow


def found_by(engine, steps=200):
    shadow = follow(engine, first=10**6)
    engine.traffic(steps)
    return shadow.report()


def names(report):
    return {(finding.tensor, finding.origin) for finding in report.findings}


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("backend", "page", "pages", "overlap"),
    [("fi", 1, 300, False), ("fi", 1, 300, True), ("fa", 1, 300, False), ("fa", 4, 100, True)],
)
def test_healthy_traffic_has_no_finding(backend, page, pages, overlap):
    engine = MiniEngine(1, backend=backend, page=page, pages=pages, overlap=overlap)
    report = found_by(engine)
    assert report.ok, str(report)
    assert report.num_compared == report.num_steps > 150
    assert engine.num_hits > 50
    assert not engine.num_retracted
    assert bool(engine.num_overshoots) == overlap


def test_a_page_that_was_computed_twice_and_freed_while_its_request_runs_is_the_schedulers():
    engine = MiniEngine(2, pages=20)
    engine.remaps = False
    shadow = follow(engine)
    prompt = list(range(10, 16))
    engine.waiting += [Request("r0", prompt, 9), Request("r1", prompt, 9)]  # both prefill in one step
    while not shadow.findings:
        engine.step()
    assert engine.num_hits == 0
    finding = shadow.findings[0]
    assert (finding.tensor, finding.request, finding.origin) == ("cache", "1", "scheduler")
    assert finding.got == "what request '0' wrote"


def one_slot_late(engine, batch):
    batch.out_loc[0] += 1


def another_row(engine, batch):
    batch.attn_metadata.indices = batch.attn_metadata.indices.copy()
    batch.attn_metadata.indices[0] += 1


def length_without_the_step(engine, batch):
    batch.attn_metadata.seq_lens_cpu[0] -= 1


def positions_from_zero(engine, batch):
    count = batch.reqs[0].device_len - batch.reqs[0].cached_len
    batch.positions[:count] = range(count)


def end_of_a_chunk(engine, batch):
    batch.attn_metadata.cu_seqlens_q_cpu[1] += 1


def stale_token(engine, batch):
    batch.input_ids[0] = 0


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("fault", "tensor"),
    [
        (one_slot_late, "slot_mapping"),
        (another_row, "read_slots"),
        (length_without_the_step, "seq_lens"),
        (positions_from_zero, "positions"),
        (end_of_a_chunk, "query_start_loc"),
        (stale_token, "input_ids"),
    ],
)
def test_a_changed_tensor_is_named(fault, tensor, overlap, monkeypatch):
    monkeypatch.setattr(MiniEngine, "change", fault)
    found = names(found_by(MiniEngine(3, backend="fi", pages=300, overlap=overlap), 60))
    assert (tensor, "runner") in found
    assert found <= {(tensor, "runner"), ("cache", "runner")}


def test_a_wrong_page_of_an_attention_backend_with_pages_is_named(monkeypatch):
    def change(engine, batch):
        batch.attn_metadata.page_table[0, 0] += 1

    monkeypatch.setattr(MiniEngine, "change", change)
    report = found_by(MiniEngine(4, page=4, pages=100), 60)
    assert names(report) == {("read_slots", "runner")}


def test_a_slot_that_is_read_is_named_with_its_request(monkeypatch):
    def change(engine, batch):
        batch.attn_metadata.indices = batch.attn_metadata.indices + 1

    monkeypatch.setattr(MiniEngine, "change", change)
    engine = MiniEngine(backend="fi")
    shadow = follow(engine)
    engine.waiting += [Request("r0", [5, 6, 7, 8], 3), Request("r1", [9, 10, 11, 12], 3)]
    engine.step()
    found = [(f.tensor, f.index, f.request, f.count) for f in shadow.findings]
    assert found == [("read_slots", (0,), "0", 4), ("read_slots", (4,), "1", 4)]
