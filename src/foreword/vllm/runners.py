"""The hooks in vLLM's model runners: a subclass of each generation that reports its steps to a `Follower`.

`checked_class` derives them from the runner of any platform. Each hook calls the runner's own method with its
arguments, and changes neither its result nor its tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import vllm
from vllm.forward_context import get_forward_context
from vllm.v1.kv_cache_interface import MambaSpec

from foreword.batch import RequestStates
from foreword.check_options import CheckOptions
from foreword.shadow.comparison import TableRule
from foreword.vllm.follower import LOGGER, FollowedStep, Follower, Grammar, Rotary
from foreword.vllm.groups import groups_of
from foreword.vllm.hosted import HostCopies
from foreword.vllm.step_tensors import step_tensors, top_k_of, unsplit
from foreword.vllm.window import generation_of

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as Runner
else:
    Runner = object


class FollowedRunner(Runner):  # type: ignore[misc]  # vLLM's classes are Any
    """The base of the followers of both generations. follower: None until the KV groups are known, and if steps are not
    checked.

    samples_are_late: whether the samples of a step are read from its output, after that was copied to the host.
    has_drafts: whether the runner has the drafts itself, see `Follower`.
    """

    follower: Follower | None = None
    samples_are_late = True
    has_drafts = False
    check_options: CheckOptions
    table_rule = TableRule()
    report_finding = staticmethod(partial(LOGGER.error, "foreword: %s"))
    _stream: torch.cuda.Stream | None = None

    def initialize_kv_cache(self, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        super().initialize_kv_cache(kv_cache_config, *args, **kwargs)
        if self.follower is not None:
            self.follower.close()
        try:
            self.follower = self._new_follower(kv_cache_config)
        except Exception as error:  # the engine must serve also if the check fails
            LOGGER.error("foreword: the steps are not checked: %s", error)

    def foreword_report(self) -> str:
        """Return the number of checked steps and the findings so far, for ``collective_rpc("foreword_report")``."""
        return "foreword: the steps are not checked" if self.follower is None else self.follower.report()

    def sample_tokens(self, grammar_output: Any) -> Any:
        follower = self.follower
        if follower is None:
            return super().sample_tokens(grammar_output)
        step = follower.current
        if grammar_output is not None and step is not None:
            follower.constrain(partial(grammar_of, grammar_output, step.output))
        result = super().sample_tokens(grammar_output)
        if self.samples_are_late and hasattr(result, "get_output"):
            self._commit_later(follower, step, result)
            if not follower.is_queued:
                output = result.get_output()  # an output of a CPU, which needs no wait
                result.get_output = lambda: output
        return result

    def _new_follower(self, kv_cache_config: Any) -> Follower:
        groups, uses = groups_of(kv_cache_config)
        on_device = self.device.type != "cpu"
        is_async = bool(self.vllm_config.scheduler_config.async_scheduling)
        num_drafts = int(self.num_drafts_of_step)
        if on_device and self.device.type == "cuda":
            self._stream = torch.cuda.Stream(self.device)
        states = RequestStates(
            max_num_reqs=self.max_num_reqs,
            max_model_len=self.max_model_len,
            kv_groups=groups,
            vocab_size=self.model_config.get_vocab_size(),
            max_num_draft_tokens=num_drafts,
        )
        return Follower.of(
            states,
            self.check_options,
            max_num_batched_tokens=self.max_num_tokens,
            num_blocks=kv_cache_config.num_blocks,
            is_queued=on_device or is_async,
            has_drafts=self.has_drafts,
            title=f"vLLM {vllm.__version__}, {self.generation} model runner",
            log=self.report_finding,
            uses=uses,
            tables=self.table_rule,
            optimistic=is_async and num_drafts > 0,
        )

    def _hosted(self, follower: Follower, values: Mapping[str, Any]) -> HostCopies:
        with_device = follower.options.level != "host"
        return HostCopies(values, self._stream, copies=follower.is_queued, with_device=with_device)

    def _commit_later(self, follower: Follower, step: FollowedStep | None, output: Any) -> None:
        """Follow the samples of an output whose tokens are still copied to the host."""
        get_output = output.get_output

        def followed() -> Any:
            result = get_output()
            follower.commit(step, partial(samples_of, result.req_ids, result.sampled_token_ids))
            return result

        output.get_output = followed


class FirstRunner(FollowedRunner):
    """Hooks of the first generation. Its tensors are compared as the model is about to read them."""

    generation = "first"
    table_rule = TableRule(past_end=True)
    _logits_indices: Any = None
    _drafts: Any = None

    @property
    def num_drafts_of_step(self) -> int:
        return int(self.num_spec_tokens)

    @property
    def samples_are_late(self) -> bool:  # type: ignore[override]  # `_bookkeeping_sync` has the others
        return bool(self.use_async_scheduling)

    def _update_states(self, scheduler_output: Any) -> Any:
        if self.follower is not None:
            self.follower.decide(scheduler_output)
            self._logits_indices = self._drafts = None
        return super()._update_states(scheduler_output)

    def _prepare_inputs(self, scheduler_output: Any, num_scheduled_tokens: Any) -> Any:
        result = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        self._logits_indices, self._drafts = result[0], result[1]
        return result

    def _model_forward(
        self,
        input_ids: Any = None,
        positions: Any = None,
        intermediate_tensors: Any = None,
        inputs_embeds: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        follower = self.follower
        if follower is not None and self._logits_indices is not None:
            collect = partial(self._collect, follower, input_ids, inputs_embeds)
            follower.step(self.input_batch.req_ids, collect, partial(self._rotary, follower))
            if self.is_pooling_model:
                follower.commit(follower.current, dict)
        return super()._model_forward(input_ids, positions, intermediate_tensors, inputs_embeds, **model_kwargs)

    def _bookkeeping_sync(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._bookkeeping_sync(*args, **kwargs)
        if self.follower is not None and not self.use_async_scheduling:
            self.follower.commit(self.follower.current, partial(samples_of, result[5], result[3]))
        return result

    def _collect(self, follower: Follower, input_ids: Any, inputs_embeds: Any) -> HostCopies:
        metadata = get_forward_context().attn_metadata
        if not isinstance(metadata, dict):  # micro-batches, and models without attention
            metadata = {}
        sizes = [table.group.block_size for table in follower.shadow.states.block_tables]
        values = step_tensors(self, metadata, input_ids, self._logits_indices, self._drafts, sizes)
        T = values["num_tokens"]
        if self.enable_prompt_embeds:
            values["is_token_ids"] = self.is_token_ids.np[:T]
            if inputs_embeds is not None:
                values["prompt_embeds"] = inputs_embeds[:T].float()
        return self._hosted(follower, values)

    def _rotary(self, follower: Follower) -> Rotary:
        """Return the rotary positions of the requests that this step admits, which the model computed from their
        prompts.
        """
        if not self.uses_mrope or follower.current is None:
            return {}
        output = follower.current.output
        admitted = [data.req_id for data in output.scheduled_new_reqs]
        requests = [self.requests[rid] for rid in (*admitted, *output.scheduled_cached_reqs.resumed_req_ids)]
        return {r.req_id: (r.mrope_positions.numpy(), int(r.mrope_position_delta)) for r in requests}


class SecondRunner(FollowedRunner):
    """Hooks of the second generation, whose tensors are final in `prepare_attn`, but for embeddings and the rotary
    positions of several dimensions, which its ``model_state`` prepares last.
    """

    generation = "second"
    has_drafts = True
    _is_open = False
    _attention: tuple[Any, Sequence[Any], Any] | None = None
    _embeddings: Any = None
    _is_watched = False

    @property
    def num_drafts_of_step(self) -> int:
        return int(self.num_speculative_steps)

    def execute_model(self, scheduler_output: Any, *args: Any, dummy_run: bool = False, **kwargs: Any) -> Any:
        self._is_open = self.follower is not None and not dummy_run
        if self.follower is not None and not dummy_run:
            self.follower.decide(scheduler_output)
        return super().execute_model(scheduler_output, *args, dummy_run=dummy_run, **kwargs)

    def prepare_attn(self, input_batch: Any) -> Any:
        tables, slots = super().prepare_attn(input_batch)
        if self.follower is not None and self._is_open:
            self._attention = input_batch, tables, slots
            if not self._is_watched:
                self._follow({})
        return tables, slots

    def _new_follower(self, kv_cache_config: Any) -> Follower:
        follower = super()._new_follower(kv_cache_config)
        if (self.uses_inputs_embeds or self.model_config.uses_mrope) and not self._is_watched:
            self._watch_model_state()
        return follower

    def _watch_model_state(self) -> None:
        state = self.model_state
        prepare_embeddings, prepare_inputs = state.prepare_inputs_embeds, state.prepare_inputs

        def embedded(*args: Any, **kwargs: Any) -> Any:
            self._embeddings = prepare_embeddings(*args, **kwargs)
            return self._embeddings

        def prepared(*args: Any, **kwargs: Any) -> Any:
            inputs = prepare_inputs(*args, **kwargs)
            self._follow(inputs)
            return inputs

        state.prepare_inputs_embeds, state.prepare_inputs = embedded, prepared
        self._is_watched = True

    def _follow(self, inputs: Mapping[str, Any]) -> None:
        """Follow the step that `prepare_attn` prepared. inputs: the model inputs that its model state prepares."""
        follower, prepared, self._attention = self.follower, self._attention, None
        if follower is None or prepared is None:
            return
        batch = prepared[0]
        follower.step(
            batch.req_ids, partial(self._collect, follower, *prepared, inputs), partial(self._rotary, follower)
        )
        if self.is_pooling_model:
            follower.commit(follower.current, dict)

    def _rotary(self, follower: Follower) -> Rotary:
        """Return the rotary positions of the requests that this step admits, which the model computed from their
        tokens.
        """
        if not self.model_config.uses_mrope or follower.current is None:
            return {}
        rope, rows = self.model_state.rope_state, self.req_states
        found = {}
        for data in follower.current.output.scheduled_new_reqs:
            row = rows.req_id_to_index[data.req_id]
            positions = rope.read_prefill_positions(row, int(rows.prefill_len.np[row]))
            found[data.req_id] = positions.cpu().numpy().copy(), int(rope.prefill_delta.np[row])
        return found

    def _collect(
        self, follower: Follower, batch: Any, tables: Sequence[Any], slots: Any, inputs: Mapping[str, Any]
    ) -> HostCopies:
        T, B = batch.num_tokens, batch.num_reqs
        values = {
            "input_ids": batch.input_ids[:T],
            "positions": batch.positions[:T],
            "num_tokens": T,
            "query_start_loc": batch.query_start_loc[: B + 1],
            "seq_lens": batch.seq_lens[:B],
            "num_computed_tokens": self.req_states.num_computed_tokens.gpu[batch.idx_mapping[:B]],
            "num_scheduled_tokens": batch.num_scheduled_tokens[:B],
            "is_prefilling": batch.is_prefilling_np[:B],
            "logits_indices": batch.logits_indices,
            "cu_num_logits": batch.cu_num_logits[: B + 1],
            "expanded_local_pos": batch.expanded_local_pos,
            "slot_mapping": [  # layers with states read none
                None if isinstance(group.kv_cache_spec, MambaSpec) else of_group[:T]
                for of_group, group in zip(slots, self.kv_cache_config.kv_cache_groups, strict=True)
            ],
            "block_table": [
                unsplit(table[:B], size, group.block_size)
                for table, size, group in zip(
                    tables,
                    self.block_tables.block_sizes,
                    (t.group for t in follower.shadow.states.block_tables),
                    strict=True,
                )
            ],
        }
        if self.sampler is not None:
            columns, rows = self.sampler.sampling_states, batch.idx_mapping_np[:B]
            for name in ("temperature", "top_p", "min_p"):
                values[f"sampling.{name}"] = getattr(columns, name).np[rows]
            values["sampling.top_k"] = top_k_of(columns.top_k.np[rows], columns.vocab_size)
            for name in ("repetition_penalty", "frequency_penalty", "presence_penalty"):
                values[f"sampling.{name}"] = getattr(self.sampler.penalties_state, name).np[rows]
        if self.lora_config:
            adapters = self.lora_state.lora_ids[batch.idx_mapping_np[:B]]
            values |= {"lora_requests": adapters, "lora_tokens": np.repeat(adapters, batch.num_scheduled_tokens[:B])}
        if self.model_config.uses_mrope:
            values["mrope_positions"] = inputs["positions"][:, :T]
        if self.model_config.enable_prompt_embeds and self._embeddings is not None:
            values["prompt_embeds"] = self._embeddings[:T].float()
        return self._hosted(follower, values)


@cache
def checked_class(runner: type) -> type:
    """Return the subclass of a runner with the hooks. Raise ConfigError for a runner with unknown methods."""
    hooks = {"first": FirstRunner, "second": SecondRunner}[generation_of(runner)]
    return type(f"Checked{runner.__name__}", (hooks, runner), {})


def samples_of(req_ids: Sequence[str], token_ids: Sequence[Sequence[int]]) -> dict[str, Sequence[int]]:
    """Return the sampled tokens of each request that has any."""
    return {req_id: ids for req_id, ids in zip(req_ids, token_ids, strict=True) if len(ids)}


def grammar_of(output: Any, scheduled: Any) -> Grammar:
    """Return the tokens that the grammars of a step allow."""
    drafts = scheduled.scheduled_spec_decode_tokens
    num_drafts = {req_id: len(drafts.get(req_id, ())) for req_id in output.structured_output_request_ids}
    return Grammar(output.structured_output_request_ids, np.array(output.grammar_bitmask), num_drafts)
