"""Write a trace as one static page. It holds the data in compressed parts, of which a browser reads only those that it
shows.
"""

from __future__ import annotations

import zlib
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from html import escape
from importlib.resources import files
from pathlib import Path

from foreword.errors import ForewordError, PlanError
from foreword.insight.shown import Shown, TextOf, as_text
from foreword.trace.reader import TraceReader
from foreword.trace.replay import Replay

BLOCKS_PER_PART = 64
MAX_BYTES = 1 << 28
"""Limit of the compressed size of all parts of a page. Further steps are left out, and the page says so."""


@dataclass(frozen=True, slots=True)
class Inspected:
    """The data of a page. damage: the reason why it ends before the end of the file."""

    num_steps: int
    num_bytes: int
    damage: PlanError | None

    def __str__(self) -> str:
        per_step = self.num_bytes / max(self.num_steps, 1)
        return f"{self.num_steps} steps, {self.num_bytes} bytes, {per_step:.0f} per step"


def write_page(
    path: str | Path, out: str | Path, *, max_bytes: int = MAX_BYTES, text_of: TextOf | None = None
) -> Inspected:
    """Write the page of a trace to a file. text_of: returns the text of a token id, if a tokenizer is known.

    The page ends at the first event that cannot be read or replayed, and says where that is. Raise PlanError if the
    first line is not that of a trace.
    """
    reader = TraceReader(path)
    shown = Shown(reader.header, _replay(reader), text_of=text_of)
    damage: PlanError | None = None
    parts: dict[str, str] = {}
    num_bytes = 0
    try:
        for event in reader:
            try:
                shown.apply(event)
            except ForewordError as error:
                raise PlanError(f"{path}, line {event.line}: {error}") from error
            for part in shown.take_full():
                parts[f"s{len(parts)}"] = data = packed(part)
                num_bytes += len(data)
            if num_bytes > max_bytes:
                raise PlanError(
                    f"{path}, line {event.line}: the page ends here, at its limit of {max_bytes} bytes; "
                    "record shorter files (--record FILE:SIZE)"
                )
    except PlanError as error:
        damage = error
    for part in shown.take_rest():
        parts[f"s{len(parts)}"] = packed(part)
    index = shown.index(Path(path).name) | {"damage": str(damage or ""), "blocks_per_part": BLOCKS_PER_PART}
    blocks = index["blocks"]["ids"]
    for first in range(0, len(blocks), BLOCKS_PER_PART):
        parts[f"b{first // BLOCKS_PER_PART}"] = packed(shown.writes(blocks[first : first + BLOCKS_PER_PART]))
    text = _page(Path(path).name, {"index": packed(as_text(index)), **parts})
    Path(out).write_text(text, encoding="utf-8")
    return Inspected(shown.replay.num_steps, len(text.encode()), damage)


def template() -> str:
    """Return the page without data."""
    return files(__package__).joinpath("page.html").read_text(encoding="utf-8")


@cache
def live_page() -> str:
    """Return the page that asks its server for the data."""
    return template().replace("<!-- title -->", "Steps").replace("<!-- data -->\n", "")


def packed(text: str) -> str:
    """Return a text compressed (zlib), in base64."""
    return b64encode(zlib.compress(text.encode(), 6)).decode()


def _page(name: str, parts: Mapping[str, str]) -> str:
    data = "\n".join(f'<script type="text/plain" id="{name}">{part}</script>' for name, part in parts.items())
    return template().replace("<!-- title -->", escape(name)).replace("<!-- data -->", data)


def _replay(reader: TraceReader) -> Replay:
    try:
        return Replay(reader.header, max_num_reqs=reader.num_lines())
    except ForewordError as error:
        raise PlanError(f"{reader.path}, line 1: {error}") from error
