"""The reason why a prompt was not reused further, and the place where it differs from the nearest cached content."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal

import numpy as np

from foreword.cache.hits import PrefixHit
from foreword.cache.keys import salt_of
from foreword.cache.prefix import MAX_PARTIAL_CANDIDATES, NO_EXTRA, BlockKeys, ExtraKeys, PrefixTree, common_tokens

MissReason = Literal[
    "off", "never_computed", "differs", "template", "salt", "adapter", "image", "input",
    "evicted", "window", "state", "part_of_block", "no_blocks",
]  # fmt: skip
SHOWN_TOKENS = 8
"""The number of tokens that are kept of each side, from the first difference on."""
_OF_KEYS: dict[object, MissReason] = {"salt": "salt", "adapter": "adapter", "image": "image"}

MEANING: dict[MissReason, str] = {
    "off": "the request may not start from cached blocks",
    "never_computed": "nothing in the cache continues like this prompt",
    "differs": "the nearest cached content goes on with another token",
    "template": "the nearest cached content goes on with another token, and one of both is a special token: the "
    "chat template went another way",
    "salt": "equal tokens are cached under another salt",
    "adapter": "equal tokens are cached under another adapter",
    "image": "equal tokens are cached with another image",
    "input": "equal tokens are cached with other embeddings, positions or encoder input, or in another prompt whose "
    "tokens see each other",
    "evicted": "equal tokens were cached, and their blocks were given to other requests",
    "window": "equal tokens are cached, and the blocks in their sliding window are gone",
    "state": "equal tokens are cached, and no recurrent state was kept there",
    "part_of_block": "equal tokens are a part of a cached block, which is not copied",
    "no_blocks": "equal tokens are cached, and there were too few free blocks to keep them",
}
"""The meaning of each reason."""


@dataclass(frozen=True, slots=True)
class CacheMiss:
    """The reason why a prompt was not reused further, determined at the first admission of the request.

    num_reused of num_tokens were. position: the first token that was not, or in which the nearest cached content
    differs. ours, theirs: ids of the prompt and of that content from there on, at most `SHOWN_TOKENS`; theirs may be of
    another client, and are empty where the cache has nothing else.
    """

    reason: MissReason
    num_tokens: int
    num_reused: int
    position: int
    ours: tuple[int, ...] = ()
    theirs: tuple[int, ...] = ()

    def public(self) -> CacheMiss:
        """Return the part that a client may know, without the content of others and that under another salt."""
        return replace(self, theirs=(), reason="never_computed" if self.reason == "salt" else self.reason)

    def among(self, special: Collection[int], ends: Collection[int]) -> CacheMiss:
        """Return it with the reason "template" where one side goes on with a special token that does not end a text."""
        first = {*self.ours[:1], *self.theirs[:1]}
        is_template = self.reason == "differs" and any(token in special and token not in ends for token in first)
        return replace(self, reason="template") if is_template else self

    def explained(self, decode: Callable[[list[int]], str] | None) -> list[str]:
        """Return the explanation as lines, with the texts of both sides."""
        lines = [f"not reused from token {self.position} on: {MEANING[self.reason]}"]
        if decode is not None:
            texts = [("cached", self.theirs), ("prompt", self.ours)]
            lines += [f"  {name} {decode(list(ids))!r}" for name, ids in texts if ids and self.theirs]
        return lines


def parting(tree: PrefixTree, hit: PrefixHit, data: bytes, keys: BlockKeys) -> tuple[MissReason, int, bytes]:
    """Return where a prompt parts from the nearest content of the tree: the reason, the position, and the bytes of that
    content from there on. Looks at a few of the newest blocks that follow the known ones.

    data: the prompt, int32.
    """
    size = tree.block_size
    at, node = (hit.path[-1].end, hit.path[-1]) if hit.path else (0, tree.root)
    at = min(at, hit.num_known // size)
    begin, rest, extra = at * size, data[4 * at * size :], keys.get(at, NO_EXTRA)
    before = data[4 * (begin - size) : 4 * begin] if at else b""
    if tree.forgotten.has(at, before, rest[: 4 * size], extra, keys.get(0, NO_EXTRA)):
        return "evicted", begin, b""
    found: list[tuple[bytes, ExtraKeys]]
    if at < node.end:  # inside a run, whose blocks after the first have no keys
        found = [(node.tokens[4 * size * (at - node.start) :], NO_EXTRA)]
    else:
        siblings = node.children.get(rest[:4], {})
        found = [(other.tokens, other.extra) for other in islice(reversed(siblings.values()), MAX_PARTIAL_CANDIDATES)]
    if not found:
        newest = next(iter(reversed(node.children.values())), None) if at else None
        if newest is None:
            return "never_computed", begin, b""
        return "differs", begin, next(reversed(newest.values())).tokens

    def nearness(one: tuple[bytes, ExtraKeys]) -> tuple[bool, int, bool, bool]:
        shared = common_tokens(one[0], rest)  # content under another salt does not hide that under the own one
        return salt_of(one[1]) == salt_of(extra), shared, one[1] == extra, len(one[0]) > 4 * shared

    theirs, their_extra = max(found, key=nearness)
    shared = common_tokens(theirs, rest)
    if shared and their_extra != extra:
        kinds = {part[0] for part in {*their_extra} ^ {*extra} if isinstance(part, tuple)}
        reason = next((_OF_KEYS[kind] for kind in ("salt", "adapter", "image") if kind in kinds), None)
        return reason or "input", begin, b""
    if len(rest) == 4 * shared:  # all of it is known, and no block has its content
        return "evicted", begin, b""
    return "differs" if len(theirs) > 4 * shared else "never_computed", begin + shared, theirs[4 * shared :]


def first_ids(data: bytes) -> tuple[int, ...]:
    """Return the first ids of some int32 bytes."""
    return tuple(np.frombuffer(data[: 4 * SHOWN_TOKENS], np.int32).tolist())
