"""Read an adapter for a model from a PEFT directory or a GGUF file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from foreword.errors import ModelError, reason_of
from foreword.models.digests import Digests
from foreword.models.encoder_spec import EncoderSpec, encoder_weight_names
from foreword.models.families.base import SAFETENSORS_NAMES, Family, Rows
from foreword.models.families.encoder_base import EncoderFamily
from foreword.models.files import identity_of
from foreword.models.lora.adapter import (
    FileStates,
    LoraAdapter,
    Module,
    in_order,
    linear_modules,
    modules_of,
    parameters_of,
)
from foreword.models.lora.gguf import read_gguf_lora
from foreword.models.lora.peft import CONFIG, WEIGHTS, read_peft
from foreword.models.spec import DecoderSpec

_OF_TEXT = {"model.language_model.": "model."}
"""Part of the names of linear layers in a model with encoders → what it is in its decoder."""


def read_lora(path: str | Path, spec: DecoderSpec, family: Family) -> LoraAdapter:
    """Return the adapter at a path, checked and wholly in memory. spec, family: of the model that it changes.

    path: a directory with adapter_config.json and adapter_model.safetensors, or a .gguf file. Raise ModelError if it is
    missing or damaged, if its layers or shapes are not the model's, or if it needs what is not supported.
    """

    def read(path: Path) -> LoraAdapter:
        if not path.is_dir():
            return read_gguf_lora(path, spec, family)
        if family.is_scaled:
            reason = f"the weights of this {spec.architecture} have its multipliers, those of an adapter not"
            raise ModelError(f"{path}: {reason}. Use the model's own checkpoint of safetensors")
        names: dict[str, str | Rows] = {**SAFETENSORS_NAMES, **family.names, **family.fused(spec)}
        names |= family.changed(spec)
        numbers = family.numbers(spec)
        parameters = parameters_of(spec, names, numbers, family.peft_swaps_experts)
        modules = modules_of(spec, names, numbers, family.idle(spec))
        model = f"{str(names['embed']).partition('.')[0]}."
        adapter = read_peft(path, modules, {**_OF_TEXT, **family.renamed}, parameters, model)
        return in_order(
            adapter, spec, is_interleaved=family.interleaved, of_indexer=family.indexer_rows, is_tiled=False
        )

    return _read_unchanged(Path(path), read)


def read_encoder_lora(path: str | Path, spec: EncoderSpec, family: EncoderFamily, *, has_head: bool) -> LoraAdapter:
    """Return the adapter at a path for an encoder in a directory. Raise ModelError as `read_lora`, and for a file.

    has_head: the model is a classifier, whose head adapters do not change.
    """
    # No vector depends on the pooler of a model without a head.
    idle = {} if has_head else {"pooler.dense": Module(spec.hidden_size, spec.hidden_size, ())}
    names: dict[str, str | Rows] = {**family.names, **family.fused(spec)}
    by_files, by_class = (linear_modules(encoder_weight_names(spec), own) | idle for own in (names, {**family.modules}))

    def read(path: Path) -> LoraAdapter:
        if not path.is_dir():
            raise ModelError(f"{path}: is not a directory. Encoders take adapters in PEFT's format")
        return read_peft(path, by_files, {family.prefix: ""}, others=by_class)

    return _read_unchanged(Path(path), read)


def read_lora_by_names(path: str | Path, layers: Mapping[str, tuple[int, int]]) -> LoraAdapter:
    """Read an adapter for a model whose weights have the names of its files. layers: outputs and inputs of the linear
    layers.

    path: a directory. Raise ModelError as `read_lora`.
    """
    modules = {name: Module(*sizes, ((name, Rows(name, 0, sizes[0])),)) for name, sizes in layers.items()}

    def read(path: Path) -> LoraAdapter:
        if not path.is_dir():
            raise ModelError(f"{path}: is not a directory. Models of transformers take adapters in PEFT's format")
        return read_peft(path, modules)

    return _read_unchanged(Path(path), read)


def _read_unchanged(path: Path, read: Callable[[Path], LoraAdapter]) -> LoraAdapter:
    before = file_states(path)
    adapter = replace(read(path), files=before)
    _check_unchanged(adapter, path)
    return adapter


def with_content(adapter: LoraAdapter) -> LoraAdapter:
    """Return an adapter that was just read with what its files contain. Raise ModelError if they have changed."""
    path = adapter.path
    files = [(name, path / name) for name in (CONFIG, WEIGHTS)] if path.is_dir() else [("", path)]
    content = Digests().of_files(files)
    _check_unchanged(adapter, path)
    return replace(adapter, content=content)


def _check_unchanged(adapter: LoraAdapter, path: Path) -> None:
    if file_states(path) != adapter.files:
        raise ModelError(f"{path}: was changed while it was read. Load the adapter again")


def file_states(path: Path) -> FileStates:
    """Return the identities of an adapter's files. Raise ModelError if one is missing."""
    try:
        files = [path / CONFIG, path / WEIGHTS] if path.is_dir() else [path]
        return tuple(identity_of(file.stat()) for file in files)
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        name = (error.filename if isinstance(error, OSError) else None) or path
        fix = f"Give a directory with {CONFIG} and {WEIGHTS}, or a .gguf file"
        raise ModelError(f"{name}: cannot be read ({reason_of(error)}). {fix}") from None
