"""Models whose layers attend by code of their own, connected to transformers' attention interface."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.bloom.modeling_bloom import _get_alibi_slopes
from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

Attend = Callable[..., Tensor]
"""(query [1, H, T, D], key, value, mask, **arguments) → [1, T, H, value_dim]"""


class Connected:
    """A method of a layer: its own with the implementation "eager", else ``other`` with (layer, attend, *arguments)."""

    def __init__(self, model: PreTrainedModel, layer: Any, own: Any, other: Callable[..., Any]) -> None:
        self._config, self._layer, self._own, self._other = model.config, layer, own, other

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        implementation = ALL_ATTENTION_FUNCTIONS.get(self._config._attn_implementation)
        if implementation is None:
            return self._own(*arguments, **named)

        def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **others: Any) -> Tensor:
            out: Tensor = implementation(self._layer, query, key, value, mask, **others)[0]
            return out.to(value.dtype)

        return self._other(self._layer, attend, *arguments, **named)


def why_not(config: PreTrainedConfig) -> str | None:
    """Return the reason why layers of a model with this configuration are not connected; None if they are."""
    if config.model_type not in _METHODS:
        return "its layers do not use the attention interface"
    if config.model_type == "falcon" and config.alibi:
        return "it rounds the biases of its positions (ALiBi) to bfloat16"
    return None


def connect(model: PreTrainedModel) -> bool:
    """Let the layers call the attention implementation of the model's configuration, unless that is "eager". Return
    False for a model of a type that is not known. A second call changes nothing.
    """
    name, other = _METHODS.get(model.config.model_type, ("", None))
    if other is None:
        return False
    for layer in model.modules():
        own = getattr(layer, name, None) if type(layer).__name__.endswith("Attention") else None
        if own is not None and not isinstance(own, Connected):
            setattr(layer, name, Connected(model, layer, own, other))
    return True


# The methods ``_attn`` of layers: from queries, keys and values [1, H, T, D] to [1, H, T, D] and no weights.


def _gptj(layer: Any, attend: Attend, *tensors: Tensor) -> tuple[Tensor, None]:
    return attend(*tensors, scaling=1 / float(layer.scale_attn)).transpose(1, 2), None


def _gpt_neo(layer: Any, attend: Attend, *tensors: Tensor) -> tuple[Tensor, None]:
    window = layer.config.window_size if layer.attention_type == "local" else None
    return attend(*tensors, scaling=1.0, own_window=window).transpose(1, 2), None


def _gpt_neox_japanese(layer: Any, attend: Attend, *tensors: Tensor) -> tuple[Tensor, None]:
    return attend(*tensors, scaling=1 / float(layer.norm_factor)).transpose(1, 2), None


# The methods ``forward`` of layers. alibi_slopes: [H], by which scores fall per position of distance.


@lru_cache(8)
def _bloom_slopes(num_heads: int, device: torch.device) -> Tensor:
    return _get_alibi_slopes(num_heads, device)


@lru_cache(8)
def _mpt_slopes(num_heads: int, device: torch.device) -> Tensor:
    return -build_mpt_alibi_tensor(num_heads, 2, device=device)[:, 0, 0]


def _falcon(
    layer: Any,
    attend: Attend,
    hidden: Tensor,
    alibi: None,
    attention_mask: Tensor,
    *,
    position_embeddings: Any,
    **_: Any,
) -> tuple[Tensor, None]:
    query, key, value = (x.transpose(1, 2) for x in layer._split_heads(layer.query_key_value(hidden)))
    if layer.new_decoder_architecture:  # it repeats keys and values
        key, value = (x[:, :: layer.num_heads // layer.num_kv_heads] for x in (key, value))
    query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
    return layer.dense(attend(query, key, value, attention_mask).flatten(2)), None


def _bloom(
    layer: Any, attend: Attend, hidden: Tensor, residual: Tensor, alibi: Tensor, attention_mask: Tensor, **_: Any
) -> tuple[Tensor, None]:
    query, key, value = layer._reshape(layer.query_key_value(hidden))
    slopes = _bloom_slopes(layer.num_heads, hidden.device)
    out = attend(query, key, value, attention_mask, scaling=layer.inv_norm_factor, alibi_slopes=slopes)
    return layer.dense(out.flatten(2)) + residual, None


def _xglm(layer: Any, attend: Attend, hidden_states: Tensor, attention_mask: Tensor, **_: Any) -> tuple[Tensor, None]:
    projected = (project(hidden_states) for project in (layer.q_proj, layer.k_proj, layer.v_proj))
    query, key, value = (x.unflatten(2, (layer.num_heads, -1)).transpose(1, 2) for x in projected)
    return layer.out_proj(attend(query, key, value, attention_mask, scaling=layer.scaling).flatten(2)), None


def _mpt(
    layer: Any, attend: Attend, hidden: Tensor, position_bias: Tensor, attention_mask: Tensor, **_: Any
) -> tuple[Tensor, None]:
    projected = layer.Wqkv(hidden)
    if layer.clip_qkv:
        projected = projected.clamp(min=-layer.clip_qkv, max=layer.clip_qkv)
    query, key, value = (x.unflatten(2, (layer.n_heads, -1)).transpose(1, 2) for x in projected.chunk(3, 2))
    slopes = _mpt_slopes(layer.n_heads, hidden.device)
    out = attend(query, key, value, attention_mask, scaling=layer.softmax_scale, alibi_slopes=slopes)
    return layer.out_proj(out.flatten(2)), None


_METHODS: Mapping[str, tuple[str, Callable[..., tuple[Tensor, None]]]] = {
    "bloom": ("forward", _bloom),
    "codegen": ("_attn", _gptj),
    "falcon": ("forward", _falcon),
    "gpt_neo": ("_attn", _gpt_neo),
    "gpt_neox_japanese": ("_attn", _gpt_neox_japanese),
    "gptj": ("_attn", _gptj),
    "mpt": ("forward", _mpt),
    "xglm": ("forward", _xglm),
}
"""Type of a model → the method of its layers that attends, and what is called in its place."""
WITHOUT_POSITIONS = frozenset({"bloom", "mpt"})
"""Types whose models read no positions: attention alone depends on them."""
