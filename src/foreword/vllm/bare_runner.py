"""vLLM's first model runner without a model: it prepares the steps of decisions that are given as plain values.

This file imports nothing of Foreword. `foreword rerun --as-test` copies it into the test that it prints.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from vllm import SamplingParams
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import get_forward_context
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.attention.backend import AttentionBackend, AttentionMetadataBuilder, MultipleOf
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec, SlidingWindowSpec
from vllm.v1.outputs import SamplerOutput
from vllm.v1.worker.worker_base import WorkerWrapperBase

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as Runner
else:
    Runner = object

HIDDEN_SIZE = 64
NUM_BLOCKS = 1 << 24
"""A number of blocks that exceeds that of any cache. The cache is never allocated."""


class Group(NamedTuple):
    """A KV group: its block size, and its sliding window if it has one. has_states: of recurrent layers, a state per
    request.
    """

    block_size: int
    window: int | None = None
    has_states: bool = False


class Sizes(NamedTuple):
    """The sizes of the engine. uses_mrope: its rotary positions have three dimensions, and requests bring their own."""

    max_num_reqs: int
    max_num_batched_tokens: int
    max_model_len: int
    vocab_size: int
    kv_groups: tuple[Group, ...]
    max_num_draft_tokens: int = 0
    uses_mrope: bool = False


# -- the parts of a model that a runner asks for its KV groups ---------------------------------------------------------


class BareMetadata(NamedTuple):
    """The values that attention layers would read in a step."""

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    max_query_len: int
    block_table: torch.Tensor
    slot_mapping: torch.Tensor


class BareBuilder(AttentionMetadataBuilder):  # type: ignore[misc]  # vLLM's classes are Any
    """Keeps the values that the runner prepared for attention unchanged."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, *_: Any, **__: Any) -> BareMetadata:
        common = common_attn_metadata
        return BareMetadata(
            common.query_start_loc, common.seq_lens, common.max_query_len, common.block_table_tensor,
            common.slot_mapping,
        )  # fmt: skip


class StatesBuilder(AttentionMetadataBuilder):  # type: ignore[misc]
    """The builder for recurrent layers, which read no slots. The runner puts decodes before prompts for them."""

    reorder_batch_threshold = 1

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, *_: Any, **__: Any) -> None:
        return None


class BareBackend(AttentionBackend):  # type: ignore[misc]
    """Attention that is never computed, for blocks of any size."""

    forward_includes_kv_cache_update = True
    builder: ClassVar[type[AttentionMetadataBuilder]] = BareBuilder

    @staticmethod
    def get_name() -> str:
        return "BARE"

    @staticmethod
    def get_supported_kernel_block_sizes(*_: Any) -> list[Any]:
        return [MultipleOf(1)]

    @staticmethod
    def get_impl_cls() -> Any:
        return object

    @classmethod
    def get_builder_cls(cls) -> type[AttentionMetadataBuilder]:
        return cls.builder


class StatesBackend(BareBackend):
    """Recurrent layers, which are never computed."""

    builder = StatesBuilder


class BareLayer(AttentionLayerBase):  # type: ignore[misc]
    """A layer of one KV group, with its specification."""

    def __init__(self, spec: Any) -> None:
        self._spec = spec

    def get_attn_backend(self) -> type[BareBackend]:
        return StatesBackend if isinstance(self._spec, MambaSpec) else BareBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> Any:
        return self._spec


class BareModel:
    """A model that computes nothing: its hidden states are the logits. rotary: of the request that is admitted, the
    rotary positions [3, prompt] and the offset of later tokens.
    """

    supports_mrope: ClassVar[bool] = True
    rotary: tuple[Sequence[Sequence[int]], int] | None = None

    def get_mrope_input_positions(
        self, input_tokens: Sequence[int], mm_features: Sequence[Any]
    ) -> tuple[torch.Tensor, int]:
        if self.rotary is None:
            return torch.arange(len(input_tokens)).expand(3, -1), 0
        positions, delta = self.rotary
        return torch.tensor(positions), delta

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states


class NoDrafts:
    """A proposer that returns no drafts: the drafts of the decisions are given."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        pass

    def propose(self, sampled_token_ids: Sequence[Sequence[int]], *_: Any, **__: Any) -> list[list[int]]:
        return [[] for _ in sampled_token_ids]


# -- the runner --------------------------------------------------------------------------------------------------------


class BareRunner(Runner):  # type: ignore[misc]
    """The runner of a platform without its model. Its samples are taken from ``forced``, {req_id: tokens}.

    metadata, input_ids_read: the values of the last step that a model would have read. prepared: the values that
    `_prepare_inputs` returned. rotary: the rotary positions of the requests that the step admits.
    """

    rotary: Mapping[str, tuple[Sequence[Sequence[int]], int] | None]
    forced: Mapping[str, Sequence[int]]
    metadata: Mapping[str, BareMetadata | None]
    input_ids_read: torch.Tensor
    prepared: Sequence[Any]

    @property
    def req_ids(self) -> list[str]:
        """The requests of the last step, as they stand in the batch."""
        return list(self.input_batch.req_ids)

    def _init_mrope_positions(self, req_state: Any) -> None:
        self.model.rotary = self.rotary[req_state.req_id]
        super()._init_mrope_positions(req_state)

    def _prepare_inputs(self, scheduler_output: Any, num_scheduled_tokens: Any) -> Any:
        self.prepared = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        return self.prepared

    def _model_forward(
        self,
        input_ids: Any = None,
        positions: Any = None,
        intermediate_tensors: Any = None,
        inputs_embeds: Any = None,
        **model_kwargs: Any,
    ) -> torch.Tensor:
        self.metadata, self.input_ids_read = get_forward_context().attn_metadata, input_ids
        return torch.zeros(len(input_ids), 1, device=self.device)

    def _sample(self, logits: Any, spec_decode_metadata: Any) -> SamplerOutput:
        width = 1 if spec_decode_metadata is None else 1 + self.num_spec_tokens
        ids = torch.full((self.input_batch.num_reqs, width), -1, dtype=torch.int64 if width == 1 else torch.int32)
        for b, req_id in enumerate(self.input_batch.req_ids):
            tokens = list(self.forced.get(req_id, ()))
            ids[b, : len(tokens)] = torch.tensor(tokens, dtype=ids.dtype)
        if width == 1:
            ids.clamp_(min=0)  # the runner discards the samples of prompts that are not computed to their end
        return SamplerOutput(sampled_token_ids=ids.to(self.device), logprobs_tensors=None)

    def initialize_kv_cache_tensors(self, *_: Any, **__: Any) -> dict[str, torch.Tensor]:
        return {}

    def set_active_loras(self, *_: Any, **__: Any) -> None:
        pass

    def _zero_block_ids(self, block_ids: Sequence[int]) -> None:
        pass

    def run(self, decision: Mapping[str, Any]) -> None:
        """Prepare a step, and return its samples."""
        self.forced = decision["sampled"]
        self.rotary = {one["req_id"]: one["rotary"] for one in decision["new"]}
        with torch.inference_mode():
            self.execute_model(scheduler_output(decision))
            self.sample_tokens(None)


@cache
def platform_runner(sizes: Sizes, drafts: str) -> tuple[type, VllmConfig, torch.device]:
    """Return the class of this platform's model runner, with plugins as in a worker, and the arguments of its
    constructor.

    drafts: the name of the method that proposes them, or the dotted path of a class.
    """
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN_SIZE,
        "intermediate_size": HIDDEN_SIZE, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1,
        "max_position_embeddings": sizes.max_model_len, "vocab_size": sizes.vocab_size, "torch_dtype": "float32",
    }  # fmt: skip
    if sizes.uses_mrope:
        sections = [HIDDEN_SIZE // 2 - 2 * (HIDDEN_SIZE // 6), HIDDEN_SIZE // 6, HIDDEN_SIZE // 6]
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections}
    folder = Path(tempfile.mkdtemp(prefix="bare-runner-"))
    (folder / "config.json").write_text(json.dumps(config))
    method = {"method": "custom_class", "model": drafts} if "." in drafts else {"method": drafts}
    vllm_config = EngineArgs(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        async_scheduling=False,
        enable_prefix_caching=False,
        max_model_len=sizes.max_model_len,
        max_num_seqs=sizes.max_num_reqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        num_gpu_blocks_override=NUM_BLOCKS,
        kv_cache_memory_bytes=1 << 20,
        gpu_memory_utilization=0.05,
        disable_log_stats=True,
        enable_lora=True,
        speculative_config=method | {"num_speculative_tokens": sizes.max_num_draft_tokens}
        if sizes.max_num_draft_tokens
        else None,
    ).create_engine_config()
    vllm_config.cache_config.num_gpu_blocks = NUM_BLOCKS
    for g, spec in enumerate(specs_of(sizes)):
        vllm_config.compilation_config.static_forward_context[f"layers.{g}"] = BareLayer(spec)
    with set_current_vllm_config(vllm_config):
        wrapper = WorkerWrapperBase()
        wrapper.init_worker([
            {
                "vllm_config": vllm_config, "local_rank": 0, "rank": 0, "is_driver_worker": True,
                "distributed_init_method": f"file://{folder}/process_group",
            }
        ])  # fmt: skip
        wrapper.worker.init_device()
    return type(wrapper.worker.model_runner), vllm_config, wrapper.worker.device


def specs_of(sizes: Sizes) -> list[Any]:
    """Return the KV cache specifications of one layer per group, with one number per token."""
    common = {"num_kv_heads": 1, "head_size": 1, "dtype": torch.int8}
    return [
        MambaSpec(block_size=group.block_size, shapes=((1,),), dtypes=(torch.int8,))
        if group.has_states
        else FullAttentionSpec(block_size=group.block_size, **common)
        if group.window is None
        else SlidingWindowSpec(block_size=group.block_size, sliding_window=group.window, **common)
        for group in sizes.kv_groups
    ]


def cache_config_of(sizes: Sizes) -> KVCacheConfig:
    """Return the configuration of a cache of these groups, without memory."""
    groups = [KVCacheGroupSpec([f"layers.{g}"], spec) for g, spec in enumerate(specs_of(sizes))]
    return KVCacheConfig(num_blocks=NUM_BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)


def bare_runner(sizes: Sizes, hooks: Callable[[type], type] = lambda runner_class: runner_class) -> Any:
    """Return this platform's runner without a model, with new memory. hooks: a function that returns a subclass of its
    class.
    """
    runner_class, vllm_config, device = platform_runner(sizes, f"{__name__}.NoDrafts")
    bare = hooks(type(f"Bare{runner_class.__name__}", (BareRunner, runner_class), {}))
    with set_current_vllm_config(vllm_config):
        runner = bare(vllm_config, device)
        runner.model = BareModel()
        runner.initialize_kv_cache(cache_config_of(sizes))
    return runner


# -- decisions of a scheduler ------------------------------------------------------------------------------------------


def scheduler_output(decision: Mapping[str, Any]) -> SchedulerOutput:
    """Return a decision of plain values (Foreword's `Decision`) in the form that vLLM's runner reads."""
    new = [
        NewRequestData(
            req_id=one["req_id"],
            prompt_token_ids=list(one["prompt_token_ids"]),
            mm_features=[
                MultiModalFeatureSpec(
                    data=None,
                    modality=feature["modality"],
                    identifier=feature["identifier"],
                    mm_position=PlaceholderRange(feature["offset"], feature["length"]),
                )
                for feature in one["features"]
            ],
            sampling_params=SamplingParams(max_tokens=1 << 20, detokenize=False, **one["sampling"]),
            pooling_params=None,
            block_ids=tuple(map(list, one["block_ids"])),
            num_computed_tokens=one["num_computed_tokens"],
            lora_request=LoRARequest(*one["adapter"]) if one["adapter"] else None,
            prefill_token_ids=[*one["prompt_token_ids"], *one["output_token_ids"]],
        )
        for one in decision["new"]
    ]
    cached = decision["cached"]
    return SchedulerOutput(
        scheduled_new_reqs=new,
        scheduled_cached_reqs=CachedRequestData(
            req_ids=[one["req_id"] for one in cached],
            resumed_req_ids={one["req_id"] for one in cached if one["resumed"]},
            new_token_ids=[],
            all_token_ids={one["req_id"]: list(one["all_token_ids"]) for one in cached if one["resumed"]},
            new_block_ids=[None if (ids := one["block_ids"]) is None else tuple(map(list, ids)) for one in cached],
            num_computed_tokens=[one["num_computed_tokens"] for one in cached],
            num_output_tokens=[one["num_output_tokens"] for one in cached],
        ),
        num_scheduled_tokens=dict(decision["counts"]),
        total_num_scheduled_tokens=sum(decision["counts"].values()),
        scheduled_spec_decode_tokens={req_id: list(ids) for req_id, ids in decision["drafts"].items()},
        scheduled_encoder_inputs={},
        finished_req_ids=set(decision["finished"]),
        free_encoder_mm_hashes=[],
        preempted_req_ids=set(decision["preempted"]),
    )
