"""The follower of vLLM's runners, without vLLM: on the steps of the foreign engine in plain Python."""

from types import SimpleNamespace

import numpy as np
import pytest
from foreign_engine import Engine, Group
from shadow_rig import states_of

from foreword.batch import KVGroup, RequestStates
from foreword.check_options import CheckOptions
from foreword.insight import conform
from foreword.shadow import FindingError
from foreword.vllm.follower import Follower, Grammar, placeholders_of

GROUPS = [Group(4), Group(4, 11)]


class Values:
    """Tensors that are on the host, or become so after some questions."""

    def __init__(self, arrays, questions=0):
        self._arrays, self._questions = arrays, questions

    @property
    def is_ready(self):
        self._questions -= 1
        return self._questions < 0

    def arrays(self):
        return self._arrays


def follower_of(engine, options="full", **others):
    said = []
    follower = Follower.of(
        states_of(engine),
        CheckOptions.of(options),
        max_num_batched_tokens=engine.budget,
        num_blocks=engine.num_blocks,
        log=said.append,
        **others,
    )
    return follower, said


def run(engine, follower, steps, change=None, lag=0, questions=0):
    """Run the engine; samples are known to the follower ``lag`` steps late."""
    late = []
    for number in range(steps):
        out = engine.decide()
        step = follower.decide(out)
        req_ids, tensors = engine.prepare(out)
        if change is not None:
            change(number, tensors)
        if out.total_num_scheduled_tokens:
            follower.step(req_ids, lambda tensors=tensors: Values(tensors, questions))
        sampled = engine.sample(out)
        late.append((step, sampled))
        if len(late) > lag:
            old, of_old = late.pop(0)
            follower.commit(old, lambda of_old=of_old: of_old)
        engine.finish_step(out, sampled)
    for old, of_old in late:
        follower.commit(old, lambda of_old=of_old: of_old)


def slot_off_by_one(number, tensors):
    if number == 20:
        tensors["slot_mapping"][0][0] += 1


@pytest.mark.parametrize(("lag", "questions"), [(0, 0), (1, 0), (2, 1)], ids=["at once", "queued", "slow copies"])
def test_a_fault_is_named_whenever_samples_and_tensors_come(lag, questions):
    engine = Engine(GROUPS, 1, most_drafts=2, num_blocks=44)
    follower, said = follower_of(engine, is_queued=lag > 0)
    run(engine, follower, 100, slot_off_by_one, lag, questions)
    assert "no step" not in follower.report()
    for _ in range(100):
        follower.report()  # asks again for what is on its way
    report = follower.shadow.report()
    assert (report.num_steps, follower.failure) == (100, "")
    assert {finding.step for finding in report.findings} == {21}
    assert report.findings[0].tensor == "slot_mapping"
    assert said[0].startswith("step 21: slot_mapping[0][0]")


def test_a_fault_of_the_check_is_said_once_and_the_engine_goes_on():
    engine = Engine(GROUPS, 1)
    follower, said = follower_of(engine)

    def fail(number, tensors):
        if number == 10:
            del tensors["input_ids"]
            tensors["no_such_tensor"] = np.zeros(1)

    run(engine, follower, 50, fail)
    assert len(said) == 1
    assert "the engine goes on unchecked" in said[0]
    assert "no_such_tensor" in follower.report()
    assert follower.current is None


def test_samples_that_never_come_end_the_check():
    engine = Engine(GROUPS, 1)
    follower, said = follower_of(engine, is_queued=True)
    run(engine, follower, 100, lag=200)
    assert len(said) == 1
    assert "never came" in said[0]


def test_a_finding_raises_where_that_is_asked_for():
    engine = Engine(GROUPS, 1)
    follower, _ = follower_of(engine, "full,raise")
    with pytest.raises(FindingError, match="slot_mapping"):
        run(engine, follower, 50, slot_off_by_one)


def test_a_sample_of_steps_is_compared():
    engine = Engine(GROUPS, 1)
    follower, _ = follower_of(engine, "tensors,sample:10")
    run(engine, follower, 100)
    assert 8 <= follower.shadow.report().num_compared <= 10


def test_a_sample_that_a_grammar_does_not_allow_is_named():
    mask = np.zeros((3, 2), np.int32)
    mask[0, 0], mask[1, 1], mask[2, 0] = 1 << 5, 1 << 8, 1 << 6  # "a": 5, then 40; "b": 6
    grammar = Grammar(["a", "b"], mask, {"a": 1})
    assert grammar.refused({"a": [5, 40], "b": [6]}) == []
    assert grammar.refused({"a": [5, 41], "b": [7]}) == [("a", 1, 41), ("b", 0, 7)]
    engine = Engine(GROUPS, 1)
    follower, said = follower_of(engine)
    sampled = {}
    while not sampled:
        out = engine.decide()
        step = follower.decide(out)
        req_ids, tensors = engine.prepare(out)
        if req_ids:
            follower.step(req_ids, lambda tensors=tensors: Values(tensors))
        sampled = engine.sample(out)
        if not sampled:
            follower.commit(step, dict)
            engine.finish_step(out, sampled)
    request = next(iter(sampled))
    follower.constrain(lambda: Grammar([request], np.zeros((1, 2), np.int32), {}))
    follower.commit(step, lambda: sampled)
    assert f"sampled[0] of request {request!r}" in said[0]


def test_a_recording_has_every_step_and_the_tensors_that_differ(tmp_path):
    engine = Engine(GROUPS, 1, most_drafts=2, num_blocks=44)
    path = tmp_path / "steps.jsonl"
    follower, _ = follower_of(engine, f"full,record:{path}")
    run(engine, follower, 100, slot_off_by_one)
    follower.close()
    report = conform.run(path)
    assert "slot_mapping" in str(report)
    assert len({difference.step for difference in report.differences}) == 1
    assert path.read_text().count('"step"') == follower.shadow.report().num_compared


def test_a_full_disk_is_said_once():
    engine = Engine(GROUPS, 1)
    follower, said = follower_of(engine, "full,record:/dev/full")
    run(engine, follower, 100)
    follower.close()
    assert [text for text in said if "recording of steps ended" in text] == said
    assert len(said) == 1
    assert follower.failure == ""


def test_the_report_is_kept_in_a_file(tmp_path):
    engine = Engine(GROUPS, 1)
    path = tmp_path / "report"
    follower, _ = follower_of(engine, f"full,report:{path}", title="an engine")
    run(engine, follower, 50, slot_off_by_one)
    assert path.read_text().startswith("foreword: an engine, check=full\n21 steps followed")
    follower.close()
    assert path.read_text().splitlines()[1].startswith("50 steps followed")


def test_embeddings_are_brought_to_float32_and_lists_kept_as_they_are():
    from foreword.vllm.follower import kept

    blocks = ([1, 2],)
    data = SimpleNamespace(block_ids=blocks, prompt_embeds=None, prefill_token_ids=None)
    cached = SimpleNamespace(new_block_ids=[None, ([3],)], all_token_ids={})
    output = SimpleNamespace(scheduled_new_reqs=[data], scheduled_cached_reqs=cached)
    assert kept(output, False) is output
    queued = kept(output, True)
    blocks[0].append(9)
    cached.new_block_ids[1][0].append(9)
    assert queued.scheduled_new_reqs[0].block_ids == ([1, 2],)
    assert queued.scheduled_cached_reqs.new_block_ids == [None, ([3],)]


def test_the_tokens_that_a_scheduler_was_told_as_placeholders_are_those_of_its_drafts():
    output = SimpleNamespace(
        num_scheduled_tokens={"a": 3, "b": 1, "c": 4, "d": 2},
        scheduled_spec_decode_tokens={"a": [-1, -1], "c": [5, 6, 7], "d": [-1]},
    )
    order = ["c", "a", "d", "b"]
    expected = []
    for rid in order:
        drafts = output.scheduled_spec_decode_tokens.get(rid, [])
        known = output.num_scheduled_tokens[rid] - len(drafts)
        expected += [False] * known + [token == -1 for token in drafts]
    assert placeholders_of(output, order).tolist() == expected


@pytest.mark.parametrize("told", [-1, 0])
def test_drafts_that_only_the_runner_knows_are_not_compared_and_other_tokens_are(told):
    states = RequestStates(
        max_num_reqs=2, max_model_len=16, vocab_size=50, kv_groups=[KVGroup(4)], max_num_draft_tokens=2
    )
    follower = Follower.of(
        states, CheckOptions("tensors"), max_num_batched_tokens=8, num_blocks=9, has_drafts=True, log=lambda _: None
    )
    step = follower.decide(decision(new=[("a", [3, 4])], counts={"a": 2}))
    follower.step(["a"], lambda: Values({"input_ids": np.array([3, 4])}))
    follower.commit(step, lambda: {"a": [5]})
    step = follower.decide(decision(known=[("a", 2, 1)], counts={"a": 3}, drafts={"a": [told, told]}))
    follower.step(["a"], lambda: Values({"input_ids": np.array([5, 8, 9])}))
    follower.commit(step, lambda: {"a": [8, 9, 1]})
    step = follower.decide(decision(known=[("a", 5, 4)], counts={"a": 1}))
    follower.step(["a"], lambda: Values({"input_ids": np.array([2])}))
    assert follower.failure == ""
    found = [(finding.step, finding.tensor, finding.count) for finding in follower.shadow.findings]
    assert found == [*([(2, "input_ids", 2)] if told == 0 else []), (3, "input_ids", 1)]


def decision(new=(), known=(), counts=None, drafts=None):
    """A SchedulerOutput: (request, prompt) that are new, (request, computed, outputs) that are known."""
    admitted = [
        SimpleNamespace(
            req_id=rid, prompt_token_ids=prompt, block_ids=[[1, 2, 3]], num_computed_tokens=0, mm_features=[],
            sampling_params=None, pooling_params=None, lora_request=None, prompt_embeds=None, prefill_token_ids=prompt,
        )
        for rid, prompt in new
    ]  # fmt: skip
    cached = SimpleNamespace(
        req_ids=[rid for rid, _, _ in known], resumed_req_ids=set(), new_token_ids=[], all_token_ids={},
        new_block_ids=[None for _ in known], num_computed_tokens=[computed for _, computed, _ in known],
        num_output_tokens=[outputs for _, _, outputs in known],
    )  # fmt: skip
    return SimpleNamespace(
        scheduled_new_reqs=admitted, scheduled_cached_reqs=cached, num_scheduled_tokens=counts,
        total_num_scheduled_tokens=sum(counts.values()), scheduled_spec_decode_tokens=drafts or {},
        finished_req_ids=set(), preempted_req_ids=None, scheduled_encoder_inputs={}, free_encoder_mm_hashes=[],
    )  # fmt: skip
