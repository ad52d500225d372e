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
from foreword.models.lora.adapter import LoraAdapter, LoraPair, Module, factors_of, joined, pairs_of
from foreword.models.safetensors import read_safetensors
from foreword.models.weights import Tensor, float_tensor

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

_READ = {
    "peft_type", "bias", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "target_modules",
    "exclude_modules", "layers_to_transform", "init_lora_weights", "task_type", "target_parameters", "peft_version",
}  # fmt: skip
_WITHOUT_EFFECT = {
    "auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "lora_dropout",
    "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size",
    "fan_in_fan_out", "layers_pattern", "runtime_config", "ephemeral_gpu_offload", "ensure_weight_tying",
}  # fmt: skip
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Ways to start training that change the base model's weights too."""
_TENSOR = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight")
_LAYER = re.compile(r".*?\.[^.]*\.(\d+)\.")
_WRAPPED = re.compile(r"((.*?\.\d+)\.(?:.*\.)?experts)((?:\.base_layer)*)")
"""The name of the module that has the parameters of all experts, as PEFT wraps it: for each parameter that an adapter
changes, a module that has the one of the parameter before as ``base_layer``.
"""
_TASKS = ("CAUSAL_LM", "FEATURE_EXTRACTION")
"""Kinds of models that PEFT trains whose adapters change linear layers alone."""
_TEXT_MODEL = "language_model."
"""The beginning of names of a text model in a model with encoders that has no head."""
_DIGITS = "0123456789"
_PATTERN_SECONDS = 0.1


def read_peft(
    folder: Path,
    modules: Mapping[str, Module],
    renamed: Mapping[str, str] = MappingProxyType({}),
    parameters: Mapping[str, Mapping[str, Module]] = MappingProxyType({}),
    model: str = "",
    others: Mapping[str, Module] = MappingProxyType({}),
) -> LoraAdapter:
    """Return the adapter of a directory, for a model with these linear layers by their names in it. renamed: parts of
    other names that these may have, with what they are in ``modules``. parameters: see `parameters_of`. model: the
    beginning of names that those of an adapter for the model without its head lack. others: linear layers that stand
    for all of ``modules`` if the adapter changes one of them. Raise ModelError if a file is missing or damaged, if the
    adapter is of another model, or needs what is not supported.
    """
    config = read_config(folder / CONFIG)
    _check_supported(config)
    if not (folder / WEIGHTS).exists():
        raise ModelError(f"{folder}: has no {WEIGHTS}. Save the adapter with safetensors")
    path, tensors = folder / WEIGHTS, read_safetensors(folder / WEIGHTS)
    modules = _as_named(modules, tensors, renamed, model)
    of_class = _as_named(others, tensors, renamed, model)
    if any(match[1] in of_class.keys() - modules.keys() for name in tensors if (match := _TENSOR.fullmatch(name))):
        modules = of_class
    targets = dict.fromkeys(_targets(config, modules), "target_modules")
    tensors, wrapped, of_parameters = _parameters(config, modules, tensors, renamed, parameters)
    modules = {**modules, **wrapped}
    targets |= dict.fromkeys(of_parameters, "target_parameters")
    found = factors_of(path, tensors, _TENSOR, modules, _SAVE_AGAIN)
    has_experts = any(modules[name].is_expert for name in found)
    linear = config.values.get("target_modules")
    is_all, names_experts = linear == _ALL, isinstance(linear, list) and any("experts." in end for end in linear)
    for name in sorted(targets.keys() - found.keys()):
        module = modules[name]
        is_without = (module.is_router and is_all) or (module.is_expert and not has_experts and not names_experts)
        if module.parts and not is_without:
            raise config.error(f"{targets[name]} name {name}, which {WEIGHTS} does not have", _SAVE_AGAIN)
    if extra := sorted(found.keys() - targets.keys()):
        raise config.error(f"target_modules do not name {extra[0]}, which {WEIGHTS} has", _SAVE_AGAIN)
    rank_of, alpha_of = _pattern(config, "rank_pattern"), _pattern(config, "alpha_pattern")
    pairs: dict[str, LoraPair] = {}
    swapped = _is_swapped(config, modules, found)
    for name, (a, b) in found.items():
        module, key = modules[name], of_parameters.get(name, name)
        rank = rank_of(key, config.size("r", 8))
        count = module.num_experts + module.num_idle
        if a.shape[0] != rank * (count or 1):
            times = f" {count} times" if count else ""
            raise config.error(f"gives {name}{times} the rank {rank:g}, the weights have {a.shape[0]}", _SAVE_AGAIN)
        root = math.sqrt(rank) if config.get("use_rslora", bool, False) else rank
        scale = alpha_of(key, config.get("lora_alpha", float, 8.0)) / root
        if module.num_experts:
            a, b = _by_expert(config, name, module, a, b, swapped=swapped)
        pairs = joined(path, pairs, pairs_of(path, name, module, a, b, scale), name)
    return LoraAdapter(folder, pairs)


def _parameters(
    config: Config,
    modules: Mapping[str, Module],
    tensors: Mapping[str, Tensor],
    renamed: Mapping[str, str],
    parameters: Mapping[str, Mapping[str, Module]],
) -> tuple[dict[str, Tensor], dict[str, Module], dict[str, str]]:
    """Return the tensors with those of parameters by the names of these, the parameters that ``target_parameters``
    name, and the names of what they choose: modules as tensors have them → that of the parameter.
    """
    given = config.values.get("target_parameters") or []
    if not isinstance(given, list) or not all(isinstance(target, str) for target in given):
        raise config.error(f"target_parameters {given!r:.80} is not a list of names", _SAVE_AGAIN)
    layers = {_renamed(f"{layer}.", renamed): layer for layer in parameters}
    found = {name: match for name in tensors if (match := _TENSOR.fullmatch(name))}
    # The module of the experts in a layer, as the file names it, and the part of it behind the name of the layer.
    places, inside, renaming = dict[str, str](), ".experts", ("", "")
    for match in found.values():
        of = _WRAPPED.fullmatch(match[1])
        if of is not None and (own := _renamed(f"{of[2]}.", renamed)) in layers:
            places[layers[own]], inside = of[1], of[1].removeprefix(of[2])
            renaming = layers[own].rstrip(_DIGITS), of[2].rstrip(_DIGITS)
    wrapped: dict[str, Module] = {}
    order: dict[str, list[str]] = {}
    for layer, of_layer in parameters.items():
        place = places.get(layer, layer.replace(*renaming, 1) + inside)
        chosen = {f"{place}.{name}": module for name, module in of_layer.items()}
        chosen = {name: module for name, module in chosen.items() if _is_named(name, given)}
        order[place] = list(chosen)
        wrapped |= chosen
    names = {name: f"{name}.weight" for name in modules if _is_named(f"{name}.weight", given)}
    names |= {name: name for name in wrapped}
    if given and not names:  # PEFT itself adds names of routers that a model may lack
        raise config.error(f"target_parameters {given!r:.80} name no matrix of this model that adapters change", _PLAIN)
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        of = _WRAPPED.fullmatch(found[name][1]) if name in found else None
        inner_first, depth = (order.get(of[1], []), of[3].count(".")) if of else ([], 0)
        if depth < len(inner_first):
            name = name.replace(found[name][1], inner_first[-1 - depth])
        if name in result or (name in tensors and depth < len(inner_first)):
            raise config.error(f"{WEIGHTS} has two tensors {name}", _SAVE_AGAIN)
        result[name] = tensor
    return result, wrapped, names


def _is_named(parameter: str, targets: Iterable[str]) -> bool:
    """Return whether one of the targets is the name of a parameter, or its end."""
    return any(f".{parameter}".endswith(f".{target}") for target in targets)


def _is_swapped(
    config: Config, modules: Mapping[str, Module], found: Mapping[str, tuple[Tensor, Tensor]]
) -> bool | None:
    """Return whether the factors of parameters of experts are swapped, see `_by_expert`. The first one says it whose
    matrices are not square, else the version of PEFT. Return None if the adapter has no such parameter.
    """
    swapped = None
    for name, (a, b) in found.items():
        module = modules[name]
        if not module.num_experts:
            continue
        if module.num_outputs != module.num_inputs:
            return (a.shape[-1], b.shape[0]) == (module.num_outputs, module.num_inputs)
        swapped = module.swapped == ("from 0.19" if _version(config) >= (0, 19) else "before 0.19")
    return swapped


def _by_expert(
    config: Config, name: str, module: Module, a: Tensor, b: Tensor, *, swapped: bool | None
) -> tuple[Tensor, Tensor]:
    """Return the factors of a parameter of all experts as [experts, rank, in] and [experts, out, rank]. In the file
    they are [experts · rank, in] and [out, rank · experts], or swapped: [experts · rank, out] and [in, rank · experts].
    """
    count = module.num_experts + module.num_idle
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] % count or b.shape[1] != a.shape[0]:
        raise config.error(f"the weights have the shapes {a.shape} and {b.shape} for {name}", _SAVE_AGAIN)
    rank = a.shape[0] // count
    first = a.dequantize().reshape(count, rank, -1)
    second = b.dequantize().reshape(-1, rank, count)
    if swapped:
        first, second = second.transpose(2, 1, 0), first.swapaxes(1, 2)
    else:
        second = second.transpose(2, 0, 1)
    return float_tensor(first[: module.num_experts]), float_tensor(second[: module.num_experts])


def _version(config: Config) -> tuple[int, ...]:
    """Return the version of PEFT that wrote an adapter; (0, 0) if it does not say so."""
    numbers = re.match(r"(\d{1,4})\.(\d{1,4})", str(config.values.get("peft_version")))
    return (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)


def _as_named(
    modules: Mapping[str, Module], tensors: Iterable[str], renamed: Mapping[str, str], model: str
) -> Mapping[str, Module]:
    """Return the modules by the names that those have which tensors change."""
    found = dict(modules)
    for name in {match[1] for tensor in tensors if (match := _TENSOR.fullmatch(tensor))} - modules.keys():
        other = _renamed(f"{name}.weight", renamed).removesuffix(".weight")
        if model and other not in found:
            other = model + other.removeprefix(_TEXT_MODEL)
        if (module := found.pop(other, None)) is not None:
            found[name] = module
    return found


def _renamed(name: str, renamed: Mapping[str, str]) -> str:
    """Return a name with other names of its parts: see `read_peft`."""
    for part, own in renamed.items():
        name = name.replace(part, own)
    return name


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
    if (task := config.values.get("task_type")) not in (None, *_TASKS):
        raise config.error(f"task_type {task!r:.80} is not supported, only {' and '.join(map(repr, _TASKS))}", _PLAIN)
    if (bias := config.get("bias", str, "none")) != "none":
        raise config.error(f"bias {bias!r:.80} is not supported, only 'none'", _PLAIN)
    start = config.values.get("init_lora_weights")
    if isinstance(start, str) and start.startswith(_CHANGES_BASE):
        raise config.error(f"init_lora_weights {start!r:.80} changes the base model", "Convert it to a plain adapter")
    for key in sorted(config.values.keys() - _READ - _WITHOUT_EFFECT):
        if value := config.values[key]:
            raise config.error(f"{key} = {value!r:.80} is not supported", _PLAIN)


def _targets(config: Config, modules: Mapping[str, Module]) -> set[str]:
    """Return the modules that target_modules, exclude_modules and layers_to_transform choose, as PEFT does."""
    is_empty = config.values.get("target_modules") in (None, []) and config.values.get("target_parameters")
    chosen = (lambda name: False) if is_empty else _matcher(config, "target_modules")
    excluded = _matcher(config, "exclude_modules") if config.values.get("exclude_modules") else lambda name: False
    layers = config.values.get("layers_to_transform")
    if layers is not None:
        layers = layers if isinstance(layers, list) else [layers]
        if not all(type(layer) is int for layer in layers):
            raise config.error(f"layers_to_transform {layers!r:.80} are not layers", _SAVE_AGAIN)
        if config.values.get("layers_pattern") not in (None, [], "layers", ["layers"]):
            raise config.error("layers_pattern is not supported, except 'layers'", _PLAIN)
    linear = (name for name, module in modules.items() if not module.num_experts)
    return {name for name in linear if chosen(name) and not excluded(name) and (not layers or _layer(name) in layers)}


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
