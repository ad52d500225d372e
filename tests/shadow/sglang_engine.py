"""`SlotEngine` in the shape of SGLang: a `ScheduleBatch`, the `ForwardBatch` made of it, and what calls the hooks."""

from __future__ import annotations

from enum import Enum, auto
from types import SimpleNamespace
from typing import Any

import numpy as np
from slot_engine import Entry, Request, SlotEngine


class ForwardMode(Enum):
    EXTEND = auto()
    DECODE = auto()
    MIXED = auto()
    SPLIT_PREFILL = auto()
    TARGET_VERIFY = auto()

    def is_decode(self) -> bool:
        return self == ForwardMode.DECODE

    def is_split_prefill(self) -> bool:
        return self == ForwardMode.SPLIT_PREFILL

    def is_extend_without_speculative(self) -> bool:
        return self in (ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.SPLIT_PREFILL)


class Req:
    """A request as SGLang has it."""

    def __init__(self, request: Request) -> None:
        self.request, self.rid, self.lora_id = request, request.rid, request.adapter
        self.kv = SimpleNamespace(req_pool_idx=request.row)

    @property
    def origin_input_ids(self) -> list[int]:
        return self.request.prompt

    @property
    def output_ids(self) -> list[int]:
        return self.request.outputs

    @property
    def is_retracted(self) -> bool:
        return self.request.is_retracted

    def finished(self) -> bool:
        return self.request.over


class SGLangEngine(SlotEngine):
    """An engine like SGLang. hooks: what is called around `init_new` and `process_batch_result`, as in SGLang."""

    def __init__(self, hooks: Any, seed: int = 0, **settings: Any) -> None:
        super().__init__(seed, **settings)
        self.hooks = hooks
        self.reqs: dict[str, Req] = {}
        self.model_runner = SimpleNamespace(
            req_to_token_pool=SimpleNamespace(req_to_token=self.table), is_draft_worker=False,
            max_total_num_tokens=self.pages * self.page, page_size=self.page,
            server_args=SimpleNamespace(
                chunked_prefill_size=self.budget, max_prefill_tokens=64, enable_hierarchical_cache=False,
                disaggregation_mode="null",
            ),
        )  # fmt: skip
        self.spec_algorithm = SimpleNamespace(is_none=lambda: True)
        self.split = False
        self.launched: dict[int, Any] = {}

    def adapter(self) -> str | None:
        return str(self.rng.choice(["law", "code"])) if self.rng.random() < 0.3 else None

    def release(self, request: Request) -> None:
        super().release(request)
        if request.rid in self.reqs:
            self.reqs[request.rid].kv.req_pool_idx = None

    def show(self, batch: list[Entry]) -> None:
        for entry in batch:
            self.reqs.setdefault(entry.request.rid, Req(entry.request)).kv.req_pool_idx = entry.request.row
        is_decode = all(e.request.goal <= e.computed for e in batch)
        mode = ForwardMode.DECODE if is_decode else ForwardMode.MIXED if self.mixed else ForwardMode.EXTEND
        made = SimpleNamespace(
            reqs=[self.reqs[e.request.rid] for e in batch], entries=batch,
            forward_mode=ForwardMode.SPLIT_PREFILL if self.split else mode,
            prefix_lens=[e.computed for e in batch], seq_lens_cpu=np.array([e.length for e in batch]),
            spec_algorithm=self.spec_algorithm, dllm_config=None,
        )  # fmt: skip
        self.launched[id(batch)] = made
        self.hooks.init_new(
            self.init_new, SGLangEngine, made, self.model_runner, return_hidden_states_before_norm=False
        )

    def init_new(self, cls: type, batch: Any, model_runner: Any, *, return_hidden_states_before_norm: bool) -> Any:
        ids, positions, slots = self.tokens_of(batch.entries)
        counts = np.array([e.length - e.computed for e in batch.entries], np.int32)
        made = SimpleNamespace(
            forward_mode=batch.forward_mode, batch_size=len(counts), input_ids=ids, positions=positions,
            req_pool_indices=np.array([e.request.row for e in batch.entries]), seq_lens=batch.seq_lens_cpu.copy(),
            out_cache_loc=slots, out_cache_loc_virtual=None,
        )  # fmt: skip
        if not batch.forward_mode.is_decode():
            made.extend_seq_lens, made.extend_prefix_lens = counts, np.array(batch.prefix_lens, np.int32)
            made.extend_num_tokens = int(counts.sum())
            made.extend_start_loc = np.cumsum(counts) - counts
        self.change(made)
        return made

    def change(self, forward_batch: Any) -> None:
        """Where a fault is planted."""

    def finish(self, batch: list[Entry], sampled: list[int]) -> None:
        made, result = self.launched.pop(id(batch)), SimpleNamespace(next_token_ids=np.array(sampled))

        def process(scheduler: Any, made: Any, result: Any) -> None:
            SlotEngine.finish(self, batch, sampled)

        self.hooks.process_batch_result(process, self, made, result)
