"""The continuous batching of transformers under a shadow; needs transformers and PyTorch.

with followed(on_finding=raise_finding) as shadows:
    model.generate_batch(prompts, continuous_batching_config=ContinuousBatchingConfig(use_async_batching=False))
print(shadows[0].report())
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs

from foreword.arrays import I64, AnyArray
from foreword.batch import GroupUse, KVGroup, RequestStates
from foreword.errors import ConfigError
from foreword.shadow.following import on_cpu
from foreword.shadow.shadow import Scheduled, Shadow

WARM_UP = "__warmup"  # the beginning of ids of requests that do not exist
TRASH_SECTORS = 2  # at the beginning of the cache, in no block table


@contextmanager
def followed(**settings: Any) -> Iterator[list[Shadow]]:
    """Follow every batch that transformers prepares inside the block, and yield the shadows, one per engine that began.

    settings: the settings of each `Shadow`. Raise ConfigError where batches are prepared before the samples that they
    need (``use_async_batching``). Where its decode path reads a block table, slots are not compared.
    """
    shadows: list[Shadow] = []
    followers: dict[int, _Follower] = {}
    original = ContinuousBatchingIOs.prepare_batch_tensors

    def prepare_batch_tensors(self: Any, requests_in_batch: Sequence[Any], **kwargs: Any) -> None:
        if requests_in_batch[0].state.request_id.startswith(WARM_UP):
            original(self, requests_in_batch, **kwargs)
            return
        follower = followers.get(id(self))
        if follower is None:
            follower = followers[id(self)] = _Follower(self, settings)
            shadows.append(follower.shadow)
        follower.decide(requests_in_batch)
        original(self, requests_in_batch, **kwargs)
        follower.compare(requests_in_batch)

    ContinuousBatchingIOs.prepare_batch_tensors = prepare_batch_tensors
    try:
        yield shadows
    finally:
        ContinuousBatchingIOs.prepare_batch_tensors = original


class _Follower:
    """The state of one engine's requests from step to step."""

    def __init__(self, ios: Any, settings: dict[str, Any]) -> None:
        self.ios, self.last = ios, list[Any]()
        self.groups = list(ios.cache.cache_allocators.values())
        windows = [getattr(group, "sliding_window", None) for group in self.groups]
        most = max(group.num_blocks + TRASH_SECTORS * group.blocks_per_sector for group in self.groups)
        states = RequestStates(
            max_num_reqs=max(4 * ios.max_requests_per_batch, 64),
            max_model_len=ios.config.max_position_embeddings,
            vocab_size=ios.config.vocab_size,
            kv_groups=[KVGroup(group.tokens_per_page) for group in self.groups],
            null_block=-1,
        )
        uses = {g: GroupUse(ring=window) for g, window in enumerate(windows) if window is not None}
        self.shadow = Shadow(
            states, max_num_batched_tokens=ios.cache.max_batch_tokens, num_blocks=most, uses=uses, **settings
        )

    def decide(self, futures: Sequence[Any]) -> None:
        """Bring the states to what transformers decided: samples of the last step, departures, arrivals, blocks."""
        states, live = self.shadow.states, self.groups[0].block_table
        if self.last:
            done = [future.state for future in self.last if future.has_new_token]
            self.shadow.commit({s.request_id: [s.generated_tokens[-1]] for s in done if s.generated_tokens})
        gone = [req_id for req_id in states.req_ids if req_id not in live]
        self.shadow.follow([self._scheduled(future) for future in futures], gone)
        self.last = list(futures)

    def _scheduled(self, future: Any) -> Scheduled:
        states, state = self.shadow.states, future.state
        req_id, prompt, outputs = state.request_id, state.initial_tokens, state.generated_tokens
        seen = req_id in states
        if seen and int(states.num_tokens[states.row_of(req_id)]) != len(prompt) + len(outputs):
            raise ConfigError(f"request {req_id!r}: prepared before its last sample is known; use_async_batching=False")
        tokens = [] if seen else [*prompt, *outputs]
        blocks = [list(group.block_table[req_id]) for group in self.groups]
        return Scheduled(req_id, tokens, len(prompt), state.position_offset, future.query_length, blocks)

    def compare(self, futures: Sequence[Any]) -> None:
        """Compare what transformers prepared."""
        made = self.ios.get_model_kwargs()
        ends = [future.has_new_token for future in futures]
        writes, reads = made["write_index"], made["read_index"]
        logits = np.ma.masked_array(np.zeros(len(ends), np.int64), mask=True)  # a prompt chunk has none
        logits[np.array(ends)] = on_cpu(made["logits_indices"])[: sum(ends)]
        tensors: dict[str, Any] = {
            "input_ids": on_cpu(made["input_ids"][0]),
            "positions": on_cpu(made["position_ids"][0]),
            "query_start_loc": on_cpu(made["cu_seq_lens_q"]),
            "logits_indices": logits,
        }
        if not self.ios.use_block_table:
            tensors["max_query_len"] = int(made["max_length_q"])
            tensors["slot_mapping"] = [self._slots(g, on_cpu(index)) for g, index in enumerate(writes)]
            if any(len(index) for index in reads):  # without context, keys are not read from the cache
                tensors["read_slots"] = [self._slots(g, on_cpu(index)) for g, index in enumerate(reads)]
        self.shadow.step([future.state.request_id for future in futures], tensors)

    def _slots(self, g: int, index: AnyArray) -> I64:
        """Return physical indices as block · page + offset; −1 in the sectors that hold no token."""
        group = self.groups[g]
        block, offset = np.divmod(index.astype(np.int64), group.block_physical_stride)
        slots: I64 = block * group.tokens_per_page + offset
        slots[block < TRASH_SECTORS * group.blocks_per_sector] = -1
        return slots
