"""Sampling parameters of a step's requests and logit rows."""

from __future__ import annotations

from foreword.batch.state.sampling_metadata import SamplingMetadata
from foreword.batch.step.tensors import BatchTensors, buffers_of


def sampling_metadata(batch: BatchTensors) -> SamplingMetadata:
    """Parameters of the requests [B]: the same object until the batch's members or their parameters change."""
    return buffers_of(batch).metadata.get(batch.num_reqs)


def logits_sampling_metadata(batch: BatchTensors) -> SamplingMetadata:
    """The same for the logit rows [L]: each request once, and once more for each of its drafts."""
    return buffers_of(batch).logits_metadata.get(len(batch.logits_indices))
