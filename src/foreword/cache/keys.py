"""Extra keys of a prefix: equal tokens are equal content only under the same adapter, images and salt."""

from __future__ import annotations

from collections.abc import Iterable

from foreword.cache.prefix import ExtraKeys


def prefix_keys(
    block_size: int,
    *,
    lora_id: int = 0,
    salt: str | None = None,
    images: Iterable[tuple[str, int, int]] = (),
) -> dict[int, ExtraKeys]:
    """Block index → extra keys, for `KVCacheManager.lookup` and `attach`.

    The adapter and the salt (which keeps tenants apart) go into the first block and reach all later ones through the
    chain. images: (content hash, first position, length); each goes into every block it touches, with its offset.
    """
    keys: dict[int, list[object]] = {}
    if lora_id:
        keys.setdefault(0, []).append(("adapter", lora_id))
    if salt is not None:
        keys.setdefault(0, []).append(("salt", salt))
    for content, start, length in images:
        for block in range(start // block_size, (start + length - 1) // block_size + 1):
            keys.setdefault(block, []).append(("image", content, start - block * block_size))
    return {block: tuple(parts) for block, parts in keys.items()}
