"""Requests with sampling parameters, their batches, and the sampler's definition in plain loops."""

import math
import statistics
from collections.abc import Sequence

import numpy as np

from foreword.batch import (
    InputBuffers,
    KVGroup,
    NewRequest,
    RequestStates,
    SamplingParams,
    prepare_inputs,
    sampling_metadata,
)
from foreword.sampling import Processors, Sampler, gumbel_noise
from foreword.sampling.noise import uniform_noise

V = 50
END = 0


class Rig:
    """One request per entry of ``params``, named "0", "1", …, each to be sampled after its last known token."""

    def __init__(
        self, *params: SamplingParams, prompt=(1, 2, 3), output=(), drafts: int = 0, computed=None, custom=()
    ) -> None:
        self.states = RequestStates(
            max_num_reqs=8,
            max_model_len=32,
            vocab_size=V,
            kv_groups=[KVGroup(block_size=32)],
            max_num_draft_tokens=drafts,
        )
        self.buffers = InputBuffers.for_states(self.states, 64)
        self.sampler = Sampler()
        self.processors = Processors(self.states, [make(self.states) for make in custom], eos_token_ids=[END])
        for i, p in enumerate(params):
            self.add(str(i), p, prompt, output, computed)

    def add(self, req_id: str, params: SamplingParams | None, prompt=(1, 2, 3), output=(), computed=None) -> None:
        if computed is None:
            computed = len(prompt) + len(output) - 1
        block = self.states.max_num_reqs - len(self.states)
        self.states.add_request(NewRequest(req_id, list(prompt), [[block]], list(output), computed, params))

    def batch(self, drafts=None, counts=None):
        drafts = drafts or {}
        counts = counts or {r: 1 + len(drafts.get(r, ())) for r in self.states.req_ids}
        return prepare_inputs(self.states, counts, self.buffers, draft_tokens=drafts)

    def sampling(self, batch, masks=None):
        self.processors.update()
        return self.processors.step(sampling_metadata(batch), masks)

    def draw(self, logits: np.ndarray, drafts=None, counts=None, masks=None):
        batch = self.batch(drafts, counts)
        return self.sampler.sample(batch, np.ascontiguousarray(logits, np.float32), self.sampling(batch, masks))


def logits(n: int = 1, seed: int = 0, scale: float = 2.0) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=(n, V)) * scale).astype(np.float32)


# -- the definition


def changed_by_rules(z: list[float], p: SamplingParams, prompt: list[int], output: list[int]) -> list[float]:
    """The row of logits for the token after prompt + output, by the rules of ``p``."""
    f32 = np.float32

    def unless_none_left(change: dict[int, float]) -> list[float]:
        after = [change.get(t, x) for t, x in enumerate(z)]
        return after if any(x > -math.inf for x in after) else z

    if p.allowed_token_ids is not None:
        z = unless_none_left({t: -math.inf for t in range(V) if t not in p.allowed_token_ids})
    z = unless_none_left({t: float(f32(z[t]) + f32(bias)) for t, bias in (p.logit_bias or {}).items()})
    if len(output) < p.min_tokens:
        z = unless_none_left(dict.fromkeys([*p.stop_token_ids, *([] if p.ignore_eos else [END])], -math.inf))
    penalized = list(z)
    for t in range(V):
        x = f32(z[t])
        if t in prompt or t in output:
            r = f32(p.repetition_penalty)
            x = x / r if x > 0 else x * r
        if t in output:
            x -= f32(p.frequency_penalty) * f32(output.count(t)) + f32(p.presence_penalty)
        if p.dry_multiplier > 0 and (m := repeated(t, prompt + output, p)) >= p.dry_allowed_length:
            growth = float(f32(p.dry_base)) ** (m - p.dry_allowed_length)
            x -= f32(min(float(f32(p.dry_multiplier)) * growth, 1e30))
        penalized[t] = float(x)
    z, known = penalized, prompt + output
    ends = [w[-1] for w in p.bad_words_token_ids if known[len(known) - len(w) + 1 :] == list(w[:-1])]
    return unless_none_left(dict.fromkeys(ends, -math.inf))


def repeated(token: int, text: list[int], p: SamplingParams) -> int:
    """The most tokens that end the text and are also before an occurrence of ``token``, behind the last breaker."""
    text = text[max(0, len(text) - p.dry_range) :] if p.dry_range >= 0 else text
    longest = 0
    for i in range(len(text)):
        for m in range(1, i + 1):
            end = text[len(text) - m :]
            if text[i] == token and text[i - m : i] == end and not set(end) & set(p.dry_breaker_token_ids):
                longest = max(longest, m)
    return longest


def nucleus(order: list[int], weight: Sequence[float], top_p: float) -> list[int]:
    """The fewest first tokens of the order that have top_p of its weight together."""
    wanted, reached = top_p * sum(weight[t] for t in order), 0.0
    for count, t in enumerate(order if top_p < 1 else [], 1):
        reached += weight[t]
        if reached >= wanted:
            return order[:count]
    return order


def token_of(z: list[float], p: SamplingParams, position: int) -> int:
    """Temperature, the filters and the draw, on the descending order with lower ids first."""
    if p.temperature == 0:
        return max(range(V), key=lambda t: (z[t], -t))
    scaled = [x / float(np.float32(p.temperature)) for x in z]
    weight = [math.exp(x - max(scaled)) for x in scaled]
    kept = sorted((t for t in range(V) if scaled[t] > -math.inf), key=lambda t: (-scaled[t], t))
    if p.min_p > 0:
        least = max(scaled) + math.log(float(np.float32(p.min_p)))
        kept = [t for t in kept if scaled[t] >= least]
    if p.top_n_sigma > 0:
        least = max(scaled) - float(np.float32(p.top_n_sigma)) * statistics.pstdev(x for x in scaled if x > -math.inf)
        kept = [t for t in kept if scaled[t] >= least]
    if p.top_k:
        kept = kept[: p.top_k]
    kept = nucleus(kept, weight, float(np.float32(p.top_p)))
    if p.typical_p < 1:
        total = sum(weight[t] for t in kept)
        share = {t: weight[t] / total for t in kept}
        entropy = -sum(x * math.log(x) for x in share.values() if x > 0)
        surprise = {t: abs((max(scaled) - scaled[t] + math.log(total)) - entropy) for t in kept}
        typical = nucleus(sorted(kept, key=lambda t: round(surprise[t], 9)), weight, float(np.float32(p.typical_p)))
        kept = [t for t in kept if t in typical]
    if uniform_noise(p.seed, position, np.array([-1]))[0] < float(np.float32(p.xtc_probability)):
        least = float(np.float32(p.xtc_threshold)) * sum(weight[t] for t in kept)
        count = sum(weight[t] >= least for t in kept)
        kept = kept[max(0, count - 1) :]
    noise = gumbel_noise(p.seed, position, np.arange(V))
    return max(kept, key=lambda t: (scaled[t] + noise[t], -t))


def tokens_of(
    rows: np.ndarray, p: SamplingParams, prompt: list[int], output: list[int], drafts: list[int]
) -> list[int]:
    """Return what a request draws from its rows of logits [1 + drafts, V], up to the first draft that is not drawn."""
    drawn: list[int] = []
    for j, z in enumerate(rows):
        before = output + drafts[:j]
        changed = changed_by_rules([float(x) for x in z], p, prompt, before)
        drawn.append(token_of(changed, p, len(prompt) + len(before)))
        if j == len(drafts) or drafts[j] != drawn[j]:
            break
    return drawn
