"""A free first part of the output, its end, and its budget."""

from random import Random

import pytest
from bytes_tokenizer import END, TOKENS, BytesTokenizer, V, allowed, grammar

from foreword.errors import RequestError

CHOICE = {"choice": ["yes", "no"]}
encode = BytesTokenizer().encode


@pytest.mark.parametrize("written", [["</think>"], ["</", "think", ">"], list("</think>"), ["<", "/think", ">\n"]])
def test_the_grammar_begins_after_the_end_however_it_is_tokenized(written: list[str]):
    ours = grammar(CHOICE, thinking_end="</think>")
    tokens = [token for text in ["I think", *written] for token in encode(text)]
    assert ours.accept(tokens) == len(tokens)
    assert allowed(ours) == allowed(grammar(CHOICE))
    assert ours.accept([*encode("yes")]) == 1
    assert ours.is_terminated


def test_thinking_allows_all_but_the_end_of_the_output():
    ours = grammar(CHOICE, thinking_end="</think>")
    assert allowed(ours) == set(range(len(TOKENS))) - {END}
    assert ours.accept([END]) == ours.accept([V - 1]) == 0
    assert END in allowed(grammar(thinking_end="</think>"))


@pytest.mark.parametrize("budget", [0, 1, 5])
@pytest.mark.parametrize("end", ["</think>", "</think>\n\n", TOKENS.index(b"</think>")])
def test_the_end_is_forced_when_the_budget_is_used_up(budget: int, end: str | int):
    ours = grammar({"choice": ["yes"]}, thinking_end=end, thinking_budget=budget)
    assert ours.accept(encode("x" * budget)) == budget
    wanted = [*([end] if isinstance(end, int) else encode(end)), *encode("yes")]
    assert list(ours.forced_tokens(99))[: len(wanted)] == wanted
    assert ours.forced_tokens(1) == wanted[:1]
    for token in wanted:
        assert allowed(ours) == {token}
        assert ours.accept([token - 1]) == 0
        assert ours.accept([token]) == 1
    assert ours.is_terminated


@pytest.mark.parametrize("start", ["<", TOKENS.index(b"<")])
def test_an_output_without_the_start_has_no_thinking(start: str | int):
    ours = grammar(CHOICE, thinking_start=start, thinking_end="</think>", thinking_budget=3)
    (begin,) = encode("<")
    assert allowed(ours) == allowed(grammar(CHOICE)) | {begin}
    assert ours.forced_tokens(9) == ()
    assert ours.accept(encode("x")) == 0
    assert ours.accept(encode("yes")) == 1
    assert ours.is_terminated
    ours.roll_back(1)
    assert ours.accept([begin, *encode("xyz")]) == 4
    assert list(ours.forced_tokens(1)) == encode("</think>")
    assert ours.accept(encode("</think>no")) == 2
    ours.roll_back(6)
    assert ours.accept([begin, *encode("</think>")]) == 2
    assert allowed(ours) == allowed(grammar(CHOICE))


def test_the_start_is_one_token():
    with pytest.raises(RequestError, match=r"thinking_start = 'so': is not one token of the model's vocabulary"):
        grammar(thinking_start="so", thinking_end="</think>")


def test_without_a_grammar_everything_is_free_after_the_end():
    ours = grammar(thinking_end="</think>", thinking_budget=1)
    assert ours.accept(encode("x</think>")) == 2
    assert allowed(ours) == set(range(V))
    assert ours.forced_tokens(9) == ()
    assert ours.accept([END, END]) == 2
    assert not ours.is_terminated


def test_taken_back_tokens_and_copies_leave_no_trace():
    random = Random(3)
    for _ in range(40):
        start = random.choice([None, "<"])
        made = grammar(CHOICE, thinking_start=start, thinking_end="</think>", thinking_budget=random.choice([None, 4]))
        path = []
        for _ in range(30):
            if made.is_terminated or random.random() < 0.3:
                count = random.randint(0, len(path))
                made.roll_back(count)
                del path[len(path) - count :]
            if random.random() < 0.1:
                made.reset()
                assert made.accept(path) == len(path)
            if not made.is_terminated:
                fits = sorted(allowed(made))
                end = TOKENS.index(b"</think>")
                path.append(end if end in fits and random.random() < 0.5 else random.choice(fits))
                assert made.accept(path[-1:]) == 1
            fresh = made.copy()
            assert fresh.accept(path) == len(path)
            assert fresh.is_terminated == made.is_terminated
            if not made.is_terminated:
                assert allowed(fresh) == allowed(made)


@pytest.mark.parametrize("end", [V - 1, "\ud800"])
def test_an_end_that_the_model_cannot_write_is_refused(end: str | int):
    with pytest.raises(RequestError, match=r"request 'a': thinking_end = .* is not a text of the model's vocabulary"):
        grammar(thinking_end=end)
