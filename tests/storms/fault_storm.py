"""Host callables that raise while the engine runs, and what is left of the engine.

    PYTHONPATH=src python tests/storms/fault_storm.py --runs 50                      # per callable and scheduling
    PYTHONPATH=src python tests/storms/fault_storm.py --targets clock --scheduling async --trial 17 --trace

An executor, a drafter, a logits processor, an observer, a tokenizer, a detokenizer, a grammar or the clock raises at
one of its calls. The engine then goes on: every request must end once, with the output that it has alone, and nothing
may be left. If the callable belongs to one request, that one may end instead, also if its callable raises for ever.
Ends with 1 and prints the first violations of each kind, each with the command that repeats it.
"""

import argparse
import time
from dataclasses import dataclass
from random import Random

from faults import OF_REQUEST, TARGETS, Fault, FaultyGrammar, FaultyTokenizer, faulty_engine
from interrupts import Stopped, end_process, watchdog
from scenes import Catalogue, Entry, Scene, Violation, check_idle, check_outcome, check_pool, collect
from tally import Tally, causes

from foreword.engine import Engine, RequestOutput
from foreword.errors import RequestError

PATIENCE = 120.0  # seconds for one trial
MOST_FAILURES = 12  # failures of `step` by one fault that does not persist or that concerns one request


@dataclass
class Traffic:
    """Adds requests and steps until the engine is idle, through the failures of a fault."""

    engine: Engine
    tokenizer: FaultyTokenizer
    fault: Fault
    entries: dict[str, Entry]
    random: Random

    def go(self) -> dict[str, RequestOutput]:
        engine, waiting, failures = self.engine, list(self.entries), 0
        outputs: dict[str, RequestOutput] = {}
        while waiting or engine.has_work:
            try:
                if waiting and self.random.random() < 0.5:
                    self.add(waiting[0])
                    waiting.pop(0)
                else:
                    collect(engine.step(), outputs)
            except BaseException as error:
                if self.fault.error is None or self.fault.error not in causes(error):
                    raise
                failures += 1
                if failures > MOST_FAILURES:
                    raise Violation("stuck", f"{failures} failures, the last: {error!r}") from error
                if isinstance(error, RequestError) and error.request_id in self.entries:
                    engine.abort(error.request_id)
                if self.fault.persists and waiting and waiting[0] == self.fault.owner:
                    waiting.pop(0)
                if waiting and engine.why(waiting[0]).code != "unknown":
                    raise Violation("add failed but has the request", waiting[0]) from error
        return outputs

    def add(self, name: str) -> None:
        entry = self.entries[name]
        self.tokenizer.adding = name
        grammar = FaultyGrammar(self.fault, name) if int(name) % 2 else None
        self.engine.add_request(name, entry.prompt, entry.params, grammar=grammar, stream=int(name) % 3 == 0)


def trial(target: str, scheduling: str, seed: int, index: int, catalogue: Catalogue, tally: Tally) -> None:
    random = Random(f"{seed} {target} {scheduling} {index}")
    scene = Scene.choose(random, async_scheduling=scheduling == "async")
    while target.startswith("drafter") and scene.drafts != "drafter":
        scene = Scene.choose(random, async_scheduling=scheduling == "async")
    fault = Fault(target)
    repeat = f"--targets {target!r} --scheduling {scheduling} --seed {seed} --trial {index}: {scene}"
    try:
        with watchdog(PATIENCE):
            entries = {str(i): entry for i, entry in enumerate(catalogue.choose(random))}
            again = Random(random.random())
            state = again.getstate()
            plain, tokenizer = faulty_engine(scene, fault)
            Traffic(plain, tokenizer, fault, entries, again).go()  # counts the calls
            plain.close()
            if not fault.num_calls:
                tally.add(None, "right")
                return
            again.setstate(state)
            # A detokenizer may be made again in a step, for a request that this program cannot tell.
            persists = target in OF_REQUEST and target != "tokenizer.detokenizer" and random.random() < 0.3
            kinds = [RuntimeError] if persists else [RuntimeError, MemoryError, KeyboardInterrupt, Stopped]
            error = random.choice(kinds)("storm")
            fault = Fault(target, error, random.randint(1, fault.num_calls), persists)
            repeat += f", {type(error).__name__} at call {fault.at}" + ", and later ones" * persists
            engine, tokenizer = faulty_engine(scene, fault)
            outputs = Traffic(engine, tokenizer, fault, entries, again).go()
            lost = entries.keys() - outputs.keys() - ({fault.owner} if fault.persists else set())
            if lost:
                raise Violation("lost output", f"of requests {lost}, the fault belongs to {fault.owner}")
            failed = [name for name, output in outputs.items() if fault.error in causes(output.error)]
            if len(failed) > (target in OF_REQUEST):
                raise Violation("failed with another", f"requests {failed}, the fault belongs to {fault.owner}")
            for name, output in outputs.items():
                if not (name == fault.owner and fault.persists and output.outputs[0].finish_reason == "abort"):
                    check_outcome(output, entries[name], name, may_fail=name in failed)
            check_idle(engine)
            check_pool(engine)
            fault.error = None
            outputs = Traffic(engine, tokenizer, fault, entries, again).go()
            for name, entry in entries.items():
                check_outcome(outputs[name], entry, name)
            check_idle(engine)
            engine.close()
            tally.add(f"{target}:", "right" if fault.struck else "not struck")
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and error is not fault.error:
            raise
        KEPT.append(error)
        tally.fail(f"{target}:", error, repeat)


KEPT: list[BaseException] = []  # damaged engines, whose end may hang


def storm(targets: list[str], schedulings: list[str], runs: int, seed: int, only: int | None, trace: bool) -> Tally:
    tally, catalogue = Tally(trace), Catalogue(seed)
    for target in targets:
        for scheduling in schedulings:
            for index in range(runs) if only is None else [only]:
                trial(target, scheduling, seed, index, catalogue, tally)
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description="Host callables that raise while the engine runs.")
    parser.add_argument("--targets", default=";".join(TARGETS), help="separated by semicolons")
    parser.add_argument("--scheduling", default="both", choices=("sync", "async", "both"))
    parser.add_argument("--runs", type=int, default=50, help="trials per callable and scheduling")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trial", type=int, help="this trial alone")
    parser.add_argument("--trace", action="store_true", help="one line per trial")
    options = parser.parse_args()
    schedulings = ["sync", "async"] if options.scheduling == "both" else [options.scheduling]
    start = time.perf_counter()
    tally = storm(options.targets.split(";"), schedulings, options.runs, options.seed, options.trial, options.trace)
    tally.report()
    num_failed = sum(map(len, tally.violations.values()))
    print(f"\n{tally.num_injected} faults, {num_failed} violations, {time.perf_counter() - start:.0f} s", flush=True)
    return int(num_failed > 0)


if __name__ == "__main__":
    end_process(main())
