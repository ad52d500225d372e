"""The sampler on real batches."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.batch import InputBuffers, KVGroup, NewRequest, RequestStates, SamplingParams, prepare_inputs
from foreword.sampling import Sampler, gumbel_noise, token_logprobs

V = 50
ENDS = np.array([0], np.int64)


class Rig:
    def __init__(self, *params: SamplingParams, prompt=(1, 2, 3), output=(), drafts: int = 0) -> None:
        self.states = RequestStates(
            max_num_reqs=8,
            max_model_len=32,
            vocab_size=V,
            kv_groups=[KVGroup(block_size=32)],
            max_num_draft_tokens=drafts,
        )
        self.buffers = InputBuffers.for_states(self.states, 64)
        self.sampler = Sampler(self.states)
        for i, p in enumerate(params):
            known = len(prompt) + len(output)
            row = self.states.add_request(
                NewRequest(
                    str(i), list(prompt), [[i + 1]], list(output), num_computed_tokens=known - 1, sampling_params=p
                )
            )
            # A resumed request's outputs count as outputs from the start.
            self.sampler.set_request(row, p, ENDS)

    def batch(self, drafts=None):
        drafts = drafts or {}
        return prepare_inputs(
            self.states,
            {r: 1 + len(drafts.get(r, ())) for r in self.states.req_ids},
            self.buffers,
            draft_tokens=drafts,
        )

    def draw(self, logits: np.ndarray, drafts=None):
        return self.sampler.sample(self.batch(drafts), np.ascontiguousarray(logits, np.float32))


def logits(n: int = 1, seed: int = 0, scale: float = 2.0) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=(n, V)) * scale).astype(np.float32)


def test_temperature_zero_is_the_argmax_and_the_lowest_id_wins():
    z = np.zeros((1, V), np.float32)
    z[0, [7, 9]] = 3
    assert Rig(SamplingParams(temperature=0.0)).draw(z).token_ids.tolist() == [7]


def test_a_draw_is_the_argmax_of_scaled_logits_plus_noise():
    z = logits(1)
    got = Rig(SamplingParams(temperature=0.7, seed=11)).draw(z).token_ids
    wanted = z[0].astype(np.float64) / np.float32(0.7) + gumbel_noise(11, 3, np.arange(V))
    assert got.tolist() == [int(wanted.argmax())]


def test_draws_follow_the_softmax():
    z = logits(1, scale=1.0)[0]
    p = np.exp(z / 0.8)
    p /= p.sum()
    rig = Rig(SamplingParams(temperature=0.8))
    counts = np.zeros(V)
    batch = rig.batch()
    for seed in range(4000):
        rig.states.sampling.seed[0] = seed
        counts[rig.sampler.sample(batch, z[None]).token_ids[0]] += 1
    chi2 = ((counts - 4000 * p) ** 2 / (4000 * p)).sum()
    assert chi2 < V + 5 * math.sqrt(2 * V)


def test_equal_seeds_draw_equal_tokens_alone_and_in_a_crowd():
    params = [SamplingParams(seed=s, temperature=t, top_p=0.9) for s, t in ((1, 0.5), (2, 1.0), (3, 0.0), (4, 1.5))]
    z = logits(4)
    crowd = Rig(*params).draw(z).token_ids.tolist()
    alone = [Rig(p).draw(z[i : i + 1]).token_ids[0] for i, p in enumerate(params)]
    assert crowd == alone


def test_the_logits_are_not_changed():
    z = logits(1)
    before = z.copy()
    Rig(SamplingParams(logit_bias={3: 9.0}, repetition_penalty=2.0, logprobs=2)).draw(z)
    assert (z == before).all()


def test_only_allowed_tokens_are_drawn():
    p = SamplingParams(allowed_token_ids=[4, 5], temperature=3.0)
    for seed in range(20):
        assert Rig(p).draw(logits(1, seed)).token_ids[0] in (4, 5)


def test_bias_moves_the_choice():
    assert Rig(SamplingParams(temperature=0.0, logit_bias={42: 100.0})).draw(logits()).token_ids.tolist() == [42]


@pytest.mark.parametrize(("output", "wanted"), [((), 1), ((5,), 1), ((5, 6), 0)])
def test_no_end_before_the_minimum_length(output, wanted):
    z = np.zeros((1, V), np.float32)
    z[0, 0], z[0, 1] = 9, 5
    rig = Rig(SamplingParams(temperature=0.0, min_tokens=2), output=output)
    assert rig.draw(z).token_ids.tolist() == [wanted]


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
    got = rig.sampler._processors[0].process(z[0], np.array(prompt, np.int32), np.array(output, np.int32))
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    assert rig.draw(z).token_ids.tolist() == [int(expected.argmax())]


def test_a_bad_word_is_cut_at_its_last_token_only_after_the_others():
    z = np.zeros((1, V), np.float32)
    z[0, 8], z[0, 9] = 5, 4
    p = SamplingParams(temperature=0.0, bad_words_token_ids=[[6, 7, 8]])
    assert Rig(p, output=(6, 7)).draw(z).token_ids.tolist() == [9]
    assert Rig(p, output=(7, 6)).draw(z).token_ids.tolist() == [8]
    assert Rig(p, prompt=(1, 6), output=(7,)).draw(z).token_ids.tolist() == [9]


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


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([0.0, 0.6, 1.2]), st.integers(0, 3))
def test_verified_output_is_the_output_without_drafts(seed: int, temperature: float, right: int):
    """Logits depend on the position alone here, so the plain output is known; drafts are right up to ``right``."""
    params = SamplingParams(temperature=temperature, seed=seed, top_k=10, frequency_penalty=0.5)
    table = logits(12, seed % 100, scale=1.0)
    plain: list[int] = []
    for _ in range(4):
        rig = Rig(params, output=tuple(plain), drafts=3)
        plain.append(int(rig.draw(table[len(plain)][None]).token_ids[0]))
    drafts = [t if i < right else (t + 1) % V for i, t in enumerate(plain[:3])]
    rig = Rig(params, drafts=3)
    got = rig.draw(table[:4], {"0": drafts}).token_ids[0].tolist()
    assert got == plain[: right + 1] + [-1] * (3 - right)
