"""The classes and functions of vLLM that are recorded."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Watched:
    """A class or function of a module. methods: the only ones of a large class that are recorded; (): all.

    for_what: what of Foreword, or of a check of a runner, depends on it.
    """

    module: str
    name: str
    for_what: str
    methods: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        return f"{self.module}.{self.name}"


_DECISIONS = "the scheduler's decisions, as `adapters.vllm.apply` takes them"
_REQUESTS = "values of a new request"
_ROWS = "rows and tables of the first runner"
_HOOKS = "where a check follows the first runner"
_SECOND = "buffers and tables of the second runner"
_KERNELS = "kernels of the second runner's input"
_METADATA = "attention metadata ([vLLM V2](reference/vllm-v2.md))"
_GROUPS = "KV groups"
_SEAMS = "how other code gets in"

WATCHED = (
    Watched("v1.core.sched.output", "SchedulerOutput", _DECISIONS),
    Watched("v1.core.sched.output", "NewRequestData", _DECISIONS),
    Watched("v1.core.sched.output", "CachedRequestData", _DECISIONS),
    Watched("sampling_params", "SamplingParams", _REQUESTS, ("__post_init__",)),
    Watched("lora.request", "LoRARequest", _REQUESTS),
    Watched("multimodal.inputs", "MultiModalFeatureSpec", _REQUESTS),
    Watched("v1.attention.backend", "CommonAttentionMetadata", _METADATA),
    Watched("v1.spec_decode.metadata", "SpecDecodeMetadata", _METADATA),
    Watched("v1.kv_cache_interface", "KVCacheGroupSpec", _GROUPS),
    Watched("v1.kv_cache_interface", "FullAttentionSpec", _GROUPS),
    Watched("v1.kv_cache_interface", "SlidingWindowSpec", _GROUPS),
    Watched("v1.kv_cache_interface", "MambaSpec", _GROUPS),
    Watched("v1.worker.gpu_input_batch", "CachedRequestState", _ROWS),
    Watched("v1.worker.gpu_input_batch", "InputBatch", _ROWS),
    Watched("v1.worker.block_table", "BlockTable", _ROWS),
    Watched("v1.worker.block_table", "MultiGroupBlockTable", _ROWS),
    Watched(
        "v1.worker.gpu_model_runner", "GPUModelRunner", _HOOKS,
        ("initialize_kv_cache", "_update_states", "_prepare_inputs", "_get_slot_mappings",
         "_build_attention_metadata", "_model_forward", "_bookkeeping_sync", "execute_model", "sample_tokens"),
    ),
    Watched("v1.worker.gpu.input_batch", "InputBuffers", _SECOND),
    Watched("v1.worker.gpu.input_batch", "InputBatch", _SECOND),
    Watched("v1.worker.gpu.block_table", "BlockTables", _SECOND),
    Watched("v1.worker.gpu.states", "RequestState", _SECOND),
    Watched(
        "v1.worker.gpu.model_runner", "GPUModelRunner", _SECOND,
        ("execute_model", "prepare_inputs", "prepare_attn", "sample_tokens", "add_requests", "update_requests",
         "finish_requests"),
    ),
    Watched("v1.worker.gpu.buffer_utils", "_apply_write_kernel", _KERNELS),
    Watched("v1.worker.gpu.input_batch", "_prepare_prefill_inputs_kernel", _KERNELS),
    Watched("v1.worker.gpu.input_batch", "_prepare_pos_seq_lens_kernel", _KERNELS),
    Watched("v1.worker.gpu.input_batch", "_combine_sampled_and_draft_tokens_kernel", _KERNELS),
    Watched("v1.worker.gpu.input_batch", "_expand_idx_mapping_kernel", _KERNELS),
    Watched("v1.worker.gpu.input_batch", "_get_num_sampled_and_rejected_kernel", _KERNELS),
    Watched("v1.worker.gpu.input_batch", "_post_update_kernel", _KERNELS),
    Watched("v1.worker.gpu.block_table", "_gather_block_tables_kernel", _KERNELS),
    Watched("v1.worker.gpu.block_table", "_compute_slot_mappings_kernel", _KERNELS),
    Watched("v1.worker.gpu.cp_utils", "_dcp_local_seq_lens_kernel", _KERNELS),
    Watched("v1.worker.gpu_worker", "Worker", _SEAMS, ("init_device", "_make_model_runner")),
    Watched("v1.worker.cpu_worker", "CPUWorker", _SEAMS, ("init_device",)),
    Watched("v1.worker.worker_base", "WorkerWrapperBase", _SEAMS, ("init_worker",)),
    Watched("triton_utils.dispatcher", "register_kernels", _SEAMS),
    Watched("plugins", "load_general_plugins", _SEAMS),
)  # fmt: skip
