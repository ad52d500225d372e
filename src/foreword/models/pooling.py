"""The way from hidden states to results: a model's pooling, and the head of a classifier."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

GGUF_DENSE = ("dense_2", "dense_3")
"""The layers after the pooling in a GGUF file: their tensors, and the beginnings of the keys of their sizes."""
Pooling = Literal["last", "mean", "cls"]
HeadPooling = Literal["last", "mean", "cls", "late"]
"""The pooling of a classifier. late: the mean of what all layers of the head but the last make of each token."""
HeadActivation = Literal["tanh", "gelu", "gelu_tanh", "relu", "relu2", "silu", "identity"]
ResultActivation = Literal["softmax", "sigmoid", "identity"]


@dataclass(frozen=True, slots=True)
class HeadLayer:
    """h = norm(act(h W + b)): a bias and a layer norm (without bias) if the layer has them."""

    inputs: int
    outputs: int
    bias: bool = True
    activation: HeadActivation = "identity"
    norm: bool = False


@dataclass(frozen=True, slots=True)
class PoolingSpec:
    """The pooling of a model, as `PoolingParams` names it.

    hidden_size: of its embeddings. dense: layers between pooled states and these. is_projected:
    the first of these changes the states of tokens, too. num_token_types: that the model
    distinguishes; two of a pair need 2. head: of a classifier, applied to the pooled states; its last layer has an
    output per label. is_late: the other layers of the head are applied to each token, before the pooling. activation:
    of the head's outputs. labels: their names. prompts: texts that come before the texts
    of a task, by name; default_prompt: the name of the one before texts to embed, "" if there is none. comparison: of
    two embeddings.
    """

    hidden_size: int = 0
    pooling: Pooling = "last"
    dense: tuple[HeadLayer, ...] = ()
    is_projected: bool = False
    num_token_types: int = 0
    head: tuple[HeadLayer, ...] = ()
    is_late: bool = False
    activation: ResultActivation = "identity"
    labels: tuple[str, ...] = ()
    norm_eps: float = 1e-5
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str = ""
    comparison: str = "cosine"

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks of `PoolingParams` that the model does."""
        if not self.head:
            return ("embed", "token_embed")
        score = ("score",) if self.is_cross_encoder else ()
        return ("embed", "token_embed", "classify", "reward", *score)

    @property
    def is_cross_encoder(self) -> bool:
        """Return whether it scores a pair of texts itself: its head has one output."""
        return bool(self.head) and self.head[-1].outputs == 1

    def prompt_name(self, *names: str) -> str:
        """Return the first of these names that the model has a prompt for, "" if it has none."""
        return next((name for name in names if name in self.prompts), "")

    def weight_names(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the canonical names of the weights of dense layers and of the head, with their shapes."""
        for part, layers in (("dense", self.dense), ("head", self.head)):
            for i, layer in enumerate(layers):
                yield f"{part}.{i}", (layer.outputs, layer.inputs)
                if layer.bias:
                    yield f"{part}.{i}_bias", (layer.outputs,)
                if layer.norm:
                    yield f"{part}.{i}_norm", (layer.outputs,)
