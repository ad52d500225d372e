"""Interrupts at random moments of a running engine, and what they leave behind.

    PYTHONPATH=src python tests/storms/interrupt_storm.py --modes lines --runs 2000              # both schedulings
    PYTHONPATH=src python tests/storms/interrupt_storm.py --modes lines --scheduling async --seed 3 --engine 17 --trace
                                                                                 # one engine of a storm again, verbose

Ends with 1 and prints the first violations of each kind, each with the command that repeats its engine.

modes
    lines    `LLM.generate`, an exception before a random line of Foreword in the calling thread
    planner  the same in the planner thread (asynchronous scheduling)
    signals  `LLM.generate`, SIGINT after a random time (not repeatable)
    burst    the same, three signals within 0.2 ms, so that the requests are as a rule not aborted: the next `generate`
             must be right nevertheless, and nothing left after it
    thread   `LLM.generate`, PyThreadState_SetAsyncExc after a random time (not repeatable)
    steps    `Engine.add_request`, `step` and `abort`, an exception before a random line of one of these calls; after it
             the engine goes on, and every request must end once, with the output that it has alone

A MemoryError in code that works for one request, such as its detokenizer's, may end that request with an error.

After an interrupted `generate` its requests must be gone, every block, row and buffer free, `abort` must not raise, and
the next `generate` must give each request the output that it has alone. One engine is interrupted several times.
"""

import argparse
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from random import Random

from interrupts import (
    INJECTED,
    Line,
    Lines,
    Stopped,
    end_process,
    interrupted_by_signals,
    interrupted_by_thread,
    place_of,
    some_error,
    traced,
    traced_planner,
    watchdog,
)
from scenes import Catalogue, Entry, Scene, Violation, check_idle, check_outcome, check_pool, collect, llm_on, run
from tally import Tally, causes, describe

from foreword import LLM
from foreword.engine import Engine, RequestOutput
from foreword.errors import RequestError

PER_ENGINE = 8  # interrupts of one engine
PATIENCE = 90.0  # seconds for one engine


@dataclass
class Trial:
    """One engine of a storm, interrupted several times."""

    name: str
    scene: Scene
    random: Random
    catalogue: Catalogue
    tally: Tally
    mode: str
    num_ids: int = 0
    hit: str | None = None

    def go(self) -> None:
        interrupt = {"planner": self.interrupt_planner, "steps": self.interrupt_steps}
        try:
            with watchdog(PATIENCE):
                interrupt.get(self.mode, self.interrupt_generate)()
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and place_of(error) is None:
                raise
            KEPT.append(error)
            self.tally.fail(self.hit, error, f"{self.name}: {self.scene}")

    # -- generate ------------------------------------------------------------------------------------------------

    def interrupt_generate(self) -> None:
        engine = self.scene.engine()
        llm, random = llm_on(engine), self.random
        count = Lines()
        start = time.perf_counter()
        self.generate(llm, self.catalogue.choose(random))
        plain = time.perf_counter() - start
        if self.mode == "lines":
            with traced(count):
                self.generate(llm, self.catalogue.choose(random))
        for _ in range(PER_ENGINE):
            self.hit = None
            if self.mode == "lines":
                lines = chosen_line(random, count)
                self.interrupted(llm, lambda lines=lines: traced(lines), lines)
            elif self.mode in ("signals", "burst"):
                delays = [
                    random.uniform(0, plain),
                    *(random.uniform(0, 1e-4) for _ in range(2 * (self.mode == "burst"))),
                ]
                self.interrupted(llm, lambda delays=delays: interrupted_by_signals(delays))
            else:
                error, delay = random.choice([KeyboardInterrupt, MemoryError, Stopped]), random.uniform(0, plain)
                self.interrupted(llm, lambda d=delay, e=error: interrupted_by_thread(d, e))
            if self.mode != "burst":
                check_idle(engine)
                self.abort_all(engine)
                if random.random() < 0.3:
                    check_pool(engine)
            self.guarded("next generate", self.generate, llm, self.catalogue.choose(random))
            check_idle(engine)
            self.abort_all(engine)
            if random.random() < 0.3:
                check_pool(engine)
            self.tally.add(self.hit, "right")
        engine.close()

    def interrupted(
        self, llm: LLM, storm: Callable[[], AbstractContextManager[None]], lines: Lines | None = None
    ) -> None:
        """Run a generate in a storm. hit: where it was interrupted; None if it ended before."""
        entries = self.catalogue.choose(self.random)
        prompts, params = [e.prompt for e in entries], [e.params for e in entries]
        outputs = None
        try:
            with storm():
                outputs = llm.generate(prompts, params, progress=False)
        except BaseException as error:
            self.hit = place_of(error) if lines is None else lines.hit
            if not any(isinstance(e, INJECTED) for e in causes(error)):
                raise
        self.num_ids += len(entries)
        if outputs is not None:
            self.hit = None if lines is None else lines.hit  # an exception that was handled
            for entry, output in zip(entries, outputs, strict=True):
                check_outcome(output, entry, output.request_id, may_fail=self.hit is not None)

    def generate(self, llm: LLM, entries: list[Entry]) -> None:
        outputs = llm.generate([e.prompt for e in entries], [e.params for e in entries], progress=False)
        self.num_ids += len(entries)
        for entry, output in zip(entries, outputs, strict=True):
            check_outcome(output, entry, output.request_id)

    def abort_all(self, engine: Engine) -> None:
        for i in range(self.num_ids + 9):
            if self.guarded("abort", engine.abort, str(i)) is not None:
                raise Violation("leak of requests", f"request {i} was still there")

    def guarded(self, what, call, *arguments):  # type: ignore[no-untyped-def]
        """Call what must not raise."""
        try:
            return call(*arguments)
        except Exception as error:
            if isinstance(error, Violation):
                raise
            raise Violation(f"{what} raises {type(error).__name__}", describe(error)) from error

    # -- the planner thread --------------------------------------------------------------------------------------

    def interrupt_planner(self) -> None:
        random = self.random
        count = Lines()
        with traced_planner(count):
            engine = self.scene.engine()
            self.generate(llm_on(engine), self.catalogue.choose(random))
            engine.close()
        if not count.num_lines:
            return
        for _ in range(PER_ENGINE):
            error = random.choice([MemoryError, RuntimeError, Stopped])("storm")
            lines = chosen_line(random, count)
            lines.error = error
            with traced_planner(lines):
                engine = self.scene.engine()
                llm = llm_on(engine)
                entries = self.catalogue.choose(random)
                try:
                    outputs = llm.generate([e.prompt for e in entries], [e.params for e in entries], progress=False)
                except type(error):
                    outputs = None
                self.hit = lines.hit
                if outputs is not None:
                    for entry, output in zip(entries, outputs, strict=True):
                        check_outcome(output, entry, output.request_id, may_fail=self.hit is not None)
                lines.error = None
            check_idle(engine)
            self.guarded("next generate", self.generate, llm, self.catalogue.choose(random))
            check_idle(engine)
            check_pool(engine)
            engine.close()
            self.tally.add(self.hit, "right")

    # -- steps ---------------------------------------------------------------------------------------------------

    def interrupt_steps(self) -> None:
        engine, random = self.scene.engine(), self.random
        count, names = Lines(), (str(i) for i in range(10**6))
        for entry in self.catalogue.choose(random):
            engine.add_request(next(names), entry.prompt, entry.params)
        with traced(count):
            run(engine)
        for _ in range(PER_ENGINE):
            entries = {next(names): entry for entry in self.catalogue.choose(random)}
            lines = chosen_line(random, count)
            self.steps(engine, entries, lines)
            check_idle(engine)
            if random.random() < 0.3:
                check_pool(engine)
            self.tally.add(self.hit, "right")
        engine.close()

    def steps(self, engine: Engine, entries: dict[str, Entry], lines: Lines) -> None:
        """Add these requests, abort some, step until idle; one of the calls is interrupted."""
        outputs: dict[str, RequestOutput] = {}
        aborted: set[str] = set()
        lost = False
        waiting = list(entries)
        while waiting or engine.has_work:
            call, name = "step", ""
            if waiting and self.random.random() < 0.5:
                call, name = "add", waiting.pop(0)
            elif self.random.random() < 0.03:
                call, name = "abort", self.random.choice(list(entries))
            try:
                self.hit = lines.hit
                with traced(lines):
                    if call == "add":
                        engine.add_request(name, entries[name].prompt, entries[name].params)
                    elif call == "abort":
                        aborted.add(name)
                        engine.abort(name)
                    else:
                        collect(engine.step(), outputs)
            except INJECTED:
                self.hit = lines.hit
                # An exception between the last change of `step` and the caller loses the outputs it returns.
                lost = call == "step" and lines.hit is not None and lines.hit.endswith(" Engine.step")
                if call == "add":
                    self.guarded("add after an interrupt", self.add_again, engine, name, entries[name])
            self.hit = lines.hit
            if call == "abort":
                self.guarded("abort", engine.abort, name)
                if engine.why(name).code != "unknown":
                    raise Violation("abort did nothing", name)
        for name, entry in entries.items():
            if name in outputs:
                if name not in aborted:
                    check_outcome(outputs[name], entry, name, may_fail=isinstance(lines.error, MemoryError))
            elif name not in aborted and not lost:
                raise Violation("lost output", name)

    def add_again(self, engine: Engine, name: str, entry: Entry) -> None:
        if engine.why(name).code == "unknown":
            engine.add_request(name, entry.prompt, entry.params)
            return
        try:
            engine.add_request(name, entry.prompt, entry.params)
        except RequestError:
            return
        raise Violation("id in use", f"request {name} was there, and could be added again")


KEPT: list[BaseException] = []  # damaged engines, whose end may hang


def chosen_line(random: Random, count: Lines) -> Lines:
    """Half of the time any moment, half of the time a moment at any line of the sources."""
    error = some_error(random)
    if random.random() < 0.5:
        return Lines(error, after=random.randint(1, count.num_lines))
    line: Line = random.choice(sorted(count.seen, key=lambda at: (at[0].co_filename, at[1], at[0].co_name)))
    return Lines(error, after=random.randint(1, count.seen[line]), line=line)


def storm(
    mode: str, scheduling: str, runs: int, catalogue: Catalogue, *, engine: int | None = None, trace: bool = False
) -> Tally:
    """``runs`` interrupts of one mode. engine: that one alone."""
    tally, seed = Tally(trace), catalogue.seed
    index = 0 if engine is None else engine
    while tally.num_injected < runs and index < 3 * runs:
        random = Random(f"{seed} {mode} {scheduling} {index}")
        scene = Scene.choose(random, async_scheduling=scheduling == "async")
        name = f"--modes {mode} --scheduling {scheduling} --seed {seed} --engine {index}"
        Trial(name, scene, random, catalogue, tally, mode).go()
        index += 1
        if engine is not None:
            break
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description="Interrupts at random moments of a running engine.")
    parser.add_argument("--modes", default="lines,planner,signals,burst,thread,steps")
    parser.add_argument("--scheduling", default="both", choices=("sync", "async", "both"))
    parser.add_argument("--runs", type=int, default=2000, help="interrupts per mode and scheduling")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", type=int, help="this engine of the storm alone")
    parser.add_argument("--trace", action="store_true", help="one line per interrupt")
    options = parser.parse_args()
    failed = False
    catalogue = Catalogue(options.seed)
    for entry in catalogue.entries:
        entry.wanted  # noqa: B018, computed before anything is interrupted
    for mode in options.modes.split(","):
        for scheduling in ("sync", "async") if options.scheduling == "both" else (options.scheduling,):
            if mode == "planner" and scheduling == "sync":
                continue
            start = time.perf_counter()
            tally = storm(mode, scheduling, options.runs, catalogue, engine=options.engine, trace=options.trace)
            failed |= bool(tally.violations) or tally.num_injected == 0
            num_failed = sum(map(len, tally.violations.values()))
            tally.report()
            print(
                f"\n{mode}, {scheduling}: {tally.num_injected} interrupts, {num_failed} violations, "
                f"{time.perf_counter() - start:.0f} s\n",
                flush=True,
            )
    return int(failed)


if __name__ == "__main__":
    end_process(main())
