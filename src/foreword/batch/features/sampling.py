"""Select what the sampling of a step needs: the parameters of its requests and logit rows."""

from __future__ import annotations

from foreword.batch.state.sampling_metadata import SamplingMetadata, StepNeeds
from foreword.batch.step.tensors import BatchTensors


def step_needs(batch: BatchTensors) -> StepNeeds:
    """Return what the sampling of the requests [B] needs: the same object until members or parameters change."""
    return batch.buffers.needs.get(batch.num_reqs)


def sampling_metadata(batch: BatchTensors) -> SamplingMetadata:
    """Return all parameters of the requests [B]: the same object until members or parameters change."""
    return batch.buffers.metadata.get(batch.num_reqs)


def logits_sampling_metadata(batch: BatchTensors) -> SamplingMetadata:
    """Return those of the logit rows [L]: each request once, and once more for each of its drafts."""
    return batch.buffers.logits_metadata.get(len(batch.logits_indices))
