"""Outputs of a request: all of it, its new part, its usage and its times."""

from dataclasses import replace
from itertools import chain, pairwise

import pytest
from engine_rig import Guesser, answer, make_engine, run

from foreword import SamplingParams
from foreword.engine.outputs import CompletionOutput, Position, RequestMetrics, RequestOutput, Transcript, Usage
from foreword.engine.speculation import SpeculationConfig
from foreword.errors import RequestError
from foreword.sampling.logprobs import Logprob

PROMPT = [1, 2, 3, 4, 5]


def reports(engine, params, prompt=PROMPT):
    """Every output of a streaming request."""
    engine.add_request("a", prompt, params, stream=True)
    found = []
    while engine.has_work:
        found += engine.step()
    return found


TIGHT = {"blocks": 9, "M": 32, "reserve_full_prompt": False}


@pytest.mark.one_in(15)
@pytest.mark.parametrize("config", [{}, {"async_scheduling": True}, TIGHT])
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("stop", "logprobs"), [((), None), (("ab", "c"), 2), (("é", "m"), None)])
def test_new_parts_join_to_the_whole(config, seed, stop, logprobs):
    params = SamplingParams(seed=seed, max_tokens=20, stop=stop, logprobs=logprobs, n=2, ignore_eos=True)
    found = reports(make_engine(**config), params)
    alone = answer(PROMPT, params, **config)
    for index, whole in enumerate(alone.outputs):
        parts = [output.outputs[index] for output in found]
        assert "".join(part.new_text for part in parts) == whole.text == parts[-1].text
        assert list(chain(*(part.new_token_ids for part in parts))) == whole.token_ids == parts[-1].token_ids
        assert list(chain(*(part.new_logprobs or [] for part in parts))) == (whole.logprobs or [])
        for before, part in pairwise(parts):
            assert part.text == before.text + part.new_text
            assert part.token_ids == before.token_ids + part.new_token_ids
        assert parts[-1] == whole
        assert whole.new_text == whole.text


def test_an_output_keeps_what_it_had_when_more_comes():
    first, *_, last = reports(make_engine(), SamplingParams(seed=1, max_tokens=9, ignore_eos=True, logprobs=0))
    (a,), (b,) = first.outputs, last.outputs
    assert (len(a.token_ids), len(a.logprobs), len(b.token_ids)) == (1, 1, 9)
    assert b.text.startswith(a.text)


def test_nothing_is_copied_from_the_start_for_an_output():
    """Outputs share one transcript, so a stream costs O(tokens) in total."""
    found = reports(make_engine(), SamplingParams(seed=1, max_tokens=9, ignore_eos=True, logprobs=0, prompt_logprobs=0))
    assert len({id(output.outputs[0].transcript) for output in found}) == 1
    assert len({id(output.prompt_logprobs) for output in found}) == 1


def test_what_a_consumer_missed_is_new_in_the_next_output():
    found = reports(make_engine(), SamplingParams(seed=1, max_tokens=9, ignore_eos=True))
    merged = found[4].following(found[3].following(found[2]))
    assert merged.outputs[0].new_token_ids == [o.outputs[0].new_token_ids[0] for o in found[2:5]]
    assert merged.outputs[0].text == found[4].outputs[0].text
    assert found[1].following(None) is found[1]


def test_an_aborted_request_has_what_was_not_returned_yet():
    engine = make_engine()
    engine.add_request("a", PROMPT, SamplingParams(seed=1, max_tokens=9, ignore_eos=True), stream=True)
    (first,) = engine.step()
    engine.give_back([first])
    last = engine.abort("a")
    assert last.outputs[0].new_token_ids == last.outputs[0].token_ids == first.outputs[0].token_ids
    assert (last.outputs[0].finish_reason, last.finished) == ("abort", True)


def test_usage_counts_tokens():
    engine = make_engine()
    engine.add_request("a", PROMPT * 3, SamplingParams(seed=1, max_tokens=4, n=2, ignore_eos=True))
    run(engine)
    engine.add_request("a", PROMPT * 3, SamplingParams(seed=1, max_tokens=4, n=2, ignore_eos=True))
    usage = run(engine)["a"].usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (15, 8, 23)
    assert 8 <= usage.cached_tokens < 15
    assert usage.reasoning_tokens is None


def completion(**values):
    return CompletionOutput(
        0, Transcript(["ab"], [1, 2], [{1: Logprob(-1.0, 1)}] * 2), Position(), Position(1, 2), **values
    )


def test_reasoning_tokens_are_part_of_the_usage():
    output = RequestOutput("a", None, [1], [completion(reasoning_tokens=3), completion()])
    assert output.usage == Usage(1, 4, 0, 3)


def test_outputs_compare_by_what_they_say():
    other = replace(
        completion(), transcript=Transcript(["a", "b"], [1, 2, 3], completion().logprobs), end=Position(2, 2)
    )
    assert completion() == other != replace(other, finish_reason="stop")
    assert completion() != 1
    assert "text='ab'" in repr(completion())


def test_times_give_durations():
    metrics = RequestMetrics(1.0, 1.5, 2.0, 4.0, num_output_tokens=5)
    assert (metrics.queue_time, metrics.time_to_first_token, metrics.e2e_latency) == (0.5, 1.0, 3.0)
    assert metrics.tokens_per_second == 2.0
    for unknown in (RequestMetrics(1.0), replace(metrics, num_output_tokens=1), replace(metrics, finished_time=2.0)):
        assert unknown.tokens_per_second is None
    assert (RequestMetrics(1.0).queue_time, RequestMetrics(1.0).e2e_latency) == (None, None)


@pytest.mark.parametrize("config", [{}, TIGHT, {"max_num_seqs": 1}])
def test_drafts_of_a_request_are_counted(config):
    """One sample per step and row, and the accepted drafts, make the tokens; also if rows change by preemption."""
    steps = []
    engine = make_engine(drafter=Guesser, speculation=SpeculationConfig(num_tokens=3, adaptive=False), **config)
    params = SamplingParams(temperature=0.0, max_tokens=25, ignore_eos=True)
    for name in "abc":
        engine.add_request(name, PROMPT, params)
    observe = engine._outputs.process

    def process(rows, before, sampled, step, num_drafts=None):
        steps.append(0 if num_drafts is None else int(num_drafts.sum()))
        return observe(rows, before, sampled, step, num_drafts)

    engine._outputs.process = process
    outputs = run(engine).values()
    assert sum(output.metrics.num_proposed_drafts for output in outputs) == sum(steps) > 0
    for output in outputs:
        assert 0 < output.metrics.num_accepted_drafts <= output.metrics.num_proposed_drafts
        assert output.metrics.num_accepted_drafts < output.metrics.num_output_tokens == 25


@pytest.mark.parametrize(("kept", "expected"), [(None, 40), (3, 3), (40, 40), (100, 40), (-1, 40)])
def test_the_last_tokens_of_a_prompt_are_kept(kept, expected):
    prompt = [1 + i % 20 for i in range(40)]
    assert (
        answer(prompt, SamplingParams(max_tokens=2, truncate_prompt_tokens=kept)).prompt_token_ids == prompt[-expected:]
    )


def test_a_long_prompt_is_truncated_to_leave_room_for_the_output():
    engine = make_engine(M=64)
    for name, params in {
        "a": SamplingParams(max_tokens=10, truncate_prompt_tokens=-1, ignore_eos=True),
        "b": SamplingParams(max_tokens=None, truncate_prompt_tokens=-1, ignore_eos=True),
    }.items():
        engine.add_request(name, "abcde" * 100, params)
    outputs = run(engine)
    assert [len(outputs[name].prompt_token_ids) for name in "ab"] == [54, 63]
    assert outputs["a"].outputs[0].num_tokens == 10
    assert outputs["a"].prompt == "abcde" * 100


@pytest.mark.parametrize(
    "params",
    [
        {"truncate_prompt_tokens": 0},
        {"truncate_prompt_tokens": -2},
        {"truncate_prompt_tokens": "1"},
        {"truncate_prompt_tokens": -1, "max_tokens": 64},
    ],
)
def test_a_wrong_truncation_is_refused(params):
    with pytest.raises(RequestError, match="truncate_prompt_tokens"):
        make_engine(M=64).add_request("a", PROMPT, SamplingParams(**params))
