"""executor="device" by name: an `LLM` in Triton's interpreter, and what is refused without a GPU."""

import pytest

pytest.importorskip("torch", reason="the kernels need torch")
pytest.importorskip("triton", reason="the kernels need Triton")

import torch
from device_place import WHERE

from cli.talking_model import write_talking_model
from foreword import LLM, SamplingParams
from foreword.errors import ConfigError
from foreword.executors.device import DeviceExecutor

torch.set_num_threads(1)
SMALL = {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 16}
PARAMS = SamplingParams(temperature=0, max_tokens=5)


@pytest.fixture
def model(tmp_path):
    return str(write_talking_model(tmp_path / "talking"))


def test_an_llm_on_the_kernels_completes_as_on_the_numpy_executor(model):
    prompts = ["a cat", "the dog and"]
    with LLM(model, executor="numpy", **SMALL) as llm:
        want = [output.outputs[0].token_ids for output in llm.generate(prompts, PARAMS)]
    with LLM(model, executor="device", device=WHERE, **SMALL) as llm:
        assert isinstance(llm.engine.executor, DeviceExecutor)
        assert llm.engine.config.async_scheduling
        assert [output.outputs[0].token_ids for output in llm.generate(prompts, PARAMS)] == want


@pytest.mark.parametrize(
    "options",
    [
        {"max_graph_tokens": 3, "num_splits": 2, "token_table": "host"},
        {"max_num_seqs": 8, "max_num_batched_tokens": 6, "max_graph_tokens": 6},  # fewer tokens than requests
    ],
)
def test_options_of_steps_change_no_token(model, options):
    prompts = ["a cat sat on the mat", "the dog and", "so"]
    found = []
    for executor in ({"executor": "numpy"}, {"executor": "device", "device": WHERE, **options}):
        with LLM(model, **{**SMALL, **executor}) as llm:
            found.append([output.outputs[0].token_ids for output in llm.generate(prompts, PARAMS)])
    assert found[0] == found[1]


def test_rows_that_the_device_cannot_have_are_refused_when_the_engine_is_made(model, monkeypatch):
    monkeypatch.setattr("foreword.device.layout.INT32_MAX", 100)
    with pytest.raises(ConfigError, match="max_num_seqs=4, max_model_len=64"):
        LLM(model, executor="device", device=WHERE, **SMALL)


def test_keys_and_values_of_8_bits_take_less_of_the_cache(model):
    sizes = {}
    for name in ("auto", "fp8"):
        with LLM(model, executor="device", device=WHERE, kv_format=name, kv_cache_bytes=1 << 15, **SMALL) as llm:
            cache = llm.engine.executor.model.cache
            sizes[name] = sum(slot.nbytes for slot in cache._slots), llm.engine.cache.pool.num_blocks
            assert sizes[name][0] <= 1 << 15
    assert sizes["fp8"][1] > 2 * sizes["auto"][1]


def test_the_interpreter_is_not_used_by_accident(model, monkeypatch):
    import triton

    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.raises(ConfigError, match="TRITON_INTERPRET=1"):
        LLM(model, executor="device", device="cpu", **SMALL)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_machine_without_a_gpu_is_named(model):
    with pytest.raises(ConfigError, match=r"torch finds no GPU; use executor='native'"):
        LLM(model, executor="device", **SMALL)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device": "gpu"}, "device='gpu': must be 'cpu', 'cuda', or 'cuda:N'"),
        ({"device": "cuda:99"}, "device='cuda:99': torch finds"),
        ({"num_threads": 2}, "executor 'device' has no such option"),
        ({"device": WHERE, "kv_format": "int8"}, "kv_format='int8'"),
        ({"device": WHERE, "num_splits": 0}, "num_splits=0"),
        ({"device": WHERE, "max_graph_tokens": 17}, "max_graph_tokens=17: a step has at most max_num_batched"),
        ({"device": WHERE, "token_table": "disk"}, "token_table='disk'"),
    ],
)
def test_options_that_it_lacks_are_refused(model, options, words):
    with pytest.raises(ConfigError, match=words):
        LLM(model, executor="device", **options, **SMALL)
