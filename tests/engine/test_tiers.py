"""Blocks kept outside the pool, on disk and in host memory: requests that start from them get their own tokens."""

import threading
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from engine_rig import V, make_engine, run
from oracle_model import plain_output

from foreword import LLM
from foreword.batch import KVGroup, SamplingParams
from foreword.cache import HostTier
from foreword.cache.disk import DiskTier
from foreword.engine import Engine
from foreword.errors import ConfigError
from foreword.executors import Capability
from foreword.native import available

GROUPS = {
    "full": [KVGroup(4)],
    "window": [KVGroup(4), KVGroup(4, sliding_window=6)],
    "sizes": [KVGroup(8), KVGroup(4, sliding_window=9)],
    "hybrid": [KVGroup(4), KVGroup(4, sliding_window=6), KVGroup(4, recurrent=True), KVGroup(2, recurrent=True)],
}
GROUPS["slots"] = GROUPS["hybrid"]
SLOTS = {"slots": 26}  # the others have states in blocks
GREEDY = SamplingParams(temperature=0.0, max_tokens=5)
both = pytest.mark.parametrize("async_scheduling", [False, True])
kinds = pytest.mark.parametrize("kind", sorted(GROUPS))


def alone(prompt: list[int], length: int = 5) -> list[int]:
    return plain_output(prompt, lambda logits, position: logits.argmax(), length, V)


def on_disk(folder: Path, capacity: int = 1 << 30):
    return partial(DiskTier, folder, capacity=capacity)


def in_memory(capacity: int = 1 << 20):
    return partial(HostTier, capacity=capacity)


def answered(engine: Engine, prompts: dict[str, list[int]], **options) -> dict:
    """Run requests together, and compare their tokens with the definition. Their outputs."""
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, GREEDY, **options)
    outputs = run(engine)
    for name, prompt in prompts.items():
        assert outputs[name].outputs[0].token_ids == alone(prompt), name
    return outputs


def loaded(engine: Engine, prompt: list[int], **options) -> dict[str, int]:
    return dict(answered(engine, {"x": prompt}, **options)["x"].metrics.loaded_tokens)


@pytest.mark.one_in(7)
@both
@kinds
def test_a_prompt_goes_on_from_the_disk_after_a_restart(tmp_path, kind, async_scheduling):
    prompt = list(range(1, 28))
    for expected in ({}, {"disk": 24}, {"disk": 24}):
        engine = make_engine(
            groups=GROUPS[kind],
            num_states=SLOTS.get(kind, 0),
            async_scheduling=async_scheduling,
            tiers=[on_disk(tmp_path)],
        )
        assert loaded(engine, prompt) == expected
        assert engine.executor.num_tokens == 27 - sum(expected.values()) + 4
        assert loaded(engine, prompt) == {}  # it is in the pool
        engine.close()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("evicts", [False, True])
def test_the_last_state_of_a_long_output_is_on_disk_after_its_eviction_and_after_a_restart(tmp_path, evicts):
    """Intervals are 16 blocks. Earlier states of the output, which the last one replaces, are not stored."""
    groups, prompt = [KVGroup(4), KVGroup(4, recurrent=True)], [1, 2, 3, 4, 5, 6]
    output = plain_output(prompt, lambda logits, position: logits.argmax(), 200, 30)
    options = {"groups": groups, "M": 256, "blocks": 300, "num_states": 3, "tiers": [on_disk(tmp_path)]}
    engine = make_engine(**options)
    engine.add_request("a", prompt, SamplingParams(temperature=0.0, max_tokens=200))
    assert run(engine)["a"].outputs[0].token_ids == output
    if evicts:
        for i in range(20, 24):
            assert loaded(engine, [i, *range(1, 9)]) == {}
    else:
        engine.close()
        engine = make_engine(**options)
    assert loaded(engine, [*prompt, *output, 7]) == {"disk": 192}
    assert sum(loaded(engine, [*prompt, *output[:129], 7]).values()) <= 4  # the prompt has a state there
    engine.close()


@pytest.mark.one_in(2)
@kinds
def test_evicted_blocks_come_back_from_host_memory(kind):
    engine = make_engine(
        groups=GROUPS[kind], num_states=SLOTS.get(kind, 0), blocks=70, check="bounds", tiers=[in_memory()]
    )
    prompts = [[(7 * i + k) % 29 + 1 for k in range(41)] for i in range(1, 9)]
    for prompt in prompts:
        assert loaded(engine, prompt) == {}
    total = sum(sum(loaded(engine, prompt).values()) for prompt in prompts)
    assert total >= 3 * 40
    engine.close()


@pytest.mark.one_in(7)
@pytest.mark.parametrize(
    ("kind", "async_scheduling"),
    [
        ("full", True),
        ("window", False),
        ("sizes", True),
        ("hybrid", False),
        ("hybrid", True),
        ("slots", False),
        ("slots", True),
    ],
)
def test_random_requests_on_a_small_pool_get_their_own_tokens(tmp_path, kind, async_scheduling):
    """With both tiers, preemptions, aborts, shared beginnings, and restarts."""
    random, counts = np.random.default_rng(3), {"disk": 0, "host": 0}
    begins = [random.integers(1, 29, 24).tolist() for _ in range(5)]
    for _ in range(2):
        engine = make_engine(
            groups=GROUPS[kind], blocks=70, num_states=SLOTS.get(kind, 0), async_scheduling=async_scheduling,
            reserve_full_prompt=False, check="off", tiers=[in_memory(40 * 12 * 30), on_disk(tmp_path)],
        )  # fmt: skip
        prompts, outputs, number = {}, {}, 0
        while number < 20 or engine.has_work:
            if number < 20 and random.random() < 0.4:
                begin = begins[int(random.integers(5))][: int(random.integers(4, 25))]
                prompts[str(number)] = begin + random.integers(1, 29, int(random.integers(1, 20))).tolist()
                engine.add_request(str(number), prompts[str(number)], GREEDY)
                number += 1
            if number and random.random() < 0.05:
                engine.abort(str(int(random.integers(number))))
            outputs |= {output.request_id: output for output in engine.step() if output.finished}
        for name, output in outputs.items():
            if output.outputs[0].finish_reason != "abort":
                assert output.outputs[0].token_ids == alone(prompts[name])
                for tier, count in output.metrics.loaded_tokens.items():
                    counts[tier] += count
        assert engine.cache.pool.num_used == 0
        engine.close()
    assert sum(counts.values()) > 0


def test_salts_and_other_models_share_nothing(tmp_path):
    prompt = list(range(1, 20))
    for salt, expected in ((None, {}), ("a", {}), ("b", {}), ("a", {"disk": 16}), (None, {"disk": 16})):
        engine = make_engine(tiers=[on_disk(tmp_path)])
        assert loaded(engine, prompt, cache_salt=salt) == expected
        engine.close()
    engine = make_engine(tiers=[on_disk(tmp_path)], block_size=8)
    assert loaded(engine, prompt) == {}
    engine.close()


def test_equal_prompts_that_arrive_together_are_read_once(tmp_path):
    prompt = list(range(1, 28))
    engine = make_engine(tiers=[on_disk(tmp_path)])
    answered(engine, {"x": prompt})
    engine.close()
    engine = make_engine(tiers=[on_disk(tmp_path)])
    outputs = answered(engine, dict.fromkeys("abcd", prompt))
    assert all(output.metrics.num_cached_tokens >= 24 for output in outputs.values())
    assert sum(sum(output.metrics.loaded_tokens.values()) for output in outputs.values()) == 24
    engine.close()


class Slow(HostTier):
    """A tier of somebody else, whose blocks arrive when they may."""

    name, takes = "slow", "computed"

    def __init__(self, blocks, capacity=1 << 20) -> None:
        super().__init__(blocks, capacity=capacity)
        self.may_read, self.fails = threading.Event(), False

    def read(self, names, data):
        assert self.may_read.wait(60)
        if self.fails:
            raise OSError("no network")
        return super().read(names, data)


def slow_engine(**config) -> tuple[Engine, Slow]:
    """An engine whose pool has forgotten the prompt 1 … 27, which its slow tier has."""
    engine = make_engine(tiers=[Slow], **config)
    answered(engine, {"x": list(range(1, 28))})
    assert engine.reset_prefix_cache()
    [tier] = engine.tiers.members
    return engine, tier


@both
def test_a_request_whose_blocks_are_read_delays_no_other(async_scheduling):
    engine, tier = slow_engine(async_scheduling=async_scheduling)
    engine.add_request("slow", list(range(1, 28)), GREEDY)
    assert str(engine.why("slow")) == "loading"
    engine.add_request("other", [9, 8, 7], GREEDY)
    finished = []
    while len(finished) < 1:
        finished += engine.step()
    assert [output.request_id for output in finished] == ["other"]
    assert finished[0].outputs[0].token_ids == alone([9, 8, 7])
    tier.may_read.set()
    output = run(engine)["slow"]
    assert output.outputs[0].token_ids == alone(list(range(1, 28)))
    assert output.metrics.loaded_tokens == {"slow": 24}
    engine.close()


def preempting_engine(tiers, **config):
    """An engine whose pool has no room for the growth of two requests, which are in it with their prompts."""
    engine = make_engine(
        groups=config.pop("groups", [KVGroup(4)]), blocks=24, reserve_full_prompt=False, tiers=tiers, **config
    )
    prompts = {name: [(7 * i + k) % 29 + 1 for i in range(30)] for k, name in enumerate("ab")}
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, SamplingParams(temperature=0.0, max_tokens=30))
    return engine, prompts


@pytest.mark.one_in(5)
@both
@pytest.mark.parametrize("place", ["host", "disk"])
def test_a_preempted_request_reads_its_blocks_back_and_computes_only_the_rest(tmp_path, place, async_scheduling):
    counts = []
    for tiers in ([], [in_memory() if place == "host" else on_disk(tmp_path)]):
        engine, prompts = preempting_engine(tiers, async_scheduling=async_scheduling)
        outputs = run(engine)
        for name, prompt in prompts.items():
            assert outputs[name].outputs[0].token_ids == alone(prompt, 30)
            assert outputs[name].metrics.loaded_tokens == {}  # its prompt was computed
        assert sum(output.metrics.num_preemptions for output in outputs.values()) == 1
        counts.append(engine.executor.num_tokens)
        engine.close()
    least = sum(len(prompt) + 30 - 1 for prompt in prompts.values())
    recomputed, read = (count - least for count in counts)
    assert 0 <= read <= 4 < 10 < recomputed  # a part of a block


@pytest.mark.parametrize("kind", ["window", "hybrid"])
def test_preempted_requests_of_every_kind_of_group_go_on_with_their_own_tokens(kind):
    engine = make_engine(
        groups=GROUPS[kind], num_states=SLOTS.get(kind, 0), blocks=80, reserve_full_prompt=False, tiers=[in_memory()]
    )
    prompts = {str(k): [(7 * i + k) % 29 + 1 for i in range(20)] for k in range(6)}
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, SamplingParams(temperature=0.0, max_tokens=30))
    outputs = run(engine)
    assert sum(output.metrics.num_preemptions for output in outputs.values()) > 0
    for name, prompt in prompts.items():
        assert outputs[name].outputs[0].token_ids == alone(prompt, 30)
    engine.close()


@pytest.mark.parametrize("policy", ["fcfs", "fair"])
def test_a_preempted_request_can_be_aborted_while_its_blocks_are_read(policy):
    engine, prompts = preempting_engine([Slow], policy=policy)
    [tier] = engine.tiers.members
    while not engine.tiers.num_waiting:
        engine.step()
    (name,) = [name for name in prompts if str(engine.why(name)) == "loading"]
    assert engine.abort(name).outputs[0].finish_reason == "abort"
    tier.may_read.set()
    run(engine)
    assert not engine.scheduler._taken
    assert policy == "fcfs" or not engine.scheduler._shares._starts
    engine.close()


def fail_a_step(engine):
    """Run a step whose model fails; the next one computes again."""
    compute = engine.executor.compute

    def fail(batch, logits_indices):
        engine.executor.compute = compute
        raise ArithmeticError("once")

    engine.executor.compute = fail
    with pytest.raises(ArithmeticError):
        engine.step()


def test_a_failed_step_leaves_a_preempted_request_whose_blocks_are_read_to_be_computed():
    engine, prompts = preempting_engine([Slow])
    [tier] = engine.tiers.members
    while not engine.tiers.num_waiting:
        engine.step()
    engine.add_request("other", [9, 8, 7], GREEDY)
    fail_a_step(engine)
    assert not engine.tiers.num_waiting
    tier.may_read.set()
    outputs = run(engine)
    for name in set(prompts) & set(outputs):
        assert outputs[name].outputs[0].token_ids == alone(prompts[name], 30)
    engine.close()


def test_a_request_can_be_aborted_while_its_blocks_are_read():
    engine, tier = slow_engine()
    for name in "abc":
        engine.add_request(name, list(range(1, 28)), GREEDY)
    assert engine.abort("a").outputs[0].finish_reason == "abort"
    tier.may_read.set()
    outputs = run(engine)
    assert [outputs[name].outputs[0].token_ids for name in "bc"] == [alone(list(range(1, 28)))] * 2
    engine.close()


def test_an_engine_that_is_closed_computes_what_it_waited_for():
    engine, tier = slow_engine()
    for name in "ab":
        engine.add_request(name, list(range(1, 28)), GREEDY)
    tier.may_read.set()
    engine.close()
    outputs = run(engine)
    assert [outputs[name].outputs[0].token_ids for name in "ab"] == [alone(list(range(1, 28)))] * 2
    engine.close()


def test_a_failed_step_leaves_requests_whose_blocks_are_read_to_be_computed():
    engine, tier = slow_engine()
    engine.add_request("slow", list(range(1, 28)), GREEDY)
    engine.add_request("other", [9, 8, 7], GREEDY)
    fail_a_step(engine)
    tier.may_read.set()
    outputs = run(engine)
    assert outputs["slow"].outputs[0].token_ids == alone(list(range(1, 28)))
    assert outputs["other"].outputs[0].token_ids == alone([9, 8, 7])
    engine.close()


def test_a_tier_that_fails_costs_the_time_of_computing():
    engine, tier = slow_engine()
    tier.fails = True
    tier.may_read.set()
    assert loaded(engine, list(range(1, 28))) == {}
    engine.close()


def test_an_executor_whose_blocks_cannot_leave_it_is_refused(tmp_path):
    from oracle_model import OracleExecutor

    class Fixed(OracleExecutor):
        capabilities = OracleExecutor.capabilities - {Capability.BLOCK_TRANSFER}

    with pytest.raises(ConfigError, match="Fixed does not support blocks of the KV pool kept outside it"):
        make_engine(executor=Fixed, tiers=[on_disk(tmp_path)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache_bytes": "1GiB"}, "there is no cache_dir"),
        ({"cache_dir": "x", "prefix_caching": False}, "there is no prefix cache"),
        ({"host_cache_bytes": 100, "prefix_caching": False}, "there is no prefix cache"),
        ({"host_cache_bytes": 1}, "a block has"),
        ({"cache_dir": __file__}, "cannot be written"),
    ],
)
def test_settings_that_cannot_be_are_refused(talker, options, message):
    with pytest.raises(ConfigError, match=message):
        LLM(talker, **options)


EXECUTORS = {"numpy": {}}
if available():
    EXECUTORS |= {"native": {}, "native int8": {"kv_format": "int8"}, "native fp32": {"kv_format": "fp32"}}
if find_spec("torch"):
    EXECUTORS |= {"torch": {"num_threads": 1}}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", sorted(EXECUTORS))
def test_executors_give_equal_log_probabilities_from_disk(talker, tmp_path, name):
    """Tokens and log-probabilities of a prompt that was computed in other chunks, with what the pool has forgotten."""
    options = {"executor": name.partition(" ")[0], "max_num_batched_tokens": 64, **EXECUTORS[name]}
    prompt, params = [3 + i % 20 for i in range(150)], SamplingParams(temperature=0.0, max_tokens=4, logprobs=2)
    with LLM(talker, **options, prefix_caching=False) as llm:
        [expected] = llm.generate(prompt, params)
    for tokens in ({}, {"disk": 144}):
        with LLM(talker, **options, cache_dir=str(tmp_path)) as llm:
            [output] = llm.generate(prompt, params)
        assert output.metrics.loaded_tokens == tokens
        found = output.outputs[0]
        assert found.token_ids == expected.outputs[0].token_ids
        if name.startswith("native"):
            assert found.logprobs == expected.outputs[0].logprobs
        else:
            assert found.cumulative_logprob == pytest.approx(expected.outputs[0].cumulative_logprob, abs=1e-4)


def test_the_queue_of_a_closed_engine_is_written(tmp_path):
    engine = make_engine(tiers=[on_disk(tmp_path)])
    answered(engine, {"x": list(range(1, 28))})
    [tier] = engine.tiers.members
    engine.close()
    engine.close()
    deadline = time.monotonic() + 60
    while tier.num_written < 7 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert tier.num_written == 7  # 31 tokens were computed


def test_reading_the_tail_of_a_prompt_evicts_not_its_head():
    """The head is the content that was not used for longest, until the prompt comes again."""
    engine = make_engine(groups=[KVGroup(4)], blocks=25, tiers=[in_memory()], partial_reuse=False)
    prompt = [(3 * i) % 29 + 1 for i in range(41)]
    answered(engine, {"first": prompt})
    for i, length in enumerate((55, 15)):  # take the blocks of its tail
        answered(engine, {f"other-{i}": [20 + i, *((5 * k + i) % 29 + 1 for k in range(length))]})
    in_pool = engine.cache.lookup(np.array(prompt, np.int32)).num_tokens
    assert 0 < in_pool < 40
    before = engine.executor.num_tokens
    assert sum(loaded(engine, prompt).values()) == 40 - in_pool
    assert engine.executor.num_tokens - before == 1 + 4  # the last token of the prompt, and the output
    engine.close()
