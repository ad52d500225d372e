"""Text that is streamed never contains a part of a stop string, and ends as soon as one is complete."""

from hypothesis import given
from hypothesis import strategies as st

from foreword.engine import TextStream


class Pieces:
    """A detokenizer whose token i is the i-th piece."""

    def __init__(self, pieces: list[str], rest: str = "") -> None:
        self.pieces, self.rest = pieces, rest

    def push(self, token_ids) -> str:
        return "".join(self.pieces[t] for t in token_ids)

    def finish(self) -> str:
        return self.rest


def first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """Where the first completed stop string begins, by looking at every beginning of the text."""
    for end in range(len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return end - len(stop), stop
    return None


letters = st.text("ab", max_size=3)


@given(st.lists(letters, max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.booleans())
def test_the_text_ends_at_the_first_stop_string(pieces: list[str], stops: list[str], include: bool):
    stream = TextStream(Pieces(pieces), stops, include_stop=include)
    whole, shown = "", ""
    for i, piece in enumerate(pieces):
        whole += piece
        stopped = stream.push([i])
        assert stream.text.startswith(shown)
        shown = stream.text
        found = first_stop(whole, stops)
        assert stopped == (found is not None)
        if found:
            at, _ = found
            end = at + len(stream.stop) if include else None
            assert whole[: len(shown)] == shown
            assert stream.stop in stops
            assert (shown.endswith(stream.stop) and len(shown) == end) if include else stream.stop not in shown
            return
        assert whole.startswith(shown)
    stream.finish()
    assert stream.text == whole


SPECIAL = {2: "<a>", 3: "<b>"}
PIECES = ["a", "b", *SPECIAL.values(), "<", ">"]
parts = st.sampled_from(PIECES)


@given(
    st.lists(st.integers(0, len(PIECES) - 1), max_size=14),
    st.lists(st.lists(parts, min_size=1, max_size=3).map("".join), min_size=1, max_size=3),
    st.booleans(),
)
def test_stop_strings_with_special_tokens_are_found_and_the_text_has_none_of_these(tokens, stops, include):
    """A match has each special token as a whole or not at all; the first one that is complete ends the text."""
    stream = TextStream(Pieces(PIECES), stops, include_stop=include, left_out=SPECIAL)
    stopped = any(stream.push([token]) for token in tokens)
    owners = [(i, PIECES[token]) for i, token in enumerate(tokens) for _ in PIECES[token]]  # by character
    whole = "".join(PIECES[token] for token in tokens)

    def cuts(at: int) -> bool:
        """Return whether a special token is on both sides of a place."""
        return 0 < at < len(owners) and owners[at - 1][0] == owners[at][0] and tokens[owners[at][0]] in SPECIAL

    found = [
        (end, stop)
        for end in range(len(whole) + 1)
        for stop in stops
        if whole[:end].endswith(stop) and not cuts(end) and not cuts(end - len(stop))
    ]
    assert stopped == bool(found)
    stream.finish()
    end = len(whole)
    if found:
        place = min(end for end, _ in found)
        assert (place, stream.stop) in found
        end = place if include else place - len(stream.stop)
    assert stream.text == "".join(
        char for char, (i, _) in zip(whole[:end], owners, strict=False) if tokens[i] not in SPECIAL
    )


def test_a_possible_beginning_of_a_stop_string_is_held_back():
    stream = TextStream(Pieces(["Hel", "lo <", "en", "d", "of"]), ["<end>"])
    shown = []
    for i in range(5):
        stream.push([i])
        shown.append(stream.text)
    assert shown == ["Hel", "Hello ", "Hello ", "Hello ", "Hello <endof"]


def test_what_is_held_back_comes_out_at_the_end():
    stream = TextStream(Pieces(["a<en"], rest="?"), ["<end>"])
    stream.push([0])
    assert stream.text == "a"
    stream.finish()
    assert stream.text == "a<en?"


def test_text_before_the_minimum_length_does_not_stop():
    stream = TextStream(Pieces(["ab", "ab"]), ["ab"])
    assert not stream.push([0], may_stop=False)
    assert stream.push([1])
    assert stream.text == "ab"
