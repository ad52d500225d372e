"""Step preparation for LLM engines: from "these requests, this many tokens each" to every tensor a forward pass reads.

    states = RequestStates(max_num_reqs=…, max_model_len=…, vocab_size=…, kv_groups=[KVGroup(block_size=16)])
    buffers = InputBuffers.for_states(states, max_num_batched_tokens=…)
    states.add_request(NewRequest("a", prompt_token_ids=[…], block_ids=[[…]]))
    batch = prepare_inputs(states, {"a": 5}, buffers)      # the step's tensors: batch.input_ids, batch.slot_mapping, …
    print(batch.explain())                                 # the same as tables
    states.commit(batch, {"a": [token]})                   # what was sampled

Needs NumPy alone. `foreword.batch.proof.spec` holds every tensor as data.
"""

from typing import TYPE_CHECKING, Any

from foreword.batch.features.multimodal import MultiModalFeature
from foreword.batch.features.pooling import PoolingParams
from foreword.batch.prepare.buffers import InputBuffers
from foreword.batch.prepare.dummy import make_dummy
from foreword.batch.prepare.inputs import InputBatch, StaleBatchError, prepare_inputs
from foreword.batch.prepare.ring import BlockFence, StagingRing
from foreword.batch.proof.explain import Explanation
from foreword.batch.state.batch_update import BatchUpdates
from foreword.batch.state.request_states import RequestStates
from foreword.batch.values.attention import AttentionState
from foreword.batch.values.block_ops import BlockOps
from foreword.batch.values.kv_groups import ContextParallel, KVGroup
from foreword.batch.values.requests import NewRequest, NewRequests
from foreword.batch.values.sampling_params import SamplingParams
from foreword.errors import CapacityError, PlanError, RequestError

if TYPE_CHECKING:
    from foreword.batch.proof.validator import validate

__all__ = [
    "AttentionState",
    "BatchUpdates",
    "BlockFence",
    "BlockOps",
    "CapacityError",
    "ContextParallel",
    "Explanation",
    "InputBatch",
    "InputBuffers",
    "KVGroup",
    "MultiModalFeature",
    "NewRequest",
    "NewRequests",
    "PlanError",
    "PoolingParams",
    "RequestError",
    "RequestStates",
    "SamplingParams",
    "StagingRing",
    "StaleBatchError",
    "make_dummy",
    "prepare_inputs",
    "validate",
]


def __getattr__(name: str) -> Any:
    if name == "validate":  # the specification is loaded by those who check against it
        from foreword.batch.proof.validator import validate

        return validate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
