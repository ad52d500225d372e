"""The rules and counts that native code keeps by row follow the requests and their texts."""

import numpy as np
import pytest
from sampling_rig import Rig, V, logits, tokens_of

from foreword.batch import SamplingParams
from foreword.native import available

pytestmark = pytest.mark.skipif(not available(), reason="the reference keeps no counts")


def some_params(rng: np.random.Generator) -> SamplingParams:
    def maybe(value, otherwise):
        return value if rng.random() < 0.5 else otherwise

    return SamplingParams(
        temperature=maybe(0.0, 1.0),
        seed=int(rng.integers(1000)),
        repetition_penalty=maybe(1.5, 1.0),
        frequency_penalty=maybe(0.7, 0.0),
        presence_penalty=maybe(-0.4, 0.0),
        dry_multiplier=maybe(2.0, 0.0),
        logit_bias=maybe({int(rng.integers(V)): 4.0}, None),
        bad_words_token_ids=maybe([[1, 2], [int(rng.integers(V))]], ()),
        min_tokens=maybe(3, 0),
        max_tokens=None,
    )


def known(rig: Rig, rid: str) -> tuple[list[int], list[int]]:
    """The prompt and the output of a request."""
    states, row = rig.states, rig.states.row_of(rid)
    tokens, prompt_len = states.token_ids[row, : states.num_tokens[row]].tolist(), int(states.prompt_len[row])
    return tokens[:prompt_len], tokens[prompt_len:]


@pytest.mark.parametrize("seed", range(12))
def test_steps_of_requests_that_come_go_move_and_roll_back_are_those_of_their_texts(seed: int):
    rng = np.random.default_rng(seed)
    rig, params, count = Rig(drafts=3), {}, 0
    for _ in range(60):
        states = rig.states
        match rng.choice(["add", "remove", "swap", "condense", "rewrite", "set", "step", "step", "step", "step"]):
            case "add" if len(states) < 6:
                name, params[f"r{count}"] = f"r{count}", some_params(rng)
                prompt, output = rng.integers(0, 5, 3).tolist(), rng.integers(0, 5, rng.integers(3)).tolist()
                rig.add(name, params[name], prompt, output)
                count += 1
            case "remove" if len(states):
                states.remove_request(str(rng.choice(states.req_ids)))
            case "swap":
                states.swap_rows(int(rng.integers(8)), int(rng.integers(8)))
            case "condense":
                states.condense()
            case "rewrite" if len(states):  # as a draft model's states are rewritten: tokens not yet computed
                row = states.row_of(str(rng.choice(states.req_ids)))
                first = max(int(states.prompt_len[row]), int(states.num_tokens[row]) - int(rng.integers(1, 4)))
                end = min(first + int(rng.integers(0, 3)), 31)
                end = max(end, int(states.prompt_len[row]))
                states.num_computed_tokens[row] = min(first, end - 1, int(states.num_computed_tokens[row]))
                states.token_ids[row, first:end] = rng.integers(0, 5, end - first)
                states.num_tokens[row] = end
                states.last_sampled_token[row] = states.token_ids[row, end - 1]
            case "set" if len(states):
                rid = str(rng.choice(states.req_ids))
                value = float(rng.choice([0.0, 1.25]))
                columns = {"frequency_penalty": np.array([value], np.float32)}
                states.sampling.set_columns(np.array([states.row_of(rid)], np.int32), columns)
                params[rid] = SamplingParams(**{**as_dict(params[rid]), "frequency_penalty": value})
            case "step" if len(states):
                step(rig, params, rng)
            case _:
                pass
        for rid in states.req_ids:
            if states.num_tokens[states.row_of(rid)] > 26:
                states.remove_request(rid)


def as_dict(params: SamplingParams) -> dict[str, object]:
    return {name: getattr(params, name) for name in params.__slots__}


def step(rig: Rig, params: dict[str, SamplingParams], rng: np.random.Generator) -> None:
    """Compute all of some requests, with drafts, and compare with the definition."""
    chosen = [rid for rid in rig.states.req_ids if rng.random() < 0.8]
    if not chosen:
        return
    drafts, counts = {}, {}
    for rid in chosen:
        row = rig.states.row_of(rid)
        drafts[rid] = rng.integers(0, 5, rng.integers(0, 4)).tolist()
        left = int(rig.states.num_tokens[row] - rig.states.num_computed_tokens[row])
        counts[rid] = left + len(drafts[rid])
        if left > 1 and rng.random() < 0.4:  # a part of what was rolled back
            drafts[rid], counts[rid] = [], left - 1
    batch = rig.batch(drafts, counts)
    z = logits(len(batch.logits_indices), int(rng.integers(1000)))
    z[:, :5] += 3
    sampled = rig.sampler.sample(batch, z, rig.sampling(batch))
    table = sampled.token_ids.reshape(len(chosen), -1)
    for b, rid in enumerate(chosen):
        row = rig.states.row_of(rid)
        if rig.states.num_computed_tokens[row] + counts[rid] >= rig.states.num_tokens[row]:
            rows = z[batch.cu_num_logits[b] : batch.cu_num_logits[b + 1]]
            wanted = tokens_of(rows, params[rid], *known(rig, rid), drafts[rid])
            assert [t for t in table[b].tolist() if t >= 0] == wanted
    rig.states.commit(batch, sampled.token_ids)
