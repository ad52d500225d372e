"""MXFP4: w = 2^(scale − 127) · e2m1, with a scale per 32 columns, as a GGUF file has them: `Quant.MXFP4`.

NAME_blocks [..., out, in / 32, 16] has the bits of two columns in a byte, the first in the low nibble; NAME_scales
[..., out, in / 32] the scales, in bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from foreword.arrays import U8
from foreword.errors import ModelError
from foreword.models.config import Config
from foreword.models.files import StoredRows
from foreword.models.quantized.matrix import SAME_MODEL, Found, part
from foreword.models.quants import Quant
from foreword.models.safetensors import Entry
from foreword.models.weights import Tensor

_BLOCKS = "_blocks"


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Rows in the order of a GGUF file. blocks: rows of 16 bytes, ``groups`` per row; scales: rows of ``groups``."""

    blocks: StoredRows
    scales: StoredRows
    groups: int

    @property
    def nbytes(self) -> int:
        return len(self) * self.groups * Quant.MXFP4.block_bytes

    def __len__(self) -> int:
        return len(self.scales)

    def __getitem__(self, rows: slice) -> _Rows:
        start, stop, _ = rows.indices(len(self))
        return _Rows(self.blocks[start * self.groups : stop * self.groups], self.scales[start:stop], self.groups)

    def read(self) -> U8:
        pairs, scales = self.blocks.read(), self.scales.read().reshape(-1, 1)
        columns = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(-1, 32)
        nibbles = columns[:, :16] | columns[:, 16:] << np.uint8(4)
        return np.concatenate([scales, nibbles], axis=1).reshape(len(self), self.groups * Quant.MXFP4.block_bytes)


def mxfp4_matrices(entries: Mapping[str, Entry], settings: Config, method: str) -> Iterator[Found]:
    """Yield the matrices in MXFP4. Raise ModelError if their tensors do not fit each other."""
    for name, blocks in entries.items():
        if not name.endswith(_BLOCKS) or blocks.dtype != "U8":
            continue
        plain = name.removesuffix(_BLOCKS)
        scales = part(entries, blocks, f"{plain}_scales", "U8")
        if len(blocks.shape) < 3 or blocks.shape[-1] != 16 or scales.shape != blocks.shape[:-1]:
            raise _misfit(blocks, scales)
        yield Found(plain, mxfp4_tensor(blocks, scales), (blocks, scales))


def mxfp4_tensor(blocks: Entry, scales: Entry) -> Tensor:
    """Return a weight of blocks of 16 bytes with a scale each, in any shape. Raise ModelError for other numbers of
    them.
    """
    *outer, groups = scales.shape
    if blocks.rows.nbytes != 16 * scales.rows.nbytes:
        raise _misfit(blocks, scales)
    rows = replace(blocks.rows, num_rows=len(scales.rows) * groups, row_bytes=16)
    return Tensor(_Rows(rows, scales.rows, groups), Quant.MXFP4, (*outer, 32 * groups))


def _misfit(blocks: Entry, scales: Entry) -> ModelError:
    return blocks.error(f"shape {blocks.shape} does not fit scales {scales.shape}", SAME_MODEL)
