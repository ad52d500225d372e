"""Track the LoRA adapters of live requests."""

from __future__ import annotations

from collections.abc import Collection
from operator import setitem

from foreword.batch.state.changes import Change
from foreword.batch.values.requests import LoraRequest
from foreword.errors import RequestError


class LoraUsers:
    """The live requests of each adapter. An adapter is in use from the admission of its first request to the end of its
    last one.
    """

    __slots__ = ("_requests", "adapter_of")

    def __init__(self) -> None:
        self.adapter_of: dict[str, int] = {}  # request → adapter, in order of admission
        self._requests: dict[int, LoraRequest] = {}

    def __bool__(self) -> bool:
        return bool(self.adapter_of)

    @property
    def in_use(self) -> tuple[int, ...]:
        """Return the adapters with at least one live request, in the order of their first one."""
        return tuple(dict.fromkeys(self.adapter_of.values()))

    def users(self, lora_id: int) -> tuple[str, ...]:
        """Return the adapter's live requests, in order of admission."""
        return tuple(req_id for req_id, adapter in self.adapter_of.items() if adapter == lora_id)

    def request(self, lora_id: int) -> LoraRequest | None:
        """Return name and path of an adapter in use; None if its requests gave only a number."""
        return self._requests.get(lora_id)

    def checked(self, req_id: str, lora_id: int, request: LoraRequest | None) -> int:
        """Return the adapter of a new request. Raise RequestError if lora_id and lora_request disagree, or disagree
        with a live request.
        """
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

    def add(self, req_id: str, lora_id: int, request: LoraRequest | None) -> list[Change]:
        """Return the changes that add a user of an adapter, which is not 0."""
        named: list[Change] = [] if request is None else [(setitem, self._requests, lora_id, request)]
        return [(setitem, self.adapter_of, req_id, lora_id), *named]

    def drop(self, req_ids: Collection[str]) -> list[Change]:
        """Return the changes that remove these requests, and the adapters that no other request uses."""
        stay = {adapter for req_id, adapter in self.adapter_of.items() if req_id not in req_ids}
        return [
            *((self.adapter_of.pop, req_id, None) for req_id in req_ids),
            *((self._requests.pop, adapter) for adapter in self._requests if adapter not in stay),
        ]
