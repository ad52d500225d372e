"""The versions of vLLM whose steps can be followed, and what is known of them: without importing vLLM."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from foreword.errors import ConfigError

VERSIONS = ("0.32", "0.33")

Generation = Literal["first", "second"]
MODULES: Mapping[Generation, str] = {
    "first": "vllm.v1.worker.gpu_model_runner",
    "second": "vllm.v1.worker.gpu.model_runner",
}
"""The modules of the two generations of `GPUModelRunner`."""

HOOKS: Mapping[Generation, Mapping[str, tuple[str, ...]]] = {
    "first": {
        "initialize_kv_cache": ("self", "kv_cache_config"),
        "_update_states": ("self", "scheduler_output"),
        "_prepare_inputs": ("self", "scheduler_output", "num_scheduled_tokens"),
        "_model_forward": ("self", "input_ids", "positions", "intermediate_tensors", "inputs_embeds", "model_kwargs"),
        "sample_tokens": ("self", "grammar_output"),
        "_bookkeeping_sync": (
            "self", "scheduler_output", "sampler_output", "logits", "hidden_states", "num_scheduled_tokens",
        ),
    },
    "second": {
        "initialize_kv_cache": ("self", "kv_cache_config"),
        "execute_model": ("self", "scheduler_output", "intermediate_tensors", "dummy_run"),
        "prepare_attn": ("self", "input_batch"),
        "sample_tokens": ("self", "grammar_output"),
    },
}  # fmt: skip
"""The methods of each generation that are overridden, and their first parameters."""

FIELDS = {
    "aux_output_connector_metadata", "ec_connector_metadata", "ec_manager_metadata", "encoder_input_updates",
    "finished_req_ids", "free_encoder_mm_hashes", "has_structured_output_requests", "has_sync_kv_loads",
    "kv_cache_block_copies", "kv_connector_block_state", "kv_connector_metadata", "new_block_ids_to_zero",
    "num_common_prefix_blocks", "num_invalid_spec_tokens", "num_scheduled_tokens", "num_spec_tokens_to_schedule",
    "pending_structured_output_tokens", "preempted_req_ids", "scheduled_cached_reqs", "scheduled_encoder_input_stats",
    "scheduled_encoder_inputs", "scheduled_new_reqs", "scheduled_spec_decode_tokens", "skip_drafts",
    "total_num_scheduled_tokens",
}  # fmt: skip
"""The fields of a SchedulerOutput that are known, of all versions."""


def check_version(version: str) -> None:
    """Raise ConfigError for a version of vLLM whose hooks are not known."""
    match = re.match(r"\d+\.\d+(?=\.|$)", version)
    if match is None or match[0] not in VERSIONS:
        raise ConfigError(f"vLLM {version} is not one of the versions that are known: {', '.join(VERSIONS)}")


def check_parallel(config: Any) -> None:
    """Raise ConfigError for a kind of parallelism whose steps cannot be followed, in a ParallelConfig of vLLM."""
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if (size := getattr(config, name, 1)) != 1:
            raise ConfigError(f"{name}={size}: only 1 can be followed")


def generation_of(runner: type) -> Generation:
    """Return the generation of a model runner. Raise ConfigError for one whose methods are not those known."""
    modules = {base.__module__ for base in runner.__mro__}
    for generation, module in MODULES.items():
        if module in modules:
            _check_methods(runner, HOOKS[generation])
            return generation
    raise ConfigError(f"the model runner {runner.__module__}.{runner.__qualname__} is not one of those known")


def unknown_fields(names: Iterable[str]) -> list[str]:
    """Return the fields of a SchedulerOutput whose effect is not known."""
    return sorted(set(names) - FIELDS)


def _check_methods(runner: type, methods: Mapping[str, tuple[str, ...]]) -> None:
    for name, parameters in methods.items():
        method = getattr(runner, name, None)
        found = () if method is None else tuple(inspect.signature(method).parameters)
        if found[: len(parameters)] != parameters:
            raise ConfigError(
                f"{runner.__qualname__}.{name} has the parameters {found}; those known begin with {parameters}"
            )
