"""Random load on small pools: the budget holds, nothing leaks, and every request finishes in the policy's order."""

from itertools import pairwise
from random import Random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from scheduler_rig import Rig

from foreword.batch import KVGroup
from foreword.scheduler import POLICIES

GROUPS = {
    "full": [KVGroup(block_size=4)],
    "window": [KVGroup(block_size=4, sliding_window=7)],
    "hybrid": [KVGroup(block_size=4), KVGroup(block_size=4, sliding_window=9)],
    "states": [KVGroup(block_size=4), KVGroup(block_size=2, recurrent=True), KVGroup(block_size=4, recurrent=True)],
}
M = 32


def check_blocks(rig: Rig) -> None:
    owners = np.zeros(rig.cache.pool.num_blocks, np.int32)
    for table in rig.states.block_tables:
        for row in rig.scheduler.running.rows:
            held = table.table[row, : table.num_blocks[row]]
            np.add.at(owners, held[held > 0], 1)
    assert owners.tolist() == rig.cache.pool.num_refs.tolist()


def random_spans(random: Random, length: int, longest: int) -> np.ndarray:
    """Spans of a prompt, some of them next to each other."""
    places = sorted({0, length, *(random.randint(0, length) for _ in range(4))})
    spans = [(a, b) for a, b in pairwise(places) if b - a <= longest and random.random() < 0.7]
    return np.array(spans, np.int32).reshape(-1, 2)


@given(
    st.lists(st.tuples(st.integers(1, M - 1), st.integers(1, 12), st.integers(0, 2), st.integers(0, 5)), min_size=1),
    st.sampled_from(sorted(GROUPS)),
    st.sampled_from(sorted(POLICIES)),
    st.integers(1, 40),
    st.integers(0, 12),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**32),
)
def test_every_request_finishes_and_nothing_leaks(
    arrivals, kind, policy, budget, threshold, reserve, caching, spanned, seed
):
    random = Random(seed)
    groups = GROUPS[kind]
    rig = Rig(
        blocks=1 + len(groups) * (M // 4 + 2) + random.randint(0, 12),
        rows=random.randint(1, 6),
        M=M,
        groups=groups,
        policy=policy,
        max_num_batched_tokens=budget,
        long_prefill_threshold=threshold,
        reserve_full_prompt=reserve,
        watermark=0.05,
        cache={"prefix_caching": caching},
    )
    pending = list(enumerate(arrivals))
    live: dict[str, object] = {}
    admitted: list[int] = []
    for _ in range(4000):
        if not pending and not rig.scheduler.has_work:
            break
        for _ in range(random.randint(0, 3) if len(pending) < 20 else len(pending)):
            if pending:
                i, (length, outputs, priority, first) = pending.pop(0)
                options = {
                    "max_len": min(M, length + outputs),
                    "priority": priority * (policy != "fcfs"),
                    "first": first,
                }
                if spanned:
                    options["spans"] = random_spans(random, length, budget)
                live[str(i)] = rig.add(str(i), length, **options)
        if live and random.random() < 0.1:
            rig.scheduler.remove(random.choice(sorted(live)))
        running_before = set(rig.scheduler.running.rows.tolist())
        named = rig.step()
        assert sum(named.values()) <= budget
        assert min(named.values(), default=1) >= 1
        assert len(rig.scheduler.running) <= rig.states.max_num_reqs
        for request_id in (name for name in named if name in live and name in rig.states):
            end = rig.states.num_computed_tokens[rig.states.row_of(request_id)]
            assert not any(first < end < last for first, last in live[request_id].spans)
        if rig.plan.preempted:
            assert not rig.plan.admitted
        if not running_before and len(rig.scheduler.waiting):
            assert rig.plan.admitted  # alone, the first one always fits
        admitted += [r.arrival for r in rig.plan.admitted if not r.num_preemptions]
        check_blocks(rig)
    assert not rig.scheduler.has_work
    assert rig.cache.pool.num_used == 0
    assert rig.cache.reset()
    if policy == "fcfs":
        assert admitted == sorted(admitted)


def test_a_decode_step_costs_no_python_per_request():
    """256 rows and 2 rows call the same number of Python functions."""
    import sys

    def calls(rows: int) -> int:
        rig = Rig(rows=rows, blocks=rows * 16 + 1, max_num_batched_tokens=rows * 5)
        for i in range(rows):
            rig.add(str(i), 4)
        rig.step()
        rig.step()
        count = 0

        def trace(frame, event, arg):
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(trace)
        try:
            rig.scheduler.schedule()
        finally:
            sys.setprofile(None)
        return count

    assert calls(256) == calls(2)
