"""OpenAI's request and response bodies, without HTTP: what a server and a batch file share."""

from foreword.openai.request import ChatRequest, CompletionRequest, Fields, parse_chat, parse_completion
from foreword.openai.response import Named, chat_completion, error_body, text_completion
from foreword.openai.stream import ChatStream, CompletionStream, error_frame

__all__ = [
    "ChatRequest",
    "ChatStream",
    "CompletionRequest",
    "CompletionStream",
    "Fields",
    "Named",
    "chat_completion",
    "error_body",
    "error_frame",
    "parse_chat",
    "parse_completion",
    "text_completion",
]
