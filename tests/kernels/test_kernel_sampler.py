"""The native sampler draws what the NumPy definition draws."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_driver import Driver
from kernel_reference import SPECS, random_weights

from foreword import _native
from foreword.sampling.filters import kept_tokens
from foreword.sampling.noise import gumbel_noise

RNG = np.random.default_rng(11)
SIZES = [1, 5, 255, 1000, 5003]


def by_definition(logits, temperature, top_k, top_p, min_p, seed, position):
    if temperature == 0:
        return int(logits.argmax())
    scaled = logits.astype(np.float64) / float(np.float32(temperature))
    kept = kept_tokens(
        scaled, top_k=min(top_k, len(logits)), top_p=float(np.float32(top_p)), min_p=float(np.float32(min_p))
    )
    return int(kept[(scaled[kept] + gumbel_noise(seed, position, kept)).argmax()])


def draw(logits, parameters, seeds, positions, rows, model=None):
    out = np.full(len(rows), -1, np.int32)
    columns = [np.array(c) for c in zip(*parameters, strict=True)]
    temperature, top_p, min_p = (columns[i].astype(np.float32) for i in (0, 2, 3))
    _native.sample(logits, temperature, columns[1].astype(np.int32), top_p, min_p, seeds, positions, rows, out, model)
    return out


@pytest.mark.parametrize("isa", _native.isa_levels())
@pytest.mark.parametrize("spread", [0.1, 1.0, 9.0])
@pytest.mark.parametrize("size", SIZES)
def test_draws_are_those_of_the_definition(size, spread, isa, monkeypatch):
    monkeypatch.setenv("FOREWORD_ISA", isa)
    count = 60
    logits = (RNG.normal(0, spread, (count, size)) + 3).astype(np.float32)
    logits[::3] = np.round(logits[::3] * 2) / 2  # many ties
    logits[5::7, RNG.random(size) < 0.5] = -np.inf
    logits[:, 0] = np.maximum(logits[:, 0], -5)
    choices = (
        [0.0, 0.3, 1.0, 2.5],
        [0, 1, 3, 50, 400, 10**6],
        [1.0, 0.999, 0.9, 0.5, 0.01],
        [0.0, 0.0, 0.02, 0.4, 1.0],
    )
    parameters = [tuple(c[RNG.integers(len(c))] for c in choices) for _ in range(count)]
    parameters[0] = (1.0, 0, 1.0, 0.0)
    seeds, positions = RNG.integers(-(2**63), 2**63 - 1, count), RNG.integers(0, 10**6, count)
    rows = RNG.permutation(count).astype(np.int32)
    got = draw(logits, parameters, seeds, positions, rows)
    for i, row in enumerate(rows.tolist()):
        temperature, top_k, top_p, min_p = parameters[row]
        want = by_definition(logits[i], temperature, top_k, top_p, min_p, int(seeds[row]), int(positions[i]))
        assert got[i] == want, parameters[row]


def test_every_token_is_drawn_as_often_as_its_probability():
    logits = np.log(np.array([[0.5, 0.25, 0.15, 0.1]], np.float32)).repeat(20000, 0)
    one = np.zeros(len(logits), np.int32)
    got = draw(logits, [(1.0, 0, 1.0, 0.0)], np.array([7]), np.arange(len(logits)), one)
    np.testing.assert_allclose(np.bincount(got, minlength=4) / len(got), [0.5, 0.25, 0.15, 0.1], atol=0.012)


def test_a_models_threads_draw_the_same_tokens():
    model = Driver(SPECS["llama"], random_weights(SPECS["llama"]), num_threads=3).executor.core
    count = 50
    logits = RNG.normal(0, 2, (count, 700)).astype(np.float32)
    arguments = (
        logits,
        [(t, 0, p, 0.0) for t, p in zip(RNG.choice([0.0, 1.0], count), RNG.choice([0.5, 1.0], count), strict=True)],
        RNG.integers(0, 2**62, count),
        RNG.integers(0, 1000, count),
        np.arange(count, dtype=np.int32),
    )
    np.testing.assert_array_equal(draw(*arguments, model=model), draw(*arguments))


def test_rows_apart_and_wrong_arguments():
    logits = np.zeros((3, 64), np.float32)
    logits[:, 9] = 1
    zeros = np.zeros(1, np.int32)
    got = draw(logits[:, :10], [(0.0, 0, 1.0, 0.0)], np.array([0]), np.zeros(3, np.int64), zeros.repeat(3))
    assert got.tolist() == [9, 9, 9]
    with pytest.raises(ValueError, match="rows"):
        draw(logits, [(0.0, 0, 1.0, 0.0)], np.array([0]), np.zeros(3, np.int64), zeros.repeat(3) + 1)
    with pytest.raises(ValueError, match="contiguous"):
        draw(logits[:, ::2], [(0.0, 0, 1.0, 0.0)], np.array([0]), np.zeros(3, np.int64), zeros.repeat(3))


def broken_rows(size):
    """Rows that have no token to draw, and rows with infinities that have one."""
    rows = RNG.normal(0, 2, (24, size)).astype(np.float32)
    at = RNG.integers(0, size, len(rows))
    spoil = [np.nan, -np.nan, np.inf, -np.inf, 3e38]
    for i, row in enumerate(rows[:20]):
        row[at[i]] = spoil[i % len(spoil)]
    rows[20] = -np.inf
    rows[21], rows[21, at[21]] = -np.inf, np.nan
    rows[22], rows[22, at[22]] = -np.inf, 1.0
    rows[23, :2] = np.inf, -np.inf
    return rows


@pytest.mark.parametrize("isa", _native.isa_levels())
@pytest.mark.parametrize("size", [2, 5, 255, 256, 257, 1000, 5003])
@pytest.mark.parametrize("parameters", [(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (0.7, 3, 0.9, 0.1), (1.5, 0, 0.5, 0.0)])
def test_a_row_with_a_nan_or_an_infinite_maximum_draws_nothing(parameters, size, isa, monkeypatch):
    monkeypatch.setenv("FOREWORD_ISA", isa)
    logits = broken_rows(size)
    rows = np.zeros(len(logits), np.int32)
    positions = np.arange(len(logits))
    got = draw(logits, [parameters], np.array([5]), positions, rows)
    broken = np.isnan(logits).any(1) | ~np.isfinite(logits.max(1, initial=-np.inf))
    for i, row in enumerate(logits):
        assert got[i] == (-1 if broken[i] else by_definition(row, *parameters, 5, i)), row


def test_a_nan_is_found_at_every_place():
    for size in (1, 7, 40, 300):
        logits = np.zeros((size, size), np.float32)
        np.fill_diagonal(logits, np.nan)
        zeros = np.zeros(size, np.int32)
        assert (draw(logits, [(0.0, 0, 1.0, 0.0)], np.array([0]), np.zeros(size, np.int64), zeros) == -1).all()
