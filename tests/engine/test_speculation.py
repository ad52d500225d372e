"""Speculation: the drafts of the lookup, what is learnt, and outputs that do not change."""

from __future__ import annotations

import numpy as np
import pytest
from engine_rig import Guesser, V, make_engine, run
from hypothesis import given
from hypothesis import strategies as st
from oracle_model import OracleExecutor

from foreword.batch import KVGroup, NewRequest, RequestStates, SamplingParams
from foreword.engine.speculation import (
    DraftLengths,
    DraftModelDrafter,
    LookupDrafter,
    SpeculationConfig,
    SpeculationStats,
)
from foreword.errors import ConfigError


def states_with(sequences: list[tuple[list[int], list[int]]], D: int = 4) -> RequestStates:
    states = RequestStates(
        max_num_reqs=len(sequences), max_model_len=64, vocab_size=V, kv_groups=[KVGroup(64)], max_num_draft_tokens=D
    )
    for i, (prompt, output) in enumerate(sequences):
        states.add_request(NewRequest(str(i), prompt, [[i + 1]], output))
    return states


def plain_lookup(tokens: list[int], first: int, most: int, low: int, high: int) -> list[int]:
    best, at = (-1, 0), 0
    for j in range(1, len(tokens)):
        m = 0
        while m < high and j - m - 1 >= first and tokens[j - m - 1] == tokens[len(tokens) - m - 1]:
            m += 1
        if (m, min(len(tokens) - j, most)) >= best:
            best, at = (m, min(len(tokens) - j, most)), j
    return tokens[at : at + most] if best[0] >= low else []


sequences = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=12), st.lists(st.integers(0, 2), max_size=10)),
    min_size=1,
    max_size=4,
)


@given(sequences, st.integers(1, 3), st.integers(0, 2), st.sampled_from(["ngram", "suffix"]), st.integers(0, 4))
def test_lookup_drafts_what_followed_the_best_match(work, low, more, method, most):
    states = states_with(work)
    config = SpeculationConfig(method=method, min_match=low, max_match=low + more)
    rows = np.array([states.row_of(str(i)) for i in range(len(work))], np.int32)
    got = LookupDrafter(states, config).propose(rows, np.full(len(work), most, np.int32))
    for (prompt, output), drafts in zip(work, got.tolist(), strict=True):
        first = len(prompt) if method == "suffix" else 0
        wanted = plain_lookup(prompt + output, first, most, low, low + more)
        assert [d for d in drafts if d >= 0] == wanted
        assert drafts == wanted + [-1] * (4 - len(wanted))


def test_draft_lengths_grow_with_success_and_shrink_to_what_was_accepted():
    lengths = DraftLengths(3, 8, adaptive=True)
    rows = np.arange(3, dtype=np.int32)
    lengths.update(rows, np.array([8, 8, 0]), np.array([0, 3, 0]))
    assert lengths[rows].tolist() == [1, 4, 8]
    lengths.update(rows, np.array([1, 4, 0]), np.array([1, 4, 0]))
    assert lengths[rows].tolist() == [2, 8, 8]
    lengths.start(0)
    assert lengths[rows].tolist() == [8, 8, 8]


def test_statistics_count_by_place():
    stats = SpeculationStats.empty(3)
    stats.add(np.array([3, 2, 0]), np.array([1, 2, 0]))
    assert stats.num_drafted_at.tolist() == [2, 2, 1]
    assert stats.num_accepted_at.tolist() == [2, 1, 0]
    assert stats.acceptance_rate == pytest.approx(0.6)
    assert stats.mean_tokens_per_step == 2.5


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_draft_model_equal_to_the_target_is_always_right(temperature: float):
    """It draws with the target's own noise, so that even its samples are the target's."""
    groups = [KVGroup(4)]

    def drafter(states):
        executor = OracleExecutor(V, groups, 80)
        return DraftModelDrafter(states, executor, kv_groups=groups, num_blocks=80, max_num_batched_tokens=16)

    def outputs(**config):
        engine = make_engine(max_num_batched_tokens=64, **config)
        for i in range(3):
            engine.add_request(
                str(i), list(range(1, 9 + i)), SamplingParams(temperature=temperature, seed=i, max_tokens=21)
            )
        return engine, {i: o.outputs[0].token_ids for i, o in run(engine).items()}

    config = SpeculationConfig(method="draft_model", model="x", num_tokens=4, adaptive=False)
    engine, with_drafts = outputs(speculation=config, drafter=drafter)
    _, without = outputs()
    assert with_drafts == without
    assert engine.speculation.stats.acceptance_rate == 1.0
    assert engine.executor.num_steps < 10


def test_a_draft_model_without_room_drafts_nothing_and_harms_nobody():
    groups = [KVGroup(4)]

    def drafter(states):
        return DraftModelDrafter(
            states, OracleExecutor(V, groups, 5), kv_groups=groups, num_blocks=5, max_num_batched_tokens=16
        )

    config = SpeculationConfig(method="draft_model", model="x")
    engine = make_engine(speculation=config, drafter=drafter)
    plain = make_engine()
    for e in (engine, plain):
        for i in range(4):
            e.add_request(str(i), [1, 2, 3, 4 + i], SamplingParams(seed=i, max_tokens=15))
    wanted = {i: o.outputs[0].token_ids for i, o in run(plain).items()}
    assert {i: o.outputs[0].token_ids for i, o in run(engine).items()} == wanted
    assert engine.speculation.stats.num_drafted > 0


def test_lookup_takes_fewer_steps_where_the_output_repeats_the_prompt():
    """With a strong bias the model walks a cycle, which the lookup foresees."""
    params = SamplingParams(temperature=0.0, max_tokens=40, allowed_token_ids=[5])
    steps = []
    for speculation in (None, SpeculationConfig()):
        engine = make_engine(speculation=speculation)
        engine.add_request("a", [5] * 6, params)
        assert run(engine)["a"].outputs[0].token_ids == [5] * 40
        steps.append(engine.executor.num_steps)
    assert steps == [40, 9]


def test_drafts_are_dropped_before_somebody_loses_blocks():
    """The pool holds both requests to their ends, but not a block for a guess past them."""
    config = SpeculationConfig(method="draft_model", model="guesser", num_tokens=8, adaptive=False)
    engine = make_engine(blocks=1 + 6, M=22, speculation=config, drafter=Guesser, prefix_caching=False)
    for i in range(2):
        engine.add_request(str(i), [1 + i] * 6, SamplingParams(temperature=0.0, max_tokens=5 + 9 * i))
    steps = []
    engine.on_step = lambda plan, batch: steps.append((plan.draft_tokens is None, len(plan.preempted)))
    run(engine)
    assert (True, 0) in steps[1:]
    assert all(preempted == 0 for _, preempted in steps)


def test_settings_that_cannot_work_are_refused():
    with pytest.raises(ConfigError, match="draft_model"):
        SpeculationConfig(method="draft_model")
    with pytest.raises(ConfigError, match="num_tokens"):
        SpeculationConfig(num_tokens=0)
    with pytest.raises(ConfigError, match="min_match"):
        SpeculationConfig(min_match=5, max_match=4)
    with pytest.raises(ConfigError, match="drafter"):
        make_engine(speculation=SpeculationConfig(method="draft_model", model="x"))
