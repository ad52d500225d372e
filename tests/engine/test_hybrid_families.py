"""Families with recurrent layers or unusual attention on the native executor: requests get the tokens that they get
alone, whatever else runs, from chunks, cached states and after preemption.
"""

from dataclasses import replace
from functools import partial
from random import Random

import pytest
from engine_rig import run

from foreword.batch import SamplingParams
from foreword.cache import cache_group
from foreword.cache.disk import DiskTier
from foreword.engine import Engine, engine_config
from foreword.executors.pool import batch_groups
from foreword.models.loader import load_model
from foreword.native import available
from models.recorded import TINY, make

pytestmark = pytest.mark.skipif(not available(), reason="without the native module")

UNUSUAL = [
    "gpt-oss",
    "deepseek-v2",
    "deepseek-v3",
    "minicpm3",
    "llama4",
    "llama4-plain",
    "gemma3n",
    "gemma4",
    "gemma4-moe",
]
HYBRIDS = sorted(name for name, tiny in TINY.items() if any("conv" in tensor for tensor in tiny["shapes"]))
M, UNIT, NUM_STATES = 64, 4, 90


class Work:
    """A model, prompts that share beginnings, and parameters of each."""

    def __init__(self, folder, name: str) -> None:
        self.model, random = load_model(make(folder, name)), Random(name)
        vocab = self.model.spec.vocab_size
        stem = [random.randrange(3, vocab) for _ in range(30)]
        lengths = [(0, 9), (13, 3), (13, 6), (21, 2), (28, 1), (28, 5)]
        self.prompts = [stem[:n] + [random.randrange(3, vocab) for _ in range(m)] for n, m in lengths]
        self.prompts.append(self.prompts[3])
        self.params = [
            SamplingParams(temperature=t, seed=i, max_tokens=14, logprobs=1, ignore_eos=True)
            for i, t in enumerate((0.0, 0.8, 0.0, 1.1, 0.0, 0.8, 0.0))
        ]

    def engine(self, num_blocks: int, tiers=(), **config) -> Engine:
        from foreword.executors.native import NativeExecutor

        spec = self.model.spec
        num_states = NUM_STATES if spec.state_size and spec.num_slots else 0  # those of states alone are the blocks
        settings = {"max_num_seqs": 8, "block_size": UNIT, "watermark": 0.0, "check": "full"} | config
        return Engine(
            NativeExecutor(
                spec, self.model.weights, num_blocks=num_blocks, block_size=UNIT, num_states=num_states, num_threads=1
            ),
            vocab_size=spec.vocab_size,
            max_model_len=M,
            kv_groups=batch_groups(spec, UNIT),
            num_blocks=num_blocks,
            num_states=num_states,
            config=engine_config(settings),
            tiers=tiers,
        )

    def results(self, engine: Engine, requests) -> dict[int, object]:
        for i in requests:
            engine.add_request(str(i), self.prompts[i], self.params[i])
        return {int(name): output for name, output in run(engine).items()}


def tokens(output) -> list[int]:
    return output.outputs[0].token_ids


@pytest.mark.one_in(9)
@pytest.mark.parametrize("name", HYBRIDS)
def test_forced_tokens_in_few_steps_give_what_they_give_one_by_one(name, tmp_path):
    work, steps = Work(tmp_path, name), []
    forced = work.prompts[5][:11]
    work.params = [replace(params, forced_tokens=forced) for params in work.params]
    for most in (0, 8):
        engine = work.engine(200, max_forced_tokens=most)
        for i in (1, 2, 3):
            engine.add_request(str(i), work.prompts[i], work.params[i])
        outputs, count = {}, 0
        while engine.has_work:
            outputs |= {output.request_id: output for output in engine.step() if output.finished}
            count += 1
        steps.append((count, {name: (tokens(one), one.outputs[0].cumulative_logprob) for name, one in outputs.items()}))
        engine.close()
    (slow, want), (fast, found) = steps
    assert fast <= slow - 8
    for request, (ids, logprob) in want.items():
        assert ids[:11] == forced
        assert found[request] == (ids, pytest.approx(logprob, abs=1e-3))


@pytest.fixture(params=[*HYBRIDS, *UNUSUAL])
def work(request, tmp_path):
    return Work(tmp_path, request.param)


@pytest.mark.one_in(37)
def test_chunks_states_of_others_and_preemption_change_no_token(work):
    everyone = range(len(work.prompts))
    engine = work.engine(120, prefix_caching=False, max_num_batched_tokens=64)
    alone = {i: tokens(work.results(engine, [i])[i]) for i in everyone}
    engine.close()
    assert len({tuple(one) for one in alone.values()}) > len(alone) // 2

    engine = work.engine(160, max_num_batched_tokens=7)
    hits = 0
    for _ in range(2):
        outputs = work.results(engine, everyone)
        assert {i: tokens(output) for i, output in outputs.items()} == alone
        hits += sum(output.metrics.num_cached_tokens > 0 for output in outputs.values())
    assert hits >= len(everyone)
    engine.close()

    has_keys = work.model.spec.num_slots > 0
    groups = [cache_group(one) for one in batch_groups(work.model.spec, UNIT) if not (one.recurrent and has_keys)]
    chunk = 16 + engine_config({}).most_draft_tokens
    least = 1 + sum(group.most_blocks(M, chunk) for group in groups)
    for caching in (False, True):
        engine = work.engine(least, max_num_batched_tokens=16, prefix_caching=caching)
        outputs = work.results(engine, everyone)
        assert {i: tokens(output) for i, output in outputs.items()} == alone
        if has_keys:  # a state does not grow, so that no request of states alone has to leave
            assert any(output.metrics.num_preemptions for output in outputs.values())
        engine.close()


@pytest.mark.parametrize("work", ["bamba", "lfm2-moe", "qwen3_5"], indirect=True)
def test_states_on_disk_change_no_token(work, tmp_path):
    some = range(len(work.prompts) - 2)
    engine = work.engine(120, prefix_caching=False, check="off")
    alone = {i: tokens(work.results(engine, [i])[i]) for i in some}
    engine.close()
    for num_loaded in (0, 2):
        engine = work.engine(120, tiers=[partial(DiskTier, tmp_path / "blocks", capacity=1 << 30)], check="off")
        outputs = work.results(engine, some)
        assert {i: tokens(output) for i, output in outputs.items()} == alone
        assert sum("disk" in output.metrics.loaded_tokens for output in outputs.values()) >= num_loaded
        engine.close()
