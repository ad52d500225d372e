"""Models that paged attention cannot serve, each request with a cache of the model's own.

Recurrences, convolutions, indexers, compressed keys and attention outside the interface keep what they need in an
object that the model makes at a request's first tokens and reads at its next ones. A block of the pool is the place of
one such object: the model has one recurrent KV group, whose state is the whole object.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from foreword.arrays import F32, I32, I64
from foreword.batch import InputBatch, NewRequest
from foreword.errors import ModelError
from foreword.executors.executor import Capability
from foreword.executors.host import HostExecutor
from foreword.executors.torch.tensors import as_floats, as_tensor
from foreword.executors.transformers.interface import attention_of, forward, set_attention
from foreword.executors.transformers.trace import Trace
from foreword.executors.transformers.verify import BLOCK_SIZE, NO_DISTANCE, PROMPTS, distance, furthest_last, tolerance
from foreword.models.spec import KVGroupSpec

ARGUMENTS = "past_key_values", "cache_params", "state"
"""The names by which models take their cache, and return it."""
IN_MODULES: Mapping[str, tuple[str, ...]] = {"recurrent_gemma": ("conv1d_state", "recurrent_states")}
"""Type of a model → the attributes of its modules that are part of a request's cache. It does not return the other
part."""
MEASURED = 2, 16, 32
"""Tokens after which the bytes of a cache are measured."""


@dataclass(frozen=True, slots=True)
class OwnCacheTrace(Trace):
    """The facts about a model with a cache of its own.

    argument: the name of the cache in its inputs and outputs; None for a model without, which computes all tokens again
    in every step. inputs: the other optional inputs that it takes. why_not_paged: the reason why paged attention cannot
    serve it. fixed_bytes, token_bytes: of a cache, and of each of its tokens. takes_chunks: whether several tokens can
    continue a cache; else one at a time. takes_batches: whether single tokens of several requests can be computed
    together, for caches that never grow.
    """

    argument: str | None
    inputs: frozenset[str]
    why_not_paged: str
    fixed_bytes: int = 0
    token_bytes: int = 0
    takes_chunks: bool = False
    takes_batches: bool = False

    def cache_bytes(self, num_tokens: int) -> int:
        """Return the most bytes of a cache of so many tokens."""
        return self.fixed_bytes + self.token_bytes * num_tokens


@dataclass(slots=True)
class RequestCache:
    """The data that a model keeps about a request: an object of its own, or all tokens [1, T] if it keeps nothing; and
    the tensors that it keeps in its modules. num_tokens: those in it, −1 if a step that failed has changed it.
    """

    own: Any = None
    in_modules: tuple[torch.Tensor | None, ...] = ()
    num_tokens: int = 0


class OwnCacheExecutor(HostExecutor):
    """Runs a causal model of transformers, each request with a cache of the model's own, one after the other. Single
    tokens of several requests are computed together where all caches have one size.

    num_blocks: of caches. block_size: tokens between two copies of a cache that the prefix cache may keep.
    """

    capabilities = HostExecutor.capabilities | {Capability.RECURRENT_STATE}

    def __init__(self, model: PreTrainedModel, trace: OwnCacheTrace, *, num_blocks: int, block_size: int) -> None:
        super().__init__()
        self.model, self.trace, self.num_blocks, self.block_size = model, trace, num_blocks, block_size
        names = IN_MODULES.get(model.config.model_type, ())
        self._places = [(part, name) for part in model.modules() for name in names if name in vars(part)]
        self._caches: dict[int, RequestCache] = {}  # by block

    def compute(self, batch: InputBatch, logits_indices: I64) -> F32:
        logits = np.empty((len(logits_indices), self.trace.vocab_size), np.float32)
        starts, B = batch.query_start_loc, batch.num_reqs
        is_single = (np.diff(starts[: B + 1]) == 1) & (batch.num_computed_tokens[:B] > 0) & self.trace.takes_batches
        together = np.flatnonzero(is_single) if is_single.sum() > 1 else np.zeros(0, np.int64)
        for b in np.setdiff1d(np.arange(B), together).tolist():
            first, end = starts[b : b + 2].tolist()
            rows = np.flatnonzero((logits_indices >= first) & (logits_indices < end))
            ids = as_tensor(batch.input_ids[first:end], self.model.device).long()[None]
            wanted = as_tensor(logits_indices[rows] - first, self.model.device)
            logits[rows] = as_floats(self.advance(self._cache_of(batch, b), ids, wanted))
        if len(together):
            caches = [self._cache_of(batch, b) for b in together.tolist()]
            tokens = batch.input_ids[starts[together]]
            found = as_floats(self.advance_together(caches, as_tensor(tokens, self.model.device).long()))
            rows = np.flatnonzero(np.isin(logits_indices, starts[together]))
            logits[rows] = found[np.searchsorted(starts[together], logits_indices[rows])]
        return logits

    def _cache_of(self, batch: InputBatch, b: int) -> RequestCache:
        """Return the cache of the computed tokens of a request.

        It is made again if a step that failed has changed it.
        """
        block, num_computed = int(batch.block_table[0][b, 0]), int(batch.num_computed_tokens[b])
        cache = self._caches.get(block)
        if cache is None or num_computed == 0 or cache.num_tokens != num_computed:
            cache = self._caches[block] = self.new_cache()
            if num_computed:
                known = batch.states.token_ids[batch.idx_mapping[b], :num_computed]
                ids = as_tensor(known, self.model.device).long()[None]
                self.advance(cache, ids, ids.new_zeros(1))
        return cache

    def new_cache(self) -> RequestCache:
        """Return the cache of no token."""
        return RequestCache(in_modules=(None,) * len(self._places))

    def advance(self, cache: RequestCache, ids: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Add tokens ids [1, T] to the cache. Returns the logits [L, V] at tokens ``wanted``."""
        with torch.inference_mode():
            if cache.num_tokens == 0 or ids.shape[1] == 1 or self.trace.takes_chunks:
                return self._forward(cache, ids, wanted)[0]
            last = wanted.new_zeros(1)
            return torch.cat([self._forward(cache, one, last)[0] for one in ids.split(1, 1)])[wanted]

    def advance_together(self, caches: Sequence[RequestCache], ids: torch.Tensor) -> torch.Tensor:
        """Add one token of ids [B] to each cache. Returns their logits [B, V]."""
        with torch.inference_mode():
            parts = list(zip(*map(_tensors, caches), strict=True))  # for each tensor of a cache, those of all caches
            memo: dict[int, Any] = {id(own[0]): torch.cat(own) for own in parts}
            merged = RequestCache(copy.deepcopy(caches[0].own, memo), num_tokens=caches[0].num_tokens)
            lengths = [cache.num_tokens + 1 for cache in caches]
            for cache in caches:
                cache.num_tokens = -1
            logits = self._forward(merged, ids[:, None], ids.new_zeros(1))[:, 0]
            for own, both in zip(parts, _tensors(merged), strict=True):
                for tensor, part in zip(own, both.split(1), strict=True):
                    tensor.copy_(part)
            for cache, length in zip(caches, lengths, strict=True):
                cache.num_tokens = length
            return logits

    def copy_blocks(self, sources: I32, destinations: I32) -> None:
        with torch.inference_mode():
            copies = [copy.deepcopy(self._caches.get(block, self.new_cache())) for block in sources.tolist()]
        self._caches |= zip(destinations.tolist(), copies, strict=True)

    def zero_blocks(self, blocks: I32) -> None:
        for block in blocks.tolist():
            self._caches.pop(block, None)

    def close(self) -> None:
        self._caches.clear()

    def _forward(self, cache: RequestCache, ids: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Return the logits [B, L, V] at tokens ``wanted`` of ids [B, T], which are added to the cache."""
        argument, inputs, first = self.trace.argument, self.trace.inputs, cache.num_tokens
        given: dict[str, Any] = {}
        cache.num_tokens = -1  # until the model has changed all of it
        num_tokens = first + ids.shape[1]
        if argument is None:
            ids = ids if first == 0 else torch.cat([cache.own, ids], 1)
            cache.own, wanted, first = ids, wanted + first, 0
        elif cache.own is not None:
            given[argument] = cache.own
        elif self._places:
            given[argument] = cache.own = DynamicCache(config=self.model.config)
        if "position_ids" in inputs:
            given["position_ids"] = torch.arange(first, num_tokens, device=ids.device)[None]
        if "logits_to_keep" in inputs:
            given["logits_to_keep"] = wanted
        for (part, name), tensor in zip(self._places, cache.in_modules, strict=True):
            setattr(part, name, tensor)
        out = self.model(input_ids=ids, use_cache=argument is not None, return_dict=True, **given)
        cache.in_modules = tuple(getattr(part, name) for part, name in self._places)
        if argument is not None and not self._places:
            cache.own = out[argument]
        cache.num_tokens = num_tokens
        logits: torch.Tensor = out.logits
        return logits if "logits_to_keep" in inputs else logits[:, wanted]


def trace_own_cache(model: PreTrainedModel, why_not_paged: str) -> OwnCacheTrace:
    """See `OwnCacheTrace`. Raise ModelError, with both reasons, unless chunked steps give the logits of the model's own
    forward pass.
    """
    try:
        return _traced(model, why_not_paged)
    except MemoryError:
        raise
    except Exception as error:  # a model with few tokens and its own cache raises errors of any kind
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ModelError(f"{why_not_paged}; with a cache of its own: {reason:.200}") from None


def _traced(model: PreTrainedModel, why_not_paged: str) -> OwnCacheTrace:
    parameters = inspect.signature(model.forward).parameters
    argument = next((name for name in ARGUMENTS if name in parameters), None)
    if "input_ids" not in parameters:
        raise ModelError("it takes no token ids")
    if type(model)._supports_sdpa and type(model)._can_set_attn_implementation():
        set_attention(model, "sdpa")
    with torch.inference_mode(), attention_of(model, "eager"):
        own = {name: _own_logits(model, prompt) for name, prompt in PROMPTS.items()}
        for name, prompt in PROMPTS.items():
            if distance(_own_logits(model, prompt[:-2])[-1], own[name][-3]) > tolerance(model):
                raise ModelError("its tokens see later ones")
    inputs = frozenset({"position_ids", "logits_to_keep"} & parameters.keys())
    groups, vocab_size = (KVGroupSpec((0,), None, recurrent=True),), own["a"].shape[-1]
    trace = OwnCacheTrace((), (), groups, vocab_size, argument, inputs, why_not_paged)
    found, never_grows = _measured(model, trace)
    expected = {name: logits[-1] for name, logits in own.items()}
    least = _furthest(model, found, expected)
    if least > tolerance(model):
        raise ModelError(f"its logits differ from those without, by {least:.2g} of their norm")
    for takes_batches in (False, True) if never_grows and "position_ids" not in inputs else (False,):
        faster = replace(found, takes_chunks=found.takes_chunks or not takes_batches, takes_batches=takes_batches)
        try:  # used where the logits become no worse, also in numbers of few bits
            if _furthest(model, faster, expected) < 2 * least + NO_DISTANCE:
                found = faster
        except Exception:  # a model that takes no chunks or batches raises errors of any kind
            continue
    return found


def _furthest(model: PreTrainedModel, trace: OwnCacheTrace, expected: Mapping[str, F32]) -> float:
    """Return the largest distance of the logits at the last tokens of the prompts, computed in chunks, from those
    expected.
    """
    requests = [NewRequest(name, prompt, (), (1,)) for name, prompt in PROMPTS.items()]
    return furthest_last(trace, partial(OwnCacheExecutor, model, trace, block_size=BLOCK_SIZE), requests, expected)


def _own_logits(model: PreTrainedModel, prompt: tuple[int, ...]) -> F32:
    """Return the logits [T, V] of the model's own forward pass."""
    return as_floats(forward(model, input_ids=torch.tensor([prompt], device=model.device)))


def _measured(model: PreTrainedModel, trace: OwnCacheTrace) -> tuple[OwnCacheTrace, bool]:
    """Return the trace with the bytes of caches, and whether they all have one size. A cache that grows up to a window
    is measured as one that grows for ever.
    """
    executor, sizes = OwnCacheExecutor(model, trace, num_blocks=1, block_size=BLOCK_SIZE), []
    for num_tokens in MEASURED:
        cache = executor.new_cache()
        ids = torch.arange(num_tokens, device=model.device)[None] % 7 + 3
        executor.advance(cache, ids, ids.new_zeros(1))
        if cache.own is None:
            raise ModelError("it returns no cache of its tokens")
        sizes.append(sum({tensor.data_ptr(): tensor.nbytes for tensor in _tensors(cache)}.values()))
    *_, before, last = MEASURED
    token_bytes = max(0, -(-(sizes[-1] - sizes[-2]) // (last - before)))
    fixed_bytes = max(sizes[-1] - token_bytes * last, 1)
    never_grows = trace.argument is not None and len(set(sizes)) == 1
    return replace(trace, fixed_bytes=fixed_bytes, token_bytes=token_bytes), never_grows


def _tensors(cache: RequestCache) -> list[torch.Tensor]:
    """Return the tensors that a cache holds, in attributes and containers of its objects."""
    found, seen, left = [], dict[int, Any](), [cache.own, cache.in_modules]
    while left:
        value = left.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value  # kept, so that no other object has its id
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            left += value
        elif isinstance(value, Mapping):
            left += value.values()
        else:
            left.append(getattr(value, "__dict__", {}))
    return found
