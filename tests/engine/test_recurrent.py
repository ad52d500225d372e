"""Models with recurrent layers: requests start from snapshots of others, and get the tokens that they get alone."""

import pytest
from engine_rig import Guesser, OnStep, make_engine, run
from oracle_model import OracleExecutor, plain_output

from foreword.batch import KVGroup, SamplingParams
from foreword.engine.speculation import SpeculationConfig
from foreword.errors import ConfigError
from foreword.executors import Capability

GROUPS = {
    "states": [KVGroup(4, recurrent=True)],
    "hybrid": [KVGroup(4), KVGroup(4, sliding_window=6), KVGroup(4, recurrent=True), KVGroup(2, recurrent=True)],
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=5)
both = pytest.mark.parametrize("async_scheduling", [False, True])
kinds = pytest.mark.parametrize("kind", sorted(GROUPS))


def alone(prompt: list[int], length: int = 5) -> list[int]:
    return plain_output(prompt, lambda logits, position: logits.argmax(), length, 30)


def cached(engine, name: str, prompt: list[int], params: SamplingParams = GREEDY) -> int:
    """Run one request and compare its tokens with the definition. Returns how many prompt tokens it did not compute."""
    engine.add_request(name, prompt, params)
    output = run(engine)[name]
    for completion in output.outputs:
        assert completion.token_ids == alone(prompt, params.max_tokens)
    return output.metrics.num_cached_tokens


@both
@kinds
def test_an_equal_prompt_goes_on_from_its_last_whole_unit(kind, async_scheduling):
    engine = make_engine(groups=GROUPS[kind], async_scheduling=async_scheduling)
    prompt = list(range(1, 15))
    assert [cached(engine, name, prompt) for name in "abc"] == [0, 12, 12]
    assert engine.executor.num_tokens == 14 + 2 + 2 + 3 * 4
    engine.close()


@both
@kinds
def test_a_shared_beginning_is_found_by_the_third_that_has_it(kind, async_scheduling):
    """The first cannot predict where others diverge from it; where the second diverges, a state is kept."""
    engine = make_engine(groups=GROUPS[kind], async_scheduling=async_scheduling)
    shared = list(range(1, 14))
    ends = [[20, 21, 22, 23, 24], [25, 26, 27], [28, 29, 28, 29, 28, 29]]
    assert [cached(engine, str(i), shared + end) for i, end in enumerate(ends)] == [0, 0, 12]
    engine.close()


@both
@kinds
def test_a_conversation_goes_on_from_the_last_turn(kind, async_scheduling):
    engine = make_engine(groups=GROUPS[kind], async_scheduling=async_scheduling)
    first = list(range(1, 15))
    assert cached(engine, "1", first) == 0
    assert cached(engine, "2", [*first, *alone(first), 7, 7, 7, 7]) == 12
    engine.close()


@pytest.mark.one_in(5)
@both
@kinds
def test_snapshots_are_kept_along_long_outputs(kind, async_scheduling):
    engine = make_engine(groups=GROUPS[kind], M=128, blocks=150, async_scheduling=async_scheduling)
    first, params = [1, 2, 3, 4, 5, 6], SamplingParams(temperature=0.0, max_tokens=80)
    assert cached(engine, "1", first, params) == 0
    assert cached(engine, "2", [*first, *alone(first, 80), 7]) == 64
    engine.close()


@kinds
def test_drafts_do_not_step_over_the_snapshots_along_an_output(kind):
    config = SpeculationConfig(method="custom", num_tokens=3, adaptive=False)
    engine = make_engine(groups=GROUPS[kind], M=128, blocks=150, speculation=config, drafter=Guesser)
    first, params = [1, 2, 3, 4, 5, 6], SamplingParams(temperature=0.0, max_tokens=80)
    assert cached(engine, "1", first, params) == 0
    assert cached(engine, "2", [*first, *alone(first, 80), 7]) == 64


@both
@kinds
def test_tokens_that_a_grammar_forces_are_several_in_a_step(kind, async_scheduling):
    prompt, forced, found = [5, 1, 9], [7, 3, 3, 28, 1, 0, 12, 5, 9, 20, 4], []
    params = SamplingParams(temperature=0.0, max_tokens=16, forced_tokens=forced, detokenize=False)
    for most in (0, 8):
        engine = make_engine(groups=GROUPS[kind], async_scheduling=async_scheduling, max_forced_tokens=most)
        engine.add_request("a", prompt, params)
        assert run(engine)["a"].outputs[0].token_ids == [*forced, *alone([*prompt, *forced])]
        found.append(engine.executor.num_steps)
        engine.close()
    assert found[1] <= found[0] - 8


def test_an_executor_without_states_after_drafts_takes_forced_tokens_one_by_one():
    class Plain(OracleExecutor):
        capabilities = OracleExecutor.capabilities - {Capability.DRAFTED_STATES}

    engine = make_engine(groups=GROUPS["states"], executor=Plain)
    assert engine.states.max_num_draft_tokens == 0
    params = SamplingParams(temperature=0.0, max_tokens=7, forced_tokens=[7, 3], detokenize=False)
    engine.add_request("a", [5, 1], params)
    assert run(engine)["a"].outputs[0].token_ids == [7, 3, *alone([5, 1, 7, 3])]


@both
@kinds
def test_completions_of_one_prompt_share_its_state(kind, async_scheduling):
    engine = make_engine(groups=GROUPS[kind], async_scheduling=async_scheduling, max_num_seqs=3)
    prompt = list(range(1, 15))
    assert cached(engine, "x", prompt, SamplingParams(temperature=0.0, max_tokens=5, n=5)) == 0
    assert engine.executor.num_tokens == 14 + 4 * 2 + 5 * 4
    engine.close()


def test_a_preempted_request_resumes_from_its_state():
    groups, params = [KVGroup(4), KVGroup(4, recurrent=True)], SamplingParams(temperature=0.0, max_tokens=14)
    prompts = {str(i): [i, *range(1, 14)] for i in range(2)}
    num_computed = []
    for prefix_caching in (False, True):
        engine = make_engine(groups=groups, M=32, blocks=14, prefix_caching=prefix_caching)
        for name, prompt in prompts.items():
            engine.add_request(name, prompt, params)
        outputs = run(engine)
        assert any(out.metrics.num_preemptions for out in outputs.values())
        for name, prompt in prompts.items():
            assert outputs[name].outputs[0].token_ids == alone(prompt, 14)
        num_computed.append(engine.executor.num_tokens)
    assert num_computed[0] - num_computed[1] == 12


@both
def test_a_full_pool_keeps_no_snapshots_and_preempts_no_request(async_scheduling):
    engine = make_engine(groups=GROUPS["states"], blocks=4, max_num_seqs=3, async_scheduling=async_scheduling)
    prompts = {str(i): [i, *range(1, 14)] for i in range(3)}
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, GREEDY)
    outputs = run(engine)
    assert {name: out.outputs[0].token_ids for name, out in outputs.items()} == {
        name: alone(prompt) for name, prompt in prompts.items()
    }
    assert not any(out.metrics.num_preemptions for out in outputs.values())
    assert cached(engine, "again", prompts["2"]) == 0
    assert cached(engine, "alone it finds a block", prompts["2"]) == 12
    engine.close()


def test_snapshots_are_dropped_with_the_prefixes():
    engine = make_engine(groups=GROUPS["hybrid"])
    prompt = list(range(1, 15))
    cached(engine, "a", prompt)
    assert engine.reset_prefix_cache()
    assert cached(engine, "b", prompt) == 0


@both
def test_a_failed_step_leaves_no_state_behind(async_scheduling):
    class Flaky(OracleExecutor):
        def copy_blocks(self, sources, destinations):
            if self.num_steps == 1:  # the state at the end of the first chunk is about to be kept
                self.num_steps += 1
                raise MemoryError("no more memory")
            super().copy_blocks(sources, destinations)

    engine = make_engine(groups=GROUPS["hybrid"], executor=Flaky, async_scheduling=async_scheduling)
    prompt = list(range(1, 15))
    engine.add_request("a", prompt, GREEDY)
    engine.step()
    with pytest.raises(MemoryError):
        engine.step()
    assert run(engine)["a"].outputs[0].token_ids == alone(prompt)
    assert cached(engine, "b", prompt) == 12
    engine.close()


def test_chunks_end_where_states_are_kept_and_nowhere_without_caching():
    def chunks(**config) -> list[int]:
        counts: list[int] = []
        engine = make_engine(groups=GROUPS["hybrid"], max_num_batched_tokens=64, **config)
        engine.observers.add(OnStep(lambda plan, batch: counts.extend(plan.num_scheduled.tolist())))
        for prompt in ([1] * 20, [1] * 9 + [2] * 10):
            engine.add_request(str(len(counts)), prompt, SamplingParams(temperature=0.0, max_tokens=1))
            run(engine)
        return counts

    assert chunks() == [16, 4, 8, 8, 3]
    assert chunks(prefix_caching=False) == chunks(chunked_prefill=False) == [20, 19]


@pytest.mark.one_in(7)
@both
@pytest.mark.parametrize(("kind", "drafter"), [("states", Guesser), ("hybrid", Guesser), ("hybrid", None)])
def test_drafts_change_no_token(kind, drafter, async_scheduling):
    """With hits, chunks, and pools in which there is no room for the states after drafts."""
    method = "ngram" if drafter is None else "custom"
    config = SpeculationConfig(method=method, num_tokens=3, min_match=1, adaptive=False)
    prompts = {str(i): [1, 2, 3, 4, 5, 6, 7, 8, 9, 10][: 3 + i] + [i] * (i % 4) for i in range(6)}
    for blocks in (150, 32):
        engine = make_engine(
            groups=GROUPS[kind], blocks=blocks, async_scheduling=async_scheduling, speculation=config, drafter=drafter
        )
        for params in (SamplingParams(temperature=0.0, max_tokens=19), SamplingParams(temperature=0.0, max_tokens=7)):
            for name, prompt in prompts.items():
                engine.add_request(name, prompt, params)
            outputs = run(engine)
            for name, prompt in prompts.items():
                assert outputs[name].outputs[0].token_ids == alone(prompt, params.max_tokens)
        stats = engine.speculation.stats
        assert blocks == 32 or 0 < stats.num_accepted < stats.num_drafted
        engine.close()


@pytest.mark.one_in(2)
@both
def test_sampled_tokens_are_those_without_drafts(async_scheduling):
    config = SpeculationConfig(method="custom", num_tokens=3, adaptive=False)
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=30)
    found = []
    for options in ({}, {"speculation": config, "drafter": Guesser}):
        engine = make_engine(groups=GROUPS["hybrid"], blocks=100, async_scheduling=async_scheduling, **options)
        engine.add_request("a", [1, 2, 3], params)
        found.append(run(engine)["a"].outputs[0].token_ids)
        engine.close()
    assert found[0] == found[1]
    assert engine.speculation.stats.num_accepted


def test_states_after_drafts_take_blocks_only_while_there_are_drafts():
    groups, most = GROUPS["states"], []
    config = SpeculationConfig(method="custom", num_tokens=4, adaptive=False)
    engine = make_engine(groups=groups, speculation=config, drafter=Guesser, prefix_caching=False)
    engine.observers.add(OnStep(lambda plan, batch: most.append(int(engine.states.block_tables[0].num_blocks.max()))))
    engine.add_request("a", [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=1))
    run(engine)
    assert max(most) == 1
    engine.add_request("b", [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=8))
    run(engine)
    assert max(most) == 5


def test_an_executor_that_keeps_no_states_after_drafts_is_refused():
    class Plain(OracleExecutor):
        capabilities = OracleExecutor.capabilities - {Capability.DRAFTED_STATES}

    make_engine(groups=GROUPS["hybrid"], executor=Plain)
    with pytest.raises(ConfigError, match=r"speculation: Plain .*DRAFTED_STATES"):
        make_engine(groups=GROUPS["hybrid"], executor=Plain, speculation=SpeculationConfig())
