"""The tensors of a step: the one table from which buffers, views, native and device pointers, and the page follow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from foreword.batch.state.request_states import RequestStates
from foreword.batch.values.fields import Field

__all__ = ["EXTENTS", "FIELDS", "GATHERED", "OPTIONAL", "PAD_SLOT_ID", "STEP", "Extent", "Field", "Scalars", "shape_of"]

PAD_SLOT_ID = -1


class Scalars(NamedTuple):
    """The scalars of a step, in the order of ``InputBuffers.scalars`` (int64)."""

    num_reqs: int
    num_tokens: int
    num_reqs_padded: int
    num_tokens_padded: int
    num_logits: int
    num_draft_tokens: int
    max_query_len: int
    max_seq_len: int
    attention_state: int
    num_unresolved: int  # requests with placeholders


STEP = (
    Field("scalars", ("N",), "int64"),
    Field("idx_mapping", ("B",), "int32", -1, on_device=True),
    Field("num_scheduled_tokens", ("B",), "int32"),
    Field("num_draft_tokens", ("B",), "int32"),
    Field("num_computed_tokens", ("B",), "int32", 0, on_device=True),
    Field("num_placeholders", ("B",), "int32"),
    Field("is_prefilling", ("B",), "bool", 0, on_device=True),
    Field("row_generation", ("B",), "int64"),
    Field("query_start_loc", ("Bp+1",), "int32", "T", on_device=True),
    Field("seq_lens", ("Bp",), "int32", 0, on_device=True),
    Field("dcp_local_seq_lens", ("Bp",), "int32", 0, on_device=True),
    Field("cu_num_logits", ("B+1",), "int32", on_device=True),
    Field("cu_num_draft_tokens", ("B+1",), "int32"),
    Field("req_indices", ("T",), "int32", on_device=True),
    Field("positions", ("Tp",), "int64", 0, on_device=True),
    Field("input_ids", ("Tp",), "int32", 0, on_device=True),
    Field("slot_mapping", ("Tp",), "int64", PAD_SLOT_ID, per_group=True, on_device=True),
    Field("logits_indices", ("L",), "int64", 0, on_device=True),
    Field("expanded_idx_mapping", ("L",), "int32", -1, on_device=True),
    Field("expanded_local_pos", ("L",), "int32", on_device=True),
    Field("target_logits_indices", ("D",), "int64"),
    Field("bonus_logits_indices", ("B",), "int64"),
    Field("draft_token_ids", ("D",), "int32"),
    Field("samples", ("B",), "bool"),  # in an advanced step: requests whose samples count
    # By the step before: tokens, requests, logit rows; by the last gathered step: requests.
    Field("written", ("4",), "int64"),
    Field("block_table", ("Bp", "K"), "int32", "null", per_group=True, on_device=True),
    Field("num_blocks", ("B",), "int32", 0, per_group=True, on_device=True),  # for the gathered rows
    Field("num_nulled", ("B",), "int32", per_group=True),  # entries of a gathered row nulled below the window
    Field("content_id", ("B",), "int64", per_group=True),  # the content a gathered row copies, 0: unknown
)

# Allocated on first use, at an address that stays: tensors that few steps have, and other kernels' arguments.
OPTIONAL = (
    Field("is_token_ids", ("Tp",), "bool", 1),
    Field("is_mm_embed", ("Tp",), "bool", 0),
    Field("bidirectional_ranges", ("Tp", "2"), "int32", 0),
    Field("mrope_positions", ("dims", "Tp"), "int64", 0),
    Field("encoder_seq_lens", ("Bp",), "int32", 0),
    Field("lora_requests", ("B",), "int32", 0),
    Field("lora_tokens", ("Tp",), "int32", 0, on_device=True),
    Field("lora_logits", ("L",), "int32", 0),
    Field("discard_mask", ("Bp",), "bool", 1),
    Field("state_read", ("Bp",), "int32", -1, per_group=True),
    Field("state_write", ("Bp",), "int32", -1, per_group=True),
    Field("state_drafts", ("Bp", "d"), "int32", -1, per_group=True),
    Field("kernel_block_table", ("Bp", "K·r"), "int32", "null", per_group=True),
    Field("cu_seqlens_k", ("B+1",), "int32", per_group=True),
    Field("key_ranges", ("T", "2"), "int32", per_group=True),
    Field("varlen_block_table", ("B", "K"), "int32", -1, per_group=True),
    Field("kv_indptr", ("B+1",), "int32", per_group=True),
    Field("kv_indices", ("B·K",), "int32", per_group=True),
    Field("kv_last_page_len", ("B",), "int32", per_group=True),
    Field("slot_mapping_int32", ("Tp",), "int32", PAD_SLOT_ID, per_group=True),
    Field("req_to_token", ("B", "M"), "int64", 0, per_group=True),
    Field("req_to_token_int32", ("B", "M"), "int32", 0, per_group=True),
    Field("req_pool_indices", ("B",), "int64", per_group=True),
    Field("input_ids_int64", ("T",), "int64"),
    Field("seq_lens_int64", ("B",), "int64"),
    Field("orig_seq_lens", ("B",), "int32"),
    Field("logits_indices_padded", ("Lp",), "int64", 0),
    Field("local_cu_seqlens_q", ("V+1",), "int32"),
    Field("local_seqlens_k", ("V",), "int32"),
    Field("local_block_table", ("V", "C/S"), "int32", "null", per_group=True),
    Field("local_req_indices", ("V",), "int64"),
    Field("share_token_indices", ("Tp",), "int64", 0),
    Field("share_restore_indices", ("Tp",), "int64"),
    Field("share_req_indices", ("2B",), "int64"),
    Field("share_query_start_loc", ("2B+1",), "int32"),
    Field("share_seq_lens", ("2B",), "int32"),
    Field("micro_query_start_loc", ("B+1",), "int32"),
    Field("micro_num_computed_tokens", ("B",), "int32"),
    Field("micro_seq_lens", ("B",), "int32"),
    Field("micro_logits_indices", ("L",), "int64"),
    Field("graph_query_start_loc", ("Bp+1",), "int32"),
)
FIELDS: Mapping[str, Field] = {field.name: field for field in (*STEP, *OPTIONAL)}

GATHERED = ("block_table", "num_blocks")
"""The tensors that a step has with gather_block_tables alone."""


class Extent(NamedTuple):
    """The number of entries of an axis in a step: a scalar of the step, plus ``extra``."""

    scalar: str
    extra: int


EXTENTS: Mapping[str, Extent] = {
    "B": Extent("num_reqs", 0),
    "B+1": Extent("num_reqs", 1),
    "Bp": Extent("num_reqs_padded", 0),
    "Bp+1": Extent("num_reqs_padded", 1),
    "T": Extent("num_tokens", 0),
    "Tp": Extent("num_tokens_padded", 0),
    "L": Extent("num_logits", 0),
    "D": Extent("num_draft_tokens", 0),
}


def shape_of(
    field: Field, states: RequestStates, max_num_batched_tokens: int, *, group: int = 0, size: int = 0
) -> tuple[int, ...]:
    """Return the shape of the largest step's tensor, of one KV group where there is one per group.

    size: the number of entries of an axis that the states do not determine (``dims``, ``Lp``, ``C/S``).
    """
    table = states.block_tables[group]
    reqs, tokens, drafts = states.max_num_reqs, max_num_batched_tokens, states.max_num_draft_tokens
    pieces = 2 * reqs + tokens // max(size * table.tokens_per_block, 1)
    capacity = {
        "N": len(Scalars._fields),
        "B": reqs,
        "B+1": reqs + 1,
        "Bp": reqs,
        "Bp+1": reqs + 1,
        "T": tokens,
        "Tp": tokens,
        "L": min(tokens, reqs * (1 + drafts)),
        "D": reqs * drafts,
        "d": drafts,
        "2": 2,
        "4": 4,
        "K": table.width,
        "K·r": table.width * (table.group.block_size // (table.group.kernel_block_size or table.group.block_size)),
        "B·K": reqs * table.width,
        "M": states.max_model_len,
        "dims": size,
        "Lp": size,
        "2B": 2 * reqs,
        "2B+1": 2 * reqs + 1,
        "C/S": size,
        "V": pieces,
        "V+1": pieces + 1,
    }
    return tuple(capacity[axis] for axis in field.shape)
