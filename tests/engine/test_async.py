"""An engine that plans the next step while one runs has the outputs and accounts of one that does not."""

import threading
from random import Random

import pytest
from engine_rig import Guesser, OnStep, make_engine, run, run_through, token_ids
from oracle_model import OracleExecutor

from foreword.batch import KVGroup, SamplingParams
from foreword.engine import Engine
from foreword.engine.speculation import SpeculationConfig


def work(engine) -> None:
    for i in range(12):
        params = SamplingParams(temperature=0.8, seed=i, max_tokens=3 + i % 5, n=1 + i % 2, logprobs=1)
        engine.add_request(str(i), [1 + j % 9 for j in range(5 + 2 * i)], params)


def test_the_next_step_is_planned_while_one_runs():
    engine = make_engine(async_scheduling=True)
    running, planned = threading.Event(), threading.Event()
    compute, schedule = engine.executor.compute, engine.scheduler.schedule
    overlaps = []

    def slow(batch, logits_indices):
        running.set()
        overlaps.append(planned.wait(timeout=60))
        planned.clear()
        return compute(batch, logits_indices)

    def watched(in_flight=None):
        plan = schedule(in_flight)
        if in_flight is not None:
            running.wait(timeout=60)
            running.clear()
            planned.set()
        return plan

    engine.executor.compute, engine.scheduler.schedule = slow, watched
    engine.add_request("a", [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=4))
    run(engine)
    assert overlaps == [True] * 4
    engine.close()


def test_a_request_that_certainly_ends_is_not_scheduled_again():
    engine = make_engine(async_scheduling=True)
    engine.add_request("a", [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=5))
    run(engine)
    assert engine.executor.num_steps == 5
    engine.close()


def test_a_request_that_ends_at_a_sampled_end_token_computes_nothing_more():
    engine = make_engine()
    engine.add_request("a", [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=9))
    engine.add_request("b", [4, 5, 6], SamplingParams(temperature=0.0, max_tokens=9))
    outputs = run(engine)
    expected = outputs["a"].outputs[0].token_ids
    eos = expected[3]
    engine = make_engine(async_scheduling=True, eos=[eos])
    for name, prompt in (("a", [1, 2, 3]), ("b", [4, 5, 6])):
        engine.add_request(name, prompt, SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=name == "b"))
    got = run(engine)
    assert got["a"].outputs[0].token_ids == expected[: expected.index(eos) + 1]
    assert got["b"].outputs[0].token_ids == outputs["b"].outputs[0].token_ids
    engine.close()


def test_abort_is_at_once_though_the_next_step_is_planned():
    engine = make_engine(async_scheduling=True)
    engine.add_request("a", [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=9))
    engine.add_request("b", [4, 5, 6], SamplingParams(temperature=0.0, max_tokens=9))
    engine.step()
    out = engine.abort("a")
    assert len(out.outputs[0].token_ids) == 1
    assert set(run(engine)) == {"b"}
    assert engine.executor.num_tokens == 3 + 3 + 8
    engine.close()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_failed_step_reaches_the_caller_and_the_engine_goes_on(async_scheduling: bool):
    class Flaky(OracleExecutor):
        def compute(self, batch, logits_indices):
            if self.num_steps in (1, 4):
                self.num_steps += 1
                for memory in self.prefixes:
                    memory[memory == 0] = 77  # its writes are invalid
                raise MemoryError("no more memory")
            return super().compute(batch, logits_indices)

    def outputs(executor):
        engine = make_engine(async_scheduling=async_scheduling, executor=executor, max_num_seqs=3)
        work(engine)
        return run_through(engine, MemoryError)

    done, failures = outputs(Flaky)
    assert failures == 2
    assert done == outputs(OracleExecutor)[0]


GROUPS = {"full": [KVGroup(4)], "hybrid": [KVGroup(4), KVGroup(4, sliding_window=6)]}


@pytest.mark.one_in(7)
@pytest.mark.parametrize("kind", sorted(GROUPS))
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_speculation_and_depth_two_together_change_nothing(kind: str, temperature: float):
    """Drafts right and wrong, preemptions, aborts between any two steps, stops at sampled tokens and by length."""

    preemptions = []

    def outcomes(*, async_scheduling: bool, speculation: SpeculationConfig | None) -> tuple[Engine, dict]:
        engine = make_engine(
            groups=GROUPS[kind],
            blocks=len(GROUPS[kind]) * 18,
            eos=[3],
            max_num_seqs=4,
            max_num_batched_tokens=20,
            reserve_full_prompt=False,
            async_scheduling=async_scheduling,
            speculation=speculation,
            drafter=Guesser if speculation else None,
        )
        random, done = Random(5), {}
        for i in range(10):
            prompt = [1 + random.randrange(9) for _ in range(random.randint(1, 30))]
            params = SamplingParams(
                temperature=temperature, seed=i, max_tokens=random.randint(1, 25), n=1 + i % 2, logprobs=2
            )
            engine.add_request(str(i), prompt, params, stream=i % 3 == 0)
            engine.add_request(f"aborted {i}", prompt, params)
            for out in engine.step():
                done[out.request_id] = out
            if i > 2:
                engine.abort(f"aborted {i - random.randrange(3)}")
        done |= run(engine)
        engine.close()
        preemptions.append(sum(o.metrics.num_preemptions for o in done.values()))
        outputs = {i: [(c.token_ids, c.finish_reason, c.logprobs) for c in o.outputs] for i, o in done.items()}
        return engine, {i: o for i, o in outputs.items() if not i.startswith("aborted")}

    drafts = SpeculationConfig(method="draft_model", model="guesser", num_tokens=3, adaptive=False)
    _, wanted = outcomes(async_scheduling=False, speculation=None)
    assert len(wanted) == 10
    for async_scheduling, speculation in ((True, None), (False, drafts), (True, drafts)):
        engine, got = outcomes(async_scheduling=async_scheduling, speculation=speculation)
        assert got == wanted
        if speculation is not None:
            stats = engine.speculation.stats
            assert 0 < stats.num_accepted < stats.num_drafted
    assert sum(preemptions) > 0


def test_draft_slots_are_reserved_during_a_run_and_filled_after_it():
    """The step that runs has no slot without a draft."""
    seen: list[tuple[list[int], list[int]]] = []
    config = SpeculationConfig(method="draft_model", model="guesser", num_tokens=3, adaptive=False)
    engine = make_engine(async_scheduling=True, speculation=config, drafter=Guesser)
    planned: list[list[int]] = []
    schedule = engine.scheduler.schedule

    def watched(in_flight=None):
        plan = schedule(in_flight)
        planned.append(plan.num_scheduled.tolist())
        return plan

    engine.scheduler.schedule = watched
    note = lambda plan, batch: seen.append((plan.num_scheduled.tolist(), batch.draft_token_ids.tolist()))  # noqa: E731
    engine.observers.add(OnStep(note))
    engine.add_request("a", [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=12))
    run(engine)
    engine.close()
    ran = [counts for counts, _ in seen]
    assert planned[:2] == ran[:2] == [[3], [4]]
    assert all(a <= b for (a,), (b,) in zip(ran, planned, strict=False))
    assert all(min(drafts, default=0) >= 0 and len(drafts) == counts[0] - 1 for counts, drafts in seen[1:])
    assert sum(counts[0] for counts in ran[1:]) < 4 * 11


def test_a_step_that_cannot_start_is_cancelled_and_the_engine_continues():
    engine = make_engine(async_scheduling=True, speculation=SpeculationConfig(min_match=1))
    work(engine)
    left = [RuntimeError("not now")] * 3

    def refuse(plan, batch):
        if left and batch.step % 2:
            raise left.pop()

    engine.observers.add(OnStep(refuse))
    done, failures = run_through(engine, RuntimeError)
    assert failures == 3
    plain = make_engine()
    work(plain)
    assert done == token_ids(run(plain))


def test_a_planned_step_without_requests_makes_no_copies_and_what_they_would_fill_is_not_cached():
    engine = make_engine(async_scheduling=True)
    copied, copy_blocks = [], engine.executor.copy_blocks
    engine.executor.copy_blocks = lambda a, b: (copied.append(len(a)), copy_blocks(a, b))
    greedy = SamplingParams(temperature=0.0, max_tokens=9)
    engine.add_request("a", list(range(1, 11)), greedy)
    run(engine)
    engine.add_request("x", [20, 21], greedy)
    engine.step()
    engine.add_request("b", [1, 2, 3, 4, 5, 6, 9], greedy)
    engine.step()
    assert engine.abort("b").metrics.num_cached_tokens == 6
    engine.abort("x")
    assert (engine.has_work, copied) == (False, [])
    engine.add_request("c", [1, 2, 3, 4, 5, 6, 9], greedy)
    got = run(engine)["c"].outputs[0].token_ids
    engine.close()
    assert copied == [1], "its own, from the block of the first request"
    plain = make_engine()
    plain.add_request("c", [1, 2, 3, 4, 5, 6, 9], greedy)
    assert run(plain)["c"].outputs[0].token_ids == got
