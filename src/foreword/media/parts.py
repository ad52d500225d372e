"""Images in the messages of a conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from foreword.errors import RequestError
from foreword.media.images import Image, read_image
from foreword.media.limits import MediaLimits

TYPES = ("image", "image_url", "input_image")
DETAILS = ("auto", "high", "original")
"""Values of ``detail`` that ask for what a model does unasked."""
PLACE = {"type": "image"}
"""What a chat template gets in place of an image."""


def image_parts(messages: object) -> list[tuple[str, Mapping[str, Any]]]:
    """The parts of messages that are images, with their fields. What is no message is left to others to refuse."""
    return [
        (f"messages[{i}].content[{j}]", part)
        for i, message in enumerate(messages if isinstance(messages, Sequence) else ())
        if isinstance(message, Mapping) and isinstance(content := message.get("content"), Sequence)
        for j, part in enumerate(content if not isinstance(content, str) else ())
        if isinstance(part, Mapping) and part.get("type") in TYPES
    ]


def take_images(
    messages: Sequence[Mapping[str, Any]], limits: MediaLimits
) -> tuple[list[Mapping[str, Any]], list[Image]]:
    """The messages with `PLACE` for each image, and the images in order.

    A part is {"type": "image_url", "image_url": {"url": …}} as OpenAI's, or {"type": "image", "image": …} with anything
    that `read_image` takes. RequestError as `read_image`, and for more images than the limit.
    """
    found = image_parts(messages)
    if len(found) > limits.max_images:
        field, reason = found[limits.max_images][0], f"a conversation may have {limits.max_images} images"
        raise RequestError(None, field, f"{len(found)} images", reason, "Give fewer.")
    images = [read_image(field, _source(field, part), limits) for field, part in found]
    return [_with_places(message) for message in messages], images


def _source(field: str, part: Mapping[str, Any]) -> object:
    kind = part["type"]
    source = part.get("image" if kind == "image" else "image_url")
    if isinstance(source, Mapping):
        if (detail := source.get("detail")) is not None and detail not in DETAILS:
            fix = f"Give one of {', '.join(DETAILS)}, or leave it out."
            raise RequestError(None, f"{field}.image_url.detail", detail, "is not supported", fix)
        source = source.get("url")
    if source is None:
        raise RequestError(None, field, part, "has no image", 'Give {"type": "image_url", "image_url": {"url": …}}.')
    return source


def _with_places(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, Sequence) or isinstance(content, str):
        return message
    return {
        **message,
        "content": [PLACE if isinstance(part, Mapping) and part.get("type") in TYPES else part for part in content],
    }
