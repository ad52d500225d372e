"""The executor of models of transformers."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from foreword.arrays import F32, I64
from foreword.batch import InputBatch
from foreword.errors import EngineError
from foreword.executors.executor import Capability
from foreword.executors.host import TransferPagedExecutor
from foreword.executors.inputs import StepInputs, last_seen
from foreword.executors.pooling import Pooler
from foreword.executors.torch.cache import PagedCache
from foreword.executors.torch.kernel_attention import paged_attention
from foreword.executors.torch.loras import Loras, Product, StepLoras
from foreword.executors.torch.tensors import as_floats, as_tensor
from foreword.executors.transformers.interface import forward, register, set_attention, unregister
from foreword.executors.transformers.trace import Trace
from foreword.models.pooling import PoolingSpec

DEEPSTACK = "deepstack_visual_embeds"
"""The argument of a decoder whose first layers add features of images."""


class TransformersExecutor(TransferPagedExecutor):
    """Runs a causal model of transformers, whose attention reads and writes paged keys and values.

    trace: of the model. num_blocks, block_size: the KV pool; block ids are shared by all KV groups and block 0 is the
    null block. Keys and values have the model's dtype. first_position: the position of a first token. hidden_size: of
    prompt embeddings, 0 if the model reads none; extra_size: see `Executor`. mrope_dims: of its M-RoPE positions, 0 for
    none. compile: with torch.compile, all but attention; steps with adapters, of pooling requests, or with vectors for
    several layers are not compiled. pooling: of pooling requests, None if there are none.

    The model's attention implementation is this executor's until `close`.
    """

    cache: PagedCache
    adapters: Loras

    def __init__(
        self,
        model: PreTrainedModel,
        trace: Trace,
        *,
        num_blocks: int,
        block_size: int,
        first_position: int = 0,
        hidden_size: int = 0,
        extra_size: int = 0,
        mrope_dims: int = 0,
        prefix_lm: bool = False,
        compile: bool = False,
        pooling: PoolingSpec | None = None,
    ) -> None:
        products = [
            Product((name,), (range(outputs),), range(inputs)) for name, (outputs, inputs) in trace.linear.items()
        ]
        cache = PagedCache(
            trace.layers, num_blocks=num_blocks, block_size=block_size, dtype=model.dtype, device=model.device
        )
        super().__init__(
            cache,
            Loras(products, model.device, model.dtype),
            pooler=None if pooling is None else Pooler(pooling, {}),
            hidden_size=hidden_size,
            extra_size=extra_size,
            mrope_dims=mrope_dims,
            prefix_lm=prefix_lm,
        )
        self.model, self.trace, self.first_position = model, trace, first_position
        self._layers = {name: model.get_submodule(name) for name in trace.linear}
        if products:
            self.capabilities |= {Capability.LORA}
        if pooling is not None and model.base_model is not model:
            self.capabilities |= {Capability.POOLING}
        self._last = torch.zeros(0)  # hidden states of the last step with pooling requests
        self.attention = paged_attention(cache)
        self._num_calls = 0  # calls of attention in this step
        # Transformers keeps what is registered: the executor is freed with its cache when its engine is.
        attend, name = weakref.WeakMethod(self._attend), f"foreword_{id(self):x}"

        def attend_while_alive(*arguments: Any, **named: Any) -> tuple[torch.Tensor, None]:
            method = attend()
            assert method is not None
            return method(*arguments, **named)

        register(name, torch.compiler.disable(attend_while_alive) if compile else attend_while_alive, _no_mask)
        self._run = torch.compile(model, dynamic=True) if compile else model
        self._unregister = weakref.finalize(self, unregister, name)
        self._before = set_attention(model, name)

    @property
    def block_layout(self) -> str:
        return f"transformers {self.model.device.type} {self.model.dtype}"

    def close(self) -> None:
        """Give the model its attention back. Closing twice is harmless."""
        if self._unregister.alive:
            self._unregister()
            set_attention(self.model, self._before)

    def compute(self, batch: InputBatch, logits_indices: I64) -> F32:
        device, given = self.model.device, StepInputs.of(batch, self)
        self._num_calls = 0
        positions = as_tensor(batch.positions[: batch.num_tokens] if given.mrope is None else given.mrope, device)
        if self.mrope_dims:  # [mrope_dims, 1, T]
            positions = positions.expand(self.mrope_dims, -1).contiguous()[:, None]
        else:
            positions = positions[None]
        with torch.inference_mode(), self._inputs(batch, given) as (tokens, hooks):
            logits = forward(
                self.model if hooks else self._run,
                **tokens,
                position_ids=positions + self.first_position if self.first_position else positions,
                logits_to_keep=as_tensor(logits_indices, device),
            )
        if self._num_calls != len(self.trace.calls):
            raise EngineError(f"the model attended {self._num_calls} times in a step, not {len(self.trace.calls)}")
        return as_floats(logits)

    def hidden_states(self, tokens: I64) -> F32:
        return as_floats(self._last[as_tensor(tokens, self._last.device)])

    def _keep_hidden_states(self, _: torch.nn.Module, __: object, output: Any) -> None:
        self._last = output[0][0]

    @contextmanager
    def _inputs(
        self, batch: InputBatch, given: StepInputs
    ) -> Iterator[tuple[dict[str, torch.Tensor], list[RemovableHandle]]]:
        """Begin attention. In the block, the step's tokens, or vectors where some of them are prompt embeddings, and
        hooks of the model for what else it needs. Raise PlanError for a number without an adapter.
        """
        hooks: list[RemovableHandle] = []
        try:
            if (loras := self.adapters.of_step(batch)) is not None:
                hooks += [_with_lora(layer, loras, name) for name, layer in self._layers.items()]
            if batch.states.extras.pooling_params:
                hooks.append(self.model.base_model.register_forward_hook(self._keep_hidden_states))
            yield self._tokens(batch, given, hooks), hooks
        finally:
            for hook in hooks:
                hook.remove()

    def _tokens(self, batch: InputBatch, given: StepInputs, hooks: list[RemovableHandle]) -> dict[str, torch.Tensor]:
        ids = as_tensor(batch.input_ids[: batch.num_tokens], self.model.device).long()[None]
        if given.embeds is None:
            self.attention.begin(batch, last_seen(batch))
            return {"input_ids": ids}
        tokens, embeds = given.embeds
        self.attention.begin(batch, last_seen(batch, given.embeds if self.extra_size else None))
        vectors, at = self.model.get_input_embeddings()(ids), as_tensor(tokens, ids.device)
        first, *deep = as_tensor(embeds, ids.device).to(vectors.dtype).split(self.hidden_size, 1)
        vectors[0, at] = first
        if len(deep) > 1:  # `last_seen` reads the last one
            is_vector = torch.zeros(ids.shape, dtype=torch.bool, device=ids.device).index_fill_(1, at, True)
            hooks.append(_with_deepstack(self.model, is_vector, deep[:-1]))
        return {"inputs_embeds": vectors}

    def _attend(
        self, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, None]:
        """Compute the next call of this step in place of the model's attention: see `register`. Its trace is known."""
        call = self.trace.calls[self._num_calls]
        self._num_calls += 1
        if call.writes:
            self.attention.write(call.attention.layer, key[0].transpose(0, 1), value[0].transpose(0, 1))
        return self.attention.attend(call.attention, query[0].transpose(0, 1))[None], None


def _with_lora(layer: torch.nn.Module, loras: StepLoras, name: str) -> RemovableHandle:
    """Let the layer add the products of adapters. Return the hook."""

    def add(_: torch.nn.Module, args: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        loras.apply(out[0], args[0][0], (name,))

    return layer.register_forward_hook(add)


def _with_deepstack(model: PreTrainedModel, places: torch.Tensor, features: Sequence[torch.Tensor]) -> RemovableHandle:
    """Let the first layers of the model's decoder add features [N, hidden] at places bool [1, T]."""

    def add(
        _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, kwargs | {"visual_pos_masks": places, DEEPSTACK: features}

    parts = (part for part in model.modules() if DEEPSTACK in inspect.signature(part.forward).parameters)
    return next(parts).register_forward_pre_hook(add, with_kwargs=True)


def _no_mask(**_: Any) -> torch.Tensor:
    """Return a tensor that is not read: the calls' masks are known from the trace."""
    return torch.empty(0, dtype=torch.bool)
