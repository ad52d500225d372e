"""A step is launched before the samples of the step before are read: the order of the calls, and equal outputs."""

import sys
from pathlib import Path
from random import Random

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[1] / "engine"))  # the oracle model

from foreword.batch import KVGroup, PaddingBuckets, SamplingParams
from foreword.device.recording import RecordingDevice
from foreword.engine import Engine, EngineMetrics, engine_config
from foreword.executors.device import DeviceExecutor

V, BLOCK = 30, 4


def engine_on(executor, *, blocks: int = 65, drafter=None, **config) -> Engine:
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "block_size": BLOCK, "watermark": 0.0} | config
    return Engine(
        executor, vocab_size=V, max_model_len=40, kv_groups=[KVGroup(BLOCK)], num_blocks=blocks, tokenizer=None,
        config=engine_config(settings), eos_token_ids=[5], drafter=drafter,
    )  # fmt: skip


class NoModel:
    hidden_size = mrope_dims = 0
    adapters = None

    def forward(self, rows, num_tokens, num_reqs, num_logits, inputs):
        return np.zeros((num_logits, V), np.float32)

    def copy_blocks(self, sources, destinations):
        pass


def test_the_next_step_is_launched_before_the_samples_are_read():
    device = RecordingDevice()
    engine = engine_on(DeviceExecutor(NoModel(), device, buckets=PaddingBuckets((4,), max_num_reqs=4)),
                       async_scheduling=True)  # fmt: skip
    for i in range(3):
        engine.add_request(str(i), [1, 2, 3], SamplingParams(temperature=0, max_tokens=20))
    for _ in range(4):  # the prompts, a step without a graph, its capture
        engine.step()
    launch = ["to device", "replay", "from device", "record"]
    for _ in range(8):
        del device.calls[:]
        engine.step()
        assert device.calls == [*launch, "wait"]  # t + 1 is launched, then t is read
    while engine.has_work:
        del device.calls[:]
        engine.step()
    assert device.calls == ["wait"]  # all requests end with the last step: nothing runs ahead of it


def test_a_step_that_the_host_samples_is_not_overtaken():
    device = RecordingDevice()
    engine = engine_on(DeviceExecutor(NoModel(), device), async_scheduling=True)
    engine.add_request("a", [1, 2, 3], SamplingParams(temperature=0, max_tokens=20, min_tokens=9))
    for _ in range(5):
        del device.calls[:]
        engine.step()
        assert device.calls.count("launch prepare_step") == 1
        assert device.calls[-2:] == ["launch commit_samples", "record"]
    engine.close()


def outputs_of(run: int, *, async_scheduling: bool) -> tuple[dict, int]:
    """Requests with stops, an abort, preemptions, steps that fail, logits without a token; one is sampled on the host.

    Their tokens, and the number of steps that were launched ahead.
    """
    from device_place import Device
    from oracle_on_rows import OracleOnRows

    pick, blocks = Random(run), 12
    model = OracleOnRows(V, blocks, BLOCK)
    model.fails_at = frozenset({9, 20} if run % 2 else ())
    engine = engine_on(
        DeviceExecutor(model, Device()), blocks=blocks, async_scheduling=async_scheduling,
        check="full" if run % 3 == 0 else "off",
    )  # fmt: skip
    ahead, launch = 0, engine.pipeline.launch_ahead

    def launch_ahead(step):
        nonlocal ahead
        launch(step)
        ahead += step.pending is not None

    engine.pipeline.launch_ahead = launch_ahead
    prompt = [pick.randrange(6, OracleOnRows.BAD) for _ in range(12)]
    for i in range(7):
        params = SamplingParams(
            temperature=pick.choice([0.0, 0.8]), seed=i, max_tokens=3 if i == 4 else pick.randint(12, 16),
            n=1 + (i == 3), repetition_penalty=1.2 if i == 2 else 1.0, logprobs=1 if i == 4 and run % 2 else None,
            stop_token_ids=[pick.randrange(V)] if i > 2 else [], ignore_eos=i < 3,
        )  # fmt: skip
        engine.add_request(str(i), [*prompt[: pick.randint(1, 12)], OracleOnRows.BAD if i == 5 else i], params)
    done, aborted, preempted = {}, {}, EngineMetrics()
    engine.observers.add(preempted)
    while engine.has_work:
        try:
            for output in engine.step():
                done[output.request_id] = [(c.token_ids, c.finish_reason) for c in output.outputs]
        except MemoryError:
            continue
        if "6" in engine and len(done) == 2:
            aborted["6"] = engine.abort("6").outputs[0].token_ids
    assert engine.cache.pool.num_used == 0
    assert preempted.num_preemptions
    engine.close()
    return done | aborted, ahead


@pytest.mark.parametrize("run", range(2))
def test_outputs_equal_those_of_one_step_at_a_time(run):
    torch = pytest.importorskip("torch", reason="the kernels need torch")
    pytest.importorskip("triton", reason="the kernels need Triton")
    torch.set_num_threads(1)
    expected, none = outputs_of(run, async_scheduling=False)
    found, ahead = outputs_of(run, async_scheduling=True)
    short = min(len(expected["6"]), len(found["6"]))  # aborted, at another step
    for outputs in (expected, found):
        outputs["6"] = outputs["6"][:short]
    assert found == expected
    assert found["5"][0][1] == "error"
    assert none == 0
    assert ahead > 5


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_drafts_are_verified_on_the_device_and_steps_with_them_are_not_overtaken(async_scheduling):
    pytest.importorskip("torch", reason="the kernels need torch")
    pytest.importorskip("triton", reason="the kernels need Triton")
    from device_place import Device
    from engine_rig import Guesser
    from oracle_model import plain_output
    from oracle_on_rows import OracleOnRows

    from foreword.engine.speculation import SpeculationConfig

    engine = engine_on(
        DeviceExecutor(OracleOnRows(V, 65, BLOCK), Device()), async_scheduling=async_scheduling,
        speculation=SpeculationConfig(num_tokens=3, adaptive=False), drafter=Guesser, check="full",
    )  # fmt: skip
    engine.add_request("a", [7, 8, 9], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    steps, done = 0, []
    while engine.has_work:
        done += engine.step()
        steps += 1
    engine.close()
    want = plain_output(
        [7, 8, 9], lambda logits, _: np.where(np.arange(V) == OracleOnRows.BAD, -9, logits).argmax(), 8, V
    )
    assert done[0].outputs[0].token_ids == want
    assert steps < 7
