"""What is accepted as an image or a sound."""

from __future__ import annotations

from dataclasses import dataclass, fields

from foreword.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaLimits:
    """
    max_images: of a conversation; it may have one sound. max_bytes: of a file. max_pixels: of an image. max_seconds: of
    a sound.
    local_files: whether a file may be named by its path on this machine.
    remote_hosts: the hosts that files are fetched from by http and https. timeout: seconds for fetching one.
    """

    max_images: int = 16
    max_bytes: int = 16 << 20
    max_pixels: int = 1 << 25
    max_seconds: int = 600
    local_files: bool = True
    remote_hosts: tuple[str, ...] = ()
    timeout: float = 10.0

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name.startswith("max_") and (type(value) is not int or value < 0):
                raise ConfigError(f"{item.name}={value!r:.80}: must be an integer of at least 0")
        if not isinstance(self.remote_hosts, tuple) or not all(isinstance(host, str) for host in self.remote_hosts):
            raise ConfigError(f"remote_hosts={self.remote_hosts!r:.80}: must be a tuple of names")
        if not self.timeout > 0:
            raise ConfigError(f"timeout={self.timeout!r:.80}: must be above 0")
