"""The LoRA adapters of an engine, by name: loaded, replaced and dropped while requests run."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import cast

from foreword.batch import LoraRequest
from foreword.errors import ConfigError, ModelError, RequestError, UnknownAdapterError, shown
from foreword.executors import Capability, Executor, LoraExecutor
from foreword.models.lora import FileStates, LoraAdapter, file_states, with_content
from foreword.names import nearest

ReadLora = Callable[[str | Path], LoraAdapter]


@dataclass(slots=True, eq=False)
class Lora:
    """One version of an adapter: what was at ``path`` when it was loaded.

    lora_id: its number, which no other version ever has, so that its cached prefixes are its own. files: their states
    then; content: see `LoraAdapter`. num_bytes: of the executor's memory; 0 while it is not there.
    """

    lora_id: int
    name: str
    path: Path
    files: FileStates
    content: bytes
    num_bytes: int = 0


class Loras:
    """A name stands for one version. A version that was replaced or dropped is kept while requests use it.

    The executor holds the versions that requests use, and as many others as fit into ``budget`` bytes: the least
    recently used leave its memory, and are read again from their files when a request needs them.

    `load`, `drop`, `enter` and `collect` are parts of the engine's transactions. An interrupt may come between any two
    lines of them: a version that may be in the executor's memory is in ``_versions`` before and after, with 0 bytes
    while that is not certain, and `restore` does the rest.
    """

    def __init__(
        self,
        executor: Executor,
        read: ReadLora | None,
        budget: int,
        in_use: Callable[[], Set[int]],
        *,
        reads_content: bool = False,
    ) -> None:
        """Manage the adapters of an executor.

        read: reads an adapter for the model; None if the model cannot have any. in_use: the numbers that requests have
        now. reads_content: whether blocks that are computed with an adapter are kept by what its files contain.
        """
        self._executor, self._read, self._budget, self._in_use = executor, read, budget, in_use
        self._reads_content = reads_content
        self._current: dict[str, Lora] = {}
        self._versions: OrderedDict[int, Lora] = OrderedDict()  # by number, the least recently used first
        self._num_loaded = 0
        self.num_bytes = 0  # bytes of the executor's memory

    @property
    def paths(self) -> dict[str, Path]:
        """The path of each name."""
        return {name: lora.path for name, lora in self._current.copy().items()}  # copy: other threads ask, too

    def request_of(self, lora_id: int) -> LoraRequest | None:
        """Return name and path of a version; None for a number that is not a version, such as 0."""
        lora = self._versions.get(lora_id)
        return None if lora is None else LoraRequest(lora_id, lora.name, str(lora.path))

    def content_of(self, lora_id: int) -> bytes:
        """Return what only versions from files of equal bytes have."""
        return self._versions[lora_id].content

    def read(self, path: str | Path) -> LoraAdapter:
        """Return an adapter for `load`, in any thread. Raise ModelError for an unusable one, ConfigError if none can
        run.
        """
        if self._read is None or Capability.LORA not in self._executor.capabilities:
            raise ConfigError(f"{type(self._executor).__name__} runs no LoRA adapters for this model; use another one")
        if not isinstance(path, str | PathLike):
            raise ConfigError(f"the path of an adapter is {shown(path)}: give a directory or a .gguf file")
        adapter = self._read(path)
        return with_content(adapter) if self._reads_content else adapter

    def load(self, name: str, adapter: LoraAdapter) -> None:
        """Give a name to an adapter. Requests that use an earlier one of this name end with it.

        Raise MemoryError if it does not fit; then nothing has changed.
        """
        self._num_loaded += 1
        lora = Lora(self._num_loaded, name, adapter.path, adapter.files, adapter.content)
        self._versions[lora.lora_id] = lora
        self._hold(lora, adapter)
        self._current[name] = lora
        self.collect()

    def drop(self, name: str) -> None:
        """Forget a name. Requests that use its adapter end with it."""
        del self._current[name]
        self.collect()

    @staticmethod
    def check_name(name: object) -> None:
        """Raise ConfigError for a name that is empty or no text."""
        if not isinstance(name, str) or not name:
            raise ConfigError(f"the name of an adapter is {name!r:.80}: give a text")

    def check_known(self, name: object) -> None:
        """Raise ConfigError unless there is an adapter of this name."""
        self.check_name(name)
        if name not in self._current:
            raise ConfigError(f"there is no adapter {name!r:.80}{self._hint(name)}")

    def check(self, request_id: str, name: object) -> None:
        """Raise UnknownAdapterError unless the name is known."""
        if not isinstance(name, str) or name not in self._current:
            fix = f"Load it first{self._hint(name) or '.'}"
            raise UnknownAdapterError(request_id, "lora", name, "is not the name of an adapter", fix)

    def read_again(self, request_id: str, name: str | None) -> LoraAdapter | None:
        """Return what a new request's adapter needs to `enter`: None if the executor holds it, and for None. Changes
        nothing.

        Raise RequestError if the name is not known (any more), or its files are not as they were.
        """
        if name is None:
            return None
        self.check(request_id, name)
        lora = self._current[name]
        if lora.num_bytes:
            return None
        try:
            if file_states(lora.path) != lora.files:
                raise ModelError(f"{lora.path}: was changed since it was loaded")
            return self.read(lora.path)
        except ModelError as error:
            raise RequestError(request_id, "lora", name, str(error), "Load it again.") from None

    def enter(self, name: str | None, adapter: LoraAdapter | None) -> int:
        """Return the number of the adapter for a new request, 0 for None. The executor holds it then.

        adapter: what `read_again` returned. Raise MemoryError if it does not fit.
        """
        if name is None:
            return 0
        lora = self._current[name]
        if adapter is not None:
            self._hold(lora, adapter)
        self._versions.move_to_end(lora.lora_id)
        if self.num_bytes > self._budget:
            self._evict({*self._in_use(), lora.lora_id})
        return lora.lora_id

    def collect(self) -> None:
        """Free versions without a name that no request uses, and what exceeds the budget."""
        if len(self._versions) > len(self._current):
            self._free_unused()
        if self.num_bytes > self._budget:
            self._evict(self._in_use())

    def restore(self) -> None:
        """Restore the executor after an interrupt anywhere in a change: it holds the versions that have bytes, and no
        others.

        Names are as before the change or as after it. Nothing leaves memory for the budget.
        """
        for lora in self._versions.values():
            if not lora.num_bytes:
                self._free(lora)
        self._free_unused()
        self.num_bytes = sum(lora.num_bytes for lora in self._versions.values())

    def _free_unused(self) -> None:
        named = {lora.lora_id for lora in self._current.values()}
        for lora_id in self._versions.keys() - self._in_use() - named:
            self._free(self._versions[lora_id])
            del self._versions[lora_id]

    def _evict(self, needed: Set[int]) -> None:
        """Free the least recently used versions while the budget is exceeded, except those that are needed."""
        for lora in self._versions.values():
            if self.num_bytes <= self._budget:
                break
            if lora.lora_id not in needed:
                self._free(lora)

    def _hold(self, lora: Lora, adapter: LoraAdapter) -> None:
        lora.num_bytes = cast(LoraExecutor, self._executor).load_lora(lora.lora_id, adapter)
        self.num_bytes += lora.num_bytes

    def _free(self, lora: Lora) -> None:
        num_bytes, lora.num_bytes = lora.num_bytes, 0
        self.num_bytes -= num_bytes
        cast(LoraExecutor, self._executor).drop_lora(lora.lora_id)

    def _hint(self, name: object) -> str:
        close = nearest(str(name), self._current)
        return "" if close is None else f"; did you mean {close!r}?"


def named_paths(given: Iterable[str]) -> dict[str, str]:
    """Name → path of adapters that are given as NAME=PATH.

    Raise ConfigError for any other text, or a name given twice.
    """
    found: dict[str, str] = {}
    for text in given:
        name, _, path = text.partition("=")
        if not name or not path:
            raise ConfigError(
                f"adapter {text!r:.80}: is not NAME=PATH; give a name and the path of a directory or file"
            )
        if name in found:
            raise ConfigError(f"adapter {text!r:.80}: the name is given twice")
        found[name] = path
    return found
