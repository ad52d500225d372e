"""Sounds from WAV files."""

from __future__ import annotations

import wave
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from io import BytesIO

import numpy as np

from foreword.arrays import F32
from foreword.media.limits import MediaLimits
from foreword.media.sources import fail, read_file

WIDTHS = (1, 2, 3, 4)


@dataclass(frozen=True, eq=False)
class Sound:
    """A sound of one channel. field: where it is in the messages. samples: float32 [N] in [−1, 1]. rate: of them per
    second.
    """

    field: str
    samples: F32
    rate: int
    kind = "audio"

    @property
    def content(self) -> F32:
        """For processors."""
        return self.samples

    @property
    def size(self) -> str:
        """For messages."""
        return f"{len(self.samples) / self.rate:.1f} seconds"

    @cached_property
    def digest(self) -> str:
        """A hash of its content."""
        hashed = blake2b(str(self.rate).encode(), digest_size=16)
        hashed.update(np.ascontiguousarray(self.samples).data)
        return hashed.hexdigest()


def read_sound(field: str, source: object, limits: MediaLimits) -> Sound:
    """A sound from a WAV file of PCM, as `read_file` takes it; the mean of its channels.

    RequestError as `read_file`, and with the field for data that is no such file, damaged, or beyond the limits.
    """
    data = read_file(field, source, limits)
    try:
        with wave.open(BytesIO(data)) as file:
            rate, width, channels = file.getframerate(), file.getsampwidth(), file.getnchannels()
            frames = file.readframes(file.getnframes())
    except Exception as error:  # of damaged files, of any kind
        reason, fix = f"is no WAV file of PCM ({error!s:.100})", "Convert it to WAV."
        fail(field, f"{len(data)} bytes", reason, fix)
    count = len(frames) // (width * channels) if width in WIDTHS and channels else 0
    if rate < 1 or not 0 < count <= limits.max_seconds * rate:
        got = f"{count} samples at {rate} per second"
        fail(field, got, f"a sound may have at most {limits.max_seconds} seconds, and must have some", "Shorten it.")
    raw = np.frombuffer(frames[: count * width * channels], np.uint8).reshape(count, channels, width)
    if width == 1:
        values = raw[:, :, 0].astype(np.float32) - 128
    else:
        padded = np.zeros((count, channels, 4), np.uint8)
        padded[:, :, 4 - width :] = raw
        values = (padded.view("<i4")[:, :, 0] >> (8 * (4 - width))).astype(np.float32)
    return Sound(field, (values.mean(1) / 2 ** (8 * width - 1)).astype(np.float32), rate)
