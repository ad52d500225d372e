"""The columns of `RequestStates`: the table behind arrays, row moves, native pointers and specification."""

from __future__ import annotations

from foreword.batch.values.fields import Field

ROWS = (
    Field("num_tokens", ("R",), "int32", 0),
    Field("num_computed_tokens", ("R",), "int32", 0),
    Field("num_placeholders", ("R",), "int32", 0),
    Field("num_accepted_tokens", ("R",), "int32", 1),
    Field("prompt_len", ("R",), "int32", 0),
    Field("prefill_len", ("R",), "int32", 0),
    Field("last_sampled_token", ("R",), "int32", -1),
    Field("lora_id", ("R",), "int32", 0),
    Field("rope_delta", ("R",), "int32", 0),
    Field("encoder_len", ("R",), "int32", 0),
    Field("row_generation", ("R",), "int64"),
    Field("live", ("R",), "bool"),
)
