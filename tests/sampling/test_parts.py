"""Draws from parts of the vocabulary: the tokens that the sampler draws from all of it."""

import itertools

import numpy as np
import pytest
from sampling_rig import Rig, V, logits

from foreword.batch import SamplingParams
from foreword.sampling.parts import LOGIT, PartDraws, best_of, can_be_divided, sampled_from


def drawn_in_parts(rig: Rig, z: np.ndarray, num_parts: int, drafts=None):
    """The sampler's step and the one from parts of the vocabulary."""
    batch = rig.batch(drafts)
    sampling = rig.sampling(batch)
    assert can_be_divided(sampling)
    ends = [V * i // num_parts for i in range(num_parts + 1)]
    parts = [range(*pair) for pair in itertools.pairwise(ends)]
    draws = [PartDraws(rig.states, part) for part in parts]
    logits = [z[:, part.start : part.stop].copy() for part in parts]
    best = best_of([own.draw(batch, x) for own, x in zip(draws, logits, strict=True)])
    count = sampling.step.max_num_logprobs
    found = [own.logprobs(x, best[:, LOGIT], count) for own, x in zip(draws, logits, strict=True) if count >= 0]
    return rig.sampler.sample(batch, z, sampling), sampled_from(batch, best, sampling, found)


@pytest.mark.parametrize("num_parts", [1, 2, 3, 7])
def test_parts_draw_the_tokens_of_the_whole(num_parts):
    params = [SamplingParams(seed=s, temperature=t) for s, t in enumerate((0.0, 0.3, 1.0, 2.0))]
    for i in range(50):
        z = logits(4, seed=i).round()  # with equal logits
        z[1, : V // 2] = -np.inf
        whole, parts = drawn_in_parts(Rig(*params), z, num_parts)
        np.testing.assert_array_equal(parts.token_ids, whole.token_ids)
        assert parts.failures == whole.failures == {}


def test_parts_verify_drafts():
    params, z = [SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, seed=5)], logits(5, scale=0.1)
    z[0, 4] = z[1, 9] = 8
    drafts = {"0": [4, 9, 2]}
    whole, parts = drawn_in_parts(Rig(*params, drafts=3), z, 3, drafts)
    assert parts.token_ids[0, :2].tolist() == [4, 9]
    np.testing.assert_array_equal(parts.token_ids, whole.token_ids)


@pytest.mark.parametrize("num_parts", [1, 3, 7])
def test_parts_give_the_log_probabilities_of_the_whole(num_parts):
    """There may be more tokens than a part has, equal ones among them, requests that want none, and drafts."""
    wants = [SamplingParams(temperature=1.0, seed=s, logprobs=n) for s, n in enumerate((3, None, 0, 30))]
    z = logits(7, seed=num_parts).round()
    z[2, : V // 2] = -np.inf
    whole, parts = drawn_in_parts(Rig(*wants, drafts=3), z, num_parts, {"0": [4, 9, 2]})
    np.testing.assert_array_equal(parts.token_ids, whole.token_ids)
    assert set(parts.logprobs) == set(whole.logprobs) == {0, 2, 3}
    for b, wanted in whole.logprobs.items():
        for got, one in zip(parts.logprobs[b], wanted, strict=True):
            assert list(got) == list(one)
            assert [x.rank for x in got.values()] == [x.rank for x in one.values()]
            np.testing.assert_allclose([x.logprob for x in got.values()], [x.logprob for x in one.values()], atol=1e-6)


@pytest.mark.parametrize("spoiled", [{3: np.nan}, {40: np.inf}, dict.fromkeys(range(V), -np.inf)])
def test_a_bad_row_fails_and_the_others_do_not(spoiled):
    z = logits(2)
    z[0, list(spoiled)] = list(spoiled.values())
    whole, parts = drawn_in_parts(Rig(SamplingParams(seed=1), SamplingParams(seed=2)), z, 3)
    assert parts.token_ids.tolist() == whole.token_ids.tolist()
    assert parts.token_ids[0] == -1
    assert parts.failures == whole.failures


@pytest.mark.parametrize("params", [{"top_k": 3}, {"typical_p": 0.9}, {"min_p": 0.1}, {"logit_bias": {3: 1.0}}])
def test_filters_and_rules_need_all_logits(params):
    rig = Rig(SamplingParams(**params))
    assert not can_be_divided(rig.sampling(rig.batch()))
