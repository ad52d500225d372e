"""`SlotEngine` in the shape of mini-sglang: a scheduler that prepares a `Batch`, and its engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from slot_engine import Entry, SlotEngine


class MiniEngine(SlotEngine):
    """An engine like mini-sglang. backend: "fa" makes a table of pages, "fi" lists the slots of every key."""

    def __init__(self, seed: int = 0, *, backend: str = "fa", **settings: Any) -> None:
        super().__init__(seed, first=0, **settings)
        self.backend = backend
        self.prefill_budget = self.budget
        self.prefill_manager = SimpleNamespace(pending_list=[])
        self.decode_manager = SimpleNamespace(running_reqs=set())
        self.engine = SimpleNamespace(
            page_table=self.table, num_pages=self.pages, ctx=SimpleNamespace(page_size=self.page),
            forward_batch=lambda batch, args: None,
        )  # fmt: skip
        self._process_last_data = lambda last_data: None
        self.launched: dict[int, Any] = {}

    def show(self, batch: list[Entry]) -> None:
        reqs = [
            SimpleNamespace(
                uid=int(e.request.rid[1:]), table_idx=e.request.row, cached_len=e.computed, device_len=e.length,
                input_ids=np.array(e.request.tokens[: e.length] if e.is_chunk else e.request.tokens),
            )
            for e in batch
        ]  # fmt: skip
        chunks = {id(e.request): req for e, req in zip(batch, reqs, strict=True) if e.is_chunk}
        self.prefill_manager.pending_list = [
            SimpleNamespace(
                uid=int(r.rid[1:]), input_ids=np.array(r.tokens), chunked_req=chunks.get(id(r))
            )
            for r in self.waiting
        ]  # fmt: skip
        self.decode_manager.running_reqs = {Running(int(r.rid[1:])) for r in self.running}
        ids, positions, slots = self.tokens_of(batch)
        made = SimpleNamespace(reqs=reqs, attn_metadata=self.metadata(reqs))
        made.input_ids, made.positions, made.out_loc = (np.append(x, 0) for x in (ids, positions, slots))  # a dummy
        self.change(made)
        self.launched[id(batch)] = made
        self.engine.forward_batch(made, None)

    def metadata(self, reqs: list[Any]) -> Any:
        dummy = SimpleNamespace(table_idx=0, cached_len=0, device_len=1)
        reqs = [*reqs, dummy]
        lengths = [req.device_len for req in reqs]
        ends = np.cumsum([0, *(req.device_len - req.cached_len for req in reqs)])
        if self.backend == "fi":
            slots = np.concatenate([self.table[req.table_idx, : req.device_len] for req in reqs])
            return SimpleNamespace(cu_seqlens_q_cpu=ends, seq_lens_cpu=np.array(lengths), indices=slots)
        pages = np.stack([self.table[req.table_idx, : max(lengths) : self.page] for req in reqs]) // self.page
        return SimpleNamespace(cu_seqlens_q=ends, cache_seqlens=np.array(lengths), page_table=pages)

    def change(self, batch: Any) -> None:
        """Where a fault is planted."""

    def finish(self, batch: list[Entry], sampled: list[int]) -> None:
        super().finish(batch, sampled)
        made = self.launched.pop(id(batch))
        self._process_last_data((SimpleNamespace(batch=made), SimpleNamespace(next_tokens_cpu=np.array(sampled))))


class Running(SimpleNamespace):
    """The data of a set of running requests."""

    def __init__(self, uid: int) -> None:
        super().__init__(uid=uid)

    def __hash__(self) -> int:
        return hash(self.uid)
