"""The head of a checkpoint that predicts the token after the next one, from the model's own hidden states (MTP).

For position p with the known token t[p + 1] and the hidden state h[p] of the model after its final norm:

    x[p] = W [norm(E t[p + 1]) norm_e; norm(h[p]) norm_h]     the model's embedding E, two norms, one matrix
    y[p] = a layer of attention and MLP over x[0 … p], then a norm
    the logits of t[p + 2] are y[p] times the model's own matrix of logits; y[p] is the hidden state of a further token

The layer is as the model's last one with attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from foreword.errors import ModelError
from foreword.models.families.base import Family
from foreword.models.naming import weights_from_safetensors
from foreword.models.spec import DecoderSpec
from foreword.models.weights import Tensor, Weights, float_tensor

_SHARED = ("model.embed_tokens.weight", "lm_head.weight")


@dataclass(frozen=True, slots=True)
class _Names:
    """Of the tensors of a head in safetensors. layer: the beginning of those of its layer. copies: tensors that equal
    the model's own.
    """

    layer: str
    projection: str
    token_norm: str
    hidden_norm: str
    final_norm: str
    copies: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class NextTokenHead:
    """spec, weights: a decoder of the one layer, whose inputs x take the place of embeddings. token_norm, hidden_norm:
    [hidden]. projection: W [hidden, 2 hidden].
    """

    spec: DecoderSpec
    weights: Weights
    token_norm: Tensor
    hidden_norm: Tensor
    projection: Tensor


def without_head(tensors: Mapping[str, Tensor], num_layers: int) -> Mapping[str, Tensor]:
    """Return the tensors of safetensors that are not of a head in the place of a further layer."""
    names = _names(tensors, num_layers)
    return tensors if names is None else {n: t for n, t in tensors.items() if not n.startswith(names.layer)}


def read_head(path: Path, tensors: Mapping[str, Tensor], spec: DecoderSpec, family: Family) -> NextTokenHead | None:
    """Return the head of a model in safetensors; None if they have none.

    ModelError for a weight that is missing or has another shape, and for one that is not part of a head.
    """
    names = _names(tensors, spec.num_layers)
    if names is None:
        return None
    own = (names.token_norm, names.hidden_norm, names.projection)
    for name, shape in zip(own, [[spec.hidden_size]] * 2 + [[spec.hidden_size, 2 * spec.hidden_size]], strict=True):
        if name not in tensors or list(tensors[name].shape) != shape:
            got = f"has the shape {list(tensors[name].shape)}" if name in tensors else "is missing"
            fix = "Use configuration and weights of the same model"
            raise ModelError(f"{path}: tensor {name} {got}, the head needs one of {shape}. {fix}")
    left_out = {*own, names.final_norm, *names.copies}
    layer = {n: t for n, t in tensors.items() if n.startswith(names.layer) and n not in left_out}
    renamed = {f"model.layers.0.{name.removeprefix(names.layer)}": tensor for name, tensor in layer.items()}
    renamed |= {name: tensors[name] for name in _SHARED if name in tensors}
    if names.final_norm in tensors:
        renamed["model.norm.weight"] = tensors[names.final_norm]
    one = spec.changed(layers=(next(layer for layer in reversed(spec.layers) if layer.has_attention),))
    weights = weights_from_safetensors(path, renamed, one, replace(family, fused=lambda _: family.fused(spec)))
    token_norm, hidden_norm, projection = (tensors[name] for name in own)
    if family.norms_less_one:
        token_norm, hidden_norm = (float_tensor(norm.dequantize() + 1) for norm in (token_norm, hidden_norm))
    return NextTokenHead(one, weights, token_norm, hidden_norm, projection)


def _names(tensors: Mapping[str, Tensor], num_layers: int) -> _Names | None:
    """Return the names of the tensors of a head; None without one."""
    p = f"model.layers.{num_layers}."
    copies = f"{p}embed_tokens.weight", f"{p}shared_head.head.weight"
    for names in (
        _Names("mtp.layers.0.", "mtp.fc.weight", "mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight",
               "mtp.norm.weight"),  # Qwen3-Next, Qwen3.5
        _Names(p, f"{p}eh_proj.weight", f"{p}enorm.weight", f"{p}hnorm.weight", f"{p}shared_head.norm.weight",
               copies),  # DeepSeek V3
    ):  # fmt: skip
        if names.projection in tensors:
            return names
    return None
