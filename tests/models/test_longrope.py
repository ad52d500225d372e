"""longrope selects one of its two sets of frequencies by the length of the engine, and scales them."""

import math
from dataclasses import replace

import numpy as np
import pytest

from foreword.batch import SamplingParams
from foreword.engine import EngineConfig, engine_config
from foreword.engine.build import build_engine, load
from foreword.errors import ConfigError, ModelError
from foreword.models.loader import load_model
from models.recorded import TINY, make
from models.running import EXECUTORS, FLOATS

WITHIN, PAST = TINY["phi3-longrope"], TINY["phi3-longrope-past"]  # one model, and texts of 24 and 40 tokens
ORIGINAL, LONGEST, SHORT, LONG = 32, 64, [1.0, 1.3, 1.7, 2.0], [2.0, 4.0, 6.0, 8.0]


def model(tmp_path, parameters=None, **changes):
    rope = {**WITHIN["config"]["rope_parameters"], **(parameters or {})}
    return load_model(make(tmp_path, "phi3-longrope", rope_parameters=rope, **changes))


def frequencies(factors):
    return [1 / (factor * 500.0 ** (2 * j / 8)) for j, factor in enumerate(factors)]


def test_short_and_long_engines_have_different_frequencies(tmp_path):
    spec = model(tmp_path).spec
    assert (spec.max_model_len, spec.longest_model_len) == (ORIGINAL, LONGEST)
    assert spec.for_length(1) is spec.for_length(ORIGINAL) is spec
    longer = spec.for_length(ORIGINAL + 1)
    assert longer.max_model_len == LONGEST
    assert longer.for_length(1) is longer
    for side, factors in ((spec, SHORT), (longer, LONG)):
        for layer in side.layers:
            np.testing.assert_allclose(layer.rope.inv_freq, frequencies(factors), rtol=1e-6)
    same = [replace(s, max_model_len=0, longer=None, layers=()) for s in (spec, longer)]
    assert same[0] == same[1]


USUAL = math.sqrt(1 + math.log(LONGEST / ORIGINAL) / math.log(ORIGINAL))


@pytest.mark.parametrize(
    ("parameters", "short", "long"),
    [
        ({}, USUAL, USUAL),
        ({"factor": 8.0}, *[math.sqrt(1 + math.log(8) / math.log(ORIGINAL))] * 2),
        ({"factor": 0.5}, 1, 1),
        ({"attention_factor": 1.25, "factor": 8.0}, 1.25, 1.25),
        ({"short_mscale": 1.5, "long_mscale": 1.75}, 1.5, 1.75),
        ({"long_mscale": 1.75}, USUAL, 1.75),
    ],
)
def test_the_scale_is_computed_unless_given(tmp_path, parameters, short, long):
    spec = model(tmp_path, parameters).spec
    assert spec.layers[0].rope.scale == pytest.approx(short)
    assert spec.for_length(LONGEST).layers[0].rope.scale == pytest.approx(long)


def test_a_model_limited_to_its_original_length_has_one_set(tmp_path):
    spec = model(tmp_path, max_position_embeddings=ORIGINAL).spec
    assert (spec.max_model_len, spec.longest_model_len, spec.longer) == (ORIGINAL, ORIGINAL, None)
    assert spec.layers[0].rope.scale == 1


@pytest.mark.parametrize("key", ["long_factor", "short_factor"])
def test_factors_of_a_wrong_length_are_refused(tmp_path, key):
    with pytest.raises(ModelError, match=f"{key} is not 4 numbers above 0"):
        model(tmp_path, {key: [1.0, 2.0]})


def next_token_logprobs(engine, prompt):
    """{token: log-probability} of the most likely tokens after a prompt."""
    engine.add_request("a", prompt, SamplingParams(temperature=0.0, max_tokens=1, logprobs=20))
    while engine.has_work:
        done = engine.step()
    return {token: entry.logprob for token, entry in done[0].outputs[0].logprobs[0].items()}


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(("max_model_len", "tiny"), [(None, WITHIN), (ORIGINAL, WITHIN), (LONGEST, PAST), (41, PAST)])
def test_an_engine_of_either_length_gives_the_probabilities_of_transformers(tmp_path, executor, max_model_len, tiny):
    config = engine_config(
        {"max_model_len": max_model_len, "block_size": 4, "max_num_batched_tokens": 16, "max_num_seqs": 2}
    )
    engine = build_engine(load(model(tmp_path), executor, FLOATS[executor]), config)
    assert engine.states.max_model_len == (max_model_len or ORIGINAL)
    found = next_token_logprobs(engine, tiny["token_ids"])
    logits = np.array(tiny["last_logits"][-1])
    want = logits - np.log(np.exp(logits).sum())
    assert len(found) == 20
    for token, logprob in found.items():
        assert logprob == pytest.approx(want[token], abs=1e-4)


def test_max_model_len_is_limited_by_the_model(tmp_path):
    with pytest.raises(ConfigError, match=r"max_model_len=65: the model was made for 64 tokens"):
        build_engine(load(model(tmp_path), "numpy"), EngineConfig(max_model_len=LONGEST + 1))


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_request_that_grows_past_the_original_length_equals_one_long_prompt(tmp_path, executor):
    """All its keys use the long set from the beginning, so crossing the original length changes nothing."""
    config = engine_config({"max_model_len": LONGEST, "block_size": 4, "max_num_seqs": 2, "prefix_caching": False})
    engine = build_engine(load(model(tmp_path), executor, FLOATS[executor]), config)
    text = PAST["token_ids"][:28]
    for _ in range(12):
        grown = next_token_logprobs(engine, text)
        text = [*text, max(grown, key=grown.get)]
    engine.add_request("b", text[:28], SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
    while engine.has_work:
        done = engine.step()
    assert done[0].outputs[0].token_ids == text[28:]


def of_each_type(tmp_path, sliding, **changes):
    """A Gemma 3 whose full layers have longrope, and the others these parameters; with changes of other keys."""
    tiny = TINY["gemma3"]["config"]
    pairs = tiny["head_dim"] // 2
    factors = {"short_factor": [1.5] * pairs, "long_factor": [3.0] * pairs}
    full = {"rope_type": "longrope", "rope_theta": 500.0, "original_max_position_embeddings": ORIGINAL, **factors}
    rope = {"full_attention": full, "sliding_attention": {"rope_theta": 500.0, **factors, **sliding}}
    return load_model(make(tmp_path, "gemma3", rope_parameters=rope, **changes)).spec


DEFAULT = {"rope_type": "default", "short_factor": None, "long_factor": None}


def test_full_layers_alone_select_their_set_by_the_length_of_the_engine(tmp_path):
    spec = of_each_type(tmp_path, DEFAULT)
    assert (spec.max_model_len, spec.longest_model_len) == (ORIGINAL, LONGEST)
    for side, factor in ((spec, 1.5), (spec.for_length(ORIGINAL + 1), 3.0)):
        found = [layer.rope.inv_freq[0] * (1 if layer.sliding_window else factor) for layer in side.layers]
        assert found == pytest.approx([1.0] * len(side.layers))


def test_types_of_layers_with_longrope_of_other_lengths_are_refused(tmp_path):
    with pytest.raises(ModelError, match=r"longrope with original_max_position_embeddings = \[16, 32\]\. Use a model"):
        of_each_type(tmp_path, {"rope_type": "longrope", "original_max_position_embeddings": 16})


def test_an_original_length_beside_those_of_types_of_layers_is_equal_or_refused(tmp_path):
    key = "original_max_position_embeddings"
    same = of_each_type(tmp_path / "same", DEFAULT, **{key: ORIGINAL})
    assert same == of_each_type(tmp_path / "without", DEFAULT)
    with pytest.raises(ModelError, match=f"{key} = 16 has no effect in the reference, which reads that of full_atten"):
        of_each_type(tmp_path / "other", DEFAULT, **{key: 16})
