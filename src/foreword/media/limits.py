"""The limits of images and sounds."""

from __future__ import annotations

import re
from dataclasses import dataclass

from foreword.settings import check_settings, setting

_HOST = re.compile(r"(?:[a-z0-9_-]+(?:\.[a-z0-9_-]+)*\.?|\[[0-9a-f:.]+\])(?::\d{1,5})?|[0-9a-f:]*:[0-9a-f:.]+")


def _hosts(names: object) -> tuple[str, ...]:
    """Return hosts, which may have ports. Raise ValueError for a text that cannot be the host of a URL."""
    if not isinstance(names, list | tuple) or not all(isinstance(n, str) and _HOST.fullmatch(n) for n in names):
        raise ValueError("give hosts alone, in lower case, such as images.example.com or images.example.com:8080")
    return tuple(names)


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaLimits:
    """Limits of images, and of the only sound of a conversation. Raise ConfigError for a value of another type or
    range.
    """

    max_images: int = setting(16, "Largest number of images of a conversation.", most=2**16)
    max_bytes: int = setting(16 << 20, "Largest file of an image or a sound.", least=1, unit="bytes")
    max_pixels: int = setting(1 << 25, "Largest number of pixels of an image.", least=1)
    max_seconds: int = setting(600, "Length of the longest sound, in seconds.", least=1)
    local_files: bool = setting(True, "Read files of this machine that are named by their path.")
    remote_hosts: tuple[str, ...] = setting(
        (), "Host that images may be fetched from: NAME, or NAME:PORT. Repeatable.", value_name="HOST", convert=_hosts
    )
    timeout: float = setting(10.0, "Seconds allowed for fetching an image.", least=0.01)

    def __post_init__(self) -> None:
        check_settings(self)
