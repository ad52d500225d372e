"""Places of tokens in the text of completions, against a definition over the bytes of all tokens at once."""

from __future__ import annotations

import codecs
import json
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from foreword import utf8
from foreword.engine import CompletionOutput, RequestOutput
from foreword.engine.outputs import Position, RequestMetrics, Transcript
from foreword.engine.text import TextStream
from foreword.models.detokenizer import Detokenizer
from foreword.openai import CompletionStream, parse_completion, text_completion
from foreword.sampling import Logprob, TokenLogprobs

NAMED = {"response_id": "7", "created": 1700000000, "model": "m"}
TEXT = "aé🤖 \N{FAMILY}€\N{COMBINING ACUTE ACCENT}z"
PIECES = [bytes([byte]) for byte in sorted({*TEXT.encode(), 0xFF})] + [b" a", " é".encode(), "z🤖".encode()[:3], b"zz"]
SPECIAL = len(PIECES)
V = SPECIAL + 1


class Pieces:
    """Tokens that are single bytes, some of which are in no character, parts of texts, and a special one."""

    skips_first_space = False

    def __init__(self, first_space: bool = False) -> None:
        self.skips_first_space = first_space

    def __getitem__(self, token_id: int) -> bytes:
        return PIECES[token_id] if token_id < SPECIAL else b"<s>"

    token_bytes = __getitem__

    def added_text(self, token_id: int) -> bytes | None:
        return b"<s>" if token_id == SPECIAL else None

    def detokenizer(self, skip_special_tokens=True, *, continues=False, prompt=(), spaces_between_special_tokens=True):
        hidden = {SPECIAL} if skip_special_tokens else ()
        begun, spaces = utf8.unfinished(self.token_bytes, prompt), spaces_between_special_tokens
        return Detokenizer(self, hidden=hidden, continues=continues, added_spaces=spaces, unfinished=begun)


def places_of(data: list[bytes]) -> list[int]:
    """For each token the character that its first byte is part of, for one without bytes the first that the bytes
    before it do not complete.
    """
    whole = b"".join(data)
    owners = [number for number, length in enumerate(characters(whole)) for _ in range(length)]
    begins = np.cumsum([0, *map(len, data)]).tolist()
    return [
        owners[at] if piece else len(codecs.getincrementaldecoder("utf-8")("replace").decode(whole[:at]))
        for at, piece in zip(begins, data, strict=False)
    ]


def characters(data: bytes):
    """The number of bytes of each character, and of each maximal invalid part, which is one as well."""
    while data:
        try:
            length = len(data.decode()[0].encode())
        except UnicodeDecodeError as error:
            length = error.end if error.start == 0 else len(data[: error.start].decode()[0].encode())
        yield length
        data = data[length:]


def is_unfinished(data: bytes) -> bool:
    """Return whether the bytes end with the beginning of a character."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data)
    return decoder.getstate()[0] != b""


def entries(ids):
    return [TokenLogprobs(None, entries={token: Logprob(-1.0, 1)}) for token in ids]


def output_of(transcript, prompt_ids, prompt_logprobs, begin, end):
    """An output that reports tokens when they are sampled and text when it is certain."""
    is_last = end == transcript.end
    completion = CompletionOutput(0, transcript, begin, end, "stop" if is_last else None)
    return RequestOutput("r", None, prompt_ids, [completion], is_last, prompt_logprobs)


@pytest.mark.parametrize("seed", range(300))
def test_each_token_is_at_the_character_that_it_is_part_of(seed):
    rng = np.random.default_rng(seed)
    tokenizer, echo, skip = Pieces(bool(rng.integers(2))), bool(rng.integers(2)), bool(rng.integers(2))
    prompt_ids, ids = (rng.integers(V, size=n).tolist() for n in rng.integers(1, 9, 2))
    prompt_ids[-3:] = rng.integers(SPECIAL, size=len(prompt_ids[-3:])).tolist()  # no special token inside a character
    stop = [] if rng.random() < 0.5 else ["z", "a\N{COMBINING ACUTE ACCENT}", "é"]
    request = parse_completion(
        {"prompt": prompt_ids, "echo": echo, "logprobs": 0, "stop": stop or None, "skip_special_tokens": skip}
    )

    detokenizer = tokenizer.detokenizer(skip, continues=True, prompt=prompt_ids)
    transcript = Transcript(logprobs=[])
    text = TextStream(detokenizer, stop)
    text.pieces = transcript.pieces
    ends = []
    for token in ids:
        transcript.token_ids.append(token)
        transcript.logprobs += entries([token])
        stopped = text.push([token])
        if stopped or rng.random() < 0.6:
            ends.append(transcript.end)
        if stopped:
            break
    else:
        text.finish()
    ids = transcript.token_ids
    ends = [*(end for end in ends if end != transcript.end), transcript.end]

    prompt_data = [b"" if token == SPECIAL else tokenizer[token] for token in prompt_ids]
    data = [b"" if token == SPECIAL and skip else tokenizer[token] for token in ids]
    places = places_of([*prompt_data, *data])
    lost = int(tokenizer.skips_first_space and b"".join([*prompt_data]).startswith(b" "))
    places = [max(place - lost, 0) for place in places]
    before = b"".join(prompt_data)
    whole_text = b"".join([*prompt_data, *data]).decode(errors="replace")
    end_of_prompt = len(tokenizer.detokenizer().push(prompt_ids))
    if is_unfinished(before) and whole_text[end_of_prompt + lost : end_of_prompt + lost + 1] == "\ufffd":
        # The output does not complete the character that the prompt has begun: no text has it.
        places = [place - (place > end_of_prompt) for place in places]

    prompt_logprobs = entries(prompt_ids) if echo else None
    made = partial(output_of, transcript, prompt_ids, prompt_logprobs)
    whole, streamed = made(Position(), transcript.end), map(made, [Position(), *ends], ends)
    (choice,) = text_completion(request, [whole], tokenizer, **NAMED)["choices"]
    prompt_len = len(tokenizer.detokenizer().push(prompt_ids))
    length = prompt_len + len(text.text)
    wanted = [min(place, length) for place in (places if echo else places[len(prompt_ids) :])]
    assert choice["logprobs"]["text_offset"] == wanted
    if echo:
        assert len(choice["text"]) == length

    stream = CompletionStream(request, tokenizer, **NAMED)
    frames = b"".join(map(stream.frames, streamed)).decode().split("\n\n")
    parts = [json.loads(frame.removeprefix("data: "))["choices"][0] for frame in frames if frame]
    assert "".join(part["text"] for part in parts) == choice["text"]
    for name, values in choice["logprobs"].items():
        assert [value for part in parts for value in part["logprobs"][name]] == values
    shown = 0 if echo else prompt_len
    for part in parts[:-1]:  # no token before the text that it is part of
        shown += len(part["text"])
        assert all(place < shown for place in part["logprobs"]["text_offset"])


def test_a_prompt_of_text_has_the_places_of_its_characters_behind_an_added_token():
    tokenizer = Pieces()
    ids = [SPECIAL, *(PIECES.index(bytes([byte])) for byte in "é🤖z".encode())]
    request = parse_completion({"prompt": "é🤖z", "echo": True, "logprobs": 0})
    transcript = Transcript(["é"], [PIECES.index(bytes([byte])) for byte in "é".encode()])
    transcript.logprobs = entries(transcript.token_ids)
    completion = CompletionOutput(0, transcript, Position(), transcript.end, "length")
    output = SimpleNamespace(
        prompt="é🤖z", prompt_token_ids=ids, prompt_logprobs=entries(ids), outputs=[completion],
        metrics=RequestMetrics(arrival_time=0.0),
    )  # fmt: skip
    (choice,) = text_completion(request, [output], tokenizer, **NAMED)["choices"]
    assert choice["text"] == "é🤖zé"
    assert choice["logprobs"]["text_offset"] == [0, 0, 0, 1, 1, 1, 1, 2, 3, 3]
