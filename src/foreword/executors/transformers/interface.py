"""Attention of a model of transformers, replaced through the library's own interface."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

Attend = Callable[..., tuple[torch.Tensor, None]]
MakeMask = Callable[..., torch.Tensor | None]


def register(name: str, attend: Attend, make_mask: MakeMask) -> None:
    """Make an attention implementation known to transformers, until `unregister`.

    attend: (module, query [1, H, T, D], key, value, attention_mask, **arguments) → output [1, T, H, value_dim], None.
    make_mask: called once per kind of mask and forward pass with ``mask_function`` (batch, head, query, key → bool).
    """
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, make_mask)


def unregister(name: str) -> None:
    """Forget an implementation; harmless if it is not known."""
    for interface in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
        interface._global_mapping.pop(name, None)


@contextmanager
def attention_of(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Use this attention implementation in the block, then the one before."""
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def forward(model: PreTrainedModel, **inputs: Any) -> torch.Tensor:
    """The logits [L, V] of one sequence or batch, without a cache of the model's own."""
    logits: torch.Tensor = model(use_cache=False, return_dict=True, **inputs).logits[0]
    return logits
