"""Host callables of an engine that raise at one of their calls: executor, drafter, observers, tokenizer and others."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hash_model import HalfRight, HashExecutor
from scenes import GROUPS, LetterTokenizer, Scene, V

from foreword.engine import Engine, EngineObserver
from foreword.sampling import Sampler
from foreword.sampling.rows import RowValues


@dataclass
class Fault:
    """Raises ``error`` at call number ``at`` of the ``target``, and with ``persists`` at each later one of its owner.

    owner: the request that the struck callable belongs to; None: it belongs to the engine.
    """

    target: str
    error: BaseException | None = None
    at: int = 0
    persists: bool = False
    num_calls: int = 0
    owner: str | None = None
    struck: bool = False

    def strike(self, target: str, owner: str | None = None) -> None:
        if target != self.target:
            return
        self.num_calls += 1
        again = self.persists and self.struck and owner == self.owner
        if self.error is not None and (self.num_calls == self.at or again):
            self.struck, self.owner = True, owner
            raise self.error


class FaultySampler(Sampler):
    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.fault = fault

    def sample(self, *arguments: Any) -> Any:
        self.fault.strike("sampler.sample")
        return super().sample(*arguments)


class FaultyExecutor(HashExecutor):
    def __init__(self, fault: Fault, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.fault = fault
        self.sampler = FaultySampler(fault)

    def pad_for(self, num_tokens: int, num_reqs: int) -> None:
        self.fault.strike("executor.pad_for")

    def launch(self, batch: Any, sampling: Any) -> Any:
        self.fault.strike("executor.launch")
        step = super().launch(batch, sampling)
        self.fault.strike("executor.launch, after the copies")
        return step

    def compute(self, batch: Any, logits_indices: Any) -> Any:
        self.fault.strike("executor.compute")
        logits = super().compute(batch, logits_indices)
        self.fault.strike("executor.compute, after the writes")
        return logits

    def copy_blocks(self, sources: Any, destinations: Any) -> None:
        self.fault.strike("executor.copy_blocks")
        super().copy_blocks(sources, destinations)


class FaultyDrafter(HalfRight):
    fault: Fault

    def propose(self, rows: Any, most: Any) -> Any:
        self.fault.strike("drafter.propose")
        return super().propose(rows, most)


class FaultyProcessor:
    """Applies to every request, and changes nothing."""

    extra_args: frozenset[str] = frozenset()

    def __init__(self, states: Any, fault: Fault) -> None:
        self.rows: RowValues[bool] = RowValues(states.max_num_reqs)
        self.fault = fault

    def update(self, change: Any) -> None:
        self.fault.strike("processor.update")
        self.rows.update(change, lambda added: True)

    def apply(self, logits: Any, at: Any) -> None:
        self.fault.strike("processor.apply")
        for row in at.rows.tolist():
            assert self.rows[row]


def faulty_observer(fault: Fault) -> EngineObserver:
    def method(name: str) -> Callable[..., None]:
        return lambda self, *arguments: fault.strike(f"observer.{name}")

    return type("FaultyObserver", (EngineObserver,), {name: method(name) for name in OBSERVED})()


OBSERVED = ("request_added", "request_ended", "step_planned", "step_ran", "step_committed", "cache_event")


class FaultyTokenizer(LetterTokenizer):
    """adding: the request that is being added, which owns the detokenizers made meanwhile."""

    def __init__(self, fault: Fault) -> None:
        self.fault, self.adding = fault, ""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.fault.strike("tokenizer.encode", self.adding)
        return super().encode(text, add_special_tokens)

    def detokenizer(self, skip_special_tokens: bool = True, **options: Any) -> Any:
        self.fault.strike("tokenizer.detokenizer", self.adding)
        return FaultyDetokenizer(self.fault, self.adding, super().detokenizer(skip_special_tokens, **options))


@dataclass
class FaultyDetokenizer:
    fault: Fault
    owner: str
    real: Any

    def push(self, token_ids: Sequence[int]) -> str:
        self.fault.strike("detokenizer.push", self.owner)
        return self.real.push(token_ids)

    def finish(self) -> str:
        self.fault.strike("detokenizer.finish", self.owner)
        return self.real.finish()


@dataclass
class FaultyGrammar:
    """Allows every token."""

    fault: Fault
    owner: str
    tokens: list[int] = field(default_factory=list)

    @property
    def is_terminated(self) -> bool:
        self.fault.strike("grammar.is_terminated", self.owner)
        return False

    def fill_mask(self, words: np.ndarray) -> None:
        self.fault.strike("grammar.fill_mask", self.owner)
        words[:] = -1

    def accept(self, token_ids: Sequence[int]) -> int:
        self.fault.strike("grammar.accept", self.owner)
        self.tokens += token_ids
        return len(token_ids)

    def roll_back(self, num_tokens: int) -> None:
        self.fault.strike("grammar.roll_back", self.owner)
        del self.tokens[len(self.tokens) - num_tokens :]

    def reset(self) -> None:
        self.fault.strike("grammar.reset", self.owner)
        self.tokens.clear()

    def copy(self) -> FaultyGrammar:
        self.fault.strike("grammar.copy", self.owner)
        return FaultyGrammar(self.fault, self.owner)

    def forced_tokens(self, limit: int) -> list[int]:
        self.fault.strike("grammar.forced_tokens", self.owner)
        return []


OF_ENGINE = (
    "executor.pad_for",
    "executor.launch",
    "executor.launch, after the copies",
    "executor.compute",
    "executor.compute, after the writes",
    "executor.copy_blocks",
    "sampler.sample",
    "drafter.propose",
    "processor.update",
    "processor.apply",
    "clock",
    *(f"observer.{name}" for name in OBSERVED),
)
OF_REQUEST = (
    "tokenizer.encode",
    "tokenizer.detokenizer",
    "detokenizer.push",
    "detokenizer.finish",
    "grammar.fill_mask",
    "grammar.accept",
    "grammar.is_terminated",
    "grammar.roll_back",
    "grammar.reset",
    "grammar.copy",
    "grammar.forced_tokens",
)
TARGETS = (*OF_ENGINE, *OF_REQUEST)


def faulty_engine(scene: Scene, fault: Fault) -> tuple[Engine, FaultyTokenizer]:
    """An engine of which every callable strikes."""

    def clock() -> float:
        fault.strike("clock")
        return time.perf_counter()

    tokenizer = FaultyTokenizer(fault)
    parts: dict[str, Any] = {}
    if scene.drafts == "drafter":
        parts["drafter"] = lambda states: drafter(states, fault)
    engine = scene.engine(
        executor=FaultyExecutor(fault, V, GROUPS[scene.kind], scene.num_blocks, scene.num_states),
        tokenizer=tokenizer,
        clock=clock,
        logits_processors=[lambda states: FaultyProcessor(states, fault)],
        observers=[faulty_observer(fault)],
        **parts,
    )
    return engine, tokenizer


def drafter(states: Any, fault: Fault) -> FaultyDrafter:
    made = FaultyDrafter(states)
    made.fault = fault
    return made
