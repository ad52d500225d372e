"""The pooling of a model from the files of a directory: a classifier's config, or sentence-transformers' modules."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from foreword.errors import ModelError
from foreword.jsonfile import read_bytes, read_object
from foreword.models.config import USE_ITS_CONFIG, Config
from foreword.models.files import FETCH_AGAIN
from foreword.models.pooling import HeadLayer, Pooling, PoolingSpec

_MODES: Mapping[str, Pooling] = {
    "cls": "cls",
    "cls_token": "cls",
    "mean": "mean",
    "mean_tokens": "mean",
    "lasttoken": "last",
}
_GGUF_POOLINGS: Mapping[int, Pooling] = {0: "last", 1: "mean", 2: "cls", 3: "last"}
_RESULTS = {"Identity": "identity", "Sigmoid": "sigmoid", "Softmax": "softmax"}


def is_classifier(config: Config) -> bool:
    """Whether the model has the head of a classifier in place of logits."""
    return any(str(name).endswith("ForSequenceClassification") for name in config.sequence("architectures"))


def has_logits(config: Config) -> bool:
    """Whether the model was saved with logits: not a classifier, nor a model without any head."""
    names = [str(name) for name in config.sequence("architectures")]
    return not any(name.endswith(("ForSequenceClassification", "Model")) for name in names)


def gguf_pooling(config: Config) -> Pooling:
    """Return the pooling of a decoder in a GGUF file. ModelError for one that is not supported."""
    number = config.get("pooling_type", int, 0)
    if number not in _GGUF_POOLINGS:
        raise config.error(
            f"pooling_type = {number} is not supported", "Use a model with 1 (mean), 2 (cls) or 3 (last)"
        )
    return _GGUF_POOLINGS[number]


def read_pooling(
    folder: Path, config: Config, default: Pooling, head: Callable[[int], tuple[HeadLayer, ...]], head_pooling: str
) -> PoolingSpec:
    """The pooling of the model in ``folder``. ModelError for a module or pooling that is not supported.

    default: of a model without modules.json. head, head_pooling: of a classifier; head from its number of labels.
    """
    values: dict[str, Any] = {"hidden_size": config.size("hidden_size"), "pooling": pooling_of(folder, default)}
    if is_classifier(config):
        labels = _labels(config)
        values |= {
            "pooling": head_pooling,
            "head": head(len(labels)),
            "labels": labels,
            "activation": _activation(config, len(labels)),
            "norm_eps": config.positive("norm_eps", 1e-5),
        }
    if values["pooling"] not in ("last", "mean", "cls"):
        raise config.error(f"pooling {values['pooling']!r} is not supported", "Use a model with last, mean or cls")
    return PoolingSpec(**values)


def max_text_len(folder: Path, longest: int) -> int:
    """The longest text: ``longest``, or what sentence-transformers' configuration limits it to."""
    path = folder / "sentence_bert_config.json"
    limit = Config(path, read_object(path, ModelError)).optional("max_seq_length", int) if path.exists() else None
    return longest if limit is None else max(1, min(longest, limit))


def pooling_of(folder: Path, default: Pooling) -> Pooling:
    """The pooling that sentence-transformers' modules name, or the default. ModelError for other modules."""
    path = folder / "modules.json"
    if not path.exists():
        return default
    try:
        modules = json.loads(read_bytes(path, ModelError))
        kinds = {str(module["type"]).rsplit(".", 1)[-1]: str(module["path"]) for module in modules}
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ModelError(f"{path}: is not a list of modules ({error!s:.80}). {FETCH_AGAIN}") from None
    if other := sorted(kinds.keys() - {"Transformer", "Pooling", "Normalize"}):
        raise ModelError(f"{path}: module {other[0]!r:.80} is not supported. Use a model without it")
    if "Pooling" not in kinds:
        return default
    config_path = folder / Path(kinds["Pooling"]).name / "config.json"
    config = Config(config_path, read_object(config_path, ModelError))
    prefix = "pooling_mode_"
    flags = [key.removeprefix(prefix) for key, on in config.values.items() if key.startswith(prefix) and on is True]
    modes = flags or [config.get("pooling_mode", str, "mean")]
    if len(modes) != 1 or modes[0] not in _MODES:
        fix = "Use a model with mean, cls or lasttoken"
        raise ModelError(f"{config_path}: pooling {', '.join(modes):.80} is not supported. {fix}")
    return _MODES[modes[0]]


def _labels(config: Config) -> tuple[str, ...]:
    names = config.value("id2label")
    if names is None:
        return tuple(f"LABEL_{i}" for i in range(config.size("num_labels", 2, most=1 << 16)))
    if not isinstance(names, Mapping) or not names or {str(i) for i in range(len(names))} != set(map(str, names)):
        raise config.error(f"id2label is {names!r:.80}, not labels numbered from 0", USE_ITS_CONFIG)
    return tuple(str({str(i): name for i, name in names.items()}[str(i)]) for i in range(len(names)))


def _activation(config: Config, num_labels: int) -> str:
    """As sentence-transformers does for one label, and transformers for more, unless the configuration has its own."""
    own = config.value("sentence_transformers")
    name = own.get("activation_fn") if isinstance(own, Mapping) else None
    name = name or config.value("sbert_ce_default_activation_function")
    if name is None:
        multiple = config.value("problem_type") == "multi_label_classification"
        return "sigmoid" if num_labels == 1 or multiple else "softmax"
    kind = str(name).rsplit(".", 1)[-1]
    if kind not in _RESULTS:
        fix = f"Use a model with one of {', '.join(_RESULTS)}"
        raise config.error(f"activation {name!r:.80} is not supported", fix)
    return _RESULTS[kind]
