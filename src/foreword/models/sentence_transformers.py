"""Read the data of a sentence-transformers directory besides the model: modules, pooling, prompts, length of texts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foreword.errors import ModelError
from foreword.models.config import USE_ITS_CONFIG, Config
from foreword.models.files import FETCH_AGAIN
from foreword.models.keys import Key, Keys, only, table
from foreword.models.pooling import HeadActivation, HeadLayer, Pooling
from foreword.models.text_files import read_bytes, read_object

_MODULES = ("Transformer", "Pooling", "Dense", "Normalize")
"""The modules that are computed, in this order; there may be several of Dense. Embeddings are normalised unless a
request sets it otherwise.
"""
_MODES: Mapping[str, Pooling] = {
    "cls": "cls",
    "cls_token": "cls",
    "mean": "mean",
    "mean_tokens": "mean",
    "lasttoken": "last",
}
_FLAG = "pooling_mode_"
_TRANSFORMER_FILES = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
_TRANSFORMER = table(
    [
        *(Key("max_seq_length"), Key("do_lower_case", False), Key("unpad_inputs")),
        only("transformer_task", "feature-extraction"),
        only("module_output_name", "token_embeddings"),
        only("modality_config", {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}),
        *(only(name, {}) for name in ("processing_kwargs", "model_args", "tokenizer_args", "config_args")),
        *(only(name, None) for name in ("tokenizer_name_or_path", "query_length", "document_length")),
        only("query_expansion", None),
    ]
)
_POOLING = table(
    [
        *map(Key, ("word_embedding_dimension", "embedding_dimension", "pooling_mode")),
        Key("include_prompt", True),
        *(
            Key(_FLAG + mode, False)
            for mode in ("cls_token", "mean_tokens", "lasttoken", "max_tokens", "mean_sqrt_len_tokens")
        ),
        Key(_FLAG + "weightedmean_tokens", False),
    ]
)
_ACTIVATIONS: Mapping[str, HeadActivation] = {
    "Identity": "identity",
    "Tanh": "tanh",
    "GELU": "gelu",
    "ReLU": "relu",
    "SiLU": "silu",
}
_DENSE = table(
    [
        *(Key("in_features"), Key("out_features"), Key("bias", True)),
        Key("activation_function", "torch.nn.modules.activation.Tanh"),
        *(only(f"module_{side}_name", None, "sentence_embedding") for side in ("input", "output")),
        only("use_residual", False),
    ]
)
_NORMALIZE = table([only(f"module_{side}_name", "sentence_embedding") for side in ("input", "output")])
_MODEL = table(
    [
        *(Key("prompts"), Key("default_prompt_name"), Key("similarity_fn_name"), Key("__version__")),
        only("model_type", "SentenceTransformer", "CrossEncoder"),
        only("truncate_dim", None),
    ]
)


@dataclass(frozen=True, slots=True)
class SentenceTransformer:
    """The settings of a directory. pooling: that of the module Pooling, None if there is no such module. dense: the
    layers after it, each with its folder. max_text_len: None if nothing limits it. lowercase: whether texts are
    lower-cased first. prompts: texts that come before the texts of a task, by name. default_prompt: the name of the
    prompt before any text; "": none. comparison: the way to compare two embeddings.
    """

    pooling: Pooling | None = None
    dense: tuple[tuple[HeadLayer, Path], ...] = ()
    max_text_len: int | None = None
    lowercase: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str = ""
    comparison: str = "cosine"


def read_sentence_transformer(folder: Path, hidden_size: int) -> SentenceTransformer:
    """Return the settings in the files of a directory.

    Raise ModelError for a module or a value that is not supported.
    """
    found = _modules(folder / "modules.json")
    modules = dict(found)
    transformer = _config(next(filter(Path.exists, (folder / name for name in _TRANSFORMER_FILES)), None), _TRANSFORMER)
    model = _config(folder / "config_sentence_transformers.json", _MODEL)
    prompts, default = _prompts(model)
    pooling = None
    if "Pooling" in modules:
        settings = _config(folder / modules["Pooling"] / "config.json", _POOLING, required=True)
        pooling = _pooling(settings, hidden_size, has_prompts=any(prompts.values()))
    if "Normalize" in modules:
        _config(folder / modules["Normalize"] / "config.json", _NORMALIZE)
    limit = None if transformer.value("max_seq_length") is None else transformer.size("max_seq_length")
    if limit is None and modules:  # like sentence-transformers
        of_tokenizer = _config(folder / "tokenizer_config.json", {})
        longest = of_tokenizer.value("model_max_length")
        limit = int(longest) if isinstance(longest, int | float) and 0 < longest < 1 << 28 else None
    return SentenceTransformer(
        pooling=pooling,
        dense=tuple(_dense(folder / where) for kind, where in found if kind == "Dense"),
        max_text_len=limit,
        lowercase=transformer.get("do_lower_case", bool),
        prompts=prompts,
        default_prompt=default,
        comparison=_comparison(model, is_normalized="Normalize" in modules),
    )


def _config(path: Path | None, keys: Keys, *, required: bool = False) -> Config:
    """Return the configuration in a file, empty if there is no file. Raise ModelError for a key or a value that is not
    supported.
    """
    if path is None or not (required or path.exists()):
        return Config(path or Path(), {}, keys=keys)
    config = Config(path, read_object(path), keys=keys)
    config.check(strict=bool(keys))
    return config


def _dense(folder: Path) -> tuple[HeadLayer, Path]:
    """Return a layer after the pooling."""
    config = _config(folder / "config.json", _DENSE, required=True)
    name = config.get("activation_function", str).rsplit(".", 1)[-1]
    if name not in _ACTIVATIONS:
        fix = f"Use a model with one of {', '.join(_ACTIVATIONS)}"
        raise config.error(f"activation_function {name!r:.80} is not supported", fix)
    inputs, outputs = config.size("in_features"), config.size("out_features")
    return HeadLayer(inputs, outputs, bias=config.get("bias", bool), activation=_ACTIVATIONS[name]), folder


def _modules(path: Path) -> list[tuple[str, str]]:
    """Return the name of the class and the folder of each module, [] without the file. Raise ModelError for other
    modules.
    """
    if not path.exists():
        return []
    try:
        modules = json.loads(read_bytes(path))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: is not a list of modules ({error!s:.80}). {FETCH_AGAIN}") from None
    if not isinstance(modules, list) or not modules:
        raise ModelError(f"{path}: is {modules!r:.80}, not a list of modules. {FETCH_AGAIN}")
    for i, module in enumerate(modules):
        for key in ("type", "path"):
            if not isinstance(module, dict) or not isinstance(value := module.get(key), str):
                shown = repr(module) if not isinstance(module, dict) else f"{key} = {value!r}"
                raise ModelError(
                    f"{path}: [{i}]: {shown:.80}: expected a module with texts type and path. {FETCH_AGAIN}"
                )
    found = [(module["type"].rsplit(".", 1)[-1], module["path"]) for module in modules]
    kinds = [kind for kind, _ in found]
    if other := sorted(set(kinds) - set(_MODULES)):
        raise ModelError(f"{path}: module {other[0]!r:.80} is not supported. Use a model without it")
    if kinds != [kind for kind in _MODULES for _ in range(kinds.count(kind) if kind == "Dense" else kind in kinds)]:
        known = f"Use a model with {', '.join(_MODULES)} in this order"
        raise ModelError(f"{path}: modules {', '.join(kinds):.80} are not supported. {known}")
    for kind, where in found:
        if Path(where).name != where:
            raise ModelError(f"{path}: {kind} is in {where!r:.80}, not in a folder beside it. {FETCH_AGAIN}")
        if kind == "Transformer" and where:
            raise ModelError(f"{path}: the model is in {where!r:.80}, not beside it. Move its files there")
    return found


def _pooling(config: Config, hidden_size: int, *, has_prompts: bool) -> Pooling:
    """Return the pooling. Older files have a flag per mode."""
    flags = [key for key in config.values if key.startswith(_FLAG) and config.get(key, bool)]
    given = config.value("pooling_mode")
    older = [key.removeprefix(_FLAG) for key in flags] or ["mean"]
    modes = older if given is None else given if isinstance(given, list) else [given]
    if len(modes) != 1 or not isinstance(modes[0], str) or modes[0] not in _MODES:
        names = ", ".join(map(str, modes))
        raise config.error(f"pooling {names:.80} is not supported", "Use a model with mean, cls or lasttoken")
    for key in ("word_embedding_dimension", "embedding_dimension"):
        if (size := config.value(key)) not in (None, hidden_size):
            raise config.error(f"{key} = {size!r:.80}, the model has hidden_size {hidden_size}", USE_ITS_CONFIG)
    if has_prompts and not config.get("include_prompt", bool):
        raise config.error("include_prompt = False is not supported for a model with prompts", "Use another model")
    return _MODES[modes[0]]


def _prompts(config: Config) -> tuple[Mapping[str, str], str]:
    """Return the prompts by name, and the name of the default one. Null counts as an empty prompt."""
    given: Any = {} if config.value("prompts") is None else config.value("prompts")
    if not isinstance(given, Mapping) or not all(isinstance(text, str | None) for text in given.values()):
        raise config.error(f"prompts is {given!r:.80}, not texts by name", USE_ITS_CONFIG)
    prompts = {name: text or "" for name, text in given.items()}
    default = config.value("default_prompt_name")
    if default is None:
        return prompts, ""
    if not isinstance(default, str) or default not in prompts:
        raise config.error(f"default_prompt_name = {default!r:.80} is not one of prompts", USE_ITS_CONFIG)
    return prompts, default


def _comparison(config: Config, *, is_normalized: bool) -> str:
    """Return the way to compare embeddings. For unit vectors, the dot product is equal to the cosine."""
    given = config.value("similarity_fn_name")
    if given is None or (given == "dot" and is_normalized):
        return "cosine"
    if not isinstance(given, str):
        raise config.error(f"similarity_fn_name is {given!r:.80}, not a name", USE_ITS_CONFIG)
    return given
