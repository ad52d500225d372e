"""Damage to an input: of bytes, of JSON values, of lines. Each function takes a generator and returns a new input."""

import json
import re
from random import Random
from typing import Any

NUMBERS = (0, 1, 2, 7, 31, 255, 256, 65535, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)


def mutate_bytes(rng: Random, data: bytes, *, within: int | None = None) -> bytes:
    """One to four changes of bytes, in the first ``within`` (None: anywhere)."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        end = min(len(changed), within or len(changed))
        at = rng.randrange(end + 1)
        length = rng.choice((1, 1, 2, 4, 8, rng.randint(1, 64)))
        other = rng.randrange(end + 1)
        match rng.randrange(9):
            case 0 if at < end:
                changed[at] ^= 1 << rng.randrange(8)
            case 1:
                changed[at : at + length] = rng.randbytes(len(changed[at : at + length]))
            case 2:
                width = rng.choice((1, 2, 4, 8))
                changed[at : at + width] = (rng.choice(NUMBERS) % (1 << 8 * width)).to_bytes(width, "little")
            case 3:
                changed[at:at] = rng.randbytes(length)
            case 4:
                del changed[at : at + length]
            case 5:
                changed[at:at] = changed[other : other + length]
            case 6:
                changed[at : at + length] = changed[other : other + length]
            case 7:
                changed[at : at + length] = bytes([rng.choice((0, 0x7F, 0x80, 0xC0, 0xFF))]) * length
            case _ if rng.random() < 0.3:
                del changed[at:]
    return bytes(changed)


def mutate_text(rng: Random, text: str, words: tuple[str, ...]) -> str:
    """One to four changes: a word inserted, or a part removed, repeated, moved or replaced by a word."""
    for _ in range(rng.randint(1, 4)):
        at, other = rng.randrange(len(text) + 1), rng.randrange(len(text) + 1)
        length = rng.choice((1, 3, 10, 40))
        word = rng.choice(words)
        match rng.randrange(5):
            case 0:
                text = text[:at] + word + text[at:]
            case 1:
                text = text[:at] + text[at + length :]
            case 2:
                text = text[:at] + text[other : other + length] * rng.choice((1, 2, 50)) + text[at:]
            case 3:
                text = text[:at] + text[other : other + length] + text[at + length :]
            case _:
                text = text[:at] + word + text[at + length :]
    return text


class Raw(str):
    """Text that stands in a JSON document as it is."""


DEEP = 100_000
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 3, 64, 1000, 2**31 - 1, 2**31, -(2**31) - 1, 2**63, 2**64, -(2**63), 10**30),
    *(0.0, -0.5, 1.5, 1e308, -1e308, 5e-324, float("nan"), float("inf"), -float("inf")),
    *("", "\0", "x", "default", "é🙂", "\ud800", "../" * 5, "a" * 300, "a" * 100_000, "1", "nan"),
    *([], [0], [[]], [None], [-1], [2**70], ["\ud800"], {}, {"": 0}, {"type": "x"}, {"\0": "\0"}),
    *(Raw("[" * DEEP), Raw("[" * DEEP + "]" * DEEP), Raw('{"a":' * DEEP + "0" + "}" * DEEP)),
    *(Raw("9" * 5000), Raw("-" + "9" * 4000), Raw("1e999"), Raw("1" * 400 + ".5"), Raw("0x10"), Raw("+1")),
    *(Raw("'a'"), Raw('"\\u12"'), Raw('{"a": 1, "a": 2}'), Raw("")),
)


def mutate_json(rng: Random, data: bytes) -> bytes:
    """One to three values of a JSON document replaced, removed, renamed, repeated or exchanged; or bytes changed."""
    if rng.random() < 0.1:
        return mutate_bytes(rng, data)
    root = [json.loads(data)]
    for _ in range(rng.randint(1, 3)):
        places = list(_places(root))
        parent, key = rng.choice(places)
        match rng.randrange(10):
            case 0 if len(places) > 1 and parent is not root:
                del parent[key]
            case 1 if isinstance(parent, dict):
                name = rng.choice(("", "\0", "\ud800", "x" * 1000, rng.choice(list(parent))))
                parent[name] = parent.pop(key)
            case 2:
                other, at = rng.choice(places)
                parent[key] = _copy(other[at])
            case 3:
                parent[key] = [parent[key]] * rng.choice((1, 2, 20))
            case 4 if isinstance(parent[key], int | float):
                parent[key] = rng.choice((-parent[key], parent[key] * 2, parent[key] + 1, str(parent[key])))
            case 5 if isinstance(parent[key], list):
                parent[key] = parent[key] * 2 if rng.random() < 0.5 else parent[key][:-1]
            case _:
                parent[key] = _copy(rng.choice(VALUES))
    return dump(root[0], twice=rng.random() < 0.1)


def mutate_lines(rng: Random, data: bytes) -> bytes:
    """One line of JSON lines changed as JSON, or lines removed, repeated, exchanged, or bytes changed."""
    lines = data.splitlines()
    at, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    match rng.randrange(6):
        case 0:
            return mutate_bytes(rng, data)
        case 1:
            lines[at] = lines[other]
        case 2:
            del lines[at]
        case 3:
            lines.insert(at, rng.choice((b"", b" ", b"null", b"[]", b"{}", b"\xff\xfe", lines[other])))
        case _:
            lines[at] = mutate_json(rng, lines[at])
    return b"\n".join(lines) + b"\n"


def mutate_cells(rng: Random, data: bytes) -> bytes:
    """Cells of a CSV file replaced, removed or repeated; or bytes changed."""
    if rng.random() < 0.2:
        return mutate_bytes(rng, data)
    rows = [line.split(b",") for line in data.splitlines()]
    for _ in range(rng.randint(1, 3)):
        row = rng.choice(rows)
        at = rng.randrange(len(row) + 1)
        row[at : at + rng.randint(0, 1)] = [dump(rng.choice(VALUES))] * rng.randint(0, 2)
    return b"\n".join(b",".join(row) for row in rows) + b"\n"


def dump(value: Any, *, twice: bool = False) -> bytes:
    """A value as JSON, where `Raw` stands as it is. twice: the first key of the document occurs twice."""
    raw: list[str] = []

    def replaced(item: Any) -> Any:
        if isinstance(item, Raw):
            raw.append(str(item))
            return f"\1{len(raw) - 1}\1"
        if isinstance(item, list):
            return [replaced(x) for x in item]
        return {k: replaced(v) for k, v in item.items()} if isinstance(item, dict) else item

    text = json.dumps(replaced(value))
    if twice and (found := re.match(r'\{("[^"\\]*"): ', text)):
        text = f"{{{found[1]}: 0, {text[1:]}"
    return re.sub(r'"\\u0001(\d+)\\u0001"', lambda m: raw[int(m[1])], text).encode("utf-8", "surrogatepass")


def _places(value: Any) -> Any:
    """(container, key) of every value inside; of long lists only the ends."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    for key in keys if len(keys) <= 40 else keys[:20] + keys[-20:]:
        yield value, key
        if isinstance(value[key], list | dict):
            yield from _places(value[key])


def _copy(value: Any) -> Any:
    if isinstance(value, list):
        return [_copy(x) for x in value]
    return {k: _copy(v) for k, v in value.items()} if isinstance(value, dict) else value
