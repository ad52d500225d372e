"""Segments and windows of a transcription, by a model whose outputs are given."""

from types import SimpleNamespace

import numpy as np
import pytest

from foreword import SamplingParams
from foreword.engine.transcription import Transcriber, TranscriptionOptions, split
from foreword.media.sounds import Sound
from foreword.media.speech import Speech
from foreword.models.detokenizer import Detokenizer

FIRST, END = 300, 290
A, B, C = 97, 98, 99


@pytest.mark.parametrize(
    ("tokens", "segments", "offset"),
    [
        ([], [(0, 50, [])], 100),
        ([A, B], [(0, 50, [A, B])], 100),
        ([300, A, 320], [(0, 20, [300, A, 320])], 100),
        ([300, A, 320, 320], [(0, 20, [300, A, 320])], 40),
        ([300, A, 320, 325, B], [(0, 20, [300, A, 320])], 40),
        ([300, A, 320, 325, B, 340], [(0, 20, [300, A, 320]), (25, 40, [325, B, 340])], 100),
        ([302, A, 320, 325, B, 340, 341, C], [(2, 20, [302, A, 320]), (25, 40, [325, B, 340])], 80),
        ([300, A, 350, 350, B], [(0, 50, [300, A, 350])], 100),
    ],
)
def test_a_window_is_split_at_pairs_of_timestamps(tokens, segments, offset):
    assert split(tokens, FIRST, 100) == (segments, offset)


class Bytes(dict):
    """A token per byte; the others have no text."""

    skips_first_space = False

    def __missing__(self, token):
        return bytes([token]) if token < 256 else b""


TOKENIZER = SimpleNamespace(
    special_token_ids={"<|startofprev|>": 295},
    detokenizer=lambda **_: Detokenizer(Bytes()),
    encode=lambda text, add_special_tokens: list(text.encode()),
)


def speech(**changes):
    given = {
        "log_mel": lambda samples, is_short: np.ones((2, 100 if is_short else len(samples) // 10), np.float32),
        "sampling_rate": 1000, "num_frames": 100, "max_previous": 5, "start": 291,
        "languages": {"en": 292, "english": 292},
        "tasks": {"transcribe": 293, "translate": 294}, "no_timestamps": FIRST - 1, "no_speech": FIRST - 2,
    }  # fmt: skip
    return Speech(**(given | changes))


def run(transcriber, outputs):
    """Answer each part with the tokens of the next output. Returns the decoder prompts."""
    prompts, part = [], transcriber.advance()
    while part is not None:
        prompts.append(list(part.prompt["prompt_token_ids"]))
        tokens = outputs.pop(0)
        completion = SimpleNamespace(token_ids=[*tokens, END], finish_reason="stop", logprobs=None)
        if tokens == ["abort"]:
            completion = SimpleNamespace(token_ids=[], finish_reason="abort", logprobs=None)
        part = transcriber.advance(SimpleNamespace(outputs=[completion]))
    return prompts


def transcriber(seconds, model=None, **options):
    sound = Sound("audio", np.zeros(int(1000 * seconds), np.float32), 1000)
    return Transcriber(model or speech(), TOKENIZER, sound, SamplingParams(), TranscriptionOptions(**options))


def test_windows_begin_at_the_last_timestamp_of_the_one_before():
    found = transcriber(2.4, language="en", prompt="0123456789")
    windows = [[300, A, 320, 320, C], [300, B, 345], [310, C, 315, 320, A, 325]]
    prompts = run(found, windows)
    assert prompts == [[295, *b"56789", 291, 292, 293]] * 3
    result = found.result()
    assert [(one.start, one.end, one.text, one.seek) for one in result.segments] == [
        (0.0, 0.4, "a", 0), (0.4, 1.3, "b", 40), (1.6, 1.7, "c", 140), (1.8, 1.9, "a", 140),
    ]  # fmt: skip
    assert (result.text, result.language, result.seconds) == ("abca", "english", 2.4)


def test_a_short_sound_is_one_window_after_its_language_is_known():
    found = transcriber(0.5)
    assert run(found, [[292], [A, B]]) == [[291], [291, 292, 293, FIRST - 1]]
    assert found.result().text == "ab"


def test_an_aborted_part_is_the_last_one():
    found = transcriber(2.5, language="en")
    assert len(run(found, [[300, A, 320, 320], ["abort"]])) == 2
    assert found.result().text == "a"
