"""A model's hyperparameters under the names of a ``config.json``, read from that file or from GGUF metadata."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foreword.errors import ModelError
from foreword.jsonfile import read_object
from foreword.models.files import T, typed_value
from foreword.models.gguf import GGUF

USE_ITS_CONFIG = "Use the configuration that came with the weights"
"""The fix of most errors about a configuration."""


@dataclass(frozen=True, slots=True)
class Config:
    """Named values and the file that holds them, which errors name. A value of null counts as absent.

    served_length: maximum number of tokens of a request, where the arithmetic depends on it; None: the default.
    """

    path: Path
    values: Mapping[str, Any]
    served_length: int | None = None

    def get(self, key: str, kind: type[T], default: T | None = None) -> T:
        """The value of a key. ModelError if it is absent without a default, or not a ``kind``."""
        try:
            return typed_value(self.values, key, kind, default)
        except TypeError as error:
            raise self.error(str(error), USE_ITS_CONFIG) from None

    def size(self, key: str, default: int | None = None, *, most: int = 1 << 28) -> int:
        """An integer from 1 to ``most``."""
        value = self.get(key, int, default)
        if not 0 < value <= most:
            raise self.error(f"{key} = {value} is not from 1 to {most}", USE_ITS_CONFIG)
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        """A number above zero."""
        value = self.get(key, float, default)
        if value <= 0:
            raise self.error(f"{key} = {value} is not above zero", USE_ITS_CONFIG)
        return value

    def sequence(self, key: str) -> Sequence[Any]:
        """A list, empty if the key is absent."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, list):
            raise self.error(f"{key} is {value!r:.80}, not a list", USE_ITS_CONFIG)
        return value or ()

    def optional(self, key: str, kind: type[T]) -> T | None:
        return None if self.values.get(key) is None else self.get(key, kind)

    def error(self, what: str, fix: str) -> ModelError:
        return ModelError(f"{self.path}: {what}. {fix}")


def read_config(path: Path) -> Config:
    """Read a config.json. ModelError if it cannot be read or is not a JSON object."""
    return Config(path, read_object(path, ModelError))


_GGUF_KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "context_length",
    "rope_theta": "rope.freq_base",
    "rope_local_base_freq": "rope.freq_base_swa",
    "rotary_dim": "rope.dimension_count",
    "sliding_window": "attention.sliding_window",
    "sliding_window_pattern": "attention.sliding_window_pattern",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "full_attention_interval": "full_attention_interval",
    "linear_num_value_heads": "ssm.time_step_rank",
    "linear_num_key_heads": "ssm.group_count",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_values": "ssm.inner_size",
    "linear_conv_kernel_dim": "ssm.conv_kernel",
}


def config_from_gguf(gguf: GGUF) -> Config:
    """The metadata of a GGUF file as a config. Keys that GGUF lacks are left to each family's defaults."""
    prefix = gguf.get("general.architecture", str) + "."
    found = {name: gguf.metadata.get(prefix + key) for name, key in _GGUF_KEYS.items()}
    values: dict[str, Any] = {name: value for name, value in found.items() if value is not None}
    if (embed := gguf.tensors.get("token_embd.weight")) is not None:
        values["vocab_size"] = embed.shape[0]
    values["tie_word_embeddings"] = "output.weight" not in gguf.tensors
    values["rope_scaling"] = _rope_scaling(gguf, prefix + "rope.scaling.")
    return Config(gguf.path, values)


ROPE_FACTORS = {
    "divisors": "rope_freqs.weight",
    "short_factor": "rope_factors_short.weight",
    "long_factor": "rope_factors_long.weight",
}
"""Tensors of a GGUF file that are parameters of the rotary embedding."""


def _rope_scaling(gguf: GGUF, prefix: str) -> dict[str, Any] | None:
    """Metadata and tensors as ``rope_scaling``. Files with factor tensors may have any scaling type, or none."""
    tensors = {key: gguf.tensors[name] for key, name in ROPE_FACTORS.items() if name in gguf.tensors}
    factors: dict[str, Any] = {key: tensor.dequantize().ravel().tolist() for key, tensor in tensors.items()}
    if "divisors" in factors:
        return {"rope_type": "divided", **factors}
    original = gguf.metadata.get(prefix + "original_context_length")
    if factors:
        scale = gguf.metadata.get(prefix + "attn_factor")
        return {
            "rope_type": "longrope",
            "original_max_position_embeddings": original,
            "attention_factor": scale,
            **factors,
        }
    if (kind := gguf.get(prefix + "type", str, "none")) == "none":
        return None
    keys = {"factor": "factor", "beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
    found = {name: gguf.metadata.get(prefix + key) for name, key in keys.items()}
    return {"rope_type": kind, "original_max_position_embeddings": original, **found}
