"""Observers: what they are called with, in which order, and that their errors leave the engine consistent."""

import pytest
from engine_rig import Guesser, make_engine, run, run_through, token_ids

from foreword.batch import SamplingParams
from foreword.cache import BlockRemoved, BlockStored, CacheCleared
from foreword.engine import EngineMetrics, EngineObserver
from foreword.engine.speculation import SpeculationConfig
from foreword.errors import ConfigError

GREEDY = SamplingParams(temperature=0.0, max_tokens=5)
HOOKS = ("request_added", "step_planned", "step_ran", "step_committed", "request_ended")
both = pytest.mark.parametrize("async_scheduling", [False, True])


class Log(EngineObserver):
    """Keeps every call of an observer as (name, detail)."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def request_added(self, request_id, num_prompt_tokens):
        self.calls.append(("added", request_id, num_prompt_tokens))

    def request_ended(self, output):
        self.calls.append(("ended", output.request_id, output.outputs[0].finish_reason))

    def step_planned(self, plan, batch):
        self.calls.append(("planned", batch.num_tokens))

    def step_ran(self, plan, batch, sampled):
        self.calls.append(("ran", batch.is_committed))

    def step_committed(self, plan, batch, sampled):
        self.calls.append(("committed", sampled.token_ids.tolist()))


@both
def test_observers_see_requests_and_steps_in_order(async_scheduling):
    first, second = Log(), Log()
    engine = make_engine(observers=[first], async_scheduling=async_scheduling)
    engine.observers.add(second)
    engine.add_request("a", [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=2))
    engine.add_request("b", [4, 5], SamplingParams(temperature=0.0, max_tokens=9))
    outputs = []
    while not outputs:
        outputs += engine.step()
    engine.observers.remove(second)
    engine.abort("b")
    engine.close()
    (a,) = outputs
    names = [call[0] for call in first.calls]
    assert names == ["added", "added", *["planned", "ran", "committed"] * 2, "ended", "ended"]
    assert first.calls[:4] == [("added", "a", 3), ("added", "b", 2), ("planned", 5), ("ran", False)]
    assert [call[1][0] for call in first.calls if call[0] == "committed"] == a.outputs[0].token_ids
    assert first.calls[-2:] == [("ended", "a", "length"), ("ended", "b", "abort")]
    assert second.calls == first.calls[:-1]


def work(engine) -> None:
    for i in range(9):
        engine.add_request(str(i), [1 + j % 9 for j in range(5 + 2 * i)], SamplingParams(seed=i, max_tokens=3 + i % 5))


LOOKUP = SpeculationConfig(min_match=1)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("config", [{}, {"async_scheduling": True}, {"async_scheduling": True, "speculation": LOOKUP}])
@pytest.mark.parametrize("hook", HOOKS)
def test_an_observer_that_raises_changes_no_output_and_the_others_are_called(hook, config):
    class Failing(EngineObserver):
        calls = 0

    def fail(self, *arguments):
        self.calls += 1
        if self.calls in (2, 5):
            raise ArithmeticError(hook)

    setattr(Failing, hook, fail)
    failing, log = Failing(), Log()
    engine = make_engine(observers=[failing, log], max_num_seqs=4, blocks=40, **config)
    refused = 0
    for i in range(9):
        arguments = str(i), [1 + j % 9 for j in range(5 + 2 * i)], SamplingParams(seed=i, max_tokens=3 + i % 5)
        try:
            engine.add_request(*arguments)
        except ArithmeticError:
            refused += 1
            engine.add_request(*arguments)
    done, failures = run_through(engine, ArithmeticError)
    assert refused + failures == 2
    assert len(engine.states) == 0
    plain = make_engine()
    work(plain)
    assert done == token_ids(run(plain))
    called = {"request_added": "added", "request_ended": "ended"}.get(hook, hook.removeprefix("step_"))
    assert sum(call[0] == called for call in log.calls) == failing.calls


@pytest.mark.one_in(2)
@both
def test_metrics_count_what_the_outputs_say(async_scheduling):
    metrics = EngineMetrics()
    config = SpeculationConfig(method="draft_model", model="guesser")
    engine = make_engine(
        observers=[metrics], blocks=20, reserve_full_prompt=False, async_scheduling=async_scheduling,
        speculation=config, drafter=Guesser,
    )  # fmt: skip
    prompt = list(range(1, 21))
    for i in range(6):
        engine.add_request(str(i), prompt, SamplingParams(seed=i, max_tokens=20, n=1 + i % 2))
    outputs = run(engine)
    engine.close()
    assert metrics.num_requests_added == metrics.num_requests_ended == 6
    assert metrics.num_steps == engine.executor.num_steps
    assert metrics.num_tokens == engine.executor.num_tokens
    assert metrics.num_sampled_tokens == sum(len(c.token_ids) for o in outputs.values() for c in o.outputs)
    assert metrics.num_preemptions == sum(o.metrics.num_preemptions for o in outputs.values()) > 0
    assert metrics.num_cached_tokens == sum(o.metrics.num_cached_tokens for o in outputs.values()) > 0
    assert metrics.cache_hit_rate == metrics.num_cached_tokens / (6 * 20)


def test_an_observer_is_called_between_its_addition_and_its_removal():
    class Counts(EngineObserver):
        num_steps = 0

        def step_committed(self, plan, batch, sampled) -> None:
            self.num_steps += 1

    engine, late = make_engine(observers=[EngineMetrics()]), Counts()
    engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=9, ignore_eos=True))
    engine.step()
    engine.observers.add(late)
    for _ in range(3):
        engine.step()
    engine.observers.remove(late)
    run(engine)
    assert late.num_steps == 3


@both
def test_cache_events_mirror_what_can_be_hit(async_scheduling):
    class Mirror(EngineObserver):
        def __init__(self) -> None:
            self.blocks: set[int] = set()

        def cache_event(self, event) -> None:
            if isinstance(event, BlockStored):
                self.blocks.add(event.block)
            elif isinstance(event, BlockRemoved):
                self.blocks.remove(event.block)
            else:
                assert isinstance(event, CacheCleared)
                self.blocks.clear()

    mirror = Mirror()
    engine = make_engine(observers=[mirror], blocks=20, async_scheduling=async_scheduling)
    for i in range(4):
        engine.add_request(str(i), [i, *range(1, 14)], GREEDY)
        run(engine)
        assert mirror.blocks == set(engine.cache.pool.is_cached.nonzero()[0].tolist())
    assert mirror.blocks
    assert engine.reset_prefix_cache()
    assert not mirror.blocks
    engine.close()
    with pytest.raises(ConfigError, match=r"Mirror overrides cache_event.*observers="):
        make_engine().observers.add(Mirror())


def test_an_error_in_a_cache_event_is_raised_after_the_step_and_loses_no_output():
    class Failing(EngineObserver):
        def cache_event(self, event) -> None:
            raise ArithmeticError

    engine = make_engine(observers=[Failing()])
    engine.add_request("a", list(range(1, 14)), SamplingParams(temperature=0.0, max_tokens=1))
    with pytest.raises(ArithmeticError):
        engine.step()
    (output,) = engine.step()
    assert output.finished
    assert not engine.has_work
