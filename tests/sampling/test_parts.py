"""Draws from parts of the vocabulary: the tokens that the sampler draws from all of it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from sampling_rig import Rig, V, logits

from foreword.batch import SamplingParams
from foreword.sampling.parts import PartDraws, best_draws, can_be_divided


def drawn_in_parts(rig: Rig, z: np.ndarray, num_parts: int, drafts=None):
    """The sampler's step and the one from parts of the vocabulary."""
    batch = rig.batch(drafts)
    sampling = rig.sampling(batch)
    assert can_be_divided(sampling)
    ends = [V * i // num_parts for i in range(num_parts + 1)]
    parts = [range(*pair) for pair in itertools.pairwise(ends)]
    found = [PartDraws(rig.states, part).draw(batch, z[:, part.start : part.stop].copy()) for part in parts]
    return rig.sampler.sample(batch, z, sampling), best_draws(batch, found)


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


@pytest.mark.parametrize("spoiled", [{3: np.nan}, {40: np.inf}, dict.fromkeys(range(V), -np.inf)])
def test_a_bad_row_fails_and_the_others_do_not(spoiled):
    z = logits(2)
    z[0, list(spoiled)] = list(spoiled.values())
    whole, parts = drawn_in_parts(Rig(SamplingParams(seed=1), SamplingParams(seed=2)), z, 3)
    assert parts.token_ids.tolist() == whole.token_ids.tolist()
    assert parts.token_ids[0] == -1
    assert parts.failures == whole.failures


@pytest.mark.parametrize("params", [{"top_k": 3}, {"logprobs": 1}, {"min_p": 0.1}, {"logit_bias": {3: 1.0}}])
def test_filters_and_rules_need_all_logits(params):
    rig = Rig(SamplingParams(**params))
    assert not can_be_divided(rig.sampling(rig.batch()))
