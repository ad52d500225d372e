"""The native sampler draws what the NumPy definition draws, at every instruction set and number of threads."""

from functools import lru_cache
from types import SimpleNamespace

import numpy as np
import pytest
from kernel_driver import Driver
from kernel_reference import SPECS, random_weights, tiny_spec

from foreword import _native
from foreword.batch import prepare_inputs
from foreword.batch.state.sampling_columns import COLUMNS, SamplingColumns
from foreword.sampling.logprobs import LogprobArrays, row_logprobs
from foreword.sampling.reference import draw_token

RNG = np.random.default_rng(11)
SIZES = [1, 5, 255, 1000, 5003]
FIRST = RNG.bit_generator.state


@pytest.fixture(autouse=True)
def same_numbers_in_any_order():
    RNG.bit_generator.state = FIRST


def columns_of(parameters, seeds):
    """Sampling columns with a row for each entry of ``parameters``, a dictionary of values by name."""
    columns = SamplingColumns(len(parameters))
    for row, values in enumerate(parameters):
        for name, value in values.items():
            getattr(columns, name)[row] = value
    columns.seed[:] = seeds
    return columns


def rows_of(columns, vocab_size):
    """The sampling of requests without rules and tokens."""
    count = len(columns.seed)
    arrays = np.zeros((count, 1), np.int32), np.zeros(count, np.int32), np.zeros(count, np.int32)
    return _native.SamplingRows(columns.by_name, *arrays, vocab_size)


def draw(logits, parameters, seeds, positions, rows, model=None):
    """The token of each row of logits, for a request with one of the parameters each."""
    out = np.full((len(rows), 1), -1, np.int32)
    each = np.arange(len(rows) + 1, dtype=np.int32)
    none = (None,) * 5
    rows_of(columns_of(parameters, seeds), logits.shape[1]).sample(
        logits,
        rows,
        np.zeros(len(rows), np.int32),
        each,
        positions,
        each[:0],
        *none,
        out,
        None,
        None,
        None,
        None,
        model,
    )
    return out[:, 0]


def by_definition(logits, parameters, seed, position):
    return _by_definition(logits.tobytes(), tuple(sorted(parameters.items())), seed, position)


@lru_cache(2000)  # every instruction set draws from the same rows
def _by_definition(logits, parameters, seed, position):
    row = columns_of([dict(parameters)], [seed])
    values = SimpleNamespace(**{name: getattr(row, name)[0] for name in COLUMNS})
    return draw_token(np.frombuffer(logits, np.float32), position, values)


def some_parameters(vocab_size):
    choices = {
        "temperature": [0.0, 0.3, 1.0, 2.5],
        "top_k": [0, 1, 3, 50, 400, 10**6],
        "top_p": [1.0, 0.999, 0.9, 0.5, 0.01],
        "min_p": [0.0, 0.0, 0.02, 0.4, 1.0],
        "typical_p": [1.0, 1.0, 0.97, 0.6, 0.02],
        "top_n_sigma": [0.0, 0.0, 0.73, 2.9],
        "xtc_probability": [0.0, 0.5, 1.0],
        "xtc_threshold": [0.0, 0.3 / vocab_size, 0.017, 0.13, 0.6],
    }
    return {name: values[RNG.integers(len(values))] for name, values in choices.items()}


GREEDY = {"temperature": 0.0}
PLAIN = {"temperature": 1.0}


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
    parameters = [some_parameters(size) for _ in range(count)]
    parameters[0] = PLAIN
    seeds, positions = RNG.integers(-(2**63), 2**63 - 1, count), RNG.integers(0, 10**6, count)
    rows = RNG.permutation(count).astype(np.int32)
    got = draw(logits, parameters, seeds, positions, rows)
    for i, row in enumerate(rows.tolist()):
        want = by_definition(logits[i], parameters[row], int(seeds[row]), int(positions[i]))
        assert got[i] == want, parameters[row]


def test_every_token_is_drawn_as_often_as_its_probability():
    logits = np.log(np.array([[0.5, 0.25, 0.15, 0.1]], np.float32)).repeat(20000, 0)
    one = np.zeros(len(logits), np.int32)
    got = draw(logits, [PLAIN], np.array([7]), np.arange(len(logits)), one)
    np.testing.assert_allclose(np.bincount(got, minlength=4) / len(got), [0.5, 0.25, 0.15, 0.1], atol=0.012)


def test_a_models_threads_draw_the_same_tokens():
    model = Driver(SPECS["llama"], random_weights(SPECS["llama"]), num_threads=3).executor.core
    count = 300
    logits = RNG.normal(0, 2, (count, 700)).astype(np.float32)
    arguments = (
        logits,
        [some_parameters(700) for _ in range(count)],
        RNG.integers(0, 2**62, count),
        RNG.integers(0, 1000, count),
        np.arange(count, dtype=np.int32),
    )
    np.testing.assert_array_equal(draw(*arguments, model=model), draw(*arguments))


@pytest.mark.parametrize("isa", _native.isa_levels())
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_logits_of_a_model_whose_block_maxima_are_known(num_threads, softcap, isa):
    """The model itself finds the maxima of few logits. Those of a step are not taken for the next one's."""
    spec = tiny_spec(vocab_size=1000, final_softcap=softcap)
    driver = Driver(spec, random_weights(spec), num_threads=num_threads, isa=isa)
    prompts = {str(i): RNG.integers(0, spec.vocab_size, 9).tolist() for i in range(4)}
    for name, tokens in prompts.items():
        driver.add(name, tokens)
    for _ in range(4):
        batch = prepare_inputs(driver.states, dict.fromkeys(prompts, 2), driver.buffers, gather_block_tables=False)
        logits = driver.executor.compute(batch, batch.logits_indices)
        parameters = [GREEDY, PLAIN, *(some_parameters(spec.vocab_size) for _ in range(2))]
        seeds, positions, rows = RNG.integers(0, 2**62, 4), RNG.integers(0, 1000, 4), np.arange(4, dtype=np.int32)
        tokens = draw(logits, parameters, seeds, positions, rows, driver.executor.core)
        each = zip(logits.copy(), parameters, seeds, positions.tolist(), strict=True)
        assert tokens.tolist() == [by_definition(*row) for row in each]
        driver.states.commit(batch, {})


@pytest.mark.parametrize("isa", _native.isa_levels())
def test_no_token_is_drawn_from_a_models_logits_with_a_nan(isa):
    spec = tiny_spec(vocab_size=1000)
    weights = random_weights(spec)
    weights["lm_head"].data.view(np.float32)[700] = np.nan
    driver = Driver(spec, weights, isa=isa)
    driver.add("a", [1, 2, 3])
    batch = prepare_inputs(driver.states, {"a": 3}, driver.buffers, gather_block_tables=False)
    logits, one = driver.executor.compute(batch, batch.logits_indices), np.zeros(1, np.int32)
    assert np.isnan(logits[0, 700])
    assert draw(logits, [GREEDY], one, one.astype(np.int64), one, driver.executor.core) == [-1]


def test_a_models_threads_apply_the_same_rules():
    model = Driver(SPECS["llama"], random_weights(SPECS["llama"]), num_threads=3).executor.core
    count, size = 200, 900
    tokens = RNG.integers(0, 9, (count, 40)).astype(np.int32)
    columns = columns_of([some_parameters(size) for _ in range(count)], RNG.integers(0, 2**62, count))
    columns.repetition_penalty[::2], columns.frequency_penalty[::3], columns.dry_multiplier[::5] = 1.6, 0.4, 2.0
    prompt_len, num_tokens = np.full(count, 20, np.int32), np.full(count, 40, np.int32)
    logits = RNG.normal(0, 2, (2 * count, size)).astype(np.float32)  # one draft each
    arguments = (
        logits,
        np.arange(count, dtype=np.int32),
        num_tokens - 1,
        2 * np.arange(count + 1, dtype=np.int32),
        np.full(2 * count, 40) + np.arange(2 * count) % 2,
        RNG.integers(0, 9, count).astype(np.int32),
    )
    found = []
    for threads in (None, model):
        named = {name: getattr(columns, name) for name in COLUMNS}
        rows = _native.SamplingRows(named, tokens, prompt_len, num_tokens, size)
        none = np.zeros(0, np.int32)
        for row in range(count):
            rows.set(row, None, none, np.zeros(0, np.float32), none, none, none, none)
        out = np.empty((count, 2), np.int32)
        logprobs = LogprobArrays.for_counts(np.full(2 * count, 3))
        logprobs.ids[:], logprobs.logprobs[:], logprobs.ranks[:] = 0, 0, 0
        rows.sample(*arguments, None, None, None, None, None, out, *logprobs.all(), threads)
        found.append((out, logprobs.ids, logprobs.logprobs, logprobs.ranks))
    for alone, together in zip(*found, strict=True):
        np.testing.assert_array_equal(alone, together)


def test_rows_apart_and_wrong_arguments():
    logits = np.zeros((3, 64), np.float32)
    logits[:, 9] = 1
    zeros = np.zeros(1, np.int32)
    got = draw(logits[:, :10], [GREEDY], np.array([0]), np.zeros(3, np.int64), zeros.repeat(3))
    assert got.tolist() == [9, 9, 9]
    with pytest.raises(ValueError, match="rows"):
        draw(logits, [GREEDY], np.array([0]), np.zeros(3, np.int64), zeros.repeat(3) + 1)
    with pytest.raises(ValueError, match="contiguous"):
        draw(logits[:, ::2], [GREEDY], np.array([0]), np.zeros(3, np.int64), zeros.repeat(3))


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
@pytest.mark.parametrize(
    "parameters",
    [
        GREEDY,
        PLAIN,
        {"temperature": 0.7, "top_k": 3, "top_p": 0.9, "min_p": 0.1},
        {"temperature": 1.5, "top_p": 0.5},
        {"temperature": 1.0, "typical_p": 0.4, "top_n_sigma": 1.3},
        {"temperature": 1.0, "xtc_probability": 1.0, "xtc_threshold": 0.01},
    ],
)
def test_a_row_with_a_nan_or_an_infinite_maximum_draws_nothing(parameters, size, isa, monkeypatch):
    monkeypatch.setenv("FOREWORD_ISA", isa)
    logits = broken_rows(size)
    rows = np.zeros(len(logits), np.int32)
    positions = np.arange(len(logits))
    got = draw(logits, [parameters], np.array([5]), positions, rows)
    broken = np.isnan(logits).any(1) | ~np.isfinite(logits.max(1, initial=-np.inf))
    for i, row in enumerate(logits):
        assert got[i] == (-1 if broken[i] else by_definition(row, parameters, 5, i)), row


def test_a_nan_is_found_at_every_place():
    for size in (1, 7, 40, 300):
        logits = np.zeros((size, size), np.float32)
        np.fill_diagonal(logits, np.nan)
        zeros = np.zeros(size, np.int32)
        assert (draw(logits, [GREEDY], np.array([0]), np.zeros(size, np.int64), zeros) == -1).all()


@pytest.mark.parametrize("isa", _native.isa_levels())
@pytest.mark.parametrize("size", [1, 40, 256, 5003])
def test_log_probabilities_and_ranks_are_those_of_the_definition(size, isa, monkeypatch):
    monkeypatch.setenv("FOREWORD_ISA", isa)
    logits = RNG.normal(0, 4, (12, size)).astype(np.float32)
    logits[::2] = np.round(logits[::2])  # many ties
    logits[3::4, RNG.random(size) < 0.5] = -np.inf
    logits[:, 0] = 1
    tokens = RNG.integers(0, size, len(logits)).astype(np.int32)
    counts = RNG.choice([-1, 0, 1, 5, size], len(logits)).clip(max=size)
    found = LogprobArrays.for_counts(counts)
    _native.token_logprobs(logits, tokens, *found.all())
    for i, count in enumerate(counts.tolist()):
        span = slice(found.offsets[i], found.offsets[i + 1])
        assert span.stop - span.start == count + 1
        if count >= 0:
            ids, logprobs, ranks = row_logprobs(logits[i], int(tokens[i]), count)
            np.testing.assert_array_equal(found.ids[span], ids)
            np.testing.assert_array_equal(found.ranks[span], ranks)
            np.testing.assert_allclose(found.logprobs[span], logprobs, rtol=1e-6, atol=1e-6)


def test_a_column_that_is_missing_or_of_another_type_is_refused():
    columns = {name: np.zeros(2, dtype) for name, (dtype, _) in COLUMNS.items()}
    tokens, lengths = np.zeros((2, 4), np.int32), np.zeros(2, np.int32)
    _native.SamplingRows(columns, tokens, lengths, lengths, 9)
    for wrong in ({"top_p": np.zeros(2)}, {"top_k": np.zeros(1, np.int32)}):
        with pytest.raises(ValueError, match="top_"):
            _native.SamplingRows(columns | wrong, tokens, lengths, lengths, 9)
    del columns["typical_p"]
    with pytest.raises(ValueError, match="typical_p"):
        _native.SamplingRows(columns, tokens, lengths, lengths, 9)
