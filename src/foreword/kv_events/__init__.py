"""What the prefix cache holds, told to routers over ZMQ in vLLM's format. Needs the extra ``foreword[events]``."""

from foreword.kv_events.log import CacheLog
from foreword.kv_events.publisher import KVEventPublisher, KVEventSource
from foreword.kv_events.wire import EventEncoder, EventFormat

__all__ = ["CacheLog", "EventEncoder", "EventFormat", "KVEventPublisher", "KVEventSource"]
