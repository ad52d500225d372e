"""The engine's settings, and all of an engine's options as flat names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from foreword.batch import Check, SamplingParams
from foreword.engine.speculation.config import SpeculationConfig
from foreword.errors import ConfigError, setting_text, shown
from foreword.names import advice
from foreword.scheduler import SchedulerConfig
from foreword.settings import Setting, check_settings, setting, settings_of, values_of
from foreword.trace.destination import checked_destination

AUTO = SpeculationConfig(method="auto")
"""Speculation where the executor allows it, see `EngineConfig.resolved`."""
SET_METHOD = "give speculation='ngram', or leave it out"
"""The fix for a setting of speculation where the default means none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of an engine, without its executor's. Raise ConfigError for a value of another type or out of range.

    speculation: None: one token per step; with the method "auto": see `resolved`.
    scheduler: see `SchedulerConfig`.
    """

    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    # fmt: off
    max_model_len: int | None = setting(
        None, "Largest number of tokens of a request, prompt included; None: the model's own length. A longrope "
        "model may have more than its original length; all of its requests then use the frequencies for long "
        "contexts.",
        least=2, most=2**24,
    )
    block_size: int = setting(
        16, "Number of tokens of a KV block.",
        least=1, most=2**16, decoders_only=True,
    )
    num_blocks: int | None = setting(
        None, "Number of KV blocks of the pool, null block included, without the slots for states of recurrent layers; "
        "None: as many as max_num_seqs requests of max_model_len could need, within kv_cache_bytes.",
        least=2, most=2**28, decoders_only=True,
    )
    kv_cache_bytes: int | None = setting(
        None, "Memory for keys, values and states of recurrent layers if num_blocks is not given; None: 2GiB, or less "
        "if the weights and activations leave less memory on the machine or in its container.",
        least=1, most=2**50, unit="bytes", decoders_only=True,
    )
    lora_bytes: int = setting(
        1 << 30, "Memory for LoRA adapters. When it is full, the least recently used ones are removed, and are read "
        "again when a request needs them. Adapters of requests in progress stay, even beyond this limit.",
        most=2**50, unit="bytes", decoders_only=True,
    )
    max_logprobs: int = setting(
        -1, "Largest number of log-probabilities per token that a request may ask for, of its output or its prompt; "
        "-1: all of the vocabulary.", least=-1, most=2**31 - 1,
    )
    grammar_cache_bytes: int = setting(
        256 << 20, "Memory for compiled grammars of structured outputs; the most recently used ones are kept.",
        most=2**50, unit="bytes", decoders_only=True,
    )
    cache_dir: str | None = setting(
        None, "Directory in which computed KV blocks are saved, so that equal prefixes are also reused after a "
        "restart. Several processes may share it. None: they are not saved. Only their owner can read the files; "
        "they hold keys and values, from which texts can be inferred.",
        unit="path", value_name="FOLDER", decoders_only=True,
    )
    cache_bytes: int | None = setting(
        None, "Largest total size of the files in cache_dir; the least recently used files are deleted first. None: "
        "16GiB.",
        least=1, most=2**60, unit="bytes", decoders_only=True,
    )
    host_cache_bytes: int = setting(
        0, "Host memory for KV blocks that the pool evicts; they are copied back when a prompt needs them. 0: none.",
        most=2**50, unit="bytes", decoders_only=True,
    )
    prefix_caching: bool | None = setting(
        None, "Reuse the KV blocks of equal prompt prefixes. None: yes, unless the model computes whole texts.",
    )
    partial_reuse: bool = setting(True, "Reuse a part of a KV block, too, by copying it.")
    async_scheduling: bool | None = setting(
        None,
        "Plan and prepare the next step while a step runs. The outputs are the same. None: the executor's default.",
    )
    speculation: SpeculationConfig | None = AUTO
    max_forced_tokens: int = setting(
        8, "Largest number of tokens that one step adds without sampling because a grammar allows no others; "
        "0: none.", most=1024, decoders_only=True,
    )
    generation_config: Literal["model", "ignore"] = setting(
        "model", "Source of the sampling parameters that a request does not give. model: its generation_config.json "
        "or GGUF file, if it suggests a value; ignore: only the defaults.",
        decoders_only=True,
    )
    seed: int | None = setting(
        0, "The seed from which those of requests without a seed are derived; None: a different one in each run.",
        least=-(2**63), most=2**63 - 1,
    )
    answer_log: str | None = setting(
        None, "File to which the prompt and the answers of each finished request are appended, as a line of JSON. "
        "Only its owner can read it.",
        unit="path", value_name="FILE", decoders_only=True,
    )
    answer_log_bytes: int = setting(
        64 << 20, "Largest size of answer_log. A full file is renamed to FILE.1, and replaces an earlier one.",
        least=1, most=2**50, unit="bytes", decoders_only=True,
    )
    check: Check = setting(
        "off", "Check each step before it runs. bounds: its sums and bounds; full: every tensor, and every read and "
        "write of the cache, which is slow.",
    )
    record: str | None = setting(
        None, "Record each step in this file, a trace. It is compressed if its name ends with .gz. With a size, as in "
        "steps.jsonl.gz:100MB, only the last steps are kept, in two files of half that size before compression. A "
        "process that is killed loses the steps of about the last 0.2 s.",
        unit="path", value_name="FILE[:SIZE]", convert=checked_destination,
    )
    record_tensors: int = setting(64, "Also record the tensors of every N-th step; 0: no tensors.", value_name="N")
    record_token_ids: Literal["plain", "hashed", "omitted"] | None = setting(
        None, "Token ids of prompts and outputs in recordings: unchanged, replaced at random, or left out. None: "
        "plain in record, hashed in recordings of failed steps.",
    )
    flight_steps: int = setting(
        256, "Smallest number of recent steps that are kept in memory, and written to a file if a step fails. 0: "
        "none.",
        most=2**20,
    )
    flight_folder: str | None = setting(
        None, "Folder for the files of failed steps; None: the folder of temporary files.", unit="path",
        value_name="FOLDER",
    )
    # fmt: on

    def __post_init__(self) -> None:
        check_settings(self)
        if self.cache_bytes is not None and self.cache_dir is None:
            raise ConfigError(f"cache_bytes={self.cache_bytes}: there is no cache_dir; give one, or leave it out")
        if not self.reuses_prefixes and (self.cache_dir is not None or self.host_cache_bytes):
            name = "host_cache_bytes" if self.cache_dir is None else "cache_dir"
            raise ConfigError(f"{name}={getattr(self, name)!r}: there is no prefix cache; leave prefix_caching on")

    def resolved(self, *, never_drafts: str | None, prefers_async: bool = False) -> EngineConfig:
        """Return the settings with a value for each that the executor decides.

        prefers_async: whether steps are planned ahead. never_drafts: why the method "auto" means no speculation, and
        what to do about it; None: it means "ngram", unless steps are planned ahead. Raise ConfigError for other
        settings of speculation if it means none.
        """
        if self.async_scheduling is None:
            self = replace(self, async_scheduling=prefers_async)
        if self.speculation is None or self.speculation.method != "auto":
            return self
        reason = never_drafts or (f"async_scheduling is on; {SET_METHOD}" if self.async_scheduling else None)
        if reason is None:
            return replace(self, speculation=replace(self.speculation, method="ngram"))
        for name, value in values_of(self.speculation).items():
            if value != getattr(AUTO, name):
                raise ConfigError(f"speculation_{name}={shown(value)}: speculation='auto' is off, because {reason}")
        return replace(self, speculation=None)

    @property
    def reuses_prefixes(self) -> bool:
        """Return whether there is a prefix cache."""
        return self.prefix_caching is not False

    @property
    def num_speculated_tokens(self) -> int:
        """The largest number of tokens of a request in a step that a drafter proposes, see `resolved`."""
        speculation = self.speculation
        return speculation.num_tokens if speculation and speculation.method != "auto" else 0

    @property
    def most_draft_tokens(self) -> int:
        """The largest number of draft tokens of a request in a step; forced ones are verified as drafts."""
        return max(self.max_forced_tokens, self.num_speculated_tokens)


OFF = "off"
"""No speculation, as the option ``speculation``."""


def _speculation_settings() -> Mapping[str, Setting]:
    """Return the options of speculation: ``method`` as "speculation", which may be "off", others with that prefix."""
    own = settings_of(SpeculationConfig)
    named = {name: replace(known, name=f"speculation_{name}") for name, known in own.items()}
    choices = ("auto", OFF, *own["method"].choices[1:])
    method = replace(own["method"], name="speculation", default="auto", choices=choices)
    return {known.name: known for known in (named | {"method": method}).values()}


SPECULATION = _speculation_settings()
GROUPS: Mapping[str, Mapping[str, Setting]] = {
    "Engine": settings_of(EngineConfig),
    "Scheduler": settings_of(SchedulerConfig),
    "Speculation": SPECULATION,
}
"""Every option of an engine apart from those of its executor, by a heading and its name."""
FLAT = {name: known for group in GROUPS.values() for name, known in group.items()}


def engine_config(options: Mapping[str, Any], *, other_names: Iterable[str] = ()) -> EngineConfig:
    """Return the `EngineConfig` of flat options: the names of `FLAT`, ``scheduler`` and ``speculation``.

    speculation: a method, a `SpeculationConfig`, or a mapping of its fields.
    Raise ConfigError for any other name, with advice; other_names: options that the caller takes itself.
    """
    nested = {item.name for item in fields(EngineConfig)} - FLAT.keys()
    for name, value in options.items():
        if name not in FLAT and name not in nested:
            raise unknown_option(name, value, other_names)
    given = {name: value for name, value in options.items() if value is not None or _keeps_none(name)}
    engine = {name: value for name, value in given.items() if name in settings_of(EngineConfig)}
    flat = {name: value for name, value in given.items() if name in settings_of(SchedulerConfig)}
    scheduler = SchedulerConfig() if options.get("scheduler") is None else options["scheduler"]
    if not isinstance(scheduler, SchedulerConfig):
        raise ConfigError(f"scheduler={shown(scheduler)}: expected a SchedulerConfig; give its fields as options")
    speculation = _speculation_of(options.get("speculation"), {n: v for n, v in given.items() if n in SPECULATION})
    return EngineConfig(**engine, scheduler=replace(scheduler, **flat), speculation=speculation)


def unknown_option(name: str, value: object, other_names: Iterable[str] = ()) -> ConfigError:
    """Return the error for an option that does not exist."""
    known = {*FLAT, *other_names}
    fix = advice(name, known, "`foreword serve --help` and docs/settings.md list the options.", of_requests=_PARAMS)
    return ConfigError(f"{setting_text(name, value)}: unknown option. {fix}")


def _keeps_none(name: str) -> bool:
    """Return whether None is a value of the option, rather than its default."""
    return name in FLAT and FLAT[name].optional


def _speculation_of(given: Any, flat: Mapping[str, Any]) -> SpeculationConfig | None:
    own = {
        name.removeprefix("speculation_"): SPECULATION[name].checked(value)
        for name, value in flat.items()
        if name != "speculation"
    }
    if given == OFF:
        for name, value in own.items():
            raise ConfigError(f"speculation_{name}={shown(value)}: speculation is off; leave one of both out")
        return None
    if given is None:
        given = AUTO
    if isinstance(given, SpeculationConfig):
        return replace(given, **own)
    if isinstance(given, str):
        given = {"method": SPECULATION["speculation"].checked(given)}
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"speculation={shown(given)}: expected {SPECULATION['speculation'].expected}, a SpeculationConfig or a "
            "mapping of its fields"
        )
    for name in given:
        if name not in settings_of(SpeculationConfig):
            own_names = settings_of(SpeculationConfig)
            fix = advice(str(name), own_names, f"The options are {', '.join(own_names)}.")
            raise ConfigError(f"speculation[{shown(name)}]: unknown option. {fix}")
    return SpeculationConfig(**{**given, **own})


_PARAMS = frozenset(item.name for item in fields(SamplingParams))
