"""Options that several commands share, and their results as lines or JSON."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import Field, asdict, dataclass
from functools import wraps
from typing import Annotated, Any, ClassVar, Generic, Protocol, TypeVar

import typer

from foreword.engine.loras import named_paths
from foreword.errors import ConfigError


def _known_models() -> list[str]:
    """For the completion of a shell."""
    from foreword.models.registry import KNOWN  # takes 0.04 s to import, which no other command needs

    return list(KNOWN)


Json = Annotated[bool, typer.Option("--json", help="Print JSON, one result per line.")]
Model = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        metavar="NAME",
        help="A known name, a .gguf file, a directory of safetensors, or a hub id.",
        autocompletion=_known_models,
    ),
]
MAX_THREADS = 1024
Threads = Annotated[
    int | None, typer.Option(min=1, max=MAX_THREADS, metavar="N", help="Threads; default: the physical cores.")
]
Budget = Annotated[int, typer.Option(min=1, max=2**20, help="Maximum number of tokens per step.")]
BlockSize = Annotated[int, typer.Option(min=1, max=2**16, help="Tokens per KV block.")]
MaxNumSeqs = Annotated[int, typer.Option(min=1, max=2**16, help="Maximum number of running requests.")]
MaxModelLen = Annotated[int, typer.Option(min=2, max=2**24, help="Maximum number of tokens of a request.")]
ContextLen = Annotated[
    int | None,
    typer.Option(
        "--max-model-len",
        min=2,
        max=2**24,
        metavar="N",
        help="Tokens of a prompt and its answer; default: the model's.",
    ),
]


G = TypeVar("G")


@dataclass(frozen=True, slots=True)
class Group(Generic[G]):
    """Options that become one value of a command: name → (annotation, default), and what makes it of their values."""

    options: Mapping[str, tuple[Any, object]]
    make: Callable[..., G]


def grouped(**groups: Group[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replaces parameters of a command, which have these names, each by the options of its group."""

    def wrap(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(**given: Any) -> None:
            made = {
                name: group.make(**{option: given.pop(option) for option in group.options})
                for name, group in groups.items()
            }
            command(**given, **made)

        own = inspect.signature(command, eval_str=True).parameters.values()
        parameters = [p.replace(kind=p.KEYWORD_ONLY) for p in own if p.name not in groups]
        parameters += [
            inspect.Parameter(option, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)
            for group in groups.values()
            for option, (annotation, default) in group.options.items()
        ]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return run

    return wrap


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The model, the engine options that were given, and the form of the results."""

    model: str
    settings: dict[str, Any]
    as_json: bool = False

    @property
    def lora(self) -> str | None:
        """The adapter that answers: the last one that was given."""
        return next(reversed(self.settings.get("loras", {})), None)


def _engine_options(
    model: str, as_json: bool = False, adapter: Sequence[str] | None = None, **settings: Any
) -> EngineOptions:
    if adapter:
        settings["loras"] = named_paths(adapter)
    return EngineOptions(model, {name: value for name, value in settings.items() if value is not None}, as_json)


_MODEL: dict[str, tuple[Any, object]] = {"model": (Model, "smollm2")}
_EXECUTOR: dict[str, tuple[Any, object]] = {
    "executor": (
        Annotated[
            str | None,
            typer.Option(metavar="NAME", help="native, numpy, torch, transformers or device; default: auto."),
        ],
        None,
    ),
    "num_threads": (Threads, None),
    "weight_format": (
        Annotated[
            str | None,
            typer.Option(metavar="NAME", help="Native: auto, fp32, bf16, int8 or q4; torch, device: auto, int8 or q4."),
        ],
        None,
    ),
    "numa_nodes": (
        Annotated[
            int | None, typer.Option(min=1, max=1024, metavar="N", help="Native: NUMA nodes that share the threads.")
        ],
        None,
    ),
    "kv_format": (
        Annotated[str | None, typer.Option(metavar="NAME", help="Native: fp32, bf16 or int8; device: fp8.")],
        None,
    ),
    "device": (
        Annotated[str | None, typer.Option(metavar="NAME", help="Torch, transformers: cpu, cuda or cuda:N.")],
        None,
    ),
    "dtype": (
        Annotated[
            str | None, typer.Option(metavar="NAME", help="Torch, transformers, device: auto, fp32, bf16 or fp16.")
        ],
        None,
    ),
    "tensor_parallel_size": (
        Annotated[
            int | None,
            typer.Option(min=1, max=1024, metavar="N", help="Torch: processes that divide the model by heads."),
        ],
        None,
    ),
    "context_parallel_size": (
        Annotated[
            int | None,
            typer.Option(
                min=1, max=1024, metavar="N", help="Torch: processes that divide keys and values by position."
            ),
        ],
        None,
    ),
}
_ADAPTER: dict[str, tuple[Any, object]] = {
    "adapter": (
        Annotated[list[str] | None, typer.Option(metavar="NAME=PATH", help="A LoRA adapter. Repeatable.")],
        None,
    ),
}
ENGINE = Group({**_MODEL, **_ADAPTER, **_EXECUTOR, "max_model_len": (ContextLen, None)}, _engine_options)
"""The model, its adapters and the settings of its engine."""

with_engine_options = grouped(options=Group({**_MODEL, **_EXECUTOR, "as_json": (Json, False)}, _engine_options))
"""For a benchmark, which sets the length itself: ``options`` is the model, the settings and --json."""


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
