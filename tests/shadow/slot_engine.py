"""An engine whose table has a slot per token, as SGLang's and mini-sglang's: own code, as lists and NumPy arrays.

With ``overlap`` a step is launched before the samples of the one before are known. `launch` and `finish` are called
with a batch, and show it to a follower in the shape of one of the two engines.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

VOCAB, END = 40, 1


@dataclass(eq=False)
class Request:
    rid: str
    prompt: list[int]
    most: int
    adapter: str | None = None
    outputs: list[int] = field(default_factory=list)
    row: int | None = None
    computed: int = 0  # on the device: launched steps count
    length: int = 0  # after the step that is launched
    goal: int = 0  # known when it was admitted
    over: bool = False
    is_retracted: bool = False

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.outputs


class Entry(NamedTuple):
    """A request of a batch, as it was launched."""

    request: Request
    computed: int
    length: int
    is_chunk: bool


class SlotEngine:
    """Prefills before decodes; with ``mixed`` decodes join a prefill. Slots begin at ``first``."""

    remaps = True  # where a page was computed twice, a request goes on with the page that is in the prefix cache

    def __init__(
        self,
        seed: int = 0,
        *,
        page: int = 1,
        pages: int = 90,
        first: int = 1,
        overlap: bool = False,
        mixed: bool = False,
    ) -> None:
        self.rng = np.random.default_rng(seed)
        self.page, self.pages, self.first, self.overlap, self.mixed = page, pages, first, overlap, mixed
        self.budget, self.table = 16, np.zeros((7, 48), np.int32)
        self.token_pool = np.zeros_like(self.table)
        self.rows = list(range(1, 7))
        self.free = deque(range(first, first + pages))
        self.users: Counter[int] = Counter()
        self.cached: dict[Any, int] = {}
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.in_flight: deque[tuple[list[Entry], list[int]]] = deque()
        self.count = self.num_hits = self.num_retracted = self.num_overshoots = 0
        self.prefix = self.rng.integers(2, VOCAB, 24).tolist()

    # -- pages

    def key(self, request: Request, k: int) -> Any:
        return request.adapter, tuple(request.tokens[: (k + 1) * self.page])

    def evictable(self) -> list[Any]:
        return [key for key, page in self.cached.items() if not self.users[page]]

    def take(self) -> int:
        if not self.free:
            self.free.append(self.cached.pop(self.evictable()[0]))
        page = self.free.popleft()
        self.users[page] = 1
        return page

    def drop(self, page: int) -> None:
        self.users[page] -= 1
        if not self.users[page] and page not in self.cached.values():
            self.free.append(page)

    def page_at(self, request: Request, k: int) -> int:
        return int(self.table[request.row, k * self.page]) // self.page

    def set_page(self, request: Request, k: int, page: int) -> None:
        slots = page * self.page + np.arange(self.page)
        at = self.table[request.row, k * self.page : (k + 1) * self.page]
        at[:] = slots[: len(at)]

    def num_pages(self, length: int) -> int:
        return -(-length // self.page)

    def grow(self, request: Request, length: int) -> bool:
        held, need = self.num_pages(request.length), self.num_pages(length)
        if need - held > len(self.free) + len(self.evictable()):
            return False
        for k in range(held, need):
            self.set_page(request, k, self.take())
        request.length = length
        return True

    def insert(self, request: Request, computed: int) -> None:
        """Offer full pages to others."""
        for k in range(computed // self.page):
            mine = self.page_at(request, k)
            page = self.cached.setdefault(self.key(request, k), mine)
            if page == mine:
                continue
            if self.remaps:
                self.users[page] += 1
                self.set_page(request, k, page)
                self.drop(mine)
            elif mine not in self.free:
                self.free.append(mine)

    def release(self, request: Request) -> None:
        for k in range(self.num_pages(request.length)):
            self.drop(self.page_at(request, k))
        self.rows.insert(0, request.row)
        request.row, request.computed, request.length = None, 0, 0

    # -- steps

    def admit(self, request: Request) -> bool:
        if not self.rows:
            return False
        request.row, request.goal, hits = self.rows.pop(), len(request.tokens), 0
        while (hits + 1) * self.page < request.goal and (page := self.cached.get(self.key(request, hits))) is not None:
            self.users[page] += 1
            self.set_page(request, hits, page)
            hits += 1
        request.computed = request.length = hits * self.page
        need = self.num_pages(request.goal) - hits + 2 * len(self.running) + 2
        if need > len(self.free) + len(self.evictable()):
            self.release(request)
            return False
        self.num_hits += hits
        request.is_retracted = False
        self.token_pool[request.row, : request.goal] = request.tokens
        return True

    def schedule(self) -> list[Entry]:
        out, left = list[Entry](), self.budget
        while self.waiting and left:
            request = self.waiting[0]
            if request.row is None and not self.admit(request):
                break
            count = min(left, request.goal - request.computed)
            if not self.grow(request, request.computed + count):
                break
            left -= count
            out.append(Entry(request, request.computed, request.length, request.length < request.goal))
            if request.length < request.goal:
                break
            self.running.append(self.waiting.popleft())
        if out and not self.mixed:
            return out
        chosen = {id(entry.request) for entry in out}
        for request in list(self.running):
            if request not in self.running or id(request) in chosen:
                continue
            if request.computed == len(request.prompt) + request.most:  # all are sampled, or will be
                continue
            while not self.grow(request, request.computed + 1):
                last = next(other for other in reversed(self.running) if id(other) not in chosen)
                self.running.remove(last)
                out = [entry for entry in out if entry.request is not last]
                self.release(last)
                last.is_retracted = True
                self.waiting.appendleft(last)
                self.num_retracted += 1
                if last is request:
                    break
            if request.row is not None:
                out.append(Entry(request, request.computed, request.length, False))
        return out

    def step(self) -> None:
        batch = self.schedule()
        if batch:
            self.show(batch)
            sampled = self.rng.integers(END, VOCAB, len(batch)).tolist()
            for (request, _, length, is_chunk), token in zip(batch, sampled, strict=True):
                request.computed = length
                if not is_chunk and length < self.token_pool.shape[1]:
                    self.token_pool[request.row, length] = token
            self.in_flight.append((batch, sampled))
        if self.in_flight and not (self.overlap and batch and len(self.in_flight) == 1):
            self.finish(*self.in_flight.popleft())

    def show(self, batch: list[Entry]) -> None:
        """A batch is launched."""

    def finish(self, batch: list[Entry], sampled: list[int]) -> None:
        """The samples of a batch are known."""
        for (request, computed, length, is_chunk), token in zip(batch, sampled, strict=True):
            if request.over or request.is_retracted:
                self.num_overshoots += 1
                continue
            if is_chunk:
                continue
            request.outputs.append(token)
            if token == END or len(request.outputs) == request.most:
                request.over = True
                self.insert(request, len(request.tokens) - 1)
                self.running.remove(request)
                self.release(request)
            elif length > computed + 1:
                self.insert(request, length)

    def traffic(self, steps: int) -> None:
        """Random requests, of which many begin alike."""
        for _ in range(steps):
            if len(self.waiting) < 3:
                shared = self.prefix[: int(self.rng.choice([0, 4, 8, 11, 16, 24]))]
                own = self.rng.integers(2, VOCAB, int(self.rng.integers(1, 12))).tolist()
                adapter = self.adapter()
                self.waiting.append(Request(f"r{self.count}", shared + own, int(self.rng.integers(1, 10)), adapter))
                self.count += 1
            self.step()

    def adapter(self) -> str | None:
        return None

    def tokens_of(self, batch: list[Entry]) -> tuple[Any, Any, Any]:
        """Token ids, positions and slots of the tokens that a batch computes."""
        rows = np.concatenate([np.full(e.length - e.computed, e.request.row) for e in batch])
        positions = np.concatenate([np.arange(e.computed, e.length) for e in batch])
        return self.token_pool[rows, positions], positions, self.table[rows, positions]
