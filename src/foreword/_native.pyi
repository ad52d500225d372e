"""Native core of Foreword: batch preparation and CPU kernels."""

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, overload

import foreword.batch.step.layout
from foreword.arrays import F32, F64, I32, I64, U8, U16, U32, AnyArray, Bools

def trim_memory() -> None:
    """Give memory that was freed back to the system, where the C library would keep it."""

def array_names() -> dict[str, list[tuple[str, str]]]:
    """The arrays that the batch cores take: {'rows' | 'step': [(name, dtype)]}."""

def copy_samples(source: I32, to: I32, /) -> int:
    """Copy the first entries of one array to all of another. Returns the smallest."""

class RowsCore:
    """Bulk changes of the rows of one RequestStates."""

    def __init__(
        self,
        states: dict[str, AnyArray],
        sampling: dict[str, object],
        row_of: dict[str, int],
        req_ids: int,
        free: list[int],
        vocab_size: int,
        max_num_draft_tokens: int,
    ) -> None: ...
    def add_table(
        self, table: I32, num_blocks: I32, content_id: I64, holds_null: Bools, tokens_per_block: int, null_block: int
    ) -> None: ...
    def admit(
        self,
        req_ids: Sequence[str],
        rows: I32,
        tokens: I32,
        num_tokens: I32,
        prompt_len: I32 | None,
        num_computed: I32 | None,
        blocks: Sequence[I32],
        num_blocks: Sequence[I32],
        sampling: Mapping[str, AnyArray] | None,
        /,
    ) -> bool: ...
    def remove(self, rows: I32, /) -> bool: ...
    def renew_sampling(self, rows: I32, /) -> None: ...
    def append(self, rows: object, blocks: object, group: int, /) -> bool: ...

class StepCore:
    """Step preparation over the arrays of one RequestStates and one InputBuffers."""

    def __init__(
        self,
        rows: dict[str, AnyArray],
        arrays: dict[str, AnyArray],
        vocab_size: int,
        max_num_draft_tokens: int,
        scalars_type: object,
    ) -> None: ...
    def add_group(
        self,
        table: dict[str, AnyArray],
        step: dict[str, AnyArray],
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
        self, rows: I32, num_scheduled: I32, drafts: object, pad_tokens: int, pad_reqs: int, gather: bool, /
    ) -> foreword.batch.step.layout.Scalars | None: ...
    def prepare_ragged(
        self,
        rows: I32,
        num_scheduled: I32,
        num_drafts: I32,
        draft_ids: I32,
        pad_tokens: int,
        pad_reqs: int,
        gather: bool,
        cancelled: Bools | None,
        /,
    ) -> foreword.batch.step.layout.Scalars | None: ...
    def advance(self, num_reqs: int, /) -> None: ...
    def commit(self, sampled: object, advanced: bool, /) -> bool: ...

class StepBuffers:
    """The arrays of one InputBuffers."""

    def __init__(self, arrays: dict[str, AnyArray]) -> None: ...

class PacketCore:
    """Steps as packets for a device that mirrors the rows of one RequestStates."""

    def __init__(
        self,
        rows: dict[str, AnyArray],
        stamp: I64,
        sampling: list[AnyArray],
        inputs: list[AnyArray],
        max_num_batched_tokens: int,
        records_at: int,
        record_size: int,
    ) -> None: ...
    def add_table(self, table: I32, num_blocks: I32, content_id: I64, table_at: int, num_at: int) -> None: ...
    def set_embeddings(self, is_embedding: Bools) -> None: ...
    def forget(self) -> None: ...
    @property
    def follows_host(self) -> bool: ...
    @follows_host.setter
    def follows_host(self, arg: bool, /) -> None: ...
    def generations(self) -> list[int]: ...
    def pack(self, step: StepBuffers, out: I32, /) -> int: ...

class DraftPolicy:
    """The numbers of drafts over the arrays of one DraftLengths."""

    def __init__(
        self,
        accepted: F64,
        judged: F64,
        all: F64,
        lengths: I32,
        log_cost: F64,
        drafted_at: I64,
        accepted_at: I64,
        worth: float,
        relative_cost: float,
        forget: float,
        forget_all: float,
    ) -> None: ...
    def can_gain(self, num_rows: int) -> bool:
        """Return whether drafts in a step of so many rows would be worth verifying if all of them were right."""

    def choose(self, rows: I32, drafts: I32, kinds: I32, credit: float, /) -> bool:
        """Replace the drafts [n, width] of rows [n] that are not worth verifying, or that could cost more than the
        credit, by -1. Return whether any is left."""

    def judge(
        self, rows: I32, sampled: I32, drafts: I32 | None, guess: I32, kind: I32, /
    ) -> tuple[int, int, int, int, int]:
        """Update the rates of rows [n] after a step that sampled [n, width]. Return how many rows had drafts, how many
        drafts these were and how many were accepted, and how many drafts and guesses were judged and right."""

class TokenLookup:
    """Drafts from the rows of one RequestStates: foreword.engine.speculation."""

    def __init__(self, token_ids: I32, num_tokens: I32, min_match: int, max_match: int) -> None: ...
    def propose(self, rows: I32, first: I32 | None, most: I32, drafts: I32, lengths: I32, /) -> None:
        """Write up to most[i] drafts of rows[i], [n, width] padded with -1, and the lengths of their matches, [n].

        first[i]: the position where matches may begin; None: 0."""

def divide_rows(logits: F32, vocab_size: int, rows: I64, by: F32, /) -> None:
    """Divide the rows [n] of logits [L, V or more] by a number each."""

def mask_below_largest(logits: F32, vocab_size: int, rows: I64, distances: F32, /) -> None:
    """Write -inf where a logit of the rows [n] is below the largest one of its row plus a distance."""

@overload
def mask_refused_rows(
    logits: U16, vocab_size: int, rows: I64, allowed: I32, masks: I64, minus_infinity: int, /
) -> None: ...
@overload
def mask_refused_rows(
    logits: U32, vocab_size: int, rows: I64, allowed: I32, masks: I64, minus_infinity: int, /
) -> None:
    """Write -inf where bit v of allowed[masks[i]] is 0 for logit v of rows[i]. logits: as bits."""

def penalise_rows(
    logits: F32,
    vocab_size: int,
    rows: I64,
    requests: I64,
    penalties: F32,
    prompts: I32,
    counts: I32,
    tokens: I64,
    num_drafts: I64,
    /,
) -> None:
    """Apply repetition, frequency and presence penalties [n, 3] to the rows [n] of logits.

    requests [n]: rows of prompts (bits) and of counts. The last num_drafts[i] of tokens[: rows[i] + 1] count."""

@overload
def add_logit_rows(logits: F32, rows: I64, temperatures: F32, noise: F32, /) -> None: ...
@overload
def add_logit_rows(logits: F32, rows: I64, temperatures: F32, noise: F64, /) -> None:
    """noise[i] += logits[rows[i]] / temperatures[i]"""

@overload
def block_argmax(values: F32, block_size: int, num_blocks: int, rows: I64, indices: I64, most: F32, /) -> None: ...
@overload
def block_argmax(values: F64, block_size: int, num_blocks: int, rows: I64, indices: I64, most: F64, /) -> None:
    """Write the first largest number of each block of values[i], and its index, into rows[i]; NaNs do not count."""

def below_largest(logits: F32, by_block: bool, most: F32, shifted: F32, /) -> None:
    """shifted [blocks, size] = logits [V] - most, the largest one of all [1] or of each block. -inf fills it."""

def noise_uniform32(seeds: I64, positions: I64, ones: F32, series: F32, /) -> None:
    """Write 1 - u and, where u is small, -log(1 - u) by a series, else -1, per seed with its position, and token.

    u: a uniform number. ones, series [n, V]."""

def noise_select(series: F32, values: F32, /) -> None:
    """Replace each value by that of the series, or by its negative where the series has -1."""

def noise_uniform64(seeds: I64, positions: I64, uniforms: F64, /) -> None:
    """Write a uniform number of 53 bits per seed, position [n] and token [V]."""

def philox_uniforms(seeds: I64, offsets: I64, uniforms: F32, /) -> None:
    """Write a uniform number in (0, 1) per seed and offset: the first word of Philox 4x32 after ten rounds."""

class StepCache:
    """What was made of the sampling columns of the last few batches."""

    def __init__(
        self,
        columns: list[tuple[str, AnyArray, int]],
        needs: I32,
        stamp: I64,
        counters: I64,
        rows: I32,
        make: Callable[[I32, int, dict[str, AnyArray]], Any],
        /,
    ) -> None: ...
    def get(self, count: int, /) -> Any: ...

class VllmFastPath:
    """The common step of foreword.batch.adapters.vllm over one RequestStates."""

    def __init__(
        self,
        rows: RowsCore,
        arrays: dict[str, AnyArray],
        observers: Sequence[object],
        adapter_of: Mapping[str, int],
        with_extras: Container[int],
        /,
    ) -> None: ...
    def apply(self, output: object, /) -> int: ...
    def step(self, cached: object, num_scheduled: object, drafts: object, /) -> int: ...
    def admit(self, requests: Sequence[Any], /) -> bool: ...
    def special(self) -> list[int]: ...
    def finish(self, ids: object, /) -> bool: ...

class ModelInputs:
    """The arrays of steps that CpuModel.step reads, taken once."""

    def __init__(
        self,
        input_ids: I32,
        positions: I64,
        query_start_loc: I32,
        seq_lens: I32,
        idx_mapping: I32,
        logits_indices: I64,
        slot_mapping: Sequence[I64],
        block_tables: Sequence[I32],
        num_draft_tokens: I32,
        num_accepted_tokens: I32,
    ) -> None: ...

class CpuModel:
    """A decoder's packed weights, its KV pool and threads. See foreword.executors.native."""

    def __init__(
        self,
        *,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        value_dim: int,
        vocab_size: int,
        norm_eps: float,
        query_scale: float,
        embedding_scale: float,
        activation: str,
        attn_softcap: float,
        final_softcap: float,
        gate_scale: float = 1.0,
        logit_scale: float = 1.0,
        joint_qk_norm: bool = False,
        layer_norm: bool = False,
        head_gates: bool = False,
        softplus_gates: bool = False,
        rounds_inputs: bool = False,
        gate_alpha: float = 0.0,
        gate_limit: float = 0.0,
        latent: dict[str, int] = {},
        latent_eps: float = 0.0,
        indexer: dict[str, int] = {},
        indexer_eps: float = 0.0,
        clip_qkv: float = 0.0,
        num_groups: int,
        num_slots: int,
        num_blocks: int,
        block_size: int,
        kv_format: str,
        isa: str,
        num_threads: int,
        recurrent: dict[str, int] = {},
        cpu_groups: Sequence[Sequence[int]] = [],
        more_heads: Sequence[tuple[int, int, int, int]] = [],
        num_states: int = 0,
        num_state_slots: int = 0,
    ) -> None: ...
    def pack(self, data: U8, source: str, cols: int, format: str, exact: bool) -> int: ...
    def attach(self, panels: U8, rows: int, cols: int, format: str, exact: bool) -> int: ...
    def again(self, matrix: int) -> int:
        """Another number for a matrix, which adapters change apart."""

    def panels(self, matrix: int) -> U8:
        """The packed form of a matrix, which attach() takes."""

    def screen(self) -> tuple[U8 | None, F32, float] | None:
        """(panels, errors, most) of greedy steps: see decision 21."""

    def vector(self, values: F32) -> int: ...
    def set_embedding(self, data: U8, source: str, cols: int) -> None: ...
    def set_positions(self, data: U8, source: str, cols: int) -> None:
        """The rows that are added to the inputs of tokens by their positions."""

    def set_per_layer(
        self,
        data: U8,
        source: str,
        cols: int,
        matrix: int,
        norm: int,
        norm_eps: float,
        embedding_scale: float,
        scale: float,
    ) -> None:
        """The inputs that layers have of their own: see PerLayerSpec. To be called before add_layer."""

    def set_streams(self, into: Sequence[int], out: Sequence[int]) -> None:
        """The matrices of several streams: see StreamsSpec. To be called before add_layer."""

    def set_connections(
        self, num_streams: int, magnitude: float, eps: float, matrix: int, base: int, scale: int
    ) -> None:
        """Hyper-connections: see ConnectionsSpec. To be called before add_layer."""

    def add_rope(self, inv_freq: Sequence[float], scale: float, axes: Sequence[int] = []) -> int: ...
    def add_layer(self, layer: dict[str, object]) -> None: ...
    def finish(
        self,
        final_norm: int,
        final_norm_bias: int,
        lm_head: int,
        screen: tuple[int, F32, float] | None = None,
        logits_bias: int = -1,
        embed_norm: int = -1,
        embed_norm_bias: int = -1,
        head: int = -1,
        head_norm: int = -1,
        head_norm_bias: int = -1,
        embed_scale: int = -1,
        embed_offset: int = -1,
    ) -> None: ...
    def step(
        self,
        inputs: ModelInputs,
        num_tokens: int,
        num_reqs: int,
        num_logits: int,
        logits_indices: I64 | None = None,
        embed_rows: I64 | None = None,
        embeds: F32 | None = None,
        features: F32 | None = None,
        mrope_positions: I64 | None = None,
        last_seen: I64 | None = None,
        lora_ids: I32 | None = None,
        greedy: bool = False,
        bidirectional: bool = False,
    ) -> F32: ...
    def hidden_states(self, tokens: I64) -> F32: ...
    def add_lora(
        self, id: int, factors: Sequence[tuple[int, F32, F32, float]], changes: Sequence[tuple[int, F32]]
    ) -> int: ...
    def drop_lora(self, id: int) -> None: ...
    def copy_blocks(self, sources: I32, destinations: I32) -> None: ...
    @property
    def block_bytes(self) -> int: ...
    @property
    def state_bytes(self) -> int: ...
    def read_blocks(self, blocks: I32, data: U8) -> None: ...
    def write_blocks(self, blocks: I32, data: U8) -> None: ...
    def touch_cache(self) -> None: ...
    def zero_blocks(self, blocks: I32) -> None: ...
    def stage_seconds(self) -> dict[str, float]:
        """Seconds of all steps so far in each stage, measured on one thread."""

    @property
    def packed_bytes(self) -> int: ...
    @property
    def isa(self) -> str: ...
    def packed_on(self, matrix: int) -> list[int]:
        """The processor that packed each panel of a matrix."""

    @property
    def num_threads(self) -> int: ...

class CpuEncoder(CpuModel):
    """An encoder's packed weights and threads."""

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
        activation: str,
        norms_before: bool,
        rms_norm: bool = False,
        act_scale: float = 1.0,
        isa: str,
        num_threads: int,
    ) -> None: ...
    def set_tables(self, positions: F32, token_types: F32) -> None: ...
    def set_distances(self, biases: F32) -> None: ...
    def add_encoder_layer(self, layer: dict[str, object]) -> None: ...
    def finish_encoder(self, norms: dict[str, int]) -> None: ...
    def encode(
        self,
        num_tokens: int,
        num_reqs: int,
        input_ids: I32 | None,
        positions: I64,
        query_start_loc: I32,
        token_types: I32 | None,
        x: F32 | None = None,
        places: I64 | None = None,
        group_start_loc: I32 | None = None,
        lora_ids: I32 | None = None,
    ) -> F32: ...

class SamplingRows:
    """Rules and token counts by state row, and the sampling of steps.

    Same methods and results as foreword.sampling.reference.ReferenceRows."""

    def __init__(
        self, columns: dict[str, AnyArray], token_ids: I32, prompt_len: I32, num_tokens: I32, vocab_size: int
    ) -> None: ...
    def set(
        self,
        row: int,
        allowed: I32 | None,
        bias_ids: I32,
        bias: F32,
        end_ids: I32,
        bad_words: I32,
        bad_word_ends: I32,
        dry_breakers: I32,
    ) -> None: ...
    def forget(self, row: int) -> None: ...
    def change(
        self,
        logits: F32,
        rows: I32,
        starts: I32,
        cu_num_logits: I32,
        positions: I64,
        drafts: I32,
        is_embedding: Bools | None,
        masked: I32 | None,
        words: I32 | None,
        changed_rows: I32,
        changed: F32,
        model: CpuModel | None = None,
    ) -> None: ...
    def sample(
        self,
        logits: F32,
        rows: I32,
        starts: I32,
        cu_num_logits: I32,
        positions: I64,
        drafts: I32,
        is_embedding: Bools | None,
        masked: I32 | None,
        words: I32 | None,
        changed_rows: I32 | None,
        changed: F32 | None,
        out: I32,
        offsets: I64 | None,
        ids: I32 | None,
        logprobs: F64 | None,
        ranks: I32 | None,
        model: CpuModel | None = None,
    ) -> None: ...

class SamplingBuffers:
    """The buffers of steps that have neither masks, custom processors, log-probabilities nor embeddings."""

    def __init__(
        self,
        rows: SamplingRows,
        idx_mapping: I32,
        starts: I32,
        cu_num_logits: I32,
        positions: I64,
        logits_indices: I64,
        drafts: I32,
    ) -> None: ...
    def sample(self, num_reqs: int, logits: F32, out: I32, model: CpuModel | None = None) -> bool: ...

def parameter_names() -> list[tuple[str, str]]:
    """(name, dtype) of the columns of sampling parameters that are read."""

def token_logprobs(
    logits: F32, tokens: I32, offsets: I64, ids: I32, logprobs: F64, ranks: I32, model: CpuModel | None = None
) -> None:
    """For row i of logits [n, V], entries [offsets[i], offsets[i + 1]): tokens[i], then the most likely tokens."""

def kv_bytes(
    kv_format: str,
    num_blocks: int,
    block_size: int,
    num_slots: int,
    num_kv_heads: int,
    head_dim: int,
    value_dim: int,
    recurrent: dict[str, int] = {},
    more_heads: Sequence[tuple[int, int, int, int]] = [],
    keys_are_values: bool = False,
    num_states: int = 0,
    num_state_slots: int = 0,
    index_dim: int = 0,
) -> int:
    """Bytes of a KV pool, computed without allocating it."""

def roofline(num_threads: int, isa: str = "", megabytes: int = 256) -> tuple[str, dict[str, float]]:
    """The instruction set, and with it the limits of this machine: peak operations and memory bytes per second."""

def isa_levels() -> list[str]:
    """Instruction sets that this build and this machine have, best first."""
