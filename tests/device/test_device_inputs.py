"""Adapters, prompt embeddings, M-RoPE and number formats on the kernels, against other executors of the same model."""

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch", reason="the kernels need torch")
pytest.importorskip("triton", reason="the kernels need Triton")

import torch
import triton
import triton.language as tl
from device_place import ON_GPU, WHERE, Device, to_device
from kernel_reference import SPECS, random_weights, rope, tiny_spec

from foreword.batch import KVGroup, PaddingBuckets, SamplingParams
from foreword.device.kernels.fp8 import decode, encode
from foreword.device.recording import RecordingDevice
from foreword.engine import Engine, engine_config
from foreword.executors.device import DeviceExecutor
from foreword.executors.numpy import NumpyExecutor
from foreword.executors.torch.executor import TorchExecutor
from foreword.executors.torch.on_rows import DecoderOnRows
from foreword.models.spec import LayerSpec
from kernels.kernel_adapters import merged, random_adapter

POOL = {"num_blocks": 40, "block_size": 4}
SMALL = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 40, "num_heads": 4, "num_kv_heads": 2}
PLAIN = tiny_spec(**SMALL, layers=(LayerSpec(rope(16)), LayerSpec(rope(16))))
ROTARY = tiny_spec(**SMALL, layers=(LayerSpec(replace(rope(16), axes=(0, 1, 2, 2, 1, 0, 0, 1))), LayerSpec(rope(16))))
ADAPTED = {"plain": PLAIN} | {name: replace(SPECS[name], vocab_size=50) for name in ("latent", "moe")}
torch.set_num_threads(1)


@triton.jit
def both(x, codes, numbers, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(codes + at, encode(tl.load(x + at)))
    tl.store(numbers + at, decode(tl.load(codes + at), UNIT))


def on_device(spec, weights, *, api=None, **options) -> DeviceExecutor:
    model = DecoderOnRows(spec, weights, **POOL, **{"device": WHERE, "dtype": "fp32", **options})
    return DeviceExecutor(model, api or Device(), buckets=PaddingBuckets((4, 8), max_num_reqs=4))


def engine(spec, executor, **config) -> Engine:
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 8, "block_size": 4, "check": "full"} | config
    return Engine(
        executor, vocab_size=50, max_model_len=40, kv_groups=[KVGroup(4)], num_blocks=40, tokenizer=None,
        config=engine_config(settings),
    )  # fmt: skip


def run(engine, prompts, **options) -> dict:
    """The first completion of each prompt, four greedy tokens with their log-probabilities where these are wanted."""
    params = SamplingParams(temperature=0, max_tokens=4, **options)
    for i, prompt in enumerate(prompts):
        lora = None
        if isinstance(prompt, tuple):
            prompt, lora = prompt
        engine.add_request(str(i), prompt, params, lora=lora)
    done = {}
    while engine.has_work:
        done |= {output.request_id: output.outputs[0] for output in engine.step() if output.finished}
    engine.close()
    return done


def ids(done) -> dict:
    return {name: list(completion.token_ids) for name, completion in done.items()}


def prompts_of(*lengths: int) -> list[list[int]]:
    rng = np.random.default_rng(4)
    return [rng.integers(0, 50, n).tolist() for n in lengths]


@pytest.mark.parametrize(
    ("name", "async_scheduling"), [("plain", False), ("plain", True), ("latent", False), ("moe", False)]
)
def test_requests_with_adapters_get_the_tokens_of_merged_weights(name, async_scheduling):
    """Two adapters of other ranks and a request without, in one step."""
    spec = ADAPTED[name]
    weights = random_weights(spec)
    adapters = {"a": random_adapter(spec, 3, 1), "b": random_adapter(spec, 20, 2, names=("q", "v_b", "o", "down"))}
    served = engine(spec, on_device(spec, weights), async_scheduling=async_scheduling,
                    check="off" if async_scheduling else "full")  # fmt: skip
    for name, adapter in adapters.items():
        served.load_lora(name, adapter)
    prompts = prompts_of(5, 3, 4)
    got = ids(run(served, list(zip(prompts, ("a", None, "b"), strict=True))))
    for i, name in enumerate(("a", None, "b")):
        own = weights if name is None else merged(weights, adapters[name])
        want = run(engine(spec, NumpyExecutor(spec, own, **POOL)), [prompts[i]])
        assert got[str(i)] == ids(want)["0"], name


def test_graphs_with_adapters_are_captured_again_after_a_change_of_the_adapters():
    device = RecordingDevice()

    class Model:
        hidden_size = mrope_dims = 0

        class adapters:
            load = drop = staticmethod(lambda *_: 1)
            mapping = staticmethod(lambda batch: batch)

        def forward(self, rows, num_tokens, num_reqs, num_logits, inputs):
            return np.zeros((num_logits, 50), np.float32)

    executor = DeviceExecutor(Model(), device, buckets=PaddingBuckets((4, 8), max_num_reqs=4))
    served = engine(PLAIN, executor, check="off")
    assert device.calls.count("capture") == 2  # one for each size, without adapters
    del device.calls[:]
    served.load_lora("a", random_adapter(PLAIN, 2, 1))
    served.add_request("0", [1, 2, 3], SamplingParams(temperature=0, max_tokens=30), lora="a")
    served.add_request("1", [1, 2, 3], SamplingParams(temperature=0, max_tokens=30))
    for _ in range(4):
        served.step()
    assert device.calls.count("capture") == 1
    served.load_lora("b", random_adapter(PLAIN, 2, 2))
    for _ in range(3):
        served.step()
    assert device.calls.count("capture") == 2
    served.abort("0")
    for _ in range(3):
        served.step()
    assert device.calls.count("capture") == 2
    assert sorted(key[2] for key in executor._graphs) == [False, False, True]


def test_prompts_with_embeddings_get_the_tokens_of_the_numpy_executor():
    weights, rng = random_weights(PLAIN), np.random.default_rng(7)
    ids_, is_token = rng.integers(0, 50, 11), rng.random(11) < 0.5
    prompts = [
        {"prompt_embeds": rng.standard_normal((6, 32)).astype(np.float32)},
        {"prompt_token_ids": ids_.tolist(), "prompt_is_token_ids": is_token,
         "prompt_embeds": rng.standard_normal((11, 32)).astype(np.float32)},
        *prompts_of(3),
    ]  # fmt: skip
    want = ids(run(engine(PLAIN, NumpyExecutor(PLAIN, weights, **POOL)), prompts))
    assert ids(run(engine(PLAIN, on_device(PLAIN, weights)), prompts)) == want
    assert ids(run(engine(PLAIN, on_device(PLAIN, weights), check="off", async_scheduling=True), prompts)) == want


def test_rotary_positions_of_several_dimensions_give_the_tokens_of_the_numpy_executor():
    weights = random_weights(ROTARY)
    positions = np.tile(np.arange(10), (3, 1))
    positions[1:, 2:7] += np.array([[1, 2, 0, 1, 3], [2, 0, 1, 1, 2]])
    prompts = [
        {"prompt_token_ids": prompts_of(10)[0], "mrope_positions": positions, "mrope_delta": -3},
        prompts_of(4)[0],
    ]
    want = ids(run(engine(ROTARY, NumpyExecutor(ROTARY, weights, **POOL)), prompts))
    assert ids(run(engine(ROTARY, on_device(ROTARY, weights)), prompts)) == want
    assert ids(run(engine(ROTARY, on_device(ROTARY, weights), check="off", async_scheduling=True), prompts)) == want


@pytest.mark.parametrize(("dtype", "error"), [("fp16", 0.02), ("bf16", 0.1)])
def test_narrow_formats_give_the_log_probabilities_of_the_torch_executor(dtype, error):
    spec = tiny_spec(**SMALL, qk_norm=True, layers=(LayerSpec(rope(16)), LayerSpec(rope(16), 6)))
    weights, prompts = random_weights(spec), prompts_of(9)
    groups = [KVGroup(4), KVGroup(4, sliding_window=6)]
    done = []
    for executor in (
        on_device(spec, weights, dtype=dtype),
        TorchExecutor(spec, weights, **POOL, device=WHERE, dtype=dtype),
    ):
        served = Engine(
            executor, vocab_size=50, max_model_len=40, kv_groups=groups, num_blocks=40, tokenizer=None,
            config=engine_config({"max_num_batched_tokens": 8, "block_size": 4}),
        )  # fmt: skip
        done.append(run(served, prompts, logprobs=3)["0"])
    assert done[0].token_ids == done[1].token_ids
    assert abs(done[0].cumulative_logprob - done[1].cumulative_logprob) < error


def test_keys_and_values_of_8_bits_are_those_of_torch_with_a_scale_per_token_and_head():
    """Codes and scales bit for bit, and attention over what they stand for."""
    weights, prompts = random_weights(PLAIN), prompts_of(11, 3)
    executor = on_device(PLAIN, weights, kv_format="fp8")
    exact = on_device(PLAIN, weights)
    got, _ = (run(engine(PLAIN, one), prompts, logprobs=3) for one in (executor, exact))
    # Layer 0 reads no keys before it writes its own: its keys do not depend on the format.
    for numbers, codes, scales in zip(
        (exact.model.cache.keys[0], exact.model.cache.values[0]),
        (executor.model.cache.keys[0], executor.model.cache.values[0]),
        executor.model.cache.scales[0], strict=True,
    ):  # fmt: skip
        written = scales > 0
        assert written.sum() > 20
        numbers, codes, scales = numbers[written], codes[written], scales[written][:, None]
        assert torch.equal(scales, numbers.abs().amax(-1, keepdim=True) / 448)
        assert torch.equal(codes.view(torch.float8_e4m3fn).float(), (numbers / scales).to(torch.float8_e4m3fn).float())
    want = run(engine(PLAIN, NumpyExecutor(PLAIN, weights, **POOL)), prompts, logprobs=3)
    for name, completion in got.items():
        first = want[name].token_ids[0]
        assert abs(completion.logprobs[0][first].logprob - want[name].logprobs[0][first].logprob) < 0.1


@pytest.mark.parametrize("unit", [False, *([True] if ON_GPU else [])])
def test_every_code_of_8_bits_is_read_and_written_as_torch_does(unit):
    rng = np.random.default_rng(1)
    finite = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().nan_to_num(0).numpy()
    middles = (finite[:126] + finite[1:127]) / 2  # ties
    random = np.float32(2.0) ** rng.uniform(-20, 8.8, 2048 - 256 - 126) * rng.choice([-1, 1], 2048 - 256 - 126)
    x = to_device(np.concatenate([finite, middles, random]).astype(np.float32))
    codes = torch.zeros(2048, dtype=torch.uint8, device=WHERE)
    numbers = torch.zeros(2048, device=WHERE)
    both[(1,)](x, codes, numbers, UNIT=unit, BLOCK=2048)
    assert torch.equal(codes, x.to(torch.float8_e4m3fn).view(torch.uint8))
    assert torch.equal(numbers, x.to(torch.float8_e4m3fn).float())


def test_log_probabilities_of_prompts_are_the_numpy_executors():
    weights, prompts, found = random_weights(PLAIN), prompts_of(11, 3), []
    for executor in (on_device(PLAIN, weights), NumpyExecutor(PLAIN, weights, **POOL)):
        served, done = engine(PLAIN, executor), {}
        for i, prompt in enumerate(prompts):
            params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=2 if i == 0 else None)
            served.add_request(str(i), prompt, params)
        while served.has_work:
            done |= {output.request_id: output for output in served.step() if output.finished}
        assert done["1"].prompt_logprobs is None
        found.append(done["0"].prompt_logprobs)
    assert len(found[0]) == 11
    for ours, theirs in zip(found[0][1:], found[1][1:], strict=True):
        assert list(ours) == list(theirs)
        assert all(abs(ours[t].logprob - theirs[t].logprob) < 1e-4 for t in ours)
