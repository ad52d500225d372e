"""Requests fed to an executor in chunks of chosen sizes, through the real batch layer."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from foreword import _native
from foreword.batch import InputBuffers, NewRequest, RequestStates, prepare_inputs
from foreword.executors.host import HostExecutor
from foreword.executors.native import KVFormat, NativeExecutor, WeightFormat
from foreword.executors.pool import batch_groups
from foreword.models.spec import DecoderSpec
from foreword.models.weights import Tensor

Floats = npt.NDArray[np.float32]


class Driver:
    def __init__(
        self,
        spec: DecoderSpec,
        weights: dict[str, Tensor],
        *,
        block_size: int = 16,
        max_num_reqs: int = 8,
        num_blocks: int = 400,
        max_tokens: int = 2048,
        max_num_draft_tokens: int = 0,
        weight_format: WeightFormat = "fp32",
        kv_format: KVFormat = "fp32",
        num_threads: int | None = 2,
        numa_nodes: int | None = None,
        preallocate_kv: bool = False,
        isa: str | None = None,
        executor: HostExecutor | None = None,
    ) -> None:
        groups = batch_groups(spec, block_size)
        self.states = RequestStates(
            max_num_reqs=max_num_reqs,
            max_model_len=spec.max_model_len,
            vocab_size=spec.vocab_size,
            kv_groups=groups,
            max_num_draft_tokens=max_num_draft_tokens,
        )
        self.buffers = InputBuffers.for_states(self.states, max_num_batched_tokens=max_tokens)
        self.executor = executor or NativeExecutor(
            spec,
            weights,
            num_blocks=num_blocks,
            block_size=block_size,
            weight_format=weight_format,
            kv_format=kv_format,
            num_threads=num_threads,
            numa_nodes=numa_nodes,
            preallocate_kv=preallocate_kv,
            isa=isa,
        )
        self.free = np.random.default_rng(1).permutation(np.arange(1, num_blocks)).tolist()

    def add(self, name: str, tokens: Sequence[int], lora_id: int = 0, more: int = 0) -> None:
        """A request whose tokens are all known; blocks for all of them and ``more``, in random order."""
        length = len(tokens) + more
        blocks = [
            [self.free.pop() for _ in range(t.width if t.group.recurrent else -(-length // t.tokens_per_block))]
            for t in self.states.block_tables
        ]
        self.states.add_request(NewRequest(name, prompt_token_ids=list(tokens), block_ids=blocks, lora_id=lora_id))

    def step(self, scheduled: dict[str, int]) -> dict[str, Floats]:
        """Logits of each request's last scheduled token."""
        gather = self.executor.reads_gathered_tables
        batch = prepare_inputs(self.states, scheduled, self.buffers, gather_block_tables=gather)
        logits = self.executor.compute(batch, batch.logits_indices).copy()
        self.states.commit(batch, {})
        return {name: logits[b] for b, name in enumerate(scheduled)}

    def run_alone(self, name: str, tokens: Sequence[int], chunks: Sequence[int], lora_id: int = 0) -> list[Floats]:
        self.add(name, tokens, lora_id)
        return [self.step({name: chunk})[name] for chunk in chunks]


INPUTS = (
    "input_ids",
    "positions",
    "query_start_loc",
    "seq_lens",
    "idx_mapping",
    "logits_indices",
    "slot_mapping",
    "block_tables",
)


def step_of(core, **arguments):
    """A step of the native model without drafts, from arrays by name: those of `INPUTS` are its inputs."""
    given = {name: arguments.pop(name) for name in INPUTS}
    rows = max((len(table) for table in given["block_tables"]), default=0)
    drafts = {"num_draft_tokens": np.zeros(len(given["seq_lens"]), np.int32)}
    inputs = _native.ModelInputs(**given, **drafts, num_accepted_tokens=np.ones(rows, np.int32))
    return core.step(inputs, **arguments)
