"""The options of `LLM` and `AsyncLLM`: flat names of all settings, and the parts that a user brings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

from foreword.cache import TierFactory
from foreword.engine.build import DrafterFactory, with_drafter
from foreword.engine.config import GROUPS, EngineConfig, engine_config
from foreword.engine.model import ProcessorFactory
from foreword.engine.observer import EngineObserver
from foreword.engine.option_types import EngineOptions
from foreword.engine.speculation.config import Method, SpeculationConfig
from foreword.errors import ConfigError, shown
from foreword.executors.kinds import KINDS, ExecutorChoice, kind_of
from foreword.media.limits import MediaLimits
from foreword.plugins import load_plugin, made
from foreword.scheduler import Policy, SchedulerConfig
from foreword.scheduler.policies import Key
from foreword.settings import Setting, settings_of
from foreword.trace.destination import Destination


class LLMOptions(EngineOptions, total=False):
    """Options of `LLM`: those of `EngineOptions`, whose meaning docs/settings.md has, and these.

    executor: "native", "numpy", "torch", "transformers" or "device" (a GPU that prepares its steps itself); "auto" is
        the native one if it is built, else "numpy", and "transformers" for a directory whose architecture Foreword does
        not have. Also the name of a plug-in, "module:name", an `ExecutorKind`, a function of (spec, weights, pool size)
        that returns an executor, or an executor with at least num_blocks blocks.
    scheduler, speculation: the settings of each as one value; flat options change single ones.
    policy: "fcfs", "priority", "shortest-first", "fair", the name of a plug-in, "module:name", or a function of a
        request.
    observers, logits_processors, drafter: objects, functions that make them, names of plug-ins or "module:name". An
        observer is made without arguments, the others with the `RequestStates` of the engine.
    tiers: functions of a `BlockFormat` that make places for blocks outside the pool, or their names.
    loras: name → path of adapters that are loaded at once. media: limits of the images and sounds of conversations.
    """

    executor: ExecutorChoice
    scheduler: SchedulerConfig
    speculation: Method | Literal["off"] | SpeculationConfig | Mapping[str, Any] | None
    policy: str | Policy | Key
    observers: Sequence[EngineObserver | str]
    logits_processors: Sequence[ProcessorFactory | str]
    drafter: DrafterFactory | str | None
    tiers: Sequence[TierFactory | str]
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
    tiers: Sequence[TierFactory]
    loras: Mapping[str, str | Path]
    media: MediaLimits


# fmt: off
MODEL = Setting(
    name="model", default="smollm2", help="A known name, a .gguf file, a directory of safetensors, or a hub id.",
    value_name="NAME",
)
ADAPTER = Setting(
    name="adapter", type="Sequence[str]", default=(),
    help="A LoRA adapter. run and chat use the last one; in batch, each line names its adapter. Repeatable.",
    value_name="NAME=PATH",
)
EXECUTOR = Setting(
    name="executor", default="auto",
    help=f"The executor that runs the model: {', '.join(KINDS)}, the name of a plug-in, or module:name. auto: native "
    "if it is built, else numpy; transformers for a directory whose architecture Foreword does not have.",
    value_name="NAME",
)
PLUG_INS = (
    Setting(
        name="logits_processor", type="Sequence[str]", default=(),
        help="A function that makes a logits processor, as module:name or the name of a plug-in. Repeatable.",
        value_name="NAME",
    ),
    Setting(
        name="observer", type="Sequence[str]", default=(),
        help="A class or function that makes an observer of the engine, named likewise. Repeatable.", value_name="NAME",
    ),
    Setting(
        name="tier", type="Sequence[str]", default=(),
        help="A function that makes a place for KV blocks outside the pool, named likewise. Repeatable.",
        value_name="NAME",
    ),
    Setting(
        name="drafter", optional=True, help="A function that makes the drafter of speculation, named likewise.",
        value_name="NAME",
    ),
)
# fmt: on


def executor_settings() -> dict[str, dict[str, Setting]]:
    """Return name → kind of executor → setting, of all options of executors."""
    found: dict[str, dict[str, Setting]] = {}
    for kind in KINDS.values():
        for name, known in settings_of(kind.options).items():
            found.setdefault(name, {})[kind.name] = known
    return found


def decoders_only() -> frozenset[str]:
    """Return the names of the options that encoders refuse."""
    tables = [settings_of(EngineConfig), settings_of(SchedulerConfig)]
    tables += [settings_of(kind.options) for kind in KINDS.values()]
    return frozenset(name for table in tables for name, known in table.items() if known.decoders_only)


def option_settings() -> dict[str, dict[str, Setting]]:
    """Return heading → name → setting, of all options of `LLM` that texts can give, and the model.

    An executor's option is one setting for all kinds; the kind that is used refuses what it does not have.
    """
    return {
        "Model": {known.name: known for known in (MODEL, ADAPTER)},
        **{heading: dict(group) for heading, group in GROUPS.items()},
        "Executor": {"executor": EXECUTOR} | {name: _of_all(kinds) for name, kinds in executor_settings().items()},
        "Plug-ins": {known.name: known for known in PLUG_INS},
    }


def _of_all(kinds: Mapping[str, Setting]) -> Setting:
    """Return the setting that has the values of all kinds; a default that differs is None."""
    own = list(kinds.values())
    choices = dict.fromkeys(choice for one in own for choice in one.choices) if all(one.choices for one in own) else {}
    default = own[0].default if len({one.default for one in own}) == 1 else None
    return replace(own[0], choices=tuple(choices), default=default, optional=any(one.optional for one in own))


def with_threads(options: LLMOptions, num_threads: int) -> LLMOptions:
    """Return the options with this number of threads, unless they have one, or the executor none of its own."""
    given = options.get("executor")
    kind = kind_of("auto" if given is None else given)
    if options.get("num_threads") is not None or "num_threads" not in settings_of(kind.options):
        return options
    return {**options, "num_threads": num_threads}


def of_process(options: LLMOptions, number: int) -> LLMOptions:
    """Return the options for one of several processes, which write no file of the same name."""
    record = options.get("record")
    return options if record is None else {**options, "record": str(Destination.of(record).numbered(number))}


def split_options(options: LLMOptions) -> GivenOptions:
    """Sort options. Raise ConfigError for an unknown name, and for a value that cannot be."""
    given: dict[str, Any] = dict(options)
    parts = {name: given.pop(name, None) for name in PARTS}
    names, drafter = executor_settings(), parts["drafter"]
    media = MediaLimits() if parts["media"] is None else parts["media"]
    if drafter is not None:
        drafter = _factory("drafter", "drafters", drafter)
        if given.get("speculation") is None:
            given["speculation"] = "custom"
    if not isinstance(media, MediaLimits):
        raise ConfigError(f"media={shown(media)}: expected MediaLimits, such as MediaLimits(max_images=4)")
    of_executor = {name: given.pop(name) for name in names.keys() & given.keys()}
    return GivenOptions(
        config=with_drafter(engine_config(given, other_names=(*PARTS, *names)), drafter),
        executor="auto" if parts["executor"] is None else parts["executor"],
        of_executor=of_executor,
        observers=[_observer(one) for one in _listed("observers", parts["observers"])],
        logits_processors=[
            _factory("logits_processors", "logits_processors", one)
            for one in _listed("logits_processors", parts["logits_processors"])
        ],
        drafter=drafter,
        tiers=[_factory("tiers", "tiers", one) for one in _listed("tiers", parts["tiers"])],
        loras=_loras(parts["loras"]),
        media=media,
    )


PARTS = ("executor", "observers", "logits_processors", "drafter", "tiers", "loras", "media")
"""Options that are no settings."""


def _listed(name: str, given: object) -> Iterable[object]:
    if given is None:
        return ()
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ConfigError(f"{name}={shown(given)}: expected a list; give [{shown(given)}]")
    return given


def _loras(given: object) -> Mapping[str, str | Path]:
    if not isinstance(given, Mapping | None):
        raise ConfigError(f"loras={shown(given)}: expected a dictionary of paths by name, such as {{'a': 'folder'}}")
    return given or {}


def _observer(given: object) -> EngineObserver:
    if isinstance(given, str):
        given = made("observers", _factory("observers", "observers", given), kind=EngineObserver)
    if not isinstance(given, EngineObserver):
        raise ConfigError(f"observers={shown(given)}: must be EngineObservers, or name functions that make them")
    return given


def _factory(option: str, group: str, given: object) -> Callable[..., Any]:
    found = given
    if isinstance(given, str):
        try:
            found = load_plugin(group, given)
        except ValueError as error:
            raise ConfigError(f"{option}={given!r}: {error}") from None
    if not callable(found):
        raise ConfigError(f"{option}={shown(given)}: must be a function that makes it, or the name of one")
    return cast(Callable[..., Any], found)
