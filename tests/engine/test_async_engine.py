"""The engine behind an event loop: every stream gets its own outputs, through arrivals, aborts and failures."""

import asyncio
import threading
from contextlib import aclosing
from functools import cache
from random import Random

import pytest
from engine_rig import Guesser, OnStep, V, make_engine, run
from oracle_model import OracleExecutor

from foreword.batch import SamplingParams
from foreword.engine import async_engine
from foreword.engine.async_engine import AsyncEngine
from foreword.engine.speculation import SpeculationConfig
from foreword.errors import ConfigError, EngineError, RequestError

GREEDY = SamplingParams(temperature=0.0, max_tokens=9)


class Gate(OracleExecutor):
    """Waits before each step until it is opened."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.opened, self.entered = threading.Event(), threading.Event()

    def compute(self, batch, logits_indices):
        self.entered.set()
        assert self.opened.wait(timeout=30)
        return super().compute(batch, logits_indices)


async def final(serving: AsyncEngine, prompt, params=GREEDY, **options):
    async with aclosing(serving.generate(prompt, params, **options)) as outputs:
        return [output async for output in outputs][-1]


def check_nothing_is_left(serving: AsyncEngine) -> None:
    assert serving.num_unfinished == 0
    assert serving.engine.num_unfinished == 0
    assert not serving.engine.has_work
    assert serving.engine.cache.pool.num_used == 0
    assert not serving._thread.is_alive()


def work_of(count: int) -> list[tuple[list[int], SamplingParams]]:
    random = Random(2)
    return [
        (
            [random.randint(1, 9) for _ in range(random.randint(1, 20))],
            SamplingParams(
                temperature=random.choice([0.0, 0.9]), seed=i, max_tokens=random.randint(1, 20), n=1 + i % 2
            ),
        )
        for i in range(count)
    ]


def outcome(output) -> list[tuple]:
    return [(c.token_ids, c.text, c.finish_reason) for c in output.outputs]


def test_many_streams_at_once_get_what_they_would_get_one_by_one():
    work = work_of(60)
    plain = make_engine(blocks=40)
    for i, (prompt, params) in enumerate(work):
        plain.add_request(str(i), prompt, params)
    wanted = run(plain)
    drafts = SpeculationConfig(method="draft_model", model="guesser")
    for config in ({}, {"async_scheduling": True, "speculation": drafts, "drafter": Guesser}):

        async def main(config=config):
            async with AsyncEngine(make_engine(blocks=40, **config)) as serving:
                calls = [final(serving, p, params, stream=i % 3 > 0) for i, (p, params) in enumerate(work)]
                return serving, await asyncio.gather(*calls)

        serving, outputs = asyncio.run(main())
        assert [outcome(o) for o in outputs] == [outcome(wanted[str(i)]) for i in range(len(work))]
        check_nothing_is_left(serving)


def test_a_stream_grows_and_ends_finished():
    async def main():
        async with AsyncEngine(make_engine()) as serving:
            return [o async for o in serving.generate([1, 2, 3], GREEDY)]

    outputs = asyncio.run(main())
    lengths = [len(o.outputs[0].token_ids) for o in outputs]
    assert lengths == sorted(set(lengths))
    assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
    assert lengths[-1] == 9


def test_a_slow_consumer_sees_the_latest_state_and_delays_no_other():
    async def main():
        async with AsyncEngine(make_engine()) as serving:
            slow = serving.generate([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=30))
            first = await anext(slow)
            assert not first.finished or len(first.outputs[0].token_ids) == 30
            while serving.num_unfinished:
                await final(serving, [4, 5, 6])
            await final(serving, [4, 5, 6])  # what was on its way to the loop when the count fell has arrived then
            return [o async for o in slow]

    rest = asyncio.run(main())
    assert len(rest) <= 1
    assert all(o.finished for o in rest)


def test_a_consumer_that_stops_iterating_or_is_cancelled_aborts_its_request():
    async def main():
        async with AsyncEngine(make_engine(M=64)) as serving:
            endless = SamplingParams(temperature=0.0, max_tokens=60)
            async with aclosing(serving.generate([1], endless)) as outputs:
                async for _ in outputs:
                    break
            tasks = [asyncio.create_task(final(serving, [1, i], endless)) for i in range(20)]
            await asyncio.sleep(0)
            for task in tasks[::2]:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            while serving.num_unfinished:
                await asyncio.sleep(0.001)
            return serving, results

    serving, results = asyncio.run(main())
    assert all(isinstance(r, asyncio.CancelledError) for r in results[::2])
    assert all(len(r.outputs[0].token_ids) == 60 for r in results[1::2])
    check_nothing_is_left(serving)


@cache
def alone(count: int) -> list[list[tuple]]:
    """The outcomes of the first requests of `work_of`, each in an engine of its own."""
    found = []
    for prompt, params in work_of(count):
        plain = make_engine()
        plain.add_request("x", prompt, params)
        found.append(outcome(run(plain)["x"]))
    return found


@pytest.mark.one_in(7)
@pytest.mark.parametrize("seed", range(4))
def test_cancellation_at_any_moment_leaks_nothing_and_changes_no_other_output(seed: int):
    work, wanted, random = work_of(30), alone(30), Random(seed)

    async def main():
        engine = make_engine(blocks=30, async_scheduling=seed % 2 == 1)
        async with AsyncEngine(engine, max_num_requests=random.choice([2, 100])) as serving:
            tasks = {}
            for i, (prompt, params) in enumerate(work):
                tasks[i] = asyncio.create_task(final(serving, prompt, params, request_id=str(i)))
                for _ in range(random.randrange(4)):
                    await asyncio.sleep(0.0005)
                victim = random.randrange(i + 1)
                if random.random() < 0.3:
                    tasks[victim].cancel()
                elif random.random() < 0.2:
                    serving.abort(str(victim))
            return serving, await asyncio.gather(*tasks.values(), return_exceptions=True)

    serving, results = asyncio.run(main())
    for i, result in enumerate(results):
        if not isinstance(result, asyncio.CancelledError) and result.outputs[0].finish_reason != "abort":
            assert [o for o in outcome(result) if o[2] != "abort"] == [
                w for w, o in zip(wanted[i], outcome(result), strict=True) if o[2] != "abort"
            ]
    check_nothing_is_left(serving)


def test_abort_ends_the_stream_with_what_there_is():
    async def main():
        async with AsyncEngine(make_engine()) as serving:
            seen = []
            params = SamplingParams(temperature=0.0, max_tokens=40)
            async for output in serving.generate([1, 2], params, request_id="a"):
                seen.append(output)
                serving.abort("a")
            serving.abort("a")
            serving.abort("unknown")
            return seen

    seen = asyncio.run(main())
    assert seen[-1].finished
    assert seen[-1].outputs[0].finish_reason in ("abort", "length")
    assert len(seen[-1].outputs[0].token_ids) >= len(seen[0].outputs[0].token_ids)


def test_an_abort_before_the_engine_has_the_request_is_not_lost():
    async def main():
        engine = make_engine(executor=Gate)
        async with AsyncEngine(engine) as serving:
            engine.executor.opened.set()
            task = asyncio.create_task(final(serving, [1, 2], SamplingParams(max_tokens=60), request_id="a"))
            while not serving.num_unfinished:
                await asyncio.sleep(0)
            serving.abort("a")
            return await task

    output = asyncio.run(main())
    assert output.outputs[0].finish_reason == "abort"


def test_a_full_engine_makes_the_next_request_wait():
    most = []

    async def main():
        engine = make_engine()
        engine.observers.add(OnStep(lambda plan, batch: most.append(engine.num_unfinished)))
        async with AsyncEngine(engine, max_num_requests=3) as serving:
            await asyncio.gather(*(final(serving, [1 + i % 5, 2]) for i in range(12)))

    asyncio.run(main())
    assert max(most) <= 3


def test_what_cannot_be_served_is_refused_and_the_others_go_on():
    async def main():
        async with AsyncEngine(make_engine()) as serving:
            good = asyncio.create_task(final(serving, [1, 2, 3], request_id="a"))
            await asyncio.sleep(0)
            with pytest.raises(RequestError, match="is in use"):
                await final(serving, [1, 2, 3], request_id="a")
            with pytest.raises(RequestError, match="empty"):
                await final(serving, [])
            with pytest.raises(RequestError, match="vocabulary"):
                await final(serving, [V + 5])
            return await good

    assert len(asyncio.run(main()).outputs[0].token_ids) == 9
    with pytest.raises(ConfigError, match="max_num_requests"):
        AsyncEngine(make_engine(), max_num_requests=0)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_failed_step_ends_every_stream_with_an_error_that_says_so(async_scheduling: bool):
    class Failing(Gate):
        def compute(self, batch, logits_indices):
            if not self.opened.is_set():
                super().compute(batch, logits_indices)
                raise MemoryError("no more memory")
            return super().compute(batch, logits_indices)

    async def main():
        engine = make_engine(executor=Failing, async_scheduling=async_scheduling)
        async with AsyncEngine(engine) as serving:
            tasks = [asyncio.create_task(final(serving, [1, i])) for i in range(4)]
            while not engine.executor.entered.is_set():
                await asyncio.sleep(0.001)
            engine.executor.opened.set()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            return serving, results, await final(serving, [1, 2, 3])

    serving, results, later = asyncio.run(main())
    failed = [r for r in results if isinstance(r, EngineError)]
    assert failed
    for error in failed:
        assert "MemoryError: no more memory" in str(error)
        assert isinstance(error.__cause__, MemoryError)
    assert all(len(r.outputs[0].token_ids) == 9 for r in results if r not in failed)
    assert len(later.outputs[0].token_ids) == 9
    check_nothing_is_left(serving)


def test_closing_ends_every_stream_and_refuses_new_ones():
    async def main():
        engine = make_engine(async_scheduling=True)
        serving = AsyncEngine(engine)
        tasks = [asyncio.create_task(final(serving, [1, i], SamplingParams(max_tokens=50))) for i in range(6)]
        while engine.num_unfinished < 6:
            await asyncio.sleep(0)
        await serving.close()
        await serving.close()
        outputs = await asyncio.gather(*tasks)
        with pytest.raises(EngineError, match="closed"):
            await final(serving, [1])
        serving.abort("request-0")
        return serving, outputs

    serving, outputs = asyncio.run(main())
    assert all(o.finished for o in outputs)
    assert any(o.outputs[0].finish_reason == "abort" for o in outputs)
    check_nothing_is_left(serving)


def test_a_closed_event_loop_leaves_no_request_behind():
    engine = make_engine(executor=Gate)
    serving = AsyncEngine(engine)
    loop = asyncio.new_event_loop()
    outputs = serving.generate([1, 2], SamplingParams(max_tokens=50))
    task = loop.create_task(anext(outputs))
    while not engine.executor.entered.is_set():
        loop.run_until_complete(asyncio.sleep(0.001))
    task.cancel()
    loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    engine.executor.opened.set()
    asyncio.run(serving.close())
    check_nothing_is_left(serving)


def test_the_first_output_of_a_request_is_passed_on_before_those_that_continue(monkeypatch):
    passed: list[list[tuple[str, bool]]] = []
    put_all = async_engine.put_all

    def noted(items):
        passed.append([(stream.request_id, event.continues) for stream, event in items])
        put_all(items)

    monkeypatch.setattr(async_engine, "put_all", noted)

    async def main() -> None:
        async with AsyncEngine(make_engine(executor=Gate)) as serving:
            gate = serving.engine.executor
            early = [asyncio.ensure_future(final(serving, [3 + i], request_id=f"early-{i}")) for i in range(3)]
            while not gate.entered.is_set() or serving.num_unfinished < 3:
                await asyncio.sleep(0)
            late = asyncio.ensure_future(final(serving, [9], request_id="late"))
            while serving.num_unfinished < 4 or not all(stream.is_sent for stream in serving._streams.values()):
                await asyncio.sleep(0)
            gate.opened.set()
            await asyncio.gather(late, *early)

    asyncio.run(main())
    together = [names for names in passed if ("late", False) in names and len(names) > 1]
    assert together
    for names in together:
        assert [continues for _, continues in names] == sorted(continues for _, continues in names)
