"""Sounds of messages: WAV files of every width, and what is no such file is an error with its field."""

from __future__ import annotations

import base64
import struct
import wave
from io import BytesIO

import numpy as np
import pytest

from foreword.errors import RequestError
from foreword.media import MediaLimits, take_media

SAMPLES = np.array([[0.0, 0.5], [-1.0, -0.5], [0.25, 0.25]], np.float64)


def wav(values=SAMPLES, width=2, rate=8000):
    """A file of values [samples, channels] in [−1, 1)."""
    file = BytesIO()
    with wave.open(file, "wb") as out:
        out.setparams((values.shape[1], width, rate, 0, "NONE", ""))
        whole = np.round(values * 2 ** (8 * width - 1)).astype(np.int64).ravel()
        data = (int(value).to_bytes(width, "little", signed=True) for value in whole)
        out.writeframes(bytes((whole + 128).tolist()) if width == 1 else b"".join(data))
    return file.getvalue()


def read(source, **limits):
    part = {"type": "audio", "audio": source}
    messages, [sound] = take_media([{"role": "user", "content": [part]}], MediaLimits(**limits))
    assert messages == [{"role": "user", "content": [{"type": "audio"}]}]
    return sound


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_samples_are_the_mean_of_the_channels(width):
    sound = read(wav(width=width))
    assert sound.rate == 8000
    np.testing.assert_allclose(sound.samples, SAMPLES.mean(1), atol=0)


def test_a_sound_of_openai_is_base64_in_an_object(tmp_path):
    data = wav()
    part = {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": "wav"}}
    _, [sound] = take_media([{"role": "user", "content": [part]}], MediaLimits())
    (tmp_path / "a.wav").write_bytes(data)
    assert sound.digest == read(data).digest == read(tmp_path / "a.wav").digest != read(wav(rate=8001)).digest
    part["input_audio"]["format"] = "mp3"
    with pytest.raises(RequestError, match=r"content\[0\]\.input_audio\.format = 'mp3'"):
        take_media([{"role": "user", "content": [part]}], MediaLimits())


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (b"", "no WAV file"),
        (wav()[:30], "no WAV file"),
        (wav(np.zeros((0, 1))), "must have some"),
        (wav().replace(struct.pack("<HH", 1, 2), struct.pack("<HH", 7, 2), 1), "no WAV file"),
        (wav(np.zeros((8001, 1))), "at most 1 seconds"),
        (wav(rate=1, values=np.zeros((2, 1))), "at most 1 seconds"),
        (b"RIFF" + b"\xff" * 100, "no WAV file"),
        (b"ID3" + b"\0" * 100, "no WAV file"),
        ("http://example.com/a.wav", "not fetched from other machines"),
        (5, "is no file"),
        (None, "has no audio"),
    ],
)
def test_what_is_no_sound_is_an_error_with_its_field(source, reason):
    with pytest.raises(RequestError, match=reason) as found:
        read(source, max_seconds=1)
    assert found.value.field == "messages[0].content[0]"


def test_a_conversation_may_have_one_sound():
    part = {"type": "audio", "audio": wav()}
    with pytest.raises(RequestError, match="may have 1 parts") as found:
        take_media([{"role": "user", "content": [part, part]}], MediaLimits())
    assert found.value.field == "messages[0].content[1]"
