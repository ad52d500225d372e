"""Images beside a message of `run` and `chat`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from foreword import LLM
from foreword.errors import ConfigError, RequestError
from foreword.media.images import Image, read_image

_URL = re.compile(r"\w[\w+.-]*://|data:", re.IGNORECASE)


def local_path(text: str, asked: str) -> Path:
    """Return the path of an image. Raise RequestError for a URL."""
    if _URL.match(text):
        raise RequestError(None, asked, text, "is a URL, and this command reads files alone", "Download it first.")
    return Path(text).expanduser()


def read_local_image(llm: LLM, path: Path, asked: str) -> Image:
    """Return the image of a file. Raise ConfigError for a model that takes none; RequestError for a file that is
    missing or not an image.

    asked: the option or command that gives the file, for messages.
    """
    media = llm.media
    if media.encoder is None or Image.kind not in media.encoder.placeholders:
        reason = media.refused.get(Image.kind, "it reads text alone")
        raise ConfigError(f"{asked} {path}: model {llm.model.name!r:.80} takes no images: {reason}. Use another model")
    return read_image(f"{asked} {str(path)!r:.80}", path, media.limits)


def content_of(text: str, images: Sequence[Path]) -> str | list[dict[str, Any]]:
    """Return the content of a message: the text alone, or the images, read from their files, and then the text."""
    parts: list[dict[str, Any]] = [{"type": "image", "image": str(path.absolute())} for path in images]
    return [*parts, {"type": "text", "text": text}] if parts else text
