"""The engine on a model whose outputs are known without it."""

from itertools import pairwise

import numpy as np
import pytest
from engine_rig import V, answer, make_engine, run
from oracle_model import START, following, logits_after, plain_output

from foreword.batch import SamplingParams
from foreword.errors import PlanError, RequestError
from foreword.sampling import RowValues, gumbel_noise, token_logprobs


def greedy(**more) -> SamplingParams:
    return SamplingParams(temperature=0.0, **({"max_tokens": 10} | more))


def greedy_output(prompt, length: int = 10) -> list[int]:
    return plain_output(prompt, lambda z, p: z.argmax(), length, V)


@pytest.mark.smoke
def test_a_greedy_output_is_the_argmax_token_by_token():
    out = answer([1, 2, 3], greedy())
    assert out.outputs[0].token_ids == greedy_output([1, 2, 3])
    assert out.outputs[0].finish_reason == "length"
    assert out.prompt_token_ids == [1, 2, 3]
    assert out.finished


@pytest.mark.smoke
def test_a_sampled_output_is_the_argmax_of_logits_plus_noise():
    engine = make_engine()
    engine.add_request("a", [1, 2, 3], SamplingParams(temperature=0.8, seed=5, max_tokens=12))
    scaled = lambda z, p: (z.astype(float) / float(np.float32(0.8)) + gumbel_noise(5, p, np.arange(V))).argmax()  # noqa: E731
    assert run(engine)["a"].outputs[0].token_ids == plain_output([1, 2, 3], scaled, 12, V)


def test_the_end_token_stops_and_is_kept_without_its_text():
    expected = greedy_output([1, 2, 3])
    eos = expected[4]
    out = answer([1, 2, 3], greedy(), eos=[eos]).outputs[0]
    cut = expected.index(eos)
    assert out.token_ids == expected[: cut + 1]
    assert (out.finish_reason, out.stop_reason) == ("stop", None)
    assert len(out.text) == cut


def test_ignore_eos_goes_on():
    expected = greedy_output([1, 2, 3])
    assert answer([1, 2, 3], greedy(ignore_eos=True), eos=[expected[4]]).outputs[0].token_ids == expected


def test_a_stop_token_is_named_and_one_requests_stop_is_not_anothers():
    expected = greedy_output([1, 2, 3])
    stop = expected[4]
    engine = make_engine()
    engine.add_request("a", [1, 2, 3], greedy(stop_token_ids=[stop]))
    engine.add_request("b", [1, 2, 3], greedy())
    outputs = run(engine)
    assert outputs["a"].outputs[0].stop_reason == stop
    assert outputs["a"].outputs[0].token_ids == expected[: expected.index(stop) + 1]
    assert outputs["b"].outputs[0].token_ids == expected


def test_the_end_token_wins_over_a_stop_token_and_over_the_length():
    expected = greedy_output([1, 2, 3], 5)
    out = answer([1, 2, 3], greedy(stop_token_ids=[expected[4]], max_tokens=5), eos=[expected[4]]).outputs[0]
    assert (out.finish_reason, out.stop_reason) == ("stop", None)


def test_outputs_end_at_the_models_length():
    out = answer([1, 2, 3], greedy(max_tokens=None), M=16).outputs[0]
    assert len(out.token_ids) == 13
    assert out.finish_reason == "length"


def text_of(tokens: list[int]) -> str:
    return "".join(chr(96 + t) for t in tokens if t not in (0, 20, 21))


def test_a_stop_string_ends_before_itself_or_after_it():
    expected = greedy_output([4, 5, 6], 12)
    text = text_of(expected)
    stop = text[3:5]
    for include in (False, True):
        out = answer([4, 5, 6], greedy(max_tokens=12, stop=stop, include_stop_str_in_output=include)).outputs[0]
        assert out.text == text[: text.index(stop) + (2 if include else 0)]
        assert (out.finish_reason, out.stop_reason) == ("stop", stop)
        assert text_of(out.token_ids) == text[: text.index(stop) + 2]


def test_only_streams_are_reported_before_the_end():
    engine = make_engine()
    engine.add_request("a", [1, 2, 3], greedy())
    reports = []
    while engine.has_work:
        reports += engine.step()
    assert [r.finished for r in reports] == [True]


@pytest.mark.parametrize(
    ("prompt", "params", "field"),
    [
        ([], {}, "prompt_token_ids"),
        ([1, V], {}, r"prompt_token_ids\[1\]"),
        ([-1], {}, r"prompt_token_ids\[0\]"),
        ([1.5], {}, "prompt_token_ids"),
        ([[1], [2, 3]], {}, "prompt_token_ids"),
        ("", {}, "prompt_token_ids"),
        ([1] * 64, {}, "prompt_token_ids"),
        ([1], {"stop_token_ids": [V]}, "stop_token_ids"),
        ([1], {"logit_bias": {99: 1.0}}, "logit_bias"),
        ([1], {"logprobs": 10**9}, "logprobs"),
        ([1], {"prompt_logprobs": V + 1}, "prompt_logprobs"),
    ],
)
def test_bad_input_is_refused_by_name_and_changes_nothing(prompt, params, field):
    engine = make_engine()
    engine.add_request("good", [1, 2, 3], greedy())
    engine.step()
    with pytest.raises(RequestError, match=f"request 'bad': {field} = "):
        engine.add_request("bad", prompt, SamplingParams(**params))
    assert run(engine)["good"].outputs[0].token_ids == greedy_output([1, 2, 3])


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("params", {"params": {}}),
        ("priority", {"priority": "high"}),
        ("priority", {"priority": None}),
        ("lora", {"lora": "adapter"}),
        ("lora", {"lora": 5}),
        ("cache_salt", {"cache_salt": 5}),
    ],
)
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_options_of_other_types_are_refused_by_name_and_change_nothing(field, options, policy):
    engine = make_engine(policy=policy)
    engine.add_request("good", [1, 2, 3], greedy())
    with pytest.raises(RequestError, match=f"request 'bad': {field} = "):
        engine.add_request("bad", [1], **options)
    with pytest.raises(RequestError, match="request_id = 5"):
        engine.add_request(5, [1])
    assert run(engine)["good"].outputs[0].token_ids == greedy_output([1, 2, 3])


def test_unknown_options_of_a_request_are_refused():
    with pytest.raises(TypeError, match=r"no option .prio.. Did you mean .priority."):
        make_engine().add_request("a", [1], prio=3)


def test_an_id_in_use_is_refused_and_free_again_afterwards():
    engine = make_engine()
    engine.add_request("a", [1], greedy())
    with pytest.raises(RequestError, match="is in use"):
        engine.add_request("a", [1], greedy())
    run(engine)
    engine.add_request("a", [1], greedy())
    run(engine)


def test_logprobs_have_one_entry_per_token():
    out = answer([1, 2, 3], greedy(logprobs=2)).outputs[0]
    assert [next(iter(entry)) for entry in out.logprobs] == out.token_ids
    assert all(len(entry) == 2 for entry in out.logprobs)


def test_abort_returns_what_there_is_and_frees_everything():
    engine = make_engine(max_num_seqs=2)
    for name in "abc":
        engine.add_request(name, [1, 2, 3], greedy())
    engine.step()
    engine.step()
    running, waiting = engine.abort("a"), engine.abort("c")
    assert running.outputs[0].token_ids == greedy_output([1, 2, 3])[:2]
    assert running.outputs[0].finish_reason == "abort"
    assert waiting.outputs[0].token_ids == []
    assert engine.abort("a") is None
    assert engine.abort("unknown") is None
    assert list(run(engine)) == ["b"]


def test_why_gives_the_reason():
    engine = make_engine(max_num_seqs=1)
    engine.add_request("a", [1, 2, 3], greedy(n=2))
    engine.add_request("b", [1, 2, 3], greedy())
    engine.step()
    assert str(engine.why("a")) == "running"
    assert str(engine.why("b")).startswith("max_num_seqs")
    assert str(engine.why("c")) == "unknown"
    run(engine)


def test_metrics_report_cached_tokens_and_token_times():
    engine = make_engine()
    ticks = iter(range(10_000))
    engine.clock = lambda: float(next(ticks))
    engine.add_request("a", list(range(1, 13)), greedy())
    first = run(engine)["a"].metrics
    assert first.arrival_time < first.first_scheduled_time < first.first_token_time < first.finished_time
    engine.add_request("b", [*range(1, 11), 29, 29], greedy())
    second = run(engine)["b"].metrics
    assert second.num_cached_tokens == 10
    assert second.cache_report == "reused 10 of 12; differs at position 10"


def test_without_a_prefix_cache_the_report_claims_no_difference():
    engine = make_engine(prefix_caching=False)
    for name in "ab":
        engine.add_request(name, list(range(1, 13)), greedy())
        assert run(engine)[name].metrics.cache_report == "reused 0 of 12; not looked up"


def test_a_follow_up_reuses_the_conversation():
    engine = make_engine()
    prompt = [1, 2, 3, 4, 5]
    engine.add_request("a", prompt, greedy())
    answer = run(engine)["a"].outputs[0].token_ids
    engine.add_request("b", [*prompt, *answer, 7, 8], greedy())
    assert run(engine)["b"].metrics.num_cached_tokens == len(prompt) + len(answer) - 1
    assert engine.reset_prefix_cache()
    engine.add_request("c", [*prompt, *answer, 7, 8], greedy())
    assert run(engine)["c"].metrics.num_cached_tokens == 0


def test_salts_keep_tenants_apart():
    engine = make_engine()
    for name, salt in (("a", "x"), ("b", "y"), ("c", "x")):
        engine.add_request(name, list(range(1, 13)), greedy(), cache_salt=salt)
        cached = run(engine)[name].metrics.num_cached_tokens
        assert cached == (11 if name == "c" else 0)


@pytest.mark.parametrize("config", [{}, {"max_num_batched_tokens": 3}, {"async_scheduling": True}])
def test_prompt_logprobs_are_those_of_every_prompt_token(config):
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    engine = make_engine(**config)
    engine.add_request("warm", prompt, greedy())
    run(engine)
    engine.add_request("a", prompt, greedy(prompt_logprobs=2, n=2))
    engine.add_request("b", prompt, greedy())
    outputs = run(engine)
    engine.close()
    prefix, wanted = START, [None]
    for token, after in pairwise(prompt):
        prefix = following(prefix, token)
        wanted.append(token_logprobs(logits_after(prefix, V), after, 2))
    assert outputs["a"].prompt_logprobs == wanted
    assert outputs["b"].prompt_logprobs is None
    assert [c.token_ids for c in outputs["a"].outputs] == [greedy_output(prompt)] * 2


def test_prompt_logprobs_are_not_repeated_after_a_preemption():
    engine = make_engine(blocks=17, reserve_full_prompt=False, prefix_caching=False)
    for name in "ab":
        engine.add_request(name, [1 + i % 9 for i in range(30)], greedy(prompt_logprobs=0, max_tokens=20))
    outputs = run(engine)
    assert sum(o.metrics.num_preemptions for o in outputs.values()) > 0
    assert all(len(o.prompt_logprobs) == 30 for o in outputs.values())


def test_a_block_freed_too_early_is_caught_before_the_step_runs():
    engine = make_engine(check="full")
    engine.add_request("a", [1, 2, 3, 4, 5, 6], SamplingParams(temperature=0.0, max_tokens=8))
    engine.step()
    table = engine.states.block_tables[0]
    engine.cache.pool.free(table.table[engine.states.row_of("a"), :1].copy(), group=0)
    with pytest.raises(PlanError, match="freed block is still seen"):
        engine.step()


class Ban:
    """Forbids the tokens in extra_args["ban"]."""

    extra_args = frozenset({"ban"})

    def __init__(self, states) -> None:
        self.rows = RowValues(states.max_num_reqs)

    def update(self, change) -> None:
        self.rows.update(change, lambda added: (added.params.extra_args or {}).get("ban"))

    def apply(self, logits, at) -> None:
        for i, row in enumerate(at.rows.tolist()):
            logits[i, self.rows[row]] = -np.inf


@pytest.mark.parametrize("config", [{}, {"async_scheduling": True}, {"blocks": 17, "reserve_full_prompt": False}])
def test_a_custom_logits_processor_changes_the_requests_that_ask_for_it_alone(config):
    ban = [1, 5, 9, 13, 17, 21, 25]

    def most_likely_of_the_others(logits, position):
        return np.where(np.isin(np.arange(V), ban), -np.inf, logits).argmax()

    engine = make_engine(logits_processors=[Ban], **config)
    for i in range(6):
        engine.add_request(str(i), [1 + i, 2, 3], greedy(max_tokens=20, extra_args={"ban": ban} if i % 2 else None))
    outputs = run(engine)
    engine.close()
    for i in range(6):
        choose = most_likely_of_the_others if i % 2 else lambda logits, position: logits.argmax()
        assert outputs[str(i)].outputs[0].token_ids == plain_output([1 + i, 2, 3], choose, 20, V)
    with pytest.raises(RequestError, match="extra_args = 'bann'"):
        engine.add_request("x", [1], greedy(extra_args={"bann": ban}))


def test_sequence_breakers_are_the_last_tokens_of_their_encodings():
    engine = make_engine()
    given = {"b": [2], "ef": [6], "7": []}  # the tokenizer has no digits
    for i, (text, wanted) in enumerate(given.items()):
        params = greedy(dry_multiplier=1.0, dry_sequence_breakers=[text], dry_breaker_token_ids=[9])
        assert engine.check(str(i), [1], params).params.dry_breaker_token_ids == (9, *wanted)
    assert engine.check("x", [1], greedy(dry_sequence_breakers=["b"])).params.dry_breaker_token_ids == ()
