"""What several commands share: options of the native executor, lists of numbers, and results as lines."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Annotated, Any, Protocol, TypeVar

import typer

from foreword.errors import ConfigError

EngineOptions = dict[str, Any]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, one result a line.")]
Model = Annotated[str, typer.Option(help="A known name, a .gguf file, a directory of safetensors, or a hub id.")]
Threads = Annotated[int | None, typer.Option(help="Threads; default: the physical cores.")]

_ENGINE_OPTIONS = {
    "num_threads": Threads,
    "weight_format": Annotated[str | None, typer.Option(help="auto, fp32, bf16, int8 or q4.")],
    "kv_format": Annotated[str | None, typer.Option(help="fp32, bf16 or int8.")],
}


def with_engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """A command with the options of the native executor in place of its parameter ``options``, which gets a dictionary
    of those that were given.
    """

    @wraps(command)
    def run(**given: Any) -> None:
        chosen = {name: given.pop(name) for name in _ENGINE_OPTIONS}
        command(**given, options={name: value for name, value in chosen.items() if value is not None})

    own = list(inspect.signature(command, eval_str=True).parameters.values())
    at = [parameter.name for parameter in own].index("options")
    engine = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=option)
        for name, option in _ENGINE_OPTIONS.items()
    ]
    run.__signature__ = inspect.Signature([*own[:at], *engine, *own[at + 1 :]])  # type: ignore[attr-defined]
    return run


def counts(option: str, text: str) -> list[int]:
    """Whole numbers above zero, separated by commas; ConfigError naming the option for anything else."""
    found = text.split(",")
    if not all(part.strip().isdecimal() and int(part) for part in found):
        raise ConfigError(f"{option} {text!r}: must be whole numbers above zero, separated by commas, such as 1,8")
    return [int(part) for part in found]


class Result(Protocol):
    def as_dict(self) -> dict[str, object]: ...


R = TypeVar("R", bound=Result)


def show(results: Iterable[R], line: Callable[[R], str], *, as_json: bool, header: Sequence[str] = ()) -> list[R]:
    """Print results as they come, as JSON or as lines under a header. Returns them."""
    shown: list[R] = []
    if not as_json:
        for text in header:
            print(text)
    for result in results:
        print(json.dumps(result.as_dict()) if as_json else line(result), flush=True)
        shown.append(result)
    return shown
