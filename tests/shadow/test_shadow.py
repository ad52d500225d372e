"""A shadow beside a foreign engine: healthy traffic has no finding, and a decision that cannot be followed is one."""

import logging
import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from foreign_engine import Engine, Group
from shadow_rig import followed, shadow_of
from traffic import TRAFFIC, run

from foreword.batch import KVGroup, NewRequest, PlanError, RequestStates, SamplingParams
from foreword.batch.step.layout import FIELDS
from foreword.errors import ConfigError
from foreword.shadow import FindingError, GroupUse, Shadow, log_finding, raise_finding
from foreword.shadow.comparison import NAMES, TableRule
from foreword.shadow.outlets import write_whole

FULL = [Group(4)]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", TRAFFIC)
def test_healthy_traffic_has_no_finding(kind):
    engine = run(kind, 7, 200, 0.0)
    assert engine.scheduler.num_hits > 10
    assert engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("kind", TRAFFIC)
def test_each_entry_that_is_changed_is_named(kind):
    run(kind, 3, 100, 0.5)


def without_blocks(told: SimpleNamespace) -> None:
    cached = told.scheduled_cached_reqs
    for i, blocks in enumerate(cached.new_block_ids):
        if blocks and cached.req_ids[i] not in cached.resumed_req_ids:
            cached.new_block_ids[i] = None
            told.victim = cached.req_ids[i]
            return


def lose_a_request(engine: Engine, shadow: Shadow) -> tuple[str, list[Any]]:
    """Follow the engine until a request lacks a block that its step needs."""
    victims: list[str] = []

    def change(told: SimpleNamespace) -> None:
        without_blocks(told)
        victims.extend([told.victim] if hasattr(told, "victim") else [])

    for _ in range(300):
        found = followed(engine, shadow, change)
        if victims:
            return victims[0], found
    raise AssertionError("no request grew")


def test_a_request_that_cannot_be_followed_is_named_once_and_the_others_are_compared():
    engine = Engine(FULL, 2, num_blocks=80)
    shadow = shadow_of(engine)
    victim, found = lose_a_request(engine, shadow)
    assert [(f.request, f.tensor, f.group, f.origin) for f in found] == [(victim, "block_table", 0, "scheduler")]
    assert found[0].step == shadow.report().num_steps
    assert isinstance(found[0].got, int)
    others = [request.rid for request in engine.scheduler.running if request.rid != victim]
    assert others
    assert victim in shadow.states

    def plant(engine: Engine, out: SimpleNamespace, made: dict[str, Any]) -> None:
        names = [row.rid for row in engine.runner.batch(out)]
        b = next(b for b, rid in enumerate(names) if rid != victim)
        made["input_ids"][made["query_start_loc"][b]] ^= 1
        made["victim"] = names[b]

    engine.fault = lambda *args: None
    assert followed(engine, shadow) == []  # the same fault is not found again
    wrong: dict[str, Any] = {}

    def plant_once(engine: Engine, out: SimpleNamespace, made: dict[str, Any]) -> None:
        plant(engine, out, made)
        wrong["request"] = made.pop("victim")

    engine.fault = plant_once
    found = followed(engine, shadow)
    assert [(f.request, f.tensor) for f in found] == [(wrong["request"], "input_ids")]


def test_a_lost_request_is_followed_again_after_a_resync():
    engine = Engine(FULL, 2, num_blocks=80)
    shadow = shadow_of(engine)
    victim, _ = lose_a_request(engine, shadow)
    row = engine.runner.find(victim)
    request = next(r for r in engine.scheduler.running if r.rid == victim)
    shadow.resync(victim, row.tokens, request.computed, row.blocks)

    def plant(engine: Engine, out: SimpleNamespace, made: dict[str, Any]) -> None:
        names = [row.rid for row in engine.runner.batch(out)]
        if victim in names:
            made["input_ids"][made["query_start_loc"][names.index(victim)]] ^= 1

    engine.fault = plant
    found = followed(engine, shadow)
    assert [(f.request, f.tensor) for f in found] == [(victim, "input_ids")]


def test_an_unknown_request_in_a_decision_is_named_and_can_be_taken_over():
    engine = Engine(FULL, 2, num_blocks=80)
    shadow = shadow_of(engine)
    victims: list[str] = []

    def change(told: SimpleNamespace) -> None:
        if told.scheduled_new_reqs and len(told.num_scheduled_tokens) > 1:
            victims.append(told.scheduled_new_reqs.pop().req_id)

    while not victims:
        found = followed(engine, shadow, change)
    assert [(f.request, f.origin) for f in found] == [(victims[0], "scheduler")]
    row = engine.runner.find(victims[0])
    request = next(r for r in engine.scheduler.running if r.rid == victims[0])
    shadow.resync(victims[0], row.tokens, request.computed, row.blocks)
    assert [f for _ in range(50) for f in followed(engine, shadow)] == []


def test_parameters_that_are_not_supported_do_not_hide_a_request():
    states = RequestStates(max_num_reqs=2, max_model_len=16, vocab_size=50, kv_groups=[KVGroup(4)])
    shadow = Shadow(states, max_num_batched_tokens=16, num_blocks=8)
    engine = Engine(FULL, 0)
    out = engine.scheduler.schedule(engine.rng)
    out.scheduled_new_reqs = [
        SimpleNamespace(
            req_id="a", prompt_token_ids=[1, 2], mm_features=[], sampling_params=SimpleNamespace(temperature=-7.0),
            pooling_params=None, block_ids=([1],), num_computed_tokens=0, lora_request=None, prompt_embeds=None,
            prefill_token_ids=None,
        )
    ]  # fmt: skip
    out.num_scheduled_tokens = {"a": 2}
    shadow.decide(out)
    assert shadow.step(["a"], {"input_ids": [1, 2]}) == []


def simple(**settings: Any) -> Shadow:
    """A shadow with one request of three prompt tokens, planned."""
    states = RequestStates(max_num_reqs=2, max_model_len=16, vocab_size=50, kv_groups=[KVGroup(4)])
    states.add_request(NewRequest("a", [1, 2, 3], [[5]], sampling_params=SamplingParams(temperature=0.5, top_k=3)))
    shadow = Shadow(states, max_num_batched_tokens=16, **{"num_blocks": 8} | settings)
    shadow.plan({"a": 3})
    return shadow


def test_a_batch_of_other_requests_is_named():
    shadow = simple()
    found = shadow.step(["b"], {})
    assert [(f.tensor, f.request, f.origin) for f in found] == [("req_ids", "a", "runner")]


def test_sampling_columns_are_compared_by_name():
    found = simple().step(["a"], {"sampling.temperature": [0.5], "sampling.top_k": [4]})
    assert [(f.tensor, f.request, f.expected, f.got) for f in found] == [("sampling.top_k", "a", 3, 4)]


def test_masked_entries_are_not_compared():
    got = np.ma.masked_array([9, 2, 9], mask=[True, False, False])
    found = simple().step(["a"], {"input_ids": got})
    assert [(f.index, f.got, f.count) for f in found] == [((2,), 9, 1)]


def test_entries_past_the_step_must_be_padding():
    shadow = simple()
    assert shadow.step(["a"], {"slot_mapping": [[20, 21, 22, -1, -1]], "seq_lens": [3, 0]}) == []
    shadow.commit({"a": [4]})
    shadow.plan({"a": 1})
    found = shadow.step(["a"], {"slot_mapping": [[23, 7]]})
    assert [(f.tensor, f.group, f.index, f.request, f.expected) for f in found] == [("slot_mapping", 0, (1,), None, -1)]


def test_another_shape_is_named():
    found = simple().step(["a"], {"input_ids": [1, 2]})
    assert [(f.expected, f.got) for f in found] == [("shape (3,)", "shape (2,)")]


def test_an_unknown_tensor_is_refused():
    with pytest.raises(PlanError, match="no tensor of this name"):
        simple().step(["a"], {"inputs": [1, 2, 3]})


def test_a_step_without_a_decision_is_refused():
    shadow = simple()
    shadow.step(["a"], {})
    shadow.commit({"a": [4]})
    with pytest.raises(PlanError, match="call decide or plan first"):
        shadow.step(["a"], {})


def test_what_stands_past_the_blocks_of_a_request_is_compared_on_demand():
    table = {"block_table": [[[5, 3, 0]]]}
    assert simple().step(["a"], table) == []
    found = simple(tables=TableRule(past_end=True)).step(["a"], table)
    assert [(f.tensor, f.index, f.expected, f.got) for f in found] == [("block_table", (0, 1), 0, 3)]


def test_a_value_on_a_device_is_not_read_at_the_level_of_the_host():
    class OnDevice:
        def __array__(self, *args: object, **kwargs: object) -> np.ndarray:
            raise AssertionError("read")

    assert simple(check="host").step(["a"], {"input_ids": OnDevice(), "positions": np.arange(3)}) == []


def test_only_some_steps_are_compared_and_the_others_are_followed():
    engine = Engine(FULL, 1)
    shadow = shadow_of(engine, every=3)
    compared = 0
    for _ in range(60):
        out = engine.decide()
        shadow.decide(out)
        compared += shadow.will_compare
        req_ids, tensors = engine.prepare(out)
        assert shadow.step(req_ids, tensors if shadow.will_compare else {}) == []
        sampled = engine.sample(out)
        shadow.commit(sampled)
        engine.finish_step(out, sampled)
    assert compared == shadow.report().num_compared == 20


def test_the_first_findings_are_kept_and_all_are_counted(caplog):
    shadow = simple(first=1, on_finding=log_finding, check="tensors")
    with caplog.at_level(logging.ERROR):
        found = shadow.step(["a"], {"input_ids": [9, 2, 3], "positions": [0, 1, 1]})
    assert [f.tensor for f in found] == ["positions", "input_ids"]
    assert [f.tensor for f in shadow.findings] == ["positions"]
    assert shadow.report().counts == {"positions": 1, "input_ids": 1}
    assert "positions[2] of request 'a': the runner wrote 1, expected 2" in caplog.text
    assert "1 more" in str(shadow.report())


def test_a_finding_can_be_raised():
    with pytest.raises(FindingError, match="input_ids") as caught:
        simple(on_finding=raise_finding).step(["a"], {"input_ids": [9, 2, 3]})
    assert caught.value.finding.request == "a"


@pytest.mark.parametrize(
    "settings", [{"check": "all"}, {"every": 0}, {"first": -1}, {"num_blocks": 0}, {"uses": {3: None}}]
)
def test_settings_out_of_range_are_refused(settings):
    with pytest.raises(ConfigError):
        simple(**settings)


def test_every_tensor_of_a_step_can_be_compared():
    assert {name for name in NAMES if name in FIELDS} >= {"input_ids", "positions", "slot_mapping", "block_table"}


def garble(told: SimpleNamespace, rng: np.random.Generator) -> None:
    """Change something of a decision."""
    cached, counts, drafts = told.scheduled_cached_reqs, told.num_scheduled_tokens, told.scheduled_spec_decode_tokens
    ids, i = list(counts), int(rng.integers(6))
    if not ids:
        return
    rid = ids[int(rng.integers(len(ids)))]
    match int(rng.integers(10)):
        case 0:
            counts[rid] = int(rng.integers(-2, 40))
        case 1:
            counts["stranger"] = 3
        case 2 if cached.req_ids:
            cached.num_computed_tokens[i % len(cached.req_ids)] += int(rng.integers(-3, 9))
        case 3 if cached.req_ids:
            block = int(rng.choice([-7, 10**6, 2**31 - 1, 2**40]))
            cached.new_block_ids[i % len(cached.req_ids)] = [[block] for _ in told.groups]
        case 4 if told.scheduled_new_reqs:
            told.scheduled_new_reqs.pop()
        case 5:
            told.finished_req_ids.add(rid)
        case 6:
            drafts[rid] = rng.integers(-3, 90, 5).tolist()
        case 7:
            told.preempted_req_ids.add(rid)
        case 8 if cached.req_ids:
            cached.new_block_ids.pop()
        case 9:
            told.new_block_ids_to_zero = [3, 10**6]
            told.kv_cache_block_copies = [(1, 2), (3, 2)]
        case _:
            del counts[rid]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", TRAFFIC)
def test_no_decision_makes_a_shadow_raise_and_a_resync_of_all_requests_heals_it(kind):
    groups, settings = TRAFFIC[kind]
    engine, rng = Engine(groups, 11, **settings), np.random.default_rng(0)
    shadow, num_found = shadow_of(engine), 0

    def change(told: SimpleNamespace) -> None:
        told.groups = groups
        if rng.random() < 0.3:
            garble(told, rng)

    for _ in range(80):
        num_found += len(followed(engine, shadow, change))
    assert num_found > 10
    for rid in shadow.states.req_ids:
        shadow.states.remove_request(rid)
    for request in engine.scheduler.running:
        row = engine.runner.find(request.rid)
        shadow.resync(request.rid, row.tokens, request.computed, row.blocks, lora_id=row.adapter)
    found = [f for _ in range(40) for f in followed(engine, shadow)]
    assert {f.tensor for f in found} <= {"cache"}  # what was written meanwhile was not followed
    assert [f for _ in range(40) for f in followed(engine, shadow)] == []


def test_a_shadow_can_be_attached_to_an_engine_that_runs():
    engine = Engine(FULL, 4)
    before = shadow_of(engine)
    while len(engine.scheduler.running) < 3:
        followed(engine, before)
    assert not engine.scheduler.num_preemptions
    fresh = RequestStates(max_num_reqs=engine.rows, max_model_len=engine.length, vocab_size=50, kv_groups=[KVGroup(4)])
    shadow = Shadow(fresh, max_num_batched_tokens=engine.budget, num_blocks=engine.num_blocks, attached=True)
    for request in engine.scheduler.running:
        row = engine.runner.find(request.rid)
        shadow.resync(request.rid, row.tokens, request.computed, row.blocks)
    assert [f for _ in range(100) for f in followed(engine, shadow)] == []


def test_counts_of_drafts_in_flight_are_taken_for_optimistic_on_demand():
    engine = Engine(FULL, 5, most_drafts=3)
    shadow = shadow_of(engine, optimistic=True)

    def count_all(told: SimpleNamespace) -> None:
        cached = told.scheduled_cached_reqs
        for i, rid in enumerate(cached.req_ids):
            if rid not in cached.resumed_req_ids:
                cached.num_computed_tokens[i] += 2

    assert [f for _ in range(200) for f in followed(engine, shadow, count_all)] == []


def test_an_empty_step_needs_no_step_and_no_commit():
    shadow = simple()
    shadow.step(["a"], {})
    shadow.plan({})  # the step before sampled nothing
    shadow.plan({"a": 1})
    found = shadow.step(["a"], {})
    assert [(f.request, f.origin, f.expected, f.got) for f in found] == [("a", "scheduler", 0, 1)]


def test_states_at_block_borders_have_a_table_and_no_slots():
    states = RequestStates(max_num_reqs=2, max_model_len=16, vocab_size=50, kv_groups=[KVGroup(4), KVGroup(8)])
    states.add_request(NewRequest("a", [1, 2, 3], [[5], [6]]))
    shadow = Shadow(states, max_num_batched_tokens=16, num_blocks=8, uses={1: GroupUse(slots=False)})
    shadow.plan({"a": 3})
    right = {"slot_mapping": [[20, 21, 22], None], "block_table": [[[5]], [[6, 0]]]}
    assert shadow.step(["a"], right) == []
    shadow.commit({"a": [4]})
    shadow.plan({"a": 1})
    found = shadow.step(["a"], {"slot_mapping": [[23], [51]], "block_table": [[[5]], [[2, 0]]]})
    assert [(f.tensor, f.group, f.expected, f.got) for f in found] == [
        ("block_table", 1, 6, 2),
        ("slot_mapping", 1, -1, 51),
    ]


def test_a_sample_past_the_end_is_named_with_its_request():
    shadow = simple()
    shadow.step(["a"], {})
    assert shadow.commit({"a": [1]}) == []
    row = shadow.states.row_of("a")
    shadow.resync("a", [1, 2, 3, *range(12)], 14, [[5, 1, 2, 3]])
    for token in (1, 2):
        shadow.plan({"a": 1})
        shadow.step(["a"], {})
        found = shadow.commit({"a": [token]})
    assert int(shadow.states.num_tokens[row]) == 16
    assert [(f.request, f.tensor, f.expected, f.got) for f in found][:1] == [("a", "sampled", 0, 1)]


def test_steps_are_followed_without_the_native_module(monkeypatch):
    monkeypatch.setattr("foreword.batch.prepare.prepare.AUTO", "numpy")
    engine = Engine(*TRAFFIC["drafts"][:1], 3, **TRAFFIC["drafts"][1])
    shadow = shadow_of(engine)
    shadow.states._core = shadow.states.sampling.core = None
    assert [f for _ in range(60) for f in followed(engine, shadow)] == []


def test_a_report_is_not_written_through_a_link_of_its_unfinished_name(tmp_path):
    other, report = tmp_path / "other", tmp_path / "report"
    other.write_text("of another program")
    report.with_name(f"report.{os.getpid()}").symlink_to(other)
    write_whole(report, "no findings")
    assert (report.read_text(), report.is_symlink()) == ("no findings", False)
    assert other.read_text() == "of another program"
