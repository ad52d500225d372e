"""Find images and sounds in the messages of a conversation."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from foreword.errors import RequestError
from foreword.media.images import Image, read_image
from foreword.media.limits import MediaLimits
from foreword.media.sounds import FORMATS, Sound, read_sound
from foreword.names import advice

KINDS = {"image": "image", "image_url": "image", "input_image": "image", "audio": "audio", "input_audio": "audio"}
"""Type of a part → the kind of medium, which is the type that chat templates know."""
DETAILS = ("auto", "high", "original")
"""Values of ``detail`` that ask for what a model does by default."""

Medium = Image | Sound


def media_parts(messages: object) -> list[tuple[str, str, Mapping[str, Any]]]:
    """Yield field, kind and part of every image and sound. Values that are not messages are skipped; other code refuses
    them.
    """
    return [
        (f"messages[{i}].content[{j}]", KINDS[part["type"]], part)
        for i, message in enumerate(messages if isinstance(messages, Sequence) else ())
        if isinstance(message, Mapping) and isinstance(content := message.get("content"), Sequence)
        for j, part in enumerate(content if not isinstance(content, str) else ())
        if _is_medium(part)
    ]


def take_media(
    messages: Sequence[Mapping[str, Any]], limits: MediaLimits
) -> tuple[list[Mapping[str, Any]], list[Medium]]:
    """Return the messages with a placeholder, such as {"type": "image"}, for each image and sound, and the images and
    sounds in order.

    A part is {"type": "image_url", "image_url": {"url": …}} or {"type": "input_audio", "input_audio": {"data": …,
    "format": "wav"}} as OpenAI's, or {"type": "image", "image": …} or {"type": "audio", "audio": …} with anything that
    `read_image` or `read_sound` takes. Raise RequestError as these functions do, and for more parts than the limits
    allow.
    """
    found = media_parts(messages)
    for kind, most in (("image", limits.max_images), ("audio", 1)):
        fields = [field for field, other, _ in found if other == kind]
        if len(fields) > most:
            reason = f"a conversation may have {most} parts of this kind ({kind})"
            raise RequestError(None, fields[most], f"{len(fields)} parts", reason, "Give fewer.")
    media = [_read(field, kind, part, limits) for field, kind, part in found]
    return [_with_places(message) for message in messages], media


def refuse_places(messages: Sequence[Mapping[str, Any]], places: Mapping[str, str]) -> None:
    """Raise RequestError for the first message whose text has the placeholder of an image or sound. places: the
    placeholders by kind.
    """
    for i, message in enumerate(messages):
        content = message.get("content")
        parts = content if isinstance(content, Sequence) and not isinstance(content, str) else ()
        texts = {f"messages[{i}].content": content}
        texts |= {f"messages[{i}].content[{j}].text": part.get("text") for j, part in enumerate(parts)}
        for field, text in texts.items():
            for kind, place in places.items():
                if isinstance(text, str) and place in text:
                    raise RequestError(None, field, text, f"has {place}, the place of an {kind}", f"Leave {place} out.")


def _is_medium(part: object) -> bool:
    return isinstance(part, Mapping) and isinstance(kind := part.get("type"), str) and kind in KINDS


def _read(field: str, kind: str, part: Mapping[str, Any], limits: MediaLimits) -> Medium:
    name = part["type"] if part["type"] != "input_image" else "image_url"
    source = part.get(name)
    _check_keys(field, part, ("type", name, "detail", "cache_control"))
    if isinstance(source, Mapping):
        _check_keys(f"{field}.{name}", source, ("data", "format") if name == "input_audio" else ("url", "detail"))
    if name == "input_audio" and isinstance(source, Mapping):
        if (format := source.get("format", "wav")) not in FORMATS.values():
            fix = f"Give one of {', '.join(dict.fromkeys(FORMATS.values()))}."
            raise RequestError(None, f"{field}.input_audio.format", format, "is not supported", fix)
        data = source.get("data")
        source = f"data:;base64,{data}" if isinstance(data, str) else data
    elif isinstance(source, Mapping):
        if (detail := source.get("detail")) is not None and detail not in DETAILS:
            fix = f"Give one of {', '.join(DETAILS)}, or leave it out."
            raise RequestError(None, f"{field}.{name}.detail", detail, "is not supported", fix)
        source = source.get("url")
    if source is None:
        reason = f"has no {kind}"
        raise RequestError(None, field, part, reason, 'Give such as {"type": "image_url", "image_url": {"url": …}}.')
    return read_image(field, source, limits) if kind == "image" else read_sound(field, source, limits)


def _check_keys(field: str, given: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise RequestError for an unknown key, unless its value is null."""
    for name in (name for name, value in given.items() if value is not None and name not in known):
        raise RequestError(None, f"{field}.{name}", given[name], "unknown field", advice(name, known, "Leave it out."))


def _with_places(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, Sequence) or isinstance(content, str):
        return message
    return {**message, "content": [{"type": KINDS[part["type"]]} if _is_medium(part) else part for part in content]}
