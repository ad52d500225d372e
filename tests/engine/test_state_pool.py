"""Slots of their own for recurrent states: fine hits, sizes within the memory, and each pool full on its own."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from engine_rig import Guesser, make_engine, run
from oracle_model import plain_output
from test_llm import tiny_model

from foreword import LLM
from foreword.batch import KVGroup, SamplingParams
from foreword.engine.config import engine_config
from foreword.engine.pool import pool_size
from foreword.engine.speculation import SpeculationConfig
from foreword.errors import ConfigError
from foreword.models.recurrent import RecurrentSpec
from foreword.models.spec import LayerSpec
from foreword.native import available
from foreword.server.metrics import ServerMetrics
from models.recorded import make

UNIT = 4
HYBRID = [KVGroup(UNIT), KVGroup(UNIT, sliding_window=6), KVGroup(UNIT, recurrent=True)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=5)
both = pytest.mark.parametrize("async_scheduling", [False, True])


def alone(prompt: list[int], length: int = 5) -> list[int]:
    return plain_output(prompt, lambda logits, position: logits.argmax(), length, 30)


def cached(engine, name: str, prompt: list[int], params: SamplingParams = GREEDY) -> int:
    """Run one request and compare its tokens with the definition. Returns how many prompt tokens it did not compute."""
    engine.add_request(name, prompt, params)
    output = run(engine)[name]
    assert output.outputs[0].token_ids == alone(prompt, params.max_tokens)
    return output.metrics.num_cached_tokens


@both
def test_a_hit_is_as_fine_as_a_block(async_scheduling):
    engine = make_engine(groups=HYBRID, num_states=6, async_scheduling=async_scheduling)
    for length in (5, 8, 9, 14, 22):
        prompt = [length, *range(1, length)]
        assert [cached(engine, f"{length} {i}", prompt) for i in range(2)] == [0, (length - 1) // UNIT * UNIT]
    engine.close()


@both
def test_snapshots_are_dropped_before_a_request_waits(async_scheduling):
    """There are three slots, for three requests: snapshots are kept in those that no request has."""
    engine = make_engine(groups=HYBRID, blocks=120, num_states=3, max_num_seqs=3, async_scheduling=async_scheduling)
    prompts = [[i, *range(1, 14)] for i in range(3)]
    assert [cached(engine, f"a{i}", prompts[i]) for i in (0, 0, 1, 1)] == [0, 12, 0, 12]
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, GREEDY)
    engine.step()
    assert len(engine.scheduler.running) == 3
    outputs = run(engine)
    assert [outputs[str(i)].outputs[0].token_ids for i in range(3)] == [alone(prompt) for prompt in prompts]
    assert not any(output.metrics.num_preemptions for output in outputs.values())
    engine.close()


@both
def test_requests_wait_for_a_slot(async_scheduling):
    engine = make_engine(groups=HYBRID, blocks=120, num_states=2, async_scheduling=async_scheduling)
    prompts = [[i, *range(1, 14)] for i in range(5)]
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, GREEDY)
    engine.step()
    assert engine.scheduler.ledger.num_running <= 2
    assert str(engine.scheduler.why("2")) == "no_states need=1 free=0"
    outputs = run(engine)
    assert [outputs[str(i)].outputs[0].token_ids for i in range(5)] == [alone(prompt) for prompt in prompts]
    assert not any(output.metrics.num_preemptions for output in outputs.values())
    engine.close()


@pytest.mark.parametrize("num_states", [4, 8, 13])
def test_states_after_drafts_leave_slots_to_requests(num_states):
    drafts = SpeculationConfig(method="custom", num_tokens=3, adaptive=False)
    engine = make_engine(groups=HYBRID, blocks=400, num_states=num_states, M=128, speculation=drafts, drafter=Guesser)
    engine.add_request("a", [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=100))
    for _ in range(5):
        engine.step()
    held = engine.states.block_tables[2].num_blocks
    assert held[0] == (4 if num_states > 4 else 1)
    engine.add_request("b", [1, 2, 4], SamplingParams(temperature=0.0, max_tokens=10))
    engine.step()
    assert not engine.scheduler.waiting
    for name in "cd":
        engine.add_request(name, [1, 2, 4], SamplingParams(temperature=0.0, max_tokens=100))
        for _ in range(5):
            engine.step()
        reserved = min(len(held), num_states // 2)
        assert np.maximum(held - 1, 0).sum() <= num_states - reserved


def test_without_blocks_a_request_is_preempted_and_goes_on_from_its_snapshot():
    params = SamplingParams(temperature=0.0, max_tokens=14)
    prompts = {str(i): [i, *range(1, 14)] for i in range(2)}
    groups, computed = [KVGroup(UNIT), KVGroup(UNIT, recurrent=True)], []
    for prefix_caching in (False, True):
        engine = make_engine(groups=groups, M=32, blocks=11, num_states=9, prefix_caching=prefix_caching)
        for name, prompt in prompts.items():
            engine.add_request(name, prompt, params)
        outputs = run(engine)
        assert any(output.metrics.num_preemptions for output in outputs.values())
        assert all(outputs[name].outputs[0].token_ids == alone(prompt, 14) for name, prompt in prompts.items())
        computed.append(engine.executor.num_tokens)
    assert computed[0] - computed[1] == 12


@pytest.mark.long
def test_a_long_output_keeps_its_newest_snapshot_alone():
    """Intervals are 16 blocks. The prompt has a snapshot of its own."""
    engine = make_engine(groups=HYBRID, M=256, blocks=300, num_states=12)
    prompt, params = [1, 2, 3, 4, 5, 6], SamplingParams(temperature=0.0, max_tokens=200)
    assert cached(engine, "1", prompt, params) == 0
    assert np.count_nonzero(engine.cache.state_pool.is_cached[300:]) == 2
    assert cached(engine, "2", [*prompt, *alone(prompt, 200), 7]) == 192
    engine.close()


@pytest.mark.long
def test_a_snapshot_that_another_request_used_is_not_replaced():
    engine = make_engine(groups=HYBRID, M=256, blocks=300, num_states=12)
    prompt, params = [1, 2, 3, 4, 5, 6], SamplingParams(temperature=0.0, max_tokens=150)
    output = alone(prompt, 150)
    engine.add_request("1", prompt, params)
    while engine.executor.num_tokens < 80:
        engine.step()
    engine.add_request("2", [*prompt, *output[:59], 9, 9], GREEDY)
    assert [one for one in run(engine) if one == "2"]
    assert cached(engine, "3", [*prompt, *output[:59], 7]) == 64
    engine.close()


@pytest.mark.one_in(11)
@both
@pytest.mark.parametrize("num_states", [4, 9, 40])
def test_random_traffic_gets_the_tokens_of_each_request_alone(num_states, async_scheduling):
    random = Random(num_states)
    stem = [random.randrange(1, 30) for _ in range(40)]
    drafts = {"speculation": SpeculationConfig(method="custom", num_tokens=2, adaptive=False), "drafter": Guesser}
    engine = make_engine(
        groups=HYBRID, blocks=60, num_states=num_states, async_scheduling=async_scheduling,
        reserve_full_prompt=False, **(drafts if num_states == 9 else {}),
    )  # fmt: skip
    prompts = {str(i): [*stem[: random.randint(0, 40)], random.randrange(1, 30)] for i in range(30)}
    waiting, outputs = list(prompts), {}
    while waiting or engine.has_work:
        for name in waiting[: random.randint(0, 3)]:
            waiting.remove(name)
            engine.add_request(name, prompts[name], SamplingParams(temperature=0.0, max_tokens=11))
        outputs |= {o.request_id: o for o in engine.step() if o.finished}
    assert {name: o.outputs[0].token_ids for name, o in outputs.items()} == {
        name: alone(prompt, 11) for name, prompt in prompts.items()
    }
    assert num_states == 4 or any(output.metrics.num_cached_tokens for output in outputs.values())
    assert engine.cache.pool.num_used == engine.cache.state_pool.num_used == 0
    engine.close()


def test_slots_for_less_than_one_request_are_refused():
    groups = [KVGroup(UNIT), KVGroup(UNIT, recurrent=True), KVGroup(UNIT, recurrent=True)]
    with pytest.raises(ConfigError, match=r"num_states=1: one request needs 2; use at least that many"):
        make_engine(groups=groups, num_states=1)


# -- sizes -----------------------------------------------------------------------------------------------------------

STATE = RecurrentSpec("mamba2", 2, 1, key_dim=6, value_dim=4, conv_kernel=3)  # 48 + 2 * 20 floats
SPEC = replace(tiny_model().spec, layers=(LayerSpec(None), *[LayerSpec(None, recurrent=STATE)] * 2))
BLOCK, STATES = 2 * UNIT * 4 * 4, 2 * 88 * 4  # bytes of a block, and of the states of a request


def size_of(**settings):
    return pool_size(SPEC, engine_config({"block_size": UNIT} | settings), state_bytes=STATES)


def test_blocks_keep_their_size_and_states_have_slots():
    size = size_of(max_num_seqs=2)
    assert [(g.block_size, g.recurrent) for g in size.kv_groups] == [(UNIT, False), (UNIT, True)]
    assert (size.block_bytes, size.state_bytes) == (BLOCK, STATES)
    assert (size.num_blocks, size.num_states) == (1 + 2 * 16, 2 + 33 * BLOCK // (2 * STATES))


@pytest.mark.filterwarnings("ignore:.*no prefix is reused")
@pytest.mark.parametrize("num_bytes", [3000, 5000, 20_000, 100_000, 10_000_000])
@pytest.mark.parametrize("settings", [
    {}, {"prefix_caching": False}, {"max_num_seqs": 1},
    {"max_num_seqs": 7, "speculation": SpeculationConfig(num_tokens=3)},
])  # fmt: skip
def test_blocks_and_states_are_within_the_memory(num_bytes, settings):
    size = size_of(kv_cache_bytes=num_bytes, **settings)
    assert size.num_bytes == size.num_blocks * BLOCK + size.num_states * STATES <= num_bytes
    assert size.num_blocks >= 1 + 16
    assert size.num_states >= 1
    if num_bytes == 10_000_000:
        most = settings.get("max_num_seqs", 256)
        drafts = 3 if "speculation" in settings else 0
        kept = 0 if "prefix_caching" in settings else max(3, size.num_blocks * BLOCK // (2 * STATES))
        assert (size.num_blocks, size.num_states) == (1 + 16 * most, most * (1 + drafts) + kept)


def test_a_given_number_of_blocks_is_that_of_keys_alone():
    size = size_of(num_blocks=40, max_num_seqs=3)
    assert (size.num_blocks, size.num_states) == (40, 3 + 40 * BLOCK // (2 * STATES))


def test_few_blocks_have_the_snapshots_of_one_request():
    assert 17 * BLOCK // (2 * STATES) < 4
    assert size_of(num_blocks=17, max_num_seqs=1).num_states == 1 + 3
    assert size_of(num_blocks=17, max_num_seqs=1, prefix_caching=False).num_states == 1
    for num_snapshots in (1, 2, 3):
        size = size_of(kv_cache_bytes=17 * BLOCK + (1 + num_snapshots) * STATES, max_num_seqs=1)
        assert (size.num_blocks, size.num_states) == (17, 1 + num_snapshots)


def test_the_memory_of_one_request_is_stated():
    least = 17 * BLOCK + STATES
    assert size_of(kv_cache_bytes=least, prefix_caching=False).num_states == 1
    with pytest.warns(UserWarning, match=rf"kv_cache_bytes={least}: .* one request alone, so no prefix is reused"):
        assert size_of(kv_cache_bytes=least).num_states == 1
    with pytest.raises(ConfigError, match=f"one request of max_model_len=64 tokens needs {least}; give that many"):
        size_of(kv_cache_bytes=least - 1)


def test_the_blocks_of_a_model_without_keys_are_states():
    spec = replace(SPEC, layers=SPEC.layers[1:])
    size = pool_size(spec, engine_config({"max_num_seqs": 2}), state_bytes=STATES)
    assert (size.block_bytes, size.num_states) == (STATES, 0)
    assert size.num_blocks == 1 + 2 * (1 + 3)


# -- models ----------------------------------------------------------------------------------------------------------


@pytest.mark.one_in(9)
@pytest.mark.parametrize("name", ["qwen3_5", "lfm2", "granite-hybrid", "falcon-h1", "nemotron-h"])
@pytest.mark.parametrize("executor", ["numpy", *(["native"] if available() else [])])
def test_a_hybrid_goes_on_from_the_last_16_tokens_of_a_prompt(name, executor, tmp_path):
    """With the settings that a user has. The tokens are those without the prefix cache."""
    model, params = make(tmp_path, name), SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    prompts = [[3 + (k * k + n) % 20 for k in range(n)] for n in (17, 33, 50)]
    found = []
    for prefix_caching in (False, True):
        with LLM(model, executor=executor, prefix_caching=prefix_caching, max_num_seqs=2, max_model_len=64) as llm:
            outputs = [llm.generate(prompt, params, progress=False)[0] for prompt in prompts for _ in range(2)]
            assert llm.engine.config.block_size == 16
            assert llm.engine.states.block_tables[0].group.block_size == 16
        found.append([output.outputs[0].token_ids for output in outputs])
        hits = [0, 16, 0, 32, 0, 48] if prefix_caching else [0] * 6
        assert [output.metrics.num_cached_tokens for output in outputs] == hits
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["qwen3_5", "lfm2", "granite-hybrid", "falcon-h1", "nemotron-h", "deepseek-v3"])
@pytest.mark.parametrize("executor", ["numpy", *(["native"] if available() else [])])
def test_the_memory_of_an_executor_is_that_of_its_pool(name, executor, tmp_path):
    model, kind = make(tmp_path, name), executor
    for num_bytes in (1 << 20, 3 << 20):
        with LLM(model, executor=kind, kv_cache_bytes=num_bytes, max_model_len=64, max_num_seqs=500) as llm:
            executor, cache = llm.engine.executor, llm.engine.cache
            num_states = cache.state_pool.num_blocks if cache.has_state_pool else 0
            assert (executor.num_blocks, executor.num_states) == (cache.pool.num_blocks, num_states)
            taken = executor.num_blocks * executor.block_bytes + executor.num_states * executor.state_bytes
            if kind == "numpy":
                arrays = {id(a): a for a in (executor.cache.keys, executor.cache.values, executor.cache.states)}
                assert taken == sum(array.nbytes for array in arrays.values())
            assert num_bytes - executor.block_bytes - 2 * executor.state_bytes < taken <= num_bytes


def test_a_hybrid_that_drafts_has_no_slots_for_snapshots(tmp_path):
    """Two states of each request are enough, the second one after a draft."""
    model = make(tmp_path, "qwen3_5")
    drafts = SpeculationConfig(method="draft_model", model=str(model), num_tokens=2, adaptive=False)
    options = {"max_num_seqs": 2, "max_model_len": 64, "cache_dir": str(tmp_path / "cache")}
    with LLM(model, executor="numpy", speculation=drafts, **options) as llm:
        cache = llm.engine.speculation.drafter.cache
        assert (cache.pool.num_blocks, cache.state_pool.num_blocks) == (1 + 2 * 4, 2 * 2)
        prompts = [[3 + (k * k + n) % 20 for k in range(n)] for n in (17, 33, 50)]
        outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True), progress=False)
        assert all(len(output.outputs[0].token_ids) == 6 for output in outputs)
        assert llm.engine.speculation.stats.num_drafted > 0


def test_metrics_show_the_used_slots():
    engine = make_engine(groups=HYBRID, num_states=4)
    metrics = ServerMetrics(engine, "m", None)
    engine.add_request("a", list(range(1, 9)), GREEDY)
    engine.step()
    assert (
        f'foreword:state_slots_usage{{model_name="m"}} {engine.cache.state_pool.num_used / 4}'
        in metrics.text().decode()
    )
    assert engine.cache.state_pool.num_used > 0
    run(engine)
    assert 'foreword:state_slots_usage{model_name="m"} 0.0' in metrics.text().decode()
    engine.close()
    assert b"state_slots" not in ServerMetrics(make_engine(), "m", None).text()
