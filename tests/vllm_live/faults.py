"""Faults that are planted in a live vLLM, each a function of its scheduler and its runner.

`FAULTS` says in which scenario each is planted, and what must be named first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


def after(owner: Any, name: str, change: Callable[..., Any]) -> None:
    """Call change(result, *args) after owner.name; what it returns, if anything, is the result."""
    original = getattr(owner, name)

    def patched(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        changed = change(result, *args)
        return result if changed is None else changed

    setattr(owner, name, patched)


def calls(*numbers: int) -> Callable[[], bool]:
    """A function that is true at these of its calls."""
    count = iter(range(1 << 30))
    return lambda: next(count) in numbers


# -- of the first runner


def slot_off_by_one(scheduler: Any, runner: Any) -> None:
    from vllm.v1.worker.block_table import BlockTable

    now = calls(20)

    def change(_: Any, table: Any, num_reqs: int, query_start_loc: Any, positions: Any) -> None:
        if now():
            table.slot_mapping.np[int(query_start_loc[1]) - 1] += 1

    after(BlockTable, "compute_slot_mapping", change)


def moved_row_keeps_blocks(scheduler: Any, runner: Any) -> None:
    from vllm.v1.worker.block_table import BlockTable

    def move_row(table: Any, source: int, target: int) -> None:
        table.num_blocks_per_row[target] = table.num_blocks_per_row[source]

    BlockTable.move_row = move_row


def moved_row_lacks_a_token(scheduler: Any, runner: Any) -> None:
    from vllm.v1.worker.gpu_input_batch import InputBatch

    after(InputBatch, "_get_active_token_count", lambda count, *_: count - 1)


def position_too_high_after_preemption(scheduler: Any, runner: Any) -> None:
    resumed: set[str] = set()

    def change(_: Any, output: Any) -> None:
        resumed.update(output.scheduled_cached_reqs.resumed_req_ids)
        batch = runner.input_batch
        for req_id in resumed & set(batch.req_ids):
            batch.num_computed_tokens_cpu[batch.req_id_to_index[req_id]] += 1

    after(runner, "_update_states", change)


def last_draft_missing(scheduler: Any, runner: Any) -> None:
    from vllm.v1.worker.gpu_input_batch import InputBatch

    def change(_: Any, batch: Any, request: Any, drafts: Any) -> None:
        ids = drafts.get(request.req_id, ())
        if len(ids) > 1:
            row = batch.req_id_to_index[request.req_id]
            batch.token_ids_cpu[row, batch.num_tokens_no_spec[row] + len(ids) - 1] = 0

    after(InputBatch, "update_req_spec_token_ids", change)


def logits_of_the_token_before(scheduler: Any, runner: Any) -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    def change(result: Any, *_: Any) -> Any:
        indices, drafts, most = result
        if indices.numel() > 1 and int(indices[0]) > 0:
            indices = indices.clone()
            indices[0] -= 1
        return indices, drafts, most

    after(GPUModelRunner, "_prepare_inputs", change)


def sample_of_a_chunk_kept(scheduler: Any, runner: Any) -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    def change(*_: Any) -> None:
        runner.discard_request_mask.np[:] = False

    after(GPUModelRunner, "_prepare_inputs", change)


def adapters_not_moved(scheduler: Any, runner: Any) -> None:
    from vllm.v1.worker.gpu_input_batch import InputBatch

    original = InputBatch.condense

    def condense(batch: Any) -> None:
        before = batch.request_lora_mapping.copy()
        original(batch)
        batch.request_lora_mapping[: batch.num_reqs] = before[: batch.num_reqs]

    InputBatch.condense = condense


def temperature_not_moved(scheduler: Any, runner: Any) -> None:
    from vllm.v1.worker.gpu_input_batch import InputBatch

    original = InputBatch.condense

    def condense(batch: Any) -> None:
        before = batch.temperature_cpu.copy()
        original(batch)
        batch.temperature_cpu[: batch.num_reqs] = before[: batch.num_reqs]

    InputBatch.condense = condense


def embedding_taken_for_a_token(scheduler: Any, runner: Any) -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    def change(*_: Any) -> None:
        runner.is_token_ids.np[:] = True

    after(GPUModelRunner, "_prepare_inputs", change)


def grammar_ignored(scheduler: Any, runner: Any) -> None:
    from vllm.v1.worker import gpu_model_runner

    gpu_model_runner.apply_grammar_bitmask = lambda *_: None


def image_token_replaced(scheduler: Any, runner: Any) -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    def change(*_: Any) -> None:
        ids = runner.input_ids.gpu
        ids[ids == ids.max()] -= 1

    after(GPUModelRunner, "_prepare_inputs", change)


def height_of_the_token_before(scheduler: Any, runner: Any) -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    def change(_: Any, runner: Any, *__: Any) -> None:
        rows = runner.mrope_positions.np
        rows[1, 1:] = rows[1, :-1].copy()

    after(GPUModelRunner, "_calc_mrope_positions", change)


# -- of the second runner, whose kernels are functions


def change_kernel(module: Any, name: str, change: Callable[..., Any]) -> None:
    launched = getattr(module, name)
    original = launched._function

    def function(grid: Any, **arguments: Any) -> None:
        change(partial_of(original, grid), arguments)

    launched._function = function


def partial_of(function: Callable[..., None], grid: Any) -> Callable[..., None]:
    return lambda **arguments: function(grid, **arguments)


def block_append_lost(scheduler: Any, runner: Any) -> None:
    now = calls(30, 31, 32)
    tables = runner.block_tables
    original = tables.append_block_ids

    def append_block_ids(req_index: int, new_block_ids: Any, overwrite: bool) -> None:
        if overwrite or not now():
            original(req_index, new_block_ids, overwrite)

    tables.append_block_ids = append_block_ids


def last_sampled_token_wrong(scheduler: Any, runner: Any) -> None:
    from vllm.v1.worker.gpu import input_batch

    now = calls(50)

    def change(launch: Callable[..., None], arguments: dict[str, Any]) -> None:
        launch(**arguments)
        if now():
            runner.req_states.last_sampled_tokens[:] = 7

    change_kernel(input_batch, "_post_update_kernel", change)


def presence_penalty_lost(scheduler: Any, runner: Any) -> None:
    state = runner.sampler.penalties_state

    def change(_: Any, req_idx: int, *__: Any) -> None:
        state.presence_penalty.np[req_idx] = 0

    after(state, "add_request", change)


def embeddings_not_applied(scheduler: Any, runner: Any) -> None:
    from vllm.v1.worker.gpu.model_states import prompt_embeds

    change_kernel(prompt_embeds, "_apply_prompt_embeds_kernel", lambda *_: None)


def rotary_delta_lost(scheduler: Any, runner: Any) -> None:
    from vllm.v1.worker.gpu.mm import rope

    def change(launch: Callable[..., None], arguments: dict[str, Any]) -> None:
        launch(**arguments | {"prefill_delta_ptr": 0 * arguments["prefill_delta_ptr"]})

    change_kernel(rope, "_prepare_rope_positions_kernel", change)


# -- faults of the scheduler: its runner does exactly what it plans


def block_freed_in_use(scheduler: Any, runner: Any) -> None:
    now = calls(15, 40, 65)

    def change(*_: Any) -> None:
        if now() and scheduler.running:
            manager = scheduler.kv_cache_manager
            of_group = manager.coordinator.single_type_managers[0]
            blocks = of_group.req_to_blocks[scheduler.running[0].request_id]
            own = [block for block in blocks if block.ref_cnt == 1 and not block.is_null]
            if own:
                manager.block_pool._maybe_evict_cached_block(own[0])
                own[0].ref_cnt = 0
                manager.block_pool.free_block_queue.prepend_n([own[0]])

    after(scheduler, "schedule", change)


def hash_ignores_the_tokens_before(scheduler: Any, runner: Any) -> None:
    from vllm.v1.core import kv_cache_utils

    original = kv_cache_utils.hash_block_tokens

    def changed(function: Any, parent: Any, tokens: Any, extra: Any = None) -> Any:
        return original(function, None, tokens, extra)

    kv_cache_utils.hash_block_tokens = changed


def hash_ignores_the_adapter(scheduler: Any, runner: Any) -> None:
    from vllm.v1.core import kv_cache_utils

    kv_cache_utils._gen_lora_extra_hash_keys = lambda request: []


def hash_ignores_the_images(scheduler: Any, runner: Any) -> None:
    from vllm.v1.core import kv_cache_utils

    original = kv_cache_utils._gen_mm_extra_hash_keys
    kv_cache_utils._gen_mm_extra_hash_keys = lambda *args: ([], original(*args)[1])


def window_freed_early(scheduler: Any, runner: Any) -> None:
    from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager

    after(SlidingWindowManager, "get_num_skipped_tokens", lambda count, *_: count + 32 if count > 0 else count)


def rejected_drafts_kept(scheduler: Any, runner: Any) -> None:
    original = scheduler.update_from_output

    def update(output: Any, result: Any) -> Any:
        drafted = [req_id for req_id in output.scheduled_spec_decode_tokens if req_id in scheduler.requests]
        before = {req_id: scheduler.requests[req_id].num_computed_tokens for req_id in drafted}
        outputs = original(output, result)
        for req_id, computed in before.items():
            request = scheduler.requests.get(req_id)
            if request is not None and request.num_computed_tokens < computed:
                request.num_computed_tokens += 1
        return outputs

    scheduler.update_from_output = update


class Planted(NamedTuple):
    """Where a fault is planted, and the tensor and origin of one of the findings of the first step that has some."""

    scenario: str
    tensor: str
    origin: str
    second: bool = False


FAULTS: dict[str, Planted] = {
    "slot_off_by_one": Planted("plain", "slot_mapping", "runner"),
    "moved_row_keeps_blocks": Planted("plain", "block_table", "runner"),
    "moved_row_lacks_a_token": Planted("plain", "input_ids", "runner"),
    "position_too_high_after_preemption": Planted("windows", "positions", "runner"),
    "last_draft_missing": Planted("drafts", "draft_token_ids", "runner"),
    "logits_of_the_token_before": Planted("plain", "logits_indices", "runner"),
    "sample_of_a_chunk_kept": Planted("plain", "discard_mask", "runner"),
    "adapters_not_moved": Planted("adapters", "lora_tokens", "runner"),
    "temperature_not_moved": Planted("plain", "sampling.temperature", "runner"),
    "embedding_taken_for_a_token": Planted("embeddings", "is_token_ids", "runner"),
    "grammar_ignored": Planted("grammars", "sampled", "runner"),
    "image_token_replaced": Planted("images", "input_ids", "runner"),
    "height_of_the_token_before": Planted("images", "mrope_positions", "runner"),
    "block_append_lost": Planted("plain", "block_table", "runner", second=True),
    "last_sampled_token_wrong": Planted("plain", "input_ids", "runner", second=True),
    "presence_penalty_lost": Planted("plain", "sampling.presence_penalty", "runner", second=True),
    "embeddings_not_applied": Planted("embeddings", "prompt_embeds", "runner", second=True),
    "rotary_delta_lost": Planted("images", "mrope_positions", "runner", second=True),
    "block_freed_in_use": Planted("plain", "cache", "scheduler"),
    "hash_ignores_the_tokens_before": Planted("plain", "cache", "scheduler"),
    "hash_ignores_the_adapter": Planted("adapters", "cache", "scheduler"),
    "hash_ignores_the_images": Planted("images", "cache", "scheduler"),
    "window_freed_early": Planted("windows", "cache", "scheduler"),
    "rejected_drafts_kept": Planted("drafts", "num_computed_tokens", "scheduler"),
}
