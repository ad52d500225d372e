"""The options of `LLM` and `AsyncLLM`: flat names of all settings, and the parts that a user brings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from foreword.engine.build import DrafterFactory
from foreword.engine.config import EngineConfig, engine_config
from foreword.engine.model import ProcessorFactory
from foreword.engine.observer import EngineObserver
from foreword.engine.option_types import EngineOptions
from foreword.engine.speculation.config import Method, SpeculationConfig
from foreword.errors import ConfigError, shown
from foreword.executors.kinds import KINDS, ExecutorChoice
from foreword.media.limits import MediaLimits
from foreword.plugins import load_plugin
from foreword.scheduler import Policy, SchedulerConfig
from foreword.scheduler.policies import Key
from foreword.settings import Setting, settings_of


class LLMOptions(EngineOptions, total=False):
    """Options of `LLM`: those of `EngineOptions`, whose meaning docs/settings.md has, and these.

    executor: "native", "numpy", "torch", "transformers" or "device" (a GPU that prepares its steps itself); "auto" is
        the native one if it is built, else "numpy", and "transformers" for a directory whose architecture Foreword does
        not have. Also the name of a plug-in, "module:name", an `ExecutorKind`, a function of (spec, weights, pool size)
        that returns an executor, or an executor with at least num_blocks blocks.
    scheduler, speculation: the settings of each as one value; flat options change single ones.
    policy: "fcfs", "priority", "shortest-first", the name of a plug-in, "module:name", or a function of a request.
    observers, logits_processors, drafter: objects, functions that make them, names of plug-ins or "module:name". An
        observer is made without arguments, the others with the `RequestStates` of the engine.
    loras: name → path of adapters that are loaded at once. media: limits of the images and sounds of conversations.
    """

    executor: ExecutorChoice
    scheduler: SchedulerConfig
    speculation: Method | SpeculationConfig | Mapping[str, Any] | None
    policy: str | Policy | Key
    observers: Sequence[EngineObserver | str]
    logits_processors: Sequence[ProcessorFactory | str]
    drafter: DrafterFactory | str | None
    loras: Mapping[str, str | Path] | None
    media: MediaLimits | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenOptions:
    """Options of `LLM` by the parts that they concern."""

    config: EngineConfig
    executor: ExecutorChoice
    of_executor: Mapping[str, Any]
    observers: Sequence[EngineObserver]
    logits_processors: Sequence[ProcessorFactory]
    drafter: DrafterFactory | None
    loras: Mapping[str, str | Path]
    media: MediaLimits


def executor_settings() -> dict[str, dict[str, Setting]]:
    """Return name → kind of executor → setting, of all options of executors."""
    found: dict[str, dict[str, Setting]] = {}
    for kind in KINDS.values():
        for name, known in settings_of(kind.options).items():
            found.setdefault(name, {})[kind.name] = known
    return found


def split_options(options: LLMOptions) -> GivenOptions:
    """Sort options. ConfigError for an unknown name, and for a value that cannot be."""
    given: dict[str, Any] = dict(options)
    parts = {name: given.pop(name, None) for name in PARTS}
    names = executor_settings()
    of_executor = {name: given.pop(name) for name in names.keys() & given.keys()}
    return GivenOptions(
        config=engine_config(given, other_names=(*PARTS, *names)),
        executor="auto" if parts["executor"] is None else parts["executor"],
        of_executor=of_executor,
        observers=[_observer(one) for one in _listed("observers", parts["observers"])],
        logits_processors=[
            _factory("logits_processors", one) for one in _listed("logits_processors", parts["logits_processors"])
        ],
        drafter=None if parts["drafter"] is None else _factory("drafters", parts["drafter"]),
        loras=parts["loras"] or {},
        media=parts["media"] or MediaLimits(),
    )


PARTS = ("executor", "observers", "logits_processors", "drafter", "loras", "media")
"""Options that are no settings."""


def _listed(name: str, given: object) -> Iterable[object]:
    if given is None:
        return ()
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ConfigError(f"{name}={shown(given)}: expected a list; give [{shown(given)}]")
    return given


def _observer(given: object) -> EngineObserver:
    if isinstance(given, str):
        given = _factory("observers", given)()
    if not isinstance(given, EngineObserver):
        raise ConfigError(f"observers={shown(given)}: must be EngineObservers, or name functions that make them")
    return given


def _factory(group: str, given: object) -> Callable[..., Any]:
    found = given
    if isinstance(given, str):
        try:
            found = load_plugin(group, given)
        except ValueError as error:
            raise ConfigError(f"{group}={given!r}: {error}") from None
    if not callable(found):
        raise ConfigError(f"{group}={shown(given)}: must be a function that makes it, or the name of one")
    return cast(Callable[..., Any], found)
