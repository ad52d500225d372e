"""Find how a model attends, by one forward pass over a few tokens."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from foreword.errors import ModelError
from foreword.executors.torch.attention import AttentionCall
from foreword.executors.torch.cache import KVLayer
from foreword.executors.transformers.connect import WITHOUT_POSITIONS, connect, why_not
from foreword.executors.transformers.interface import attention_of, forward, register, unregister
from foreword.models.spec import KVGroupSpec, LayerKind, grouped_layers

NUM_TOKENS = 5
UNDERSTOOD = frozenset(
    {"scaling", "dropout", "sliding_window", "softcap", "s_aux", "sinks", "is_causal", "own_window", "alibi_slopes"}
)
"""Arguments of a call of attention. Those that merely repeat what the executor knows: `REPEATED`."""
REPEATED = frozenset(
    {"position_ids", "use_cache", "output_attentions", "output_hidden_states", "return_dict", "cache_position"}
)
ATTENDING = frozenset({"full_attention", "sliding_attention", "chunked_attention", "attention"})
"""Types of layers, in a configuration, whose mask says all about what they attend to."""

MaskFunction = Callable[[int, int, torch.Tensor, torch.Tensor], torch.Tensor]


def check_arguments(arguments: Mapping[str, object], understood: frozenset[str]) -> None:
    """Raise ModelError for a call of attention with an argument that is given and not understood."""
    given = {name for name, argument in arguments.items() if argument is not None and argument is not False}
    if unknown := sorted(given - understood):
        raise ModelError(f"its attention takes {', '.join(unknown)}")


@dataclass(frozen=True, slots=True)
class Mask:
    """The keys j ≤ p that a query at position p sees: with ``window`` j > p − window; with ``chunk`` in p's chunk."""

    window: int | None = None
    chunk: int | None = None


@dataclass(frozen=True, slots=True)
class TracedCall:
    """The nth call of attention in a forward pass. writes: False if an earlier call wrote the same keys and values."""

    attention: AttentionCall
    writes: bool


@dataclass(frozen=True, slots=True)
class Trace:
    """The facts about a model that an executor needs.

    calls: in the order of a forward pass. layers, groups: keys and values of those that write, and their KV groups.
    linear: outputs and inputs of the linear layers that compute every token of a step in its place, by their names.
    """

    calls: tuple[TracedCall, ...]
    layers: tuple[KVLayer, ...]
    groups: tuple[KVGroupSpec, ...]
    vocab_size: int
    linear: Mapping[str, tuple[int, int]] = field(default_factory=dict, kw_only=True)

    def kv_groups(self) -> tuple[KVGroupSpec, ...]:
        return self.groups


def trace(model: PreTrainedModel, max_model_len: int) -> Trace:
    """See `Trace`. Raise ModelError, with the reason, for a model that paged attention cannot serve."""
    check_class(type(model), model.config)
    connect(model)
    recorder = _Recorder(max_model_len)
    name = f"foreword_trace_{id(recorder):x}"
    linear = {name: part for name, part in model.named_modules() if isinstance(part, torch.nn.Linear)}
    register(name, recorder.attend, recorder.make_mask)
    try:
        with torch.inference_mode(), attention_of(model, name), _shapes_of(linear) as shapes:
            ids = torch.arange(1, 1 + NUM_TOKENS, device=model.device)[None]
            positions = torch.arange(NUM_TOKENS, device=model.device)[None]
            logits = forward(model, input_ids=ids, position_ids=positions)
    finally:
        unregister(name)
    if not recorder.calls:
        raise ModelError("its layers never call the attention interface")
    if logits.ndim != 2 or len(logits) != NUM_TOKENS:
        raise ModelError(f"its logits have the shape {list(logits.shape)} for {NUM_TOKENS} tokens")
    groups = grouped_layers(LayerKind(mask.window) for mask in recorder.masks)
    place = {layer: (g, slot) for g, group in enumerate(groups) for slot, layer in enumerate(group.layers)}
    layers = tuple(KVLayer(*place[i], *shape) for i, shape in enumerate(recorder.shapes))
    in_place = {
        name: (linear[name].out_features, linear[name].in_features)
        for name, of_calls in shapes.items()
        if of_calls == {(1, NUM_TOKENS)} and linear[name] is not model.get_output_embeddings()
    }
    return Trace(tuple(recorder.calls), layers, groups, logits.shape[-1], linear=in_place)


@contextmanager
def _shapes_of(modules: Mapping[str, torch.nn.Module]) -> Iterator[dict[str, set[tuple[int, ...]]]]:
    """Record the shapes, without the last dimension, of what each module reads in the block."""
    shapes: dict[str, set[tuple[int, ...]]] = {name: set() for name in modules}

    def keep(name: str, args: tuple[torch.Tensor, ...]) -> None:
        shapes[name].add(tuple(args[0].shape[:-1]) if args else ())

    with ExitStack() as hooks:
        for name, module in modules.items():
            handle = module.register_forward_pre_hook(lambda _, args, name=name: keep(name, args))
            hooks.callback(handle.remove)
        yield shapes


def check_class(kind: type[PreTrainedModel], config: PreTrainedConfig) -> None:
    """Raise ModelError, with the reason, for a class of models that paged attention cannot serve; read no weights."""
    parameters = inspect.signature(kind.forward).parameters
    layers = getattr(config.get_text_config(decoder=True), "layer_types", None) or ()
    if config.is_encoder_decoder:
        raise ModelError("it is an encoder–decoder")
    if getattr(kind, "_is_stateful", False):
        raise ModelError("it keeps recurrent states, which are outside the attention interface")
    if not kind._can_set_attn_implementation() and (reason := why_not(config)) is not None:
        raise ModelError(reason)
    if others := sorted(set(layers) - ATTENDING):
        raise ModelError(f"its layers of type {', '.join(others)} keep states, or attend by rules of their own")
    if "position_ids" not in parameters and config.model_type not in WITHOUT_POSITIONS:
        raise ModelError("it counts positions by itself: it takes no position_ids")
    if "logits_to_keep" not in parameters:
        raise ModelError("it computes the logits of all tokens: it takes no logits_to_keep")


class _Recorder:
    """An attention implementation that computes nothing and keeps the arguments of its calls."""

    def __init__(self, max_model_len: int) -> None:
        self.max_model_len = max_model_len
        self.calls: list[TracedCall] = []
        self.shapes: list[tuple[int, int, int]] = []  # key heads, key width and value width of the layers
        self.masks: list[Mask] = []  # one per layer
        self._made: dict[int, tuple[torch.Tensor, MaskFunction]] = {}  # address → what `make_mask` returned, of what
        self._written: dict[tuple[int, int], tuple[int, torch.Tensor]] = {}  # addresses of keys and values → layer

    def make_mask(
        self, *, mask_function: MaskFunction, q_length: int, kv_length: int, device: torch.device, **_: Any
    ) -> torch.Tensor:
        """Return the mask as a tensor that a later call is recognised by."""
        queries, keys = torch.arange(q_length, device=device)[:, None], torch.arange(kv_length, device=device)
        made = _evaluated(mask_function, queries, keys).expand(1, 1, q_length, kv_length).contiguous()
        self._made[made.data_ptr()] = made, mask_function
        return made

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **arguments: Any,
    ) -> tuple[torch.Tensor, None]:
        """Keep the arguments; the output is each token's own value.

        Raise ModelError for a call that is not understood.
        """
        check_arguments(arguments, UNDERSTOOD | REPEATED)
        if query.shape[0] != 1 or not query.shape[2] == key.shape[2] == value.shape[2] == NUM_TOKENS:
            shapes = ", ".join(str(list(x.shape)) for x in (query, key, value))
            raise ModelError(f"a layer attends from and to other tokens than those of the step: {shapes}")
        if attention_mask is None:
            raise ModelError("a layer attends without a mask: to later tokens, or to an encoder's")
        if (known := self._made.get(attention_mask.data_ptr())) is None or known[0].shape != attention_mask.shape:
            raise ModelError("it builds its own attention masks")
        mask = kind_of(known[1], self.max_model_len, query.device)
        if (own := arguments.get("own_window")) is not None and own < self.max_model_len:
            mask = Mask(window=own)
        window = arguments.get("sliding_window")
        if window is not None and window != mask.window and not (mask.window is None and window >= self.max_model_len):
            raise ModelError(f"a layer has the sliding window {window} and the mask {mask}")
        addresses = key.data_ptr(), value.data_ptr()
        earlier = self._written.get(addresses)
        if writes := earlier is None or self.masks[earlier[0]] != mask:
            self._written[addresses] = len(self.shapes), key  # kept, so that no other tensor has this address
            self.shapes.append((key.shape[1], key.shape[3], value.shape[3]))
            self.masks.append(mask)
        sinks, scale = arguments.get("s_aux"), arguments.get("scaling")
        call = AttentionCall(
            self._written[addresses][0],
            default_scale(query) if scale is None else scale,
            mask.window,
            mask.chunk,
            arguments.get("softcap"),
            arguments.get("sinks") if sinks is None else sinks,
            slopes=arguments.get("alibi_slopes"),
        )
        self.calls.append(TracedCall(call, writes))
        return value.repeat_interleave(query.shape[1] // value.shape[1], 1).transpose(1, 2).contiguous(), None


def default_scale(query: torch.Tensor) -> float:
    """Return the factor of the scores of a call that gives none."""
    return float(query.shape[-1] ** -0.5)


def kind_of(mask_function: MaskFunction, num_positions: int, device: torch.device | str = "cpu") -> Mask:
    """Return the mask that a function of positions describes, over so many positions. Raise ModelError for another
    kind.
    """
    keys = torch.arange(num_positions, device=device)

    def first_seen(position: int) -> int:
        """Return the first key of a query, whose keys are all from there to itself."""
        seen = _evaluated(mask_function, keys[position : position + 1, None], keys)[0]
        first = int(seen.int().argmax())
        if not bool(seen[first : position + 1].all()) or bool(seen[position + 1 :].any()):
            raise ModelError("a mask is not causal, or has gaps")
        return first

    last = num_positions - 1
    first_seen(last // 2)  # shows later keys, if any are seen
    first = first_seen(last)
    if first == 0:
        return Mask()
    if first < last and first_seen(first) == first:
        return Mask(chunk=first - first_seen(first - 1))
    return Mask(window=last - first + 1)


def _evaluated(mask_function: MaskFunction, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return the mask bool [queries, keys]. Raise ModelError if it depends on more than positions."""
    try:
        seen = mask_function(0, 0, queries, keys)
    except Exception:
        raise ModelError("a mask depends on more than positions") from None
    return torch.as_tensor(seen, device=keys.device).expand(len(queries), len(keys))
