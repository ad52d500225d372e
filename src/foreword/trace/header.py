"""The first line of a trace: the engine, and how its token ids are written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, get_args

from foreword.batch import ContextParallel, KVGroup, RequestStates
from foreword.errors import PlanError, shown
from foreword.integers import INT32_MAX, is_int32

FORMAT = 2
READABLE = (1, 2)
MAX_GROUPS = 256
GROUP_KEYS = ("block_size", "sliding_window", "context_parallel", "recurrent")

TokenIds = Literal["plain", "hashed", "omitted"]
"""The form in which token ids are written: as they are; each replaced by another one with a random permutation of the
vocabulary, which is not kept; or only their number.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceHeader:
    """The facts about an engine that a replay needs.

    engine: its name and version. token_ids: see `TokenIds`. first_step: the number that the engine gave the first step
    of the trace. started: the time of the first line, seconds since 1970. settings: the settings of the engine's
    scheduler and cache by name; a simulation of the recorded load starts with them. The other fields are as in
    `RequestStates`.
    """

    max_num_reqs: int
    max_num_batched_tokens: int
    max_model_len: int
    vocab_size: int
    kv_groups: tuple[KVGroup, ...]
    max_num_draft_tokens: int = 0
    context_parallel: ContextParallel | None = None
    null_block: int = 0
    engine: str = ""
    token_ids: TokenIds = "plain"
    first_step: int = 1
    started: float | None = None
    settings: Mapping[str, float | str | bool] = field(default_factory=dict)
    version: int = field(default=FORMAT, compare=False)

    @classmethod
    def of_states(cls, states: RequestStates, max_num_batched_tokens: int, **others: Any) -> TraceHeader:
        """Return the header of an engine that keeps its requests in these states."""
        return cls(
            max_num_reqs=states.max_num_reqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=states.max_model_len,
            vocab_size=states.vocab_size,
            kv_groups=tuple(table.group for table in states.block_tables),
            max_num_draft_tokens=states.max_num_draft_tokens,
            context_parallel=states.context_parallel,
            null_block=states.null_block,
            **others,
        )

    def as_json(self) -> dict[str, Any]:
        """Return the first line."""
        cp = self.context_parallel
        line: dict[str, Any] = {"foreword_trace": FORMAT}
        line |= {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("version", *_OPTIONAL)}
        line["kv_groups"] = [{name: getattr(group, name) for name in GROUP_KEYS} for group in self.kv_groups]
        line["context_parallel"] = None if cp is None else asdict(cp)
        defaults = {f.name: f.default for f in fields(self)} | {"settings": {}}
        return line | {n: value for n in _OPTIONAL if (value := getattr(self, n)) != defaults[n]}

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> TraceHeader:
        """Return the header of a first line. Raise PlanError for another version, and for what breaks the format."""
        version = line.get("foreword_trace")
        if version is None:
            raise PlanError(f'the first line must hold "foreword_trace": {FORMAT}')
        if version not in READABLE or type(version) is not int:
            raise PlanError(
                f'the first line must hold "foreword_trace" with a version that this library reads, '
                f"{' or '.join(map(str, READABLE))}; it is {shown(version)}. Use a library of that version"
            )
        values = {name: value for name, value in line.items() if name != "foreword_trace"}
        if version == 1:
            values = {name: value for name, value in values.items() if name in _NAMES - set(_OPTIONAL)}
        elif unknown := values.keys() - _NAMES:
            raise PlanError(f"unknown key {min(unknown)!r}; the keys are {', '.join(sorted(_NAMES))}")
        drafts = values.setdefault("max_num_draft_tokens", 0)
        sizes = {name: values[name] for name in ("max_num_reqs", "max_num_batched_tokens", "max_model_len")}
        for name, size in (*sizes.items(), ("max_num_draft_tokens", drafts)):
            if not is_int32(size, 0):
                raise PlanError(f"{name}={shown(size)}: must be in [0, {INT32_MAX}]")
        groups = values["kv_groups"]
        if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
            raise PlanError(f"kv_groups={shown(groups)}: expected a list with an object per KV group")
        if len(groups) > MAX_GROUPS:
            raise PlanError(f"kv_groups: {len(groups)} groups, above the limit of {MAX_GROUPS}")
        cp = values.get("context_parallel")
        values["kv_groups"] = tuple(KVGroup(**group) for group in groups)
        values["context_parallel"] = None if cp is None else ContextParallel(**cp)
        kinds = {"engine": str, "token_ids": str, "first_step": int, "started": int | float, "settings": dict}
        for name, kind in kinds.items():
            if (value := values.get(name)) is not None and (not isinstance(value, kind) or isinstance(value, bool)):
                raise PlanError(f"{name}={shown(value)}: has another type than the format says")
        if values.get("token_ids", "plain") not in get_args(TokenIds):
            raise PlanError(f"token_ids={shown(values['token_ids'])}: must be one of {', '.join(get_args(TokenIds))}")
        for name, value in values.get("settings", {}).items():
            if not isinstance(value, str | int | float):
                raise PlanError(f"settings: {name!r:.80}={shown(value)}: expected a number, a text, true or false")
        return cls(**values, version=version)

    def beginning_at(self, step: int) -> TraceHeader:
        """Return the header of a trace whose first step has this number."""
        return replace(self, first_step=step)

    def new_states(self, max_num_reqs: int) -> RequestStates:
        """Return empty states like those of the engine, with this many rows."""
        return RequestStates(
            max_num_reqs=max_num_reqs,
            max_model_len=self.max_model_len,
            vocab_size=self.vocab_size,
            kv_groups=self.kv_groups,
            max_num_draft_tokens=self.max_num_draft_tokens,
            context_parallel=self.context_parallel,
            null_block=self.null_block,
        )


_OPTIONAL = ("engine", "token_ids", "first_step", "started", "settings")
_NAMES = {f.name for f in fields(TraceHeader)} - {"version"}
