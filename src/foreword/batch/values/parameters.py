"""The facts in the table of sampling parameters besides their declarations. Its rows are the fields of
`SamplingParams`.

`foreword.batch.values.sampling_params.PARAMETERS` lists them. Code that needs a fact of each parameter loops over it:
the
conversions, checks and messages of `SamplingParams`, the columns of the states and their flags, the specification, the
command line, the bodies of requests, docs/sampling-parameters.md, and, held by a test, the arrays of native code.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntFlag
from typing import Any, NamedTuple

import numpy as np

from foreword.declared import Declared


class Need(IntFlag):
    """The operations that the sampling of a row needs. A step skips operations that none of its rows needs."""

    GREEDY = 1  # temperature 0
    RANDOM = 2
    TOP_P = 4
    TOP_K = 8
    MIN_P = 16
    PENALTIES = 32
    LOGPROBS = 64
    PROMPT_LOGPROBS = 128
    MIN_TOKENS = 256
    LOGIT_BIAS = 512
    BAD_WORDS = 1024
    ALLOWED_TOKENS = 2048
    STRUCTURED_OUTPUT = 4096
    TYPICAL_P = 8192
    TOP_N_SIGMA = 16384
    XTC = 32768
    DRY = 65536


RARE = Need.MIN_TOKENS | Need.LOGIT_BIAS | Need.BAD_WORDS | Need.ALLOWED_TOKENS | Need.STRUCTURED_OUTPUT | Need.DRY
"""The flags of rows whose parameters object is read, because the columns do not hold all of their parameters."""

CHANGING = Need.ALLOWED_TOKENS | Need.LOGIT_BIAS | Need.MIN_TOKENS | Need.PENALTIES | Need.DRY | Need.BAD_WORDS
"""The flags of rows whose logits are changed by their own rules before the draw."""

COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    ">": operator.gt,
    "<": operator.lt,
    "!=": operator.ne,
    "not >": lambda x, y: ~(x > y),  # true of NaN
}


class Column(NamedTuple):
    """The array [R] that holds a parameter for every state row.

    dtype: the type of the array. need: the flag of the rows whose sampling reads it. sets_need: the comparison with
    ``neutral`` (a key of `COMPARISONS`) that gives a row the flag; None: the flag follows from another column.
    neutral: the value of a row without parameters. name: the name of the array; "": that of the parameter.
    """

    dtype: type[np.generic]
    need: Need
    sets_need: str | None
    neutral: float
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter(Declared):
    """A row of the table. need: for a parameter without a column, the flag of rows for which a value is given."""

    need: Need | None = None
    column: Column | None = None
