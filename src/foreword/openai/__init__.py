"""OpenAI's request and response bodies, without HTTP: what a server and a batch file share."""

from foreword.openai.request import ChatRequest, CompletionRequest, parse_chat, parse_completion
from foreword.openai.response import chat_completion, error_body, text_completion

__all__ = [
    "ChatRequest",
    "CompletionRequest",
    "chat_completion",
    "error_body",
    "parse_chat",
    "parse_completion",
    "text_completion",
]
