"""Conversations of an engine that are saved to files and restored, by the number of the place that computed them.

A slot is a row of the engine: it has the tokens of the request that ran there last, or a conversation that was restored
to it. What was restored is a tier of blocks (`foreword.cache.tiers`): the next request that begins with its tokens
starts from them, in whichever row it runs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, Literal

import numpy as np

from foreword.arrays import I32, U8, Bools
from foreword.batch import InputBatch
from foreword.cache.keys import adapter_of
from foreword.cache.manager import NO_KEYS
from foreword.cache.prefix import NO_EXTRA, BlockKeys
from foreword.cache.segment import DamagedError, read_blocks, read_segment, write_segment
from foreword.cache.tiers import BlockFormat
from foreword.engine.engine import Engine
from foreword.engine.observer import EngineObserver
from foreword.errors import ConfigError, reason_of
from foreword.scheduler import Request, StepPlan


@dataclass(frozen=True, slots=True, eq=False)
class Conversation:
    """The tokens of a slot with their extra keys, and the blocks of the first ``num_reusable`` of them: their bytes are
    the rows of ``data``.
    """

    tokens: I32
    keys: BlockKeys
    num_reusable: int
    places: Mapping[bytes, int]
    data: U8


class Slots(EngineObserver):
    """The slots of one engine, which is given them as an observer, and `tier` among its tiers. `attach` comes next.

    Its methods are called in the engine's thread, but those of a tier.
    """

    name = "slots"
    takes: Literal["computed", "evicted"] = "evicted"  # and wants none

    def __init__(self) -> None:
        self._last: dict[int, Request] = {}
        self._restored: dict[int, Conversation] = {}
        self._lock = Lock()

    def tier(self, blocks: BlockFormat) -> Slots:
        """Be a `BlockTier` for the blocks of an engine."""
        self._blocks = blocks
        return self

    def attach(self, engine: Engine) -> None:
        """Serve the engine that was made with it."""
        self._engine = engine

    def __len__(self) -> int:
        return self._engine.config.scheduler.max_num_seqs

    # -- slots -------------------------------------------------------------------------------------------------------

    def is_running(self, slot: int) -> bool:
        """Return whether a request runs in the slot."""
        return bool(self._engine.states.live[slot])

    def num_tokens(self, slot: int) -> int:
        """Return the tokens of the slot's conversation; 0 without one."""
        return len(self._conversation(slot)[0])

    def content(self, slot: int) -> Conversation:
        """Return the conversation of a slot. Raise ConfigError if there is none, or if it has an adapter."""
        tokens, keys = self._conversation(slot)
        if not len(tokens):
            raise ConfigError(f"slot {slot}: has no conversation; let a request run there first")
        if adapter_of(keys.get(0, NO_EXTRA)) is not None:
            raise ConfigError(f"slot {slot}: its conversation has a LoRA adapter, which is not saved; use cache_dir")
        assert self._engine.tiers is not None
        num_reusable, names, data = self._engine.tiers.content_of(tokens, keys)
        return Conversation(tokens, keys, num_reusable, {name: i for i, name in enumerate(names)}, data)

    def put(self, slot: int, conversation: Conversation) -> None:
        """Give a slot a conversation, in place of an earlier one."""
        with self._lock:
            self._restored[slot] = conversation
        self._last.pop(slot, None)

    def write(self, conversation: Conversation, path: Path) -> int:
        """Write a conversation to a file, in place of an earlier one, and return its size. Raise ConfigError if that
        fails. It may be called in any thread.
        """
        keys = {str(block): parts for block, parts in conversation.keys.items()}
        note = {"tokens": conversation.tokens.tolist(), "keys": keys, "num_reusable": conversation.num_reusable}
        try:
            write_segment(path, self._blocks, list(conversation.places), conversation.data, json.dumps(note).encode())
            return path.stat().st_size
        except OSError as error:
            raise ConfigError(f"{path.name}: cannot be written ({reason_of(error)})") from None

    def read_file(self, path: Path) -> Conversation:
        """Read a conversation. Raise ConfigError for a file that cannot be read, is damaged, or is of another model.

        It may be called in any thread.
        """
        try:
            segment = read_segment(path, self._blocks)
            data = np.empty((len(segment.names), self._blocks.block_bytes), np.uint8)
            everything = range(len(data))
            read_blocks(segment, everything, self._blocks, data, everything)
            note = json.loads(segment.note)
            keys = {int(block): _hashable(parts) for block, parts in note["keys"].items()}
            tokens = np.array(note["tokens"], np.int32).reshape(-1)
            return Conversation(
                tokens, keys, int(note["num_reusable"]), {name: i for i, name in enumerate(segment.names)}, data
            )
        except DamagedError as error:
            raise ConfigError(str(error).replace(str(path), path.name)) from None
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
            raise ConfigError(f"{path.name}: is not a file of a slot") from None
        except OSError as error:
            raise ConfigError(f"{path.name}: cannot be read ({reason_of(error)})") from None

    def erase(self, slot: int) -> int:
        """Forget the conversation of a slot, whose blocks may stay in the prefix cache. Returns its tokens."""
        count = self.num_tokens(slot)
        self._last.pop(slot, None)
        with self._lock:
            self._restored.pop(slot, None)
        return count

    def _conversation(self, slot: int) -> tuple[I32, BlockKeys]:
        """Return tokens and extra keys of the conversation of a slot."""
        states = self._engine.states
        if (request := self._last.get(slot)) is not None:
            if request.row == slot:
                return states.token_ids[slot, : int(states.num_computed_tokens[slot])].copy(), request.keys
            return request.tokens(), request.keys
        restored = self._restored.get(slot)
        return (np.zeros(0, np.int32), NO_KEYS) if restored is None else (restored.tokens, restored.keys)

    # -- an observer -------------------------------------------------------------------------------------------------

    def step_planned(self, plan: StepPlan, batch: InputBatch) -> None:
        for request in plan.admitted:
            self._last[request.row] = request
            if self._restored:
                self._forget_those_in(request)

    def _forget_those_in(self, request: Request) -> None:
        """Forget the restored conversation of the request's slot, and those that it goes on with: they are in the pool
        now.
        """
        states, row = self._engine.states, request.row
        for slot, restored in list(self._restored.items()):
            length = len(restored.tokens)
            goes_on = request.keys == restored.keys and int(states.num_tokens[row]) >= length
            if slot == row or (goes_on and np.array_equal(states.token_ids[row, :length], restored.tokens)):
                with self._lock:
                    self._restored.pop(slot, None)

    # -- a tier ------------------------------------------------------------------------------------------------------

    def find(self, names: Sequence[bytes]) -> Bools:
        with self._lock:
            restored = list(self._restored.values())
        return np.fromiter((any(name in one.places for one in restored) for name in names), np.bool_, len(names))

    def read(self, names: Sequence[bytes], data: U8) -> Bools:
        with self._lock:
            restored = list(self._restored.values())
        done = np.zeros(len(names), np.bool_)
        for i, name in enumerate(names):
            for one in restored:
                if (place := one.places.get(name)) is not None:
                    data[i], done[i] = one.data[place], True
                    break
        return done

    def wants(self, names: Sequence[bytes]) -> Bools:
        return np.zeros(len(names), np.bool_)

    def offer(self, names: Sequence[bytes], data: U8) -> None:
        """Do nothing, because only restored blocks are kept."""

    def flush(self) -> None:
        """Do nothing, because blocks are not written later."""

    def close(self) -> None:
        with self._lock:
            self._restored.clear()


def _hashable(parts: list[Any]) -> tuple[Any, ...]:
    return tuple(_hashable(part) if isinstance(part, list) else part for part in parts)
