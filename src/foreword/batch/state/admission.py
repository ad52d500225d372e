"""Check a new request and convert it to arrays, before anything changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from foreword.arrays import I32
from foreword.batch.state.block_table import BlockTable
from foreword.batch.state.extras import GivenExtras, checked_extras, shape_of
from foreword.batch.state.loras import LoraUsers
from foreword.batch.state.sampling_columns import COLUMNS, GIVEN
from foreword.batch.values.checked import CheckedParams, CheckedPrompt
from foreword.batch.values.requests import NewRequest, NewRequests, TokenIds, per_request
from foreword.batch.values.sampling_params import SamplingParams
from foreword.errors import CapacityError, RequestError
from foreword.integers import as_int32, as_integer, is_int32


class NewRow(NamedTuple):
    """The contents of a new row: prompt, outputs, blocks per KV group (int32), the adapter's number, parameters, and
    values that few requests have.
    """

    prompt: I32
    outputs: I32
    num_computed_tokens: int
    blocks: list[I32]
    lora_id: int
    params: SamplingParams | None
    extras: GivenExtras


def checked(
    request: NewRequest, *, max_model_len: int, vocab_size: int, tables: Sequence[BlockTable], loras: LoraUsers
) -> NewRow:
    """Return the request in arrays. Raise RequestError for wrong values, CapacityError past the end of a block-table
    row.
    """
    rid = request.req_id
    prompt = _prompt_ids(request, vocab_size)
    outputs = token_ids(rid, "output_token_ids", request.output_token_ids, vocab_size)
    known = len(prompt) + len(outputs)
    if known > max_model_len:
        limit, fix = f"is longer than max_model_len = {max_model_len}", "Shorten it, or build with a larger one."
        raise RequestError(rid, "prompt_token_ids", f"{known} tokens", limit, fix)
    computed, lora_id = as_integer(request.num_computed_tokens), as_integer(request.lora_id)
    if computed is None or not 0 <= computed < known:
        limit = f"must be in [0, {known - 1}]"
        fix = "At least the last known token has to be computed to sample after it."
        raise RequestError(rid, "num_computed_tokens", request.num_computed_tokens, limit, fix)
    if lora_id is None or not is_int32(lora_id, 0):
        limit = "must be the number of an adapter"
        raise RequestError(rid, "lora_id", request.lora_id, limit, "Use 0 for no adapter, or 1 and up.")
    params = _params(request, vocab_size)
    blocks = check_blocks(rid, request.block_ids, tables, [0] * len(tables))
    _check_written(rid, blocks, tables, computed, known)
    lora_id = loras.checked(rid, lora_id, request.lora_request)
    return NewRow(prompt, outputs, computed, blocks, lora_id, params, checked_extras(request, len(prompt)))


def checked_sampling(new: NewRequests) -> dict[str, npt.NDArray[np.generic]]:
    """Return the columns of ``sampling`` in the types in which they are stored. Raise RequestError for a column that is
    unknown, does not have one entry per request, or does not contain numbers.
    """
    columns: dict[str, npt.NDArray[np.generic]] = {}
    for name, column in (new.sampling or {}).items():
        if name not in GIVEN:
            fix = f"Use one of {', '.join(sorted(GIVEN))}."
            raise RequestError(None, "sampling", name, "is not the name of a column", fix)
        values = per_request(name, column, len(new.req_ids))
        if values.dtype.kind not in "biuf":
            raise RequestError(None, name, column, "must be numbers", "Give one number per request.")
        columns[name] = values.astype(COLUMNS[name][0], copy=False)
    return columns


def check_blocks(
    rid: str, block_ids: Sequence[TokenIds], tables: Sequence[BlockTable], held: Sequence[int]
) -> list[I32]:
    """Return block_ids as int32, one array per KV group, for a row that holds held[g] blocks in group g."""
    given = len(block_ids) if isinstance(block_ids, Sequence | np.ndarray) else 0
    if given != len(tables):
        limit = f"the model has {len(tables)} KV groups"
        fix = f"Give one list of blocks per KV group: {[[]] * len(tables)} for none."
        raise RequestError(rid, "block_ids", f"{given} lists" if given else block_ids, limit, fix)
    if any(as_integer(ids) is not None for ids in block_ids):
        limit, one = "has a number in the place of a list of blocks", "[[3]] for block 3 of one group"
        raise RequestError(rid, "block_ids", block_ids, limit, f"Give one list of blocks per KV group: {one}.")
    blocks = [flat_int32(rid, f"block_ids[{g}]", ids) for g, ids in enumerate(block_ids)]
    for g, (table, ids, have) in enumerate(zip(tables, blocks, held, strict=True)):
        check_block_ids(rid, f"block_ids[{g}]", ids, table)
        if have + len(ids) > table.width:
            raise CapacityError(
                f"request {rid!r}: group {g} holds {table.width} blocks per row, enough for max_model_len; "
                f"it has {have} and was given {len(ids)} more",
                request=rid,
                tensor=f"block_table[{g}]",
                expected=table.width,
                got=have + len(ids),
            )
    return blocks


def check_block_ids(rid: str | None, field: str, ids: I32, table: BlockTable) -> None:
    """Raise RequestError for a number that is neither a block nor the null block. The table records a null block."""
    if not ids.size:
        return
    low = min(table.null_block, 0)
    if (lowest := ids.min()) < low:
        limit = "is not the number of a block"
        fix = f"Blocks are {low} or more; {table.null_block} means no block."
        raise RequestError(rid, field, int(lowest), limit, fix)
    table.note_nulls(lowest)


def _check_written(rid: str, blocks: Sequence[I32], tables: Sequence[BlockTable], computed: int, known: int) -> None:
    """Raise RequestError for a null block to which one of the tokens computed … known − 1 would be written."""
    for g, (table, ids) in enumerate(zip(tables, blocks, strict=True)):
        if table.may_hold_null:
            per_block = table.tokens_per_block
            first = computed // per_block
            nulls = np.flatnonzero(ids[first : -(-known // per_block)] == table.null_block)
            if nulls.size:
                k = first + int(nulls[0])
                limit = f"means no block, and tokens {k * per_block} … {(k + 1) * per_block - 1} would be written there"
                fix = "Give a block of the cache." + " With null_block=-1 blocks count from 0." * (
                    table.null_block == 0
                )
                raise RequestError(rid, f"block_ids[{g}][{k}]", table.null_block, limit, fix)


def token_ids(rid: str, field: str, ids: TokenIds, vocab_size: int) -> I32:
    """Return ids as int32 [n]; RequestError for one outside the vocabulary."""
    out = flat_int32(rid, field, ids)
    if out.size and (out.min() < 0 or out.max() >= vocab_size):
        i = int(np.argmax((out < 0) | (out >= vocab_size)))
        limit = f"must be a token id; the vocabulary has {vocab_size}"
        raise RequestError(rid, f"{field}[{i}]", int(out[i]), limit, "Remove it.")
    return out


def flat_int32(rid: str | None, field: str, ids: TokenIds) -> I32:
    """Return ids as int32 [n]; RequestError if they are not integers that fit."""
    array = as_int32(ids)
    if array is None or array.ndim != 1:
        limit = "must be a flat list of integers that fit int32"
        raise RequestError(rid, field, ids, limit, "Pass token or block ids.")
    return array


def _prompt_ids(request: NewRequest, vocab_size: int) -> I32:
    rid = request.req_id
    if request.prompt_token_ids is None:
        if request.prompt_embeds is None:
            fix = "Give the prompt's token ids or embeddings."
            raise RequestError(rid, "prompt_token_ids", None, "is missing", fix)
        shape = shape_of(request.prompt_embeds)
        if len(shape) != 2 or not shape[0]:
            limit = "must be [tokens, hidden] with at least one token"
            raise RequestError(rid, "prompt_embeds", shape, limit, "Give one vector per position.")
        return np.zeros(shape[0], np.int32)
    prompt = request.prompt_token_ids
    if isinstance(prompt, CheckedPrompt):
        if prompt.vocab_size == vocab_size:
            return prompt.token_ids
        prompt = prompt.token_ids
    ids = token_ids(rid, "prompt_token_ids", prompt, vocab_size)
    if not len(ids):
        raise RequestError(rid, "prompt_token_ids", [], "is empty", "Give at least one token.")
    return ids


def _params(request: NewRequest, vocab_size: int) -> SamplingParams | None:
    rid, params = request.req_id, request.sampling_params
    if isinstance(params, CheckedParams):
        if params.vocab_size == vocab_size:
            return params.params
        params = params.params
    if params is not None:
        if not isinstance(params, SamplingParams):
            raise RequestError(rid, "sampling_params", params, "expected SamplingParams or None", "Pass one of them.")
        params.check(rid, vocab_size)
    return params
