"""A LoRA adapter under the canonical names of a model's weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import numpy as np

from foreword.errors import ModelError
from foreword.models.families.base import IndexerRows, Rows, SwappingVersions
from foreword.models.naming import has_source, reorder_rows, select_rows, source_of
from foreword.models.recurrent import RecurrentSpec
from foreword.models.spec import DecoderSpec, weight_names
from foreword.models.weights import Tensor, float_tensor

FileStates = tuple[str, ...]
"""`foreword.models.files.identity_of` each file."""

MAX_RANK = 256
_TARGET = re.compile(
    r"per_layer_in|head_dense|stream_(in|out)\.\d+|layers\.\d+\.("
    r"q|k|v|q_a|kv_a|k_b|v_b|attn_gate|o|aside|(q|k|v|mlp)_low|(q|k|v|gate|up)_high|(attn|mlp)_norm_(low|high)|"
    r"index_q|index_k|index_weights|"
    r"state\.(q|k|v|late_v|z|dt|beta|z_low|dt_low|o)|router_(in|first|second)|"
    r"((shared|experts\.\d+)\.)?(gate|up|down)|router|shared_gate|latent_in|latent_out|"
    r"per_layer_gate|per_layer_out|streams_router|streams_predict|streams_correct|laurel_left|laurel_right)"
)
"""The canonical names of linear layers, but for that of logits."""
_LAYER = re.compile(r"(.*?\.\d+)\.")
"""The beginning of the name of a tensor of a layer, up to the number of the layer."""
_OF_THIS_MODEL = "Use an adapter that was made for this model"


@dataclass(frozen=True, slots=True, eq=False)
class LoraPair:
    """The change of one linear layer: y = x Wᵀ + scale · (x Aᵀ) Bᵀ. a: [rank, in]; b: [out, rank]; both in memory."""

    a: Tensor
    b: Tensor
    scale: float


@dataclass(frozen=True, slots=True, eq=False)
class LoraAdapter:
    """pairs: canonical weight name (`foreword.models.spec.weight_names`, by layer) → its change. path: where it was
    read. files: the states of its files then, see `foreword.models.lora.file_states`. content: what only files of equal
    bytes have, see `Digests.of_files`; b"" unless it is asked for.
    """

    path: Path
    pairs: Mapping[str, LoraPair]
    files: FileStates = ()
    content: bytes = b""


def in_order(
    adapter: LoraAdapter, spec: DecoderSpec, *, is_interleaved: bool, of_indexer: IndexerRows, is_tiled: bool
) -> LoraAdapter:
    """Return the adapter of a file in a spec's order of rows. is_interleaved: the rows of queries and keys are in
    interleaved rotary order in the file. of_indexer: the order of those of an indexer there. is_tiled: the value heads
    of states are in the order of `RecurrentSpec.tiled` there.
    """
    inputs = {name: pair.a for name, pair in adapter.pairs.items()}
    outputs = {name: pair.b for name, pair in adapter.pairs.items()}
    reorder_rows(outputs, spec, is_interleaved, of_indexer)
    for i, layer in enumerate(spec.layers):
        if layer.recurrent is not None and layer.recurrent.tiled != is_tiled:
            _reorder_heads(inputs, outputs, layer.recurrent, f"layers.{i}.state.")
    pairs = {name: replace(pair, a=inputs[name], b=outputs[name]) for name, pair in adapter.pairs.items()}
    return replace(adapter, pairs=pairs)


def _reorder_heads(inputs: dict[str, Tensor], outputs: dict[str, Tensor], spec: RecurrentSpec, prefix: str) -> None:
    """Bring the value heads of a state to the other one of the two orders, see `RecurrentSpec.tiled`."""
    per_key = spec.num_heads // spec.num_key_heads
    of_file = (spec.num_key_heads, per_key) if spec.tiled else (per_key, spec.num_key_heads)
    heads = np.arange(spec.num_heads).reshape(of_file).T.ravel()  # the place of each head of the spec in the file
    values = (heads[:, None] * spec.value_dim + np.arange(spec.value_dim)).ravel()
    for part, order in (("v", values), ("z", values), ("dt", heads), ("beta", heads)):
        if (b := outputs.get(name := prefix + part)) is not None:
            outputs[name] = Tensor(b.data[order], b.quant, b.shape)
    if (a := inputs.get(name := prefix + "o")) is not None:
        inputs[name] = float_tensor(a.dequantize()[:, values])


@dataclass(frozen=True, slots=True)
class Module:
    """A linear layer as files name it. It computes ``parts``: canonical names and their rows of [out].

    num_experts: as many linear layers in one, with {e} in place of the expert in the names of parts; 0: it is one.
    num_idle: experts behind these in the same parameter, whose output is their input: their changes have no effect.
    swapped: the versions of PEFT that take the inputs of the parameter of experts for outputs.
    Without parts it computes nothing that a token reads.
    """

    num_outputs: int
    num_inputs: int
    parts: tuple[tuple[str, Rows], ...]
    num_experts: int = 0
    num_idle: int = 0
    swapped: SwappingVersions = "before 0.19"

    @property
    def is_router(self) -> bool:
        """Return whether it chooses experts. A router is not a linear layer in some versions of transformers."""
        return any(part.endswith(".router") for part, _ in self.parts)

    @property
    def is_expert(self) -> bool:
        """Return whether it is that of one expert. These are parts of one parameter in some versions of
        transformers.
        """
        return not self.num_experts and any(".experts." in part for part, _ in self.parts)


def modules_of(
    spec: DecoderSpec,
    names: Mapping[str, str | Rows],
    numbers: Sequence[int],
    idle: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Module]:
    """Return the linear layers of a decoder that an adapter may change, by name.

    names, numbers: see `linear_modules`. idle: further linear layers that no token reaches → those of the same shape.
    """

    def num_experts(layer: int) -> int:
        experts = spec.layers[layer].experts
        return experts.num_experts if experts else 0

    modules = linear_modules(weight_names(spec, by_layer=True), names, numbers, num_experts)
    return modules | {name: replace(modules[like], parts=()) for name, like in idle.items()}


def linear_modules(
    shapes: Iterable[tuple[str, tuple[int, ...]]],
    names: Mapping[str, str | Rows],
    numbers: Sequence[int] | None = None,
    num_experts: Callable[[int], int] = lambda layer: 0,
) -> dict[str, Module]:
    """Return the linear layers that an adapter may change, by name.

    shapes: of the canonical weights. names: canonical weight → tensor of a file, or rows of one. numbers: see `Family`.
    num_experts: the number of experts of a layer.
    """
    modules: dict[str, Module] = {}
    for name, shape in shapes:
        if not _TARGET.fullmatch(name) or not has_source(name, names):
            continue
        tensor, rows, expert = source_of(name, names, numbers)
        count = 0
        if expert is not None:
            if expert:
                continue  # the tensor of all experts, which the first one has made
            count, name = num_experts(int(name.split(".")[1])), name.replace(".experts.0.", ".experts.{e}.")
        rows = rows or Rows(tensor, 0, shape[0])
        stop = rows.stop if rows.period is None else shape[0] // (rows.stop - rows.start) * rows.period
        other = modules.get(key := tensor.removesuffix(".weight"), Module(0, shape[1], ()))
        modules[key] = Module(max(stop, other.num_outputs), shape[1], (*other.parts, (name, rows)), count)
    return modules


def parameters_of(
    spec: DecoderSpec, names: Mapping[str, str | Rows], numbers: Sequence[int], swapped: SwappingVersions
) -> dict[str, dict[str, Module]]:
    """Return the parameters of all experts of a layer that its class in transformers has, by name, in their order
    there: for each beginning of the names of a layer's tensors.

    names, numbers: as in `modules_of`. swapped: see `Module`.
    """
    found: dict[str, dict[str, Module]] = {}
    for i, layer in enumerate(spec.layers):
        first = f"layers.{i}.experts.0."
        if (experts := layer.experts) is None or not has_source(first + "down", names):
            continue
        begin = _LAYER.match(source_of(first + "down", names, numbers)[0])
        if begin is None:
            continue
        inner, outer = experts.intermediate_size, experts.latent_size or spec.hidden_size
        up: dict[str, Rows] = {"up": Rows("", 0, inner)}
        if spec.gated_mlp:
            halves = {"gate": Rows("", 0, inner), "up": Rows("", inner, 2 * inner)}
            up = {part: source_of(first + part, names, numbers)[1] or rows for part, rows in halves.items()}
        parts, down = _of_experts(i, up), _of_experts(i, {"down": Rows("", 0, outer)})
        idle = experts.identities  # which have no down projection
        found[begin[1]] = {
            "gate_up_proj" if spec.gated_mlp else "up_proj": Module(
                len(up) * inner, outer, parts, experts.num_experts, idle, swapped
            ),
            "down_proj": Module(outer, inner, down, experts.num_experts, swapped=swapped),
        }
    return found


def _of_experts(layer: int, parts: Mapping[str, Rows]) -> tuple[tuple[str, Rows], ...]:
    """Return `Module.parts` of a parameter of all experts of a layer."""
    return tuple((f"layers.{layer}.experts.{{e}}.{part}", rows) for part, rows in parts.items())


def pairs_of(path: Path, name: str, module: Module, a: Tensor, b: Tensor, scale: float) -> dict[str, LoraPair]:
    """Return the changes of a module's parts. a: [rank, in], b: [out, rank], of several experts [experts, …] each.
    Raise ModelError for other shapes, a rank above `MAX_RANK`, or numbers not finite.
    """
    experts = (module.num_experts,) if module.num_experts else ()
    rank = a.shape[-2] if len(a.shape) > 1 else 0
    expected = (*experts, rank, module.num_inputs), (*experts, module.num_outputs, rank)
    for letter, tensor, shape in zip("AB", (a, b), expected, strict=True):
        if tensor.shape != shape:
            reason = f"lora_{letter} has shape {tensor.shape}, expected {shape}"
            raise ModelError(f"{path}: {name}: {reason}. {_OF_THIS_MODEL}")
    if not abs(scale) < 1e30:
        raise ModelError(f"{path}: {name}: the scale of its change is {scale:g}. {_OF_THIS_MODEL}")
    a, b = (Tensor(tensor.data, tensor.quant, tensor.shape) for tensor in (a, b))
    for letter, tensor in (("A", a), ("B", b)):
        if not np.isfinite(tensor.dequantize()).all():
            raise ModelError(f"{path}: {name}: lora_{letter} has values that are not finite. Train the adapter again")
    found: dict[str, LoraPair] = {}
    for e in range(module.num_experts or 1):
        own_a, own_b = (_matrix(tensor, e) for tensor in (a, b))
        for part, rows in module.parts:
            of_part = own_a, select_rows(own_b, rows)
            if len(module.parts) > 1:
                of_part = _without_unused(*of_part)
            if (used := of_part[0].shape[0]) > MAX_RANK:
                raise ModelError(f"{path}: {name} has rank {used}: a rank above {MAX_RANK} is not supported")
            found[part.format(e=e)] = LoraPair(*of_part, scale)
    return found


def _matrix(tensor: Tensor, index: int) -> Tensor:
    """Return a matrix of a stack of them; the tensor itself if it is a matrix."""
    if len(tensor.shape) == 2:
        return tensor
    rows = tensor.shape[1]
    return Tensor(tensor.stored[index * rows : (index + 1) * rows], tensor.quant, tensor.shape[1:])


def _without_unused(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors without the ranks that do not change this part of the outputs: PEFT makes one pair of those
    of gate and up, each with ranks of its own.
    """
    floats = b.dequantize()
    used = np.flatnonzero(floats.any(0))
    if len(used) == len(a.data):
        return a, b
    used = used if len(used) else np.arange(1)
    return Tensor(a.data[used], a.quant, (len(used), a.shape[1])), float_tensor(floats[:, used])


def factors_of(
    path: Path, tensors: Mapping[str, Tensor], pattern: re.Pattern[str], modules: Mapping[str, Module], fix: str
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the factors (A, B) of each module, by name. ``pattern`` matches a tensor's name, with the module and the
    letter of the factor as groups. Raise ModelError for other modules, for one factor without the other, and without
    any.
    """
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = pattern.fullmatch(name)
        if match is None or match[1] not in modules:
            raise unknown_module(path, match[1] if match else name, modules)
        if match[2] in (factors := found.setdefault(match[1], {})):
            raise ModelError(f"{path}: {match[1]} has two tensors lora_{match[2]}. {fix}")
        factors[match[2]] = tensor
    for name, both in found.items():
        if len(both) != 2:
            raise ModelError(f"{path}: {name} has lora_{next(iter(both))} alone. {fix}")
    if not found:
        raise ModelError(f"{path}: has no weights. {fix}")
    return {name: (both[min(both)], both[max(both)]) for name, both in found.items()}


def joined(path: Path, pairs: dict[str, LoraPair], more: Mapping[str, LoraPair], name: str) -> dict[str, LoraPair]:
    """Return the pairs with those of a module. Raise ModelError if both have a change of one matrix."""
    if both := sorted(pairs.keys() & more.keys()):
        fix = "Use an adapter that has one of them"
        raise ModelError(f"{path}: {name} changes {both[0]}, which another tensor of the file changes, too. {fix}")
    return {**pairs, **more}


def unknown_module(path: Path, name: str, modules: Mapping[str, Module]) -> ModelError:
    """Return the error for a tensor of a module that is not among ``modules``."""
    known = ", ".join(sorted({_short(known) for known in modules}))
    reason = f"changes {name:.120}, which is not supported for this model (of each layer: {known})"
    return ModelError(f"{path}: {reason}. {_OF_THIS_MODEL}, without changes of other weights")


def _short(module: str) -> str:
    """Return the name of a module in its layer, or expert, with N in place of numbers."""
    return re.sub(r"\.\d+(?=\.|$)", ".N", re.sub(r".*\.\d+\.(?!\d)", "", module))
