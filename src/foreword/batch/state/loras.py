"""Which live requests use which LoRA adapter."""

from __future__ import annotations

from foreword.batch.values.lora import LoraRequest
from foreword.errors import RequestError


class LoraUsers:
    """The live requests of each adapter. An adapter is in use from its first user's admission to its last one's end."""

    __slots__ = ("_requests", "_users")

    def __init__(self) -> None:
        self._users: dict[int, dict[str, None]] = {}
        self._requests: dict[int, LoraRequest] = {}

    def __len__(self) -> int:
        return len(self._users)

    @property
    def in_use(self) -> tuple[int, ...]:
        """Adapters with at least one live request, in order of first use."""
        return tuple(self._users)

    def users(self, lora_id: int) -> tuple[str, ...]:
        """The adapter's live requests, in order of admission."""
        return tuple(self._users.get(lora_id, ()))

    def request(self, lora_id: int) -> LoraRequest | None:
        """Name and path of an adapter in use; None where its requests gave a number alone."""
        return self._requests.get(lora_id)

    def check(self, req_id: str, lora_id: int, request: LoraRequest | None) -> int:
        """The adapter of a new request. RequestError where number and request disagree, or name another adapter."""
        if request is None:
            return lora_id
        if not isinstance(request, LoraRequest):
            raise RequestError(req_id, "lora_request", request, "expected a LoraRequest or None", "Pass one of them.")
        if lora_id not in (0, request.lora_id):
            got, limit = lora_id, f"must equal lora_request.lora_id = {request.lora_id}"
            raise RequestError(req_id, "lora_id", got, limit, "Give one of the two.")
        known = self._requests.get(request.lora_id)
        if known is not None and known != request:
            limit = f"lora_id {request.lora_id} is in use for adapter {known.name!r} at {known.path!r}"
            raise RequestError(req_id, "lora_request", request, limit, "Give each adapter a number of its own.")
        return request.lora_id

    def add(self, lora_id: int, req_id: str, request: LoraRequest | None = None) -> None:
        """Add a user; 0 means no adapter."""
        if not lora_id:
            return
        self._users.setdefault(lora_id, {})[req_id] = None
        if request is not None:
            self._requests[lora_id] = request

    def clear(self) -> None:
        """Remove every user and adapter."""
        self._users.clear()
        self._requests.clear()

    def drop(self, lora_id: int, req_id: str) -> None:
        """Remove a user, and the adapter with its last one."""
        users = self._users.get(lora_id)
        if users is not None:
            users.pop(req_id, None)
            if not users:
                del self._users[lora_id]
                self._requests.pop(lora_id, None)
