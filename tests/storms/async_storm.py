"""Storms over threads and event loops: cancelled tasks, unread streams, several loops, threads, a fork.

    PYTHONPATH=src python tests/storms/async_storm.py --runs 20
    PYTHONPATH=src python tests/storms/async_storm.py --modes cancel --seed 3 --only 17      # one run again

modes
    cancel   200 generators at once; some are cancelled or aborted at random times, some are read late or never
    loops    one AsyncEngine used by several event loops, one after another
    together one AsyncEngine used by two event loops in two threads at the same time
    threads  one LLM used by three threads at the same time
    foreign  an LLM whose engine has requests of another user
    fork     an engine, with its threads, used in the parent and in a forked child

In every mode each answer must be the one that the request gets alone, or the call is refused: an error of Foreword, of
one sentence or two, at once. Afterwards nothing is left in the engine, and it serves as before. Ends with 1 and prints
the violations, each with the command that repeats its run (threads run freely, so a repetition may pass).
"""

import argparse
import asyncio
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from random import Random
from typing import Any

from interrupts import end_process, watchdog
from scenes import Catalogue, Entry, Scene, Violation, check_idle, check_outcome, check_pool, llm_on
from tally import Tally

from foreword.engine import RequestOutput
from foreword.engine.async_engine import AsyncEngine
from foreword.errors import ForewordError

PATIENCE = 120.0  # seconds for one run
CHILD_PATIENCE = 60.0  # seconds for a forked child
LONGEST_MESSAGE = 300  # characters of a refusal
RIGHT, REFUSED, FAILED = 0, 4, 3  # how a forked child ends


def refusal(error: BaseException) -> None:
    """Accept an error of Foreword that a user can read; raise any other."""
    if not isinstance(error, ForewordError):
        raise error
    if not 20 <= len(str(error)) <= LONGEST_MESSAGE:
        raise Violation("unclear refusal", repr(error))


async def final(serving: AsyncEngine, entry: Entry, **options: Any) -> RequestOutput:
    async with aclosing(serving.generate(entry.prompt, entry.params, **options)) as outputs:
        return [output async for output in outputs][-1]


def check_closed(serving: AsyncEngine) -> None:
    if serving.num_unfinished:
        raise Violation("leak of streams", serving.num_unfinished)
    check_idle(serving.engine)
    check_pool(serving.engine)


# -- modes: each runs once, and returns what happened ----------------------------------------------------------------


def cancel(scene: Scene, catalogue: Catalogue, random: Random) -> str:
    serving = AsyncEngine(scene.engine(), max_num_requests=random.choice([8, 50, 1000]))
    entries = [random.choice(catalogue.entries) for _ in range(200)]
    counts = {"cancelled": 0, "aborted": 0}

    async def read(i: int, entry: Entry) -> None:
        """Read a stream to its end, late, or not to its end."""
        unread = i % 10 == 0
        async with aclosing(serving.generate(entry.prompt, entry.params, request_id=str(i))) as outputs:
            output = await anext(outputs)
            if unread:
                await asyncio.sleep(0.02)
                return
            async for output in outputs:  # noqa: B007, its last value is used
                if i % 7 == 0:
                    await asyncio.sleep(0.002)
        if not output.finished:
            raise Violation("unfinished stream", i)
        if any(c.finish_reason == "abort" for c in output.outputs):
            counts["aborted"] += 1
        else:
            check_outcome(output, entry, str(i))

    async def run() -> None:
        tasks = [asyncio.create_task(read(i, entry)) for i, entry in enumerate(entries)]
        while not all(task.done() for task in tasks):
            victim = random.randrange(len(tasks))
            if random.random() < 0.3:
                tasks[victim].cancel()
            elif random.random() < 0.2:
                serving.abort(str(victim))
            await asyncio.sleep(random.choice([0, 0, 0.001, 0.003]))
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, asyncio.CancelledError):
                counts["cancelled"] += 1
            elif isinstance(result, BaseException):
                raise result
        for entry in catalogue.choose(random):
            check_outcome(await final(serving, entry), entry, "after the storm")
        await serving.close()

    asyncio.run(run())
    check_closed(serving)
    return "right"


def in_loop(serving: AsyncEngine, entries: list[Entry]) -> bool:
    """Run requests in a new event loop. True if they are right, False if they are refused."""

    async def together() -> list[RequestOutput | BaseException]:
        calls: list[Coroutine[Any, Any, RequestOutput]] = [final(serving, entry) for entry in entries]
        return await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), PATIENCE / 4)

    accepted = True
    for result, entry in zip(asyncio.run(together()), entries, strict=True):
        if isinstance(result, BaseException):
            refusal(result)
            accepted = False
        else:
            check_outcome(result, entry, "of a loop")
    return accepted


def loops(scene: Scene, catalogue: Catalogue, random: Random) -> str:
    # More requests than may run, so that some wait at the lock of the loop.
    serving = AsyncEngine(scene.engine(), max_num_requests=2)
    accepted = [in_loop(serving, catalogue.choose(random)) for _ in range(3)]
    if not accepted[0]:
        raise Violation("refused", "the first loop")
    asyncio.run(serving.close())
    check_closed(serving)
    return "right" if all(accepted) else "refused"


def together(scene: Scene, catalogue: Catalogue, random: Random) -> str:
    serving = AsyncEngine(scene.engine(), max_num_requests=2)
    work = [[catalogue.choose(random) for _ in range(3)] for _ in range(2)]
    accepted = in_threads([lambda w=w: all(in_loop(serving, entries) for entries in w) for w in work])
    asyncio.run(serving.close())
    check_closed(serving)
    return "right" if all(accepted) else "refused"


def in_threads(calls: list[Callable[[], bool]]) -> list[bool]:
    """Run the calls at the same time; the first exception is raised."""
    results: list[bool] = []
    errors: list[BaseException] = []

    def run(call: Callable[[], bool]) -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def threads(scene: Scene, catalogue: Catalogue, random: Random) -> str:
    engine = scene.engine()
    llm = llm_on(engine)
    work = [[catalogue.choose(random) for _ in range(5)] for _ in range(3)]

    def user(batches: list[list[Entry]]) -> bool:
        accepted = True
        for entries in batches:
            try:
                outputs = llm.generate([e.prompt for e in entries], [e.params for e in entries], progress=False)
            except Exception as error:
                refusal(error)
                accepted = False
            else:
                for entry, output in zip(entries, outputs, strict=True):
                    check_outcome(output, entry, "of a thread")
        return accepted

    accepted = in_threads([lambda w=w: user(w) for w in work])
    check_idle(engine)
    if not user(work[0]):
        raise Violation("refused", "after the other threads have ended")
    check_idle(engine)
    check_pool(engine)
    engine.close()
    return "right" if all(accepted) else "refused"


def foreign(scene: Scene, catalogue: Catalogue, random: Random) -> str:
    engine = scene.engine()
    llm, others = llm_on(engine), {f"other {i}": entry for i, entry in enumerate(catalogue.choose(random))}
    for name, entry in others.items():
        engine.add_request(name, entry.prompt, entry.params)
    entries, result = catalogue.choose(random), "right"
    try:
        outputs = llm.generate([e.prompt for e in entries], [e.params for e in entries], progress=False)
    except Exception as error:
        refusal(error)
        result = "refused"
    else:
        for entry, output in zip(entries, outputs, strict=True):
            check_outcome(output, entry, "of the LLM")
    ended = {}
    while engine.has_work:
        ended |= {output.request_id: output for output in engine.step()}
    if result == "refused" and ended.keys() != others.keys():
        raise Violation("lost output", f"of {others.keys() - ended.keys()}")
    for name, output in ended.items():
        check_outcome(output, others[name], name)
    check_idle(engine)
    check_pool(engine)
    engine.close()
    return result


def fork(scene: Scene, catalogue: Catalogue, random: Random) -> str:
    engine = scene.engine()
    llm = llm_on(engine)
    serving = AsyncEngine(scene.engine()) if random.random() < 0.5 else None
    entries = catalogue.choose(random)

    def use() -> bool:
        if serving is not None:
            return in_loop(serving, entries)
        try:
            outputs = llm.generate([e.prompt for e in entries], [e.params for e in entries], progress=False)
        except Exception as error:
            refusal(error)
            return False
        for entry, output in zip(entries, outputs, strict=True):
            check_outcome(output, entry, "after a fork")
        return True

    use()
    child = os.fork()
    if not child:
        code = FAILED
        try:
            code = RIGHT if use() else REFUSED
        except BaseException:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(code)
    end, done, status = time.monotonic() + CHILD_PATIENCE, 0, 0
    while not done and time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        time.sleep(0.005)
    used = "AsyncEngine" if serving else "LLM"
    if not done:
        os.kill(child, 9)
        os.waitpid(child, 0)
        raise Violation("hang", f"of a forked child that uses {used}")
    code = os.waitstatus_to_exitcode(status)
    if code not in (RIGHT, REFUSED):
        raise Violation("forked child fails", f"with {code}, using {used}; its error is above")
    if not use():
        raise Violation("refused", "in the parent of a fork")
    engine.close()
    return "right" if code == RIGHT else "refused"


MODES: dict[str, Callable[[Scene, Catalogue, Random], str]] = {
    "cancel": cancel,
    "loops": loops,
    "together": together,
    "threads": threads,
    "foreign": foreign,
    "fork": fork,
}
KEPT: list[object] = []  # damaged engines, whose end may hang


def storm(modes: list[str], runs: int, seed: int, only: int | None, trace: bool) -> Tally:
    tally, catalogue = Tally(trace), Catalogue(seed)
    for entry in catalogue.entries:
        entry.wanted  # noqa: B018, computed before the threads start
    for mode in modes:
        for index in range(runs) if only is None else [only]:
            random = Random(f"{seed} {mode} {index}")
            scene = Scene.choose(random, async_scheduling=index % 2 == 1)
            try:
                with watchdog(PATIENCE):
                    tally.add(f"{mode}:", MODES[mode](scene, catalogue, random))
            except BaseException as error:
                KEPT.append(error)
                tally.fail(f"{mode}:", error, f"--modes {mode} --seed {seed} --only {index}: {scene}")
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description="Storms over threads and event loops.")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--runs", type=int, default=20, help="per mode")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="this run alone")
    parser.add_argument("--trace", action="store_true", help="one line per run")
    options = parser.parse_args()
    start = time.perf_counter()
    tally = storm(options.modes.split(","), options.runs, options.seed, options.only, options.trace)
    tally.report()
    num_failed = sum(map(len, tally.violations.values()))
    print(f"\n{tally.num_injected} runs, {num_failed} violations, {time.perf_counter() - start:.0f} s", flush=True)
    return int(num_failed > 0)


if __name__ == "__main__":
    end_process(main())
