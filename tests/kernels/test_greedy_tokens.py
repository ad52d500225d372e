"""Greedy tokens found without all logits are those with the largest logits, which the same model computes."""

from dataclasses import replace

import numpy as np
import pytest
from greedy_steps import ROWS, check, steps
from kernel_reference import SPECS, float_tensor, random_blocks, random_weights, tiny_spec

from foreword import _native
from foreword.batch.values.parameters import Need
from foreword.models.quants import Quant
from foreword.sampling.failures import BadLogitsError

LEVELS = _native.isa_levels()


def with_head(spec, head):
    """Random weights, and an output projection of these rows."""
    return random_weights(spec) | {"lm_head": float_tensor(head)}


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("weight_format", ["fp32", "bf16", "int8", "q4"])
@pytest.mark.parametrize("name", ["llama", "odd_sizes", "gemma", "tied"])
def test_the_token_has_the_largest_logit(name, weight_format, isa):
    spec = SPECS[name]
    check(spec, random_weights(spec), weight_format=weight_format, isa=isa)


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("weight_format", ["auto", "q4"])
@pytest.mark.parametrize("quant", [Quant.Q4_0, Quant.Q4_1, Quant.Q5_1, Quant.Q8_0, Quant.Q4_K, Quant.Q6_K])
def test_the_projection_in_the_formats_of_files(quant, weight_format, isa):
    spec = tiny_spec(hidden_size=256, vocab_size=640)
    weights = random_weights(spec)
    weights["lm_head"] = random_blocks(quant, (640, 256), np.random.default_rng(9))
    check(spec, weights, weight_format=weight_format, isa=isa)


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("weight_format", ["fp32", "bf16", "int8"])
def test_logits_that_8_bit_cannot_tell_apart(weight_format, num_threads, isa):
    """The largest of a thousand outputs that are nearly, or quite, the same."""
    spec, rng = tiny_spec(vocab_size=1000), np.random.default_rng(5)
    one = rng.normal(0, 0.3, 96)
    for noise in (1e-3, 1e-5, 0.0):
        check(
            spec,
            with_head(spec, one + noise * rng.normal(0, 1, (1000, 96))),
            weight_format=weight_format,
            num_threads=num_threads,
            isa=isa,
        )


@pytest.mark.parametrize("isa", LEVELS)
def test_equal_logits_give_the_lowest_token(isa):
    spec = tiny_spec(vocab_size=1000)
    head = np.tile(np.random.default_rng(6).normal(0, 0.3, (250, 96)), (4, 1))
    for weight_format in ("fp32", "int8"):
        check(spec, with_head(spec, head), weight_format=weight_format, isa=isa)
    for executor, batch, sampling in steps(spec, with_head(spec, 0 * head), isa=isa):
        assert executor.draw(batch, sampling).token_ids.tolist() == [0] * ROWS


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("softcap", [0.05, 1.0, 30.0])
def test_a_softcap_can_make_logits_equal(softcap, isa):
    spec = tiny_spec(vocab_size=1000, final_softcap=softcap)
    check(spec, random_weights(spec), isa=isa)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_more_candidates_than_there_is_room_for(num_threads):
    """Every panel of a large vocabulary may have the largest logit."""
    spec = tiny_spec(vocab_size=40_000, hidden_size=32)
    check(spec, with_head(spec, np.ones((40_000, 32))), num_threads=num_threads)


@pytest.mark.parametrize("isa", LEVELS)
def test_large_numbers_in_few_inputs(isa):
    """Outliers and zeros in the rows and in the weights."""
    spec, rng = tiny_spec(vocab_size=1000), np.random.default_rng(7)
    weights = with_head(spec, rng.standard_t(1.5, (1000, 96)) * (rng.random((1000, 1)) < 0.9))
    weights["final_norm"] = float_tensor(np.exp(rng.normal(0, 3, 96)))
    for weight_format in ("fp32", "bf16"):
        check(spec, weights, weight_format=weight_format, isa=isa)


def test_logits_are_not_computed():
    spec = SPECS["llama"]
    for weight_format, rows, computed in (
        ("bf16", 21, False),
        ("bf16", 1, False),
        ("int8", 21, False),
        ("int8", 1, True),
    ):
        prompts = np.random.default_rng(8).integers(0, spec.vocab_size, (rows, 9)).tolist()
        executor, batch, _ = next(steps(spec, random_weights(spec), prompts, weight_format=weight_format))
        assert executor._step(batch, batch.logits_indices, greedy=True).any() == computed


@pytest.mark.parametrize("value", [np.nan, np.inf, 3e38])
def test_rows_and_weights_that_are_not_finite(value):
    """A row without a token harms no other, and a token's own weights only the rows that they make infinite."""
    spec = SPECS["llama"]
    weights = random_weights(spec)
    weights["embed"].data.view(np.float32)[5] = value
    prompts = [[5] * 9, *np.random.default_rng(8).integers(6, spec.vocab_size, (9, 9)).tolist()]
    for executor, batch, sampling in steps(spec, weights, prompts):
        drawn = executor.draw(batch, sampling)
        logits = executor.compute(batch, batch.logits_indices)
        failed = [b for b, row in enumerate(logits) if np.isnan(row).any() or np.isposinf(row).any()]
        assert (drawn.token_ids[~np.isin(range(10), failed)] == np.delete(logits, failed, 0).argmax(1)).all()
        assert all(drawn.token_ids[b] == -1 for b in failed)
        if not np.isfinite(value):
            assert failed == [0]
            if batch.step == 3:  # the others are of prompt chunks, whose tokens are discarded
                assert drawn.failures == {0: BadLogitsError}
    weights = random_weights(spec)
    weights["lm_head"].data.view(np.float32)[300] = value
    for executor, batch, sampling in steps(spec, weights):
        drawn = executor.draw(batch, sampling)
        logits = executor.compute(batch, batch.logits_indices)
        bad = np.isnan(logits).any(1) | np.isposinf(logits).any(1)
        np.testing.assert_array_equal(drawn.token_ids, np.where(bad, -1, logits.argmax(1)))


def test_requests_that_are_not_greedy_have_all_logits():
    spec = SPECS["llama"]
    for executor, batch, sampling in steps(spec, random_weights(spec)):
        batch.states.sampling.temperature[3] = 0.7
        sampling = replace(sampling, step=replace(sampling.step, needs=int(Need.GREEDY | Need.RANDOM)))
        want = executor.sampler.sample(batch, executor.compute(batch, batch.logits_indices), sampling)
        np.testing.assert_array_equal(executor.draw(batch, sampling).token_ids, want.token_ids)
