"""Predict the time of a step."""

from __future__ import annotations

import json
import reprlib
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from foreword.arrays import Floats, Ints
from foreword.errors import ConfigError
from foreword.jsonfile import read_object

MAX_COST = 1e6
"""Limit of each cost, in seconds: far above any real one, and the simulated time stays finite."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """seconds(step) = step + token · scheduled tokens + context · Σ tokens of context of the requests of the step.

    The defaults are of the order of an 8B model on one datacentre GPU.
    """

    step: float = 8e-3
    token: float = 4e-5
    context: float = 1.5e-8

    def __post_init__(self) -> None:
        if not all(_is_cost(value) for value in (self.step, self.token, self.context)):
            raise ConfigError(f"{self}: step, token and context must be in [0, {MAX_COST:g}] seconds")

    def seconds(self, num_tokens: int, num_context_tokens: int) -> float:
        return self.step + self.token * num_tokens + self.context * num_context_tokens

    @classmethod
    def fitted(cls, num_tokens: Ints, num_context_tokens: Ints, seconds: Floats) -> CostModel:
        """Return the coefficients ≥ 0 that minimise the sum of squared relative errors, for measured steps [N]."""
        measured = np.asarray(seconds, np.float64)
        columns = np.stack([np.ones(len(measured)), num_tokens, num_context_tokens], 1) / measured[:, None]
        best, least = np.zeros(3), float(len(measured))
        for count in (1, 2, 3):
            for chosen in map(list, combinations(range(3), count)):  # the coefficients that are not 0
                scale = np.maximum(columns[:, chosen].max(0), 1e-300)
                fit = np.linalg.lstsq(columns[:, chosen] / scale, np.ones(len(measured)), rcond=None)[0] / scale
                error = float(((columns[:, chosen] @ fit - 1) ** 2).sum())
                if fit.min() >= 0 and error < least:
                    best, least = np.zeros(3), error
                    best[chosen] = fit
        return cls(*best.tolist())

    def error(self, num_tokens: Ints, num_context_tokens: Ints, seconds: Floats) -> float:
        """Return the mean relative error over measured steps."""
        said = self.step + self.token * num_tokens + self.context * num_context_tokens
        return float(np.abs(said / seconds - 1).mean())

    def write(self, path: str | Path, **about: object) -> None:
        """Save the model as JSON for `read`, with the description ``about``."""
        Path(path).write_text(json.dumps({**asdict(self), **about}, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: str | Path) -> CostModel:
        """Return a model that `write` saved. Raise ConfigError if the file is something else."""
        found = read_object(Path(path), ConfigError)
        values: list[Any] = [found.get(name) for name in ("step", "token", "context")]
        if not all(map(_is_cost, values)) or not any(values):
            raise ConfigError(
                f"cost model {path}: step, token, context = {reprlib.repr(values)}: must be seconds in "
                f"[0, {MAX_COST:g}], not all 0; make one with `foreword calibrate`"
            )
        return cls(*values)


def _is_cost(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= MAX_COST
