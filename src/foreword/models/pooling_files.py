"""The pooling of a model from its configuration: of a classifier, of sentence-transformers' modules, of a GGUF file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from foreword.models.config import USE_ITS_CONFIG, Config
from foreword.models.families.encoder_base import EncoderFamily
from foreword.models.families.gguf_encoders import LABELS, RANK
from foreword.models.pooling import GGUF_DENSE, HeadLayer, HeadPooling, Pooling, PoolingSpec
from foreword.models.sentence_transformers import SentenceTransformer
from foreword.models.weights import Tensor

_GGUF_POOLINGS: Mapping[int, Pooling] = {0: "last", 1: "mean", 2: "cls", 3: "last"}
_OF_PROBLEMS = {
    None: "softmax",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
    "regression": "identity",
}
"""The activation of several labels by ``problem_type``."""
_RESULTS = {"Identity": "identity", "Sigmoid": "sigmoid", "Softmax": "softmax"}


def is_classifier(config: Config) -> bool:
    """Return whether the model has the head of a classifier in place of logits."""
    return any(name.endswith("ForSequenceClassification") for name in architectures(config))


def has_logits(config: Config) -> bool:
    """Return whether the model was saved with logits: not a classifier, nor a model without any head."""
    heads = ("ForSequenceClassification", "Model")
    return not any(name.endswith(heads) and not name.endswith("LMHeadModel") for name in architectures(config))


def architectures(config: Config) -> Sequence[str]:
    """Return the names of the classes of a config.json. Raise ModelError for other values."""
    names = config.sequence("architectures")
    if not all(isinstance(name, str) for name in names):
        raise config.error(f"architectures is {names!r:.80}, not a list of names", USE_ITS_CONFIG)
    return names


def gguf_pooling(config: Config) -> Pooling:
    """Return the pooling of a decoder in a GGUF file. Raise ModelError for one that is not supported."""
    number = config.get("pooling_type", int, 0)
    if number not in _GGUF_POOLINGS:
        raise config.error(
            f"pooling_type = {number} is not supported", "Use a model with 1 (mean), 2 (cls) or 3 (last)"
        )
    return _GGUF_POOLINGS[number]


def gguf_encoder_pooling(config: Config, family: EncoderFamily) -> PoolingSpec:
    """Return the pooling of an encoder in a GGUF file, by default the mean, or the head of a classifier. Raise
    ModelError for one that is not supported.
    """
    number, size = config.get("pooling_type", int, 0), config.size("hidden_size")
    if number != RANK:
        return PoolingSpec(hidden_size=size, pooling=_GGUF_POOLINGS[number] if number else "mean")
    labels = tuple(map(str, config.sequence(LABELS))) or ("LABEL_0",)
    return PoolingSpec(
        hidden_size=size,
        pooling="cls",
        head=family.head(config, len(labels)),
        labels=labels,
        activation="sigmoid" if len(labels) == 1 else "softmax",
    )


def gguf_dense(config: Config, tensors: Mapping[str, Tensor], hidden_size: int) -> tuple[HeadLayer, ...]:
    """Return the layers after the pooling of a decoder in a GGUF file, of a family that may have them. Raise ModelError
    for sizes that do not fit.
    """
    layers: list[HeadLayer] = []
    for name in GGUF_DENSE if f"*.{GGUF_DENSE[0]}_feat_in" in config.keys else ():
        given = {side: config.optional(f"*.{name}_feat_{side}", int) for side in ("in", "out")}
        tensor = tensors.get(f"{name}.weight")
        if tensor is None:
            if any(size is not None for size in given.values()):
                reason = f"{name}.weight is missing, whose sizes the metadata have ({name}_feat_in, {name}_feat_out)"
                raise config.error(reason, "Use a file that holds the whole model")
            continue
        outputs, inputs = tensor.shape if len(tensor.shape) == 2 else (0, 0)
        sizes = {"in": inputs, "out": outputs}
        for side, size in sizes.items():
            if given[side] not in (None, size) or inputs != hidden_size:
                expected = f"{name}_feat_{side} = {given[side]} after {hidden_size} numbers"
                raise config.error(f"{name}.weight has shape {tensor.shape}, not that of {expected}", USE_ITS_CONFIG)
        layers.append(HeadLayer(inputs, outputs, bias=False))
        hidden_size = outputs
    return tuple(layers)


def read_pooling(
    config: Config,
    files: SentenceTransformer,
    default: Pooling,
    projection: HeadLayer | None,
    head: Callable[[int], tuple[HeadLayer, ...]],
    head_pooling: HeadPooling,
) -> PoolingSpec:
    """Return the pooling of a model. Raise ModelError for one that is not supported.

    files: those of sentence-transformers. default: the pooling of a model without a module for it. projection: of
    the model itself, before the layers in ``files``. head, head_pooling:
    the parts of a classifier; head makes its layers from the number of labels.
    """
    values: dict[str, Any] = {
        "hidden_size": config.size("hidden_size"),
        "pooling": files.pooling or default,
        "dense": (*([] if projection is None else [projection]), *(layer for layer, _ in files.dense)),
        "is_projected": projection is not None,
        "prompts": files.prompts,
        "default_prompt": files.default_prompt,
        "comparison": files.comparison,
    }
    size = values["hidden_size"] if projection is None else projection.outputs
    for layer, folder in files.dense:
        if layer.inputs != size:
            raise config.error(f"in_features of {folder.name} is {layer.inputs}, not {size}", USE_ITS_CONFIG)
        size = layer.outputs
    values["hidden_size"] = size
    if is_classifier(config):
        labels = _labels(config)
        values |= {
            "pooling": "mean" if head_pooling == "late" else head_pooling,
            "head": head(len(labels)),
            "is_late": head_pooling == "late",
            "labels": labels,
            "activation": _activation(config, len(labels)),
            "norm_eps": config.positive("norm_eps", 1e-5),
        }
        if files.prompts.get(files.default_prompt):
            fix = "Use a model without default_prompt_name in config_sentence_transformers.json"
            raise config.error(f"the prompt {files.default_prompt!r:.80} of a classifier is not supported", fix)
    if values["pooling"] not in ("last", "mean", "cls"):
        raise config.error(f"pooling {values['pooling']!r} is not supported", "Use a model with last, mean or cls")
    return PoolingSpec(**values)


def _labels(config: Config) -> tuple[str, ...]:
    names = config.value("id2label")
    if names is None:
        return tuple(f"LABEL_{i}" for i in range(config.size("num_labels", 2, most=1 << 16)))
    if not isinstance(names, Mapping) or not names or {str(i) for i in range(len(names))} != set(map(str, names)):
        raise config.error(f"id2label is {names!r:.80}, not labels numbered from 0", USE_ITS_CONFIG)
    return tuple(str({str(i): name for i, name in names.items()}[str(i)]) for i in range(len(names)))


def _activation(config: Config, num_labels: int) -> str:
    """Return the activation: that of the configuration, else that of sentence-transformers for one label, and of
    transformers for more.
    """
    own = config.value("sentence_transformers")
    name = own.get("activation_fn") if isinstance(own, Mapping) else None
    name = name or config.value("sbert_ce_default_activation_function")
    if name is None:
        problem = config.optional("problem_type", str)
        if problem not in _OF_PROBLEMS:
            known = " or ".join(repr(one) for one in _OF_PROBLEMS if one)
            raise config.error(f"problem_type = {problem!r:.80} is not supported", f"Use a model with {known}")
        return "sigmoid" if num_labels == 1 else _OF_PROBLEMS[problem]
    kind = str(name).rsplit(".", 1)[-1]
    if kind not in _RESULTS:
        fix = f"Use a model with one of {', '.join(_RESULTS)}"
        raise config.error(f"activation {name!r:.80} is not supported", fix)
    return _RESULTS[kind]
