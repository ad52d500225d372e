"""Draw small pictures of a step for pages: its tokens, and the blocks that hold them. They need no other file, and
support light and dark pages.
"""

from __future__ import annotations

from collections.abc import Callable
from html import escape

from foreword.batch import InputBatch

TextOf = Callable[[int], str]

HUE = 137.508  # degrees between two requests, as on the page of `foreword inspect`
CELL, LINE, GAP, LABEL = 66, 22, 10, 92  # width of a token, height of a line, room between parts, width of labels

STYLE = (
    "text{font:12px ui-monospace,monospace;fill:#1b1d21}.l{fill:#5b626e}.f{fill:#f4f6f9;stroke:#b9c0cb}"
    ".n{stroke:#1b1d21;stroke-width:2}.d{stroke-dasharray:4 2}"
    "@media(prefers-color-scheme:dark){.l{fill:#9aa3b2}.f{fill:#1e2228;stroke:#4a525f}.n{stroke:#e6e8ec}}"
)


class _Picture:
    """The elements of a picture, whose size grows with them."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._parts: list[str] = []
        self._width = self._height = 0.0

    def label(self, x: float, y: float, text: str) -> None:
        """Add a text outside of boxes."""
        self._parts.append(f'<text class="l" x="{x:g}" y="{y + LINE * 0.7:g}">{escape(text)}</text>')
        self._grow(x + 7.3 * len(text), y + LINE)

    def box(self, x: float, y: float, width: float, text: str, owner: int | None, classes: str = "") -> None:
        """Add a box with one line of text. owner: the request whose colour it has; None: a free block. classes: "n"
        new, "d" dashed.
        """
        fill = 'class="f' if owner is None else f'fill="hsl({owner * HUE % 360:g} 60% 78%)" class="'
        self._parts.append(
            f'<rect {fill} {classes}" x="{x:g}" y="{y:g}" width="{width:g}" height="{LINE}" rx="3"/>'
            f'<text x="{x + width / 2:g}" y="{y + LINE * 0.7:g}" text-anchor="middle">{escape(text)}</text>'
        )
        self._grow(x + width, y + LINE)

    def _grow(self, x: float, y: float) -> None:
        self._width, self._height = max(self._width, x), max(self._height, y)

    def __str__(self) -> str:
        width, height = self._width + GAP, self._height + GAP
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
                f'viewBox="0 0 {width:g} {height:g}" role="img">',
                f"<title>{escape(self._title)}</title><style>{STYLE}</style>",
                *self._parts,
                "</svg>\n",
            ]
        )


def step_picture(batch: InputBatch, text_of: TextOf, group: int = 0) -> str:
    """Return the tokens of a step as SVG, each with its text, position and slot, in the colour of its request.

    Drafts have a dashed border. A token that is not known yet is "?".
    """
    picture = _Picture(f"Step {batch.step}: its tokens, with their positions and slots")
    num_known = batch.states.num_tokens[batch.idx_mapping]
    for i, name in enumerate(("request", "token", "position", "slot")):
        picture.label(GAP, GAP + i * (LINE + 4), name)
    for t in range(batch.num_tokens):
        b, p = int(batch.req_indices[t]), int(batch.positions[t])
        end = int(batch.query_start_loc[b + 1])
        is_draft = t >= end - int(batch.num_draft_tokens[b])
        is_unknown = not is_draft and p >= num_known[b]
        word = "?" if is_unknown else text_of(int(batch.input_ids[t]))
        owner = int(batch.req_ids[b])
        for i, text in enumerate((str(owner), word, str(p), str(int(batch.slot_mapping[group][t])))):
            mark = ("d n" if is_draft or is_unknown else "") if i == 1 else ""
            picture.box(LABEL + t * CELL, GAP + i * (LINE + 4), CELL - 6, text, owner, mark)
    return str(picture)


def blocks_picture(batch: InputBatch, text_of: TextOf, num_blocks: int, group: int = 0) -> str:
    """Return the block tables and the pool of a step as SVG. Every slot shows its token, slots that the step writes
    have a border, and a block that several requests hold has the colour of the first request.

    num_blocks: the number of blocks of the pool, block 0 included.
    """
    states, table = batch.states, batch.states.block_tables[group]
    size = table.group.block_size
    picture = _Picture(f"Step {batch.step}: the block tables, and the tokens in each block")
    y: float = GAP
    owners: dict[int, int] = {}
    texts: dict[int, str] = {}
    for row in states.explain().rows:
        owner, row_blocks = int(row.req_id), [block for block in row.blocks[group] if block != states.null_block]
        picture.label(GAP, y, f"request {owner}")
        for entry, block in enumerate(row_blocks):
            owners.setdefault(block, owner)
            picture.box(LABEL + entry * (LINE + 12), y, LINE + 8, str(block), owners[block])
        for p in range(row.num_computed_tokens):
            texts[row_blocks[p // size] * size + p % size] = text_of(int(states.token_ids[row.row, p]))
        y += LINE + 4
    written = batch.slot_mapping[group][: batch.num_tokens].tolist()
    texts |= {slot: text_of(int(i)) for slot, i in zip(written, batch.input_ids, strict=False)}
    y += GAP
    cell = 56
    per_line = max(1, 640 // (cell * size + GAP))
    for block in range(1, num_blocks):
        line, column = divmod(block - 1, per_line)
        x, top = GAP + column * (cell * size + GAP), y + line * (2 * LINE + GAP)
        picture.label(x, top, f"block {block}")
        for slot in range(block * size, block * size + size):
            is_new = "n" if slot in written else ""
            place = x + (slot - block * size) * cell
            picture.box(place, top + LINE, cell - 2, texts.get(slot, ""), owners.get(block), is_new)
    return str(picture)
