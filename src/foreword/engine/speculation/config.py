"""The settings of speculative decoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from foreword.errors import ConfigError

Method = Literal["ngram", "suffix", "draft_model"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig:
    """Draft the next tokens cheaply, and verify all drafts in one step. The output is the same with and without.

    method: "ngram" searches prompt and output for an earlier occurrence of the last tokens and proposes what followed;
        "suffix" searches the output alone; "draft_model" runs a small model with the same vocabulary.
    num_tokens: most drafts of a request in a step. min_match, max_match: fewest and most tokens of a match.
    adaptive: adapt the number of drafts to their acceptance, down to none; see `DraftLengths`.
    step_overhead: the cost of a small step apart from its tokens, in tokens: the time to read the weights over the time
        per further token. In a checkout, `python benchmarks speculation` measures it.
    saturated_cost: the cost of a token in a step so large that arithmetic takes longer than reading the weights,
        in tokens of a small step.
    model: the draft model's name, for "draft_model".
    """

    method: Method = "ngram"
    num_tokens: int = 4
    min_match: int = 2
    max_match: int = 4
    adaptive: bool = True
    step_overhead: float = 18.0
    saturated_cost: float = 2.8
    model: str | None = None

    def __post_init__(self) -> None:
        if self.method not in ("ngram", "suffix", "draft_model"):
            raise ConfigError(f"method={self.method!r}: must be 'ngram', 'suffix' or 'draft_model'")
        if self.num_tokens < 1:
            raise ConfigError(f"num_tokens={self.num_tokens}: must be at least 1")
        if self.step_overhead < 0:
            raise ConfigError(f"step_overhead={self.step_overhead}: must be at least 0")
        if self.saturated_cost < 1:
            raise ConfigError(f"saturated_cost={self.saturated_cost}: must be at least 1")
        if not 1 <= self.min_match <= self.max_match:
            raise ConfigError(f"min_match={self.min_match}, max_match={self.max_match}: need 1 ≤ min_match ≤ max_match")
        if (self.method == "draft_model") != (self.model is not None):
            raise ConfigError(
                f"model={self.model!r} with method={self.method!r}: a draft model goes with 'draft_model'"
            )
