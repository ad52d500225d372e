"""Native sampling gives the tokens of the NumPy reference, exactly, for any mix of rows, and its log-probabilities."""

import math
from functools import cache

import numpy as np
import pytest

from foreword.batch import InputBuffers, KVGroup, NewRequest, RequestStates, SamplingParams, prepare_inputs
from foreword.batch.features.sampling import sampling_metadata
from foreword.batch.values.sampling_params import PARAMETERS
from foreword.native import available, native
from foreword.sampling import BadLogitsError, Processors, Sampled, Sampler, TokenMasks
from foreword.sampling.masks import num_words
from foreword.sampling.rows import RowValues

needs_native = pytest.mark.skipif(not available(), reason="the native module is not built")
V, R, M = 700, 8, 64


class Halve:
    """Halves the logits of every third request."""

    extra_args: frozenset[str] = frozenset()

    def __init__(self, states: RequestStates) -> None:
        self.rows: RowValues[bool] = RowValues(states.max_num_reqs)

    def update(self, change) -> None:
        self.rows.update(change, lambda added: True if int(added.req_id) % 3 == 0 else None)

    def apply(self, logits, at) -> None:
        logits *= np.float32(0.5)


def some_params(rng: np.random.Generator) -> SamplingParams:
    def one_of(*values):
        return values[rng.integers(len(values))]

    few = rng.integers(0, 6, 3).tolist()
    return SamplingParams(
        temperature=one_of(0.0, 0.6, 1.0, 2.0),
        top_k=one_of(0, 0, 5, 60),
        top_p=one_of(1.0, 1.0, 0.93, 0.4),
        min_p=one_of(0.0, 0.0, 0.013, 0.3),
        typical_p=one_of(1.0, 1.0, 0.9, 0.37),
        top_n_sigma=one_of(0.0, 0.0, 0.9, 2.3),
        xtc_probability=one_of(0.0, 0.0, 0.5, 1.0),
        xtc_threshold=one_of(0.0, 0.003, 0.07),
        presence_penalty=one_of(0.0, 0.9),
        frequency_penalty=one_of(0.0, -0.7),
        repetition_penalty=one_of(1.0, 0.6, 1.8),
        dry_multiplier=one_of(0.0, 0.8),
        dry_base=one_of(1.0, 1.75, 1000.0),
        dry_allowed_length=one_of(1, 2, 4),
        dry_range=one_of(-1, 0, 7),
        dry_breaker_token_ids=one_of((), few[:1]),
        logit_bias=one_of(None, None, {int(rng.integers(V)): 3.0, few[0]: -math.inf}),
        bad_words_token_ids=one_of((), [few[:1], few[1:], few]),
        allowed_token_ids=one_of(None, None, rng.integers(0, V, 40)),
        stop_token_ids=one_of((), few),
        min_tokens=one_of(0, 30),
        logprobs=one_of(None, 0, 4, -1),
        seed=int(rng.integers(-(2**63), 2**63 - 1)),
        max_tokens=None,
    )


def scene(seed: int):
    """A batch of any requests, its logits, and its masks."""
    rng = np.random.default_rng(seed)
    states = RequestStates(
        max_num_reqs=R, max_model_len=M, vocab_size=V, kv_groups=[KVGroup(M)], max_num_draft_tokens=4
    )
    counts, drafts = {}, {}
    processors = Processors(states, [Halve(states)] if seed % 2 else [], eos_token_ids=[0])
    for i in range(int(rng.integers(1, R + 1))):
        prompt, output = rng.integers(0, 6, rng.integers(2, 30)), rng.integers(0, 6, rng.integers(0, 20))
        known, extras = len(prompt) + len(output), {}
        if rng.random() < 0.3:
            extras = {
                "prompt_embeds": np.ones((len(prompt), 2), np.float32),
                "prompt_is_token_id": rng.random(len(prompt)) < 0.6,
            }
        is_chunk = rng.random() < 0.15
        computed = 0 if is_chunk else known - 1
        params = some_params(rng)
        states.add_request(NewRequest(str(i), prompt, [[i + 1]], output, computed, params, **extras))
        drafts[str(i)] = [] if is_chunk else rng.integers(0, 6, rng.integers(0, 4)).tolist()
        counts[str(i)] = 1 + len(drafts[str(i)])
    batch = prepare_inputs(states, counts, InputBuffers.for_states(states, 64), draft_tokens=drafts)
    L = len(batch.logits_indices)
    z = rng.normal(0, 2, (L, V)).astype(np.float32)
    z[:, :6] += 4
    for i in np.flatnonzero(rng.random(L) < 0.1):
        z[i, rng.integers(V)] = [np.nan, np.inf, -np.inf][rng.integers(3)]
    masked = np.flatnonzero(rng.random(L) < 0.3).astype(np.int32)
    words = rng.integers(-(2**31), 2**31, (len(masked), num_words(V))).astype(np.int32)
    return states, batch, z, processors, TokenMasks(masked, words) if len(masked) else None


def sample(seed: int, *, is_native: bool, threads=None):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("foreword.sampling.row_rules.available", lambda: is_native)
        _, batch, z, processors, masks = scene(seed)
    processors.update()
    before = z.copy()
    sampled = Sampler(threads=threads).sample(batch, z, processors.step(sampling_metadata(batch), masks))
    np.testing.assert_array_equal(z, before)
    return sampled


def test_the_parameters_of_the_scenes_vary_in_every_column():
    """But that of prompt tokens, which no draw reads."""
    rng = np.random.default_rng(0)
    drawn = [some_params(rng) for _ in range(50)]
    names = {row.name for row in PARAMETERS if row.column is not None} - {"prompt_logprobs"}
    assert {name for name in names if len({getattr(params, name) for params in drawn}) == 1} == set()


@cache
def wanted_of(seed: int) -> Sampled:
    """Return what the reference samples, which no instruction set changes."""
    return sample(seed, is_native=False)


@pytest.mark.one_in(9)
@needs_native
@pytest.mark.parametrize("isa", native.isa_levels() if available() else [])
@pytest.mark.parametrize("part", range(3))
def test_tokens_failures_and_log_probabilities_are_those_of_the_reference(part: int, isa: str, monkeypatch):
    monkeypatch.setenv("FOREWORD_ISA", isa)
    for seed in range(60 * part, 60 * part + 60):
        got, wanted = sample(seed, is_native=True), wanted_of(seed)
        assert got.token_ids.tolist() == wanted.token_ids.tolist(), seed
        assert got.failures == wanted.failures
        assert list(got.logprobs) == list(wanted.logprobs)
        for b, entries in wanted.logprobs.items():
            assert len(got.logprobs[b]) == len(entries)
            for mine, theirs in zip(got.logprobs[b], entries, strict=True):
                assert list(mine) == list(theirs)
                assert [e.rank for e in mine.values()] == [e.rank for e in theirs.values()]
                values = [[e.logprob for e in entry.values()] for entry in (mine, theirs)]
                np.testing.assert_allclose(*values, rtol=1e-6, atol=1e-5)


@needs_native
def test_a_broken_row_fails_its_request_whatever_its_rules():
    """The rules may forbid the token whose logit is not a number."""
    for is_native in (True, False):
        states = RequestStates(max_num_reqs=2, max_model_len=8, vocab_size=V, kv_groups=[KVGroup(8)])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("foreword.sampling.row_rules.available", lambda answer=is_native: answer)
            processors = Processors(states)
        for i in range(2):
            params = SamplingParams(allowed_token_ids=[3, 4], seed=1)
            states.add_request(NewRequest(str(i), [1, 2], [[i + 1]], (), 1, params))
        batch = prepare_inputs(states, {"0": 1, "1": 1}, InputBuffers.for_states(states, 8))
        z = np.zeros((2, V), np.float32)
        z[0, 9] = np.nan
        sampled = Sampler().sample(batch, z, processors.step(sampling_metadata(batch)))
        assert sampled.token_ids[0] == -1
        assert sampled.token_ids[1] in (3, 4)
        assert sampled.failures == {0: BadLogitsError}


@needs_native
@pytest.mark.parametrize("isa", native.isa_levels() if available() else [])
def test_a_greedy_request_without_rules_gets_the_first_largest_logit_of_any_row(isa: str, monkeypatch):
    monkeypatch.setenv("FOREWORD_ISA", isa)
    rng = np.random.default_rng(5)
    for size in (1, 3, 4, 15, 16, 17, 255, 256, 257, 300, 515, 1000):
        states = RequestStates(max_num_reqs=R, max_model_len=M, vocab_size=size, kv_groups=[KVGroup(M)])
        for i in range(R):
            states.add_request(NewRequest(str(i), [0, 0], [[i + 1]], (), 1, SamplingParams(temperature=0.0)))
        z = rng.integers(-3, 3, (R, size)).astype(np.float32)  # with many equal logits
        z[0], z[1, size - 1], z[2, size // 2] = -np.inf, np.nan, np.inf
        z[3, : size // 2] = -np.inf
        z[4] = -np.arange(size)[::-1]
        batch = prepare_inputs(states, {str(i): 1 for i in range(R)}, InputBuffers.for_states(states, M))
        drawn = Sampler().sample(batch, z, Processors(states).step(sampling_metadata(batch))).token_ids
        can_draw = np.isfinite(z.max(1))
        assert can_draw.tolist() == [False, False, False, *[True] * (R - 3)]
        assert drawn.tolist() == np.where(can_draw, np.where(np.isnan(z), 0, z).argmax(1), -1).tolist(), size
