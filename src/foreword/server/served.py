"""Which models a server has: each with its names, its options and how long it stays loaded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from foreword.engine.options import LLMOptions
from foreword.errors import ConfigError, reason_of, shown
from foreword.models.gguf_names import model_name, models_among
from foreword.server.config import ServerConfig
from foreword.settings import settings_of

OF_ONE = ("served_model_name", "adapter", "kv_events", "kv_events_replay")
"""Settings of a server of one model. A table has names and adapters of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model of a server of several.

    model: what `LLM` takes. names: in requests, the first one in responses. options: of its engine. common: the names
    of those that were given for all models: an encoder leaves out those of decoders, and a model that was made for
    fewer tokens than max_model_len has its own number. pin: it is never unloaded. keep_alive: seconds for which it
    stays loaded without requests; None: until its memory is needed.
    """

    model: str
    names: tuple[str, ...]
    options: LLMOptions = field(default_factory=LLMOptions)
    common: frozenset[str] = frozenset()
    pin: bool = False
    keep_alive: float | None = None


def models_in(directory: str, options: LLMOptions, keep_alive: float | None) -> list[ServedModel]:
    """Return the models of a directory, by name: its .gguf files, and its directories with config.json or one .gguf
    file. Raise ConfigError if there are none, or if it cannot be read. Two of one name are refused by `checked`.
    """
    folder = Path(directory)
    try:
        paths = list(folder.iterdir())
        found = [(path.name, path) for path in paths if path.is_dir() and _has_one(path)]
        files = models_among(path.name for path in paths if path.is_file())
        found += [(model_name(path), path) for path in map(folder.joinpath, files)]
    except OSError as error:
        reason = f"cannot be read ({reason_of(error)})"
        raise ConfigError(f"models_dir={directory!r:.200}: {reason}. Give a directory of models") from None
    if not found:
        reason = "has no .gguf file, and no directory with config.json or one .gguf file"
        raise ConfigError(f"models_dir={directory!r:.200}: {reason}. Give a directory of models")
    return [
        ServedModel(model=str(path), names=(name,), options=options, common=frozenset(options), keep_alive=keep_alive)
        for name, path in sorted(found)
    ]


def _has_one(path: Path) -> bool:
    return (path / "config.json").is_file() or len(models_among(file.name for file in path.glob("*.gguf"))) == 1


def checked(models: Iterable[ServedModel], config: ServerConfig) -> list[ServedModel]:
    """Return the models of a server of several, of which those are pinned that its settings name. Raise ConfigError for
    a setting of one model, for a name that two models or adapters have, and for one to be pinned that no model has.
    """
    for name in OF_ONE:
        if (value := getattr(config, name)) != settings_of(ServerConfig)[name].default:
            fix = "Give name and adapter in [[model]] tables of --config" if name in OF_ONE[:2] else "Leave it out"
            raise ConfigError(f"{name}={shown(value)}: is for a server of one model. {fix}")
    if config.replicas > 1:
        raise ConfigError(f"replicas={config.replicas}: are of one model. Serve one, or leave replicas out")
    found, owners = list(models), dict[str, ServedModel]()
    for one in found:
        if (record := one.options.get("record")) is not None:
            raise ConfigError(f"record={shown(record)}: is for a server of one model. Leave it out")
        for name in (*one.names, *(one.options.get("loras") or ())):
            if owners.setdefault(name, one) is not one:
                reason = f"{name!r:.80} is the name of {owners[name].model!r:.200}, too"
                raise ConfigError(f"model {one.model!r:.200}: {reason}. Give names in [[model]] tables of --config")
    known = [name for one in found for name in one.names]
    for name in config.pin:
        if name not in known:
            raise ConfigError(f"pin={name!r:.80}: no model has this name. Give one of {', '.join(known)}")
    return [replace(one, pin=one.pin or not set(config.pin).isdisjoint(one.names)) for one in found]
