"""Attention of a step's tokens over the paged cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from torch.nn import functional as F

from foreword.arrays import I64
from foreword.batch import BlockTable, InputBatch
from foreword.executors.torch.cache import PagedCache
from foreword.executors.torch.shard import Shard
from foreword.executors.torch.tensors import as_tensor

QUERIES_AT_ONCE = 128  # per request, which bounds the mask and the scores
KEYS_AT_ONCE = 16384  # for all requests of a call, which bounds the gathered keys and values
PRODUCTS_AT_ONCE = 1 << 22  # products of queries and keys of an indexer, which bounds the heads of one product


@dataclass(frozen=True, slots=True, eq=False)
class AttentionCall:
    """One call of attention in a model's forward pass: all that is the same in every step.

    layer: the number of its keys and values in the cache. scale: the factor of q · k.
    window, chunk: a query at position p sees keys at j ≤ p; with ``window`` those in (p − window, p]; with ``chunk``
    those with j // chunk = p // chunk.
    softcap: scores become softcap · tanh(score / softcap).
    sinks: [num_heads], a further score of each softmax, of a key whose value is zero.
    bias: [num_heads, D], added to the scores of keys by their distance to the query, which is below D.
    slopes: [num_heads], by which scores fall for each position of that distance (ALiBi).
    is_chosen: a query sees only those keys that the step's last `PagedAttention.choose` chose.
    A call with bias or slopes has no softcap. A call over positions that ranks share has no sinks, bias or slopes. A
    call over chosen keys has no window or chunk.
    """

    layer: int
    scale: float
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    slopes: torch.Tensor | None = None
    is_chosen: bool = False


class PagedAttention(Protocol):
    """Attention of the requests of one step to their own keys and values.

    Tokens are in batch order; T is the number of tokens of the step.
    """

    def begin(self, batch: InputBatch, last_seen: I64 | None = None) -> None:
        """Start a step. The batch's block operations were applied.

        last_seen: the position of the last key that each token sees; None: its own.
        """
        ...

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write the step's keys [T, num_kv_heads, key_dim] and values [T, num_kv_heads, value_dim] to their slots."""
        ...

    def choose(self, layer: int, keys: torch.Tensor, queries: torch.Tensor, weights: torch.Tensor, topk: int) -> None:
        """Write the step's keys [T, D] of a layer's indexer to their slots. Choose, for each query [T, heads, D] with
        the weights [T, heads] of its heads, the ``topk`` keys with the largest scores of those that it may see, as
        `IndexerSpec` defines them. Calls over chosen keys in layers of the same KV group see these until the next
        choice or step.
        """
        ...

    def attend(self, call: AttentionCall, queries: torch.Tensor) -> torch.Tensor:
        """Return softmax(cap(q · k * scale, softcap) + mask) v [T, num_heads, value_dim].

        queries: [T, num_heads, key_dim]; head h reads key head h // (num_heads / num_kv_heads).
        """
        ...


@dataclass(frozen=True, slots=True)
class _Part:
    """Queries of several requests, which are computed at once.

    most_seen: the largest number of keys that one of the queries sees, without a window or chunk.
    tokens: int64 [R, N], the queries; a shorter row repeats its last one.
    blocks: int64 [R · B], of the keys; block 0, which is never written, after the last.
    mask: bool [R, 1, N, B · block_size].
    positions, key_positions: int64 [R, N] and [R, B · block_size].
    """

    most_seen: int
    tokens: torch.Tensor
    blocks: torch.Tensor
    mask: torch.Tensor
    positions: torch.Tensor
    key_positions: torch.Tensor


class GatheredAttention:
    """`PagedAttention` for any device: keys and values are gathered, then go through PyTorch's fused attention.

    Requests with similar numbers of queries and keys share a call. Of a KV group whose positions are spread over ranks,
    each rank attends to its own keys; then the ranks of ``shard`` merge what they found.
    """

    def __init__(self, cache: PagedCache, shard: Shard | None = None) -> None:
        self.cache, self._shard = cache, shard or Shard()
        self._step: _Step | None = None
        self._chosen: list[_Part] = []  # those of the step, whose masks hide the keys that were not chosen

    def begin(self, batch: InputBatch, last_seen: I64 | None = None) -> None:
        """See `PagedAttention.begin`."""
        self._step = _Step(batch, self.cache, batch.positions if last_seen is None else last_seen)
        self._chosen = []

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """See `PagedAttention.write`."""
        of = self.cache.layers[layer]
        both = (self.cache.keys[layer], keys), (self.cache.values[layer], values)
        for cached, new in both[:1] if of.values_are_keys else both:
            self._write(of.group, cached, new)

    def _write(self, group: int, cached: torch.Tensor, new: torch.Tensor) -> None:
        """Write the step's rows [T, …] to their slots in a view of the cache [num_blocks, block_size, …]."""
        slots = self._current.slots_of(group)
        # What other requests left in a block is masked; but a mask does not hide numbers that are not finite.
        if len(slots.fresh_blocks):
            cached.index_fill_(0, slots.fresh_blocks, 0)
        cached[slots.blocks, slots.offsets] = (new if slots.tokens is None else new[slots.tokens]).to(cached.dtype)

    def choose(self, layer: int, keys: torch.Tensor, queries: torch.Tensor, weights: torch.Tensor, topk: int) -> None:
        """See `PagedAttention.choose`."""
        group, cached = self.cache.layers[layer].group, self.cache.index_keys[layer]
        assert not self._current.is_spread(group)
        self._write(group, cached, keys)
        self._chosen = []
        for part in self._current.parts(group, None, None):
            if part.most_seen > topk:
                key = _gathered(cached, part).float()
                scores = _index_scores(queries[part.tokens].float(), key, weights[part.tokens].float())
                part = replace(part, mask=_largest(scores[:, None], part.mask, topk))
            self._chosen.append(part)

    def attend(self, call: AttentionCall, queries: torch.Tensor) -> torch.Tensor:
        """See `PagedAttention.attend`."""
        layer = call.layer
        of, cached_keys, cached_values = self.cache.layers[layer], self.cache.keys[layer], self.cache.values[layer]
        is_spread = self._current.is_spread(of.group)
        if is_spread:
            assert call.sinks is None
            assert call.bias is None
            assert call.slopes is None
            out = queries.new_empty(*queries.shape[:2], of.value_dim + 2, dtype=torch.float32)
        else:
            out = queries.new_empty(*queries.shape[:2], of.value_dim)
        parts = self._chosen if call.is_chosen else self._current.parts(of.group, call.window, call.chunk)
        for part in parts:
            query = queries[part.tokens].transpose(1, 2)  # [R, H, N, D]
            key, value = (
                _gathered(cached, part).transpose(1, 2).to(query.dtype) for cached in (cached_keys, cached_values)
            )  # [R, num_kv_heads, S, D]
            if is_spread:
                result = _partial(call, query, key, value, part.mask)
            elif call.softcap is None:
                has_bias = call.bias is not None or call.slopes is not None
                result = _fused(call, query, key, value, _biased(call, part).to(query.dtype) if has_bias else part.mask)
            else:
                result = _capped(call, query, key, value, part.mask)
            out[part.tokens] = result.transpose(1, 2)
        return self._merged(out).to(queries.dtype) if is_spread else out

    def _merged(self, own: torch.Tensor) -> torch.Tensor:
        """Return the attention outputs [T, num_heads, value_dim] of all keys, from those of this rank's keys
        (`_partial`).
        """
        largest = self._shard.max(own[..., -1:].contiguous())
        total = self._shard.sum(own[..., :-1] * torch.exp(own[..., -1:] - largest))
        return total[..., :-1] / total[..., -1:]

    @property
    def _current(self) -> _Step:
        assert self._step is not None, "begin comes before write and attend"
        return self._step


@dataclass(frozen=True, slots=True)
class _Slots:
    """The places where a step's tokens are written. tokens: those that are, None for all.

    fresh_blocks: those whose first position is computed in this step, so that nothing of their content is in use.
    """

    tokens: torch.Tensor | None
    blocks: torch.Tensor
    offsets: torch.Tensor
    fresh_blocks: torch.Tensor


class _Step:
    """The slots and the parts of one step, computed on first use: the same for all layers of a kind."""

    def __init__(self, batch: InputBatch, cache: PagedCache, last_seen: I64) -> None:
        self._batch, self._last_seen, self._block_size, self._device = batch, last_seen, cache.block_size, cache.device
        self._slots: dict[int, _Slots] = {}
        self._parts: dict[tuple[int, int | None, int | None], list[_Part]] = {}

    def is_spread(self, group: int) -> bool:
        """Return whether ranks share the positions of a KV group."""
        return self._batch.states.block_tables[group].context_parallel is not None

    def slots_of(self, group: int) -> _Slots:
        """Return the slots of a KV group."""
        if group not in self._slots:
            batch, tokens = self._batch, None
            slots, positions = (x[: batch.num_tokens] for x in (batch.slot_mapping[group], batch.positions))
            if len(slots) and slots.min() < 0:
                tokens = self._tensor(np.flatnonzero(slots >= 0))
                slots = slots[slots >= 0]
            blocks, offsets = np.divmod(slots.astype(np.int64), self._block_size)
            column, at = np.divmod(positions, batch.states.block_tables[group].tokens_per_block)
            first = np.flatnonzero(at == 0)
            request = np.searchsorted(batch.query_start_loc[1 : batch.num_reqs + 1], first, side="right")
            fresh = batch.block_table[group][request, column[first]].astype(np.int64)
            self._slots[group] = _Slots(tokens, *map(self._tensor, (blocks, offsets, fresh)))
        return self._slots[group]

    def parts(self, group: int, window: int | None, chunk: int | None) -> list[_Part]:
        """Return the parts of calls over a KV group with this mask."""
        key = group, window, chunk
        if key not in self._parts:
            self._parts[key] = list(self._make_parts(group, window, chunk))
        return self._parts[key]

    @cached_property
    def _rows(self) -> tuple[I64, I64, I64]:
        """The rows of at most QUERIES_AT_ONCE queries: request, first query and number of queries of each."""
        starts = self._batch.query_start_loc[: self._batch.num_reqs + 1].astype(np.int64)
        lengths = np.diff(starts)
        count = -(-lengths // QUERIES_AT_ONCE)
        request = np.repeat(np.arange(len(lengths)), count)
        done = (np.arange(len(request)) - np.repeat(np.cumsum(count) - count, count)) * QUERIES_AT_ONCE
        return request, starts[request] + done, np.minimum(lengths[request] - done, QUERIES_AT_ONCE)

    def _make_parts(self, group: int, window: int | None, chunk: int | None) -> Iterator[_Part]:
        table, positions = self._batch.states.block_tables[group], self._batch.positions
        size, within = table.tokens_per_block, _positions_within(table)
        request, first, length = self._rows
        begin = np.zeros_like(first)  # the first key that a row sees
        if window is not None:
            begin = np.maximum(begin, positions[first] - window + 1)
        if chunk is not None:
            begin = np.maximum(begin, positions[first] // chunk * chunk)
        begin //= size
        num_blocks = self._last_seen[first + length - 1] // size + 1 - begin
        # Rows of one kind differ by less than a factor of 2 in queries and √2 in keys.
        kind = np.ceil(np.log2(length)) * 256 + np.floor(2 * np.log2(num_blocks))
        order = np.argsort(kind, kind="stable")
        for same in np.split(order, np.flatnonzero(np.diff(kind[order])) + 1):
            at_once = max(1, KEYS_AT_ONCE // int(num_blocks[same].max() * len(within)))
            for rows in np.split(same, range(at_once, len(same), at_once)):
                offsets = np.minimum(np.arange(length[rows].max()), length[rows, None] - 1)
                tokens = first[rows, None] + offsets  # [R, N]
                nth = np.arange(num_blocks[rows].max())
                ids = self._batch.block_table[group]
                column = np.minimum(begin[rows, None] + nth, ids.shape[1] - 1)
                blocks = np.where(nth < num_blocks[rows, None], ids[request[rows, None], column], 0)  # [R, B]
                start = (begin[rows, None] + nth) * size
                key = (start[:, :, None] + within).reshape(len(rows), 1, -1)  # [R, 1, B · block_size]
                query = positions[tokens][:, :, None]  # [R, N, 1]
                mask = key <= self._last_seen[tokens][:, :, None]
                if window is not None:
                    mask &= key > query - window
                if chunk is not None:
                    mask &= key // chunk == query // chunk
                given = tokens, blocks.ravel().astype(np.int64), mask[:, None], positions[tokens], key[:, 0]
                yield _Part(int(self._last_seen[tokens].max()) + 1, *map(self._tensor, given))

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return as_tensor(array, self._device)


def _positions_within(table: BlockTable) -> I64:
    """Return the positions of a block's entries, from its first position on: int64 [block_size]."""
    entries, cp = np.arange(table.group.block_size), table.context_parallel
    if cp is None:
        return entries
    run, at = np.divmod(entries, cp.interleave)
    return (run * cp.size + cp.rank) * cp.interleave + at


def _gathered(cached: torch.Tensor, part: _Part) -> torch.Tensor:
    """Return what a view of the cache [num_blocks, block_size, …] has of the keys of a part, [R, S, …]."""
    # A copy of whole blocks is several times as fast as an index by a tensor.
    blocks = cached.flatten(1).index_select(0, part.blocks)
    return blocks.view(len(part.tokens), -1, *cached.shape[2:])


def _index_scores(query: torch.Tensor, key: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the scores of an indexer [R, N, S], of queries [R, N, heads, D] with the weights [R, N, heads] of their
    heads, and keys [R, S, D].
    """
    rows, count, keys = *query.shape[:2], key.shape[1]
    scores, at_once = key.new_zeros(rows, count, keys), max(1, PRODUCTS_AT_ONCE // (rows * count * keys))
    for own, weight in zip(query.split(at_once, dim=2), weights.split(at_once, dim=2), strict=True):
        products = (own.flatten(1, 2) @ key.transpose(1, 2)).relu_().unflatten(1, own.shape[1:3])
        scores += (weight[:, :, None] @ products).squeeze(2)
    return scores


def _largest(scores: torch.Tensor, mask: torch.Tensor, count: int) -> torch.Tensor:
    """Return the mask [..., S] of the ``count`` largest scores that ``mask`` shows, of equal ones the first."""
    scores = scores.masked_fill(~mask, float("-inf"))
    least = scores.topk(count, sorted=False).values.amin(-1, keepdim=True)
    above, equal = scores > least, scores == least
    left = count - above.sum(-1, keepdim=True)
    return mask & (above | (equal & (equal.cumsum(-1, dtype=torch.int32) <= left)))


def _biased(call: AttentionCall, part: _Part) -> torch.Tensor:
    """Return the mask of a part as numbers that are added to the scores, with those of each distance."""
    distances = (part.positions[:, :, None] - part.key_positions[:, None]).clamp_min(0).long()  # [R, N, S]
    if call.bias is None:
        assert call.slopes is not None
        added = -call.slopes.view(1, -1, 1, 1) * distances[:, None]
    else:
        added = call.bias[:, distances].transpose(0, 1)
    return added.masked_fill(~part.mask, float("-inf"))


def _fused(
    call: AttentionCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Return PyTorch's fused attention [R, H, N, value_dim], whose kernels take keys and values of one width.

    A sink is one more key: it and the queries have one more dimension, in which a head's query is sink / scale, the
    sink's key 1, and every other key 0.
    """
    value_dim, width = value.shape[-1], max(query.shape[-1], value.shape[-1])
    if call.sinks is not None:
        sink = (call.sinks / call.scale).to(query.dtype).view(1, -1, 1, 1).expand(*query.shape[:3], 1)
        query = torch.cat([query, sink], -1)
        key = F.pad(key, (0, 1, 0, 1))
        key[..., -1, -1] = 1
        value, mask = F.pad(value, (0, 0, 0, 1)), F.pad(mask, (0, 1), value=True)
        width = -(-(width + 1) // 8) * 8
    query, key, value = (F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x for x in (query, key, value))
    grouped = query.shape[1] != key.shape[1]
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=call.scale, enable_gqa=grouped)
    return out[..., :value_dim]


def _capped(
    call: AttentionCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Return attention with capped scores, which no fused kernel has. [R, H, N, value_dim]"""
    scores = _scores(call, query, key, mask)
    if call.sinks is not None:
        sink = call.sinks.float().view(1, *scores.shape[1:3], 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink], -1)
    weights = torch.softmax(scores, -1)[..., : key.shape[2]]
    return (weights.to(value.dtype) @ value[:, :, None]).flatten(1, 2)


def _partial(
    call: AttentionCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Return attention to some of the keys, which others' can be merged with. [R, H, N, value_dim + 2]: the sum of the
    values weighted by exp(score − largest), the sum of the weights, and the largest score, −∞ where no key is seen.
    """
    scores = _scores(call, query, key, mask)
    largest = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - largest.clamp_min(torch.finfo(torch.float32).min))
    out = (weights.to(value.dtype) @ value[:, :, None]).float()
    return torch.cat([out, weights.sum(-1, keepdim=True), largest], -1).flatten(1, 2)


def _scores(call: AttentionCall, query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the scores of keys, −∞ where the mask hides them: float32 [R, num_kv_heads, heads per key head, N, S]."""
    grouped = query.unflatten(1, (key.shape[1], -1))
    scores = (grouped @ key[:, :, None].transpose(-1, -2)).float() * call.scale
    scores = scores if call.softcap is None else call.softcap * torch.tanh(scores / call.softcap)
    return scores.masked_fill(~mask[:, :, None], float("-inf"))
