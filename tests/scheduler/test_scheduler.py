"""The decisions of the scheduler, on real rows and blocks, with a simulated model."""

import numpy as np
import pytest
from scheduler_rig import Rig

from foreword.batch import KVGroup, advance, prepare_inputs
from foreword.errors import ConfigError


@pytest.mark.smoke
def test_the_budget_is_shared_in_order_and_a_prompt_is_cut():
    rig = Rig(max_num_batched_tokens=10)
    for name, length in (("a", 3), ("b", 2), ("c", 8)):
        rig.add(name, length)
    assert rig.step() == {"a": 3, "b": 2, "c": 5}
    assert rig.step() == {"a": 1, "b": 1, "c": 3}
    assert rig.step() == {"a": 1, "b": 1, "c": 1}


def test_running_requests_go_before_waiting_ones():
    rig = Rig(max_num_batched_tokens=4)
    rig.add("a", 3)
    rig.step()
    rig.add("b", 6)
    assert rig.step() == {"a": 1, "b": 3}


def test_no_more_than_max_num_seqs_run():
    rig = Rig(max_num_seqs=2)
    for name in "abc":
        rig.add(name, 2, max_len=4)
    assert rig.step() == {"a": 2, "b": 2}
    assert rig.why("c") == "max_num_seqs running=2 limit=2"
    rig.step()
    assert rig.step() == {"c": 2}


def test_a_long_prompt_leaves_room_for_others():
    rig = Rig(long_prefill_threshold=6)
    rig.add("long", 30)
    rig.add("short", 3)
    assert rig.step() == {"long": 6, "short": 3}


def test_a_long_prompt_alone_is_not_held_back():
    rig = Rig(long_prefill_threshold=6)
    rig.add("long", 30)
    assert rig.step() == {"long": 30}


def test_without_chunks_a_prompt_waits_for_a_whole_budget_and_no_request_overtakes():
    rig = Rig(chunked_prefill=False, max_num_batched_tokens=64)
    rig.add("a", 40)
    rig.add("b", 30)
    rig.add("c", 2)
    assert rig.step() == {"a": 40}
    assert rig.why("b") == "token_budget left=24 need=30"
    assert rig.step() == {"a": 1, "b": 30, "c": 2}


def test_without_chunks_the_budget_must_hold_the_longest_prompt():
    with pytest.raises(ConfigError, match="raise it to that"):
        Rig(chunked_prefill=False, max_num_batched_tokens=32)


def test_a_prompt_whose_blocks_are_not_all_there_waits_although_a_chunk_would_fit():
    rig = Rig(blocks=17, max_num_batched_tokens=8)
    rig.add("a", 40)
    rig.add("b", 28)
    assert rig.step() == {"a": 8}
    rig.step()
    rig.states.num_tokens[0] = 0  # the row computes nothing more
    rig.states.num_tokens[0] = 40
    assert rig.why("b").startswith("token_budget")
    for _ in range(4):
        rig.step()
    assert rig.why("b") == "no_blocks need=7 free=5"


def test_the_victim_is_the_newest_and_no_request_is_admitted_in_that_step():
    rig = Rig(blocks=17, reserve_full_prompt=False)
    a, b = rig.add("a", 30), rig.add("b", 30)
    rig.step()
    rig.step()
    rig.add("c", 1)
    while not rig.plan.preempted:
        assert rig.plan.ledger.num_free_blocks >= 0
        rig.step()
    assert [r.request_id for r in rig.plan.preempted] == ["b"]
    assert (a.num_preemptions, b.num_preemptions) == (0, 1)
    assert rig.plan.admitted == ()
    assert rig.why("c") == "preemption"


def test_a_preempted_request_resumes_first_with_all_its_tokens():
    rig = Rig(blocks=17, M=48)
    rig.add("a", 30, max_len=36)
    b = rig.add("b", 25, max_len=40)
    while not b.num_preemptions:
        rig.step()
    known = len(b)
    assert known > 25
    rig.add("c", 1)
    while b.row < 0:
        rig.step()
    assert rig.plan.admitted[0].request_id == "b"
    assert rig.states.num_tokens[b.row] == known + 1
    assert rig.states.prompt_len[b.row] == 25
    assert rig.states.prefill_len[b.row] == known


def test_priority_admits_the_urgent_and_preempts_the_least_urgent():
    rig = Rig(policy="priority", max_num_seqs=1)
    rig.add("slow", 2, priority=5, max_len=3)
    rig.add("urgent", 2, priority=-1, max_len=3)
    assert rig.step() == {"urgent": 2}
    rig = Rig(policy="priority", blocks=17, reserve_full_prompt=False)
    rig.add("slow", 30, priority=5)
    rig.add("urgent", 30, priority=-1)
    while not rig.plan.preempted if hasattr(rig, "plan") else True:
        rig.step()
    assert [r.request_id for r in rig.plan.preempted] == ["slow"]


def test_shortest_first_admits_by_prompt_length():
    rig = Rig(policy="shortest-first", max_num_seqs=2)
    for name, length in (("a", 9), ("b", 3), ("c", 5)):
        rig.add(name, length)
    assert list(rig.step()) == ["b", "c"]


def test_equal_arrivals_make_equal_plans():
    def plans() -> list[dict[str, int]]:
        rig = Rig(blocks=20, reserve_full_prompt=False, max_num_batched_tokens=13)
        for i, length in enumerate([9, 30, 1, 17, 4, 4, 22]):
            rig.add(str(i), length, max_len=length + 9)
        return [rig.step() for _ in range(40)]

    assert plans() == plans()


def test_every_waiting_request_has_one_reason():
    rig = Rig(blocks=17, max_num_batched_tokens=64)
    rig.add("a", 40)
    rig.step()
    for name, length in (("b", 41), ("c", 2)):
        rig.add(name, length)
    assert rig.why("b") == "new"
    rig.step()
    assert {name: str(r) for name, r in rig.scheduler.reasons().items()} == {
        "b": "no_blocks need=11 free=5",
        "c": "behind request=b waits_for=(no_blocks need=11 free=5)",
    }
    assert rig.why("a") == "running"
    assert rig.why("unknown") == "unknown"


def test_the_watermark_holds_back_admissions_only_while_something_runs():
    rig = Rig(blocks=17, watermark=0.25, max_num_batched_tokens=64)
    rig.add("a", 40)
    rig.add("b", 16)
    assert rig.step() == {"a": 40}
    assert rig.why("b") == "no_blocks need=4 free=2"


def test_a_waiting_or_running_request_can_be_removed_at_any_time():
    rig = Rig(max_num_seqs=1)
    for name in "abc":
        rig.add(name, 5)
    rig.step()
    assert rig.scheduler.remove("b") is not None
    assert rig.scheduler.remove("a") is not None
    assert rig.scheduler.remove("a") is None
    assert rig.step() == {"c": 5}
    assert rig.scheduler.remove("c") is not None
    assert rig.cache.pool.num_used == 0
    assert not rig.scheduler.has_work


def test_a_pool_smaller_than_one_request_is_refused_with_what_would_work():
    with pytest.raises(ConfigError, match=r"needs 17, .* max_model_len=60"):
        Rig(blocks=16)
    Rig(blocks=17)


def test_a_window_needs_less_of_the_pool():
    window = [KVGroup(block_size=4, sliding_window=8)]
    Rig(blocks=12, groups=window, max_num_batched_tokens=32)
    with pytest.raises(ConfigError):
        Rig(blocks=11, groups=window, max_num_batched_tokens=32)


def test_a_request_may_refuse_the_cache():
    rig = Rig(cache={"prefix_caching": True})
    rig.add("a", 18, max_len=19)
    rig.step()
    rig.add("b", 18, reuse_prefix=False)
    assert rig.step() == {"b": 18}


def test_the_threshold_does_not_bind_while_no_other_request_can_be_admitted():
    rig = Rig(long_prefill_threshold=6, max_num_seqs=1)
    rig.add("long", 40)
    rig.add("short", 3)
    assert rig.step() == {"long": 32}
    assert rig.step() == {"long": 8}


SHARED = {"cache": {"prefix_caching": True}}


def test_a_prompt_that_begins_like_one_in_progress_waits_for_it():
    rig = Rig(**SHARED)
    rig.add("other", 6, first=50)
    rig.add("a", 18)
    rig.add("b", 22)  # begins like a
    rig.add("c", 5, first=60)
    assert rig.step() == {"other": 6, "a": 18}
    assert rig.why("b") == "prompt_of request=a"
    assert rig.why("c") == "behind request=b waits_for=(prompt_of request=a)"
    assert rig.step() == {"other": 1, "a": 1, "b": 4, "c": 5}  # 16 tokens in whole blocks, two more by copy


def test_a_prompt_in_progress_is_waited_for_as_long_as_it_is_shared():
    rig = Rig(max_num_batched_tokens=8, **SHARED)
    rig.add("a", 20)
    rig.add("b", 18, max_len=19)
    assert [rig.step() for _ in range(3)] == [{"a": 8}, {"a": 8}, {"a": 4, "b": 2}]  # 16 of its tokens were hit


def test_only_content_that_is_shared_is_waited_for():
    rig = Rig(**SHARED)
    rig.add("a", 9)
    rig.add("salted", 9, keys={0: (("salt", "x"),)})
    rig.add("refusing", 9, reuse_prefix=False)
    rig.add("short", 4)  # its only whole block ends with the token that is always computed
    assert rig.step() == {"a": 9, "salted": 9, "refusing": 9, "short": 4}


def test_a_prompt_in_progress_that_ends_early_is_not_waited_for():
    rig = Rig(max_num_batched_tokens=8, **SHARED)
    rig.add("a", 24)
    rig.add("b", 24)
    assert rig.step() == {"a": 8}
    rig.scheduler.remove("a")
    assert rig.step() == {"b": 8}
    assert rig.scheduler.running.request_in(rig.plan.rows[0]).num_cached == 8


def test_a_prompt_in_progress_leaves_with_others_of_the_same_content():
    rig = Rig(rows=4, **SHARED)
    for name in ("a", "b"):
        rig.add(name, 9, reuse_prefix=False)
    rig.add("c", 9)
    assert rig.step() == {"a": 9, "b": 9, "c": 9}
    for name in ("b", "a", "c"):
        rig.scheduler.remove(name)
    rig.add("d", 9)
    assert rig.step() == {"d": 1}


def test_chunks_beside_others_are_not_waited_for():
    rig = Rig(long_prefill_threshold=8, **SHARED)
    rig.add("a", 24)
    rig.add("b", 24)
    assert rig.step() == {"a": 8, "b": 8}


def test_a_step_planned_during_another_ends_the_repetition_of_a_plan():
    rig = Rig()
    rig.add("a", 1)
    rig.step()
    states, plans = rig.states, [rig.scheduler.schedule()]  # the block has room for two more steps like this one
    for i in range(4):
        batch = prepare_inputs(states, (plans[i].rows, plans[i].num_scheduled), rig.buffers)
        if i == 0:
            advance(states, batch)
            plans.append(rig.scheduler.schedule(plans[0]))
        states.commit(batch, np.array([7], np.int32))
        rig.scheduler.commit(plans[i])
        if i > 0:
            plans.append(rig.scheduler.schedule())
    assert states.num_computed_tokens[0] == 5
    assert states.block_tables[0].num_blocks[0] == 2
