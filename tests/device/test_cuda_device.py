"""The calls of torch.cuda by `CudaDevice`, without a GPU: all of it is on its own device."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

pytest.importorskip("torch", reason="the kernels need torch")
pytest.importorskip("triton", reason="the kernels need Triton")

import torch
from kernel_reference import random_weights, tiny_spec

from foreword.device import cuda
from foreword.device.cuda import CudaDevice
from foreword.errors import ConfigError
from foreword.executors.torch import on_rows
from foreword.executors.torch.executor import TorchExecutor

ONE = torch.device("cuda:1")


class FakeCuda:
    """torch.cuda with two GPUs. ``calls``: (what was asked, the current device, what it was given)."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []
        self.current = 0

    def note(self, name, *given):
        self.calls.append((name, self.current, *given))
        return SimpleNamespace(name=name, given=given)

    @contextmanager
    def device(self, device):
        before, self.current = self.current, device.index
        yield
        self.current = before

    @contextmanager
    def graph(self, graph, *, pool, stream, capture_error_mode):
        self.note("capture", stream.given, capture_error_mode)
        yield

    def Event(self, *, blocking):
        return SimpleNamespace(record=lambda stream: self.note("record", stream), synchronize=lambda: None)


@pytest.fixture
def fake(monkeypatch):
    fake = FakeCuda()
    for name, value in {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "current_device": lambda: fake.current,
        "get_device_properties": lambda device: SimpleNamespace(multi_processor_count=10 + device.index),
        "get_device_capability": lambda device: (8, 9 + device.index),
        "graph_pool_handle": lambda: "pool",
        "device": fake.device,
        "graph": fake.graph,
        "Event": fake.Event,
        "CUDAGraph": SimpleNamespace,
        "Stream": lambda device: fake.note("stream", device),
        "current_stream": lambda device: f"stream of {device}",
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch, "zeros", lambda shape, **given: fake.note("zeros", *sorted(given.items(), key=str)))
    monkeypatch.setattr(cuda, "load", lambda name: {(3,): lambda *args, **constants: fake.note(name, *args)})
    return fake


def test_memory_launches_and_streams_are_of_the_device_that_is_given(fake):
    api = CudaDevice("cuda:1")
    assert api.device == ONE
    assert api.multiprocessors == 11
    assert (api.converts_fp8, api.large_tiles) == (True, False)
    api.zeros((2,), "int32")
    api.mapped((2,), "int32")
    api.pinned(2)
    api.launch("kernel", (3,), 5, BLOCK=8)
    api.event().record()
    graphs = [api.capture(lambda: api.launch("captured", (3,))) for _ in range(2)]
    assert len({id(graph) for graph in graphs}) == 2
    int32 = ("dtype", torch.int32)
    capture = ("capture", 1, (ONE,), "thread_local")  # the stream is one of the device
    assert fake.calls == [
        ("zeros", 1, ("device", ONE), int32),
        ("zeros", 1, ("device", "cpu"), int32, ("pin_memory", True)),
        ("zeros", 1, ("device", "cpu"), int32, ("pin_memory", True)),
        ("kernel", 1, 5),
        ("record", 0, "stream of cuda:1"),
        ("stream", 1, ONE),
        capture,
        ("captured", 1),
        capture,
        ("captured", 1),
    ]
    assert fake.current == 0


def test_without_a_number_it_is_the_device_that_is_current_when_it_is_made(fake):
    fake.current = 1
    api = CudaDevice()
    fake.current = 0
    assert api.device == ONE


TOO_LARGE = "device='cuda:2': torch finds 2 GPUs; use a number below 2"


def test_a_gpu_that_the_machine_lacks_is_refused_with_its_number(fake):
    spec = tiny_spec()
    pool = {"num_blocks": 4, "block_size": 4}
    with pytest.raises(ConfigError, match=TOO_LARGE):
        CudaDevice("cuda:2")
    with pytest.raises(ConfigError, match=TOO_LARGE):
        TorchExecutor(spec, random_weights(spec), device="cuda:2", **pool)
    with pytest.raises(ConfigError, match=TOO_LARGE):
        on_rows.device_executor(
            spec, random_weights(spec), max_num_seqs=2, max_num_batched_tokens=8, device="cuda:2", **pool
        )


def test_transformers_refuses_a_gpu_that_the_machine_lacks(fake, tmp_path):
    model = pytest.importorskip("foreword.executors.transformers.model", reason="needs foreword[transformers]")
    with pytest.raises(ConfigError, match=TOO_LARGE):
        model.load_transformers(tmp_path, "model", device="cuda:2")


@pytest.mark.parametrize(("name", "device"), [("cuda", torch.device("cuda:0")), ("cuda:1", ONE)])
def test_weights_keys_and_rows_are_on_the_gpu_of_the_option(fake, monkeypatch, name, device):
    class Loading(Exception):
        pass

    def load(weights, device, *rest, **options):
        raise Loading(device)

    spec, apis = tiny_spec(), []
    pool = {"num_blocks": 4, "block_size": 4}
    weights = random_weights(spec)
    monkeypatch.setattr("foreword.executors.torch.executor.Loader", load)
    monkeypatch.setattr(on_rows, "Loader", load)
    monkeypatch.setattr(on_rows, "CudaDevice", lambda device: apis.append(CudaDevice(device)))
    for make in (
        lambda: TorchExecutor(spec, weights, device=name, **pool),
        lambda: on_rows.device_executor(spec, weights, max_num_seqs=2, max_num_batched_tokens=8, device=name, **pool),
    ):
        with pytest.raises(Loading) as loading:
            make()
        assert loading.value.args == (device,)
    assert [api.device for api in apis] == [device]


def test_memory_that_the_device_lacks_is_a_memory_error(fake, monkeypatch):
    def zeros(shape, **given):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")

    monkeypatch.setattr(torch, "zeros", zeros)
    for allocate in (CudaDevice().zeros, CudaDevice().mapped):
        with pytest.raises(MemoryError, match=r"cuda:0: no memory for int32 \[3, 4\]"):
            allocate((3, 4), "int32")
