"""Options that several commands share, and their results as lines or JSON."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import Field, asdict, dataclass
from functools import wraps
from typing import Annotated, Any, ClassVar, Protocol, TypeVar

import typer

from foreword.errors import ConfigError

Json = Annotated[bool, typer.Option("--json", help="Print JSON, one result per line.")]
Model = Annotated[str, typer.Option(help="A known name, a .gguf file, a directory of safetensors, or a hub id.")]
MAX_THREADS = 1024
Threads = Annotated[int | None, typer.Option(min=1, max=MAX_THREADS, help="Threads; default: the physical cores.")]
Budget = Annotated[int, typer.Option(min=1, max=2**20, help="Maximum number of tokens per step.")]
BlockSize = Annotated[int, typer.Option(min=1, max=2**16, help="Tokens per KV block.")]
MaxNumSeqs = Annotated[int, typer.Option(min=1, max=2**16, help="Maximum number of running requests.")]
MaxModelLen = Annotated[int, typer.Option(min=2, max=2**24, help="Maximum number of tokens of a request.")]


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The model to measure, the engine options that were given, and the form of the results."""

    model: str
    settings: dict[str, Any]
    as_json: bool


_SETTINGS = {
    "num_threads": Threads,
    "weight_format": Annotated[str | None, typer.Option(help="auto, fp32, bf16, int8 or q4.")],
    "kv_format": Annotated[str | None, typer.Option(help="fp32, bf16 or int8.")],
}


def with_engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replaces the parameter ``options: EngineOptions`` of a command by --model, one option per setting, and --json."""

    @wraps(command)
    def run(*, model: str, as_json: bool, **given: Any) -> None:
        chosen = {name: given.pop(name) for name in _SETTINGS}
        settings = {name: value for name, value in chosen.items() if value is not None}
        command(options=EngineOptions(model, settings, as_json), **given)

    def parameter(name: str, annotation: Any, default: object) -> inspect.Parameter:
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)

    own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "options"]
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            parameter("model", Model, "smollm2"),
            *own,
            *(parameter(name, option, None) for name, option in _SETTINGS.items()),
            parameter("as_json", Json, False),
        ]
    )
    return run


def not_nan(value: float | None) -> float | None:
    """Callback of a number with a range, which NaN is not refused by."""
    if value is not None and math.isnan(value):
        raise typer.BadParameter("nan is not a number.")
    return value


def counts(option: str, text: str, most: int) -> list[int]:
    """Integers in [1, most] separated by commas. ConfigError, naming the option, for anything else."""
    try:
        found = list(map(int, text.split(",")))
    except ValueError:
        found = [0]
    if not all(1 <= count <= most for count in found):
        raise ConfigError(
            f"{option} {text!r:.80}: must be whole numbers above zero, at most {most}, separated by commas, such as 1,8"
        )
    return found


class Result(Protocol):
    """A dataclass; its fields are the keys of the JSON form."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


R = TypeVar("R", bound=Result)


def show(results: Iterable[R], line: Callable[[R], str], *, as_json: bool, header: Sequence[str] = ()) -> list[R]:
    """Print each result as soon as it is measured, as JSON or as a line below the header. Returns all of them."""
    shown: list[R] = []
    if not as_json:
        for text in header:
            print(text)
    for result in results:
        print(json.dumps(asdict(result)) if as_json else line(result), flush=True)
        shown.append(result)
    return shown
