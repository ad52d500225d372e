"""Extra keys of a prefix: equal tokens are equal content only under the same adapter, images, embeddings and salt."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from foreword.arrays import F32, I32, AnyArray, Bools
from foreword.batch import PromptInputs
from foreword.cache.prefix import ExtraKeys
from foreword.hashes import blake2b


def prefix_keys(
    block_size: int,
    *,
    salt: str | None = None,
    images: Iterable[tuple[str, int, int]] = (),
    inputs: PromptInputs | None = None,
    spans: I32 | None = None,
    prompt: I32 | None = None,
    max_len: int = 0,
) -> dict[int, ExtraKeys]:
    """Return block index → extra keys, for `KVCacheManager.lookup` and `attach`.

    The salt (which keeps tenants apart) goes into the first block and reaches all later ones through the chain.
    images: (content hash, first position, length); each goes into every block it touches, with its offset.
    inputs: every block has a hash of its embeddings, and one of its rotary positions where they are not those of text.
    The input of an encoder goes into the first block, like the salt. spans: [n, 2] (first, end) of embeddings
    that see each other, each of which is treated as an image. prompt: its token ids. The content of a whole
    bidirectional range goes into the first block of the range, like the salt.
    max_len: the most tokens that the request may get.
    """
    keys: dict[int, list[object]] = {}
    if salt is not None:
        keys.setdefault(0, []).append(("salt", salt))
    if inputs is not None and "encoder_input" in inputs:
        keys.setdefault(0, []).append(("encoder", _digest(inputs["encoder_input"])))
    if inputs is not None and prompt is not None and "bidirectional_ranges" in inputs:
        vectors = [inputs["prompt_embeds"], inputs["prompt_is_token_id"]] if "prompt_embeds" in inputs else []
        for a, b in inputs["bidirectional_ranges"].tolist():
            content = _digest(*(part[a:b] for part in (prompt, *vectors)))
            keys.setdefault(a // block_size, []).append(("range", content, a % block_size, b - a))
    elif inputs is not None and spans is not None and len(spans):
        of_spans = [(_digest(inputs["prompt_embeds"][a:b]), a, b - a) for a, b in spans.tolist()]
        images = [*images, *of_spans]
    for content, start, length in images:
        for block in range(start // block_size, (start + length - 1) // block_size + 1):
            keys.setdefault(block, []).append(("image", content, start - block * block_size))
    if inputs is not None and "prompt_embeds" in inputs:
        for block, content in _embeds(block_size, inputs["prompt_embeds"], inputs["prompt_is_token_id"]):
            keys.setdefault(block, []).append(("embeds", content))
    if inputs is not None and "mrope_positions" in inputs:
        for block, content in _rotations(block_size, inputs["mrope_positions"], inputs["mrope_delta"], max_len):
            keys.setdefault(block, []).append(("rotation", content))
    return {block: tuple(parts) for block, parts in keys.items()}


def with_adapter(keys: Mapping[int, ExtraKeys], lora_id: int, name: str | None) -> Mapping[int, ExtraKeys]:
    """Return the keys of `prefix_keys` for an adapter, unchanged for number 0. Its key reaches all blocks through the
    chain.
    """
    return {**keys, 0: (("adapter", lora_id, name), *keys.get(0, ()))} if lora_id else keys


def adapter_of(extra: ExtraKeys) -> tuple[int, str] | None:
    """Return the number and the name of the adapter among the keys of a first block."""
    match extra:
        case (("adapter", int(lora_id), str(name)), *_):
            return lora_id, name
    return None


def salt_of(extra: ExtraKeys) -> str | None:
    """Return the salt among the keys of a first block."""
    found = (part[1] for part in extra if isinstance(part, tuple) and part[0] == "salt")
    return next((salt for salt in found if isinstance(salt, str)), None)


def _embeds(block_size: int, embeds: F32, is_token_id: Bools) -> Iterator[tuple[int, str]]:
    """Return the blocks with embeddings, each with a hash of the embeddings and their places in the block."""
    embedded = np.flatnonzero(~is_token_id)
    blocks, starts = np.unique(embedded // block_size, return_index=True)
    for block, at in zip(blocks.tolist(), np.split(embedded, starts)[1:], strict=True):
        yield block, _digest(at - block * block_size, embeds[at])


def _rotations(block_size: int, positions: I32, delta: int, max_len: int) -> Iterator[tuple[int, str]]:
    """Return the blocks of up to max_len tokens in which some rotary position is not the token's own, each with a hash
    of the differences. The hash does not depend on how many of the tokens the table has.
    """
    num_blocks = -(-max_len // block_size)
    shifts = np.full((len(positions), num_blocks * block_size), delta, np.int64)
    known = positions[:, : shifts.shape[1]]
    shifts[:, : known.shape[1]] = known - np.arange(known.shape[1])
    of_blocks = shifts.reshape(len(positions), num_blocks, block_size).swapaxes(0, 1)
    for block in np.flatnonzero(of_blocks.any((1, 2))).tolist():
        yield block, _digest(of_blocks[block])


def _digest(*arrays: AnyArray) -> str:
    hashed = blake2b(digest_size=16)
    for array in arrays:
        hashed.update(np.ascontiguousarray(array).data)
    return hashed.hexdigest()
