"""Find how the decoder of an encoder–decoder attends, by one forward pass over a few tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from foreword.errors import ModelError
from foreword.executors.torch.attention import AttentionCall
from foreword.executors.torch.cache import KVLayer
from foreword.executors.transformers.interface import attention_of, register, unregister
from foreword.executors.transformers.trace import REPEATED, Trace, TracedCall, check_arguments, default_scale
from foreword.models.spec import LayerKind, grouped_layers

NUM_TOKENS, NUM_ENCODED = 5, 3
UNDERSTOOD = REPEATED | {"scaling", "dropout", "is_causal", "position_bias", "layer_head_mask", "attention_mask"}


@dataclass(frozen=True, slots=True)
class DecoderTrace(Trace):
    """The facts about an encoder–decoder that an executor needs. encoder_dim: width of the encoder's output.

    A call that writes nothing reads the encoder's keys and values: its layer is one of cross_layers.
    """

    cross_layers: tuple[KVLayer, ...]
    encoder_dim: int


def trace_decoder(model: PreTrainedModel, max_model_len: int) -> DecoderTrace:
    """See `DecoderTrace`. Raise ModelError, with the reason, for a model that paged attention cannot serve."""
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
    if not recorder.own or not recorder.cross:
        raise ModelError("its decoder does not call the attention interface for its own tokens and the encoder's")
    return DecoderTrace(
        tuple(recorder.calls),
        tuple(recorder.own),
        grouped_layers(LayerKind(None) for _ in recorder.own),
        logits.shape[-1],
        tuple(recorder.cross),
        encoder_dim,
    )


@dataclass
class _Recorder:
    """An attention implementation that computes nothing and keeps the arguments of its calls."""

    max_model_len: int
    calls: list[TracedCall] = field(default_factory=list)
    own: list[KVLayer] = field(default_factory=list)  # keys and values of the decoder's tokens
    cross: list[KVLayer] = field(default_factory=list)  # layers over the encoder's keys
    _tables: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)  # address of a bias → its table

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: None = None,
        scaling: float | None = None,
        *_: Any,
        **named: Any,
    ) -> tuple[torch.Tensor, None]:
        """Keep the arguments. Raise ModelError for a call that is not understood."""
        check_arguments(named, UNDERSTOOD)
        lengths = query.shape[2], key.shape[2]
        if lengths not in ((NUM_TOKENS, NUM_TOKENS), (NUM_TOKENS, NUM_ENCODED)):
            raise ModelError(f"a layer attends from {lengths[0]} tokens to {lengths[1]}")
        is_cross = lengths[1] == NUM_ENCODED
        layers = self.cross if is_cross else self.own
        scale = default_scale(query) if scaling is None else scaling
        bias = self._bias(module, named.get("position_bias"), is_cross)
        self.calls.append(TracedCall(AttentionCall(len(layers), scale, bias=bias), writes=not is_cross))
        layers.append(KVLayer(0, len(layers), key.shape[1], key.shape[3], value.shape[3]))
        return value[:, :, :1].repeat_interleave(query.shape[1] // value.shape[1], 1).transpose(1, 2).expand(
            1, NUM_TOKENS, query.shape[1], value.shape[3]
        ).contiguous(), None

    def _bias(self, module: Any, given: torch.Tensor | None, is_cross: bool) -> torch.Tensor | None:
        """Return the bias of a call, as `AttentionCall` has it. Layers may share that of an earlier one."""
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
