"""Requests as a scheduler admits them, one by one or many as columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

import numpy as np
import numpy.typing as npt

from foreword.arrays import F32, I32, AnyArray, Bools, Floats, Ints
from foreword.batch.values.checked import CheckedParams, CheckedPrompt
from foreword.batch.values.pooling import PoolingParams
from foreword.batch.values.sampling_params import SamplingParams
from foreword.errors import ConfigError, RequestError
from foreword.integers import is_int32


@dataclass(frozen=True, slots=True, eq=False)
class MultiModalFeature:
    """One encoder input of a prompt.

    identifier: the name of its output in the encoder cache (a content hash).
    offset, length: the placeholder range [offset, offset + length) of prompt positions.
    is_embed: bool [length], False for a position of the range that keeps its token (a separator); None: all are
    embedded.
    The encoder output has one row per embedded position, in order.
    """

    identifier: str
    offset: int
    length: int
    is_embed: Bools | None = None
    modality: str = "image"

    @property
    def embedded_ranges(self) -> list[tuple[int, int]]:
        """Return the runs [start, stop) of embedded prompt positions. They are the `NewRequest.bidirectional_ranges` of
        a model whose image positions attend to each other.
        """
        if self.is_embed is None:
            return [(self.offset, self.offset + self.length)]
        edges = np.flatnonzero(np.diff(np.concatenate(([0], self.is_embed, [0])).astype(np.int8))) + self.offset
        return [(int(start), int(stop)) for start, stop in edges.reshape(-1, 2)]

    @property
    def num_embeds(self) -> int:
        """Return the number of rows of the encoder output."""
        return self.length if self.is_embed is None else int(np.count_nonzero(self.is_embed))

    def check(self, req_id: str, prompt_len: int) -> None:
        """Raise RequestError for a range outside the prompt or a mask of another length."""
        if not (is_int32(self.offset, 0) and is_int32(self.length, 1) and self.offset + self.length <= prompt_len):
            got, limit = (self.offset, self.length), f"(offset, length) must be inside the prompt's {prompt_len} tokens"
            raise RequestError(req_id, "mm_features", got, limit, "Give the placeholder range of prompt_token_ids.")
        if self.is_embed is not None and np.shape(self.is_embed) != (self.length,):
            got, limit = np.shape(self.is_embed), f"is_embed must have {self.length} entries"
            raise RequestError(req_id, "mm_features", got, limit, "Give one truth value per placeholder.")


@dataclass(frozen=True, slots=True)
class LoraRequest:
    """The adapter of a request. lora_id: 1 or more, equal for equal adapters. (0 means no adapter, and has no
    LoraRequest.)
    """

    lora_id: int
    name: str
    path: str = ""

    def __post_init__(self) -> None:
        if not is_int32(self.lora_id, 1):
            raise ConfigError(f"LoraRequest(lora_id={self.lora_id!r}): must be 1 or more; 0 means no adapter")


TokenIds = Sequence[int] | Ints


@dataclass(frozen=True, slots=True, eq=False)
class NewRequest:
    """A request to admit, new or resumed (a resumed request has outputs).

    block_ids: one list of physical blocks per KV group: the cached prefix, and the blocks allocated so far. A null
    block
    (0, or −1 with null_block=−1) is an entry without a block, such as one below a sliding window. It is refused if a
    token that is not computed yet would be written to it; `prepare_inputs` refuses the same for blocks that are added
    later.
    num_computed_tokens: the number of tokens whose keys and values are already in those blocks (a prefix hit); fewer
    than prompt + outputs.
    lora_id: adapter, 0 for none; lora_request: the same with name and path.
    prompt_embeds: [prompt_len, hidden] in place of prompt_token_ids (None), or together with them and
    prompt_is_token_id [prompt_len] bool: whether a position is a token.
    mm_features: the encoder inputs of the prompt. mrope_positions: int32 [dims, n], rotary positions of the first n
    tokens, at most prompt + outputs; mrope_delta: the number that later tokens add to their position.
    bidirectional_ranges: ranges [start, stop) of prompt positions, ascending and disjoint, in which every token sees
    every other one (the images of some models, the prefix of a prefix-LM). No step may end inside one: see
    `bidirectional_ranges`.
    encoder_len: the number of tokens of an encoder-decoder's encoder. encoder_input: the input of the encoder, in the
    form that the model needs.
    pooling_params: how the hidden states are pooled, in place of sampling_params.
    A `CheckedPrompt` and `CheckedParams` with the states' vocabulary are not checked again.
    """

    req_id: str
    prompt_token_ids: TokenIds | CheckedPrompt | None
    block_ids: Sequence[TokenIds]
    output_token_ids: TokenIds = ()
    num_computed_tokens: int = 0
    sampling_params: SamplingParams | CheckedParams | None = None
    lora_id: int = 0
    prompt_embeds: Floats | None = None
    prompt_is_token_id: Bools | None = field(default=None, kw_only=True)
    mm_features: Sequence[MultiModalFeature] = field(default=(), kw_only=True)
    mrope_positions: Ints | None = field(default=None, kw_only=True)
    mrope_delta: int = field(default=0, kw_only=True)
    bidirectional_ranges: Sequence[tuple[int, int]] | Ints = field(default=(), kw_only=True)
    encoder_len: int = field(default=0, kw_only=True)
    encoder_input: AnyArray | None = field(default=None, kw_only=True)
    pooling_params: PoolingParams | None = field(default=None, kw_only=True)
    lora_request: LoraRequest | None = field(default=None, kw_only=True)


class PromptInputs(TypedDict, total=False):
    """The inputs of a prompt besides its token ids, as arguments of `NewRequest`."""

    prompt_embeds: F32
    prompt_is_token_id: Bools
    mrope_positions: I32
    mrope_delta: int
    bidirectional_ranges: I32
    encoder_len: int
    encoder_input: AnyArray


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class NewRequests:
    """Many requests as columns, for `RequestStates.add_requests`: N requests without a Python object per request.

    token_ids: int32, every request's known tokens (prompt, then outputs), one request after the other.
    num_tokens: int32 [N], tokens of request i. prompt_len: int32 [N]; None: all tokens are prompt.
    block_ids, num_blocks: one array per KV group, in the same way. num_computed_tokens: int32 [N]; None: 0.
    sampling: column name (as in `sampling_columns.COLUMNS`) → [N]; columns not named keep the default (greedy).
    """

    req_ids: Sequence[str]
    token_ids: I32
    num_tokens: I32
    block_ids: Sequence[I32]
    num_blocks: Sequence[I32]
    prompt_len: I32 | None = None
    num_computed_tokens: I32 | None = None
    lora_id: I32 | None = None
    sampling: Mapping[str, npt.NDArray[np.generic]] | None = None

    def split(self) -> list[NewRequest]:
        """Return the requests as `NewRequest`s, without ``sampling``, which has no parameters object.

        Raise RequestError if a column does not have one entry per request, or if counts do not add up to the length of
        a column.
        """
        count = len(self.req_ids)
        num_tokens = per_request("num_tokens", self.num_tokens, count)
        prompt_len = num_tokens if self.prompt_len is None else per_request("prompt_len", self.prompt_len, count)
        computed = np.zeros(count, np.int32)
        if self.num_computed_tokens is not None:
            computed = per_request("num_computed_tokens", self.num_computed_tokens, count)
        if len(self.block_ids) != len(self.num_blocks):
            got, limit = f"{len(self.num_blocks)} arrays", f"block_ids has {len(self.block_ids)}"
            raise RequestError(None, "num_blocks", got, limit, "Give one of each per KV group.")
        if (bad := (prompt_len < 1) | (prompt_len > num_tokens)).any():
            i = int(np.argmax(bad))
            limit = f"must be in [1, num_tokens = {int(num_tokens[i])}]"
            raise RequestError(self.req_ids[i], "prompt_len", int(prompt_len[i]), limit, "Count the prompt's tokens.")
        lora_id = np.zeros(count, np.int32) if self.lora_id is None else per_request("lora_id", self.lora_id, count)
        tokens = _pieces("token_ids", self.token_ids, "num_tokens", num_tokens)
        blocks = []
        for g, (ids, held) in enumerate(zip(self.block_ids, self.num_blocks, strict=True)):
            name = f"num_blocks[{g}]"
            blocks.append(_pieces(f"block_ids[{g}]", ids, name, per_request(name, held, count)))
        return [
            NewRequest(
                req_id,
                tokens[i][: prompt_len[i]],
                [group[i] for group in blocks],
                tokens[i][prompt_len[i] :],
                int(computed[i]),
                lora_id=lora_id[i],
            )
            for i, req_id in enumerate(self.req_ids)
        ]


def per_request(name: str, column: npt.ArrayLike, count: int) -> AnyArray:
    """Return the column as an array [count]; RequestError for another shape."""
    values = np.asarray(column)
    if values.shape != (count,):
        got, limit = f"shape {values.shape}", f"there are {count} requests"
        raise RequestError(None, name, got, limit, "Give one entry per request.")
    return values


def _pieces(name: str, values: npt.ArrayLike, count_name: str, counts: AnyArray) -> list[AnyArray]:
    """Return values divided into pieces of counts[i] entries; RequestError if the counts do not add up."""
    flat = np.asarray(values)
    if (counts < 0).any() or int(counts.sum()) != flat.size or flat.ndim != 1:
        got, limit = f"shape {flat.shape}", f"{count_name} adds up to {int(counts.sum())}, with no entry below 0"
        raise RequestError(None, name, got, limit, "Make them agree.")
    return np.split(flat, np.cumsum(counts)[:-1]) if len(counts) else []
