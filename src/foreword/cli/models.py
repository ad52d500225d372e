"""`foreword models`: list, download, describe and remove models."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Annotated

import typer

from foreword.cli.app import Command
from foreword.cli.options import Json
from foreword.cli.terminal import print_rows
from foreword.engine.defaults import described, suggested_params
from foreword.errors import ModelError
from foreword.executors.packed.store import PackedStore
from foreword.machine import default_threads, memory_bytes
from foreword.models import registry
from foreword.models.encoder_spec import EncoderSpec
from foreword.models.gguf_files import files_at
from foreword.models.hub import HubModel, from_hub, search_hub
from foreword.models.loader import LoadedModel, load_model
from foreword.models.quantized import conversions
from foreword.models.recommended import fitting
from foreword.native import available, native
from foreword.settings import Setting

models = typer.Typer(
    help="List, search, download, describe or remove models.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)

_MOST_BYTES = Setting(name="--bytes", type="int", default=0, unit="bytes", most=2**60)
Name = Annotated[str, typer.Argument(help="A name from `foreword models list`.")]


@models.command("list", cls=Command)
def list_models(as_json: Json = False) -> None:
    """List the models known by name, with size, licence and whether the file is on this machine.

    Below it stands the size of the packed forms that are kept of these and other models.
    """
    rows = [("name", "size", "licence", "here", "what it is")]
    kept = PackedStore().entries()
    for model in registry.KNOWN.values():
        path = registry.cached_path(model.name)
        here = "yes" if path else "no"
        rows.append((model.name, f"{model.size / 1e6:.0f} MB", model.license, here, _described(model)))
        if as_json:
            row = {
                "name": model.name,
                "description": model.description,
                "remark": model.remark or None,
                "bytes": model.size,
                "license": model.license,
                "path": str(path) if path else None,
                "packed_bytes": sum(entry.size for entry in kept if model.sha256 in entry.files),
            }
            print(json.dumps(row))
    if as_json:
        return
    print_rows(rows)
    if size := sum(entry.size for entry in kept):
        print(f"Packed forms: {size / 1e6:.0f} MB, which `foreword models prune` deletes.")


@models.command(cls=Command)
def search(
    words: Annotated[list[str], typer.Argument(metavar="WORD...", help="Words of a name or a description.")],
    limit: Annotated[int, typer.Option("--limit", min=1, max=200, help="Models of the hub at most.")] = 20,
    offline: Annotated[bool, typer.Option("--offline", help="Search the models known by name alone.")] = False,
    as_json: Json = False,
) -> None:
    """Search the models known by name, then the Hugging Face hub, the most downloaded first.

    Models of the hub are repositories with weights in GGUF or safetensors; `foreword models info` tells whether the
    architecture of one is supported.
    """
    wanted = " ".join(words)
    known = registry.search_known(wanted)
    found: list[HubModel] = []
    reason = "the hub was not searched: --offline"
    if not offline:
        try:
            found, reason = search_hub(wanted, limit), ""
        except ModelError as error:
            reason = str(error)
    if not known and not found:
        where = f"known by name; {reason}" if reason else "known by name, and none on the hub"
        raise ModelError(f"{wanted!r:.200}: no such model is {where}. `foreword models list` shows all known names")
    rows = [("name", "where", "what it is")]
    rows += [(model.name, "known", _described(model)) for model in known]
    for hit in found:
        terms = "; its terms must be accepted on the hub" if hit.gated else ""
        rows.append(
            (hit.repository, "hub", f"{' and '.join(hit.formats)}, {hit.downloads} downloads in 30 days{terms}")
        )
    if as_json:
        for model in known:
            print(json.dumps({"name": model.name, "where": "known", "description": _described(model)}))
        for hit in found:
            print(json.dumps({"name": hit.repository, "where": "hub", **asdict(hit)}))
    else:
        print_rows(rows)
    if reason and not offline:
        print(f"foreword: {reason}", file=sys.stderr)


@models.command(cls=Command)
def recommend(
    memory: Annotated[
        float | None, typer.Option("--memory", min=0.1, max=1e6, help="Gigabytes of memory; by default this machine's.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Recommend models that fit into the memory, with what they are good at and how fast they are at most.

    The bound of speed is what this machine's memory reads in a second. The project has not run these files.
    """
    size = memory_bytes() if memory is None else memory * 1e9
    if size is None:
        raise ModelError("the memory of this machine is not known. Give --memory in gigabytes")
    speed = _memory_speed()
    rows = [("-m", "size", "memory", "tokens/s at most", "licence", "good at")]
    for model in (found := [*fitting(size)]):
        rate = None if speed is None else model.most_tokens_per_second(speed)
        shown = "?" if rate is None else f"{rate:.0f}"
        sizes = f"{model.size / 1e9:.1f} GB", f"{model.memory / 1e9:.1f} GB"
        rows.append((model.model, *sizes, shown, model.license, model.good_at))
        if as_json:
            print(json.dumps({**asdict(model), "memory": model.memory, "most_tokens_per_second": rate}))
    if as_json:
        return
    default = registry.DEFAULT
    print(f"memory {size / 1e9:.1f} GB; without -m: {default.name}, {default.remark}")
    print_rows(rows)
    if not found:
        print("None fits: the models of `foreword models list` are smaller.")


def _memory_speed() -> float | None:
    """Return bytes per second that this machine's memory reads; None without native code."""
    if not available():
        return None
    return native.roofline(num_threads=default_threads(), megabytes=128)[1]["memory_bytes"]


@models.command(cls=Command)
def pull(
    name: Annotated[str, typer.Argument(help="A known name, or with -hf a hub id such as org/model:Q4_K_M.")],
    hub: Annotated[bool, typer.Option("-hf", "--hub", help="The name is an id of the Hugging Face hub.")] = False,
    accept_license: Annotated[
        bool, typer.Option("--accept-license", help="Accept the terms of a model that requires it.")
    ] = False,
) -> None:
    """Download a model, verify it and keep it. A cached model is not fetched again; a download resumes."""
    print(from_hub(name) if hub or "/" in name else registry.pull(name, accept_license=accept_license))


@models.command("rm", cls=Command)
def remove(name: Name) -> None:
    """Delete a model, its packed forms and the rest of an interrupted download from the cache."""
    freed = registry.remove(name)
    freed += PackedStore().prune(0, lambda entry: registry.known_model(name).sha256 in entry.files)
    print(f"{freed / 1e6:.1f} MB freed" if freed else f"{name} is not in the cache")


@models.command(cls=Command)
def prune(
    most: Annotated[str, typer.Option("--bytes", metavar="SIZE", help="Bytes that may stay, such as 2GiB.")] = "0",
) -> None:
    """Delete packed forms of weights, the least recently used first.

    The next process that runs a model packs its weights again. Processes that use a packed form keep it until they end.
    """
    freed = PackedStore().prune(_MOST_BYTES.read(most))
    print(f"{freed / 1e6:.1f} MB freed")


@models.command(cls=Command)
def info(
    model: Annotated[str, typer.Argument(help="A known name, a .gguf file, a directory, or a hub id.")],
    as_json: Json = False,
) -> None:
    """Show the file, licence, architecture, sizes and weight formats of a model.

    A model that is not on this machine is fetched.
    """
    facts = dict(_facts(load_model(model)))
    if as_json:
        print(json.dumps(facts))
        return
    print_rows((name, str(value)) for name, value in facts.items())


def _facts(model: LoadedModel) -> Iterator[tuple[str, object]]:
    spec, known = model.spec, registry.KNOWN.get(model.name)
    yield "name", model.name
    if known is not None:
        yield "description", _described(known)
        yield "licence", known.license
    yield "path", str(model.path)
    yield "bytes", _size(model.path)
    yield "parameters", sum(prod(tensor.shape) for tensor in model.weights.values())
    yield "weights", ", ".join(sorted({tensor.quant.name for tensor in model.weights.values()}))
    if converted := conversions(model.weights.values()):
        yield "converted", "; ".join(converted)
    yield "layers", spec.num_layers
    yield "hidden size", spec.hidden_size
    if isinstance(spec, EncoderSpec):
        yield "heads", f"{spec.num_heads} of {spec.head_dim}"
    else:
        shapes = (
            f"{of.num_heads} of {of.head_dim}, {of.num_kv_heads} for keys and values"
            + (f" of {of.value_dim}" if of.value_dim != of.head_dim else "")
            for of in spec.head_shapes
        )
        yield "heads", "; ".join(shapes)
    yield "vocabulary", spec.vocab_size
    yield "context", f"{spec.max_model_len} tokens"
    if model.images is not None:
        yield "images", f"vectors of squares of {model.images.spec.patch_size * model.images.spec.factor} pixels"
    elif model.no_images:
        yield "images", f"none: {model.no_images}"
    yield "chat template", "yes" if model.tokenizer.has_chat_template else "no"
    suggested = model.generation.suggested
    yield "sampling", described(suggested_params(suggested)) or "none"
    if others := suggested.without_parameter():
        yield "not followed", described(others)
    yield "keys not read", ", ".join(model.unread_keys) or "none"


def _described(model: registry.KnownModel) -> str:
    return f"{model.description}; {model.remark}" if model.remark else model.description


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in files_at(path))
