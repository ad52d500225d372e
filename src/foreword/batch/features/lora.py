"""LoRA adapters: who uses which, and the adapter of every request, token and logit row of a step. 0 is no adapter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from foreword.arrays import I32

if TYPE_CHECKING:
    from foreword.batch.prepare.inputs import InputBatch
    from foreword.batch.state.request_states import RequestStates


class LoraUsers:
    """The live requests of each adapter. An adapter is in use from its first user's admission to its last one's end."""

    __slots__ = ("_users",)

    def __init__(self) -> None:
        self._users: dict[int, dict[str, None]] = {}

    def __len__(self) -> int:
        return len(self._users)

    @property
    def in_use(self) -> tuple[int, ...]:
        """Adapters with at least one live request, in order of first use."""
        return tuple(self._users)

    def users(self, lora_id: int) -> tuple[str, ...]:
        """The adapter's live requests, in order of admission."""
        return tuple(self._users.get(lora_id, ()))

    def add(self, lora_id: int, req_id: str) -> None:
        """Note a user; adapter 0 is none."""
        if lora_id:
            self._users.setdefault(lora_id, {})[req_id] = None

    def drop(self, lora_id: int, req_id: str) -> None:
        """Forget a user, and the adapter with its last one."""
        users = self._users.get(lora_id)
        if users is not None:
            users.pop(req_id, None)
            if not users:
                del self._users[lora_id]


@dataclass(frozen=True, slots=True, eq=False)
class LoraMapping:
    """Adapters of one step. requests: int32 [B]; tokens: int32 [Tp], 0 on padding; logits: int32 [L];
    active: the adapters this step runs, ascending, without 0.
    """

    requests: I32
    tokens: I32
    logits: I32
    active: tuple[int, ...]


def lora_mapping(states: RequestStates, batch: InputBatch) -> LoraMapping:
    """The adapter of each request, of each of its tokens, and of each of its logit rows."""
    requests = states.lora_id[batch.idx_mapping]
    tokens = np.zeros(batch.num_tokens_padded, np.int32)
    tokens[: batch.num_tokens] = requests[batch.req_indices]
    active = tuple(int(i) for i in np.unique(requests) if i)
    return LoraMapping(requests, tokens, states.lora_id[batch.expanded_idx_mapping], active)
