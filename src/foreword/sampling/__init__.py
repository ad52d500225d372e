"""From logits to tokens: what may be drawn, the draw itself, and the verification of drafts."""

from foreword.sampling.filters import kept_tokens
from foreword.sampling.logprobs import Logprob, TokenLogprobs, token_logprobs
from foreword.sampling.noise import derived_seed, gumbel_noise
from foreword.sampling.processors import Processors
from foreword.sampling.sampler import Sampled, Sampler
from foreword.sampling.verification import accepted_tokens

__all__ = [
    "Logprob",
    "Processors",
    "Sampled",
    "Sampler",
    "TokenLogprobs",
    "accepted_tokens",
    "derived_seed",
    "gumbel_noise",
    "kept_tokens",
    "token_logprobs",
]
