"""The head of a checkpoint that predicts the token after the next one, from the model's own hidden states (MTP).

For position p with the known token t[p + 1] and the hidden state h[p] of the model after its final norm:

    x[p] = W [norm(E t[p + 1]) norm_e; norm(h[p]) norm_h]     the model's embedding E, two norms, one matrix
    y[p] = a layer of attention and MLP over x[0 … p], then a norm
    the logits of t[p + 2] are y[p] times the model's own matrix of logits; y[p] is the hidden state of a further token

The layer is as the model's last one with attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from foreword.errors import ModelError
from foreword.models.families.base import GGUF_NAMES, SAFETENSORS_NAMES, Family
from foreword.models.naming import weights_from_gguf, weights_from_safetensors
from foreword.models.spec import DecoderSpec
from foreword.models.weights import Tensor, Weights, float_tensor


@dataclass(frozen=True, slots=True)
class _Names:
    """The names of the tensors of a head. layer: the beginning of those of its layer. copies: tensors that equal the
    model's own. in_gguf: whether they are those of a GGUF file.
    """

    layer: str
    projection: str
    token_norm: str
    hidden_norm: str
    final_norm: str
    copies: tuple[str, ...] = ()
    in_gguf: bool = False


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
    """Return the tensors of a model's files that are not of heads in the place of further layers."""
    layers = tuple(names.layer for names in _heads(tensors, num_layers))
    return {n: t for n, t in tensors.items() if not n.startswith(layers)} if layers else tensors


def read_head(path: Path, tensors: Mapping[str, Tensor], spec: DecoderSpec, family: Family) -> NextTokenHead | None:
    """Return the head of a model's files, the first if they have several; None if they have none.

    Raise ModelError for a weight that is missing or has another shape, and for one that is not part of a head.
    """
    names = next(_heads(tensors, spec.num_layers), None)
    if names is None:
        return None
    own = (names.token_norm, names.hidden_norm, names.projection)
    for name, shape in zip(own, [[spec.hidden_size]] * 2 + [[spec.hidden_size, 2 * spec.hidden_size]], strict=True):
        if name not in tensors or list(tensors[name].shape) != shape:
            got = f"has the shape {list(tensors[name].shape)}" if name in tensors else "is missing"
            fix = "Use configuration and weights of the same model"
            raise ModelError(f"{path}: tensor {name} {got}, the head needs one of {shape}. {fix}")
    token_norm, hidden_norm, projection = (tensors[name] for name in own)
    last = next(layer for layer in reversed(spec.layers) if layer.has_attention)
    one = spec.changed(layers=(replace(last, takes_chosen=False),))
    usual = {**GGUF_NAMES, **family.gguf_names} if names.in_gguf else {**SAFETENSORS_NAMES, **family.names}
    is_own = names.final_norm in tensors or not names.in_gguf
    final_norm = {"final_norm": names.final_norm if is_own else usual["final_norm"]}
    shared = {usual["embed"], usual["lm_head"], *final_norm.values()}
    used = {n: t for n, t in tensors.items() if n in shared or n.startswith(names.layer)}
    used = {n: t for n, t in used.items() if n not in {*own, *names.copies}}
    if names.in_gguf:
        fused = family.gguf_fused or family.fused
        family = replace(family, gguf_names={**family.gguf_names, **final_norm}, gguf_fused=lambda _: fused(spec))
        weights = weights_from_gguf(path, used, one, family, prefix=names.layer)
    else:
        fused = family.fused
        family = replace(family, names={**family.names, **final_norm}, fused=lambda _: fused(spec), unused=())
        weights = weights_from_safetensors(path, used, one, family, prefix=names.layer)
        if family.norms_less_one:
            token_norm, hidden_norm = (float_tensor(norm.dequantize() + 1) for norm in (token_norm, hidden_norm))
    return NextTokenHead(one, weights, token_norm, hidden_norm, projection)


def _heads(tensors: Mapping[str, Tensor], num_layers: int) -> Iterator[_Names]:
    """Yield the names of the tensors of each head."""
    if "mtp.fc.weight" in tensors:  # Qwen3-Next, Qwen3.5
        pre = "mtp.pre_fc_norm"
        yield _Names(
            "mtp.layers.0.", "mtp.fc.weight", f"{pre}_embedding.weight", f"{pre}_hidden.weight", "mtp.norm.weight"
        )
    for i in count(num_layers):  # in the place of further layers
        for p, own, shared, in_gguf in (
            (f"model.layers.{i}.", "", "shared_head.", False),
            (f"blk.{i}.", "nextn.", "nextn.shared_head_", True),
        ):
            if (projection := f"{p}{own}eh_proj.weight") in tensors:
                token_norm, hidden_norm = (f"{p}{own}{name}.weight" for name in ("enorm", "hnorm"))
                copies = f"{p}{own}embed_tokens.weight", f"{p}{shared}head.weight"
                of_layer = (f"{p}{name}.weight" for name in ("final_layernorm", "layer_output_norm"))
                final_norm = next((name for name in of_layer if name in tensors), f"{p}{shared}norm.weight")
                yield _Names(p, projection, token_norm, hidden_norm, final_norm, copies, in_gguf)
                break
        else:
            return
