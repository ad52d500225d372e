"""SGLang under a shadow: hooks for its registry of plugins, and its tensors by our names.

FOREWORD_CHECK=full python -m sglang.launch_server --model-path …   (`foreword.sglang` is the plugin)

Written from the source of SGLang 0.5.23 and tested with stubs of its objects, not with SGLang itself; `make sglang`
finds each name that is read here in that source. A ServerArgs has what a user gave, None where nothing was given.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

from foreword.arrays import I64
from foreword.batch import KVGroup, RequestStates
from foreword.check_options import CheckOptions
from foreword.names import counted
from foreword.shadow.finding import FindingError
from foreword.shadow.following import Following, on_cpu
from foreword.shadow.outlets import Outlets, shadow_of
from foreword.shadow.shadow import Scheduled, Shadow

INIT_NEW = "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new"
PROCESS = "sglang.srt.managers.scheduler.Scheduler.process_batch_result"
MOST_IN_FLIGHT = 64  # more than pipelines have stages
_LOGGER = logging.getLogger(__name__)


def register(options: CheckOptions) -> None:
    """Follow the scheduler of this process, as FOREWORD_CHECK asks for it."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    hooks = Hooks(options)
    HookRegistry.register(INIT_NEW, hooks.init_new, HookType.AROUND)
    HookRegistry.register(PROCESS, hooks.process_batch_result, HookType.AROUND)


class Hooks:
    """The functions that replace SGLang's, for the one scheduler of a process.

    Followed are extends, decodes and both in one batch, with overlap or without. With the first batch of another kind
    (drafts, diffusion, split prefills) following ends, which is logged.
    """

    def __init__(self, options: CheckOptions) -> None:
        self._options = options
        self._following: Following | None = None
        self._outlets: Outlets | None = None
        self._known: dict[str, Any] = {}  # requests by id
        self._adapters: dict[str, int] = {}
        self._ended = ""

    @property
    def shadow(self) -> Shadow | None:
        """The shadow, once a batch was followed."""
        return None if self._following is None else self._following.shadow

    def report(self) -> str:
        """Return what was checked and found so far."""
        lines = [f"foreword: {title()}, check={self._options.level}"]
        lines.append("no step was followed" if self.shadow is None else str(self.shadow.report()))
        if self._following is not None and self._following.num_in_flight:
            lines.append(f"{counted(self._following.num_in_flight, 'step')} in flight")
        return "\n".join(lines + [f"the check ended early: {self._ended}"] * bool(self._ended))

    def close(self) -> None:
        """Log the report, and finish the files. A second call does nothing."""
        if self._outlets is not None:
            self._outlets.close()

    def init_new(self, original: Callable[..., Any], cls: type, batch: Any, model_runner: Any, **kwargs: Any) -> Any:
        """Wrap ``ForwardBatch.init_new``, to follow the batch that it makes."""
        made = original(cls, batch, model_runner, **kwargs)
        self._guarded(partial(self._prepared, batch, model_runner, made))
        return made

    def _prepared(self, batch: Any, model_runner: Any, made: Any) -> None:
        if model_runner.is_draft_worker or not batch.reqs:
            return
        mode = batch.forward_mode
        is_plain = mode.is_decode() or (mode.is_extend_without_speculative() and not mode.is_split_prefill())
        if not (is_plain and batch.spec_algorithm.is_none() and batch.dllm_config is None):
            self._end(f"a batch in {mode} cannot be followed")
            return
        if self._following is not None and self._following.num_in_flight == MOST_IN_FLIGHT:
            self._end(f"the samples of {MOST_IN_FLIGHT} steps were not seen")
            return
        if self._following is None:
            self._following = self._follow(model_runner)
        table = model_runner.req_to_token_pool.req_to_token
        gone = [
            rid for rid, req in self._known.items()
            if req.kv.req_pool_idx is None and not any(req is other for other in batch.reqs)
        ]  # fmt: skip
        preempted = {rid for rid in gone if self._known[rid].is_retracted}
        for rid in gone:
            del self._known[rid]
        states = self._following.shadow.states
        seen = {req.rid for req in batch.reqs if req.rid in self._known and req.rid in states}
        self._known.update((req.rid, req) for req in batch.reqs)
        requests = scheduled(batch, table, self._adapters, seen)
        self._following.prepared(requests, tensors_of(made, table), gone, preempted)

    def process_batch_result(self, original: Callable[..., Any], scheduler: Any, batch: Any, result: Any) -> Any:
        """Wrap ``Scheduler.process_batch_result``, to follow the samples, except those that it discards."""
        discarded = [req.finished() or req.is_retracted for req in batch.reqs]
        done = original(scheduler, batch, result)
        self._guarded(partial(self._sampled, batch, result, discarded))
        return done

    def _sampled(self, batch: Any, result: Any, discarded: Sequence[bool]) -> None:
        following = self._following
        if following is not None and following.awaited == [req.rid for req in batch.reqs]:
            tokens = on_cpu(result.next_token_ids).tolist()
            following.sampled({
                req.rid: [token] for req, token, drop in zip(batch.reqs, tokens, discarded, strict=True) if not drop
            })  # fmt: skip

    def _guarded(self, call: Callable[[], None]) -> None:
        """Follow a part of a step. A fault of the check itself ends the check, and the engine goes on."""
        if self._ended:
            return
        try:
            call()
        except FindingError:
            raise
        except Exception as error:  # any error
            self._end(f"the check failed ({type(error).__name__}: {error})")

    def _follow(self, model_runner: Any) -> Following:
        """Start to follow the runner, with the files that the options ask for."""
        size = max_num_batched_tokens(model_runner)
        shadow = new_shadow(model_runner, self._options)
        self._outlets = Outlets(
            shadow,
            self._options,
            title=title(),
            max_num_batched_tokens=size,
            log=_LOGGER.error,
            report=self.report,
            at_end=partial(_LOGGER.info, "%s"),
        )
        return Following(shadow, self._outlets)

    def _end(self, why: str) -> None:
        self._ended = why
        _LOGGER.warning("%s: no later step is checked", why)


def new_shadow(model_runner: Any, options: CheckOptions) -> Shadow:
    """Return a shadow for the pool of requests and the cache of a ``ModelRunner``.

    The cache has one KV group with blocks of one token, since the pool has a slot per token; slot 0 is the padding's.
    """
    rows, length = model_runner.req_to_token_pool.req_to_token.shape
    server = model_runner.server_args
    states = RequestStates(
        max_num_reqs=2 * rows,
        max_model_len=length,
        vocab_size=2**31 - 1,  # placeholders of images are hashes
        kv_groups=[KVGroup(1)],
    )
    elsewhere = server.enable_hierarchical_cache or server.disaggregation_mode != "null"  # who writes keys
    return shadow_of(
        states,
        options,
        log=_LOGGER.error,
        max_num_batched_tokens=max_num_batched_tokens(model_runner),
        num_blocks=model_runner.max_total_num_tokens + model_runner.page_size + 1,
        attached=elsewhere,
    )


def max_num_batched_tokens(model_runner: Any) -> int:
    """Return the tokens of the largest step."""
    rows, length = model_runner.req_to_token_pool.req_to_token.shape
    server = model_runner.server_args
    return int(max(server.chunked_prefill_size or 0, server.max_prefill_tokens, length) + rows)


def title() -> str:
    """Return SGLang with its version, where it is installed."""
    try:
        return f"SGLang {version('sglang')}"
    except PackageNotFoundError:
        return "SGLang"


def scheduled(batch: Any, req_to_token: Any, adapters: dict[str, int], seen: Collection[str]) -> list[Scheduled]:
    """Return what a ``ScheduleBatch`` decided. adapters: the numbers of those seen so far; new ones are added. seen:
    requests whose tokens are known and not copied.
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
    """Return the tensors of a ``ForwardBatch`` by our names: each row of docs/reference/sglang.md that is compared."""
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
