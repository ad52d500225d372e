"""The native module's surface, as its Python callers use it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

_I32 = npt.NDArray[np.int32]
_I64 = npt.NDArray[np.int64]
_F32 = npt.NDArray[np.float32]

def copy_samples(source: _I32, to: _I32) -> int: ...

class RowsCore:
    def __init__(
        self,
        states: dict[str, npt.NDArray[Any]],
        sampling: dict[str, Any],
        row_of: dict[str, int],
        req_ids: int,
        free: list[int],
        vocab_size: int,
        max_num_draft_tokens: int,
    ) -> None: ...
    def add_table(
        self,
        table: _I32,
        num_blocks: _I32,
        content_id: _I64,
        holds_null: npt.NDArray[np.bool_],
        null_block: int,
    ) -> None: ...
    def admit(
        self,
        req_ids: Sequence[str],
        rows: _I32,
        tokens: _I32,
        num_tokens: _I32,
        prompt_len: _I32 | None,
        num_computed: _I32 | None,
        blocks: Sequence[_I32],
        num_blocks: Sequence[_I32],
        sampling: Mapping[str, npt.NDArray[Any]] | None,
    ) -> bool: ...
    def remove(self, rows: _I32) -> bool: ...
    def renew_sampling(self, rows: _I32) -> None: ...
    def append(self, rows: object, blocks: object, group: int) -> bool: ...

class StepCache:
    def __init__(
        self,
        columns: list[tuple[str, npt.NDArray[Any], int]],
        needs: _I32,
        stamp: _I64,
        counters: _I64,
        rows: _I32,
        make: Callable[[_I32, int, dict[str, npt.NDArray[Any]]], Any],
    ) -> None: ...
    def get(self, count: int) -> Any: ...

class VllmFastPath:
    def __init__(
        self,
        rows: RowsCore,
        arrays: dict[str, npt.NDArray[Any]],
        observers: Sequence[object],
        adapter_of: Mapping[str, int],
        with_extras: set[int],
    ) -> None: ...
    def apply(self, output: object) -> int: ...
    def step(self, cached: object, num_scheduled: object, drafts: object) -> int: ...
    def admit(self, requests: list[Any]) -> bool: ...
    def special(self) -> list[int]: ...
    def finish(self, ids: object) -> bool: ...

class StepCore:
    def __init__(
        self,
        rows: dict[str, npt.NDArray[Any]],
        arrays: dict[str, npt.NDArray[Any]],
        vocab_size: int,
        max_num_draft_tokens: int,
    ) -> None: ...
    def add_group(
        self,
        table: dict[str, npt.NDArray[Any]],
        step: dict[str, npt.NDArray[Any]],
        *,
        block_size: int,
        tokens_per_block: int,
        sliding_window: int,
        context_parallel: tuple[int, int, int],
        recurrent: bool,
        null_block: int,
    ) -> None: ...
    def set_context_parallel(self, size: int, rank: int, interleave: int) -> None: ...
    def prepare(
        self, rows: _I32, num_scheduled: _I32, drafts: _I32 | None, pad_tokens: int, pad_reqs: int, gather: bool
    ) -> tuple[int, ...] | None: ...
    def prepare_ragged(
        self,
        rows: _I32,
        num_scheduled: _I32,
        num_drafts: _I32,
        draft_ids: _I32,
        pad_tokens: int,
        pad_reqs: int,
        gather: bool,
        cancelled: npt.NDArray[np.bool_] | None,
    ) -> tuple[int, ...] | None: ...
    def advance(self, num_reqs: int) -> None: ...
    def commit(self, sampled: object, advanced: bool) -> bool: ...

class StepBuffers:
    def __init__(self, arrays: dict[str, npt.NDArray[Any]]) -> None: ...

class PacketCore:
    def __init__(
        self,
        rows: dict[str, npt.NDArray[Any]],
        stamp: _I64,
        sampling: list[npt.NDArray[Any]],
        tokens_at: int,
        records_at: int,
        record_size: int,
    ) -> None: ...
    def add_table(self, table: _I32, num_blocks: _I32, content_id: _I64, table_at: int, num_at: int) -> None: ...
    def forget(self) -> None: ...
    def generations(self) -> list[int]: ...
    def pack(self, step: StepBuffers, out: _I32) -> int: ...

class ModelInputs:
    def __init__(
        self,
        input_ids: _I32,
        positions: _I64,
        query_start_loc: _I32,
        seq_lens: _I32,
        idx_mapping: _I32,
        logits_indices: _I64,
        slot_mapping: list[_I64],
        block_tables: list[_I32],
    ) -> None: ...

class CpuModel:
    def __init__(
        self,
        *,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        vocab_size: int,
        norm_eps: float,
        query_scale: float,
        embedding_scale: float,
        activation: str,
        attn_softcap: float,
        final_softcap: float,
        num_groups: int,
        num_slots: int,
        num_blocks: int,
        block_size: int,
        kv_format: str,
        isa: str,
        num_threads: int | None,
        recurrent: dict[str, int] = ...,
        cpu_groups: list[list[int]] = ...,
    ) -> None: ...
    def packed_on(self, matrix: int) -> list[int]: ...
    def pack(self, data: npt.NDArray[np.uint8], source: str, cols: int, format: str, exact: bool) -> int: ...
    def vector(self, values: _F32) -> int: ...
    def set_embedding(self, data: npt.NDArray[np.uint8], source: str, cols: int) -> None: ...
    def add_rope(self, inv_freq: list[float], scale: float, axes: list[int] = ...) -> int: ...
    def add_layer(self, layer: dict[str, Any]) -> None: ...
    def finish(self, final_norm: int, lm_head: int) -> None: ...
    def step(
        self,
        inputs: ModelInputs,
        num_tokens: int,
        num_reqs: int,
        num_logits: int,
        logits_indices: _I64 | None = None,
        embed_rows: _I64 | None = None,
        embeds: _F32 | None = None,
        mrope_positions: _I64 | None = None,
        lora_ids: _I32 | None = None,
        greedy: bool = False,
    ) -> _F32: ...
    def hidden_states(self, tokens: _I64) -> _F32: ...
    def add_lora(self, id: int, factors: list[tuple[int, _F32, _F32, float]]) -> int: ...
    def drop_lora(self, id: int) -> None: ...
    def copy_blocks(self, sources: _I32, destinations: _I32) -> None: ...
    def touch_cache(self) -> None: ...
    def zero_blocks(self, blocks: _I32) -> None: ...
    def stage_seconds(self) -> dict[str, float]: ...
    @property
    def packed_bytes(self) -> int: ...
    @property
    def isa(self) -> str: ...
    @property
    def num_threads(self) -> int: ...

class CpuEncoder(CpuModel):
    def __init__(
        self,
        *,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        vocab_size: int,
        norm_eps: float,
        query_scale: float,
        activation: str,
        norms_before: bool,
        isa: str,
        num_threads: int | None,
    ) -> None: ...
    def set_tables(self, positions: _F32, token_types: _F32) -> None: ...
    def add_encoder_layer(self, layer: dict[str, Any]) -> None: ...
    def finish_encoder(self, norms: dict[str, Any]) -> None: ...
    def encode(
        self,
        num_tokens: int,
        num_reqs: int,
        input_ids: _I32,
        positions: _I64,
        query_start_loc: _I32,
        token_types: _I32 | None,
    ) -> _F32: ...

class SamplingRows:
    def __init__(
        self,
        columns: dict[str, npt.NDArray[Any]],
        token_ids: _I32,
        prompt_len: _I32,
        num_tokens: _I32,
        vocab_size: int,
    ) -> None: ...
    def set(
        self,
        row: int,
        allowed: _I32 | None,
        bias_ids: _I32,
        bias: _F32,
        end_ids: _I32,
        bad_words: _I32,
        bad_word_ends: _I32,
        dry_breakers: _I32,
    ) -> None: ...
    def forget(self, row: int) -> None: ...
    def change(
        self,
        logits: _F32,
        rows: _I32,
        starts: _I32,
        cu_num_logits: _I32,
        positions: _I64,
        drafts: _I32,
        is_token_id: npt.NDArray[np.bool_] | None,
        masked: _I32 | None,
        words: _I32 | None,
        changed_rows: _I32,
        changed: _F32,
        model: CpuModel | None = None,
    ) -> None: ...
    def sample(
        self,
        logits: _F32,
        rows: _I32,
        starts: _I32,
        cu_num_logits: _I32,
        positions: _I64,
        drafts: _I32,
        is_token_id: npt.NDArray[np.bool_] | None,
        masked: _I32 | None,
        words: _I32 | None,
        changed_rows: _I32 | None,
        changed: _F32 | None,
        out: _I32,
        offsets: _I64 | None,
        ids: _I32 | None,
        logprobs: npt.NDArray[np.float64] | None,
        ranks: _I32 | None,
        model: CpuModel | None = None,
    ) -> None: ...

class SamplingBuffers:
    def __init__(
        self,
        rows: SamplingRows,
        idx_mapping: _I32,
        starts: _I32,
        cu_num_logits: _I32,
        positions: _I64,
        logits_indices: _I64,
        drafts: _I32,
    ) -> None: ...
    def sample(self, num_reqs: int, logits: _F32, out: _I32, model: CpuModel | None = None) -> bool: ...

def kv_bytes(
    kv_format: str,
    num_blocks: int,
    block_size: int,
    num_slots: int,
    num_kv_heads: int,
    head_dim: int,
    recurrent: dict[str, int] = ...,
) -> int: ...
def token_logprobs(
    logits: _F32,
    tokens: _I32,
    offsets: _I64,
    ids: _I32,
    logprobs: npt.NDArray[np.float64],
    ranks: _I32,
    model: CpuModel | None = None,
) -> None: ...
def roofline(num_threads: int | None = None, isa: str = "", megabytes: int = 256) -> dict[str, Any]: ...
def isa_levels() -> list[str]: ...
def parameter_names() -> list[tuple[str, str]]: ...
def array_names() -> dict[str, list[tuple[str, str]]]: ...
