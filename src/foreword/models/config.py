"""A model's hyperparameters under the names of a ``config.json``, read from that file or from GGUF metadata."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from foreword.errors import ModelError
from foreword.models.files import T, typed_value
from foreword.models.gguf import GGUF, Strings
from foreword.models.keys import ONLY_IN_GGUF, WITHOUT_EFFECT, Keys
from foreword.models.text_files import read_object

O_BIAS = ONLY_IN_GGUF + "o_bias"
"""Whether the last product of attention has a bias, which the tensors of a GGUF file tell."""
EXPERT_LAYERS = ONLY_IN_GGUF + "expert_layers"
"""The layers with experts, which the tensors of a GGUF file tell."""
INDEXED_LAYERS = ONLY_IN_GGUF + "indexed_layers"
"""The layers that have tensors of an indexer in a GGUF file."""
USE_ITS_CONFIG = "Use the configuration that came with the weights"
"""The fix of most errors about a configuration."""


@dataclass(frozen=True, slots=True)
class Config:
    """Named values and the file that holds them, which errors name. `get` says what null means.

    served_length: maximum number of tokens of a request, where the arithmetic depends on it; None: the default.
    keys: those that may be read, with their defaults; empty: any. prefix: of their names in a GGUF file.
    part: of the file, which errors name. read: the keys that were read.
    """

    path: Path
    values: Mapping[str, Any]
    served_length: int | None = None
    keys: Keys = field(default_factory=dict)
    prefix: str = ""
    part: str = ""
    read: set[str] = field(default_factory=set, compare=False)

    def with_values(self, values: Mapping[str, Any]) -> Config:
        """Return the config with these values in place of those of the file."""
        return replace(self, values={**self.values, **values})

    def with_usual_names(self, names: Mapping[str, str]) -> Config:
        """Return the config with the values of keys that the file has under other names: ``names`` has the key of each.
        Raise ModelError if a key has different values by two names.
        """
        values = dict(self.values)
        for other, key in names.items():
            self.read.add(other)
            if other not in values:
                continue
            value, before = values.pop(other), values.get(key)
            if value is not None and before not in (None, value):
                raise self.error(f"{other} = {value!r:.80}, {key} = {before!r:.80}", USE_ITS_CONFIG)
            values[key] = before if value is None else value
        return replace(self, values=values)

    def value(self, key: str) -> Any:
        """Return the value of a key: None if it is null, the default of ``keys`` if the file lacks it."""
        self.read.add(key)
        is_there = key in self.values and self._is_of_file(key)
        return self.values[key] if is_there else self._default(key)

    def get(self, key: str, kind: type[T], default: T | None = None) -> T:
        """Return the value of a key, ``default`` for null. Raise ModelError if it is absent without a default, or not a
        ``kind``, and for null in place of a default that is not null: reference implementations do not use it then.
        """
        value, label = self.value(key), self.label(key)
        if value is None and default is None and (usual := self._default(key)) is not None:
            if usual:
                raise self.refused(key, None)
            value = usual  # to the reference, null is false
        try:
            return typed_value({label: value}, label, kind, default)
        except TypeError as error:
            raise self.error(str(error), USE_ITS_CONFIG) from None

    def size(self, key: str, default: int | None = None, *, most: int = 1 << 28) -> int:
        """Return an integer from 1 to ``most``."""
        value = self.get(key, int, default)
        if not 0 < value <= most:
            raise self.error(f"{self.label(key)} = {value} is not from 1 to {most}", USE_ITS_CONFIG)
        return value

    def count(self, key: str) -> int:
        """Return an integer from 0."""
        value = self.get(key, int)
        if value < 0:
            raise self.error(f"{self.label(key)} = {value} is below 0", USE_ITS_CONFIG)
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        """Return a number above zero."""
        value = self.get(key, float, default)
        if value <= 0:
            raise self.error(f"{self.label(key)} = {value} is not above zero", USE_ITS_CONFIG)
        return value

    def sequence(self, key: str) -> Sequence[Any]:
        """Return a list, empty if the key is absent."""
        value = self.value(key)
        if value is not None and not isinstance(value, list):
            raise self.error(f"{self.label(key)} is {value!r:.80}, not a list", USE_ITS_CONFIG)
        return () if value is None else value

    def indices(self, key: str, count: int) -> Sequence[int]:
        """Return a list of numbers from 0 to ``count`` − 1, empty if the key is absent."""
        for value in (found := self.sequence(key)):
            if type(value) is not int or not 0 <= value < count:
                reason = f"{self.label(key)} has {value!r:.80}, not an integer from 0 to {count - 1}"
                raise self.error(reason, USE_ITS_CONFIG)
        return found

    def optional(self, key: str, kind: type[T]) -> T | None:
        return None if self.value(key) is None else self.get(key, kind)

    def check(self, *, strict: bool = False) -> None:
        """Raise ModelError for a value of another type than ``keys`` say, or that they say is not computed, and if
        ``strict`` for any other key.
        """
        for key in self.keys.values():
            if key.value_type is not None:
                self.optional(key.name, key.value_type)
            if key.values and ((value := self.value(key.name)) is not None or self._default(key.name) is True):
                self.check_computed(key.name, value)
        if strict:
            for name, value in self.values.items():
                if value is not None and name not in self.keys:
                    raise self.refused(name, value)

    def check_computed(self, key: str, value: object) -> None:
        """Raise ModelError if ``keys`` say that this value of a key is not computed."""
        # In Python 0 is False and 1 is True; in JSON they are not.
        values, is_bool = self.keys[key].values, isinstance(value, bool)
        if values and not any(value == other and isinstance(other, bool) is is_bool for other in values):
            raise self.refused(key, value)

    def refused(self, key: str, value: object) -> ModelError:
        """Return the error for a value that is not computed."""
        row = self.keys.get(key)
        computed = [repr(other) for other in row.values if other is not None] if row else []
        label = self.label(key)
        fix = f"Use a model with {label} = {' or '.join(computed)}" if computed else "Use a model without it"
        return self.error(f"{label} = {value!r:.80} is not supported", fix)

    def unread(self, declared: Keys) -> tuple[str, ...]:
        """Return the keys of the file that were not read, are not declared and not known to have no effect, sorted."""
        known = {*self.read, *declared, *(self.prefix + name for name in WITHOUT_EFFECT), *WITHOUT_EFFECT}
        return tuple(
            sorted(
                key
                for key, value in self.values.items()
                if value is not None and not (key in known and self._is_of_file(key))
            )
        )

    def _is_of_file(self, key: str) -> bool:
        """Return whether a file may have the key: a config.json has none of those of GGUF files alone."""
        return bool(self.prefix) or not key.startswith(ONLY_IN_GGUF)

    def error(self, what: str, fix: str) -> ModelError:
        return ModelError(f"{self.path}: {self.part}{what}. {fix}")

    def _default(self, key: str) -> Any:
        if not self.keys:
            return None
        row = self.keys[key]
        return row.gguf_default if self.prefix and row.gguf else row.default

    def label(self, key: str) -> str:
        """Return the name of a key in the file."""
        row = self.keys.get(key)
        if row is None:
            return key
        return self.prefix + row.gguf if self.prefix and row.gguf else row.label


def read_config(path: Path) -> Config:
    """Read a config.json. Raise ModelError if it cannot be read or is not a JSON object."""
    return Config(path, read_object(path))


def config_from_gguf(gguf: GGUF, keys: Keys) -> Config:
    """Return a GGUF file's metadata as the config of a family with these keys; others keep their names."""
    prefix = gguf.get("general.architecture", str) + "."
    names = {key.gguf: key.name for key in keys.values() if key.gguf}
    values: dict[str, Any] = {}
    rotates = "rope_scaling" in keys
    for key, value in gguf.metadata.items():
        name = key.removeprefix(prefix)
        is_scaling = name == _SCALE or name.startswith(_SCALING)
        if key.startswith(prefix) and not (rotates and is_scaling):
            values[names.get(name, key)] = _plain(value)
    if (embed := gguf.tensors.get("token_embd.weight")) is not None:
        size = embed.shape[0]
        if (given := values.setdefault("vocab_size", size)) != size:
            reason = f"{prefix}vocab_size = {given!r:.80}, token_embd.weight has {size} rows"
            raise ModelError(f"{gguf.path}: {reason}. Convert the model again")
    values["tie_word_embeddings"] = "output.weight" not in gguf.tensors
    for key, tensor in _TOLD_BY_TENSORS.items():
        if key in keys and not keys[key].values:
            values[key] = any(name.endswith(tensor) for name in gguf.tensors)
    if "laurel_rank" in keys and (left := gguf.tensors.get("blk.0.laurel_l.weight")) is not None:
        values["laurel_rank"] = left.shape[0]
    for key, tensor in ((EXPERT_LAYERS, ".ffn_gate_inp.weight"), (INDEXED_LAYERS, ".indexer.attn_k.weight")):
        if key in keys:
            names_of_layers = (name.split(".") for name in gguf.tensors if name.endswith(tensor))
            values[key] = [int(layer) for _, layer, *_ in names_of_layers if layer.isdecimal()]
    if "gating" in keys and (gate := gguf.tensors.get("blk.0.attn_gate.weight")) is not None:
        values["gating"] = "per-head" if gate.shape[0] == _first(values.get("num_attention_heads")) else "per-element"
    if "attention_k_eq_v" in keys:
        layers = [name for name in gguf.tensors if name.endswith(".attn_k.weight")]
        values["attention_k_eq_v"] = any(name.replace("attn_k", "attn_v") not in gguf.tensors for name in layers)
    if rotates:
        values["rope_scaling"] = _rope_scaling(gguf, prefix)
    return Config(gguf.path, values, keys=keys, prefix=prefix)


ROPE_FACTORS = {
    "divisors": "rope_freqs.weight",
    "short_factor": "rope_factors_short.weight",
    "long_factor": "rope_factors_long.weight",
}
"""Tensors of a GGUF file that are parameters of the rotary embedding."""
_TOLD_BY_TENSORS: Mapping[str, str | tuple[str, ...]] = {
    **dict.fromkeys(("attention_bias", "use_qkv_bias", "use_bias", "bias"), (".attn_q.bias", ".attn_qkv.bias")),
    **dict.fromkeys(("attention_out_bias", O_BIAS), ".attn_output.bias"),
    "mlp_bias": ".ffn_down.bias",
    **dict.fromkeys(("use_qk_norm", "qk_layernorm"), ".attn_q_norm.weight"),
    "lm_head_bias": "output.bias",
    "mamba_rms_norm": ".ssm_norm.weight",
    **dict.fromkeys(("mamba_conv_bias", "use_conv_bias"), ".ssm_conv1d.bias"),
    "new_decoder_architecture": ".attn_norm_2.weight",
}
"""Keys that GGUF files do not have: whether a layer has this tensor."""
_SCALING, _SCALE = "rope.scaling.", "rope.scale_linear"
_SCALING_NAMES = {
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}


def _first(value: object) -> object:
    """Return the number of the first layer, where layers may have their own."""
    return value[0] if isinstance(value, list) and value else value


def _plain(value: object) -> object:
    """Return an array as a list, anything else as it is."""
    return value.tolist() if isinstance(value, np.ndarray | Strings) else value


def _rope_scaling(gguf: GGUF, prefix: str) -> dict[str, Any]:
    """Return metadata and tensors as ``rope_scaling``. A factor without a type is linear, as in llama.cpp; files with
    factor tensors need no type.
    """
    found: dict[str, Any] = {
        _SCALING_NAMES.get(name, name): _plain(value)
        for key, value in gguf.metadata.items()
        if (name := key.removeprefix(prefix + _SCALING)) != key
    }
    found["factor"] = found.get("factor", _plain(gguf.metadata.get(prefix + _SCALE))) or None  # 0 is unset
    kind = found.pop("type", "linear" if found["factor"] else "none")
    tensors = {key: gguf.tensors[name] for key, name in ROPE_FACTORS.items() if name in gguf.tensors}
    factors: dict[str, Any] = {key: tensor.dequantize().ravel().tolist() for key, tensor in tensors.items()}
    if kind == "none":
        del found["factor"]  # has no use
    if not factors:
        return {**found, "rope_type": "default" if kind == "none" else kind}
    if kind == "yarn":
        reason = f"{prefix}{_SCALING}type = 'yarn' is not supported beside {ROPE_FACTORS[next(iter(factors))]}"
        raise ModelError(f"{gguf.path}: {reason}. Convert the model again")
    if "divisors" in factors:
        return {**found, "rope_type": "divided", **factors}
    found["linear_factor"], found["attention_factor"] = found.pop("factor", None), found.pop("attn_factor", None)
    return {**found, "rope_type": "longrope", **factors}
