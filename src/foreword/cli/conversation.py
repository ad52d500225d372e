"""The messages of a chat, as a list that can be shortened, saved and loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foreword.errors import ConfigError, RequestError, reason_of
from foreword.jsonfile import parse_json, read_bytes
from foreword.media.images import Image
from foreword.models.chat_messages import check_messages


class Conversation:
    """messages: in the form of chat templates; the system prompt is first, if there is one."""

    def __init__(self, system: str | None = None) -> None:
        self.messages: list[dict[str, Any]] = []
        self.system = system

    @property
    def system(self) -> str | None:
        """The system prompt; setting it to None or "" removes it. The other messages stay."""
        return self.messages[0]["content"] if self._start else None

    @system.setter
    def system(self, text: str | None) -> None:
        self.messages[: self._start] = [{"role": "system", "content": text}] if text else []

    @property
    def _start(self) -> int:
        """Index of the first message after the system prompt."""
        return int(bool(self.messages) and self.messages[0]["role"] == "system")

    @property
    def waits(self) -> bool:
        """Return whether the last message is the user's, not answered."""
        return bool(self.messages) and self.messages[-1]["role"] == "user"

    def up_to_question(self) -> list[dict[str, Any]] | None:
        """Return the messages up to the user's last one, which is included; None if there is none."""
        for at in range(len(self.messages), 0, -1):
            if self.messages[at - 1]["role"] == "user":
                return self.messages[:at]
        return None

    def answers(self) -> list[dict[str, Any]]:
        """Return the messages after the user's last one."""
        return self.messages[len(self.up_to_question() or ()) :]

    def clear(self) -> None:
        """Remove all messages but the system prompt."""
        del self.messages[self._start :]

    @property
    def text(self) -> str:
        """The messages as JSON."""
        return json.dumps(self.messages, indent=1) + "\n"

    @property
    def is_empty(self) -> bool:
        """Return whether there is no message but the system prompt."""
        return len(self.messages) == self._start

    def save(self, path: Path) -> None:
        """Write the messages as JSON. Raise ConfigError if that fails, or if the file holds anything but messages."""
        if path.exists():
            _messages(path)  # another kind of file is not overwritten
        try:
            path.write_text(self.text)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: cannot be written ({reason_of(error)}). Give another file") from None

    def load(self, path: Path) -> None:
        """Read a JSON list of messages. Raise ConfigError if the file has none; then nothing changes."""
        self.messages = _messages(path)


def shown_content(message: Mapping[str, Any]) -> str:
    """Return the text of a message. Other content is replaced by the name of its kind."""
    content = message.get("content")
    if isinstance(content, list):
        return " ".join(str(part.get("text") or f"[{part.get('type')}]") for part in content)
    return str(content or "[no text]")


def _messages(path: Path) -> list[dict[str, Any]]:
    found = parse_json(read_bytes(path, ConfigError), path, ConfigError)
    if not isinstance(found, list):
        raise ConfigError(f"{path}: holds no list of messages. Give another file")
    try:
        checked = check_messages(found, media=(Image.kind,))
    except RequestError as error:
        raise ConfigError(f"{path}: {error}") from None
    for message, given in zip(checked, found, strict=True):
        if isinstance(message.get("content"), list):  # images stay with what they are read from
            message["content"] = given["content"]
    return checked
