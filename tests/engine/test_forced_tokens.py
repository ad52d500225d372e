"""Forced tokens begin an output, whatever their probabilities, and log-probabilities are those of the model."""

import numpy as np
import pytest
from engine_rig import V, answer, make_engine, run
from oracle_model import START, following, logits_after

from foreword.batch import SamplingParams
from foreword.errors import RequestError
from foreword.executors import Capability
from foreword.sampling import GivenTokens

FORCED = [7, 3, 3, 28, 1, 0, 12, 5, 9, 20, 4]


def logprob(prompt, output, position):
    """The log-probability of an output token, with no engine at all."""
    prefix = START
    for token in [*prompt, *output[:position]]:
        prefix = following(prefix, token)
    logits = np.asarray(logits_after(prefix, V), np.float64)
    return float(logits[output[position]] - np.log(np.exp(logits).sum()))


@pytest.mark.parametrize("config", [{}, {"async_scheduling": True}, {"max_forced_tokens": 0}, {"blocks": 17}])
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 1.3, "top_k": 2, "seed": 3}])
def test_the_output_begins_with_the_forced_tokens_and_has_their_real_log_probabilities(config, params):
    prompt = [5, 1, 9]
    given = SamplingParams(forced_tokens=FORCED, max_tokens=14, logprobs=0, detokenize=False, **params)
    completion = answer(prompt, given, **config).outputs[0]
    assert list(completion.token_ids[: len(FORCED)]) == FORCED
    assert len(completion.token_ids) == 14
    found = [entry[token].logprob for entry, token in zip(completion.logprobs, completion.token_ids, strict=True)]
    expected = [logprob(prompt, completion.token_ids, i) for i in range(14)]
    assert found == pytest.approx(expected, abs=1e-4)


def test_what_follows_the_forced_tokens_is_what_follows_them_in_a_prompt():
    greedy = {"temperature": 0.0, "detokenize": False}
    forced = answer([5, 1], SamplingParams(forced_tokens=FORCED, max_tokens=20, **greedy)).outputs[0].token_ids
    after = answer([5, 1, *FORCED], SamplingParams(max_tokens=20 - len(FORCED), **greedy)).outputs[0].token_ids
    assert list(forced) == [*FORCED, *after]


def test_a_forced_end_token_ends_the_output():
    output = answer([5], SamplingParams(forced_tokens=[4, 6, 8], max_tokens=9, detokenize=False), eos=(6,)).outputs[0]
    assert (list(output.token_ids), output.finish_reason) == ([4, 6], "stop")


def test_every_completion_has_the_forced_tokens():
    engine = make_engine()
    params = SamplingParams(forced_tokens=[4, 6], n=3, max_tokens=5, detokenize=False, seed=1)
    engine.add_request("a", [1, 2], params)
    outputs = run(engine)["a"].outputs
    assert [list(output.token_ids[:2]) for output in outputs] == [[4, 6]] * 3
    assert len({tuple(output.token_ids) for output in outputs}) > 1


@pytest.mark.parametrize(
    ("others", "match"),
    [
        ({"structured_outputs": {"regex": "a"}}, "forced_tokens = .*decide which tokens may follow"),
        ({"thinking_end": "x"}, "forced_tokens = .*decide which tokens may follow"),
        ({"forced_tokens": [-1]}, "forced_tokens = -1: expected a token id"),
    ],
)
def test_parameters_that_contradict_forced_tokens_are_refused(others, match):
    with pytest.raises(RequestError, match=match):
        SamplingParams(**{"forced_tokens": [1]} | others)


def test_requests_that_cannot_have_forced_tokens_are_refused():
    params = SamplingParams(forced_tokens=[1])
    engine = make_engine()
    with pytest.raises(RequestError, match=r"forced_tokens = .*a grammar or a thinking part"):
        engine.add_request("a", [1], params, grammar=GivenTokens([2]))
    with pytest.raises(RequestError, match=rf"expected a token id in \[0, {V}\)"):
        engine.add_request("a", [1], SamplingParams(forced_tokens=[V]))
    engine.executor.capabilities = engine.executor.capabilities - {Capability.GRAMMAR}
    with pytest.raises(RequestError, match=r"forced_tokens = .*does not support"):
        engine.add_request("a", [1], params)
