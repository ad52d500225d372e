"""An engine with SGLang's data structures under a shadow, and the plugin in a registry like SGLang's."""

import sys
from enum import Enum
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from sglang_engine import SGLangEngine
from slot_engine import Request

from foreword.check_options import VARIABLE, CheckOptions
from foreword.errors import ConfigError
from foreword.insight import Remove, Step, Trace, conform
from foreword.sglang import plugin
from foreword.shadow import FindingError
from foreword.shadow.sglang import INIT_NEW, PROCESS, Hooks


def found_by(steps=200, **settings):
    engine = SGLangEngine(Hooks(CheckOptions(first=10**6)), **settings)
    engine.traffic(steps)
    return engine, engine.hooks.shadow.report()


def names(report):
    return {(finding.tensor, finding.origin) for finding in report.findings}


@pytest.mark.one_in(7)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("page", "pages", "mixed"), [(1, 85, False), (1, 300, True), (4, 100, False)])
def test_healthy_traffic_has_no_finding(page, pages, mixed, overlap):
    engine, report = found_by(300, seed=1, page=page, pages=pages, mixed=mixed, overlap=overlap)
    assert report.ok, str(report)
    assert report.num_compared == report.num_steps > 200
    assert engine.num_hits > 20
    assert bool(engine.num_retracted) == (pages < 90)
    assert bool(engine.num_overshoots) == overlap


def one_slot_late(engine, made):
    made.out_cache_loc = made.out_cache_loc + (np.arange(len(made.out_cache_loc)) == 0)


def row_of_another(engine, made):
    made.req_pool_indices = np.roll(made.req_pool_indices, 1)


def length_without_the_step(engine, made):
    made.seq_lens[0] -= 1
    made.seq_lens[-1] += len(made.seq_lens) > 1  # as many in all


def position_of_the_next(engine, made):
    made.positions = made.positions + 1


def stale_token(engine, made):
    made.input_ids[0] = 0


def prefix_of_another(engine, made):
    if not made.forward_mode.is_decode():
        made.extend_prefix_lens[0] += 1


def counts_exchanged(engine, made):
    if not made.forward_mode.is_decode():
        made.extend_seq_lens = made.extend_seq_lens[::-1].copy()


def starts_of_one_token_each(engine, made):
    if not made.forward_mode.is_decode():
        made.extend_start_loc = np.arange(len(made.extend_seq_lens))


def total_of_the_padded(engine, made):
    if not made.forward_mode.is_decode():
        made.extend_num_tokens += 1


def size_of_the_padded(engine, made):
    made.batch_size += 1


@pytest.mark.parametrize(
    ("fault", "tensors"),
    [
        (one_slot_late, {"slot_mapping"}),
        (row_of_another, {"read_slots"}),
        (length_without_the_step, {"seq_lens", "read_slots"}),
        (position_of_the_next, {"positions"}),
        (stale_token, {"input_ids"}),
        (prefix_of_another, {"num_computed_tokens"}),
        (counts_exchanged, {"num_scheduled_tokens"}),
        (starts_of_one_token_each, {"query_start_loc"}),
        (total_of_the_padded, {"num_tokens", "query_start_loc"}),
        (size_of_the_padded, {"num_reqs"}),
    ],
)
def test_a_changed_tensor_is_named(fault, tensors, monkeypatch):
    monkeypatch.setattr(SGLangEngine, "change", fault)
    _, report = found_by(60, seed=3, pages=300, overlap=True)
    found = {tensor for tensor, _ in names(report)}
    assert tensors <= found <= {*tensors, "cache"}
    assert {origin for _, origin in names(report)} == {"runner"}


def test_slots_that_are_read_from_the_row_of_another_are_named_with_their_request(monkeypatch):
    monkeypatch.setattr(SGLangEngine, "change", row_of_another)
    engine = SGLangEngine(Hooks(CheckOptions()))
    engine.waiting += [Request("a", [5, 6, 7, 8], 3), Request("b", [9, 10, 11, 12], 3)]
    engine.step()
    found = [(f.tensor, f.index, f.request, f.count) for f in engine.hooks.shadow.findings]
    assert found == [("read_slots", (0,), "a", 4), ("read_slots", (4,), "b", 4)]


def test_a_hit_on_tokens_of_another_adapter_is_the_schedulers(monkeypatch):
    monkeypatch.setattr(SGLangEngine, "key", lambda self, request, k: tuple(request.tokens[: (k + 1) * self.page]))
    engine = SGLangEngine(Hooks(CheckOptions()))
    engine.waiting += [Request("a", [5, 6, 7, 8], 1, "law")]
    engine.step()
    engine.waiting += [Request("b", [5, 6, 7, 9], 1, "code")]
    engine.step()
    (finding,) = engine.hooks.shadow.findings
    assert (finding.tensor, finding.request, finding.origin, finding.count) == ("cache", "b", "scheduler", 3)


def test_a_slot_that_is_freed_while_its_request_runs_is_the_schedulers(monkeypatch):
    original = SGLangEngine.grow

    def freed(self, request, length):
        self.free.extendleft({int(slot) for slot in self.table[request.row, : min(request.computed, 1)]} - {0})
        return original(self, request, length)

    monkeypatch.setattr(SGLangEngine, "grow", freed)
    engine = SGLangEngine(Hooks(CheckOptions()))
    engine.waiting += [Request("a", [5, 6, 7, 8], 5), Request("b", [9, 10, 11], 5)]
    for _ in range(3):
        engine.step()
    assert names(engine.hooks.shadow.report()) == {("cache", "scheduler")}


def test_following_ends_with_a_batch_that_it_cannot_follow(caplog):
    engine, report = found_by(20, seed=4, pages=300)
    engine.split = True
    engine.traffic(3)
    engine.split = False
    engine.traffic(20)
    (record,) = caplog.records
    assert "SPLIT_PREFILL cannot be followed" in record.message
    after = engine.hooks.shadow.report()
    assert (after.num_steps, after.ok) == (report.num_steps, True)


def test_following_ends_where_samples_are_not_seen(caplog, monkeypatch):
    monkeypatch.setattr(Hooks, "process_batch_result", lambda self, original, *args: original(*args))
    found_by(100, seed=5, pages=300)
    (record,) = caplog.records
    assert record.message == "the samples of 64 steps were not seen: no later step is checked"


def test_batches_of_a_draft_worker_are_not_steps():
    engine = SGLangEngine(Hooks(CheckOptions()))
    engine.model_runner.is_draft_worker = True
    engine.traffic(3)
    assert engine.hooks.shadow is None


class HookType(Enum):
    AROUND = "around"


@pytest.fixture
def registered(monkeypatch):
    """Return what the plugin registers, by target."""
    found = {}
    module = ModuleType("sglang.srt.plugins.hook_registry")
    module.HookType = HookType
    module.HookRegistry = SimpleNamespace(register=lambda target, hook, kind: found.update({target: (hook, kind)}))
    for name in ("sglang", "sglang.srt", "sglang.srt.plugins"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return found


def test_the_plugin_registers_hooks_around_two_functions(registered, monkeypatch):
    monkeypatch.setenv(VARIABLE, "tensors")
    plugin()
    (init_new, _), (process, _) = registered[INIT_NEW], registered[PROCESS]
    assert {kind for _, kind in registered.values()} == {HookType.AROUND}
    engine = SGLangEngine(init_new.__self__)
    assert process.__self__ is engine.hooks
    engine.traffic(10)
    assert engine.hooks.shadow.check == "tensors"
    assert engine.hooks.shadow.report().ok


@pytest.mark.parametrize("value", [None, "off", ""])
def test_the_plugin_does_nothing_unless_it_is_asked_for(value, registered, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(VARIABLE, value)
    plugin()
    assert not registered


def test_an_unknown_level_is_refused(registered, monkeypatch):
    monkeypatch.setenv(VARIABLE, "some")
    with pytest.raises(ConfigError, match="FOREWORD_CHECK='some': 'some' is unknown"):
        plugin()


def test_the_options_record_the_steps_and_keep_a_report(tmp_path):
    trace, report = tmp_path / "steps.jsonl", tmp_path / "report"
    options = CheckOptions.of(f"tensors,sample:5,record:{trace},report:{report}")
    engine = SGLangEngine(Hooks(options), seed=1, page=1, pages=85)
    engine.traffic(150)
    engine.hooks.close()
    shadow = engine.hooks.shadow.report()
    assert shadow.ok, str(shadow)
    assert 0 < shadow.num_compared < shadow.num_steps / 4
    lines = report.read_text().splitlines()
    assert lines[0] == "foreword: SGLang, check=tensors"
    assert lines[1].startswith(f"{shadow.num_steps} steps followed, {shadow.num_compared} compared")
    assert conform.run(trace).ok
    events = Trace.read(trace).events
    assert sum(isinstance(event, Step) for event in events) == shadow.num_steps
    assert any(isinstance(event, Remove) and event.preempted for event in events)
    assert any(isinstance(event, Step) and event.tensors for event in events)


def test_the_first_finding_ends_the_engine_where_the_options_ask_for_it(monkeypatch, caplog):
    monkeypatch.setattr(SGLangEngine, "change", stale_token)
    engine = SGLangEngine(Hooks(CheckOptions.of("tensors,raise")))
    engine.waiting += [Request("a", [5, 6, 7, 8], 3)]
    with pytest.raises(FindingError, match="input_ids"):
        engine.step()
    engine = SGLangEngine(Hooks(CheckOptions.of("tensors,first:1")), seed=3, pages=300)
    engine.traffic(20)
    assert len(caplog.records) == 1
    assert "input_ids" in caplog.records[0].message
    assert "more" in engine.hooks.report().splitlines()[-1]


def test_a_file_that_cannot_be_written_ends_the_check_and_not_the_engine(tmp_path, caplog):
    options = CheckOptions.of(f"full,record:{tmp_path}/nowhere/steps.jsonl")
    engine = SGLangEngine(Hooks(options), seed=1, pages=300)
    engine.traffic(30)
    (record,) = caplog.records
    assert "cannot be written" in record.message
    assert record.message.endswith("no later step is checked")
    assert "the check ended early" in engine.hooks.report()
