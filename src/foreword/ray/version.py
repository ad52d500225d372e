"""One version of Foreword on all nodes."""

from __future__ import annotations

from foreword import __version__
from foreword.errors import ConfigError


def check_version(version: str) -> None:
    """Raise ConfigError unless the version of the process that started this replica is the one installed here."""
    if version != __version__:
        raise ConfigError(
            f"foreword {__version__} is installed here, and {version} where this replica was started from: install "
            "one version on all nodes"
        )
