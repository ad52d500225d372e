"""Files of sounds, in every format that is read."""

from io import BytesIO
from pathlib import Path

import numpy as np
import soundfile

from foreword.media.limits import MediaLimits
from foreword.media.sounds import read_sound
from fuzz.target import Target

LIMITS = MediaLimits(max_seconds=2)
KINDS = ("WAV", "PCM_16"), ("WAVEX", "PCM_24"), ("FLAC", "PCM_16"), ("MP3", "MPEG_LAYER_III")
STORED = Path(__file__).parents[2] / "data/sounds"  # kinds in which libsndfile writes a random number, or the time


def encoded(format, subtype, values):
    file = BytesIO()
    soundfile.write(file, values, 8000, format=format, subtype=subtype)
    return file.getvalue()


def valid():
    tone = 0.3 * np.sin(np.arange(1000)[:, None] / [9, 20])
    return [*(encoded(*kind, tone) for kind in KINDS), *(path.read_bytes() for path in sorted(STORED.iterdir()))]


def read(data, folder):
    sound = read_sound("file", data, LIMITS)
    assert sound.samples.dtype == np.float32
    assert np.isfinite(sound.samples).all()
    assert 0 < sound.seconds <= LIMITS.max_seconds


def hostile():
    return [encoded("FLAC", "PCM_16", np.zeros(10**7)), encoded("WAV", "FLOAT", np.array([np.nan, np.inf])), b"\0" * 99]


TARGET = Target(valid, read, hostile=hostile)
