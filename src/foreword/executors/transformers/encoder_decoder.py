"""The executor of encoder–decoders of transformers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, cast

import numpy as np
import torch
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from foreword.arrays import F32, I32, I64, AnyArray
from foreword.batch import BlockTable, ContentIds, InputBatch, KVGroup
from foreword.errors import EngineError, PlanError, RequestError
from foreword.executors.executor import Capability
from foreword.executors.torch.attention import GatheredAttention
from foreword.executors.torch.cache import PagedCache, slot_sizes
from foreword.executors.torch.tensors import as_floats, as_tensor
from foreword.executors.transformers.decoder_trace import DecoderTrace
from foreword.executors.transformers.executor import TransformersExecutor
from foreword.executors.transformers.trace import default_scale

CROSS_BLOCK_SIZE = 16


class EncoderDecoderExecutor(TransformersExecutor):
    """Runs an encoder–decoder: the encoder once per input, the decoder over paged keys and values.

    max_encoder_len: the longest output of the encoder. max_num_seqs: the requests that run at the same time; each has a
    place for the cross-attention's keys and values of an encoder output. Equal inputs share a place, which keeps its
    content until a new input needs it: a preempted request finds its own, or the encoder runs again.
    """

    trace: DecoderTrace

    def __init__(
        self,
        model: PreTrainedModel,
        trace: DecoderTrace,
        *,
        num_blocks: int,
        block_size: int,
        max_encoder_len: int,
        max_num_seqs: int,
    ) -> None:
        super().__init__(model, trace, num_blocks=num_blocks, block_size=block_size)
        # What the cross-attention reads is not in the blocks.
        self.capabilities = (self.capabilities | {Capability.ENCODER}) - {Capability.BLOCK_TRANSFER}
        self._width = cross_blocks(max_encoder_len)
        cache = PagedCache(
            trace.cross_layers,
            num_blocks=1 + max_num_seqs * self._width,
            block_size=CROSS_BLOCK_SIZE,
            dtype=model.dtype,
            device=model.device,
        )
        self._cross = GatheredAttention(cache)
        group = KVGroup(CROSS_BLOCK_SIZE)
        self._encoded = _EncodedStates((BlockTable.allocate(group, None, 1, max_encoder_len, 0, ContentIds()),))
        self._places = _Places(max_num_seqs)
        self._nothing = torch.zeros(1, 1, trace.encoder_dim, dtype=model.dtype, device=model.device)
        self._attend_in: Callable[..., torch.Tensor] = self._attend_in_step
        self._written: tuple[int, int] = 0, 0  # first block, and blocks, of the encoder output that is projected

    def compute(self, batch: InputBatch, logits_indices: I64) -> F32:
        device, B, T = self.model.device, batch.num_reqs, batch.num_tokens
        rows = batch.idx_mapping[:B]
        self._places.assign(batch, self._encode)
        first = 1 + self._places.of_row[rows] * self._width
        lengths = batch.states.encoder_len[rows]
        starts = batch.query_start_loc[: B + 1]
        self.attention.begin(batch)
        blocks = (first[:, None] + np.arange(self._width)).astype(np.int32)
        positions = np.repeat(lengths - 1, np.diff(starts))
        encoded = _EncodedBatch(self._encoded, B, T, starts, positions, (blocks,))
        self._cross.begin(cast(InputBatch, encoded))
        ids = as_tensor(batch.input_ids[:T], device).long()[None]
        logits = self._decode(ids, self._nothing, as_tensor(batch.positions[:T], device).long(), logits_indices)
        if self._num_calls != len(self.trace.calls):
            raise EngineError(f"the model attended {self._num_calls} times in a step, not {len(self.trace.calls)}")
        return as_floats(logits)

    def _encode(self, place: int, values: AnyArray) -> None:
        """Write the cross-attention's keys and values of an encoder input to its place."""
        given = as_tensor(values, self.model.device)[None]
        name = self.model.get_encoder().main_input_name
        self._attend_in = _attend_fully
        self._written = 1 + place * self._width, self._width
        try:
            with torch.inference_mode():
                given = given.to(self.model.dtype) if given.is_floating_point() else given.long()
                states = self.model.get_encoder()(**{name: given}, return_dict=True).last_hidden_state
            self._attend_in = self._project
            zero = torch.zeros(1, dtype=torch.long, device=given.device)
            self._decode(zero[None], states, zero, np.zeros(1, np.int64))
        finally:
            self._attend_in = self._attend_in_step

    def _decode(self, ids: torch.Tensor, states: torch.Tensor, positions: torch.Tensor, at: I64) -> torch.Tensor:
        """Return the decoder's logits [L, V] of ids [1, T] at positions [T]. states: [1, S, hidden], of the encoder."""
        self._num_calls = 0
        with torch.inference_mode(), steps_of(self.model, positions, as_tensor(at, ids.device)):
            return self.model(
                encoder_outputs=BaseModelOutput(last_hidden_state=states),
                decoder_input_ids=ids,
                use_cache=False,
                return_dict=True,
            ).logits[0]

    def _attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: None = None,
        scaling: float | None = None,
        *_: Any,
        position_bias: torch.Tensor | None = None,
        **__: Any,
    ) -> tuple[torch.Tensor, None]:
        scale = default_scale(query) if scaling is None else scaling
        return self._attend_in(query, key, value, scale, position_bias), None

    def _attend_in_step(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object) -> torch.Tensor:
        """Attend in the decoder's next call: over its own keys and values, or over those of the encoder."""
        traced, queries = self.trace.calls[self._num_calls], query[0].transpose(0, 1)
        self._num_calls += 1
        if not traced.writes:
            return self._cross.attend(traced.attention, queries)[None]
        self.attention.write(traced.attention.layer, key[0].transpose(0, 1), value[0].transpose(0, 1))
        return self.attention.attend(traced.attention, queries)[None]

    def _project(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object) -> torch.Tensor:
        """Run the next call for one token of the decoder, of which only the encoder's keys and values are kept."""
        traced, cache, (first, count) = self.trace.calls[self._num_calls], self._cross.cache, self._written
        self._num_calls += 1
        if not traced.writes:
            layer = traced.attention.layer
            for cached, new in ((cache.keys[layer], key), (cache.values[layer], value)):
                rows = new[0].transpose(0, 1)
                missing = count * CROSS_BLOCK_SIZE - len(rows)
                padded = F.pad(rows, (0, 0, 0, 0, 0, missing))
                cached[first : first + count] = padded.unflatten(0, (count, CROSS_BLOCK_SIZE))
        return value[:, :, :1].repeat_interleave(query.shape[1] // value.shape[1], 1).transpose(1, 2).contiguous()


@dataclass(frozen=True, slots=True)
class _EncodedStates:
    """The KV group of cross-attention."""

    block_tables: tuple[BlockTable]


@dataclass(frozen=True, slots=True)
class _EncodedBatch:
    """The step as cross-attention sees it: each token of a request is at the last position of its encoder output."""

    states: _EncodedStates
    num_reqs: int
    num_tokens: int
    query_start_loc: I32
    positions: I32
    block_table: tuple[I32, ...]


class _Places:
    """The encoder input at each place, and the place of each row. A place is free if no live row has it."""

    def __init__(self, num_places: int) -> None:
        self.of_row = np.zeros(num_places, np.int32)
        self._generation = np.full(num_places, -1, np.int64)
        self._by_content: OrderedDict[bytes, int] = OrderedDict()
        self._unused = list(range(num_places))

    def assign(self, batch: InputBatch, encode: Callable[[int, AnyArray], None]) -> None:
        """Give each row a place. encode: fills one for a new input; RequestError, with nothing changed, if it fails."""
        states, rows = batch.states, batch.idx_mapping[: batch.num_reqs]
        for row in rows[self._generation[rows] != states.row_generation[rows]].tolist():
            values = states.extras.encoder_inputs.get(row)
            if values is None:
                raise PlanError(
                    "an encoder–decoder needs what its encoder reads; give encoder_input and encoder_len",
                    step=batch.step,
                    request=states.req_id_of(row),
                    tensor="encoder_input",
                )
            content = blake2b(np.ascontiguousarray(values).data, digest_size=16).digest()
            place = self._by_content.get(content)
            if place is None:
                place = self._free_place(batch)
                try:
                    encode(place, values)
                except BaseException as error:
                    self._unused.append(place)
                    if not isinstance(error, Exception) or isinstance(error, MemoryError):
                        raise
                    got, reason = f"{values.dtype} {list(values.shape)}", (str(error).splitlines() or [""])[0]
                    reason = f"the encoder failed ({type(error).__name__}: {reason:.200})"
                    name, fix = states.req_id_of(row), "Give the encoder another input."
                    raise RequestError(name, "encoder_input", got, reason, fix) from error
                self._by_content[content] = place
            self._by_content.move_to_end(content)
            self.of_row[row], self._generation[row] = place, states.row_generation[row]

    def _free_place(self, batch: InputBatch) -> int:
        """Return a place that was never used, or the one whose content was given to a row the longest time ago."""
        if self._unused:
            return self._unused.pop()
        states = batch.states
        used = set(self.of_row[states.live & (self._generation == states.row_generation)].tolist())
        content = next(content for content, place in self._by_content.items() if place not in used)
        return self._by_content.pop(content)


@contextmanager
def steps_of(model: PreTrainedModel, positions: torch.Tensor, at: torch.Tensor) -> Iterator[None]:
    """In the block, the decoder's tokens are at these positions [T], and only logits at these tokens are computed.

    Relative positions are left to attention.
    """

    def placed(_: torch.nn.Module, arguments: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return arguments, named | {"position_ids": positions.view(named["position_ids"].shape)}

    def selected(_: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return arguments[0][:, at], *arguments[1:]

    decoder = model.get_decoder()
    table = getattr(decoder, "embed_positions", None)
    biased = [module for module in decoder.modules() if hasattr(module, "compute_bias")]
    hooks = [model.get_output_embeddings().register_forward_pre_hook(selected)]
    if table is not None:
        hooks.append(table.register_forward_pre_hook(placed, with_kwargs=True))
    for module in biased:
        module.compute_bias = lambda *_, **__: positions  # it would have T × T tokens, and is never read
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for module in biased:
            del module.compute_bias


def _attend_fully(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return attention of an encoder, whose tokens see each other."""
    grouped = query.shape[1] != key.shape[1]
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scale, enable_gqa=grouped)
    return out.transpose(1, 2)


def cross_blocks(max_encoder_len: int) -> int:
    """Return blocks of the longest encoder output."""
    return -(-max_encoder_len // CROSS_BLOCK_SIZE)


def cross_bytes(trace: DecoderTrace, max_encoder_len: int, dtype: torch.dtype) -> int:
    """Return bytes of the cross-attention's keys and values of one request."""
    size = sum(slot_sizes(trace.cross_layers, CROSS_BLOCK_SIZE, dtype))
    return size * int(dtype.itemsize) * cross_blocks(max_encoder_len)
