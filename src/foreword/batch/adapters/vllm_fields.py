"""The fields of vLLM's `SchedulerOutput` in all releases that are recorded (docs/vllm-compatibility.md)."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from foreword.errors import PlanError

READ = frozenset(
    {
        "finished_req_ids", "free_encoder_mm_hashes", "has_structured_output_requests", "kv_cache_block_copies",
        "new_block_ids_to_zero", "num_scheduled_tokens", "preempted_req_ids", "scheduled_cached_reqs",
        "scheduled_encoder_inputs", "scheduled_new_reqs", "scheduled_spec_decode_tokens",
    }
)  # fmt: skip

WITHOUT_EFFECT: Mapping[str, str] = {
    "aux_output_connector_metadata": "other outputs of a worker",
    "ec_connector_metadata": "transfer of encoder outputs",
    "ec_manager_metadata": "the cache of encoder outputs",
    "encoder_input_updates": "pixels and sounds, not their places in the prompt",
    "has_sync_kv_loads": "when transferred blocks are loaded",
    "kv_connector_block_state": "the scheduler's own; None where a worker sees it",
    "kv_connector_metadata": "transfer of blocks",
    "num_common_prefix_blocks": "cascade attention, which later releases lack",
    "num_invalid_spec_tokens": "a statistic of drafts",
    "num_spec_tokens_to_schedule": "how many drafts are proposed after the step",
    "partial_tail_offloads": "copies of blocks to other memory",
    "pending_structured_output_tokens": "when the masks of grammars are made",
    "scheduled_encoder_input_stats": "a statistic of encoder inputs",
    "skip_drafts": "whether drafts are proposed after the step",
    "total_num_scheduled_tokens": "the sum of num_scheduled_tokens",
}
"""Field that no tensor of the step depends on → its purpose."""

REFUSED: Mapping[str, str] = {
    "block_table_updates": "block tables of running requests are replaced, which is not followed"
}
"""Field → the reason why a value in it is refused."""


class KnownFields:
    """Checks the fields of each type of scheduler output once.

    plain_type: a type without a field that is refused, whose outputs need no further check.
    """

    __slots__ = ("_refused", "_type", "plain_type")

    def __init__(self) -> None:
        self.plain_type: type | None = None
        self._type: type | None = None
        self._refused: tuple[str, ...] = ()

    def check(self, output: Any) -> None:
        """Warn once of unknown fields. Raise PlanError for a value in a field that is refused."""
        if type(output) is not self._type:
            self._look_at(type(output))
        for name in self._refused:
            if value := getattr(output, name):
                raise PlanError(f"SchedulerOutput.{name}: {REFUSED[name]}", expected=None, got=value)

    def _look_at(self, kind: type) -> None:
        names = [one.name for one in fields(kind)] if is_dataclass(kind) else []
        self._type, self._refused = kind, tuple(name for name in names if name in REFUSED)
        self.plain_type = None if self._refused else kind
        unknown = [name for name in names if name not in READ and name not in WITHOUT_EFFECT and name not in REFUSED]
        if unknown:
            warnings.warn(
                f"{kind.__name__} has fields that are not known here: {', '.join(unknown)}. What they decide is not in "
                "the steps that are prepared: compare docs/vllm-compatibility.md, or use a release that it lists",
                RuntimeWarning,
                stacklevel=5,
            )
