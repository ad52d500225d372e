"""What a batch can be turned into on demand. Nothing here is computed, or imported, in a step that does not ask."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from foreword.arrays import I32, I64, AnyArray, Bools
from foreword.errors import PlanError

if TYPE_CHECKING:
    from foreword.batch.adapters.chunked_local import LocalBatches
    from foreword.batch.adapters.common_attention_metadata import CommonAttentionMetadata
    from foreword.batch.adapters.dense import DenseInputs
    from foreword.batch.adapters.flash_attn import FlashAttnVarlen
    from foreword.batch.adapters.flashinfer import FlashInferPlan
    from foreword.batch.adapters.nano_vllm import Context
    from foreword.batch.adapters.page_size_one import TokenTables
    from foreword.batch.features.classify import Split
    from foreword.batch.features.context_parallel import PrefillShare
    from foreword.batch.features.lora import LoraMapping
    from foreword.batch.features.multimodal import MultiModalInputs
    from foreword.batch.features.pooling import PoolingMetadata
    from foreword.batch.features.recurrent import StateIndices
    from foreword.batch.prepare.buffers import InputBuffers
    from foreword.batch.prepare.inputs import InputBatch
    from foreword.batch.state.request_states import RequestStates
    from foreword.batch.state.sampling_metadata import SamplingMetadata


class BatchViews:
    """Derived tensors and other engines' forms of an `InputBatch`: each a function of the batch and the states."""

    __slots__ = ()
    _states: RequestStates
    _buffers: InputBuffers
    _scalars: tuple[int, ...]

    def _alive(self) -> None:
        raise NotImplementedError

    @property
    def _batch(self) -> InputBatch:
        return cast("InputBatch", self)

    # -- what few requests have ----------------------------------------------------------------------------------

    @property
    def is_token_ids(self) -> Bools:
        """bool [Tp]: False where the input is a prompt embedding, not input_ids. True on padding."""
        from foreword.batch.features.embeds import is_token_ids

        return is_token_ids(self._states, self._batch)

    def prompt_embeds(self) -> tuple[I64, AnyArray]:
        """(token rows int64 [N], vectors [N, hidden]) to lay over the embedded input_ids."""
        from foreword.batch.features.embeds import prompt_embeds

        return prompt_embeds(self._states, self._batch)

    def mm_inputs(self) -> MultiModalInputs:
        """Which encoder outputs the step reads, and where their rows go."""
        from foreword.batch.features.multimodal import mm_inputs

        return mm_inputs(self._states, self._batch)

    def mrope_positions(self, num_dims: int = 3) -> I64:
        """Rotary positions int64 [num_dims, Tp]: text counts alike in all dimensions."""
        from foreword.batch.features.multimodal import mrope_positions

        return mrope_positions(self._states, self._batch, num_dims)

    @property
    def encoder_seq_lens(self) -> I32:
        """int32 [Bp]: encoder tokens that cross-attention reads, 0 on padding."""
        from foreword.batch.features.multimodal import encoder_seq_lens

        return encoder_seq_lens(self._states, self._batch)

    def lora_mapping(self) -> LoraMapping:
        """The adapter of each request, token and logit row."""
        from foreword.batch.features.lora import lora_mapping

        return lora_mapping(self._states, self._batch)

    def pooling_metadata(self) -> PoolingMetadata:
        """The pooling requests among the scheduled, and which of them have a result in this step."""
        from foreword.batch.features.pooling import pooling_metadata

        return pooling_metadata(self._states, self._batch)

    def state_indices(self, group: int = 0) -> StateIndices:
        """The blocks that hold recurrent states before and after the step."""
        from foreword.batch.features.recurrent import state_indices

        return state_indices(self._batch, group)

    # -- kinds of request, shares of ranks -------------------------------------------------------------------------

    @property
    def is_decode(self) -> Bools:
        """bool [B]: one known token over context, and its drafts."""
        from foreword.batch.features.classify import is_decode

        return is_decode(self._batch)

    @property
    def uniform_decode_len(self) -> int | None:
        """The query length that all requests have, if all are decodes."""
        from foreword.batch.features.classify import uniform_decode_len

        return uniform_decode_len(self._batch)

    def split_decodes_and_prefills(
        self, decode_threshold: int = 1, *, require_uniform: bool = False, short_extends_are_decodes: bool = True
    ) -> Split:
        """How many leading requests a kernel's decode path may take. See `foreword.batch.features.classify`."""
        from foreword.batch.features.classify import split_decodes_and_prefills

        return split_decodes_and_prefills(
            self._batch,
            decode_threshold,
            require_uniform=require_uniform,
            short_extends_are_decodes=short_extends_are_decodes,
        )

    def share_prefill(self, size: int, rank: int) -> PrefillShare:
        """This rank's part of the step's tokens under prefill context parallelism."""
        from foreword.batch.features.context_parallel import share_prefill

        return share_prefill(self._batch, size, rank)

    # -- sampling ------------------------------------------------------------------------------------------------

    def sampling_metadata(self) -> SamplingMetadata:
        """Parameters of the requests [B]: the same object until the batch's members or their parameters change."""
        self._alive()
        return self._states.sampling_metadata.get(self._buffers.idx_mapping[: self._scalars[0]])

    def logits_sampling_metadata(self) -> SamplingMetadata:
        """The same for the logit rows [L]: each request once, and once more for each of its drafts."""
        return self._states.sampling_metadata.get(self._batch.expanded_idx_mapping)

    # -- other kernels' arguments --------------------------------------------------------------------------------

    def to_flash_attn(self, group: int = 0) -> FlashAttnVarlen:
        """The step as FlashAttention's varlen interface takes it."""
        from foreword.batch.adapters.flash_attn import flash_attn_varlen

        return flash_attn_varlen(self._batch, group)

    def to_flashinfer(self, group: int = 0) -> FlashInferPlan:
        """The step as FlashInfer's paged wrappers take it."""
        from foreword.batch.adapters.flashinfer import flashinfer_plan

        return flashinfer_plan(self._batch, group)

    def to_token_tables(self, group: int = 0) -> TokenTables:
        """The step for engines whose pages hold one token: the cache slot of every position."""
        from foreword.batch.adapters.page_size_one import token_tables

        return token_tables(self._batch, group)

    def to_dense(self, group: int = 0) -> DenseInputs:
        """The step as padded rectangles with a mask."""
        from foreword.batch.adapters.dense import dense_inputs

        return dense_inputs(self._batch, group)

    def to_nano_vllm(self, group: int = 0) -> Context:
        """The step as nano-vllm's attention context."""
        from foreword.batch.adapters.nano_vllm import nano_vllm_context

        return nano_vllm_context(self._batch, group)

    def to_common_attention_metadata(self, group: int = 0) -> CommonAttentionMetadata:
        """The step under vLLM's CommonAttentionMetadata names."""
        from foreword.batch.adapters.common_attention_metadata import common_attention_metadata

        return common_attention_metadata(self._batch, group)

    def to_chunked_local(self, chunk_size: int, group: int = 0) -> LocalBatches:
        """The step cut into virtual requests, for chunked-local attention."""
        from foreword.batch.adapters.chunked_local import chunked_local

        return chunked_local(self._batch, chunk_size, group)

    def local_seq_lens(self, group: int = 0) -> I32:
        """int32 [B]: keys of each request that this rank holds; all of them where the group is not spread."""
        batch = self._batch
        spread = self._states.block_tables[group].context_parallel is not None
        lens = batch.dcp_local_seq_lens if spread else None
        return (batch.seq_lens if lens is None else lens)[: batch.num_reqs]

    def refuse_spread(self, group: int, what: str) -> None:
        """PlanError where the group is spread over ranks, for forms that take all keys of a request to be here."""
        if self._states.block_tables[group].context_parallel is not None:
            raise PlanError(f"{what} needs all keys of a request on one rank", tensor=f"group {group}",
                            expected="context_parallel=False", got="True")  # fmt: skip

    def sliding_window(self, group: int = 0) -> int | None:
        """W of the group: a query at position p sees keys in (p − W, p]."""
        return self._states.block_tables[group].group.sliding_window
