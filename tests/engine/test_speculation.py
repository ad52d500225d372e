"""Speculation: the drafts of the lookup, their statistics, and outputs that do not change."""

import numpy as np
import pytest
from engine_rig import Guesser, OnStep, V, answer, make_engine, run
from hypothesis import given
from hypothesis import strategies as st
from oracle_model import START, OracleExecutor, following, logits_after, plain_output

from foreword.batch import KVGroup, NewRequest, RequestStates, SamplingParams
from foreword.engine import engine_config
from foreword.engine.build import build_engine, load
from foreword.engine.speculation import (
    DraftLengths,
    DraftModelDrafter,
    LookupDrafter,
    Speculation,
    SpeculationConfig,
    SpeculationStats,
    StepCosts,
)
from foreword.engine.speculation import lookup as lookup_module
from foreword.engine.speculation.adaptive import WORTH
from foreword.engine.speculation.costs import FIRST_CREDIT, LARGEST_RESERVE, LOSS
from foreword.errors import ConfigError
from foreword.executors import Capability
from foreword.native import available, native
from models.recorded import make


def states_with(sequences: list[tuple[list[int], list[int]]], D: int = 4) -> RequestStates:
    states = RequestStates(
        max_num_reqs=len(sequences), max_model_len=64, vocab_size=V, kv_groups=[KVGroup(64)], max_num_draft_tokens=D
    )
    for i, (prompt, output) in enumerate(sequences):
        states.add_request(NewRequest(str(i), prompt, [[i + 1]], output))
    return states


def plain_lookup(tokens: list[int], first: int, most: int, low: int, high: int) -> list[int]:
    best, at = 0, 0
    for j in range(1, len(tokens)):
        m = 0
        while m < high and j - m - 1 >= first and tokens[j - m - 1] == tokens[len(tokens) - m - 1]:
            m += 1
        if m >= best:
            best, at = m, j
    if best < low:
        return []
    repeated = list(tokens)
    for i in range(most):
        repeated.append(repeated[at + i])
    return repeated[len(tokens) :]


sequences = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=12), st.lists(st.integers(0, 2), max_size=10)),
    min_size=1,
    max_size=4,
)


@given(sequences, st.integers(1, 3), st.integers(0, 2), st.sampled_from(["ngram", "suffix"]), st.integers(0, 4))
def test_lookup_drafts_what_followed_the_best_match(work, low, more, method, most):
    states = states_with(work)
    config = SpeculationConfig(method=method, num_tokens=4, min_match=low, max_match=low + more)
    rows = np.array([states.row_of(str(i)) for i in range(len(work))], np.int32)
    wanted = [
        plain_lookup(prompt + output, len(prompt) if method == "suffix" else 0, most, low, low + more)
        for prompt, output in work
    ]
    padded = [drafts + [-1] * (4 - len(drafts)) for drafts in wanted]
    with pytest.MonkeyPatch.context() as patch:
        for is_native in (True, False):
            patch.setattr(lookup_module, "available", lambda is_native=is_native: is_native and available())
            drafter = LookupDrafter(states, config)
            assert drafter.propose(rows, np.full(len(work), most, np.int32)).tolist() == padded
            assert (drafter.match_lengths >= low).tolist() == [bool(drafts) for drafts in wanted]


def test_a_lookup_in_long_texts_finds_the_latest_of_the_longest_matches():
    tokens = np.random.default_rng(0).integers(0, 40, 5000).tolist()
    states = RequestStates(
        max_num_reqs=1, max_model_len=5008, vocab_size=V + 10, kv_groups=[KVGroup(64)], max_num_draft_tokens=4
    )
    states.add_request(NewRequest("a", tokens, [list(range(1, 80))]))
    drafter = LookupDrafter(states, SpeculationConfig(num_tokens=4, min_match=1, max_match=8))
    drafts = drafter.propose(np.array([0], np.int32), np.array([4], np.int32))
    assert drafts[0].tolist() == plain_lookup(tokens, 0, 4, 1, 8)


@pytest.mark.skipif(not available(), reason="the native module is not built")
@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"num_tokens": [9, 2]}, ValueError, "num_tokens: not a number of tokens of a row"),
        ({"num_tokens": [-1, 2]}, ValueError, "num_tokens: not a number of tokens of a row"),
        ({"num_tokens": [3]}, ValueError, "num_tokens: expected one per row"),
        ({"first": [-1, 0]}, ValueError, "first: below 0"),
        ({"rows": [0, 2]}, ValueError, "rows: there is no row 2"),
        ({"rows": [-1, 0]}, ValueError, "rows: there is no row -1"),
        ({"most": [4]}, TypeError, r"int32 \[n\]"),
        ({"lengths": 1}, TypeError, r"int32 \[n\]"),
        ({"drafts": 3}, TypeError, r"drafts \[n, width\]"),
        ({"min_match": 0}, ValueError, "1 <= min_match <= max_match"),
        ({"max_match": 1}, ValueError, "1 <= min_match <= max_match"),
        ({"token_ids": np.zeros((2, 16), np.int32)[:, ::2]}, ValueError, "must be one after another"),
        ({"token_ids": np.zeros((2, 8), np.int64)}, TypeError, "incompatible"),
    ],
)
def test_a_native_lookup_refuses_arrays_that_do_not_fit(changed, error, message):
    def look_up(token_ids, num_tokens, min_match, max_match, rows, first, most, drafts, lengths):
        ints = (np.array(values, np.int32) for values in (num_tokens, rows, first, most))
        known, rows, first, most = ints
        lookup = native.TokenLookup(token_ids, known, min_match, max_match)
        found = np.zeros((drafts, 4), np.int32)
        lookup.propose(rows, first, most, found, np.zeros(lengths, np.int32))
        return found.tolist()

    fitting = {
        "token_ids": np.array([[1, 2, 3, 1, 2, 0, 0, 0, 9], [4, 4, 0, 0, 0, 0, 0, 0, 9]], np.int32)[:, :8],
        "num_tokens": [5, 2],
        "min_match": 2,
        "max_match": 8,
        "rows": [0, 1],
        "first": [0, 0],
        "most": [4, 4],
        "drafts": 2,
        "lengths": 2,
    }
    assert look_up(**fitting) == [[3, 1, 2, 3], [-1] * 4]
    with pytest.raises(error, match=message):
        look_up(**fitting | changed)


def choose(lengths: DraftLengths, rows: list[int], offered: int = 8) -> list[int]:
    n = len(rows)
    return lengths.choose(np.array(rows, np.int32), np.full(n, offered, np.int32), np.zeros(n, np.int32)).tolist()


def test_drafts_that_are_right_get_longer_and_wrong_ones_end():
    lengths = DraftLengths(3, 8, adaptive=True)
    for row in range(3):
        lengths.start(row)
    chosen = [choose(lengths, [row]) for row in range(3)]
    assert chosen == chosen[:1] * 3
    rows = np.arange(2, dtype=np.int32)
    for _ in range(30):
        lengths.update(rows, np.zeros(2, np.int32), np.array([4, 4], np.int32), np.array([4, 0], np.int32))
    assert choose(lengths, [0]) == [8]
    assert choose(lengths, [1]) == [0]
    assert choose(lengths, [0], offered=3) == [3]
    assert choose(DraftLengths(1, 5, adaptive=False), [0]) == [5]


def test_a_new_row_begins_with_the_rate_of_the_rows_before_it():
    row, kind, drafts = np.zeros(1, np.int32), np.ones(1, np.int32), np.full(1, 4, np.int32)
    for accepted, longer in ((4, True), (0, False)):
        lengths = DraftLengths(2, 8, adaptive=True, rates=(0.5, 0.5))
        for _ in range(60):
            lengths.update(row, kind, drafts, np.array([accepted]))
        lengths.start(1)
        other = np.ones(1, np.int32)
        first, second = (lengths.choose(other, 2 * drafts, np.full(1, k, np.int32)).item() for k in (0, 1))
        assert (second > first) is longer


def test_nothing_is_drafted_without_credit_until_enough_steps_went_by():
    lengths = DraftLengths(1, 8, adaptive=True)
    assert choose(lengths, [0]) != [0]
    lengths.credit.add(-0.1 - FIRST_CREDIT)
    assert choose(lengths, [0]) == [0]
    for _ in range(200):
        lengths.credit.add(0.0)
    assert choose(lengths, [0]) != [0]


row_steps = st.tuples(st.integers(0, 6), st.integers(0, 6))  # offered drafts, and those that would be right


@given(
    st.integers(1, 3),
    st.lists(st.lists(row_steps, min_size=3, max_size=3), min_size=1, max_size=12),
    st.integers(1, 400),
    st.sets(st.integers(0, 399), max_size=4),
    st.floats(0.0, 60.0),
    st.floats(0.5, 4.0),
    st.sampled_from([0.0, 0.1]),
)
def test_drafts_cost_a_bounded_share_of_the_time_whichever_are_right(
    n, pattern, count, starts, overhead, saturated, relative_cost
):
    """The time of steps of n rows is compared with that of as many tokens without drafts, in steps."""
    costs = StepCosts(n * 7, overhead=overhead, saturated=saturated)
    lengths = DraftLengths(n, 6, adaptive=True, costs=costs, relative_cost=relative_cost)
    rows, kinds = np.arange(n, dtype=np.int32), np.zeros(n, np.int32)
    seconds = [max(overhead + tokens, saturated * tokens) for tokens in range(n * 7 + 1)]
    lost, since, before, most = 0.0, 0, 0.0, FIRST_CREDIT + LARGEST_RESERVE
    for t in range(count):
        if t in starts:
            lengths.start(0)
            since, before = t, lost
        offered, right = np.array(pattern[t % len(pattern)][:n], np.int32).T
        right = np.minimum(right, offered)
        chosen = lengths.choose(rows, offered, kinds)
        accepted, drafted = np.minimum(right, chosen), int(chosen.sum())
        lost += max(seconds[n + drafted] / seconds[n], 1.0) - 1 + relative_cost * drafted / n - accepted.sum() / n
        if drafted:
            lengths.update(rows, kinds, chosen, accepted)
            lengths.credit.add(lengths.gain(n, drafted, int(accepted.sum())))
        else:
            guessed = np.minimum(offered, 1)
            lengths.update(rows, kinds, guessed, np.minimum(right, guessed))
            lengths.credit.add_unverified((2 * int((right > 0).sum()) - int(guessed.sum())) / n)
        assert lost <= most + 2 * LOSS * (t + 1) + 1e-9
        assert lost - before <= most + 2 * LOSS * (t + 1 - since) + 1e-9


def test_drafts_that_become_right_are_verified_again_soon():
    lengths = DraftLengths(1, 6, adaptive=True)
    row, drafts, none = np.zeros(1, np.int32), np.full(1, 6, np.int32), np.zeros(1, np.int32)
    drafted = []
    for t in range(400):
        chosen = lengths.choose(row, drafts, row)
        drafted.append(count := int(chosen[0]))
        right = t % 200 >= 100  # two changes
        lengths.update(
            row, row, chosen if count else drafts // 6, (chosen if count else drafts // 6) if right else none
        )
        if count:
            lengths.credit.add(lengths.gain(1, count, count if right else 0))
        else:
            lengths.credit.add_unverified(1.0 if right else -1.0)
    assert not any(drafted[50:100])
    assert min(drafted[120:200]) > 0
    assert not any(drafted[250:300])
    assert min(drafted[320:]) > 0


@given(st.lists(st.integers(1, 40), min_size=200, max_size=300), st.integers(0, 1000))
def test_measured_steps_give_the_ratio_of_their_costs(sizes, seed):
    """However slow the machine is, which may change slowly."""
    rng, costs, slowness = np.random.default_rng(seed), StepCosts(64), 1.0
    known = lambda n: 3.0 + n**0.8 + 4.0 * (n > 16)  # noqa: E731
    for n in [*sizes, *sizes, *([8, 24] * 60)]:
        slowness *= np.exp(0.01 * rng.normal())
        costs.measure(n, slowness * known(n), follows=True)
    assert costs.relative(8, 16)[16] == pytest.approx(known(24) / known(8), rel=0.1)


def test_more_tokens_never_cost_less_whatever_was_measured():
    costs = StepCosts(16)
    for tokens, seconds in [(1, 3.0), (4, 1.0)] * 20:
        costs.measure(tokens, seconds, follows=True)
    assert costs.relative(1, 8).min() == 1.0


def test_steps_of_other_requests_are_not_compared():
    costs = StepCosts(64)
    before = costs.relative(1, 32).tolist()
    for n in (1, 5, 1, 5):
        costs.measure(n, 1.0 + n**3, follows=False)
    assert costs.relative(1, 32).tolist() == before


@given(
    st.lists(st.floats(0.05, 0.99), min_size=1, max_size=40),
    st.floats(0, 60),
    st.floats(1, 4),
    st.sampled_from([0.0, 0.1, 0.5]),
    st.floats(0.01, 3),
)
def test_the_chosen_drafts_yield_the_most_for_their_cost(rates, overhead, saturated, relative_cost, credit):
    n, most = len(rates), 6
    costs = StepCosts(n * (most + 1), overhead=overhead, saturated=saturated)
    lengths = DraftLengths(n, most, adaptive=True, costs=costs, relative_cost=relative_cost)
    lengths._accepted[:, 0], lengths._judged[:] = rates, 1.0
    lengths.credit.steps = credit

    def cost(drafts: int) -> float:
        seconds = [max(overhead + tokens, saturated * tokens) for tokens in (n, n + drafts)]
        return seconds[1] / seconds[0] + relative_cost * drafts / n

    chosen = choose(lengths, list(range(n)))
    gained = sum(a**j for a, k in zip(rates, chosen, strict=True) for j in range(1, k + 1))
    gains = sorted((a**j for a in rates for j in range(1, most + 1)), reverse=True)
    affordable = (k for k in range(len(gains) + 1) if cost(k) - 1 <= credit)
    best = max((n + sum(gains[:k])) / cost(k) for k in affordable)
    assert (n + gained) / cost(sum(chosen)) == pytest.approx(best if best >= WORTH * n else n)


def test_a_large_batch_verifies_nothing_that_may_be_wrong():
    rows = np.arange(64, dtype=np.int32)
    lengths = DraftLengths(64, 4, adaptive=True)
    for _ in range(30):
        lengths.update(rows, np.zeros(64, np.int32), np.full(64, 4), np.full(64, 3))
    assert choose(lengths, [0]) > [0]
    assert not any(choose(lengths, list(range(64))))
    assert (lengths.can_gain(1), lengths.can_gain(64)) == (True, False)


def test_guesses_are_judged_even_where_they_are_not_worth_verifying():
    """Nothing is drafted while the guesses are wrong; when they become right, drafts resume."""

    class Turning(Guesser):
        right = False

        def propose(self, rows, most):
            drafts = np.full((len(rows), 3), -1, np.int32)
            for i, row in enumerate(rows[most > 0].tolist()):
                truth = full[int(self.states.num_tokens[row]) - 3]
                drafts[i, 0] = truth if self.right else (truth + 1) % V
            return drafts

    params = SamplingParams(temperature=0.0, max_tokens=60)
    plain = make_engine()
    plain.add_request("a", [1, 2, 3], params)
    full = run(plain)["a"].outputs[0].token_ids
    config = SpeculationConfig(method="draft_model", model="x", num_tokens=3)
    engine = make_engine(speculation=config, drafter=Turning, clock=lambda: 0.0)  # steps have no measured cost
    engine.add_request("a", [1, 2, 3], params)
    stats, drafted = engine.speculation.stats, []
    while engine.has_work:
        before = stats.num_drafted
        done = engine.step()
        drafted.append(stats.num_drafted - before)
        engine.speculation.drafter.right = len(drafted) >= 25
    assert done[0].outputs[0].token_ids == full
    assert not any(drafted[15:25])
    assert any(drafted[30:])


def test_a_drafter_that_costs_nothing_follows_every_step():
    class Wrong(Guesser):
        def propose(self, rows, most):
            return np.full((len(rows), 3), V - 1, np.int32)

        def follow(self, batch, sampled, wanted):
            followed.append(wanted.tolist())

    followed = []
    engine = make_engine(speculation=SpeculationConfig(method="custom", num_tokens=3), drafter=Wrong)
    for name in "ab":
        engine.add_request(name, [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=30))
    run(engine)
    assert len(followed) > 25
    assert all(all(wanted) for wanted in followed)


@pytest.mark.skipif(not available(), reason="the native module is not built")
def test_native_code_chooses_and_learns_as_the_definition(monkeypatch):
    rng = np.random.default_rng(3)
    states = states_with([([1, 2, 3], [])] * 6)
    config = SpeculationConfig(num_tokens=4, step_overhead=30.0)
    fast = Speculation(states, config)
    monkeypatch.setattr("foreword.engine.speculation.adaptive.available", lambda: False)
    plain = Speculation(states, config)
    assert fast._policy is not None
    assert plain._policy is None
    num_chosen = 0
    for _ in range(300):
        rows = rng.permutation(6)[: rng.integers(1, 7)].astype(np.int32)
        counts, kinds = rng.integers(0, 5, len(rows)), rng.integers(0, 4, len(rows)).astype(np.int32)
        offered = np.where(np.arange(4) < counts[:, None], rng.integers(0, V, (len(rows), 4)), -1).astype(np.int32)
        assert fast._policy.can_gain(len(rows)) == plain.lengths.can_gain(len(rows))
        plain.lengths.credit.steps = credit = rng.uniform(0.1, 2.0)
        chosen = plain.lengths.choose(rows, (offered >= 0).sum(1, dtype=np.int32), kinds)
        drafts = offered.copy()
        assert fast._policy.choose(rows, drafts, kinds, credit) == bool(chosen.any())
        assert (drafts == np.where(np.arange(4) < chosen[:, None], offered, -1)).all()
        assert (fast.lengths._lengths[rows] == chosen).all()
        num_chosen += int(chosen.sum())
        for one in (fast, plain):
            one._kind[rows], one._guess[rows] = kinds, offered[:, 0]
        sampled = np.full((len(rows), 5), -1, np.int32)
        for i, row in enumerate(drafts):  # tokens until one that is not the draft
            right = int(rng.integers(0, (row >= 0).sum() + 1))
            sampled[i, : right + 1] = [*row[:right], offered[i, 0] if rng.random() < 0.4 else V - 1]
        verified = drafts if drafts.max() >= 0 else None
        found = [fast._policy.judge(rows, sampled, verified, fast._guess, fast._kind)]
        found.append(plain._judge(rows, sampled, verified))
        assert found[0] == found[1]
        for name in ("_accepted", "_judged", "_all"):
            np.testing.assert_allclose(getattr(fast.lengths, name), getattr(plain.lengths, name), rtol=1e-12)
    assert num_chosen > 100
    assert fast.stats.num_drafted_at.tolist() == plain.stats.num_drafted_at.tolist()
    assert fast.stats.num_accepted_at.tolist() == plain.stats.num_accepted_at.tolist()


@pytest.mark.skipif(not available(), reason="the native module is not built")
def test_the_native_choice_refuses_arrays_that_do_not_fit_together():
    def ints(*values: int) -> np.ndarray:
        return np.array(values, np.int32)

    policy = Speculation(states_with([([1, 2, 3], [])] * 2), SpeculationConfig(num_tokens=4))._policy
    assert policy is not None
    rows, drafts, kinds = ints(0, 1), np.ones((2, 4), np.int32), ints(0, 3)
    for arguments, error in (
        ((ints(0, 2), drafts, kinds), ValueError),
        ((ints(0, -1), drafts, kinds), ValueError),
        ((rows, drafts, ints(0, 4)), ValueError),
        ((rows, drafts[:1].copy(), kinds), TypeError),
        ((rows, drafts, np.zeros((2, 0), np.int32)), TypeError),
        ((rows, drafts.astype(np.int64), kinds), TypeError),
        ((rows.astype(np.int64), drafts, kinds), TypeError),
    ):
        with pytest.raises(error):
            policy.choose(*arguments, 1.0)
        sampled, (judged, tokens, kind) = np.ones((2, 5), np.int32), arguments
        with pytest.raises(error):
            policy.judge(judged, sampled, tokens, ints(1, 1), kind)
    of_no_width = np.zeros((2, 0), np.int32)
    for sampled, guess in ((of_no_width, ints(1, 1)), (np.ones((2, 1), np.int32), of_no_width)):
        with pytest.raises(TypeError):
            policy.judge(rows, sampled, None, guess, kinds)
    for num_rows in (0, 3, 1 << 40):
        with pytest.raises(ValueError, match="more tokens than costs"):
            policy.can_gain(num_rows)


def test_statistics_count_by_position():
    stats = SpeculationStats.empty(3)
    stats.add_places(np.array([3, 2, 0]), np.array([1, 2, 0]))
    stats.count(2, 5, 3)
    assert stats.num_drafted_at.tolist() == [2, 2, 1]
    assert stats.num_accepted_at.tolist() == [2, 1, 0]
    assert stats.acceptance_rate == pytest.approx(0.6)
    assert stats.mean_tokens_per_step == 2.5


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_draft_model_equal_to_the_target_is_always_right(temperature: float):
    """It draws with the target's noise, so that even its samples are the target's."""
    groups = [KVGroup(4)]

    def drafter(states):
        executor = OracleExecutor(V, groups, 80)
        return DraftModelDrafter(
            states, executor, kv_groups=groups, num_blocks=80, max_num_batched_tokens=16, relative_cost=0.1
        )

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


class Uncertain(OracleExecutor):
    """A draft model that is right two times of three."""

    def logits_after(self, prefixes):
        return super().logits_after(np.where(prefixes % np.uint64(3), prefixes, prefixes + np.uint64(1)))


def uncertain_output(tokens: list[int], length: int) -> list[int]:
    prefix = START
    for token in tokens:
        prefix = following(prefix, token)
    out: list[int] = []
    while len(out) < length:
        out.append(int(logits_after(prefix if prefix % 3 else prefix + 1, V).argmax()))
        prefix = following(prefix, out[-1])
    return out


@pytest.mark.parametrize("groups", [[KVGroup(4)], [KVGroup(4), KVGroup(4, recurrent=True), KVGroup(2, recurrent=True)]])
@pytest.mark.parametrize("adaptive", [False, True])
def test_a_draft_model_drafts_what_it_says_after_the_known_tokens_whatever_was_rejected(groups, adaptive):
    """Other steps had no drafts, so that the tokens after rejected ones were not followed."""
    proposed = []

    class Recorded(DraftModelDrafter):
        def propose(self, rows, most):
            if len(proposed) % 4 == 2:
                most = np.zeros_like(most)
            drafts = super().propose(rows, most)
            texts = [self.target.token_ids[row, : self.target.num_tokens[row]].tolist() for row in rows]
            proposed.append(
                [(text, [d for d in got if d >= 0]) for text, got in zip(texts, drafts.tolist(), strict=True)]
            )
            return drafts

    def drafter(states):
        return Recorded(
            states,
            Uncertain(V, groups, 80),
            kv_groups=groups,
            num_blocks=80,
            max_num_batched_tokens=16,
            relative_cost=0.1,
        )

    config = SpeculationConfig(method="draft_model", model="x", num_tokens=4, adaptive=adaptive)
    engine = make_engine(speculation=config, drafter=drafter, blocks=150, groups=groups, clock=lambda: 0.0)
    for i in range(3):
        engine.add_request(str(i), list(range(1, 9 + i)), SamplingParams(temperature=0.0, max_tokens=30))
    for name, output in run(engine).items():
        assert output.outputs[0].token_ids == plain_output(
            list(range(1, 9 + int(name))), lambda logits, position: logits.argmax(), 30, V
        )
    found = [(text, drafts) for step in proposed for text, drafts in step if drafts]
    assert len(found) > 20
    assert all(drafts == uncertain_output(text, len(drafts)) for text, drafts in found)
    assert 0 < engine.speculation.stats.num_accepted < engine.speculation.stats.num_drafted


def test_a_draft_model_whose_executor_keeps_no_states_after_drafts_is_refused():
    class Plain(OracleExecutor):
        capabilities = OracleExecutor.capabilities - {Capability.DRAFTED_STATES}

    groups = [KVGroup(4, recurrent=True)]
    states = RequestStates(max_num_reqs=2, max_model_len=8, vocab_size=30, kv_groups=[KVGroup(4)])
    sizes = {"num_blocks": 8, "max_num_batched_tokens": 8, "relative_cost": 0.1}
    with pytest.raises(ConfigError, match=r"draft model .* Plain cannot restore .*DRAFTED_STATES"):
        DraftModelDrafter(states, Plain(30, groups, 8), kv_groups=groups, **sizes)


def test_a_draft_model_without_room_drafts_nothing_and_changes_nothing():
    groups = [KVGroup(4)]

    def drafter(states):
        return DraftModelDrafter(
            states,
            OracleExecutor(V, groups, 5),
            kv_groups=groups,
            num_blocks=5,
            max_num_batched_tokens=16,
            relative_cost=0.1,
        )

    config = SpeculationConfig(method="draft_model", model="x", adaptive=False)
    engine = make_engine(speculation=config, drafter=drafter)
    plain = make_engine()
    for e in (engine, plain):
        for i in range(4):
            e.add_request(str(i), [1, 2, 3, 4 + i], SamplingParams(seed=i, max_tokens=15))
    wanted = {i: o.outputs[0].token_ids for i, o in run(plain).items()}
    assert {i: o.outputs[0].token_ids for i, o in run(engine).items()} == wanted
    assert engine.speculation.stats.num_drafted > 0


def test_lookup_takes_fewer_steps_where_the_output_repeats_the_prompt():
    """With a strong bias the model walks a cycle, which the lookup predicts."""
    params = SamplingParams(temperature=0.0, max_tokens=40, allowed_token_ids=[5])
    steps = []
    for speculation in ("off", SpeculationConfig(num_tokens=4, adaptive=False)):
        engine = make_engine(speculation=speculation)
        engine.add_request("a", [5] * 6, params)
        assert run(engine)["a"].outputs[0].token_ids == [5] * 40
        steps.append(engine.executor.num_steps)
    assert steps == [40, 9]


@pytest.mark.parametrize(
    ("settings", "speculates", "method"),
    [
        ({}, True, "ngram"),
        ({}, False, None),
        ({"async_scheduling": True}, True, None),
        ({"speculation": "off"}, True, None),
        ({"speculation": "suffix", "async_scheduling": True}, False, "suffix"),
        ({"speculation_num_tokens": 3}, True, "ngram"),
        ({"speculation_num_tokens": 8}, False, None),  # the default value
    ],
)
def test_the_default_drafts_where_the_executor_allows_it_and_other_settings_are_followed(settings, speculates, method):
    found = engine_config(settings).resolved(never_drafts=None if speculates else "of a reason").speculation
    assert (found and found.method) == method
    assert found is None or found.num_tokens == settings.get("speculation_num_tokens", 8)


@pytest.mark.parametrize(
    ("family", "executor", "settings", "reason"),
    [
        ("llama3", "numpy", {"speculation_num_tokens": 3}, "num_tokens=3: .* because executor='numpy' does not spec"),
        (
            "llama3",
            "native",
            {"speculation_adaptive": False, "async_scheduling": True},
            "adaptive=False: .*async_sched",
        ),
        ("qwen3_5", "native", {"speculation_min_match": 1}, "min_match=1: .* because the model has recurrent layers"),
    ],
)
@pytest.mark.skipif(not available(), reason="the native module is not built")
def test_settings_of_speculation_are_refused_where_the_default_means_none(tmp_path, family, executor, settings, reason):
    model = load(str(make(tmp_path, family)), executor)
    with pytest.raises(ConfigError, match=rf"^speculation_{reason}.*; give speculation='ngram', or leave it out$"):
        build_engine(model, engine_config({"max_model_len": 64, **settings}))
    model.configured(engine_config({"max_model_len": 64, "speculation": "ngram", **settings}))


@pytest.mark.parametrize("name", ["llama3", "qwen3_5"])
@pytest.mark.skipif(not available(), reason="the native module is not built")
def test_the_default_of_native_models_drafts_and_changes_no_token(tmp_path, name):
    """Whatever sampling, penalties and log-probabilities requests of a batch have. Models with recurrent layers have no
    drafts by default, because each takes a block of the pool.
    """
    asked = [
        SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=40, allowed_token_ids=[5, 6], logprobs=2, ignore_eos=True),
        SamplingParams(temperature=0.9, seed=3, max_tokens=30, allowed_token_ids=[5, 6, 7], ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=30, repetition_penalty=1.3, presence_penalty=0.2, ignore_eos=True),
    ]
    model = load(str(make(tmp_path, name)), "native")

    def served(**options):
        engine = build_engine(model, engine_config({"max_model_len": 64, "block_size": 4, **options}))
        for i, params in enumerate(asked):
            engine.add_request(str(i), [5, 6, 7, 5, 6, 7, 5, 6 + i], params)
        outputs = run(engine)
        engine.close()
        completions = [outputs[str(i)].outputs[0] for i in range(len(asked))]
        return [(c.token_ids, c.logprobs) for c in completions], engine, outputs

    want, plain, _ = served(speculation="off")
    got, engine, outputs = served()
    assert got == want
    assert plain.speculation is None
    if name == "qwen3_5":
        assert engine.speculation is None
        return
    stats = engine.speculation.stats
    assert 0 < stats.num_accepted <= stats.num_drafted
    assert sum(output.metrics.num_accepted_drafts for output in outputs.values()) == stats.num_accepted


def test_drafts_of_requests_add_up_to_those_of_the_engine_when_preempted_ones_return_to_other_rows():
    config = SpeculationConfig(num_tokens=4, min_match=1, adaptive=False)
    engine = make_engine(blocks=11, M=40, speculation=config, prefix_caching=False)
    asked = {0: [("x", [2] * 11, 12), ("y", [3] * 11, 27)], 6: [("z", [1] * 5, 27)]}
    outputs, step = {}, 0
    while asked or engine.has_work:
        for name, prompt, most in asked.pop(step, ()):
            engine.add_request(
                name, prompt, SamplingParams(temperature=0.0, max_tokens=most, allowed_token_ids=prompt[:1])
            )
        outputs |= {output.request_id: output for output in engine.step() if output.finished}
        step += 1
    metrics = [output.metrics for output in outputs.values()]
    assert sum(each.num_preemptions for each in metrics) > 0
    stats = engine.speculation.stats
    assert sum(each.num_proposed_drafts for each in metrics) == stats.num_drafted
    assert sum(each.num_accepted_drafts for each in metrics) == stats.num_accepted


@pytest.mark.parametrize(
    ("ending", "num_tokens", "num_accepted"),
    [
        ({"stop": ["eeee"]}, 4, 3),  # the first token is of the prompt's step
        ({"stop": ["ee"], "min_tokens": 3}, 3, 2),
        ({"max_tokens": 6}, 6, 4),  # the last token follows the drafts
    ],
)
def test_drafts_beyond_the_end_of_a_completion_do_not_count_as_accepted(ending, num_tokens, num_accepted):
    params = SamplingParams(temperature=0.0, allowed_token_ids=[5], **{"max_tokens": 30, **ending})
    output = answer([5] * 8, params, speculation=SpeculationConfig(num_tokens=8, min_match=1, adaptive=False))
    assert len(output.outputs[0].token_ids) == num_tokens
    assert output.metrics.num_accepted_drafts == num_accepted


def test_drafts_are_dropped_before_a_request_is_preempted():
    """The pool holds both requests to their ends, but not a block for a guess past them."""
    config = SpeculationConfig(method="draft_model", model="guesser", num_tokens=8, adaptive=False)
    engine = make_engine(blocks=1 + 6, M=22, speculation=config, drafter=Guesser, prefix_caching=False)
    for i in range(2):
        engine.add_request(str(i), [1 + i] * 6, SamplingParams(temperature=0.0, max_tokens=5 + 9 * i))
    steps = []
    note = lambda plan, batch: steps.append((plan.draft_tokens is None, len(plan.preempted)))  # noqa: E731
    engine.observers.add(OnStep(note))
    run(engine)
    assert (True, 0) in steps[1:]
    assert all(preempted == 0 for _, preempted in steps)


def test_settings_that_cannot_work_are_refused():
    with pytest.raises(ConfigError, match="draft_model"):
        SpeculationConfig(method="draft_model")
    with pytest.raises(ConfigError, match="min_match"):
        SpeculationConfig(min_match=5, max_match=4)
    with pytest.raises(ConfigError, match="drafter"):
        make_engine(speculation=SpeculationConfig(method="draft_model", model="x"))
