"""SGLang under a shadow: a plugin for its entry point ``sglang.srt.plugins``, and its tensors by our names.

FOREWORD_CHECK=full python -m sglang.launch_server --model-path …

Written from the source of SGLang 0.5.23 and tested with stubs of its objects, not with SGLang itself.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from foreword.arrays import I64
from foreword.batch import KVGroup, RequestStates
from foreword.errors import ConfigError
from foreword.shadow.finding import log_finding
from foreword.shadow.following import Following, on_cpu
from foreword.shadow.shadow import LEVELS, Level, Scheduled, Shadow

VARIABLE = "FOREWORD_CHECK"
INIT_NEW = "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new"
PROCESS = "sglang.srt.managers.scheduler.Scheduler.process_batch_result"
MOST_IN_FLIGHT = 64  # more than pipelines have stages
_LOGGER = logging.getLogger(__name__)


def plugin() -> None:
    """Follow the scheduler of this process where FOREWORD_CHECK is "host", "tensors" or "full"; else do nothing.

    ConfigError for another value.
    """
    text = os.environ.get(VARIABLE, "off")
    if text in ("", "off"):
        return
    for level in LEVELS:
        if text == level:
            break
    else:
        raise ConfigError(f"{VARIABLE}={text!r:.80}: must be off or one of {', '.join(LEVELS)}")
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    hooks = Hooks(check=level, on_finding=log_finding)
    HookRegistry.register(INIT_NEW, hooks.init_new, HookType.AROUND)
    HookRegistry.register(PROCESS, hooks.process_batch_result, HookType.AROUND)


class Hooks:
    """What is called in place of SGLang's functions, for the one scheduler of a process. settings: of `Shadow`.

    Followed are extends, decodes and both in one batch, with overlap or without. With the first batch of another kind
    (drafts, diffusion, split prefills) following ends, which is logged.
    """

    def __init__(self, **settings: Any) -> None:
        self._settings = settings
        self._following: Following | None = None
        self._known: dict[str, Any] = {}  # requests by id
        self._adapters: dict[str, int] = {}
        self._ended = False

    @property
    def shadow(self) -> Shadow | None:
        """The shadow, once a batch was followed."""
        return None if self._following is None else self._following.shadow

    def init_new(self, original: Callable[..., Any], cls: type, batch: Any, model_runner: Any, **kwargs: Any) -> Any:
        """Around ``ForwardBatch.init_new``: follow the batch that it makes."""
        made = original(cls, batch, model_runner, **kwargs)
        if self._ended or model_runner.is_draft_worker or not batch.reqs:
            return made
        mode = batch.forward_mode
        is_plain = mode.is_decode() or (mode.is_extend_without_speculative() and not mode.is_split_prefill())
        if not (is_plain and batch.spec_algorithm.is_none() and batch.dllm_config is None):
            self._end(f"a batch in {mode} cannot be followed")
            return made
        if self._following is not None and self._following.num_in_flight == MOST_IN_FLIGHT:
            self._end(f"the samples of {MOST_IN_FLIGHT} steps were not seen")
            return made
        if self._following is None:
            self._following = Following(shadow_of(model_runner, self._settings))
        table = model_runner.req_to_token_pool.req_to_token
        gone = [
            rid for rid, req in self._known.items()
            if req.kv.req_pool_idx is None and not any(req is other for other in batch.reqs)
        ]  # fmt: skip
        for rid in gone:
            del self._known[rid]
        states = self._following.shadow.states
        seen = {req.rid for req in batch.reqs if req.rid in self._known and req.rid in states}
        self._known.update((req.rid, req) for req in batch.reqs)
        self._following.prepared(scheduled(batch, table, self._adapters, seen), tensors_of(made, table), gone)
        return made

    def _end(self, why: str) -> None:
        self._ended = True
        _LOGGER.warning("%s: no later step is checked", why)

    def process_batch_result(self, original: Callable[..., Any], scheduler: Any, batch: Any, result: Any) -> Any:
        """Around ``Scheduler.process_batch_result``: follow the samples, except those that it discards."""
        discarded = [req.finished() or req.is_retracted for req in batch.reqs]
        done = original(scheduler, batch, result)
        following = self._following
        if following is not None and not self._ended and following.awaited == [req.rid for req in batch.reqs]:
            tokens = on_cpu(result.next_token_ids).tolist()
            following.sampled({
                req.rid: [token] for req, token, drop in zip(batch.reqs, tokens, discarded, strict=True) if not drop
            })  # fmt: skip
        return done


def shadow_of(model_runner: Any, settings: Mapping[str, Any]) -> Shadow:
    """A shadow for the pool of requests and the cache of a ``ModelRunner``.

    The cache has one KV group with blocks of one token, since the pool has a slot per token; slot 0 is the padding's.
    """
    rows, length = model_runner.req_to_token_pool.req_to_token.shape
    server = model_runner.server_args
    level: Level = settings.get("check", "full")
    states = RequestStates(
        max_num_reqs=2 * rows,
        max_model_len=length,
        vocab_size=2**31 - 1,  # placeholders of images are hashes
        kv_groups=[KVGroup(1)],
    )
    elsewhere = server.enable_hierarchical_cache or server.disaggregation_mode != "null"  # who writes keys
    return Shadow(
        states,
        max_num_batched_tokens=max(server.chunked_prefill_size or 0, server.max_prefill_tokens, length) + rows,
        num_blocks=model_runner.max_total_num_tokens + server.page_size + 1,
        attached=elsewhere,
        **{**settings, "check": level},
    )


def scheduled(batch: Any, req_to_token: Any, adapters: dict[str, int], seen: Collection[str]) -> list[Scheduled]:
    """What a ``ScheduleBatch`` decided. adapters: the numbers of those seen so far; new ones are added. seen: requests
    whose tokens are known and not copied.
    """
    lengths = on_cpu(batch.seq_lens_cpu).tolist()
    rows = req_to_token[:, : max(lengths)][[req.kv.req_pool_idx for req in batch.reqs]]
    slots, is_decode = on_cpu(rows), batch.forward_mode.is_decode()
    out = []
    for b, (req, length) in enumerate(zip(batch.reqs, lengths, strict=True)):
        computed = length - 1 if is_decode else batch.prefix_lens[b]
        adapter = 0 if req.lora_id is None else adapters.setdefault(req.lora_id, len(adapters) + 1)
        tokens = [] if req.rid in seen else [*req.origin_input_ids, *req.output_ids]
        prompt, blocks = len(req.origin_input_ids), [slots[b, :length]]
        out.append(Scheduled(req.rid, tokens, prompt, computed, length - computed, blocks, adapter))
    return out


def tensors_of(forward_batch: Any, req_to_token: Any) -> dict[str, Any]:
    """The tensors of a ``ForwardBatch`` by our names: each row of docs/reference/sglang.md that is compared."""
    lengths: I64 = on_cpu(forward_batch.seq_lens).astype(np.int64)
    read = on_cpu(req_to_token[:, : int(lengths.max())][forward_batch.req_pool_indices])
    slots = forward_batch.out_cache_loc_virtual
    tensors: dict[str, Any] = {
        "num_reqs": int(forward_batch.batch_size),
        "input_ids": on_cpu(forward_batch.input_ids),
        "positions": on_cpu(forward_batch.positions),
        "seq_lens": lengths,
        "slot_mapping": [on_cpu(forward_batch.out_cache_loc if slots is None else slots)],
        "read_slots": [read[np.arange(read.shape[1]) < lengths[:, None]]],
    }
    if not forward_batch.forward_mode.is_decode():
        starts = on_cpu(forward_batch.extend_start_loc)
        tensors |= {
            "num_tokens": int(forward_batch.extend_num_tokens),
            "num_scheduled_tokens": on_cpu(forward_batch.extend_seq_lens),
            "num_computed_tokens": on_cpu(forward_batch.extend_prefix_lens),
            "query_start_loc": np.append(starts, forward_batch.extend_num_tokens),
        }
    return tensors
