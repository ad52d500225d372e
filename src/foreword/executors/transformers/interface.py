"""Attention of a model of transformers, replaced through the library's own interface."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
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


def text_attention(config: PreTrainedConfig, name: str) -> str | dict[str, str]:
    """Return this attention implementation for a decoder, as transformers takes it; encoders of images keep theirs."""
    return {"text_config": name} if "text_config" in config.sub_configs else name


def set_attention(model: PreTrainedModel, name: str) -> str:
    """Set the attention implementation of the decoder. Returns the one before."""
    before: str = model.config.get_text_config(decoder=True)._attn_implementation
    if type(model)._can_set_attn_implementation():
        model.set_attn_implementation(text_attention(model.config, name))
    else:  # connected layers read the configuration
        model.config._attn_implementation = name
    return before


@contextmanager
def attention_of(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Use this attention implementation in the block, then the one before."""
    before = set_attention(model, name)
    try:
        yield
    finally:
        set_attention(model, before)


def forward(model: PreTrainedModel, **inputs: Any) -> torch.Tensor:
    """Return the logits [L, V] of one sequence or batch, without a cache of the model's own."""
    return model(use_cache=False, return_dict=True, **inputs).logits[0]
