"""Types of options for editors and type checkers. `make pages` writes them from the settings."""

from __future__ import annotations

from os import PathLike
from typing import Literal, TypedDict


class EngineOptions(TypedDict, total=False):
    """Settings of engine, scheduler, speculation and executors. docs/settings.md has their meaning."""

    max_model_len: int | None
    block_size: int
    num_blocks: int | None
    kv_cache_bytes: int | str | None
    lora_bytes: int | str
    max_logprobs: int
    grammar_cache_bytes: int | str
    cache_dir: str | PathLike[str] | None
    cache_bytes: int | str | None
    host_cache_bytes: int | str
    prefix_caching: bool | None
    partial_reuse: bool
    async_scheduling: bool | None
    max_forced_tokens: int
    generation_config: Literal["model", "ignore"]
    seed: int | None
    answer_log: str | PathLike[str] | None
    answer_log_bytes: int | str
    check: Literal["off", "bounds", "full"]
    record: str | PathLike[str] | None
    record_tensors: int
    record_token_ids: Literal["plain", "hashed", "omitted"] | None
    flight_steps: int
    flight_folder: str | PathLike[str] | None
    max_num_batched_tokens: int
    max_num_seqs: int
    chunked_prefill: bool | None
    long_prefill_threshold: int
    prompt_time_share: float
    reserve_full_prompt: bool
    watermark: float
    speculation_num_tokens: int
    speculation_min_match: int
    speculation_max_match: int
    speculation_adaptive: bool
    speculation_step_overhead: float
    speculation_saturated_cost: float
    speculation_model: str | PathLike[str] | None
    num_threads: int | None
    media_cache_bytes: int | str
    mmproj: str | PathLike[str] | None
    weight_format: Literal["auto", "fp32", "bf16", "int8", "q4"]
    kv_format: Literal["fp32", "bf16", "int8", "auto", "fp8"]
    numa_nodes: int | None
    weight_cache_bytes: int | str
    preallocate_kv: bool
    device: str
    dtype: Literal["auto", "fp32", "bf16", "fp16"]
    compile: bool
    tensor_parallel_size: int
    context_parallel_size: int
    rank_timeout: float
    num_splits: int | None
    max_graph_tokens: int | None
    token_table: Literal["auto", "device", "host"]
