"""Publish changes of the prefix cache to routers, over ZMQ in vLLM's format.

`foreword.kv_events.publisher` needs the extra ``foreword[events]``; `foreword.kv_events.wire` needs only msgspec.
"""
