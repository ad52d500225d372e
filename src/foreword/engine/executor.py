"""What the engine asks of the thing that runs the model."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from foreword.batch import InputBatch


class Executor(Protocol):
    """Runs the model over a batch. It keeps keys and values in blocks and nothing else between two steps.

    reads_gathered_tables: whether it reads `InputBatch.block_table`, or the states' own tables through ``idx_mapping``.
    """

    reads_gathered_tables: bool

    def execute(self, batch: InputBatch) -> npt.NDArray[np.float32]:
        """Compute the batch, write its keys and values, and return the logits [L, V] at ``batch.logits_indices``.

        The logits stay valid until the next call.
        """
        ...

    def copy_blocks(self, sources: npt.NDArray[np.int32], destinations: npt.NDArray[np.int32]) -> None:
        """Copy whole blocks, in every storage slot. All sources are read before any destination is written."""
        ...
