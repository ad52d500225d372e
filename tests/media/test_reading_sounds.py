"""Sounds of messages: files of every kind, and what is no such file is an error with its field."""

import base64
import struct
import wave
from io import BytesIO
from itertools import count

import numpy as np
import pytest

soundfile = pytest.importorskip("soundfile", reason="needs soundfile, of the extra foreword[speech]")

from foreword.errors import RequestError
from foreword.media import MediaLimits, take_media
from foreword.media.sounds import sound_of

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


TONE = 0.3 * np.sin(np.arange(8000) / 20)


def encoded(format, subtype, values=TONE, rate=8000):
    """A file of the format."""
    file = BytesIO()
    soundfile.write(file, values, rate, format=format, subtype=subtype)
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


@pytest.mark.parametrize(
    ("format", "subtype"),
    [("WAV", "FLOAT"), ("FLAC", "PCM_16"), ("OGG", "VORBIS"), ("OGG", "OPUS"), ("MP3", "MPEG_LAYER_III")],
)
def test_every_format_gives_the_samples(format, subtype):
    sound = read(encoded(format, subtype))
    assert (sound.rate, len(sound.samples)) == (8000, 8000)
    assert np.corrcoef(sound.samples, TONE)[0, 1] > 0.98


def test_a_wav_file_written_as_a_stream_is_read_to_its_end():
    data = bytearray(wav(TONE[:, None]))
    data[4:8] = data[40:44] = b"\xff" * 4
    np.testing.assert_allclose(read(bytes(data)).samples, TONE, atol=1e-4)


def test_a_sound_is_resampled():
    sound = read(encoded("WAV", "FLOAT", np.sin(np.arange(44100) * 2 * np.pi * 440 / 44100), 44100)).at(16000)
    assert (sound.rate, len(sound.samples)) == (16000, 16000)
    expected = np.sin(np.arange(16000) * 2 * np.pi * 440 / 16000)
    np.testing.assert_allclose(sound.samples[500:-500], expected[500:-500], atol=1e-3)


@pytest.mark.parametrize("samples", [range(10**12), [range(10**12)], [], ["a"], [[0.5]], [1, 2], [[1.0], 2.0], None])
def test_samples_that_are_no_sound_are_refused(samples):
    with pytest.raises(RequestError, match=r"audio = .*: must be floats \[samples\] of one channel, at least one"):
        sound_of("audio", samples, 16000)


def test_a_sound_of_openai_is_base64_in_an_object(tmp_path):
    data = wav()
    part = {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": "wav"}}
    _, [sound] = take_media([{"role": "user", "content": [part]}], MediaLimits())
    (tmp_path / "a.wav").write_bytes(data)
    assert sound.digest == read(data).digest == read(tmp_path / "a.wav").digest != read(wav(rate=8001)).digest
    mp3 = {"data": base64.b64encode(encoded("MP3", "MPEG_LAYER_III")).decode(), "format": "mp3"}
    _, [sound] = take_media([{"role": "user", "content": [{**part, "input_audio": mp3}]}], MediaLimits())
    assert len(sound.samples) == 8000
    part["input_audio"]["format"] = "aac"
    with pytest.raises(RequestError, match=r"content\[0\]\.input_audio\.format = 'aac'"):
        take_media([{"role": "user", "content": [part]}], MediaLimits())


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (b"", "is not a sound"),
        (wav()[:30], "is not a sound"),
        (wav()[:-2], "its end is missing"),
        (wav(np.zeros((0, 1))), "must have some"),
        (wav().replace(struct.pack("<HH", 1, 2), struct.pack("<HH", 77, 2), 1), "is not a sound"),
        (wav(np.zeros((8001, 1))), "may have 1 seconds"),
        (wav(rate=1, values=np.zeros((2, 1))), "may have 1 seconds"),
        (wav(np.zeros((48001, 1)), rate=192000), "may have 1 seconds of up to 48000 samples"),
        (wav(np.zeros((2, 9))), "9 channels.*may have 8"),
        (encoded("WAV", "FLOAT", np.array([0.0, np.nan])), "not all finite"),
        (encoded("WAV", "FLOAT", np.array([0.0, np.inf])), "not all finite"),
        (encoded("AIFF", "PCM_16"), "'AIFF': is not supported"),
        (encoded("FLAC", "PCM_16", np.zeros(10**7)), "10000000 samples.*may have 1 seconds"),  # 30 KB
        (encoded("FLAC", "PCM_16", TONE)[:900], "is damaged"),
        (encoded("MP3", "MPEG_LAYER_III", TONE)[:-300], "is damaged"),
        (encoded("OGG", "VORBIS", TONE)[:2000], "is not a sound"),
        (b"RIFF" + b"\xff" * 100, "is not a sound"),
        (b"fLaC" + b"\0" * 100, "is not a sound"),
        (b"ID3" + b"\0" * 100, "is not a sound"),
        ("http://example.com/a.wav", "not fetched from other machines"),
        (5, "is not a file"),
        (None, "has no audio"),
    ],
    ids=count(),  # libsndfile writes the time into some of the files
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
