"""Anthropic's Messages request and response bodies, without HTTP."""

from foreword.anthropic.request import parse_count, parse_messages
from foreword.anthropic.response import MessageStream, error_body, message_body

__all__ = ["MessageStream", "error_body", "message_body", "parse_count", "parse_messages"]
