"""Speculative decoding: drafters, the number of drafts, and statistics. `foreword.sampling` verifies drafts."""

from foreword.engine.speculation.adaptive import DraftLengths, SpeculationStats
from foreword.engine.speculation.config import SpeculationConfig
from foreword.engine.speculation.costs import Credit, StepCosts
from foreword.engine.speculation.draft_model import DraftModelDrafter
from foreword.engine.speculation.forced import ForcedTokens
from foreword.engine.speculation.head import HeadDrafter
from foreword.engine.speculation.lookup import LookupDrafter
from foreword.engine.speculation.speculation import Drafter, Speculation

__all__ = [
    "Credit", "DraftLengths", "DraftModelDrafter", "Drafter", "ForcedTokens", "HeadDrafter", "LookupDrafter",
    "Speculation", "SpeculationConfig", "SpeculationStats", "StepCosts",
]  # fmt: skip
