"""Which models batches may have loaded, with models that are numbers: room, turns, clients, failures."""

import asyncio
import threading
import weakref
from types import SimpleNamespace

import pytest

from foreword.errors import ModelError
from foreword.server import model_turns
from foreword.server import models as models_module
from foreword.server.config import ServerConfig
from foreword.server.errors import HttpError
from foreword.server.model_turns import ModelTurns
from foreword.server.models import Memory, Models
from foreword.server.served import ServedModel
from foreword.server.shared import Shared

SIZE = 100
PATIENCE = 60.0


class Clock:
    """The time of the modules, which goes on only when a test says so."""

    def __init__(self, monkeypatch) -> None:
        self.now = 1000.0
        fake = SimpleNamespace(monotonic=lambda: self.now, time=lambda: self.now)
        monkeypatch.setattr(model_turns, "time", fake)
        monkeypatch.setattr(models_module, "time", fake)
        monkeypatch.setattr(model_turns, "PAUSE", 0.001)


class Files:
    """log: the models that were loaded and unloaded, in order. gate: nothing is loaded while it is closed."""

    def __init__(self, room: int) -> None:
        self.log: list[str] = []
        self.room, self.broken, self.gate = room, set[str](), threading.Event()
        self.gate.set()

    def __call__(self, served, loras, take):
        name = served.names[0]
        if name in self.broken:
            raise ModelError(f"{name}: is damaged")

        async def close():
            self.log.append(f"-{name}")

        def load():
            self.gate.wait(PATIENCE)
            self.log.append(f"+{name}")
            engine = SimpleNamespace(close=close, loras={})
            return SimpleNamespace(engine=engine, trace=None, names=served.names, served=served.names)

        return SimpleNamespace(memory=Memory(SIZE), load=load)

    def models(self, names: str, **settings) -> Models:
        config = ServerConfig(load_on_demand=True, ram_budget=self.room * SIZE, **settings)
        served = [ServedModel(model=name, names=(name,), pin=name.isupper()) for name in names]
        models = Models(served, config, self, shared := Shared.of(config))
        weakref.finalize(models, shared.store.close)
        return models


class Batch:
    """The batch of one owner, which takes models as its lines do."""

    def __init__(self, models: Models, turns: ModelTurns, owner: str) -> None:
        self.models, self.turns, self.owner = models, turns, owner

    async def line(self, name: str) -> None:
        await self.turns.take(self.owner, self.models.find(name))
        async with self.models.using(name, f"{self.owner} {name}", of_batch=True):
            self.turns.begin(self.owner)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def run(main):
    async def limited():
        async with asyncio.timeout(PATIENCE):
            await main()

    asyncio.run(limited())


async def later(coroutine) -> asyncio.Task:
    """Start a coroutine, and return it after it had some turns of the loop."""
    task = asyncio.create_task(coroutine)
    await some_turns()
    return task


async def some_turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0.001)


async def ask(models: Models, name: str) -> None:
    async with models.using(name, f"client {name}"):
        pass


def test_a_batch_does_not_wait_for_a_turn_where_its_model_has_room(clock):
    async def main():
        files = Files(room=2)
        models = files.models("abc")
        turns = ModelTurns(models)
        one, two, three = (Batch(models, turns, owner) for owner in "123")
        await one.line("a")
        await two.line("b")  # the time stands still
        waiting = await later(three.line("c"))
        assert (files.log, waiting.done()) == (["+a", "+b"], False)
        clock.now += model_turns.TURN_SECONDS
        await waiting
        assert files.log == ["+a", "+b", "-a", "+c"]

    run(main)


@pytest.mark.long
def test_a_turn_counts_from_the_end_of_a_slow_load_and_three_keys_have_their_turns_in_order(clock):
    async def main():
        files = Files(room=1)
        models = files.models("abc")
        turns = ModelTurns(models)
        one, two, three = (Batch(models, turns, owner) for owner in "123")
        files.gate.clear()
        first = await later(one.line("a"))
        second = await later(two.line("b"))
        third = await later(three.line("c"))
        clock.now += 5 * model_turns.TURN_SECONDS
        await some_turns()
        files.gate.set()
        await first
        clock.now += model_turns.TURN_SECONDS - 1
        await some_turns()
        await one.line("a")
        assert files.log == ["+a"]
        clock.now += 1
        await second
        first = await later(one.line("a"))
        assert (files.log, third.done(), first.done()) == (["+a", "-a", "+b"], False, False)
        clock.now += model_turns.TURN_SECONDS
        await third
        await some_turns()
        assert (files.log[3:], first.done()) == (["-b", "+c"], False)
        clock.now += model_turns.TURN_SECONDS
        await first
        assert files.log[5:] == ["-c", "+a"]

    run(main)


def test_a_batch_waits_for_one_whose_model_is_about_to_be_loaded_and_not_read_yet(clock):
    async def main():
        files = Files(room=1)
        models = files.models("ab")
        turns = ModelTurns(models)
        await turns.take("1", models.find("a"))  # its files are read later
        waiting = await later(Batch(models, turns, "2").line("b"))
        while models.find("b").needs is None:
            await asyncio.sleep(0.001)
        assert (files.log, waiting.done()) == ([], False)
        turns.leave("1")
        await waiting
        assert files.log == ["+b"]

    run(main)


def test_a_turn_ends_with_its_batch(clock):
    async def main():
        files = Files(room=1)
        models = files.models("ab")
        turns = ModelTurns(models)
        one, two = (Batch(models, turns, owner) for owner in "12")
        await one.line("a")
        waiting = await later(two.line("b"))
        assert not waiting.done()
        turns.leave("1")
        await waiting
        assert files.log == ["+a", "-a", "+b"]

    run(main)


@pytest.mark.long
def test_a_batch_leaves_the_model_that_clients_use_again_and_again_for_a_while(clock):
    async def main():
        files = Files(room=1)
        models = files.models("ab")
        batch = Batch(models, ModelTurns(models), "1")
        await ask(models, "a")
        waiting = await later(batch.line("b"))
        start = clock.now
        while clock.now - start < model_turns.PATIENCE - 30:
            clock.now += 30
            await ask(models, "a")
            await asyncio.sleep(0.003)
        assert (files.log, waiting.done()) == (["+a"], False)
        clock.now += 30
        await waiting
        assert files.log == ["+a", "-a", "+b"]
        await ask(models, "a")  # a client waits for no turn
        assert files.log == ["+a", "-a", "+b", "-b", "+a"]
        again = await later(batch.line("b"))
        clock.now += models_module.CLIENT_SECONDS
        await again  # no client has come since
        assert files.log[5:] == ["-a", "+b"]

    run(main)


def test_a_client_s_model_takes_the_room_of_a_batch_before_that_of_other_clients(clock):
    async def main():
        files = Files(room=2)
        models = files.models("abc")
        batch = Batch(models, ModelTurns(models), "1")
        await ask(models, "a")
        clock.now += 1
        await batch.line("b")
        await ask(models, "c")
        assert files.log == ["+a", "+b", "-b", "+c"]

    run(main)


def test_a_model_that_cannot_be_read_or_has_no_room_beside_pinned_ones_does_not_wait(clock):
    async def main():
        files = Files(room=1)
        models = files.models("Abc")
        batch = Batch(models, ModelTurns(models), "1")
        await models.start()
        files.broken.add("b")
        for name, reason in (("b", "b: is damaged"), ("c", "A, which stay loaded")):
            with pytest.raises(HttpError, match=reason) as error:
                await batch.line(name)
            assert error.value.code == "model_failed"
        assert files.log == ["+A"]

    run(main)
