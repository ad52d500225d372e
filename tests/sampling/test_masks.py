"""Token masks, and the grammars that make them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sampling_rig import END, Rig, V, logits

from foreword.batch import SamplingParams
from foreword.sampling import NoTokenLeftError, TokenMasks, token_masks
from foreword.sampling.masks import num_words


class Automaton:
    """A grammar given as a deterministic automaton: transitions[state][token] is the next state; END ends in -1."""

    def __init__(self, transitions: list[dict[int, int]]) -> None:
        self.transitions, self.path = transitions, [0]

    @property
    def is_terminated(self) -> bool:
        return self.path[-1] == -1

    def fill_mask(self, words: np.ndarray) -> None:
        words[:] = 0
        bits = words.view(np.uint32)
        for token in self.transitions[self.path[-1]]:
            bits[token // 32] |= np.uint32(1 << token % 32)

    def accept(self, token_ids) -> int:
        for n, token in enumerate(token_ids):
            if self.is_terminated or token not in self.transitions[self.path[-1]]:
                return n
            self.path.append(self.transitions[self.path[-1]][token])
        return len(token_ids)

    def roll_back(self, num_tokens: int) -> None:
        del self.path[len(self.path) - num_tokens :]


def counting() -> Automaton:
    """5, 33, 49, then again or the end."""
    return Automaton([{5: 1}, {33: 2}, {49: 3}, {5: 1, END: -1}])


def allowed(masks: TokenMasks) -> dict[int, list[int]]:
    bits = np.unpackbits(masks.words.view(np.uint8), axis=1, bitorder="little")[:, :V]
    return {int(row): np.flatnonzero(b).tolist() for row, b in zip(masks.logit_rows, bits, strict=True)}


EVERYTHING = list(range(V))
GREEDY = SamplingParams(temperature=0.0)


def test_each_scheduled_request_with_a_grammar_has_a_mask_per_row_of_logits():
    rig = Rig(GREEDY, GREEDY, GREEDY, drafts=3)
    grammar = counting()
    grammar.accept([5])
    masks = token_masks(rig.batch({"0": [1], "1": [33, 49, 5]}), {1: grammar, 2: counting(), 7: counting()}, V)
    assert allowed(masks) == {2: [33], 3: [49], 4: [END, 5], 5: [33], 6: [5]}
    assert grammar.path == [0, 1]


def test_behind_a_refused_draft_or_the_end_everything_is_allowed():
    rig = Rig(GREEDY, GREEDY, drafts=3)
    near_end = counting()
    near_end.accept([5, 33, 49])
    grammars = {0: counting(), 1: near_end}
    masks = token_masks(rig.batch({"0": [5, 8, 49], "1": [END, 5]}), grammars, V)
    rows = {0: [5], 1: [33], 2: EVERYTHING, 3: EVERYTHING, 4: [END, 5], 5: EVERYTHING, 6: EVERYTHING}
    assert allowed(masks) == rows
    assert (grammars[0].path, near_end.path) == ([0], [0, 1, 2, 3])


def test_without_a_grammar_or_inside_a_prompt_there_is_no_mask():
    assert token_masks(Rig(GREEDY).batch(), {}, V) is None
    chunk = Rig(GREEDY, computed=0).batch(counts={"0": 2})
    assert token_masks(chunk, {0: counting()}, V) is None


@given(st.integers(0, 2**31), st.sampled_from([0.0, 1.0]), st.lists(st.sampled_from([5, 33, 49, 8]), max_size=3))
def test_outputs_follow_the_grammar_and_drafts_do_not_change_them(seed: int, temperature: float, drafts: list[int]):
    params = SamplingParams(temperature=temperature, seed=seed, top_k=10, logit_bias={8: 100.0}, min_tokens=2)
    table, plain, grammar = logits(8, seed % 1000), [], counting()
    while len(plain) < 5 and not grammar.is_terminated:
        rig = Rig(params, output=tuple(plain))
        masks = token_masks(rig.batch(), {0: grammar}, V)
        token = int(rig.draw(table[len(plain)][None], masks=masks).token_ids[0])
        assert grammar.accept([token]) == 1
        plain.append(token)
    rig, fresh = Rig(params, drafts=3), counting()
    batch = rig.batch({"0": drafts})
    sampled = rig.sampler.sample(
        batch, table[: 1 + len(drafts)], rig.sampling(batch, token_masks(batch, {0: fresh}, V))
    )
    got = [t for t in sampled.token_ids.ravel().tolist() if t >= 0]
    assert got == plain[: len(got)]
    right = next((j for j, d in enumerate(drafts) if d != plain[j]), len(drafts))
    assert len(got) == right + 1


def test_a_mask_that_leaves_nothing_fails_its_request_alone():
    rig = Rig(GREEDY, GREEDY)
    z = logits(2)
    z[1, [3, 40]] = -np.inf
    words = np.zeros((1, num_words(V)), np.int32)
    words[0, [0, 1]] = 1 << 3, 1 << 8  # tokens 3 and 40
    masks = TokenMasks(np.array([1], np.int32), words)
    sampled = rig.draw(z, masks=masks)
    assert sampled.token_ids.tolist() == [int(z[0].argmax()), -1]
    assert sampled.failures == {1: NoTokenLeftError}
    z[1, 40] = -9
    assert rig.draw(z, masks=masks).token_ids.tolist() == [int(z[0].argmax()), 40]


def test_masks_may_be_computed_elsewhere_until_they_are_read():
    rig, works = Rig(GREEDY, drafts=3), []
    masks = token_masks(rig.batch({"0": [5, 33]}), {0: counting()}, V, lambda work: works.append(work) or work)
    assert masks.logit_rows.tolist() == [0, 1, 2]
    assert allowed(masks) == {0: [5], 1: [33], 2: [49]}
    assert masks.failures == {}

    def fail() -> None:
        raise MemoryError("no more memory")

    masks = token_masks(rig.batch({"0": [5]}), {0: counting()}, V, lambda work: fail)
    with pytest.raises(MemoryError):
        _ = masks.words


def test_masks_of_another_width_are_an_error():
    masks = TokenMasks(np.array([0], np.int32), np.zeros((1, 1), np.int32))
    with pytest.raises(ValueError, match=r"words has shape \(1, 1\), expected \(1, 2\)"):
        Rig(GREEDY).draw(logits(), masks=masks)


def test_prompt_chunks_with_a_mask_are_drawn_without_it():
    rig = Rig(GREEDY, GREEDY, computed=0)
    z = logits(2)
    masks = TokenMasks(np.array([0, 1], np.int32), np.array([[1 << 7, 0], [1 << 9, 0]], np.int32))
    assert rig.draw(z, counts={"0": 1, "1": 3}, masks=masks).token_ids.tolist() == [int(z[0].argmax()), 9]
