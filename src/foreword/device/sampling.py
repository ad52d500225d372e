"""Draw the tokens of a step on the device, by launches of the kernels K5 over the rows' sampling parameters."""

from __future__ import annotations

from foreword.batch import Need
from foreword.device.api import Tensor
from foreword.device.rows import DeviceRows

SUPPORTED = Need.GREEDY | Need.RANDOM | Need.TOP_P | Need.TOP_K | Need.MIN_P | Need.PENALTIES
"""The needs that the kernels cover. A step with a row that needs more is sampled on the host."""
_BLOCK = 1024
_PENALTY_PROGRAMS = 64  # each counts the tokens of one row of logits at a time


class DeviceSampler:
    """Draws as `foreword.sampling.Sampler` does, into ``rows.tensors["sampled"]``.

    lacks: the `Need` flags that the kernels do not cover. A step whose rows have one of them is sampled on the host.
    with_penalties: whether rows may have penalties. They take int32 [64, vocab_size] of memory, and change the logits
    in place.
    """

    def __init__(self, rows: DeviceRows, *, with_penalties: bool = True) -> None:
        self.rows = rows
        self.lacks = ~int(SUPPORTED if with_penalties else SUPPORTED & ~Need.PENALTIES)
        api, vocab_size = rows.api, rows.states.vocab_size
        self.drawn = api.zeros((rows.max_num_logits,), "int32")
        programs = min(rows.max_num_logits, _PENALTY_PROGRAMS)
        self.counts = api.zeros((programs, vocab_size), "int32") if with_penalties else None

    def sample(self, logits: Tensor, *, num_logits: int, num_reqs: int) -> None:
        """Launch K5: draw from logits [num_logits, V] and verify the drafts. The logits are float32 if rows have
        penalties.

        num_logits, num_reqs: the padded sizes, at most ``rows.max_num_logits``.
        """
        rows, place, tensors = self.rows, self.rows.layout, self.rows.tensors
        vocab_size = rows.states.vocab_size
        if self.counts is not None:
            rows.api.launch(
                "penalize", (min(num_logits, len(self.counts)),), rows.arena, rows.tokens, rows.packet,
                rows.states.max_model_len, place.records_at, place.record_size, tensors["expanded_idx_mapping"],
                tensors["expanded_local_pos"], tensors["cu_num_logits"], logits, self.counts, num_logits, vocab_size,
                BLOCK=_BLOCK,
            )  # fmt: skip
        rows.api.launch(
            "draw_tokens", (num_logits,), rows.arena, place.records_at, place.record_size,
            tensors["expanded_idx_mapping"], tensors["logits_indices"], tensors["positions"], logits, self.drawn,
            vocab_size, BLOCK=_BLOCK,
        )  # fmt: skip
        rows.api.launch(
            "verify_drafts", (-(-num_reqs // 128),), rows.arena, rows.packet, place.records_at, place.record_size,
            tensors["cu_num_logits"], self.drawn, tensors["sampled"], WIDTH=rows.width, BLOCK=128,
        )  # fmt: skip
