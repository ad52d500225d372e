"""Adapters in the directories that PEFT writes: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

from foreword.errors import ModelError
from foreword.installation import install
from foreword.models.config import Config, read_config
from foreword.models.lora.adapter import MAX_RANK, LoraAdapter, LoraPair, Module, factors_of, pairs_of
from foreword.models.safetensors import read_safetensors

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

_READ = {
    "peft_type", "bias", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "target_modules",
    "exclude_modules", "layers_to_transform", "init_lora_weights", "task_type",
}  # fmt: skip
_WITHOUT_EFFECT = {
    "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode", "lora_dropout",
    "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size",
    "fan_in_fan_out", "layers_pattern", "runtime_config", "ephemeral_gpu_offload", "ensure_weight_tying",
}  # fmt: skip
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Ways to start training that change the base model's weights too."""
_TENSOR = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight")
_LAYER = re.compile(r".*\.[^.]*\.(\d+)\.")
_PATTERN_SECONDS = 0.1


def read_peft(
    folder: Path, modules: Mapping[str, Module], renamed: Mapping[str, str] = MappingProxyType({})
) -> LoraAdapter:
    """Return the adapter of a directory, for a model with these linear layers by their names in it. renamed: parts of
    other names that these may have, with what they are in ``modules``. Raise ModelError if a file is missing or
    damaged, if the adapter is of another model, or needs what is not supported.
    """
    config = read_config(folder / CONFIG)
    _check_supported(config)
    if not (folder / WEIGHTS).exists():
        raise ModelError(f"{folder}: has no {WEIGHTS}. Save the adapter with safetensors")
    path, tensors = folder / WEIGHTS, read_safetensors(folder / WEIGHTS)
    modules = _as_named(modules, tensors, renamed)
    found = factors_of(path, tensors, _TENSOR, modules, _SAVE_AGAIN)
    targets = _targets(config, modules)
    required = {name for name in targets if not (modules[name].is_router and config.values["target_modules"] == _ALL)}
    if missing := sorted(required - found.keys()):
        raise config.error(f"target_modules name {missing[0]}, which {WEIGHTS} does not have", _SAVE_AGAIN)
    if extra := sorted(found.keys() - targets):
        raise config.error(f"target_modules do not name {extra[0]}, which {WEIGHTS} has", _SAVE_AGAIN)
    rank_of, alpha_of = _pattern(config, "rank_pattern"), _pattern(config, "alpha_pattern")
    pairs: dict[str, LoraPair] = {}
    for name, (a, b) in found.items():
        rank = rank_of(name, config.size("r", 8))
        if a.shape[0] != rank and rank <= MAX_RANK:
            raise config.error(f"gives {name} the rank {rank:g}, the weights have {a.shape[0]}", _SAVE_AGAIN)
        root = math.sqrt(rank) if config.get("use_rslora", bool, False) else rank
        scale = alpha_of(name, config.get("lora_alpha", float, 8.0)) / root
        pairs |= pairs_of(path, name, modules[name], a, b, scale)
    return LoraAdapter(folder, pairs)


def _as_named(
    modules: Mapping[str, Module], tensors: Iterable[str], renamed: Mapping[str, str]
) -> Mapping[str, Module]:
    """Return the modules by the names that those have which tensors change."""
    found = dict(modules)
    for name in {match[1] for tensor in tensors if (match := _TENSOR.fullmatch(tensor))} - modules.keys():
        other = f"{name}.weight"
        for part, own in renamed.items():
            other = other.replace(part, own)
        if (module := found.pop(other.removesuffix(".weight"), None)) is not None:
            found[name] = module
    return found


_ALL = "all-linear"
_SAVE_AGAIN = "Save the adapter again with PEFT"
_PLAIN = "Train a plain LoRA adapter, or merge this one into the model"


def _check_supported(config: Config) -> None:
    """Raise ModelError, which names the first key, if the configuration asks for more than a low-rank change of linear
    layers.
    """
    kind = config.get("peft_type", str)
    if kind != "LORA":
        raise config.error(f"peft_type {kind!r:.80} is not supported, only 'LORA'", _PLAIN)
    if (task := config.values.get("task_type")) not in (None, "CAUSAL_LM"):
        raise config.error(f"task_type {task!r:.80} is not supported, only 'CAUSAL_LM'", _PLAIN)
    if (bias := config.get("bias", str, "none")) != "none":
        raise config.error(f"bias {bias!r:.80} is not supported, only 'none'", _PLAIN)
    start = config.values.get("init_lora_weights")
    if isinstance(start, str) and start.startswith(_CHANGES_BASE):
        raise config.error(f"init_lora_weights {start!r:.80} changes the base model", "Convert it to a plain adapter")
    for key in sorted(config.values.keys() - _READ - _WITHOUT_EFFECT):
        if value := config.values[key]:
            raise config.error(f"{key} = {value!r:.80} is not supported", _PLAIN)


def _targets(config: Config, modules: Iterable[str]) -> set[str]:
    """Return the modules that target_modules, exclude_modules and layers_to_transform choose, as PEFT does."""
    chosen = _matcher(config, "target_modules")
    excluded = _matcher(config, "exclude_modules") if config.values.get("exclude_modules") else lambda name: False
    layers = config.values.get("layers_to_transform")
    if layers is not None:
        layers = layers if isinstance(layers, list) else [layers]
        if not all(type(layer) is int for layer in layers):
            raise config.error(f"layers_to_transform {layers!r:.80} are not layers", _SAVE_AGAIN)
        if config.values.get("layers_pattern") not in (None, [], "layers", ["layers"]):
            raise config.error("layers_pattern is not supported, except 'layers'", _PLAIN)
    return {name for name in modules if chosen(name) and not excluded(name) and (not layers or _layer(name) in layers)}


def _layer(name: str) -> int | None:
    """Return the layer of a module; None for one that is in none."""
    found = _LAYER.match(name)
    return None if found is None else int(found[1])


def _matcher(config: Config, key: str) -> Callable[[str], bool]:
    """Return whether a module is one of a list, by the end of its name, or matches a pattern."""
    given = config.values.get(key)
    if key == "target_modules" and given == _ALL:
        return lambda name: True
    if isinstance(given, str):
        return lambda name: _matches(config, key, given, name)
    if not isinstance(given, list) or not all(isinstance(item, str) for item in given):
        raise config.error(f"{key} {given!r:.80} is neither a list of names nor a pattern", _SAVE_AGAIN)
    ends = tuple(f".{item}" for item in given)
    return lambda name: f".{name}".endswith(ends)


def _pattern(config: Config, key: str) -> Callable[[str, float], float]:
    """Return the positive number that rank_pattern or alpha_pattern give a module, or the default."""
    given = config.values.get(key) or {}
    if not isinstance(given, Mapping):
        raise config.error(f"{key} {given!r:.80} is not an object", _SAVE_AGAIN)
    numbers = Config(config.path, given)

    def value(name: str, default: float) -> float:
        for pattern in given:
            if _matches(config, key, rf"(.*\.)?({pattern})", name):
                return numbers.positive(pattern)
        return default

    return value


def _matches(config: Config, key: str, pattern: str, name: str) -> bool:
    """Return whether a pattern matches a whole name. Raise ModelError for one that is invalid or takes too long."""
    plain = pattern.removeprefix(r"(.*\.)?(").removesuffix(")")
    if plain != pattern and re.fullmatch(r"[\w.]+", plain):  # the name of a module; its dots are taken literally
        return f".{name}".endswith(f".{plain}")
    try:
        import regex  # here: few adapters have patterns
    except ImportError:
        raise config.error(f"{key} has a pattern", f"{install('templates')} It reads patterns.") from None
    try:
        return regex.fullmatch(pattern, name, timeout=_PATTERN_SECONDS) is not None
    except (regex.error, TimeoutError, RecursionError, MemoryError) as error:
        raise config.error(f"{key}: pattern {pattern!r:.80} cannot be used ({error})", _SAVE_AGAIN) from None
