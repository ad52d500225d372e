"""The steps of the benchmark as `SchedulerOutput` objects of vLLM."""

from __future__ import annotations

from collections.abc import Sequence

from vllm import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from foreword.bench.traffic import TEMPERATURE, TOP_P, Step


class SchedulerOutputs:
    """Builds the `SchedulerOutput` of each step from the progress of the requests before it."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = steps
        # One string object per request, as with a scheduler in the same process, so that its hash is cached.
        numbers = {int(r) for step in steps for r in step.arrived.numbers}
        self._names = {r: f"request-{r}" for r in numbers}
        self._computed: list[list[int]] = []
        self._outputs: list[list[int]] = []
        computed: dict[int, int] = {}
        outputs: dict[int, int] = {}
        for step in steps:
            arrived = step.arrived.numbers.tolist()
            computed.update(zip(arrived, step.arrived.num_computed.tolist(), strict=True))
            outputs.update(dict.fromkeys(arrived, 0))
            scheduled = step.scheduled.tolist()
            self._computed.append([computed[r] for r in scheduled])
            self._outputs.append([outputs[r] for r in scheduled])
            drafts = 0 if step.drafts is None else step.drafts.shape[1]
            num_sampled = (step.sampled >= 0).sum(1).tolist()
            for r, n, sampled in zip(scheduled, step.num_scheduled.tolist(), num_sampled, strict=True):
                computed[r] += n - drafts + max(sampled - 1, 0)
                outputs[r] += sampled

    def make(self, t: int) -> SchedulerOutput:
        """Return a new object with new lists, because vLLM's runner keeps and extends them."""
        step = self.steps[t]
        scheduled = step.scheduled.tolist()
        names = [self._names[r] for r in scheduled]
        appended: dict[int, list[int]] = {}
        for r, block in zip(step.appended.tolist(), step.new_blocks.tolist(), strict=True):
            appended.setdefault(r, []).append(block)
        new = self._new_requests(step, appended)
        arrived = {data.req_id for data in new}
        old = [b for b, name in enumerate(names) if name not in arrived]
        return SchedulerOutput(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=CachedRequestData(
                req_ids=[names[b] for b in old],
                resumed_req_ids=set(),
                new_token_ids=[],
                all_token_ids={},
                new_block_ids=[(appended[scheduled[b]],) if scheduled[b] in appended else None for b in old],
                num_computed_tokens=[self._computed[t][b] for b in old],
                num_output_tokens=[self._outputs[t][b] for b in old],
            ),
            num_scheduled_tokens=dict(zip(names, step.num_scheduled.tolist(), strict=True)),
            total_num_scheduled_tokens=int(step.num_scheduled.sum()),
            scheduled_spec_decode_tokens=(
                {} if step.drafts is None else dict(zip(names, step.drafts.tolist(), strict=True))
            ),
            scheduled_encoder_inputs={},
            finished_req_ids={self._names[r] for r in step.departed.tolist()},
            free_encoder_mm_hashes=[],
        )

    def _new_requests(self, step: Step, appended: dict[int, list[int]]) -> list[NewRequestData]:
        a = step.arrived
        tokens, blocks, token, block = a.tokens.tolist(), a.blocks.tolist(), 0, 0
        new = []
        for r, n, held, computed in zip(
            a.numbers.tolist(), a.num_tokens.tolist(), a.num_blocks.tolist(), a.num_computed.tolist(), strict=True
        ):
            data = NewRequestData(
                req_id=self._names[r],
                prompt_token_ids=tokens[token : token + n],
                mm_features=[],
                sampling_params=SamplingParams(temperature=TEMPERATURE, top_p=TOP_P, max_tokens=4096),
                pooling_params=None,
                block_ids=(blocks[block : block + held] + appended.get(r, []),),
                num_computed_tokens=computed,
                lora_request=None,
                prefill_token_ids=tokens[token : token + n],
            )
            new.append(data)
            token, block = token + n, block + held
        return new
