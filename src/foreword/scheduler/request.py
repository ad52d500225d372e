"""A request of the scheduler: waiting with its tokens, or running in a row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from foreword.arrays import I32
from foreword.batch import CheckedParams, CheckedPrompt, PoolingParams, PromptInputs, SamplingParams
from foreword.cache import CacheMiss
from foreword.cache.manager import NO_KEYS
from foreword.cache.prefix import BlockKeys

NO_TOKENS: I32 = np.zeros(0, np.int32)
NO_SPANS: I32 = np.zeros((0, 2), np.int32)
NONE_LOADED: Mapping[str, int] = {}
ReadBlocks = tuple[tuple[int, int], Mapping[str, int]]
"""The data that was read for a request from outside the pool: how many of its tokens could be reused before and after,
and the blocks of each tier.
"""


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """One sequence to complete.

    arrival: its unique number in the order of arrival. priority: smaller first. owner, share: its owner and the owner's
    weight under the fair policy. max_len: the number of known tokens, with the prompt, at which it ends; one more than
    the prompt for a pooling request. pooling_params: used in place of params, which are not read then. keys: extra
    prefix keys, see `prefix_keys`. inputs: the inputs of its prompt other than tokens. spans: int32 [n, 2], ascending
    (first, end) of prompt tokens that one step computes, none longer than a step. reuse_prefix: whether it may start
    from cached blocks. streams: whether its tokens are awaited one by one, see `PromptPace`.

    The scheduler keeps:
    row             its row while it runs, −1 while it waits
    output          the output tokens at its last preemption or end; while it runs they are in its row
    key             its place in the order of the policy
    num_cached      prompt tokens found in the cache at its first admission
    hit_report      the same in words: "reused 112 of 128; differs at position 112"
    cache_miss      why not more, None if it was all but the last token
    loaded_tokens   those of num_cached that were read from outside the pool for it, by the name of the tier
    num_preemptions number of preemptions
    was_preempted   whether it was preempted and not considered by `Scheduler.take_preempted` since
    read_blocks     what was read for it before its first admission; None: nothing
    has_run         whether a step computed tokens of it since its last admission
    """

    request_id: str
    prompt: I32 | CheckedPrompt
    arrival: int
    max_len: int
    params: SamplingParams | CheckedParams = field(default_factory=SamplingParams)
    pooling_params: PoolingParams | None = None
    priority: int = 0
    owner: str = ""
    share: float = 1.0
    lora_id: int = 0
    keys: BlockKeys = field(default_factory=lambda: NO_KEYS)
    inputs: PromptInputs = field(default_factory=PromptInputs)
    spans: I32 = field(default_factory=lambda: NO_SPANS)
    reuse_prefix: bool = True
    streams: bool = False
    row: int = -1
    output: I32 = field(default_factory=lambda: NO_TOKENS)
    key: tuple[int, ...] | None = None
    num_cached: int = 0
    hit_report: str = ""
    cache_miss: CacheMiss | None = None
    loaded_tokens: Mapping[str, int] = field(default_factory=lambda: NONE_LOADED)
    read_blocks: ReadBlocks | None = None
    num_preemptions: int = 0
    was_preempted: bool = False
    has_run: bool = False

    def __len__(self) -> int:
        """Return the number of known tokens while it waits."""
        return len(self.prompt) + len(self.output)

    def whole(self, computed: int, n: int, most: int) -> int:
        """Return n, the number of tokens after the computed ones, or fewer that end in no span; if none, a span of at
        most ``most``.
        """
        if not len(self.spans):
            return n
        at = int(np.searchsorted(self.spans[:, 1], computed + n, side="right"))
        if at == len(self.spans) or self.spans[at, 0] >= computed + n:
            return n
        before, through = (int(place) - computed for place in self.spans[at])
        return before if before > 0 else through if through <= most else 0

    def tokens(self) -> I32:
        """Return prompt and output, int32 [len(self)], while it waits."""
        prompt = self.prompt.token_ids if isinstance(self.prompt, CheckedPrompt) else self.prompt
        return np.concatenate([prompt, self.output]) if len(self.output) else prompt
