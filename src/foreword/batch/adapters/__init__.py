"""Convert between a step and the forms that other systems use: functions of a batch, and `vllm.apply` for vLLM's
scheduler output.
"""

from foreword.batch.adapters.chunked_local import chunked_local
from foreword.batch.adapters.common_attention_metadata import common_attention_metadata
from foreword.batch.adapters.dense import dense_inputs
from foreword.batch.adapters.nano_vllm import nano_vllm_context
from foreword.batch.adapters.page_size_one import token_tables
from foreword.batch.adapters.sglang import ForwardBatch, ForwardMode, sglang_forward_batch
from foreword.batch.adapters.vllm_ascend import AscendMasks, AscendMetadata, AscendState, ascend_metadata, ascend_state
from foreword.batch.features.indexer import IndexerInputs, chosen_slots, indexer_inputs
from foreword.batch.features.paged import flash_attn_varlen, flashinfer_plan

__all__ = [
    "AscendMasks", "AscendMetadata", "AscendState", "ForwardBatch", "ForwardMode", "IndexerInputs", "ascend_metadata",
    "ascend_state", "chosen_slots", "chunked_local", "common_attention_metadata", "dense_inputs", "flash_attn_varlen",
    "flashinfer_plan", "indexer_inputs", "nano_vllm_context", "sglang_forward_batch", "token_tables",
]  # fmt: skip
