"""The draw: one token for each row of logits, by temperature, min-p, top-k and top-p alone."""

from __future__ import annotations

import numpy as np

from foreword.arrays import F32, I32, I64
from foreword.batch.state.sampling_columns import SamplingColumns
from foreword.native import available, native
from foreword.sampling.filters import kept_tokens
from foreword.sampling.noise import gumbel_noise


def draw_tokens(
    logits: F32, columns: SamplingColumns, rows: I32, positions: I64, threads: native.CpuModel | None = None
) -> I32:
    """Draw from logits [N, V], int32 [N]. Row i has the parameters of state row rows[i]; its token takes positions[i].

        temperature 0    argmax of the logits
        else             argmax over the kept tokens of logits / temperature + noise(seed, position, token)

    with `kept_tokens` and `gumbel_noise`. Among equals the lowest id wins. −1 for a row with NaN or +∞, and one of −∞
    alone. Runs in native code where that is built.

    threads: the model whose idle threads draw too. The tokens are the same without.
    """
    if available():
        drawn: I32 = np.empty(len(logits), np.int32)
        native.sample(
            logits,
            columns.temperature,
            columns.top_k,
            columns.top_p,
            columns.min_p,
            columns.seed,
            positions,
            rows,
            drawn,
            threads,
        )
        return drawn
    can_choose = np.isfinite(logits.max(axis=1))
    drawn = np.where(can_choose, logits.argmax(axis=1), -1).astype(np.int32)
    for i in np.flatnonzero(can_choose & (columns.temperature.take(rows) > 0)).tolist():
        row = rows[i]
        scaled = logits[i].astype(np.float64) / float(columns.temperature[row])
        kept = kept_tokens(
            scaled,
            top_k=int(columns.top_k[row]),
            top_p=float(columns.top_p[row]),
            min_p=float(columns.min_p[row]),
        )
        drawn[i] = kept[(scaled[kept] + gumbel_noise(int(columns.seed[row]), int(positions[i]), kept)).argmax()]
    return drawn
