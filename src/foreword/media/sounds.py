"""Read sounds from files. Limits are checked during decoding."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from typing import Any

import numpy as np

from foreword.arrays import F32, as_array
from foreword.errors import RequestError
from foreword.hashes import blake2b
from foreword.installation import install
from foreword.media.decoders import Printed, SeekableBytes, captured
from foreword.media.limits import MediaLimits
from foreword.media.sources import fail, read_file

FORMATS = {"WAV": "wav", "WAVEX": "wav", "FLAC": "flac", "OGG": "ogg", "MP3": "mp3"}
"""The names of libsndfile → those of messages. Ogg holds Vorbis or Opus."""
MAX_CHANNELS = 8
MAX_RATE = 48_000  # max_seconds allows this many samples per second, at any rate
BLOCK = 1 << 16  # number of samples that are decoded at a time
SILENT = (b"RIFF", b"fLaC", b"OggS")
"""Beginnings of files whose decoders print nothing. That of MP3 prints what is wrong."""
UNKNOWN_SIZE = (0, 2**32 - 1)  # sizes in a RIFF file that was written as a stream
INSTALL = install("speech")


@dataclass(frozen=True, eq=False)
class Sound:
    """A sound with one channel. field: its path in the messages. samples: float32 [N], usually in [−1, 1]. rate:
    in Hz.
    """

    field: str
    samples: F32
    rate: int
    kind = "audio"

    @property
    def content(self) -> F32:
        """The samples, as processors read them."""
        return self.samples

    @property
    def seconds(self) -> float:
        return len(self.samples) / self.rate

    @property
    def size(self) -> str:
        """The length, as messages show it."""
        return f"{self.seconds:.1f} seconds"

    @cached_property
    def digest(self) -> str:
        """Return a hash of its content."""
        hashed = blake2b(str(self.rate).encode(), digest_size=16)
        hashed.update(np.ascontiguousarray(self.samples).data)
        return hashed.hexdigest()

    def at(self, rate: int) -> Sound:
        """Return the sound at another rate, band-limited."""
        if rate == self.rate:
            return self
        try:
            import soxr
        except ModuleNotFoundError:
            reason = f"the model takes {rate} samples per second, and resampling needs soxr"
            raise RequestError(None, self.field, f"{self.rate} per second", reason, INSTALL) from None
        return Sound(self.field, soxr.resample(self.samples, self.rate, rate), rate)


def sound_of(field: str, samples: object, rate: int) -> Sound:
    """Return a sound from an array of floats. Raise RequestError for another type, for more than one dimension, and for
    an empty array.
    """
    array = as_array(samples)
    got = samples if array is None else f"{array.dtype} {list(array.shape)}"
    if array is None or array.dtype.kind != "f" or array.ndim != 1 or not len(array):
        fix = f"Give samples in [-1, 1] at {rate} Hz."
        fail(field, got, "must be floats [samples] of one channel, at least one", fix)
    with np.errstate(over="ignore"):
        found = np.ascontiguousarray(array, np.float32)
    if not np.isfinite(found).all():
        fail(field, got, "are not all finite", "Give finite numbers.")
    return Sound(field, found, rate)


def read_sound(field: str, source: object, limits: MediaLimits) -> Sound:
    """Return the sound of a file in one of `FORMATS`, from a source that `read_file` takes, with its channels averaged.

    Raise RequestError as `read_file` does, and if the data is in another format, damaged, or beyond the limits.
    """
    if find_spec("soundfile") is None:
        raise RequestError(None, field, "a sound", "needs soundfile", INSTALL)
    data = read_file(field, source, limits)
    if data[:4] in SILENT:
        return _decoded(field, data, limits)
    printed = Printed()
    try:
        with captured(printed):
            return _decoded(field, data, limits)
    except RequestError as error:
        if not printed.text:
            raise
        reason = f"{error.reason}; its decoder says: {printed.text:.100}"
        raise RequestError(None, field, error.value, reason, error.fix) from None


def _decoded(field: str, data: bytes, limits: MediaLimits) -> Sound:
    import soundfile

    fix = f"Give a file of the type {', '.join(dict.fromkeys(FORMATS.values()))}."
    try:
        file = soundfile.SoundFile(SeekableBytes(data))
    except Exception as error:  # decoders raise errors of any kind
        reason = str(error).rpartition(">: ")[2]
        fail(field, f"{len(data)} bytes", f"is not a sound ({reason:.100})", fix)
    with file:
        if file.format not in FORMATS:
            fail(field, file.format, "is not supported", fix)
        if file.channels > MAX_CHANNELS:
            fail(field, f"{file.channels} channels", f"a sound may have {MAX_CHANNELS}", "Mix them.")
        samples = _samples(field, file, limits)
        if len(samples) < file.frames or _is_cut(data):
            fail(field, f"{len(samples)} samples", "is damaged: its end is missing", "Check the file.")
    if not np.isfinite(samples).all():
        fail(field, f"{len(samples)} samples", "are not all finite", "Check the file.")
    return Sound(field, samples, file.samplerate)


def _samples(field: str, file: Any, limits: MediaLimits) -> F32:
    """Return all samples of an open file, with its channels averaged."""
    rate, parts, count = file.samplerate, [], 0
    most = limits.max_seconds * min(rate, MAX_RATE)
    while count <= most and file.frames <= most:
        try:
            block = file.read(BLOCK, dtype="float32", always_2d=True)
        except Exception as error:  # decoders raise errors of any kind
            reason = str(error).rpartition("Error : ")[2]
            fail(field, f"{count} samples", f"is damaged ({reason:.100})", "Check the file.")
        if not len(block):
            break
        count += len(block)
        parts.append(block.mean(1, dtype=np.float32))
    if rate < 1 or not 0 < count <= most:
        got = f"{max(count, file.frames)} samples at {rate} per second"
        reason = f"a sound may have {limits.max_seconds} seconds of up to {MAX_RATE} samples, and must have some"
        fail(field, got, reason, "Shorten it.")
    return np.concatenate(parts)


def _is_cut(data: bytes) -> bool:
    """Return whether a RIFF file declares more bytes than it has. (Decoders read the bytes that are present.)"""
    named = int.from_bytes(data[4:8], "little")
    return data[:4] == b"RIFF" and named not in UNKNOWN_SIZE and named + 8 > len(data)
