"""Repeat the worked examples of other systems' documents with real steps, and compare them number by number."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Literal

import numpy as np

from foreword.batch import InputBatch
from foreword.insight.toy import given_step, toy_steps

WIDTH = 120  # characters of a line without a terminal
LABEL = 28
ExampleName = Literal["vllm-ascend", "model-runner", "nano-vllm"]


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a document. label: its name in the document. text: as it is printed there, with "…" for omissions.

    here: the name of the corresponding value, for `value_here`; "" if there is none. note: the reason of a difference,
    or a remark.
    """

    label: str
    text: str
    here: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Run:
    """Steps of a document. steps: makes the steps, and records them if a file is given. figures: the figures of each
    step.
    """

    title: str
    steps: Callable[[Path | None], Iterator[InputBatch]]
    figures: tuple[tuple[Figure, ...], ...]


@dataclass(frozen=True, slots=True)
class Example:
    """All worked examples of a document."""

    document: str
    runs: tuple[Run, ...]


def _explained(name: str, batch: InputBatch) -> object:
    return attrgetter(name)(batch.explain())


VALUES: Mapping[str, Callable[[InputBatch], object]] = {
    "token names": lambda b: [f"T_{r}_{p}" for r, p in zip(b.req_indices, b.positions[: b.num_tokens], strict=True)],
    "attention_mask.shape": lambda b: np.asarray(b.attention_mask()).shape,
    "block_table": lambda b: b.block_table[0],
    "slot_mapping": lambda b: b.slot_mapping[0],
    "num_blocks": lambda b: b.num_blocks[0],
    "num_blocks.sum()": lambda b: b.num_blocks[0].sum(),
    "block_table.width": lambda b: b.states.block_tables[0].width,
    "query_start_loc[1:]": lambda b: b.query_start_loc[1:],
    "positions - num_computed": lambda b: b.positions - b.num_computed_tokens[b.req_indices],
    "token_indices // S": lambda b: b.explain().token_indices // b.states.block_tables[0].group.block_size,
    "to_flash_attn().cu_seqlens_q": lambda b: b.to_flash_attn().cu_seqlens_q,
    "to_flash_attn().cu_seqlens_k": lambda b: b.to_flash_attn().cu_seqlens_k,
    "to_flash_attn().block_table": lambda b: b.to_flash_attn().block_table,
    **{
        name: attrgetter(name)
        for name in (
            "req_indices", "positions", "input_ids", "query_start_loc", "seq_lens", "num_computed_tokens",
            "num_scheduled_tokens", "num_reqs", "num_tokens", "num_tokens_padded", "max_query_len", "logits_indices",
        )
    },
    **{
        name: partial(_explained, name)
        for name in ("token_indices", "block_table_indices", "block_numbers", "block_offsets")
    },
}  # fmt: skip
"""The name of a value → the function that reads it from a step."""


def value_here(batch: InputBatch, here: str) -> list[str]:
    """Return the entries of a value of a step, row by row."""
    return list(map(str, np.asarray(VALUES[here](batch)).ravel().tolist()))


def agrees(text: str, values: list[str]) -> bool:
    """Return whether a figure shows these values in their order: all of them, or all except omissions at each "…"."""
    pieces = [re.findall(r"T_\d+_\d+|-?\d+", piece) for piece in text.split("…")]
    first, *middle, last = pieces if len(pieces) > 1 else [*pieces, []]
    if len(pieces) == 1:
        return first == values
    if values[: len(first)] != first:
        return False
    at = len(first)
    for piece in middle:
        starts = (i for i in range(at, len(values) - len(piece) + 1) if values[i : i + len(piece)] == piece)
        if (found := next(starts, None)) is None:
            return False
        at = found + len(piece)
    return len(values) - len(last) >= at and values[len(values) - len(last) :] == last


def compared(batch: InputBatch, figures: tuple[Figure, ...], width: int | None = None) -> str:
    """Return the figures of a document for a step, each with the value here and with the place and reason of a
    difference.
    """
    lines = ["The document's figures, and = what they are here (≠: they differ)"]
    for figure in figures:
        values = value_here(batch, figure.here) if figure.here else []
        is_same = bool(figure.here) and agrees(figure.text, values)
        words = figure.text if not figure.here else f"{figure.text} {'=' if is_same else '≠'} {figure.here}"
        lines += _entry(figure.label, words, width)
        if figure.here and not is_same:
            lines += _entry("", f"here [{', '.join(values)}]", width)
        if figure.note:
            lines += _entry("", figure.note, width)
    return "\n".join(lines)


def _entry(label: str, text: str, width: int | None) -> list[str]:
    first, indent = f"  {label:<{LABEL}}", " " * (LABEL + 2)
    return textwrap.wrap(text, width or WIDTH, initial_indent=first, subsequent_indent=indent, break_on_hyphens=False)


_THREE = Run(
    "block size 2, at most 12 tokens per request, 10 tokens per step; prompts of 3, 2 and 8 tokens",
    lambda record: toy_steps([3, 2, 8], budget=10, block_size=2, max_model_len=12, steps=2, record=record),
    (
        (
            Figure("request indices", "[0, 0, 0, 1, 1, 2, 2, 2, 2, 2]", "req_indices"),
            Figure("token positions", "[0, 1, 2, 0, 1, 0, 1, 2, 3, 4]", "positions"),
            Figure("token indices", "[0, 1, 2, 12, 13, 24, 25, 26, 27, 28]", "token_indices"),
            Figure(
                "Input IDs", "[T_0_0, T_0_1, T_0_2, T_1_0, T_1_1, T_2_0, T_2_1, T_3_2, T_3_3, T_3_4]", "token names",
                "T_3_2 to T_3_7 of the document are tokens of request 2. Here the id of T_r_p is 1000 + 100·r + p.",
            ),
            Figure("block table", "[1, 2, 0, 0, 0, 0] [3, 0, 0, 0, 0, 0] [4, 5, 6, 0, 0, 0]", "block_table"),
            Figure("block table indices", "[0, 0, 1, 6, 6, 12, 12, 13, 13, 14]", "block_table_indices"),
            Figure("device block number", "[1, 1, 2, 3, 3, 4, 4, 5, 5, 6]", "block_numbers"),
            Figure("block offsets", "[0, 1, 0, 0, 1, 0, 1, 0, 1, 0]", "block_offsets"),
            Figure("slot mapping", "[2, 3, 4, 6, 7, 8, 9, 10, 11, 12]", "slot_mapping"),
            Figure("query start location", "[0, 3, 5, 10]", "query_start_loc"),
            Figure("sequence length", "[3, 2, 5]", "seq_lens"),
            Figure("number of computed tokens", "[0, 0, 0]", "num_computed_tokens"),
            Figure("number of requests", "3", "num_reqs"),
            Figure(
                "number of tokens", "[3, 2, 5]", "num_scheduled_tokens",
                "The document defines it as the total, and prints the count of each request. num_tokens is the total.",
            ),
            Figure("max query len", "5", "max_query_len"),
            Figure("attention mask", "5 * 5", "attention_mask.shape"),
        ),
        (
            Figure("Scheduled token count", "[1, 1, 3]", "num_scheduled_tokens"),
            Figure("request indices", "[0, 1, 2, 2, 2]", "req_indices"),
            Figure("token positions", "[3, 2, 5, 6, 7]", "positions"),
            Figure("token indices", "[3, 14, 29, 30, 31]", "token_indices"),
            Figure(
                "Input IDs", "[T_0_3, T_1_2, T_3_5, T_3_6, T_3_7]", "token names",
                "T_3_5 to T_3_7 are tokens of request 2. The notes on _process_reqs say that T_0_2 goes into block 2 "
                "in this step: it is T_0_3, since T_0_2 was computed in step 1.",
            ),
            Figure(
                "block table", "[1, 2, 0, 0, 0, 0] [3, 7, 0, 0, 0, 0] [4, 5, 6, 8, 0, 0]", "block_table",
                "The notes on _process_reqs say that request 2 goes into blocks 7 and 8: it is 6 and 8, as their own "
                "device_block_numbers have it.",
            ),
            Figure("block table indices", "[1, 7, 14, 15, 15]", "block_table_indices"),
            Figure("device block number", "[2, 7, 6, 8, 8]", "block_numbers"),
            Figure("block offsets", "[1, 0, 1, 0, 1]", "block_offsets"),
            Figure("slot mapping", "[5, 14, 13, 16, 17]", "slot_mapping"),
            Figure("query start location", "[0, 1, 2, 5]", "query_start_loc"),
            Figure("sequence length", "[4, 3, 8]", "seq_lens"),
            Figure("number of computed tokens", "[3, 2, 5]", "num_computed_tokens"),
            Figure("number of requests", "3", "num_reqs"),
            Figure("max query len", "3", "max_query_len"),
            Figure("attention mask", "5 * 8", "attention_mask.shape"),
        ),
    ),
)  # fmt: skip

_NOT_DIVIDED = Run(
    "why block table indices are not token indices // block size: block size 2, at most 5 tokens per request",
    lambda record: given_step([2, 5, 3], [0, 0, 0], block_size=2, max_model_len=5, record=record),
    (
        (
            Figure("max_num_blocks_per_req", "3", "block_table.width", "The document writes 5//2=3: it is rounded up."),
            Figure("token_indices", "[0, 1, 0, 1, 2, 3, 4, 0, 1, 2]", "positions"),
            Figure(
                "token_indices", "[0, 1, 0, 1, 2, 3, 4, 0, 1, 2]", "token_indices",
                "The document's list is that of the positions. An index in the token table has 5·r added.",
            ),
            Figure(
                "token_indices // block_size", "[0, 0, 0, 0, 1, 1, 2, 0, 0, 1]", "token_indices // S",
                "The document's point holds for either list: no list divided by S is block_table_indices, since a row "
                "of 5 tokens is not a row of 3 blocks of 2.",
            ),
        ),
    ),
)  # fmt: skip

_FIVE = Run(
    "two decodes, two prompts and a chunk: block size 16, at most 240 tokens per request, 200 tokens per step",
    lambda record: given_step(
        [1, 1, 93, 75, 30], [54, 145, 0, 0, 0],
        block_size=16, max_model_len=240, prompt_lens=[54, 145, 93, 75, 60], record=record,
    ),
    (
        (
            Figure("total_num_scheduled_tokens", "200", "num_tokens"),
            Figure("num_scheduled_tokens", "[1, 1, 93, 75, 30]", "num_scheduled_tokens"),
            Figure("num_input_tokens", "200", "num_tokens_padded"),
            Figure("num_reqs", "5", "num_reqs"),
            Figure("num_computed_tokens", "[54, 145, 0, 0, 0]", "num_computed_tokens"),
            Figure("req_indices", "[0, 1, 2, 2, …, 2, 3, 3, …, 3, 4, 4, …, 4]", "req_indices"),
            Figure("cu_num_tokens", "[1, 2, 95, 170, 200]", "query_start_loc[1:]"),
            Figure("arange", "[0, 0, 0, 1, 2, …, 92, 0, 1, …, 74, 0, 1, …, 29]", "positions - num_computed"),
            Figure(
                "positions_np", "[54, 145, 0, 1, 2, …, 92, 0, 1, 2, …, 74, …, 0, 1, 2, …, 29]", "positions",
                "Between 74 and 0 nothing is left out.",
            ),
            Figure(
                "token_indices, M = 240", "[54, 385, 480, 481, …, 572, 720, 721, …, 794, 960, …, 989]",
                "token_indices", "The document prints them as 54, 145 + M, 0 + 2 * M and so on.",
            ),
            Figure(
                "input_ids_cpu", "[2039, 8347, 1923, …, 273, 8211, …, 48, 293, …, 21, …, 104]", "",
                "The document made these up. Here an id tells its place: 10000 + 1000·r + p.",
            ),
            Figure("max_num_blocks_per_req", "15", "block_table.width"),
            Figure(
                "blocks of each request", "[4, 10, 6, 5, 2]", "num_blocks",
                "The document rounds up computed tokens / 16. What counts is computed and scheduled tokens: 55 and "
                "146 need as many blocks as 54 and 145.",
            ),
            Figure(
                "block_table",
                "[1, 2, 3, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0] [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 0, 0, 0, 0, 0] "
                "[15, 16, 17, 18, 19, 20, 0, 0, 0, 0, 0, 0, 0, 0, 0] [21, 22, 23, 24, 25, 0, 0, 0, 0, 0, 0, 0, 0, 0, "
                "0] [26, 27, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]",
                "block_table",
            ),
            Figure("valid blocks", "27", "num_blocks.sum()"),
            Figure(
                "block_table_indices", "[3, 24, 30, 30, …, 35, 45, 45, …, 49, 60, 60, …, 61]", "block_table_indices"
            ),
            Figure("block_numbers", "[4, 14, 15, 15, …, 20, 21, 21, …, 25, 26, 26, …, 27]", "block_numbers"),
            Figure("block_offsets", "[6, 1, 0, 1, …, 12, 0, 1, …, 10, 0, 1, …, 13]", "block_offsets"),
            Figure("slot_mapping", "[70, 225, 240, 241, …, 332, 336, 337, …, 410, 416, 417, …, 445]", "slot_mapping"),
            Figure(
                "query_start_loc_np", "[0, 1, 1, 2, 95, 170, 200]", "query_start_loc",
                "Five requests have six ends: the document prints the 1 twice.",
            ),
            Figure("seq_lens_np", "[55, 146, 93, 75, 30]", "seq_lens"),
            Figure("attn_mask", "(200, 146)", "attention_mask.shape", "(num_input_tokens, max_seq_len) there."),
            Figure(
                "kv_caches[i].shape", "[2, 5146, 16, 4, 128]", "",
                "The cache itself belongs to an executor; a step has only slots and block numbers.",
            ),
        ),
    ),
)  # fmt: skip

_VARLEN = Run(
    "prompts of 11 and 17 tokens in blocks of 256, which are numbered from 0",
    lambda record: toy_steps(
        [11, 17], budget=28, block_size=256, max_model_len=512, steps=2, null_block=-1, record=record
    ),
    (
        (
            Figure("tokens", "28", "num_tokens"),
            Figure("positions", "[0, 1, 2, …, 9, 10, 0, 1, 2, …, 15, 16]", "positions"),
            Figure("cu_seqlens_q", "[0, 11, 28]", "to_flash_attn().cu_seqlens_q"),
            Figure("cu_seqlens_k", "[0, 11, 28]", "to_flash_attn().cu_seqlens_k"),
            Figure("slot_mapping", "[0, 1, 2, …, 9, 10, 256, 257, …, 271, 272]", "slot_mapping"),
            Figure(
                "cu_seqlens_q[1:] - 1", "[10, 27]", "logits_indices",
                "The document computes the rows of the last tokens in its code.",
            ),
        ),
        (
            Figure(
                "input_ids", "[T_0_11, T_1_17]", "token names",
                "The two tokens that step 1 sampled; the document prints no ids.",
            ),
            Figure("positions", "[11, 17]", "positions"),
            Figure("slot_mapping", "[11, 273]", "slot_mapping"),
            Figure(
                "cu_seqlens_q", "not updated", "",
                "nano-vllm has one function for each kind of step. Here every step has query_start_loc: [0, 1, 2].",
            ),
        ),
    ),
)  # fmt: skip

_PADDED = Run(
    "block tables of different lengths, as one tensor; the lengths of 600 and 1100 tokens are not the document's",
    lambda record: given_step(
        [1, 1], [600, 1100], block_size=256, max_model_len=2048, null_block=-1,
        block_ids=[[10, 25, 3], [101, 78, 5, 9, 11]], record=record,
    ),
    (
        (
            Figure(
                "block_tables", "[10, 25, 3, -1, -1] [101, 78, 5, 9, 11]", "to_flash_attn().block_table",
                "As wide as the longest row of the step; batch.block_table has the width of max_model_len.",
            ),
        ),
    ),
)  # fmt: skip

EXAMPLES: Mapping[ExampleName, Example] = {
    "vllm-ascend": Example(
        'vLLM Ascend\'s page "Prepare inputs for model forwarding", and the notes on its _process_reqs (v0.8.4rc2)',
        (_THREE, _NOT_DIVIDED),
    ),
    "model-runner": Example("the notes \"ModelRunner_prepare_inputs\" on vLLM's and vLLM Ascend's runners", (_FIVE,)),
    "nano-vllm": Example("notes on nano-vllm's prepare_prefill and prepare_decode", (_VARLEN, _PADDED)),
}
"""Name → the examples of a document."""
