"""OpenAI's request and response bodies, without HTTP: the part that a server and a batch file share."""

from foreword.openai.errors import error_body
from foreword.openai.request import ChatRequest, CompletionRequest, parse_chat, parse_completion
from foreword.openai.response import Named, chat_completion, text_completion
from foreword.openai.responses import ResponsesRequest, ResponseStream, parse_responses, response_body
from foreword.openai.stream import ChatStream, CompletionStream, error_frame

__all__ = [
    "ChatRequest", "ChatStream", "CompletionRequest", "CompletionStream", "Named", "ResponseStream", "ResponsesRequest",
    "chat_completion", "error_body", "error_frame", "parse_chat", "parse_completion", "parse_responses",
    "response_body", "text_completion",
]  # fmt: skip
