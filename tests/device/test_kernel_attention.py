"""The kernels as the attention of executors whose steps the host prepares: against dense attention, in transformers."""

import pytest

pytest.importorskip("torch", reason="the kernels need torch")
pytest.importorskip("triton", reason="the kernels need Triton")

import torch
from device_place import ON_GPU, WHERE, Device

from cli.talking_model import write_talking_model
from foreword import LLM, SamplingParams
from foreword.executors.torch.attention import GatheredAttention
from foreword.executors.torch.kernel_attention import KernelAttention, paged_attention
from pytorch.test_attention import MASKS, run_steps

torch.set_num_threads(1)


def on_kernels(cache):
    return KernelAttention(cache, Device())


@pytest.mark.parametrize(
    ("mask", "heads", "dtype", "tolerance"),
    [
        ("full", (3, 3, 16, 8), torch.float32, 1e-5),
        ("window, softcap and sinks", (4, 2, 8, 8), torch.float32, 1e-5),
        ("window", (4, 1, 8, 16), torch.float16, 0.004),
        ("chunk", (4, 2, 8, 8), torch.float32, 1e-5),
        *([("window", (4, 1, 64, 64), torch.bfloat16, 0.03)] if ON_GPU else ()),  # the interpreter has no such sums
    ],
)
def test_steps_equal_dense_attention(mask, heads, dtype, tolerance):
    run_steps(heads, dict(MASKS[mask]), dtype, tolerance, on_kernels, WHERE)


@pytest.mark.parametrize("executor", ["torch", "transformers"])
def test_an_executor_attends_by_the_kernels_where_its_tensors_are_on_a_gpu(tmp_path, executor):
    if executor == "transformers":
        pytest.importorskip("transformers", reason="needs the extra foreword[transformers]")
    folder = write_talking_model(tmp_path / "talking")
    params, found = SamplingParams(temperature=0, max_tokens=4), []
    options = {"max_model_len": 64, "max_num_seqs": 3, "max_num_batched_tokens": 8, "dtype": "fp32", "device": WHERE}
    for make in (GatheredAttention, on_kernels):
        with LLM(str(folder), executor=executor, **options) as llm:
            runs = llm.engine.executor
            assert type(runs.attention) is (KernelAttention if ON_GPU else GatheredAttention)
            runs.attention = make(runs.cache)
            found.append([output.outputs[0].token_ids for output in llm.generate(["a cat sat", "the dog"], params)])
    assert found[0] == found[1]


def test_a_cache_on_a_gpu_is_attended_by_kernels(monkeypatch):
    """The choice by the cache's device, with the interpreter in place of the GPU."""
    from foreword.device import cuda
    from foreword.executors.torch.cache import KVLayer, PagedCache

    cache = PagedCache([KVLayer(0, 0, 1, 8, 8)], num_blocks=2, block_size=4, dtype=torch.float32)
    assert type(paged_attention(cache)) is GatheredAttention
    devices = []
    monkeypatch.setattr(cuda, "CudaDevice", lambda device: devices.append(device) or Device())
    cache.device = torch.device("cuda:1")
    assert type(paged_attention(cache)) is KernelAttention
    assert devices == [cache.device]
