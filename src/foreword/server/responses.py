"""Store responses, so that later requests continue them and their owner reads them."""

from __future__ import annotations

from typing import Any

from foreword.server.errors import HttpError
from foreword.server.failures import NOT_FOUND, NOT_STORED, STORAGE_FULL
from foreword.server.store import Row, Store

RESPONSE = "response"
MOST = 10_000  # largest number of responses; the least recently used ones are dropped
MOST_TURNS = 1_000  # largest number of responses in a conversation
_EVERY = 32  # number of new responses after which some are dropped


class Responses:
    """The responses of a store. max_bytes: limit of their total size. is_open: whether responses are stored at all."""

    def __init__(self, store: Store, max_bytes: int, *, is_open: bool) -> None:
        self._store, self._max_bytes, self.is_open = store, max_bytes, is_open
        self._num_added = 0

    def keep(self, owner: str, response: Row, items: list[Row]) -> None:
        """Store a response with its input, if there is space and the database can be written. The response says whether
        it is stored.
        """
        row = {"response": response, "items": items, "created_at": response["created_at"]}
        self._num_added += 1
        try:
            if self._num_added % _EVERY == 0:
                self._store.make_room(RESPONSE, MOST, self._max_bytes)
            try:
                self._store.add(RESPONSE, owner, response["id"], row)
            except HttpError as error:
                if error.failure is not STORAGE_FULL:
                    raise
                self._store.make_room(RESPONSE, MOST // 2, self._max_bytes // 2)
                self._store.add(RESPONSE, owner, response["id"], row)
        except HttpError:  # files take the space, the disk is full, or another program has locked the database
            response["store"] = False

    def get(self, owner: str, response_id: str) -> tuple[Row, list[Row]]:
        """Return a response and the items of its input. Raise HttpError 404 if its owner has none of this id."""
        row = self._store.get(RESPONSE, owner, response_id)
        return row["response"], row["items"]

    def delete(self, owner: str, response_id: str) -> None:
        """Remove a response. Raise HttpError 404 if its owner has none of this id."""
        self._store.delete(RESPONSE, owner, response_id)

    def conversation(self, owner: str, response_id: str) -> list[Row]:
        """Return the items up to the end of a response: inputs and outputs from the first one on. Raise HttpError 404
        if one of them no longer exists.
        """
        turns: list[list[Row]] = []
        seen: set[str] = set()
        previous: str | None = response_id
        while previous is not None and previous not in seen and len(turns) < MOST_TURNS:
            seen.add(previous)
            try:
                response, items = self.get(owner, previous)
            except HttpError as error:
                if error.failure is not NOT_FOUND:
                    raise
                reason = f"previous_response_id: response {previous!r:.80} was not stored, or was dropped or deleted"
                raise HttpError(NOT_FOUND, reason, param="previous_response_id") from None
            turns.append([*items, *response["output"]])
            previous = response["previous_response_id"]
        return [item for turn in reversed(turns) for item in turn]

    def check_open(self, field: str) -> None:
        """Raise HttpError 400 if a field needs stored responses, but none are stored."""
        if not self.is_open:
            reason = f"{field}: this server stores no responses. With replicas, start it with --data-directory DIR"
            raise HttpError(NOT_STORED, reason, param=field)


def chosen(body: dict[str, Any]) -> tuple[bool | None, str | None]:
    """Return whether a body asks to store the response, before it is parsed; None if it does not say so, or has a wrong
    value.
    """
    store, previous = body.get("store"), body.get("previous_response_id")
    return store if isinstance(store, bool) else None, previous if isinstance(previous, str) else None
