"""What the engine asks of the thing that runs the model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from foreword.arrays import F32, I32
from foreword.batch import InputBatch

if TYPE_CHECKING:
    from foreword import _native


class Executor(Protocol):
    """Runs the model over a batch. It keeps keys and values in blocks and nothing else between two steps.

    reads_gathered_tables: whether it reads `InputBatch.block_table`, or the states' own tables through ``idx_mapping``.
    """

    reads_gathered_tables: bool

    @property
    def compute_threads(self) -> _native.CpuModel | None:
        """What owns native threads that others may borrow between two runs, as the sampler does; None without any."""
        ...

    def execute(self, batch: InputBatch) -> F32:
        """Compute the batch, write its keys and values, and return the logits [L, V] at ``batch.logits_indices``.

        The logits stay valid until the next call.
        """
        ...

    def copy_blocks(self, sources: I32, destinations: I32) -> None:
        """Copy whole blocks, in every storage slot. All sources are read before any destination is written."""
        ...
