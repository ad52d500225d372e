"""Recurrent layers in every executor, against a plain loop over tokens in float64, and in an engine."""

from functools import cache, partial

import numpy as np
import pytest
from kernel_driver import Driver
from kernel_reference import SPECS, Reference, fp32_error, random_weights, relative_error, tiny_spec

from drafters import Recalled
from foreword.batch import BlockOps, SamplingParams, prepare_inputs
from foreword.engine import Engine
from foreword.engine.config import engine_config
from foreword.engine.speculation import SpeculationConfig
from foreword.executors.pool import batch_groups
from foreword.models.weights import float_tensor
from models.running import EXECUTORS

HYBRIDS = (
    *("mamba2", "gated_delta", "short_conv", "single_parts", "mamba1", "states_alone", "rg_lru", "lru_alone"),
    *("mixed_qkv", "mixed_heads"),
    *("channel_decays", "bounded_decays", "kept_inputs", "aside", "aside_alike"),
)
BLOCK_SIZE, NUM_BLOCKS, NUM_STATES = 16, 400, 40
every = pytest.mark.parametrize("kind", EXECUTORS)
kinds = pytest.mark.parametrize("name", HYBRIDS)


def executor_of(kind: str, spec, weights, num_blocks: int = NUM_BLOCKS, num_states: int = 0):
    threads = {"num_threads": 3} if kind == "native" else {}
    return EXECUTORS[kind](
        spec, weights, num_blocks=num_blocks, block_size=BLOCK_SIZE, num_states=num_states, **threads
    )


def driver(kind: str, name: str, **options) -> Driver:
    spec = SPECS[name]
    return Driver(
        spec, WEIGHTS[name], num_blocks=NUM_BLOCKS, executor=executor_of(kind, spec, WEIGHTS[name]), **options
    )


WEIGHTS = {name: random_weights(SPECS[name]) for name in HYBRIDS}
TOKENS = np.random.default_rng(7).integers(0, 301, 90).tolist()
WANT = {name: Reference(SPECS[name], WEIGHTS[name]).logits(TOKENS) for name in HYBRIDS}


@pytest.mark.one_in(3)
@every
@kinds
@pytest.mark.parametrize("chunks", [[90], [1] * 12, [2, 1, 3, 1, 1, 40, 1, 41]])
def test_chunks_of_any_size_give_the_logits_of_the_loop_over_tokens(kind, name, chunks):
    for logits, end in zip(driver(kind, name).run_alone("a", TOKENS, chunks), np.cumsum(chunks), strict=True):
        assert relative_error(logits, WANT[name][end - 1]) < fp32_error(SPECS[name])


@pytest.mark.parametrize("name", ["mamba2", "gated_delta", "mamba1", "channel_decays", "bounded_decays", "rg_lru"])
def test_heads_that_forget_nothing_or_all_at_once_are_those_of_the_loop_with_equal_bits_in_any_chunks(name):
    """The native executor multiplies a state by its decays only when their product is small."""
    spec, weights = SPECS[name], dict(WEIGHTS[name])
    for key in [key for key in weights if key.endswith(("a_log", "state.a"))]:
        size = weights[key].dequantize().size
        weights[key] = float_tensor(np.linspace(-9, 6, size, dtype=np.float32).reshape(weights[key].shape))
    want, found = Reference(spec, weights).logits(TOKENS), {}
    for chunks in ([90], [1] * 90, [2, 1, 3, 1, 1, 40, 1, 41]):
        run = Driver(spec, weights, num_blocks=NUM_BLOCKS, executor=executor_of("native", spec, weights))
        for logits, end in zip(run.run_alone("a", TOKENS, chunks), np.cumsum(chunks).tolist(), strict=True):
            assert relative_error(logits, want[end - 1]) < fp32_error(spec)
            np.testing.assert_array_equal(logits, found.setdefault(end, logits.copy()))


@pytest.mark.one_in(2)
@every
@kinds
def test_requests_of_one_step_have_states_of_their_own(kind, name):
    other = np.random.default_rng(8).integers(0, 301, 60).tolist()
    want = {"a": WANT[name], "b": Reference(SPECS[name], WEIGHTS[name]).logits(other)}
    run = driver(kind, name)
    run.add("a", TOKENS)
    run.add("b", other)
    done = dict.fromkeys("ab", 0)
    for step in ({"a": 5}, {"b": 30, "a": 1}, {"a": 33, "b": 1}, {"b": 2, "a": 2}):
        for request, logits in run.step(step).items():
            done[request] += step[request]
            assert relative_error(logits, want[request][done[request] - 1]) < fp32_error(SPECS[name])


@every
@kinds
def test_a_new_request_starts_from_zero_whatever_its_block_held(kind, name):
    run = driver(kind, name)
    *_, first = run.run_alone("a", TOKENS, [50])
    group = next(g for g, table in enumerate(run.states.block_tables) if table.group.recurrent)
    run.states.num_computed_tokens[run.states.row_of("a")] = 0
    run.executor.copy_blocks(np.array([3], np.int32), run.states.block_tables[group].table[:1, 0].copy())
    np.testing.assert_array_equal(run.step({"a": 50})["a"], first)


@every
@kinds
def test_a_copied_block_continues_with_its_state(kind, name):
    run = driver(kind, name)
    *_, want = run.run_alone("a", TOKENS, [32, 1])
    again = driver(kind, name)
    again.run_alone("a", TOKENS, [32])
    again.add("b", TOKENS)
    a, b = again.states.row_of("a"), again.states.row_of("b")
    tables = [table.table for table in again.states.block_tables]
    copies = [[int(t[a, k]), int(t[b, k])] for t in tables for k in range(min(2, t.shape[1]))]
    again.executor.apply_block_ops(BlockOps.of(copies=copies))
    again.states.num_computed_tokens[b] = 32
    np.testing.assert_array_equal(again.step({"b": 1})["b"], want)


@every
@kinds
def test_a_step_after_rejected_drafts_continues_from_the_state_of_the_last_accepted_one(kind, name):
    """As many drafts of "a" are right as `accepted` says, in turn; "b" has none, or none that is right."""
    run, most, done = driver(kind, name, max_num_draft_tokens=4), 4, {"a": 30, "b": 1}
    for request, count in done.items():
        run.add(request, TOKENS[:count], more=50)
    run.states.commit(prepared(run, {}), {"a": TOKENS[30:31], "b": TOKENS[1:2]})
    for step, accepted in enumerate([0, 4, 2, 1, 0, 0, 3, 4, 4, 1]):
        right = {"a": accepted, "b": 0}
        counts = {"a": min(accepted + step % 2, most), "b": step % 3}
        drafts = {}
        for request, count in counts.items():
            known, rows = done[request] + 1, right[request]
            drafts[request] = [*TOKENS[known : known + rows], *[(t + 1) % 301 for t in TOKENS[known + rows :]]][:count]
        batch = prepared(run, drafts)
        logits = np.split(run.executor.compute(batch, batch.logits_indices).copy(), batch.cu_num_logits[1:-1])
        for request, rows in zip("ab", logits, strict=True):
            for i in range(right[request] + 1):
                assert relative_error(rows[i], WANT[name][done[request] + i]) < fp32_error(SPECS[name])
        sampled = {r: TOKENS[done[r] + 1 : done[r] + right[r] + 2] for r in "ab"}
        run.states.commit(batch, sampled)
        done = {request: done[request] + right[request] + 1 for request in "ab"}


def prepared(run: Driver, drafts: dict[str, list[int]]):
    """A step of all tokens of both requests that are known and not computed, and of these drafts."""
    left = {r: int(run.states.num_tokens[row] - run.states.num_computed_tokens[row])
            for r in "ab" for row in [run.states.row_of(r)]}  # fmt: skip
    plan = {request: count + len(drafts.get(request, [])) for request, count in left.items()}
    gather = run.executor.reads_gathered_tables
    batch = prepare_inputs(run.states, plan, run.buffers, draft_tokens=drafts or None, gather_block_tables=gather)
    if not drafts:
        run.executor.compute(batch, batch.logits_indices)
    return batch


def engine_of(kind: str, name: str, *, num_blocks: int = NUM_BLOCKS, drafter=None, **config) -> Engine:
    spec = SPECS[name]
    return Engine(
        executor_of(kind, spec, WEIGHTS[name], num_blocks, NUM_STATES),
        vocab_size=spec.vocab_size,
        max_model_len=120,
        kv_groups=batch_groups(spec, BLOCK_SIZE),
        num_blocks=num_blocks,
        num_states=NUM_STATES,
        config=engine_config({"block_size": BLOCK_SIZE, "check": "full", **config}),
        drafter=drafter,
    )


def run(engine: Engine, prompts: dict[str, list[int]], length: int = 12) -> dict[str, object]:
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, SamplingParams(temperature=0.0, max_tokens=length))
    done = {}
    while engine.has_work:
        done |= {output.request_id: output for output in engine.step() if output.finished}
    engine.close()
    return done


def tokens_of(outputs) -> dict[str, list[int]]:
    return {name: output.outputs[0].token_ids for name, output in outputs.items()}


def prompts_of(count: int) -> dict[str, list[int]]:
    """Some share a beginning, two are equal."""
    stem, rng = TOKENS[:50], np.random.default_rng(9)
    return {str(i): stem + rng.integers(0, 301, 3 * i).tolist() for i in range(count - 1)} | {"equal": stem}


@cache
def tokens_alone(kind: str, name: str) -> dict[str, list[int]]:
    """The tokens of each prompt in an engine of its own."""
    found = {}
    for request, prompt in prompts_of(5).items():
        found |= tokens_of(run(engine_of(kind, name, prefix_caching=False), {request: prompt}))
    return found


@pytest.mark.one_in(21)
@every
@kinds
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_alone_in_a_crowd_in_chunks_and_after_preemption_the_tokens_are_equal(kind, name, async_scheduling):
    prompts, want = prompts_of(5), tokens_alone(kind, name)
    crowd = run(engine_of(kind, name, async_scheduling=async_scheduling), prompts)
    assert tokens_of(crowd) == want
    chunked = engine_of(kind, name, max_num_batched_tokens=9, async_scheduling=async_scheduling)
    assert tokens_of(run(chunked, prompts)) == want
    for caching in (False, True):
        tight = engine_of(kind, name, num_blocks=13, prefix_caching=caching, async_scheduling=async_scheduling)
        preempted = run(tight, prompts)
        assert tokens_of(preempted) == want
        # A state does not grow, so that no request of states alone has to leave.
        assert sum(output.metrics.num_preemptions for output in preempted.values()) or not SPECS[name].num_slots


@pytest.mark.one_in(7)
@every
@kinds
def test_a_prefix_hit_continues_from_a_kept_state_with_equal_tokens(kind, name):
    engine = engine_of(kind, name)
    prompt = TOKENS[:70]
    first, second = (run(engine, {request: prompt})[request] for request in "ab")
    assert (first.metrics.num_cached_tokens, second.metrics.num_cached_tokens) == (0, 64)
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
    conversation = prompt + first.outputs[0].token_ids + TOKENS[:9]
    third = run(engine, {"c": conversation})["c"]
    assert third.metrics.num_cached_tokens == 64
    alone = run(engine_of(kind, name, prefix_caching=False), {"c": conversation})["c"]
    assert third.outputs[0].token_ids == alone.outputs[0].token_ids


@pytest.mark.one_in(9)
@every
@kinds
def test_drafts_change_no_token(kind, name):
    prompts, want = prompts_of(5), tokens_alone(kind, name)
    speculation = SpeculationConfig(method="custom", num_tokens=3, adaptive=False)
    drafter = partial(Recalled, [prompts[request] + tokens for request, tokens in want.items()])
    engine = engine_of(kind, name, max_num_batched_tokens=19, drafter=drafter, speculation=speculation)
    assert tokens_of(run(engine, prompts)) == want
    assert 0 < engine.speculation.stats.num_accepted < engine.speculation.stats.num_drafted


def test_groups_hold_layers_of_one_kind():
    spec = tiny_spec(layers=SPECS["mamba2"].layers * 2)
    assert [(g.layers, g.recurrent) for g in spec.kv_groups()] == [((0, 2, 3, 5), True), ((1, 4), False)]
