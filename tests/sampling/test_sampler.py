"""The sampler on real batches."""

import math
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sampling_rig import Rig, V, logits, tokens_of

from foreword.batch import SamplingParams
from foreword.native import available
from foreword.sampling import token_logprobs
from foreword.sampling.reference import StepArrays


def test_temperature_zero_is_the_argmax_and_the_lowest_id_wins():
    z = np.zeros((1, V), np.float32)
    z[0, [7, 9]] = 3
    assert Rig(SamplingParams(temperature=0.0)).draw(z).token_ids.tolist() == [7]


def test_the_logits_are_not_changed():
    z = logits(1)
    before = z.copy()
    Rig(SamplingParams(logit_bias={3: 9.0}, repetition_penalty=2.0, logprobs=2)).draw(z)
    assert (z == before).all()


def test_penalties_are_those_of_the_definition():
    prompt, output = (1, 2, 3), (4, 4, 5)
    z = logits(1, 3)
    p = SamplingParams(temperature=0.0, repetition_penalty=1.7, frequency_penalty=0.6, presence_penalty=0.9)
    expected = z[0].astype(np.float64)
    for t in {*prompt, *output}:
        expected[t] = expected[t] / 1.7 if expected[t] > 0 else expected[t] * 1.7
    for t in set(output):
        expected[t] -= 0.6 * output.count(t) + 0.9
    rig = Rig(p, prompt=prompt, output=output)
    batch = rig.batch()
    rules = rig.sampling(batch).rules
    got = np.empty_like(z)
    step = StepArrays(
        z, batch.idx_mapping, batch.num_computed_tokens, batch.cu_num_logits, np.array([6]), batch.draft_token_ids,
        None, None, None,
    )  # fmt: skip
    rules.core.change(*step, np.array([0], np.int32), got, None)
    np.testing.assert_allclose(got[0], expected, rtol=1e-5)
    assert rig.draw(z).token_ids.tolist() == [int(expected.argmax())]


def test_a_rule_that_forbids_everything_is_not_applied():
    p = SamplingParams(temperature=0.0, allowed_token_ids=[0], min_tokens=5)
    assert Rig(p).draw(logits()).token_ids.tolist() == [0]
    for temperature in (0.0, 1.0):
        nothing = SamplingParams(temperature=temperature, seed=1, logit_bias=dict.fromkeys(range(V), -math.inf))
        free = SamplingParams(temperature=temperature, seed=1)
        drawn = Rig(nothing, free).draw(np.repeat(logits(), 2, 0)).token_ids
        assert drawn[0] == drawn[1]


def test_logprobs_are_of_the_models_own_logits():
    z = logits(1, 5)
    out = Rig(SamplingParams(temperature=0.0, logprobs=3, logit_bias={42: 100.0})).draw(z)
    p = z[0].astype(np.float64) - np.log(np.exp(z[0].astype(np.float64)).sum())
    (entry,) = out.logprobs[0]
    assert next(iter(entry)) == 42
    assert entry[42].logprob == pytest.approx(p[42], abs=1e-6)
    order = np.argsort(-p).tolist()
    assert entry[42].rank == order.index(42) + 1
    assert set(order[:3]) <= set(entry)


def test_equal_tokens_share_a_rank_and_the_lower_id_is_listed():
    entry = token_logprobs(np.zeros(5, np.float32), 3, 2)
    assert list(entry) == [3, 0, 1]
    assert {e.rank for e in entry.values()} == {1}


def test_log_probabilities_are_values():
    entry = token_logprobs(logits(1, 5)[0], 3, 2)
    chosen = entry.chosen
    assert chosen == entry[3] == next(iter(entry.values()))
    assert entry.chosen == chosen
    copied = pickle.loads(pickle.dumps(entry))
    assert copied == entry == dict(entry)
    assert repr(copied) == repr(dict(entry))


# -- against the definition, on all combinations of parameters


@st.composite
def some_params(draw: st.DrawFn) -> SamplingParams:
    def maybe(value, otherwise):
        return draw(st.one_of(st.just(otherwise), value))

    token = st.integers(0, V - 1)
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.3, 1.0, 2.5])),
        top_k=draw(st.sampled_from([0, 1, 3, 20])),
        top_p=draw(st.sampled_from([1.0, 0.95, 0.5, 0.05])),
        min_p=draw(st.sampled_from([0.0, 0.02, 0.4])),
        typical_p=draw(st.sampled_from([1.0, 1.0, 0.93, 0.41])),
        top_n_sigma=draw(st.sampled_from([0.0, 0.0, -1.0, 0.7, 1.9])),
        xtc_probability=draw(st.sampled_from([0.0, 0.0, 0.5, 1.0])),
        xtc_threshold=draw(st.sampled_from([0.0, 0.013, 0.11, 0.5, 0.7])),
        dry_multiplier=draw(st.sampled_from([0.0, 0.0, 0.8, 3.0])),
        dry_base=draw(st.sampled_from([1.0, 1.75, 900.0])),
        dry_allowed_length=draw(st.integers(1, 3)),
        dry_range=draw(st.sampled_from([-1, 0, 3, 5])),
        dry_breaker_token_ids=maybe(st.lists(token, max_size=2), ()),
        presence_penalty=maybe(st.just(0.9), 0.0),
        frequency_penalty=maybe(st.just(-0.6), 0.0),
        repetition_penalty=maybe(st.sampled_from([0.7, 1.6]), 1.0),
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
        min_tokens=maybe(st.integers(0, 6), 0),
        ignore_eos=draw(st.booleans()),
        stop_token_ids=maybe(st.lists(token, max_size=3), ()),
        allowed_token_ids=maybe(st.lists(token, min_size=1, max_size=25), None),
        logit_bias=maybe(st.dictionaries(token, st.sampled_from([-math.inf, -5.0, 3.0, 8.0]), max_size=4), None),
        bad_words_token_ids=maybe(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3), max_size=5), ()),
        logprobs=maybe(st.just(2), None),
        max_tokens=None,
    )


@st.composite
def scenes(draw: st.DrawFn):
    """Requests (parameters, prompt, output, drafts), some of which are prompt chunks that are not the last."""
    token = st.integers(0, 4)  # few, so that penalties, repetitions and bad words apply
    requests = []
    for _ in range(draw(st.integers(1, 5))):
        prompt = draw(st.lists(token, min_size=2, max_size=9))
        output = draw(st.lists(token, max_size=4))
        is_chunk = draw(st.integers(0, 4)) == 0
        wrong = [] if is_chunk else draw(st.lists(token, max_size=3))
        requests.append((draw(some_params()), prompt, output, wrong, is_chunk, draw(st.integers(0, 3))))
    return requests, draw(st.integers(0, 2**31))


@pytest.mark.parametrize("is_native", [available(), False])
@given(scenes())
def test_drawn_tokens_are_those_of_the_definition(is_native: bool, scene):
    requests, seed = scene
    z = logits(25, seed)
    if seed % 3 == 0:
        z[:, 25:] = -np.inf
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("foreword.sampling.row_rules.available", lambda: is_native)
        rig, counts, drafts, wanted, start = Rig(drafts=4), {}, {}, {}, 0
        for i, (params, prompt, output, wrong, is_chunk, right) in enumerate(requests):
            name, known = str(i), len(prompt) + len(output)
            rig.add(name, params, prompt, output, 0 if is_chunk else known - 1)
            counts[name] = 1
            if not is_chunk:
                given_drafts: list[int] = []  # some that will be drawn, then some others
                while len(given_drafts) < min(right, 4 - len(wrong)):
                    rows = z[start : start + len(given_drafts) + 1]
                    given_drafts = tokens_of(rows, params, prompt, output, given_drafts)
                drafts[name] = given_drafts + wrong
                counts[name] += len(drafts[name])
                wanted[i] = tokens_of(z[start : start + counts[name]], params, prompt, output, drafts[name])
            start += counts[name]
        sampled = rig.draw(z[:start], drafts, counts)
        table = sampled.token_ids.reshape(len(requests), -1)
        for i, tokens in wanted.items():
            assert [t for t in table[i].tolist() if t >= 0] == tokens
        assert sorted(sampled.logprobs) == [i for i, r in enumerate(requests) if r[0].logprobs is not None]


def test_a_prompt_chunk_that_is_not_the_last_is_not_processed():
    rig = Rig(SamplingParams(temperature=0.0, allowed_token_ids=[4]), computed=0)
    z = logits()
    assert rig.draw(z, counts={"0": 1}).token_ids.tolist() == [int(z[0].argmax())] != [4]
    assert rig.draw(z, counts={"0": 3}).token_ids.tolist() == [4]
