"""How long a step takes."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path

import numpy as np

from foreword.arrays import Floats, Ints
from foreword.errors import ConfigError


@dataclass(frozen=True, slots=True)
class CostModel:
    """seconds(step) = step + token · scheduled tokens + context · Σ tokens of context of the requests of the step.

    The defaults are of the order of an 8B model on one datacentre GPU.
    """

    step: float = 8e-3
    token: float = 4e-5
    context: float = 1.5e-8

    def __post_init__(self) -> None:
        if not (self.step >= 0 and self.token >= 0 and self.context >= 0):
            raise ConfigError(f"{self}: costs must be 0 or more")

    def seconds(self, num_tokens: int, num_context_tokens: int) -> float:
        return self.step + self.token * num_tokens + self.context * num_context_tokens

    @classmethod
    def fitted(cls, num_tokens: Ints, num_context_tokens: Ints, seconds: Floats) -> CostModel:
        """The coefficients ≥ 0 with the least squares of the relative errors, for measured steps [N]."""
        measured = np.asarray(seconds, np.float64)
        columns = np.stack([np.ones(len(measured)), num_tokens, num_context_tokens], 1) / measured[:, None]
        best, least = np.zeros(3), float(len(measured))
        for count in (1, 2, 3):
            for chosen in map(list, combinations(range(3), count)):  # those that are not 0
                scale = np.maximum(columns[:, chosen].max(0), 1e-300)
                fit = np.linalg.lstsq(columns[:, chosen] / scale, np.ones(len(measured)), rcond=None)[0] / scale
                error = float(((columns[:, chosen] @ fit - 1) ** 2).sum())
                if fit.min() >= 0 and error < least:
                    best, least = np.zeros(3), error
                    best[chosen] = fit
        return cls(*best.tolist())

    def error(self, num_tokens: Ints, num_context_tokens: Ints, seconds: Floats) -> float:
        """The mean relative error over measured steps."""
        said = self.step + self.token * num_tokens + self.context * num_context_tokens
        return float(np.abs(said / seconds - 1).mean())

    def write(self, path: str | Path, **about: object) -> None:
        """Save it as JSON for `read`, with the description ``about``."""
        Path(path).write_text(json.dumps({**asdict(self), **about}, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: str | Path) -> CostModel:
        """What `write` saved. ConfigError for anything else."""
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
            values = [float(found[name]) for name in ("step", "token", "context")]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"cost model {path}: {error!r}; make one with `foreword calibrate`") from None
        if not all(0 <= value < float("inf") for value in values) or not any(values):
            raise ConfigError(
                f"cost model {path}: costs {values}: must be 0 or more, not all 0; use `foreword calibrate`"
            )
        return cls(*values)
