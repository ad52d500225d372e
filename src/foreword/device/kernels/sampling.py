"""Turn logits into the tokens of a step (K5): penalties, the draw, verified drafts. `foreword.sampling.reference`
defines each of them; a draw is a function of (seed, position, logits) here as there.
"""

import triton
import triton.language as tl

from foreword.batch import Need
from foreword.device import layout
from foreword.device.kernels.places import (
    PACKET_NUM_REQS,
    PACKET_NUM_REQS_PADDED,
    ROW_FREQUENCY_PENALTY,
    ROW_MIN_P,
    ROW_NEEDS,
    ROW_NUM_COMPUTED_TOKENS,
    ROW_NUM_TOKENS,
    ROW_PRESENCE_PENALTY,
    ROW_PROMPT_LEN,
    ROW_REPETITION_PENALTY,
    ROW_SEED,
    ROW_SEED_HIGH,
    ROW_TEMPERATURE,
    ROW_TOP_K,
    ROW_TOP_P,
    plan_of,
)

NO_TOKEN = tl.constexpr(layout.NO_TOKEN)
PENALTIES = tl.constexpr(int(Need.PENALTIES))
OF_PROMPT = tl.constexpr(1 << 30)
POSSIBLE = tl.constexpr(-2139095040)  # the lowest key of a logit that is not −∞


@triton.jit
def parameter(record, entry):
    """Return a float of a row's record."""
    return tl.load(record + entry).to(tl.float32, bitcast=True)


@triton.jit
def mix(x):
    """Return `foreword.seeds.mix64` of a number."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def ordered(x):
    """Return int32 that compare as the floats do; equal zeros are equal."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def unordered(key):
    """Return the float32 that `ordered` maps to ``key``."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def weigh(logits, vocab_size, least, top, temperature, BLOCK: tl.constexpr):
    """Return the number of tokens whose key is at least ``least``, and Σ exp((x − top) / temperature) over them."""
    count = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.float64)
    for j in range(0, vocab_size, BLOCK):
        i = j + tl.arange(0, BLOCK)
        x = tl.load(logits + i, mask=i < vocab_size, other=float("-inf")).to(tl.float32)
        kept = (ordered(x) >= least) & (i < vocab_size)
        count += kept.to(tl.int32)
        mass += tl.where(kept, tl.exp((x.to(tl.float64) - top) / temperature), 0.0)
    return tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit(do_not_specialize=["num_logits"])  # it differs from step to step: one compilation serves all
def penalize(
    state, tokens, packet, max_model_len, records_at, record_size, expanded_idx_mapping, expanded_local_pos,
    cu_num_logits, logits, counts, num_logits, vocab_size, BLOCK: tl.constexpr,
):  # fmt: skip
    """Apply repetition, frequency and presence penalties, in place, to the rows that have any. Any grid (programs,).

    logits: float32 [num_logits, V]. counts: int32 [programs, V], memory that is overwritten.
    """
    counts += tl.program_id(0).to(tl.int64) * vocab_size
    at = tl.program_id(0).to(tl.int64)
    while at < num_logits:
        row = tl.load(expanded_idx_mapping + at)
        record = state + records_at + tl.maximum(row, 0).to(tl.int64) * record_size
        if (row >= 0) & ((tl.load(record + ROW_NEEDS) & PENALTIES) != 0):
            penalized = logits + at * vocab_size
            for j in range(0, vocab_size, BLOCK):
                i = j + tl.arange(0, BLOCK)
                tl.store(counts + i, tl.zeros([BLOCK], tl.int32), mask=i < vocab_size)
            tl.debug_barrier()
            known = tl.load(record + ROW_NUM_TOKENS)
            prompt = tl.load(record + ROW_PROMPT_LEN)
            of_row = tokens + row.to(tl.int64) * max_model_len
            for j in range(0, known, BLOCK):
                i = j + tl.arange(0, BLOCK)
                token = tl.load(of_row + i, mask=i < known, other=-1)
                is_token = token >= 0  # not a prompt embedding
                tl.atomic_or(counts + token, OF_PROMPT, mask=is_token & (i < prompt))
                tl.atomic_add(counts + token, 1, mask=is_token & (i >= prompt))
            _, _, _, _, drafts = plan_of(packet)
            before = tl.load(expanded_local_pos + at)
            low = 0
            high = tl.load(packet + PACKET_NUM_REQS)
            while low < high:  # the number of requests whose first row of logits is at most this one
                middle = (low + high) // 2
                is_past = tl.load(cu_num_logits + middle) <= at
                low = tl.where(is_past, middle + 1, low)
                high = tl.where(is_past, high, middle)
            first = tl.load(cu_num_logits + low - 1) - low + 1  # drafts of the requests before
            for j in range(before):
                tl.atomic_add(counts + tl.load(drafts + first + j), 1)
            tl.debug_barrier()
            repetition = parameter(record, ROW_REPETITION_PENALTY)
            frequency = parameter(record, ROW_FREQUENCY_PENALTY)
            presence = parameter(record, ROW_PRESENCE_PENALTY)
            for j in range(0, vocab_size, BLOCK):
                i = j + tl.arange(0, BLOCK)
                seen = tl.load(
                    counts + i, mask=i < vocab_size, other=0, cache_modifier=".cg"
                )  # atomics are in the second cache
                x = tl.load(penalized + i, mask=i < vocab_size, other=0.0)
                times = (seen & (OF_PROMPT - 1)).to(tl.float32)
                x = tl.where(seen != 0, tl.where(x > 0, tl.div_rn(x, repetition), x * repetition), x)
                x = tl.where(times > 0, x - (frequency * times + presence), x)
                tl.store(penalized + i, x, mask=(i < vocab_size) & (seen != 0))
            tl.debug_barrier()  # the counts are read before the next row's are written
        at += tl.num_programs(0)


@triton.jit
def draw_tokens(
    state, records_at, record_size, expanded_idx_mapping, logits_indices, positions, logits, drawn, vocab_size,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Set drawn[i] to the token of a row of logits; −1 where one is NaN or the largest infinite. Grid (logits rows,).

    At temperature 0 it is the likeliest, otherwise the argmax of logits / temperature + Gumbel noise, in float64, over
    what min_p, top_k and top_p keep: all of them keep the first tokens in the order (likeliest, lowest id), so that a
    key of a logit, and how many tokens with this key, say which. No vocabulary is sorted: a key is found by bisection.
    logits: [L, V], any float type. expanded_idx_mapping −1: no row, drawn −1.
    """
    at = tl.program_id(0).to(tl.int64)
    row = tl.load(expanded_idx_mapping + at)
    record = state + records_at + tl.maximum(row, 0).to(tl.int64) * record_size
    logits += at * vocab_size
    token = -1
    if row >= 0:
        best = tl.full([BLOCK], float("-inf"), tl.float32)
        best_at = tl.zeros([BLOCK], tl.int32)
        bad = tl.zeros([BLOCK], tl.int32)
        for j in range(0, vocab_size, BLOCK):
            i = j + tl.arange(0, BLOCK)
            x = tl.load(logits + i, mask=i < vocab_size, other=float("-inf")).to(tl.float32)
            bad |= (x != x).to(tl.int32)
            best_at = tl.where(x > best, i, best_at)
            best = tl.where(x > best, x, best)
        top = tl.max(best, 0)
        valid = (tl.max(bad, 0) == 0) & (tl.abs(top) < float("inf"))
        temperature = parameter(record, ROW_TEMPERATURE).to(tl.float64)
        if valid:
            if temperature > 0:
                top64 = top.to(tl.float64)
                top_key = ordered(top)
                least = top_key * 0 + POSSIBLE
                ties = vocab_size  # how many of the tokens with the key `least`
                min_p = parameter(record, ROW_MIN_P).to(tl.float64)
                if min_p > 0:
                    low = least
                    high = top_key
                    while low < high:  # the lowest key whose logit, divided by the temperature, reaches the floor
                        middle = low + ((high.to(tl.int64) - low) // 2).to(tl.int32)
                        reaches = unordered(middle).to(tl.float64) / temperature >= top64 / temperature + tl.log(min_p)
                        low = tl.where(reaches, low, middle + 1)
                        high = tl.where(reaches, middle, high)
                    least = low
                count, mass = weigh(logits, vocab_size, least, top64, temperature, BLOCK)
                k = tl.load(record + ROW_TOP_K)
                if (k > 0) & (k < count):
                    low = least
                    high = top_key
                    while low < high:  # the highest key that k tokens reach
                        middle = high - ((high.to(tl.int64) - low) // 2).to(tl.int32)
                        reached, _ = weigh(logits, vocab_size, middle, top64, temperature, BLOCK)
                        low = tl.where(reached >= k, middle, low)
                        high = tl.where(reached >= k, high, middle - 1)
                    least = low
                    above, mass = weigh(logits, vocab_size, least + 1, top64, temperature, BLOCK)
                    ties = k - above
                    mass += ties * tl.exp((unordered(least).to(tl.float64) - top64) / temperature)
                top_p = parameter(record, ROW_TOP_P).to(tl.float64)
                if top_p < 1:
                    wanted = top_p * mass
                    low = least
                    high = top_key
                    while low < high:  # the highest key whose tokens have the share; `least` has it
                        middle = high - ((high.to(tl.int64) - low) // 2).to(tl.int32)
                        _, reached = weigh(logits, vocab_size, middle, top64, temperature, BLOCK)
                        low = tl.where(reached >= wanted, middle, low)
                        high = tl.where(reached >= wanted, high, middle - 1)
                    above, reached = weigh(logits, vocab_size, low + 1, top64, temperature, BLOCK)
                    each = tl.exp((unordered(low).to(tl.float64) - top64) / temperature)
                    missing = tl.maximum(tl.ceil((wanted - reached) / each), 1.0).to(tl.int32)
                    ties = tl.minimum(tl.where(low > least, vocab_size, ties), missing)
                    least = low
                seed = tl.load(record + ROW_SEED).to(tl.int64) & 0xFFFFFFFF
                seed = seed | (tl.load(record + ROW_SEED_HIGH).to(tl.int64) << 32)
                position = tl.load(positions + tl.load(logits_indices + at)) + 1
                highest = tl.full([BLOCK], float("-inf"), tl.float64)
                best_at = tl.zeros([BLOCK], tl.int32)
                passed = 0
                for j in range(0, vocab_size, BLOCK):
                    i = j + tl.arange(0, BLOCK)
                    x = tl.load(logits + i, mask=i < vocab_size, other=float("-inf")).to(tl.float32)
                    key = ordered(x)
                    is_tie = (key == least) & (i < vocab_size)
                    nth = passed + tl.cumsum(is_tie.to(tl.int32), 0)
                    passed += tl.sum(is_tie.to(tl.int32), 0)
                    kept = ((key > least) | (is_tie & (nth <= ties))) & (i < vocab_size)
                    hash = tl.zeros([BLOCK], tl.uint64) + seed.to(tl.uint64, bitcast=True)
                    hash += (tl.zeros([BLOCK], tl.uint64) + position.to(tl.uint64, bitcast=True)) * 0x9E3779B97F4A7C15
                    hash = mix(hash + i.to(tl.uint64) * 0xBF58476D1CE4E5B9)
                    uniform = ((hash >> 40).to(tl.float64) + 0.5) * 5.9604644775390625e-08
                    score = x.to(tl.float64) / temperature - tl.log(-tl.log(uniform))
                    better = kept & (score > highest)
                    best_at = tl.where(better, i, best_at)
                    highest = tl.where(better, score, highest)
                token = tl.min(tl.where(highest == tl.max(highest, 0), best_at, vocab_size), 0)
            else:
                token = tl.min(tl.where(best == top, best_at, vocab_size), 0)
    tl.store(drawn + at, token)


@triton.jit
def verify_drafts(
    state, packet, records_at, record_size, cu_num_logits, drawn, sampled, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """Set sampled[b] to the tokens of request b up to the first whose draft differs, padded with −1; NO_TOKEN first
    where a request that samples has none. Grid (ceil(Bp / BLOCK),). sampled: int32 [Bp, WIDTH].
    """
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = b < tl.load(packet + PACKET_NUM_REQS)
    reqs = tl.load(packet + PACKET_NUM_REQS_PADDED)
    rows, query_start, cu_drafts, _, drafts = plan_of(packet)
    row = tl.load(rows + b, mask=real, other=-1)
    record = state + records_at + tl.maximum(row, 0).to(tl.int64) * record_size
    n = tl.load(query_start + b + 1, mask=real, other=0) - tl.load(query_start + b, mask=real, other=0)
    first_draft = tl.load(cu_drafts + b, mask=real, other=0)
    k = tl.load(cu_drafts + b + 1, mask=real, other=0) - first_draft
    first = tl.load(cu_num_logits + b, mask=real, other=0)
    known = tl.load(record + ROW_NUM_TOKENS, mask=real, other=0)
    samples = (row >= 0) & (tl.load(record + ROW_NUM_COMPUTED_TOKENS, mask=real, other=0) + n - k >= known)
    reached = real
    for j in tl.static_range(WIDTH):
        token = tl.load(drawn + first + j, mask=reached, other=-1)
        if j == 0:
            token = tl.where(samples & (token < 0), NO_TOKEN, token)
        tl.store(sampled + b * WIDTH + j, token, mask=b < reqs)
        draft = tl.load(drafts + first_draft + j, mask=reached & (j < k), other=-1)
        reached = reached & (j < k) & (token >= 0) & (draft == token)
