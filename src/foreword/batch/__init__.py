"""Step preparation for LLM engines: from "these requests, this many tokens each" to every tensor a forward pass reads.

    states = RequestStates(max_num_reqs=…, max_model_len=…, vocab_size=…, kv_groups=[KVGroup(block_size=16)])
    buffers = InputBuffers.for_states(states, max_num_batched_tokens=…)
    states.add_request(NewRequest("a", prompt_token_ids=[…], block_ids=[[…]]))
    batch = prepare_inputs(states, {"a": 5}, buffers)      # the step's tensors: batch.input_ids, batch.slot_mapping, …
    print(batch.explain())                                 # the same as tables
    states.commit(batch, {"a": [token]})                   # what was sampled

The package needs only NumPy. Tensors that few steps need, and the arguments of other kernels, are computed by functions
of a batch: those exported here, and those of `foreword.batch.adapters`. The public names are those of this package,
`foreword.batch.adapters` with its
module `vllm`, `foreword.batch.difference`, and the tables: `foreword.batch.step.layout` (the tensors of a step),
`foreword.batch.proof.spec` (what each of them means), `foreword.batch.values.parameters` and `sampling_params`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from foreword.batch.features.bidirectional import bidirectional_ranges
from foreword.batch.features.classify import is_decode, split_decodes_and_prefills, uniform_decode_len
from foreword.batch.features.context_parallel import share_prefill
from foreword.batch.features.embeds import get_token_id, is_token_ids, prompt_embeds
from foreword.batch.features.entries import entry_owners
from foreword.batch.features.explain import Explanation, token_sources
from foreword.batch.features.graph import GraphInputs, graph_inputs
from foreword.batch.features.lora import LoraMapping, lora_mapping
from foreword.batch.features.masks import attention_mask, discard_mask
from foreword.batch.features.micro_batches import MicroBatch, micro_batches
from foreword.batch.features.multimodal import (
    encoder_seq_lens,
    mm_inputs,
    mrope_positions,
    prefilling_with,
    stage_mrope_positions,
)
from foreword.batch.features.paged import kernel_block_table
from foreword.batch.features.pooling import PoolingMetadata, pooling_metadata
from foreword.batch.features.recurrent import state_indices
from foreword.batch.features.sampling import logits_sampling_metadata, sampling_metadata, step_needs
from foreword.batch.prepare.dummy import make_dummy
from foreword.batch.prepare.input_batch import InputBatch
from foreword.batch.prepare.prepare import admit_drafts, advance, backend_of, prepare_inputs, resolve
from foreword.batch.prepare.ring import StagingRing
from foreword.batch.state.batch_update import AddedRow, BatchUpdate, BatchUpdates
from foreword.batch.state.block_table import BlockTable, ContentIds
from foreword.batch.state.request_states import RequestStates
from foreword.batch.state.sampling_metadata import SamplingMetadata, StepNeeds
from foreword.batch.step.buffers import InputBuffers
from foreword.batch.step.tensors import BatchTensors, StaleBatchError, TensorBackend
from foreword.batch.values.attention import AttentionState, visible
from foreword.batch.values.block_ops import BlockOps
from foreword.batch.values.checked import CheckedParams, CheckedPrompt
from foreword.batch.values.graph_promise import GraphPromise
from foreword.batch.values.kv_groups import ContextParallel, KVGroup
from foreword.batch.values.padding import PaddingBuckets
from foreword.batch.values.parameters import Need
from foreword.batch.values.plan import Backend, Check, Plan
from foreword.batch.values.pooling import PoolingParams, PoolingTask, PoolingType
from foreword.batch.values.requests import (
    LoraRequest,
    MultiModalFeature,
    NewRequest,
    NewRequests,
    PromptInputs,
    TokenIds,
)
from foreword.batch.values.sampling_params import SamplingParams
from foreword.batch.values.structured_outputs import Origin, StructuredOutputs
from foreword.errors import CapacityError, PlanError, RequestError

if TYPE_CHECKING:
    from foreword.batch.difference import DifferenceRecorder, StepDifference, apply_difference
    from foreword.batch.proof.checker import CacheChecker
    from foreword.batch.proof.contents import CacheContents, SlotFault
    from foreword.batch.proof.group_slots import GroupUse
    from foreword.batch.proof.validator import validate
from foreword.seeds import derived_seed

__all__ = [
    "AddedRow", "AttentionState", "Backend", "BatchTensors", "BatchUpdate", "BatchUpdates", "BlockOps", "BlockTable",
    "CacheChecker", "CacheContents", "CapacityError", "Check", "CheckedParams", "CheckedPrompt", "ContentIds",
    "ContextParallel", "DifferenceRecorder", "Explanation", "GraphInputs", "GraphPromise", "GroupUse", "InputBatch",
    "InputBuffers", "KVGroup", "LoraMapping", "LoraRequest", "MicroBatch", "MultiModalFeature", "Need", "NewRequest",
    "NewRequests", "Origin", "PaddingBuckets", "Plan", "PlanError", "PoolingMetadata", "PoolingParams", "PoolingTask",
    "PoolingType", "PromptInputs", "RequestError", "RequestStates", "SamplingMetadata", "SamplingParams", "SlotFault",
    "StagingRing", "StaleBatchError", "StepDifference", "StepNeeds", "StructuredOutputs", "TensorBackend", "TokenIds",
    "admit_drafts", "advance", "apply_difference", "attention_mask", "backend_of", "bidirectional_ranges",
    "derived_seed", "discard_mask", "encoder_seq_lens", "entry_owners", "get_token_id", "graph_inputs", "is_decode",
    "is_token_ids", "kernel_block_table", "logits_sampling_metadata", "lora_mapping", "make_dummy", "micro_batches",
    "mm_inputs", "mrope_positions", "pooling_metadata", "prefilling_with", "prepare_inputs", "prompt_embeds", "resolve",
    "sampling_metadata", "share_prefill", "split_decodes_and_prefills", "stage_mrope_positions", "state_indices",
    "step_needs", "token_sources", "uniform_decode_len", "validate", "visible",
]  # fmt: skip

_LAZY = {
    "CacheChecker": "foreword.batch.proof.checker",
    "CacheContents": "foreword.batch.proof.contents",
    "DifferenceRecorder": "foreword.batch.difference",
    "GroupUse": "foreword.batch.proof.group_slots",
    "SlotFault": "foreword.batch.proof.contents",
    "StepDifference": "foreword.batch.difference",
    "apply_difference": "foreword.batch.difference",
    "validate": "foreword.batch.proof.validator",
}


def __dir__() -> list[str]:
    return __all__


if not TYPE_CHECKING:  # type checkers would take any name for an attribute

    def __getattr__(name: str) -> Any:
        """Import a name that the steps of an engine do not need, on first use."""
        if name not in _LAZY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_LAZY[name]), name)
