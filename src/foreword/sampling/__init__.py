"""Convert logits to tokens: masks and processors, the draw, and the verification of drafts."""

from foreword.sampling.failures import BadLogitsError, GrammarStoppedError, NoTokenLeftError
from foreword.sampling.forced import GivenTokens
from foreword.sampling.logprobs import Logprob, TokenLogprobs, token_logprobs
from foreword.sampling.masks import Grammar, TokenMasks, token_masks
from foreword.sampling.noise import gumbel_noise
from foreword.sampling.processors import LogitsProcessor, Processors, StepSampling
from foreword.sampling.reference import kept_tokens
from foreword.sampling.rows import LogitRows, RowValues
from foreword.sampling.sampler import Sampled, Sampler
from foreword.sampling.verification import accepted_tokens
from foreword.seeds import derived_seed

__all__ = [
    "BadLogitsError", "GivenTokens", "Grammar", "GrammarStoppedError", "LogitRows", "LogitsProcessor", "Logprob",
    "NoTokenLeftError", "Processors", "RowValues", "Sampled", "Sampler", "StepSampling", "TokenLogprobs", "TokenMasks",
    "accepted_tokens", "derived_seed", "gumbel_noise", "kept_tokens", "token_logprobs", "token_masks",
]  # fmt: skip
