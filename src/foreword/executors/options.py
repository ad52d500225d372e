"""The options of each kind of executor. None stands for the default where it has no meaning of its own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from foreword.machine import MAX_THREADS
from foreword.settings import check_of_encoder, check_settings, setting, settings_of, values_of

WeightFormat = Literal["auto", "fp32", "bf16", "int8", "q4"]
KVFormat = Literal["fp32", "bf16", "int8"]
DType = Literal["auto", "fp32", "bf16", "fp16"]
TorchWeightFormat = Literal["auto", "int8", "q4"]
DeviceKVFormat = Literal["auto", "fp8"]

_DEVICE = re.compile(r"cpu|cuda(:(0|[1-9][0-9]{0,3}))?")


def _device(value: object) -> str:
    if isinstance(value, str) and _DEVICE.fullmatch(value):
        return value
    raise ValueError("must be 'cpu', 'cuda', or 'cuda:N' with the number of a GPU, such as 'cuda:0'")


@dataclass(frozen=True, kw_only=True)
class ExecutorOptions:
    """Options of an executor. Raise ConfigError for a value of another type or out of range."""

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    def is_on_host(self) -> bool:
        """Return whether weights and KV pool are in the memory of the host, not of a GPU."""
        return True

    def values(self) -> dict[str, Any]:
        """Return the options as keyword arguments of the executor."""
        return values_of(self)

    def of_encoder(self) -> Self:
        """Return the options. Raise ConfigError for one that only decoders have."""
        check_of_encoder(self)
        return self


# fmt: off
@dataclass(frozen=True, kw_only=True)
class MediaOptions(ExecutorOptions):
    """The option of executors beside which encoders of images run."""

    media_cache_bytes: int = setting(
        256 << 20, "Memory for the encoded images and sounds that are kept for reuse.", most=2**50, unit="bytes",
        decoders_only=True,
    )


@dataclass(frozen=True, kw_only=True)
class VisionOptions(MediaOptions):
    """Options of executors beside which Foreword's own encoders of images run."""

    mmproj: str | None = setting(
        None, "GGUF file of the encoder of images, for a model in a GGUF file. None: the one beside it whose name "
        "begins with mmproj, if there is one.", unit="path", value_name="FILE", decoders_only=True,
    )

    @classmethod
    def given_mmproj(cls, options: Mapping[str, object]) -> str | None:
        """Return mmproj of options whose kind of executor is not known yet.

        Raise ConfigError for a value of another type.
        """
        path: str | None = settings_of(cls)["mmproj"].checked(options.get("mmproj"))
        return path


@dataclass(frozen=True, kw_only=True)
class ThreadOptions(ExecutorOptions):
    """The option of executors with threads of their own."""

    num_threads: int | None = setting(
        None, "Threads; None: FOREWORD_NUM_THREADS, else the physical cores, as far as the container may use them.",
        least=1, most=MAX_THREADS,
    )


@dataclass(frozen=True, kw_only=True)
class TorchPlace(ThreadOptions):
    """The device and type with which PyTorch computes."""

    device: str = setting(
        "cpu", "Device: cpu; cuda, PyTorch's current GPU; or cuda:N, GPU N of those in CUDA_VISIBLE_DEVICES, from 0.",
        value_name="cpu|cuda|cuda:N", convert=_device,
    )

    @property
    def is_on_host(self) -> bool:
        return self.device == "cpu"


@dataclass(frozen=True, kw_only=True)
class TorchNumbers(ExecutorOptions):
    """The numbers that PyTorch computes in."""

    dtype: DType = setting(
        "auto", "Numbers of weights, keys and values. auto: as the weights are stored; bf16 for quantised weights.",
    )


@dataclass(frozen=True, kw_only=True)
class TorchMatrices(TorchNumbers):
    """The numbers of Foreword's models in PyTorch, whose matrices may be integers."""

    weight_format: TorchWeightFormat = setting("auto", "Format of weights. auto: the type of dtype; int8, q4: "
    "integers.")


@dataclass(frozen=True, kw_only=True)
class NativeOptions(VisionOptions, ThreadOptions):
    """Options of the native executor."""

    weight_format: WeightFormat = setting(
        "auto", "Weights. auto: as the file holds them, integers with 15-bit activations, which gives the tokens of a "
        "float computation. int8 and q4 use 8-bit activations: faster and less exact.",
    )
    kv_format: KVFormat = setting(
        "bf16", "Keys and values. int8: with a scale per token and head, and attention in 8 bit.", decoders_only=True,
    )
    numa_nodes: int | None = setting(
        None, "NUMA nodes to divide the threads among: each node's threads multiply the rows of every matrix that are "
        "in its memory. None: threads run anywhere. The tokens are the same.", least=1, most=1024, decoders_only=True,
    )
    weight_cache_bytes: int = setting(
        20 << 30, "Disk space for the packed form of weights, in the folder of FOREWORD_HOME: the first process that "
        "runs a model writes it, later ones map it, and share its memory. The least recently used goes first. 0: "
        "weights are packed in the memory of each process.", most=2**50, unit="bytes",
    )
    preallocate_kv: bool = setting(
        False, "Take the memory of the whole KV pool from the system before the first request, not at the first use "
        "of each block.", decoders_only=True,
    )


@dataclass(frozen=True, kw_only=True)
class TorchOptions(TorchMatrices, TorchPlace, VisionOptions):
    """Options of the torch executor."""

    compile: bool = setting(
        False, "Compile the layers with torch.compile, which takes minutes in the first steps.", decoders_only=True,
    )
    tensor_parallel_size: int = setting(
        1, "Processes that divide the model by heads.", least=1, most=1024, decoders_only=True
    )
    context_parallel_size: int = setting(
        1, "Processes that divide keys and values by position.", least=1, most=1024, decoders_only=True,
    )
    rank_timeout: float = setting(
        60.0, "Seconds that a process waits for the others in one exchange. Then the step fails, and all of them end.",
        least=1, value_name="SECONDS", decoders_only=True,
    )

    @property
    def num_ranks(self) -> int:
        """The number of processes that compute the model."""
        return self.tensor_parallel_size * self.context_parallel_size


@dataclass(frozen=True, kw_only=True)
class TransformersOptions(TorchNumbers, TorchPlace, MediaOptions):
    """Options of the transformers executor."""

    compile: bool = setting(False, "Compile the model with torch.compile, which takes minutes in the first steps.")


@dataclass(frozen=True, kw_only=True)
class DeviceOptions(TorchMatrices):
    """Options of the device executor."""

    device: str = setting(
        "cuda", "Device: cuda, PyTorch's current GPU; cuda:N, GPU N of those in CUDA_VISIBLE_DEVICES, from 0; or cpu, "
        "Triton's interpreter.", value_name="cpu|cuda|cuda:N", convert=_device,
    )
    kv_format: DeviceKVFormat = setting(
        "auto", "Format of keys and values. auto: the type of dtype; fp8: 8 bit with a scale per token and head.",
    )
    num_splits: int | None = setting(
        None, "Programs that share the keys of a request in attention. None: enough that all multiprocessors have "
        "work for the longest request.", least=1, most=64, value_name="N",
    )
    max_graph_tokens: int | None = setting(
        None, "Tokens of the largest step that runs as a captured graph; graphs are captured when the engine starts. "
        "0: no graphs. None: max_num_seqs, at most max_num_batched_tokens; none in Triton's interpreter, and none for "
        "experts on GPUs whose product of PyTorch waits for the host.", most=1024, value_name="N",
    )
    token_table: Literal["auto", "device", "host"] = setting(
        "auto", "Memory of the tokens of all requests, max_num_seqs · max_model_len · 4 bytes: the GPU's, or the "
        "host's, which the GPU reads where it is. auto: the host's above 1 GiB.", value_name="NAME",
    )

    @property
    def is_on_host(self) -> bool:
        return self.device == "cpu"
