"""The settings of speculative decoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from foreword.errors import ConfigError
from foreword.settings import check_settings, setting

Method = Literal["auto", "ngram", "suffix", "draft_model", "head", "custom"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig:
    """Draft the next tokens cheaply, and verify all drafts in one step. The output is the same with and without.

    As options of an engine, ``method`` is ``speculation``, and the others begin with ``speculation_``. Raise
    ConfigError for a value of another type or out of range.
    """

    # fmt: off
    method: Method = setting(
        "ngram", "Draft tokens and verify them in one step. ngram: what followed an earlier occurrence of the last "
        "tokens in prompt and output; suffix: the same in the output alone; draft_model: what a small model with the "
        "same vocabulary proposes; head: what the model's own head for further tokens (MTP) proposes; custom: what the "
        "drafter option proposes; off: none. auto: ngram with the native executor, for models without recurrent "
        "layers, unless async_scheduling is on; else off.",
    )
    num_tokens: int = setting(8, "Largest number of draft tokens of a request in a step.", least=1, most=1024)
    min_match: int = setting(2, "Smallest number of tokens that ngram and suffix match.", least=1, most=64)
    max_match: int = setting(8, "Largest number of tokens that ngram and suffix match.", least=1, most=64)
    adaptive: bool = setting(
        True, "Adapt the number of draft tokens to their acceptance and to the measured time of steps, down to none.",
    )
    step_overhead: float = setting(
        18.0, "First estimate, before steps are measured: cost of a small step apart from its tokens, in tokens: the "
        "time to read the weights divided by the time per further token.", most=1e6,
    )
    saturated_cost: float = setting(
        2.8, "First estimate: cost of a token in a step so large that arithmetic takes longer than reading the "
        "weights, relative to a token of a small step.", least=1, most=1e6,
    )
    model: str | None = setting(
        None, "The draft model, for draft_model: any model name.", unit="path", value_name="MODEL"
    )
    # fmt: on

    def __post_init__(self) -> None:
        check_settings(self)
        if self.min_match > self.max_match:
            raise ConfigError(
                f"speculation_min_match={self.min_match}, speculation_max_match={self.max_match}: need min_match ≤ "
                "max_match"
            )
        if (self.method == "draft_model") != (self.model is not None):
            raise ConfigError(
                f"speculation_model={self.model!r} with speculation={self.method!r}: a draft model goes with "
                "'draft_model'; give both, or neither"
            )
