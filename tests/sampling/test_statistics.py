"""Draws have the distribution that the parameters define: chi-square tests of every path, with fixed seeds."""

import math

import numpy as np
import pytest
from sampling_rig import Rig, V

from foreword.batch import SamplingParams
from foreword.sampling import TokenMasks
from foreword.sampling.masks import num_words

NUM_DRAWS = 4000
FILTERS = {
    "temperature": {},
    "hot": {"temperature": 1.7},
    "top_k": {"top_k": 7},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.2},
    "typical_p": {"typical_p": 0.6},
    "top_n_sigma": {"top_n_sigma": 1.2},
    "xtc": {"xtc_probability": 1.0, "xtc_threshold": 0.05},
    "xtc at times": {"xtc_probability": 0.4, "xtc_threshold": 0.05},
    "several": {"top_k": 20, "top_p": 0.9, "typical_p": 0.8, "min_p": 0.01},
}
RULES = {
    "penalties": {"repetition_penalty": 1.4, "frequency_penalty": 0.3, "presence_penalty": 0.5},
    "dry": {"dry_multiplier": 0.9, "dry_allowed_length": 1},
    "bias": {"logit_bias": {3: 1.5, 8: -math.inf}},
    "allowed": {"allowed_token_ids": [2, 3, 5, 7, 11, 13]},
    "bad words": {"bad_words_token_ids": [[1, 2], [5]]},
}
PROMPT, OUTPUT = (1, 2, 3, 1, 2), (4, 1)


def model_logits() -> np.ndarray:
    return np.random.default_rng(5).normal(0, 1.3, (1, V)).astype(np.float32)


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max())
    return e / e.sum()


def kept(p: np.ndarray, order: np.ndarray, share: float) -> np.ndarray:
    """The probabilities of the fewest first tokens of the order that have this share, renormalised."""
    count = int(np.argmax(np.cumsum(p[order]) >= share)) + 1
    return only(p, order[:count])


def only(p: np.ndarray, ids: np.ndarray) -> np.ndarray:
    out = np.zeros_like(p)
    out[ids] = p[ids]
    return out / out.sum()


def after_xtc(p: np.ndarray, threshold: float) -> np.ndarray:
    above = np.flatnonzero(p >= threshold)
    above = above[np.argsort(-p[above])]
    return only(p, np.setdiff1d(np.arange(V), above[:-1])) if len(above) > 1 else p


def distribution(z: np.ndarray, q: SamplingParams) -> np.ndarray:
    """The probabilities [V] of the next token, from changed logits."""
    z = z.astype(np.float64) / q.temperature
    p = softmax(z)
    if q.min_p:
        p = only(p, np.flatnonzero(p >= q.min_p * p.max()))
    if q.top_n_sigma > 0:
        p = only(p, np.flatnonzero(z >= z.max() - q.top_n_sigma * z[np.isfinite(z)].std()))
    if q.top_k:
        p = only(p, np.argsort(-p)[: q.top_k])
    if q.top_p < 1:
        p = kept(p, np.argsort(-p), q.top_p)
    if q.typical_p < 1:
        some = np.flatnonzero(p)
        surprise = -np.log(p[some])
        p = kept(p, some[np.argsort(np.abs(surprise - (p[some] * surprise).sum()))], q.typical_p)
    return (1 - q.xtc_probability) * p + q.xtc_probability * after_xtc(p, q.xtc_threshold)


def changed(z: np.ndarray, q: SamplingParams) -> np.ndarray:
    """The logits after the rules, with the text PROMPT + OUTPUT."""
    z = z.astype(np.float64).copy()
    if q.allowed_token_ids is not None:
        z[np.setdiff1d(np.arange(V), q.allowed_token_ids)] = -np.inf
    for t, bias in (q.logit_bias or {}).items():
        z[t] += bias
    for t in {*PROMPT, *OUTPUT}:
        z[t] = z[t] / q.repetition_penalty if z[t] > 0 else z[t] * q.repetition_penalty
    for t in set(OUTPUT):
        z[t] -= q.frequency_penalty * OUTPUT.count(t) + q.presence_penalty
    if q.dry_multiplier:
        z[2] -= q.dry_multiplier  # the text ends with 1, after which 2 came: a repetition of one token
    for word in q.bad_words_token_ids:
        if len(word) == 1 or word[0] == OUTPUT[-1]:
            z[word[-1]] = -np.inf
    return z


def assert_follows(counts: np.ndarray, p: np.ndarray) -> None:
    """Chi-square over the tokens with an expectation of 5 and more, at 5 standard deviations."""
    n = counts.sum()
    assert not counts[p == 0].any()
    often = n * p >= 5
    got, wanted = np.append(counts[often], counts[~often].sum()), np.append(n * p[often], n * p[~often].sum())
    chi2 = ((got - wanted) ** 2 / np.maximum(wanted, 1e-9))[wanted > 0].sum()
    assert chi2 < len(got) + 5 * math.sqrt(2 * len(got))


def draws(q: SamplingParams, masks: TokenMasks | None = None) -> np.ndarray:
    rig = Rig(q, prompt=PROMPT, output=OUTPUT)
    batch = rig.batch()
    sampling, z = rig.sampling(batch, masks), model_logits()
    counts = np.zeros(V)
    for seed in range(NUM_DRAWS):
        rig.states.sampling.seed[0] = 7919 * seed
        counts[rig.sampler.sample(batch, z, sampling).token_ids[0]] += 1
    return counts


@pytest.mark.parametrize("name", FILTERS)
def test_draws_of_every_filter_follow_the_distribution(name: str):
    q = SamplingParams(**{"temperature": 0.9, **FILTERS[name]})
    assert_follows(draws(q), distribution(model_logits()[0], q))


@pytest.mark.parametrize("name", RULES)
def test_draws_under_every_rule_follow_the_distribution(name: str):
    q = SamplingParams(temperature=0.9, **RULES[name])
    assert_follows(draws(q), distribution(changed(model_logits()[0], q), q))


def test_draws_under_a_mask_follow_the_distribution():
    words = np.zeros((1, num_words(V)), np.int32)
    words[0] = 0x2B5D1, 0x1F
    q = SamplingParams(temperature=0.9)
    allowed = np.unpackbits(words.view(np.uint8), bitorder="little")[:V].astype(bool)
    counts = draws(q, TokenMasks(np.array([0], np.int32), words))
    assert_follows(counts, distribution(np.where(allowed, model_logits()[0], -np.inf), q))


@pytest.mark.parametrize("name", FILTERS)
def test_verified_drafts_follow_the_distribution(name: str):
    """Two drafts that are often right: whatever is committed at each position has the model's distribution, given that
    the position is reached; drafts that do not depend on the draws are accepted with their probability.
    """
    q = SamplingParams(**{"temperature": 0.9, **FILTERS[name]})
    z = np.repeat(model_logits(), 3, 0)
    p = distribution(z[0], q)
    draft = int(p.argmax())
    rig = Rig(q, prompt=PROMPT, output=OUTPUT, drafts=2)
    batch = rig.batch({"0": [draft, draft]})
    sampling = rig.sampling(batch)
    counts = np.zeros((3, V))
    for seed in range(NUM_DRAWS):
        rig.states.sampling.seed[0] = 104729 * seed
        for j, token in enumerate(rig.sampler.sample(batch, z, sampling).token_ids[0].tolist()):
            if token >= 0:
                counts[j, token] += 1
    for j in range(3):
        assert_follows(counts[j], p)
    assert counts[1].sum() == counts[0, draft]
    assert counts[2].sum() == counts[1, draft]
