"""LoRA adapters that an executor holds, and their changes of the products of a step."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from foreword.batch import InputBatch, LoraMapping
from foreword.executors.inputs import step_adapters
from foreword.executors.torch.grouped import aligned, grouped
from foreword.models.lora import LoraAdapter

Parts = tuple[str, ...]
"""The canonical names of the matrices of a product."""


@dataclass(frozen=True, slots=True)
class Factors:
    """The change of one product by adapters. a: [adapters, rank, in]; b: [adapters, out, rank], times the scales. Of
    the products of all experts of a layer, [adapters, experts, …].

    The parts of an adapter share its rank one after the other. Zeros fill it up to the largest of all adapters.
    """

    a: Tensor
    b: Tensor

    @property
    def rank(self) -> int:
        return int(self.a.shape[-2])

    def with_rank(self, rank: int) -> Factors:
        """Return the factors padded with zeros up to a rank."""
        more = rank - self.rank
        return Factors(pad(self.a, (0, 0, 0, more)), pad(self.b, (0, more)))

    def insert(self, at: int, other: Factors) -> Factors:
        """Return the factors with the adapters of ``other`` before the one with index ``at``."""
        rank = max(self.rank, other.rank)
        old, new = self.with_rank(rank), other.with_rank(rank)
        a, b = (torch.cat((x[:at], y, x[at:])) for x, y in ((old.a, new.a), (old.b, new.b)))
        return Factors(a, b)


class ProductChanges(Protocol):
    """The changes of a step's products by its adapters."""

    def apply(self, out: Tensor, x: Tensor, parts: Parts) -> Tensor:
        """Add the changes of the product ``parts`` of x [T, in] to out [T, out], and return it."""
        ...

    def apply_by_expert(self, out: Tensor, x: Tensor, parts: Parts, experts: Tensor, tokens: Tensor) -> Tensor:
        """Add to out [N, out] the changes of the product ``parts`` of all experts: row i is the product of x [N, in]
        with the matrix of experts[i], for tokens[i]. Return it.
        """
        ...

    def apply_by_head(self, out: Tensor, x: Tensor, part: str, *, is_turned: bool) -> Tensor:
        """Add to out [T, heads, out] the changes of the product of each head's x [T, heads, in] with its rows of
        ``part``, and return it. is_turned: the rows are the inputs.
        """
        ...


class Changeable(Protocol):
    """A product that adapters may change. outputs, inputs: the rows of each part on this rank, and the columns.
    num_experts: the product is that of as many experts, with {e} in place of the expert in ``parts``; 0: it is one.
    """

    @property
    def parts(self) -> Parts: ...

    @property
    def outputs(self) -> tuple[range, ...]: ...

    @property
    def inputs(self) -> range: ...

    @property
    def num_experts(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Product:
    """A product that adapters may change, without its matrices: `Changeable`."""

    parts: Parts
    outputs: tuple[range, ...]
    inputs: range
    num_experts: int = 0


@dataclass(frozen=True, slots=True)
class StepLoras:
    """The adapters of a step. tokens: int64 [N], those with an adapter, sorted by it; ends: int32 [adapters], where the
    tokens of each end; numbers: int64 [T], the adapter of each token, by its place, −1 for none.
    """

    factors: Mapping[Parts, Factors]
    tokens: Tensor
    ends: Tensor
    numbers: Tensor

    def apply(self, out: Tensor, x: Tensor, parts: Parts) -> Tensor:
        """See `ProductChanges.apply`."""
        own = self.factors.get(parts)
        if own is None or not own.rank:
            return out
        low = grouped(x[self.tokens].to(own.a.dtype), own.a, self.ends)
        return out.index_add_(0, self.tokens, grouped(low, own.b, self.ends).to(out.dtype))

    def apply_by_expert(self, out: Tensor, x: Tensor, parts: Parts, experts: Tensor, tokens: Tensor) -> Tensor:
        """See `ProductChanges.apply_by_expert`."""
        return changed_by_expert(self.factors.get(parts), self.numbers[tokens], out, x, experts)

    def apply_by_head(self, out: Tensor, x: Tensor, part: str, *, is_turned: bool) -> Tensor:
        """See `ProductChanges.apply_by_head`."""
        return changed_by_head(self.factors.get((part,)), self.numbers, out, x, is_turned=is_turned)


def changed_by_head(own: Factors | None, numbers: Tensor, out: Tensor, x: Tensor, *, is_turned: bool) -> Tensor:
    """See `ProductChanges.apply_by_head`. numbers: int [T], the adapter of each token, −1 for none.

    All tokens pass through the ranks of all adapters side by side, and those of other adapters are cleared.
    """
    if own is None or not own.rank:
        return out
    of_adapters = torch.arange(len(own.a), device=numbers.device)
    is_own = (numbers[:, None] == of_adapters).to(x.dtype).repeat_interleave(own.rank, 1)[:, None]
    b = own.b.unflatten(1, (x.shape[1], -1)).permute(1, 2, 0, 3).flatten(2)  # [heads, rows, ranks]
    if is_turned:
        low = torch.einsum("thn,hnr->thr", x, b) * is_own
        return out + low @ own.a.flatten(0, 1)[:, : out.shape[2]]
    low = (x @ own.a.flatten(0, 1)[:, : x.shape[2]].t()) * is_own
    return out + torch.einsum("thr,hvr->thv", low, b)


def changed_by_expert(own: Factors | None, numbers: Tensor, out: Tensor, x: Tensor, experts: Tensor) -> Tensor:
    """See `ProductChanges.apply_by_expert`. numbers: int [N], the adapter of each row, −1 for none: these rows pass
    through the factors of the first adapter, and their changes are cleared.
    """
    if own is None or not own.rank:
        return out
    count = own.a.shape[1]
    groups, order = (numbers.clamp(min=0) * count + experts).sort(stable=True)
    of_groups = torch.arange(len(own.a) * count, device=groups.device, dtype=groups.dtype)
    ends = torch.searchsorted(groups, of_groups, right=True).int()
    low = grouped(x[order].to(own.a.dtype), own.a.flatten(0, 1), ends) * (numbers[order, None] >= 0)
    return out.index_add(0, order, grouped(low, own.b.flatten(0, 1), ends).to(out.dtype))


class Loras:
    """The adapters that an executor holds, in the order of their numbers: an `AdapterStore`. Factors are held in the
    model's dtype.

    ids: int32, their numbers. factors: of each product.
    products: those that adapters may change. A rank holds the adapters' factors of its rows and columns.
    """

    def __init__(self, products: Sequence[Changeable], device: torch.device, dtype: torch.dtype) -> None:
        self._products, self._device, self._dtype = products, device, dtype
        # One value, replaced in one assignment: an interrupt leaves the adapters as before a change or as after it.
        self._held: tuple[list[int], Tensor, dict[Parts, Factors]] = ([], self._ids([]), {})

    def _ids(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=self._device)

    @property
    def ids(self) -> Tensor:
        return self._held[1]

    @property
    def factors(self) -> Mapping[Parts, Factors]:
        return self._held[2]

    def load(self, lora_id: int, adapter: LoraAdapter) -> int:
        """See `AdapterStore.load`."""
        ids, _, factors = self._held
        at = bisect_left(ids, lora_id)
        size, grown = 0, {}
        for product in self._products:
            new = self._fused(adapter, product)
            size += new.a.nbytes + new.b.nbytes
            grown[product.parts] = factors[product.parts].insert(at, new) if ids else new
        ids = [*ids[:at], lora_id, *ids[at:]]
        self._held = ids, self._ids(ids), grown
        return size

    def drop(self, lora_id: int) -> None:
        """See `AdapterStore.drop`."""
        ids, _, factors = self._held
        if lora_id in ids:
            rest = [i for i, own in enumerate(ids) if own != lora_id]
            left = {parts: Factors(own.a[rest], own.b[rest]) for parts, own in factors.items()}
            ids = [ids[i] for i in rest]
            self._held = ids, self._ids(ids), left

    def mapping(self, batch: InputBatch) -> LoraMapping | None:
        """See `step_adapters`."""
        return step_adapters(batch, self._held[0])

    def of_step(self, batch: InputBatch) -> StepLoras | None:
        """Return the adapters of a batch, None if no token has one. Raise PlanError for a number without an adapter."""
        mapping = self.mapping(batch)
        if mapping is None:
            return None
        ids, _, factors = self._held
        of_tokens = mapping.tokens[: batch.num_tokens]
        tokens = np.argsort(of_tokens, kind="stable")[int((of_tokens == 0).sum()) :]
        ends = np.searchsorted(of_tokens[tokens], ids, side="right").astype(np.int32)
        numbers = np.where(of_tokens > 0, np.searchsorted(ids, of_tokens), -1)
        return StepLoras(factors, *(torch.from_numpy(x).to(self._device) for x in (tokens, ends, numbers)))

    def _fused(self, adapter: LoraAdapter, product: Changeable) -> Factors:
        """Return the factors of one adapter [1, …]: the outputs of a part are computed from its own ranks."""
        inputs, count = product.inputs, product.num_experts
        of_each = [[adapter.pairs.get(part.format(e=e)) for part in product.parts] for e in range(count or 1)]
        rank = aligned(max(sum(pair.a.shape[0] for pair in pairs if pair) for pairs in of_each))
        a = np.zeros((len(of_each), rank, aligned(len(inputs))), np.float32)
        b = np.zeros((len(of_each), sum(map(len, product.outputs)), rank), np.float32)
        for own_a, own_b, pairs in zip(a, b, of_each, strict=True):
            row = column = 0
            for pair, own in zip(pairs, product.outputs, strict=True):
                if pair is not None:
                    ranks = slice(column, column := column + pair.a.shape[0])
                    own_a[ranks, : len(inputs)] = pair.a.dequantize()[:, inputs.start : inputs.stop]
                    rows = pair.b.dequantize()[own.start : own.stop]
                    own_b[row : row + len(own), ranks] = np.float32(pair.scale) * rows
                row += len(own)
        both = (a[None], b[None]) if count else (a, b)
        return Factors(*(torch.from_numpy(x).to(self._device, self._dtype) for x in both))
