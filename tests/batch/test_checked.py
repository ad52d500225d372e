"""Prompts and parameters that are checked once: the values that carry it, and the admission that trusts them."""

from functools import partial

import numpy as np
import pytest
from batch_rig import states_of

from foreword.batch import KVGroup, NewRequest, RequestStates, SamplingParams
from foreword.batch.values.checked import CheckedParams, CheckedPrompt
from foreword.errors import RequestError

VOCAB = 100
states = partial(states_of, KVGroup(4), vocab_size=VOCAB)


def admit(into: RequestStates, prompt, params) -> list[int]:
    row = into.add_request(NewRequest("a", prompt, [[1]], sampling_params=params))
    return into.token_ids[row, : into.num_tokens[row]].tolist()


@pytest.mark.parametrize(("ids", "at"), [([VOCAB], 0), ([0, -1, VOCAB], 1)])
def test_a_checked_prompt_has_ids_of_the_vocabulary_alone(ids, at):
    with pytest.raises(RequestError, match=rf"'r'.*prompt_token_ids\[{at}\] = {ids[at]}.*vocabulary has 100 tokens"):
        CheckedPrompt(np.array(ids, np.int32), VOCAB, "r")


def test_a_checked_prompt_cannot_become_another():
    given = np.arange(8, dtype=np.int32)[::2]
    prompt = CheckedPrompt(given, VOCAB)
    given[:] = 99
    assert prompt.token_ids.tolist() == [0, 2, 4, 6]
    assert len(prompt) == 4
    assert prompt.token_ids.flags.c_contiguous
    assert prompt.token_ids.dtype == np.int32
    with pytest.raises(ValueError, match="read-only"):
        prompt.token_ids[0] = 1
    with pytest.raises(AttributeError):
        prompt.token_ids = given


def test_checked_parameters_are_in_range():
    with pytest.raises(RequestError, match="'r'"):
        CheckedParams(SamplingParams(stop_token_ids=[VOCAB]), VOCAB, "r")
    of_one = CheckedParams(SamplingParams(n=3, top_k=5), VOCAB).of_completion(seed=7, logprobs=0, prompt_logprobs=None)
    assert of_one.params == SamplingParams(n=1, top_k=5, seed=7, logprobs=0)
    assert of_one.vocab_size == VOCAB


def test_admission_checks_nothing_twice(monkeypatch):
    prompt, params = CheckedPrompt(np.array([1, 2], np.int32), VOCAB), CheckedParams(SamplingParams(top_k=3), VOCAB)
    monkeypatch.setattr(SamplingParams, "check", lambda *_: pytest.fail("the parameters are checked again"))
    monkeypatch.setattr("foreword.batch.state.admission.flat_int32", _refuse_prompts)
    into = states()
    assert admit(into, prompt, params) == [1, 2]
    assert into.sampling.top_k[into.row_of("a")] == 3


def _refuse_prompts(rid, field, ids):
    assert field != "prompt_token_ids", "the prompt is checked again"
    return np.array(ids, np.int32)


def test_what_was_checked_for_another_vocabulary_is_checked_again():
    prompt, params = CheckedPrompt(np.array([50], np.int32), VOCAB), CheckedParams(SamplingParams(), VOCAB)
    with pytest.raises(RequestError, match=r"prompt_token_ids\[0\] = 50"):
        admit(states(vocab_size=40), prompt, params)
    wide = CheckedParams(SamplingParams(stop_token_ids=[50]), VOCAB)
    with pytest.raises(RequestError, match="stop_token_ids = 50"):
        admit(states(vocab_size=40), [1], wide)
    assert admit(states(vocab_size=60), prompt, wide) == [50]
