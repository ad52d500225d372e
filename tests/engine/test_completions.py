"""Several completions of one prompt: n of them, or the n best of more."""

from itertools import pairwise

import numpy as np
import pytest
from engine_rig import Guesser, V, make_engine, run
from oracle_model import START, following, logits_after, plain_output

from foreword.batch import SamplingParams
from foreword.engine.speculation import SpeculationConfig
from foreword.errors import RequestError
from foreword.sampling import derived_seed, gumbel_noise

PROMPT = list(range(1, 15))
EOS = (3, 7, 11)


def expected(prompt, seed, index, length, eos=()):
    """The index-th completion, and its mean and cumulative log-probability, with no engine at all."""
    noise = lambda position: gumbel_noise(derived_seed(seed, index), position, np.arange(V))  # noqa: E731
    tokens = plain_output(prompt, lambda z, p: (z.astype(float) + noise(p)).argmax(), length, V)
    ends = [i for i, token in enumerate(tokens) if token in eos]
    tokens = tokens[: ends[0] + 1] if ends else tokens
    prefix, total = START, 0.0
    for token in prompt:
        prefix = following(prefix, token)
    for token in tokens:
        logits = logits_after(prefix, V).astype(float)
        total += logits[token] - np.log(np.exp(logits).sum())
        prefix = following(prefix, token)
    return tokens, total / len(tokens), total


def tokens_of(output):
    return [c.token_ids for c in output.outputs]


def serve(params, prompt=PROMPT, stream=False, **config):
    """One request on an engine of its own: its output, and the engine."""
    engine = make_engine(**config)
    engine.add_request("a", prompt, params, stream=stream)
    output = run(engine)["a"]
    engine.close()
    return output, engine


def test_each_completion_has_a_seed_of_its_own():
    output, _ = serve(SamplingParams(n=4, seed=3, max_tokens=8))
    assert [c.index for c in output.outputs] == [0, 1, 2, 3]
    assert tokens_of(output) == [expected(PROMPT, 3, i, 8)[0] for i in range(4)]
    assert len(set(map(tuple, tokens_of(output)))) == 4
    alone, _ = serve(SamplingParams(seed=3, max_tokens=8))
    assert tokens_of(alone) == tokens_of(output)[:1]


@pytest.mark.parametrize("length", [1, 4, 13, 16])
@pytest.mark.parametrize("params", [{"n": 4}, {"n": 2, "best_of": 4}])
def test_the_prompt_is_computed_once(params, length):
    prompt = [1 + i % 29 for i in range(length)]
    engine = make_engine()
    engine.add_request("a", prompt, SamplingParams(seed=3, max_tokens=8, **params))
    completions = list(engine._outputs.groups["a"].completions)
    run(engine)
    assert engine.executor.num_tokens == length + 3 + 4 * 7  # it, its last token for each sibling, and decodes
    assert [c.request.num_cached for c in completions] == [0, *[length - 1] * 3]


def test_without_a_prefix_cache_every_completion_computes_the_prompt():
    output, engine = serve(SamplingParams(n=3, seed=3, max_tokens=8), prefix_caching=False)
    assert engine.executor.num_tokens == 3 * (len(PROMPT) + 7)
    assert tokens_of(output) == [expected(PROMPT, 3, i, 8)[0] for i in range(3)]


def test_best_of_keeps_those_of_the_largest_mean_log_probability():
    """Not of the largest sum, which prefers what ends early: here the two choices differ."""
    params = SamplingParams(n=3, best_of=12, seed=5, max_tokens=12)
    output, _ = serve(params, eos=EOS, max_num_seqs=4)
    candidates = [expected(PROMPT, 5, i, 12, EOS) for i in range(12)]
    by_mean = sorted(candidates, key=lambda c: -c[1])[:3]
    by_sum = sorted(candidates, key=lambda c: -c[2])[:3]
    assert len({len(tokens) for tokens, *_ in candidates}) > 3
    assert by_mean != by_sum
    assert tokens_of(output) == [tokens for tokens, *_ in by_mean]
    assert [c.index for c in output.outputs] == [0, 1, 2]
    for completion, (_, _, total) in zip(output.outputs, by_mean, strict=True):
        assert completion.cumulative_logprob == pytest.approx(total, abs=1e-4)
        assert completion.logprobs is None


def test_best_of_may_report_log_probabilities_too():
    output, _ = serve(SamplingParams(n=2, best_of=5, seed=3, max_tokens=6, logprobs=2))
    for completion in output.outputs:
        assert [next(iter(entry)) for entry in completion.logprobs] == completion.token_ids
        assert all(len(entry) >= 2 for entry in completion.logprobs)


def test_of_equal_candidates_the_first_stay():
    params = SamplingParams(n=2, best_of=4, temperature=0.0, max_tokens=5)
    output, _ = serve(params)
    greedy = plain_output(PROMPT, lambda z, p: z.argmax(), 5, V)
    assert tokens_of(output) == [greedy, greedy]


def test_best_of_the_same_number_chooses_nothing():
    output, _ = serve(SamplingParams(n=3, best_of=3, seed=3, max_tokens=8))
    assert tokens_of(output) == [expected(PROMPT, 3, i, 8)[0] for i in range(3)]


WAYS = {
    "chunked": {"max_num_batched_tokens": 3},
    "uncached": {"prefix_caching": False},
    "one at a time": {"max_num_seqs": 1},
    "planned ahead": {"async_scheduling": True},
    "preempted": {"blocks": 17, "reserve_full_prompt": False},
    "preempted and planned ahead": {"blocks": 17, "reserve_full_prompt": False, "async_scheduling": True},
    "speculating": {"speculation": SpeculationConfig(method="draft_model", model="x", adaptive=False),
                    "drafter": Guesser},
}  # fmt: skip


@pytest.mark.one_in(9)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("params", [{"n": 6}, {"n": 2, "best_of": 6}])
def test_completions_are_the_same_whichever_way_they_are_served(way, params):
    params = SamplingParams(seed=9, max_tokens=20, logprobs=1, **params)
    plain, _ = serve(params, eos=EOS[:1])
    other, _ = serve(params, eos=EOS[:1], **WAYS[way])
    assert other.outputs == plain.outputs
    if "preempted" in way:
        assert other.metrics.num_preemptions > 0


def test_completions_are_the_same_in_a_crowd():
    params = SamplingParams(n=2, best_of=4, seed=9, max_tokens=12)
    engine = make_engine(max_num_seqs=5)
    for i in range(4):
        engine.add_request(f"other {i}", [1, 2, 3 + i], SamplingParams(n=3, seed=i, max_tokens=9))
    engine.step()
    engine.add_request("a", PROMPT, params)
    assert run(engine)["a"].outputs == serve(params)[0].outputs


def test_a_prompt_that_is_preempted_itself_still_serves_its_siblings():
    """The first completion loses its blocks before or after the others got the prompt."""
    params = SamplingParams(n=4, seed=3, max_tokens=20)
    prompt = [1 + i % 9 for i in range(30)]
    engine = make_engine(blocks=17, reserve_full_prompt=False, max_num_batched_tokens=8)
    engine.add_request("b", prompt[:20], SamplingParams(seed=1, max_tokens=30))
    engine.add_request("a", prompt, params)
    outputs = run(engine)
    assert outputs["a"].metrics.num_preemptions > 0
    assert tokens_of(outputs["a"]) == [expected(prompt, 3, i, 20)[0] for i in range(4)]


@pytest.mark.parametrize("max_tokens", [1, 5])
def test_more_completions_than_rows_take_turns(max_tokens):
    output, _ = serve(SamplingParams(n=20, seed=3, max_tokens=max_tokens), max_num_seqs=3)
    assert tokens_of(output) == [expected(PROMPT, 3, i, max_tokens)[0] for i in range(20)]


def test_a_stream_shows_every_completion_as_far_as_it_is():
    engine = make_engine(max_num_seqs=2)
    engine.add_request("a", PROMPT, SamplingParams(n=3, seed=3, max_tokens=6), stream=True)
    want = [expected(PROMPT, 3, i, 6)[0] for i in range(3)]
    reports = []
    while engine.has_work:
        reports += engine.step()
    assert all([c.index for c in report.outputs] == [0, 1, 2] for report in reports)
    for i in range(3):
        lengths = [len(report.outputs[i].token_ids) for report in reports]
        assert lengths == sorted(lengths)
        assert all(report.outputs[i].token_ids == want[i][:n] for report, n in zip(reports, lengths, strict=True))
        texts = [report.outputs[i].text for report in reports]
        assert all(after.startswith(before) for before, after in pairwise(texts))
    assert [r.finished for r in reports] == [False] * (len(reports) - 1) + [True]
    assert len(reports) > 6  # the third waits for a row


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_candidates_are_not_streamed(async_scheduling):
    params = SamplingParams(n=2, best_of=4, seed=3, max_tokens=6)
    engine = make_engine(async_scheduling=async_scheduling)
    engine.add_request("a", PROMPT, params, stream=True)
    reports = []
    while engine.has_work:
        reports += engine.step()
    engine.close()
    assert [r.finished for r in reports] == [True]
    assert reports[0].outputs == serve(params)[0].outputs


def test_aborting_completions_ends_all_of_them():
    engine = make_engine()
    params = SamplingParams(n=3, temperature=0.0, max_tokens=10)
    engine.add_request("a", [1, 2, 3], params)
    out = engine.abort("a")
    assert [(c.finish_reason, c.token_ids) for c in out.outputs] == [("abort", [])] * 3
    assert not engine.has_work
    engine.add_request("a", [1, 2, 3], params)
    engine.step()
    engine.step()
    engine.abort("a")
    assert run(engine) == {}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("num_steps", range(16))
@pytest.mark.parametrize("config", [{}, {"blocks": 17, "reserve_full_prompt": False}, {"async_scheduling": True}])
def test_an_aborted_best_of_returns_the_best_beginnings(num_steps, config):
    """At any time, with candidates that run, wait for the prompt, for a row, or for their blocks back."""
    engine = make_engine(max_num_seqs=5, **config)
    engine.add_request("a", PROMPT, SamplingParams(n=3, best_of=8, seed=5, max_tokens=20))
    engine.add_request("b", [1, 2], SamplingParams(temperature=0.0, max_tokens=4))
    for _ in range(num_steps):
        engine.step()
    completions = list(engine._outputs.groups["a"].completions)
    out = engine.abort("a")
    begun = [c.transcript.token_ids for c in completions]
    assert all(tokens == expected(PROMPT, 5, i, 20)[0][: len(tokens)] for i, tokens in enumerate(begun))
    means = [expected(PROMPT, 5, i, len(t))[1] if t else -np.inf for i, t in enumerate(begun)]
    order = sorted(range(8), key=lambda i: -means[i])
    assert tokens_of(out) == [begun[i] for i in order[:3]]
    assert [c.finish_reason for c in out.outputs] == ["abort"] * 3
    assert out.finished
    if engine.has_work:
        run(engine)
    engine.close()
    assert engine.cache.pool.num_used == 0
    assert not engine.states.live.any()


@pytest.mark.parametrize(("field", "params"), [("n", {"n": 10**9}), ("best_of", {"n": 2, "best_of": 10**9})])
def test_a_number_of_completions_that_would_fill_the_memory_is_refused(field, params):
    engine = make_engine()
    with pytest.raises(RequestError, match=f"request 'a': {field} = 1000000000: is above 16384"):
        engine.add_request("a", PROMPT, SamplingParams(**params))
    assert not engine.has_work


def test_fewer_candidates_than_completions_are_refused():
    with pytest.raises(RequestError, match="best_of = 2: must be at least n = 3"):
        make_engine().add_request("a", PROMPT, SamplingParams(n=3, best_of=2))
