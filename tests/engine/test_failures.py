"""Failures inside a step: a row of logits ends its request, anything else leaves every request as it was."""

import copy
import pickle
import threading

import numpy as np
import pytest
from engine_rig import OnStep, V, answer, make_engine, run
from oracle_model import LetterTokenizer, OracleExecutor

from foreword.batch import SamplingParams
from foreword.engine import EngineObserver
from foreword.errors import EngineError, PlanError, RequestError
from foreword.sampling import BadLogitsError

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
BOTH = pytest.mark.parametrize("config", [{}, {"async_scheduling": True}], ids=["sync", "async"])


def alone(prompt: list[int], params: SamplingParams = GREEDY) -> list[int]:
    return answer(prompt, params).outputs[0].token_ids


def spoiled(value: float, step: int):
    """An executor whose logits of the request of prompt [9, 9] are ``value`` at one token, from a step on."""

    class Spoiled(OracleExecutor):
        def compute(self, batch, logits_indices):
            logits = super().compute(batch, logits_indices)
            for i, b in enumerate(np.searchsorted(batch.query_start_loc[1:], logits_indices, side="right").tolist()):
                row = batch.idx_mapping[b]
                if self.num_steps >= step and (batch.states.token_ids[row, :2] == 9).all():
                    logits[i, slice(None) if value == -np.inf else 7] = value
            return logits

    return Spoiled


@pytest.mark.one_in(3)
@BOTH
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=1.0, seed=1, top_k=5, max_tokens=8, logprobs=2)])
def test_logits_that_are_not_numbers_end_their_request_with_its_tokens_so_far(config, value, params):
    engine = make_engine(executor=spoiled(value, 4), **config)
    engine.add_request("bad", [9, 9], params)
    engine.add_request("good", [1, 2, 3], params)
    outputs = run(engine)
    engine.close()
    bad, good = outputs["bad"], outputs["good"]
    assert isinstance(bad.error, BadLogitsError)
    assert "request 'bad': logits = 'step" in str(bad.error)
    assert bad.outputs[0].finish_reason == "error"
    assert 0 < len(bad.outputs[0].token_ids) < 8
    assert bad.outputs[0].token_ids == alone([9, 9], params)[: len(bad.outputs[0].token_ids)]
    assert bad.failure is bad.error
    assert good.error is None
    assert good.outputs[0].token_ids == alone([1, 2, 3], params)


def test_one_of_several_completions_may_fail():
    class SpoiledSecond(OracleExecutor):
        def compute(self, batch, logits_indices):
            logits = super().compute(batch, logits_indices)
            for b, req_id in enumerate(batch.req_ids):
                if req_id.endswith("\0001"):
                    logits[b] = np.nan
            return logits

    output = answer([1, 2], SamplingParams(n=2, seed=3, max_tokens=5), executor=SpoiledSecond)
    assert [c.finish_reason for c in output.outputs] == ["length", "error"]
    assert "request 'a': logits" in str(output.error)
    assert output.failure is None


@BOTH
def test_a_request_that_the_executor_cannot_compute_ends_alone(config):
    class Picky(OracleExecutor):
        def compute(self, batch, logits_indices):
            for req_id in batch.req_ids:
                if req_id == "bad\0001" and 9 in batch.input_ids:
                    raise RequestError(req_id, "prompt", 9, "cannot be computed", "Leave it out.")
            return super().compute(batch, logits_indices)

    engine = make_engine(executor=Picky, **config)
    engine.add_request("a", [1, 2], GREEDY, stream=True)
    for _ in range(3):
        engine.step()
    engine.add_request("bad", [3, 9], SamplingParams(n=2, seed=1, max_tokens=5))
    engine.add_request("b", [3, 4], GREEDY)
    outputs = run(engine)
    engine.close()
    assert [c.finish_reason for c in outputs["bad"].outputs] == ["error"] * 2
    assert str(outputs["bad"].failure) == "request 'bad': prompt = 9: cannot be computed. Leave it out."
    assert outputs["a"].outputs[0].token_ids == alone([1, 2])
    assert outputs["b"].outputs[0].token_ids == alone([3, 4])
    assert not engine.has_work
    assert engine.cache.pool.num_used == 0


def test_logits_of_another_width_are_refused():
    class Narrow(OracleExecutor):
        def compute(self, batch, logits_indices):
            return super().compute(batch, logits_indices)[:, :-1]

    engine = make_engine(executor=Narrow)
    engine.add_request("a", [1, 2], GREEDY)
    with pytest.raises(PlanError, match=rf"logits must be float32 \[L, V\].*expected \(1, {V}\), got \(1, {V - 1}"):
        engine.step()


@BOTH
def test_a_detokenizer_that_raises_ends_its_request_alone(config):
    engine = make_engine(**config)
    engine.add_request("a", [1, 2], GREEDY, stream=True)
    engine.add_request("b", [3, 4], GREEDY, stream=True)
    outputs = {}
    for _ in range(3):
        outputs |= {o.request_id: o for o in engine.step()}

    class Broken:
        def push(self, token_ids):
            raise RuntimeError("no text")

    engine._outputs.groups["a"].completions[0].text._detokenizer = Broken()
    outputs |= run(engine)
    engine.close()
    assert outputs["a"].outputs[0].finish_reason == "error"
    assert str(outputs["a"].error) == "request 'a': RuntimeError: no text"
    assert outputs["b"].outputs[0].token_ids == alone([3, 4])


@BOTH
def test_a_failed_step_drops_no_cached_prefix(config):
    class Flaky(OracleExecutor):
        fails = False

        def compute(self, batch, logits_indices):
            if self.fails:
                raise MemoryError("once")
            return super().compute(batch, logits_indices)

    engine = make_engine(executor=Flaky, **config)
    engine.add_request("a", list(range(1, 21)), GREEDY)
    assert len(run(engine)["a"].outputs[0].token_ids) == 8
    engine.add_request("b", list(range(1, 21)), GREEDY)
    engine.executor.fails = True
    with pytest.raises(MemoryError):
        run(engine)
    engine.executor.fails = False
    engine.add_request("c", [*range(1, 17), 5], GREEDY)
    outputs = run(engine)
    engine.close()
    assert outputs["b"].metrics.num_cached_tokens == 19
    assert outputs["c"].metrics.num_cached_tokens == 16
    assert outputs["b"].outputs[0].token_ids == alone(list(range(1, 21)))


def test_a_callback_may_not_change_the_engine_in_the_middle_of_a_step():
    engine = make_engine(observers=[OnStep(lambda plan, batch: engine.abort("a"))])
    engine.add_request("a", [1, 2], GREEDY)
    with pytest.raises(EngineError, match="in the middle of a step"):
        engine.step()
    assert engine.num_unfinished == 1


def test_a_callback_after_a_step_may():
    class Ends(EngineObserver):
        def request_ended(self, output):
            if output.request_id == "a":
                engine.abort("b")

    engine = make_engine(observers=[Ends()])
    engine.add_request("a", [1, 2], SamplingParams(max_tokens=2))
    engine.add_request("b", [1, 2], SamplingParams(max_tokens=20))
    run(engine)


def test_a_second_thread_is_refused_while_a_step_runs():
    inside, leave = threading.Event(), threading.Event()

    class Slow(OracleExecutor):
        def compute(self, batch, logits_indices):
            inside.set()
            leave.wait(30)
            return super().compute(batch, logits_indices)

    engine = make_engine(executor=Slow)
    engine.add_request("a", [1, 2], GREEDY)
    thread = threading.Thread(target=engine.step)
    thread.start()
    inside.wait(30)
    try:
        for call in (engine.step, lambda: engine.abort("a"), lambda: engine.add_request("b", [1])):
            with pytest.raises(EngineError, match="another thread is using this engine"):
                call()
    finally:
        leave.set()
        thread.join()
    assert run(engine)["a"].outputs[0].token_ids == alone([1, 2])


def test_outputs_that_are_given_back_come_again():
    engine = make_engine()
    engine.add_request("a", [1, 2], SamplingParams(max_tokens=1))
    outputs = engine.step()
    engine.give_back(outputs)
    assert engine.has_work
    assert engine.step() == outputs
    assert not engine.has_work


@pytest.mark.parametrize(
    ("params", "field"), [({"logprobs": 10**9}, "logprobs"), ({"prompt_logprobs": V + 1}, "prompt_logprobs")]
)
def test_parameters_that_mean_nothing_are_refused(params, field):
    with pytest.raises(RequestError, match=rf"request 'a': {field} = "):
        make_engine().add_request("a", [1, 2], SamplingParams(**params))


def test_parameters_are_values():
    source = {4: 1.5}
    given = {
        "stop_token_ids": (i for i in (3, 4)),
        "allowed_token_ids": {1, 2},
        "bad_words_token_ids": (iter(word) for word in ([1, 2], [3])),
        "logit_bias": source,
        "stop": iter(["x"]),
        "max_tokens": np.int64(3),
        "temperature": np.float32(0.5),
        "ignore_eos": np.True_,
        "bad_words": None,
    }
    params = SamplingParams(**given)
    source[5] = 2.0
    assert params == SamplingParams(
        stop_token_ids=(3, 4),
        allowed_token_ids=(1, 2),
        bad_words_token_ids=((1, 2), (3,)),
        logit_bias={4: 1.5},
        stop=("x",),
        max_tokens=3,
        temperature=0.5,
        ignore_eos=True,
    )
    assert type(params.max_tokens) is int
    params.check("a", V)


def test_an_unknown_parameter_names_the_nearest():
    with pytest.raises(TypeError, match=r"no parameter 'temprature'\. Did you mean 'temperature'"):
        SamplingParams(temprature=0.5)


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy])
def test_an_engine_cannot_be_copied_and_says_what_to_do(copied):
    with pytest.raises(TypeError, match="Make one in each"):
        copied(make_engine())


def test_an_output_completes_the_character_that_its_prompt_has_begun():
    half, other = LetterTokenizer.HALVES
    engine = make_engine()
    engine.add_request("a", [1, half], SamplingParams(max_tokens=1, allowed_token_ids=[other]))
    engine.add_request("b", [1, 2], SamplingParams(max_tokens=1, allowed_token_ids=[other]))
    texts = {name: output.outputs[0].text for name, output in run(engine).items()}
    assert texts == {"a": "é", "b": "\N{REPLACEMENT CHARACTER}"}
