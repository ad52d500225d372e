"""The bodies of Ollama's requests and responses, without HTTP."""

from foreword.ollama.request import (
    EmbedRequest,
    GenerateRequest,
    ModelRequest,
    check_num_ctx,
    keep_alive_of,
    parse_chat,
    parse_embed,
    parse_embeddings,
    parse_generate,
    parse_model,
    too_long,
)
from foreword.ollama.response import LineStream, answer_body, embed_body, embeddings_body, error_body, line, state_body

__all__ = [
    "EmbedRequest",
    "GenerateRequest",
    "LineStream",
    "ModelRequest",
    "answer_body",
    "check_num_ctx",
    "embed_body",
    "embeddings_body",
    "error_body",
    "keep_alive_of",
    "line",
    "parse_chat",
    "parse_embed",
    "parse_embeddings",
    "parse_generate",
    "parse_model",
    "state_body",
    "too_long",
]
