"""`foreword serve`: an HTTP server for a model."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from foreword.cli.options import Group, grouped
from foreword.errors import ConfigError
from foreword.names import advice
from foreword.server.config import ServerConfig, server_config
from foreword.settings import settings_of

VARIABLE = "FOREWORD_SERVE_"
"""Before the name of a setting in capitals: its environment variable."""

ENGINE: dict[str, tuple[Any, str, int, int]] = {
    "executor": (str, "native, numpy, torch, transformers or device; default: auto.", 0, 0),
    "device": (str, "Torch, transformers: cpu, cuda or cuda:N.", 0, 0),
    "dtype": (str, "Torch, transformers, device: auto, fp32, bf16 or fp16.", 0, 0),
    "tensor_parallel_size": (int, "Torch: processes that divide the model by heads.", 1, 1024),
    "context_parallel_size": (int, "Torch: processes that divide keys and values by position.", 1, 1024),
    "num_threads": (int, "Threads; default: the physical cores.", 1, 1024),
    "weight_format": (str, "Native: auto, fp32, bf16, int8 or q4; torch, device: auto, int8 or q4.", 0, 0),
    "kv_format": (str, "Native: fp32, bf16 or int8; device: fp8.", 0, 0),
    "numa_nodes": (int, "Native: NUMA nodes that share the threads; default: they run anywhere.", 1, 1024),
    "preallocate_kv": (bool, "Native: the memory of the KV cache is provided before the first request.", 0, 0),
    "max_model_len": (int, "Tokens of a prompt and its answer; default: the model's.", 2, 2**24),
    "max_num_seqs": (int, "Completions computed at the same time.", 1, 2**16),
    "max_num_batched_tokens": (int, "Tokens computed in one step.", 1, 2**20),
    "kv_cache_bytes": (int, "Memory for keys and values.", 1, 2**50),
    "lora_bytes": (int, "Memory for LoRA adapters.", 0, 2**50),
    "seed": (int, "Seeds of requests without one are derived from it.", 0, 2**62),
}
"""Setting of the engine → its type, its help, the least and the most value."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What `foreword serve` is given. model: None if only the argument may name it. engine: options of `AsyncLLM`."""

    model: str | None
    server: ServerConfig
    engine: dict[str, Any]


def _options() -> dict[str, tuple[Any, object]]:
    found: dict[str, tuple[Any, object]] = {}
    for name, known in settings_of(ServerConfig).items():
        kind = list[str] if known.repeated else known.kind
        default = "" if known.default in (None, ()) else f" [{str(known.default).lower()}]"
        found[name] = _option(name, kind, known.help + default, known.value_name, "Server")
    for name, (kind, text, _, _) in ENGINE.items():
        found[name] = _option(name, kind, text, {int: "N", str: "NAME"}.get(kind, ""), "Engine")
    return found


def _option(name: str, kind: Any, help: str, value: str, panel: str) -> tuple[Any, object]:
    flag = f"--{name.replace('_', '-')}"
    declared = f"{flag}/--no-{flag[2:]}" if kind is bool else flag
    option = typer.Option(
        declared,
        envvar=VARIABLE + name.upper(),
        show_envvar=False,
        metavar=value or None,
        help=help,
        rich_help_panel=panel,
    )
    return Annotated[kind | None, option], None


def _settings(config: Path | None, **given: Any) -> Settings:
    """Options and environment variables, which the command line has read, over those of the file."""
    table = {} if config is None else read_settings(config)
    table |= {name: value for name, value in given.items() if value is not None and value != []}
    model = table.pop("model", None)
    if model is not None and not isinstance(model, str):
        raise ConfigError(f"model={model!r:.80}: expected str")
    engine = {name: table.pop(name) for name in ENGINE if name in table}
    for name, value in engine.items():
        kind, _, least, most = ENGINE[name]
        if type(value) is not kind:
            raise ConfigError(f"{name}={value!r:.80}: expected {kind.__name__}")
        if kind is int and not least <= value <= most:
            raise ConfigError(f"{name}={value!r:.80}: must be from {least} to {most}")
    return Settings(model, server_config(table), engine)


def read_settings(path: Path) -> dict[str, Any]:
    """The settings in a TOML file. ConfigError for a file that is not TOML, or an unknown name."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None
    known = ["model", *ENGINE, *settings_of(ServerConfig)]
    for name in table.keys() - set(known):
        raise ConfigError(f"{path}: {name}: unknown setting. {advice(name, known, 'See --help.')}")
    return table


SETTINGS = Group(
    {
        "config": (Annotated[Path | None, typer.Option(metavar="FILE", help="TOML: names of options.")], None),
        **_options(),
    },
    _settings,
)


@grouped(settings=SETTINGS)
def serve(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            envvar=VARIABLE + "MODEL",
            show_envvar=False,
            help="A known name, a .gguf file, a directory of safetensors, or a hub id.",
        ),
    ] = None,
    *,
    settings: Settings,
) -> None:
    """Serve a model to OpenAI's clients over HTTP.

    Each option may also be a line of a TOML file (max_requests = 64) or an environment variable
    (FOREWORD_SERVE_MAX_REQUESTS=64). An option of the command line goes before a variable, a variable before the file.
    SIGTERM or Ctrl-C: no new requests, those in progress are finished. SIGHUP, with several replicas: new processes
    take their places, one after the other.
    """
    from foreword.server.run import check_packages, run

    name = model or settings.model or "smollm2"
    if settings.server.replicas == 1:
        return run(name, settings.server, **settings.engine)
    check_packages()
    from foreword.cluster.run import run_cluster

    return run_cluster(name, settings.server, settings.engine)
