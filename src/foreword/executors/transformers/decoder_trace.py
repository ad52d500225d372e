"""How the decoder of an encoder–decoder attends, found by one forward pass over a few tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from foreword.errors import ModelError
from foreword.executors.torch.cache import KVLayer
from foreword.executors.transformers.interface import attention_of, register, unregister
from foreword.executors.transformers.trace import REPEATED, AttentionCall, Mask, Trace, check_arguments
from foreword.models.spec import grouped_layers

NUM_TOKENS, NUM_ENCODED = 5, 3
UNDERSTOOD = REPEATED | {"scaling", "dropout", "is_causal", "position_bias", "layer_head_mask", "attention_mask"}


@dataclass(frozen=True, slots=True)
class DecoderTrace(Trace):
    """What an executor needs to know of an encoder–decoder. encoder_dim: width of the encoder's output.

    is_cross: of every call, whether it reads the encoder's keys and values; its layer is then one of cross_layers.
    biases: of every call, [num_heads, max_model_len], what is added to scores by the distance of a key; or None.
    """

    cross_layers: tuple[KVLayer, ...]
    is_cross: tuple[bool, ...]
    biases: tuple[torch.Tensor | None, ...]
    encoder_dim: int


def trace_decoder(model: PreTrainedModel, max_model_len: int) -> DecoderTrace:
    """See `DecoderTrace`. ModelError, with the reason, for a model that paged attention cannot serve."""
    recorder = _Recorder(max_model_len)
    name = f"foreword_trace_{id(recorder):x}"
    encoder_dim = model.get_encoder().config.hidden_size
    register(name, recorder.attend, lambda **_: None)
    try:
        with torch.inference_mode(), attention_of(model, name):
            states = torch.zeros(1, NUM_ENCODED, encoder_dim, dtype=model.dtype, device=model.device)
            ids = torch.arange(1, 1 + NUM_TOKENS, device=model.device)[None]
            outputs = BaseModelOutput(last_hidden_state=states)
            logits = model(encoder_outputs=outputs, decoder_input_ids=ids, use_cache=False, return_dict=True).logits[0]
    finally:
        unregister(name)
    own = [shape for shape, is_cross in zip(recorder.shapes, recorder.is_cross, strict=True) if not is_cross]
    cross = [shape for shape, is_cross in zip(recorder.shapes, recorder.is_cross, strict=True) if is_cross]
    if not own or not cross:
        raise ModelError("its decoder does not call the attention interface for its own tokens and the encoder's")
    counts = [0, 0]
    calls = []
    for is_cross in recorder.is_cross:
        calls.append(AttentionCall(counts[is_cross], Mask(), not is_cross))
        counts[is_cross] += 1
    return DecoderTrace(
        tuple(calls),
        tuple(KVLayer(0, i, *shape) for i, shape in enumerate(own)),
        grouped_layers((None, False) for _ in own),
        logits.shape[-1],
        tuple(KVLayer(0, i, *shape) for i, shape in enumerate(cross)),
        tuple(recorder.is_cross),
        tuple(recorder.biases),
        encoder_dim,
    )


@dataclass
class _Recorder:
    """An attention implementation that computes nothing and keeps the arguments of its calls."""

    max_model_len: int
    shapes: list[tuple[int, int, int]] = field(default_factory=list)  # key heads, key width, value width
    is_cross: list[bool] = field(default_factory=list)
    biases: list[torch.Tensor | None] = field(default_factory=list)
    _tables: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)  # address of a bias → its table

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *_: Any,
        **named: Any,
    ) -> tuple[torch.Tensor, None]:
        """Keep the arguments. ModelError for a call that is not understood."""
        check_arguments(named, UNDERSTOOD)
        lengths = query.shape[2], key.shape[2]
        if lengths not in ((NUM_TOKENS, NUM_TOKENS), (NUM_TOKENS, NUM_ENCODED)):
            raise ModelError(f"a layer attends from {lengths[0]} tokens to {lengths[1]}")
        is_cross = lengths[1] == NUM_ENCODED
        self.is_cross.append(is_cross)
        self.shapes.append((key.shape[1], key.shape[3], value.shape[3]))
        self.biases.append(self._bias(module, named.get("position_bias"), is_cross))
        return value[:, :, :1].repeat_interleave(query.shape[1] // value.shape[1], 1).transpose(1, 2).expand(
            1, NUM_TOKENS, query.shape[1], value.shape[3]
        ).contiguous(), None

    def _bias(self, module: Any, given: torch.Tensor | None, is_cross: bool) -> torch.Tensor | None:
        """The bias of a call by distance. Layers may share that of an earlier one."""
        if given is None or not bool(given.any()):
            return None
        if is_cross:
            raise ModelError("its attention to the encoder has position biases")
        if given.data_ptr() not in self._tables:
            if not getattr(module, "has_relative_attention_bias", False):
                raise ModelError("its position biases are not those of relative positions")
            last = self.max_model_len - 1
            table = module.compute_bias(1, self.max_model_len, device=given.device, past_seen_tokens=last)
            self._tables[given.data_ptr()] = table[0, :, 0].flip(-1).contiguous(), given
        return self._tables[given.data_ptr()][0]
