"""The seam between the engine and the model: a step is launched, and its samples are awaited."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, Protocol, runtime_checkable

from foreword.arrays import I32, U8
from foreword.batch import BlockOps, InputBatch, RequestStates
from foreword.errors import PlanError
from foreword.models.lora import LoraAdapter
from foreword.sampling import Sampled, StepSampling


class Capability(Enum):
    """An optional input that an executor reads, or a parameter that it follows."""

    LORA = "LoRA adapters"
    PROMPT_EMBEDS = "prompt embeddings"
    MROPE = "M-RoPE positions"
    MULTIMODAL = "multimodal features"
    BIDIRECTIONAL = "bidirectional ranges"
    POOLING = "pooling"
    ENCODER = "encoder lengths"
    RECURRENT_STATE = "recurrent KV groups"
    DRAFTED_STATES = "drafts with recurrent KV groups"
    GRAMMAR = "structured outputs"
    CONTEXT_PARALLEL = "KV groups spread over ranks"
    BLOCK_TRANSFER = "blocks of the KV pool kept outside it"


class PendingStep(Protocol):
    """A step that was launched."""

    def result(self) -> Sampled:
        """Wait for the step and return its samples. Call it once."""


@runtime_checkable
class Executor(Protocol):
    """Runs the model over a batch and samples. Between two steps it keeps the KV blocks and nothing else.

    capabilities: what it supports beyond text generation. The engine refuses requests that need more.
    hidden_size: width of the prompt embeddings that it reads, 0 for none. mrope_dims: dimensions of its model's M-RoPE
    positions, 0 for none.
    extra_size: of what the model's own encoders add to an embedding: features that later layers add, and at last how
    many positions after its own the vector sees. 0: they add nothing. Embeddings of others are filled up with zeros.
    reads_gathered_tables: True if it reads `InputBatch.block_table`; False if it reads the states' own block tables
    through ``idx_mapping``.
    """

    @property
    def capabilities(self) -> frozenset[Capability]: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def extra_size(self) -> int: ...

    @property
    def mrope_dims(self) -> int: ...

    @property
    def reads_gathered_tables(self) -> bool: ...

    def pad_for(self, num_tokens: int, num_reqs: int) -> tuple[int, int] | None:
        """Return the padded (num_tokens, num_reqs) that a step of this size is prepared with; None for no padding."""

    def runs_ahead(self, sampling: StepSampling) -> bool:
        """Return whether a step with this sampling may be launched before the result of the step before was read, and
        with a batch that is not resolved. It computes with the samples of the step before, which it reads where that
        left them. Such a batch may be replaced before its result is returned.
        """

    def launch(self, batch: InputBatch, sampling: StepSampling) -> PendingStep:
        """Apply ``batch.block_ops``, then start the step. The batch stays valid until its result was returned.

        Raise PlanError for a batch with inputs that the executor does not read; then nothing was written.
        """

    def apply_block_ops(self, ops: BlockOps) -> None:
        """Zero blocks, then copy blocks, in every layer. All copies are read before any is written."""

    def close(self) -> None:
        """End the processes of its own, at once; no step runs afterwards. Closing twice is harmless."""


@runtime_checkable
class StartedExecutor(Executor, Protocol):
    """An executor that is prepared for the steps of one engine before the first request."""

    def start(self, states: RequestStates, *, max_num_batched_tokens: int) -> Sequence[str]:
        """Prepare for steps of these states of at most so many tokens. Call it once, before the first step. Returns
        lines for a log. Raise ConfigError and MemoryError for sizes that it cannot have.
        """
        ...


class BlockStore(Protocol):
    """The memory of an executor's blocks, of every layer."""

    def copy_blocks(self, sources: I32, destinations: I32) -> None:
        """Copy whole blocks in every layer. All sources are read before any destination is written."""

    def zero_blocks(self, blocks: I32) -> None:
        """Fill whole blocks with zeros in every layer."""


class TransferStore(BlockStore, Protocol):
    """A `BlockStore` whose blocks can be kept outside of it, as bytes.

    block_bytes: the size of one block in all layers. state_bytes: that of a state of recurrent layers, whose numbers
    follow those of blocks; 0 without such states.
    """

    @property
    def block_bytes(self) -> int: ...

    @property
    def state_bytes(self) -> int: ...

    def read_blocks(self, blocks: I32, data: U8) -> None:
        """Copy whole blocks, or states, into ``data``, uint8 [len(blocks), bytes of one]."""

    def write_blocks(self, blocks: I32, data: U8) -> None:
        """Copy ``data`` into whole blocks, or states."""


class AdapterStore(Protocol):
    """The LoRA adapters that an executor holds, by their numbers."""

    def load(self, lora_id: int, adapter: LoraAdapter) -> int:
        """Hold an adapter under a number that is free. Return the bytes that it takes."""

    def drop(self, lora_id: int) -> None:
        """Free an adapter that no request uses, if it is held."""


def apply_block_ops(ops: BlockOps, store: BlockStore) -> None:
    """Zero blocks, then copy blocks. All copies are read before any is written."""
    if len(ops.zero):
        store.zero_blocks(ops.zero)
    if len(ops.copies):
        store.copy_blocks(ops.copies[:, 0].copy(), ops.copies[:, 1].copy())


class TransferExecutor(Executor, Protocol):
    """An executor with `Capability.BLOCK_TRANSFER`: its blocks can be kept outside the pool, between two steps.

    block_layout: what the bytes of a block depend on besides the model and the size of a block, such as the format of
    keys and values. Equal texts mean that one process may write blocks that another one has read.
    """

    @property
    def block_layout(self) -> str: ...

    @property
    def block_bytes(self) -> int: ...

    @property
    def state_bytes(self) -> int: ...

    def read_blocks(self, blocks: I32) -> U8:
        """Return whole blocks, or states, uint8 [len(blocks), bytes of one], in memory of their own."""

    def write_blocks(self, blocks: I32, data: U8) -> None:
        """Copy ``data``, uint8 [len(blocks), bytes of one], into whole blocks, or states."""


class LoraExecutor(Executor, Protocol):
    """An executor with `Capability.LORA`. A request's ``lora_id`` is the number of an adapter that it holds."""

    def load_lora(self, lora_id: int, adapter: LoraAdapter) -> int:
        """Hold an adapter under a number that is free, until `drop_lora`. Returns the bytes that it takes."""

    def drop_lora(self, lora_id: int) -> None:
        """Free an adapter that no request uses, if it is held."""


def check_inputs(batch: InputBatch, capabilities: frozenset[Capability]) -> None:
    """Raise PlanError for KV groups and for an input of a request of the batch that are not among the capabilities.

    O(1) while no live request has an input of these kinds, and without a loop over requests where all are supported.
    """
    states = batch.states
    if states.has_special_groups:
        _check_groups(states, capabilities)
    extras = states.extras
    if not extras.rows and not states.loras:
        return
    rows = batch.idx_mapping
    for capability, tensor, given in (
        (Capability.LORA, "lora_id", states.lora_id),
        (Capability.PROMPT_EMBEDS, "prompt_embeds", extras.prompt_embeds),
        (Capability.MROPE, "mrope_positions", extras.mrope_positions),
        (Capability.MROPE, "mrope_positions", states.rope_delta),
        (Capability.MULTIMODAL, "mm_features", extras.mm_features),
        (Capability.BIDIRECTIONAL, "bidirectional_ranges", extras.bidirectional_ranges),
        (Capability.POOLING, "pooling_params", extras.pooling_params),
        (Capability.ENCODER, "encoder_len", states.encoder_len),
    ):
        if capability in capabilities:
            continue
        if isinstance(given, dict):
            found = [row for row in rows.tolist() if row in given] if given else []
        else:
            found = rows[given[rows] != 0].tolist()
        if found:
            raise _lacks(capability, step=batch.step, request=states.req_id_of(found[0]), tensor=tensor)


def _check_groups(states: RequestStates, capabilities: frozenset[Capability]) -> None:
    for g, table in enumerate(states.block_tables):
        for capability, is_given in (
            (Capability.RECURRENT_STATE, table.group.recurrent),
            (Capability.DRAFTED_STATES, table.group.recurrent and states.max_num_draft_tokens > 0),
            (Capability.CONTEXT_PARALLEL, table.context_parallel is not None),
        ):
            if is_given and capability not in capabilities:
                raise _lacks(capability, tensor=f"kv_groups[{g}]")


def _lacks(capability: Capability, **where: Any) -> PlanError:
    return PlanError(
        f"the executor does not support {capability.value} (Capability.{capability.name}); "
        "use one that does, or leave the input out",
        **where,
    )
