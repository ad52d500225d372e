"""Embeddings, multimodal features, M-RoPE, encoder lengths, adapters and pooling, each against a loop over requests."""

from functools import partial

import numpy as np
import pytest
from batch_rig import states_and_buffers

from foreword.batch import (
    KVGroup,
    MultiModalFeature,
    NewRequest,
    RequestError,
    encoder_seq_lens,
    is_token_ids,
    lora_mapping,
    mm_inputs,
    mrope_positions,
    pooling_metadata,
    prepare_inputs,
    prompt_embeds,
    stage_mrope_positions,
)

HIDDEN = 3
make = partial(states_and_buffers, KVGroup(4), length=32, vocab_size=1000)


def blocks(n, start=1):
    return [list(range(start, start + -(-n // 4)))]


def vectors(n, seed):
    return np.random.default_rng(seed).standard_normal((n, HIDDEN)).astype(np.float32)


# -- embeddings


def test_nothing_is_made_for_embeddings_until_a_request_brings_some():
    states, buffers = make()
    states.add_request(NewRequest("a", [1, 2, 3], blocks(3)))
    batch = prepare_inputs(states, {"a": 3}, buffers)
    assert states.extras.is_embedding is None
    assert is_token_ids(batch).all()
    assert prompt_embeds(batch)[0].size == 0


def test_an_embedding_prompt_is_overlaid_chunk_by_chunk_and_its_outputs_are_tokens():
    states, buffers = make()
    embeds = vectors(7, 0)
    states.add_request(NewRequest("a", None, blocks(8), prompt_embeds=embeds))
    states.add_request(NewRequest("b", [5, 6], blocks(2, 10)))
    seen = np.zeros_like(embeds)
    for start, n in ((0, 3), (3, 4)):
        batch = prepare_inputs(states, {"b": 2, "a": n} if start == 0 else {"a": n}, buffers)
        rows, values = prompt_embeds(batch)
        assert not is_token_ids(batch)[rows].any()
        assert is_token_ids(batch).sum() == batch.num_tokens - n
        assert np.array_equal(batch.positions[rows], np.arange(start, start + n))
        seen[start : start + n] = values
        states.commit(batch, {"a": [9]} if start else {"b": [7]})
    assert np.array_equal(seen, embeds)
    batch = prepare_inputs(states, {"a": 1}, buffers)
    assert is_token_ids(batch).all()
    assert batch.input_ids.tolist() == [9]
    assert prompt_embeds(batch)[0].size == 0


def test_mixed_prompts_take_each_position_from_its_own_source():
    states, buffers = make()
    rng = np.random.default_rng(1)
    embeds, ids, mask = vectors(9, 2), rng.integers(1, 1000, 9), rng.random(9) < 0.5
    states.add_request(NewRequest("a", ids, blocks(9), prompt_embeds=embeds, prompt_is_token_id=mask))
    batch = prepare_inputs(states, {"a": 9}, buffers, pad_to=(12, 2))
    table = rng.standard_normal((1000, HIDDEN)).astype(np.float32)
    inputs = table[batch.input_ids]
    rows, values = prompt_embeds(batch)
    inputs[rows] = values
    for p in range(9):
        assert np.array_equal(inputs[p], table[ids[p]] if mask[p] else embeds[p])
    assert is_token_ids(batch).tolist() == [*mask, True, True, True]


def test_a_row_freed_by_embeddings_serves_tokens_next():
    states, buffers = make(rows=1)
    states.add_request(NewRequest("a", None, blocks(4), prompt_embeds=vectors(4, 0)))
    states.remove_request("a")
    states.add_request(NewRequest("b", [1, 2, 3, 4], blocks(4)))
    batch = prepare_inputs(states, {"b": 4}, buffers)
    assert is_token_ids(batch).all()
    assert prompt_embeds(batch)[0].size == 0


@pytest.mark.parametrize(
    "bad",
    [
        {"prompt_token_ids": [1, 2], "prompt_embeds": vectors(3, 0)},
        {"prompt_token_ids": None, "prompt_embeds": vectors(3, 0)[0]},
        {"prompt_token_ids": [1, 2], "prompt_is_token_id": np.ones(2, bool)},
        {"prompt_token_ids": None, "prompt_embeds": vectors(2, 0), "prompt_is_token_id": np.array([True, False])},
        {"prompt_token_ids": [1, 2], "mm_features": [MultiModalFeature("x", 1, 2)]},
        {"prompt_token_ids": [1, 2], "mm_features": [MultiModalFeature("x", 0, 2, np.ones(1, bool))]},
        {"prompt_token_ids": [1, 2], "mrope_positions": np.arange(2)},
    ],
)
def test_features_that_do_not_fit_the_prompt_are_refused_and_change_nothing(bad):
    states, _ = make()
    with pytest.raises(RequestError, match="'a'"):
        states.add_request(NewRequest("a", block_ids=blocks(3), **bad))
    assert len(states) == 0
    assert len(states._directory.free) == 4


# -- multimodal


def test_chunks_that_cut_an_image_read_exactly_their_rows_of_its_encoder_output():
    rng = np.random.default_rng(3)
    for _ in range(30):
        states, buffers = make()
        prompts, sources = {}, {}
        for r in range(3):
            n = int(rng.integers(12, 28))
            cuts = np.sort(rng.choice(np.arange(1, n), 4, replace=False))
            features = [
                MultiModalFeature(f"{r}/0", int(cuts[0]), int(cuts[1] - cuts[0])),
                MultiModalFeature(f"{r}/1", int(cuts[2]), int(cuts[3] - cuts[2]), rng.random(cuts[3] - cuts[2]) < 0.7),
            ]
            outputs = {f.identifier: vectors(f.num_embeds, int(rng.integers(1e6))) for f in features}
            states.add_request(NewRequest(str(r), rng.integers(1, 1000, n), blocks(n, 1 + 8 * r), mm_features=features))
            want = [None] * n  # definition: walk the prompt, one encoder row for each embedded position
            for f in features:
                k = 0
                for i in range(f.length):
                    if f.is_embed is None or f.is_embed[i]:
                        want[f.offset + i] = outputs[f.identifier][k]
                        k += 1
            prompts[str(r)], sources[str(r)] = want, outputs
        done = dict.fromkeys(prompts, 0)
        while any(done[r] < len(prompts[r]) for r in prompts):
            plan = {
                r: int(rng.integers(1, len(prompts[r]) - done[r] + 1)) for r in prompts if done[r] < len(prompts[r])
            }
            batch = prepare_inputs(states, plan, buffers)
            mm = mm_inputs(batch)
            rows = [sources[batch.req_ids[s.batch_index]][s.identifier][s.start : s.stop] for s in mm.slices]
            gathered = np.concatenate(rows) if rows else np.zeros((0, HIDDEN))
            assert len(gathered) == len(mm.token_indices) == mm.is_mm_embed.sum()
            at = dict(zip(mm.token_indices.tolist(), gathered, strict=True))
            for t in range(batch.num_tokens):
                want = prompts[batch.req_ids[batch.req_indices[t]]][batch.positions[t]]
                assert (want is None) == (t not in at)
                assert want is None or np.array_equal(want, at[t])
            assert len(mm.identifiers) == len({s.identifier for s in mm.slices})
            for r, n in plan.items():
                done[r] += n
            states.commit(batch, {r: [1] for r in plan if done[r] == len(prompts[r])})


# -- M-RoPE


def image_positions(before, grid, after):
    """Rotary positions of text, a [t, h, w] image and text, by walking the tokens: the vision-language rule."""
    out, at = [], 0
    for _ in range(before):
        out.append((at, at, at))
        at += 1
    t, h, w = grid
    for i in range(t):
        for j in range(h):
            for k in range(w):
                out.append((at + i, at + j, at + k))
    at += max(grid)
    for _ in range(after):
        out.append((at, at, at))
        at += 1
    return np.array(out).T, at


@pytest.mark.parametrize("num_dims", [2, 3, 4])
def test_text_has_the_same_rotary_position_in_every_dimension(num_dims):
    states, buffers = make()
    states.add_request(NewRequest("a", [1] * 6, blocks(6), num_computed_tokens=2))
    batch = prepare_inputs(states, {"a": 4}, buffers, pad_to=(8, 1))
    got = mrope_positions(batch, num_dims)
    assert got.shape == (num_dims, 8)
    assert got.dtype == np.int64
    assert (got == batch.positions).all()


def test_rotary_positions_cross_an_image_in_chunks_and_go_on_with_the_delta():
    positions, following = image_positions(3, (1, 2, 3), 2)
    n = positions.shape[1]
    states, buffers = make()
    states.add_request(NewRequest("a", [1] * n, blocks(20), mrope_positions=positions, mrope_delta=following - n))
    states.add_request(NewRequest("text", [1] * 4, blocks(4, 10)))
    seen = []
    for chunk in (5, 2, 4):  # the second chunk is inside the image
        batch = prepare_inputs(states, {"text": 4, "a": chunk} if not seen else {"a": chunk}, buffers)
        got = mrope_positions(batch)
        first = batch.query_start_loc[batch.num_reqs - 1]
        seen.append(got[:, first : first + chunk].copy())
        if first:
            assert got[:, :first].tolist() == [[0, 1, 2, 3]] * 3
        states.commit(batch, {"a": [7]} if sum(map(np.size, seen)) == 3 * n else {})
    assert np.array_equal(np.concatenate(seen, 1), positions)
    for step in range(3):
        batch = prepare_inputs(states, {"a": 1}, buffers)
        assert mrope_positions(batch).tolist() == [[following + step]] * 3
        states.commit(batch, {"a": [7]})


def test_rotary_positions_may_come_after_admission_and_leave_with_the_request():
    positions, following = image_positions(2, (1, 2, 2), 1)
    n = positions.shape[1]
    states, buffers = make()
    states.add_request(NewRequest("a", [1] * n, blocks(20), [4]))
    stage_mrope_positions(states, "a", positions, following - n)
    assert mrope_positions(prepare_inputs(states, {"a": n + 1}, buffers)).tolist() == [
        [*row, following] for row in positions.tolist()
    ]
    states.remove_request("a")
    states.add_request(NewRequest("b", [1] * n, blocks(20)))
    assert mrope_positions(prepare_inputs(states, {"b": n}, buffers)).tolist() == [list(range(n))] * 3


def test_a_resumed_request_computes_its_outputs_with_the_delta():
    positions, following = image_positions(2, (1, 2, 2), 1)
    n = positions.shape[1]
    states, buffers = make()
    states.add_request(
        NewRequest("a", [1] * n, blocks(20), [4, 5], mrope_positions=positions, mrope_delta=following - n)
    )
    batch = prepare_inputs(states, {"a": n + 2}, buffers)
    assert mrope_positions(batch)[:, n:].tolist() == [[following, following + 1]] * 3


# -- encoder lengths, adapters


def test_encoder_lengths_hold_in_every_step_and_are_zero_on_padding():
    states, buffers = make()
    states.add_request(NewRequest("a", [1, 2], blocks(8), encoder_len=17))
    states.add_request(NewRequest("b", [1], blocks(1, 9)))
    batch = prepare_inputs(states, {"b": 1, "a": 2}, buffers, pad_to=(3, 4))
    assert encoder_seq_lens(batch).tolist() == [0, 17, 0, 0]
    states.commit(batch, {"a": [5]})
    assert encoder_seq_lens(prepare_inputs(states, {"a": 1}, buffers)).tolist() == [17]


def test_adapters_are_mapped_to_requests_tokens_and_logit_rows():
    states, buffers = make(drafts=2)
    for rid, lora in (("a", 7), ("b", 0), ("c", 3)):
        states.add_request(NewRequest(rid, [1] * 5, blocks(12, 4 * ord(rid)), lora_id=lora, num_computed_tokens=4))
    batch = prepare_inputs(states, {"c": 1, "a": 3, "b": 1}, buffers, draft_tokens={"a": [8, 9]}, pad_to=(8, 4))
    mapping = lora_mapping(batch)
    adapter = {"a": 7, "b": 0, "c": 3}
    assert mapping.requests.tolist() == [adapter[r] for r in batch.req_ids]
    tokens = [adapter[batch.req_ids[b]] for b in batch.req_indices]
    assert mapping.tokens.tolist() == tokens + [0] * (8 - len(tokens))
    assert mapping.logits.tolist() == [tokens[t] for t in batch.logits_indices]
    assert mapping.active == (3, 7)


# -- pooling


def test_a_step_without_pooling_requests_has_empty_pooling_metadata():
    states, buffers = make()
    states.add_request(NewRequest("s", [1] * 3, blocks(3)))
    assert pooling_metadata(prepare_inputs(states, {"s": 3}, buffers)).batch_indices.size == 0
