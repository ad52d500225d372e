"""Types of options for editors and type checkers. `make pages` writes them from the settings."""

from __future__ import annotations

from typing import Literal, TypedDict


class NativeKeywords(TypedDict, total=False):
    """The options of `NativeOptions`, as keywords."""

    num_threads: int | None
    media_cache_bytes: int
    mmproj: str | None
    weight_format: Literal["auto", "fp32", "bf16", "int8", "q4"]
    kv_format: Literal["fp32", "bf16", "int8"]
    numa_nodes: int | None
    weight_cache_bytes: int
    preallocate_kv: bool


class VisionKeywords(TypedDict, total=False):
    """The options of `VisionOptions`, as keywords."""

    media_cache_bytes: int
    mmproj: str | None


class TorchKeywords(TypedDict, total=False):
    """The options of `TorchOptions`, as keywords."""

    media_cache_bytes: int
    mmproj: str | None
    num_threads: int | None
    device: str
    dtype: Literal["auto", "fp32", "bf16", "fp16"]
    weight_format: Literal["auto", "int8", "q4"]
    compile: bool
    tensor_parallel_size: int
    context_parallel_size: int
    rank_timeout: float


class TransformersKeywords(TypedDict, total=False):
    """The options of `TransformersOptions`, as keywords."""

    media_cache_bytes: int
    num_threads: int | None
    device: str
    dtype: Literal["auto", "fp32", "bf16", "fp16"]
    compile: bool


class DeviceKeywords(TypedDict, total=False):
    """The options of `DeviceOptions`, as keywords."""

    dtype: Literal["auto", "fp32", "bf16", "fp16"]
    weight_format: Literal["auto", "int8", "q4"]
    device: str
    kv_format: Literal["auto", "fp8"]
    num_splits: int | None
    max_graph_tokens: int | None
    token_table: Literal["auto", "device", "host"]
