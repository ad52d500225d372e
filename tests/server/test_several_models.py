"""Which models of a server are loaded, with models that are functions: room, turns, waiting, failures, the end."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from foreword.errors import ConfigError, ModelError, RequestError
from foreword.server.config import ServerConfig
from foreword.server.errors import HttpError
from foreword.server.models import Memory, Models
from foreword.server.served import ServedModel, checked, models_in
from foreword.server.shared import Shared

SIZE = 100


@dataclass
class Read:
    """A model of SIZE bytes, unless it has a size of its own."""

    files: "Files"
    served: ServedModel
    loras: dict

    @property
    def memory(self) -> Memory:
        size = self.files.sizes.get(self.served.names[0], SIZE)
        return size if isinstance(size, Memory) else Memory(size)

    def load(self):
        name = self.served.names[0]
        self.files.gate.wait(60)
        if name in self.files.broken:
            raise self.files.broken[name]
        self.files.log.append(f"+{name}")
        return SimpleNamespace(
            engine=Engine(self.files, name, dict(self.loras)), trace=None, names=self.served.names,
            served=(*self.served.names, *self.loras),
        )  # fmt: skip


@dataclass
class Engine:
    files: "Files"
    name: str
    loras: dict
    is_closed: bool = False

    async def close(self):
        assert self.files.running.get(self.name, 0) == 0, "it is closed while requests run"
        self.is_closed = True
        self.files.log.append(f"-{self.name}")


@dataclass
class Files:
    """log: what was loaded and unloaded, in order. at_once: the bytes of weights that are read at once, by model, which
    the log has with a star. gate: nothing is loaded while it is closed.
    """

    log: list[str] = field(default_factory=list)
    broken: dict[str, Exception] = field(default_factory=dict)
    sizes: dict[str, int | Memory] = field(default_factory=dict)
    gate: threading.Event = field(default_factory=threading.Event)
    running: dict[str, int] = field(default_factory=dict)
    at_once: dict[str, int] = field(default_factory=dict)
    num_ids: int = 0
    ends: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self):
        self.gate.set()

    def __call__(self, served, loras, take):
        if (num_bytes := self.at_once.get(served.names[0])) is not None:
            take(num_bytes)
            self.log.append(f"*{served.names[0]}")
        return Read(self, served, loras)

    def models(self, *served, **settings) -> Models:
        rows = [one if isinstance(one, ServedModel) else ServedModel(model=one, names=(one,)) for one in served]
        config = ServerConfig(**{"load_on_demand": True, "ram_budget": 2 * SIZE, **settings})
        shared = Shared.of(config)
        self.ends.callback(shared.store.close)
        return Models(rows, config, self, shared)

    @asynccontextmanager
    async def using(self, models, name):
        self.num_ids += 1
        async with models.using(name, str(self.num_ids)) as context:
            own = context.names[0]
            assert not context.engine.is_closed
            self.running[own] = self.running.get(own, 0) + 1
            yield context
            assert not context.engine.is_closed
            self.running[own] -= 1

    async def ask(self, models, name) -> str:
        async with self.using(models, name) as context:
            await asyncio.sleep(0)
            return context.names[0]


@pytest.fixture
def files() -> Iterator[Files]:
    made = Files()
    with made.ends:
        yield made


def run(coroutine):
    async def limited():
        async with asyncio.timeout(60):
            return await coroutine

    return asyncio.run(limited())


async def until(condition):
    while not condition():
        await asyncio.sleep(0.001)


def states(models) -> dict[str, str]:
    return {entry.name: entry.state for entry in models.entries}


def test_a_model_is_loaded_once_by_the_first_of_many_requests(files):
    models = files.models("a", "b")

    async def main():
        assert states(models) == {"a": "unloaded", "b": "unloaded"}
        assert await asyncio.gather(*(files.ask(models, "a") for _ in range(20))) == ["a"] * 20
        assert (files.log, states(models)["a"]) == (["+a"], "loaded")

    run(main())


def test_the_model_whose_last_request_is_longest_ago_goes_for_another(files):
    models = files.models("a", "b", "c")

    async def main():
        for name in "abac":
            await files.ask(models, name)
        assert files.log == ["+a", "+b", "-b", "+c"]
        assert models.num_bytes == 2 * SIZE

    run(main())


@pytest.mark.long
def test_a_model_with_requests_goes_after_them_and_only_if_no_idle_one_is_enough(files):
    models = files.models("a", "b", "c")

    async def main():
        async with files.using(models, "a"):
            await files.ask(models, "b")
            await files.ask(models, "c")  # the idle one goes, though it was used later
            assert files.log == ["+a", "+b", "-b", "+c"]
            async with files.using(models, "c"):
                late = asyncio.create_task(files.ask(models, "b"))
                await until(lambda: "unloading" in states(models).values())
                assert files.log[-1] == "+c"
                again = asyncio.create_task(files.ask(models, "a"))  # while it goes
        assert (await late, await again) == ("b", "a")
        assert files.log[:5] == ["+a", "+b", "-b", "+c", "-a"]

    run(main())


@pytest.mark.long
def test_requests_for_more_models_than_have_room_are_all_answered(files):
    models = files.models(*"abcde")

    async def main():
        names = [*"abcdeabcdeedcba" * 4]
        assert await asyncio.gather(*(files.ask(models, name) for name in names)) == names
        assert models.num_bytes <= 2 * SIZE
        assert not models.waiting

    run(main())


@pytest.mark.long
def test_a_pinned_model_stays_and_a_model_that_never_fits_is_refused_with_figures(files):
    models = files.models(ServedModel(model="a", names=("a",), pin=True), "b", "c", "big")
    files.sizes["big"] = 150

    async def main():
        await models.start()
        assert files.log == ["+a"]
        for name in "bcb":
            await files.ask(models, name)
        assert files.log == ["+a", "+b", "-b", "+c", "-c", "+b"]
        with pytest.raises(
            HttpError, match=r"'big': needs 0.0 MiB, and a, which stay loaded, have 0.0 MiB, of"
        ) as error:
            await files.ask(models, "big")
        assert (error.value.status, error.value.code) == (503, "model_failed")
        assert states(models) == {"a": "loaded", "b": "loaded", "c": "unloaded", "big": "unloaded"}

    run(main())


@pytest.mark.long
def test_weights_are_read_at_once_when_there_is_room_for_them_also_the_first_time(files):
    models = files.models("a", "b", "c", ram_budget=SIZE)
    files.sizes["c"], files.at_once = SIZE // 10, {"a": SIZE // 2, "b": SIZE // 2, "c": 2 * SIZE}

    async def main():
        for name in "abab":
            await files.ask(models, name)
        assert files.log == ["*a", "+a", "-a", "*b", "+b", "-b", "*a", "+a", "-a", "*b", "+b"]
        with pytest.raises(HttpError, match="'c': needs"):
            await files.ask(models, "c")
        assert len(files.log) == 11  # neither is it read, nor another model unloaded for it
        await models.measure(models.entries[2])
        assert models.entries[2].needs == Memory(2 * SIZE)
        files.sizes["a"] = 2 * SIZE  # it changed, and is refused as before
        for _ in range(2):
            with pytest.raises(HttpError, match="'a': needs"):
                await files.ask(models, "a")
        files.sizes["a"] = SIZE
        assert await files.ask(models, "a") == "a"

    run(main())


def test_a_model_without_memory_of_the_host_is_not_unloaded_for_others(files):
    models = files.models("gpu", "a", "b", ram_budget=SIZE)
    files.sizes["gpu"] = 0

    async def main():
        for name in ("gpu", "a", "b"):
            await files.ask(models, name)
        assert files.log == ["+gpu", "+a", "-a", "+b"]

    run(main())


@pytest.mark.long
def test_weights_that_models_share_count_once(files):
    models = files.models("a", "b", "c", "d", ram_budget=270)
    files.sizes |= {"a": Memory(SIZE, 60, "x"), "b": Memory(SIZE, 60, "x"), "c": Memory(150, 60, "y"), "d": Memory(260)}

    async def main():
        for name in "ab":
            await files.ask(models, name)
        assert (files.log, models.num_bytes) == (["+a", "+b"], 140)
        await files.ask(models, "c")  # one of the two goes with what it has alone, and then the other one
        assert (files.log[2:], models.num_bytes) == (["-a", "+c"], 250)
        await files.ask(models, "a")
        assert (files.log[4:], models.num_bytes) == (["-b", "+a"], 250)
        await files.ask(models, "d")
        assert (files.log[6:], models.num_bytes) == (["-c", "-a", "+d"], 260)

    run(main())


def test_requests_that_wait_for_a_model_get_its_error_and_a_later_one_tries_again(files):
    models = files.models("a", "b")
    files.broken["a"] = ModelError("a.gguf: is damaged")

    async def main():
        files.gate.clear()
        waiting = [asyncio.create_task(files.ask(models, "a")) for _ in range(5)]
        await until(lambda: len(models.waiting) == 5)
        files.gate.set()
        found = await asyncio.gather(*waiting, return_exceptions=True)
        assert {str(error) for error in found} == {"model = 'a': cannot be loaded: a.gguf: is damaged"}
        assert {error.code for error in found} == {"model_failed"}
        assert (models.entries[0].error, models.num_bytes) == ("a.gguf: is damaged", 0)
        del files.broken["a"]
        assert await files.ask(models, "a") == "a"
        assert models.entries[0].error == ""

    run(main())


def test_a_request_waits_no_longer_than_load_timeout_and_is_told_when_to_come_back(files):
    models = files.models("a", "b", load_timeout=0.05)

    async def main():
        models.entries[1].load_seconds = 7.5  # by which the time of the other is estimated
        files.gate.clear()
        with pytest.raises(HttpError, match=r"is loading, and was not ready within load_timeout = 0.05 s") as error:
            await files.ask(models, "a")
        assert (error.value.status, error.value.code) == (503, "model_loading")
        assert 1 <= int(error.value.headers["Retry-After"]) <= 8
        assert not models.waiting
        files.gate.set()
        await until(lambda: states(models)["a"] == "loaded")  # no request waits, and the next one finds it

    run(main())


def test_beyond_max_requests_waiting_ones_are_refused_at_once(files):
    models = files.models("a", max_requests=2)

    async def main():
        files.gate.clear()
        waiting = [asyncio.create_task(files.ask(models, "a")) for _ in range(2)]
        await until(lambda: len(models.waiting) == 2)
        with pytest.raises(HttpError, match="2 requests wait for models, of max_requests") as error:
            await files.ask(models, "a")
        assert (error.value.status, int(error.value.headers["Retry-After"]) >= 1) == (429, True)
        files.gate.set()
        assert await asyncio.gather(*waiting) == ["a", "a"]

    run(main())


def test_a_second_request_with_the_id_of_one_that_waits_for_its_model_is_refused(files):
    models = files.models("a", "b")

    async def ask(name):
        async with models.using(name, "same") as context:
            return context.names[0]

    async def main():
        files.gate.clear()
        first = asyncio.create_task(ask("a"))
        await until(lambda: models.waiting)
        for name in "ab":
            with pytest.raises(RequestError, match="is in use"):
                await ask(name)
        files.gate.set()
        assert await first == "a"
        assert await ask("a") == "a"

    run(main())


def test_a_client_that_leaves_while_its_model_is_loaded_leaves_nothing(files):
    models = files.models("a", model_keep_alive=0)
    models.entries[0].served = ServedModel(model="a", names=("a",), keep_alive=0.0)

    async def main():
        files.gate.clear()
        task = asyncio.create_task(files.ask(models, "a"))
        await until(lambda: models.waiting)
        task.cancel()
        await asyncio.wait([task])
        assert (models.waiting, models.entries[0].num_requests) == ({}, 0)
        files.gate.set()
        await until(lambda: files.log == ["+a", "-a"])

    run(main())


def test_an_idle_model_is_unloaded_after_its_time_and_not_while_it_is_used(files):
    models = files.models(ServedModel(model="a", names=("a",), keep_alive=0.02), "b")

    async def main():
        await files.ask(models, "b")
        async with files.using(models, "a"):
            await asyncio.sleep(0.05)
            assert states(models)["a"] == "loaded"
            assert models.entries[0].expires_in == 0.02
        await until(lambda: states(models)["a"] == "unloaded")
        assert states(models)["b"] == "loaded"
        assert files.log == ["+b", "+a", "-a"]

    run(main())


def test_a_request_may_say_how_long_its_model_stays(files):
    models = files.models("a", ServedModel(model="b", names=("b",), pin=True))

    async def main():
        async with files.using(models, "a"):
            models.set_keep_alive(models.entries[0], 0)
        await until(lambda: states(models)["a"] == "unloaded")
        async with files.using(models, "a"):  # the next one has the server's own time again
            assert models.entries[0].keep_alive is None
        with pytest.raises(HttpError, match="keep_alive = 0: the server always keeps this model loaded"):
            models.set_keep_alive(models.entries[1], 0)

    run(main())


@pytest.mark.long
def test_adapters_of_an_unloaded_model_are_known_and_come_back_with_it(files):
    models = files.models("a", "b", "c")

    async def main():
        async with files.using(models, "a") as context:
            context.engine.loras["law"] = "law.gguf"
        for name in "bc":
            await files.ask(models, name)
        assert states(models)["a"] == "unloaded"
        assert models.entries[0].names == ("a", "law")
        async with files.using(models, "law") as context:
            assert context.engine.loras == {"law": "law.gguf"}

    run(main())


def test_an_adapter_of_the_options_that_was_dropped_does_not_come_back(files):
    models = files.models(ServedModel(model="a", names=("a",), options={"loras": {"law": "law", "code": "code"}}))

    async def main():
        async with files.using(models, "law") as context:
            assert context.engine.loras == {"law": "law", "code": "code"}
            del context.engine.loras["law"]
            models.set_keep_alive(models.entries[0], 0)
        await until(lambda: states(models)["a"] == "unloaded")
        assert models.entries[0].names == ("a", "code")
        async with files.using(models, "a") as context:
            assert context.engine.loras == {"code": "code"}

    run(main())


def test_names_and_the_tag_latest_find_a_model_and_others_are_told_which_there_are(files):
    models = files.models(ServedModel(model="x", names=("a", "alias")), "b")
    for name in (None, "a", "alias", "a:latest", "alias:latest"):
        assert models.find(name).name == "a"
    with pytest.raises(HttpError, match=r"model = 'c': not served. Use 'a', 'alias', 'b'") as error:
        models.find("c")
    assert error.value.status == 404


def test_models_that_do_not_fit_together_are_refused_at_the_start(files):
    models = files.models("a", "b", "c", load_on_demand=False)
    with pytest.raises(ConfigError, match=r"'c': needs 0.0 MiB, and a, b, which stay loaded, have .* load_on_demand"):
        run(models.start())
    assert files.log == ["+a", "+b"]


def test_the_end_waits_for_a_model_that_is_being_loaded_and_closes_all(files):
    models = files.models("a", "b")

    async def main():
        await files.ask(models, "b")
        files.gate.clear()
        task = asyncio.create_task(files.ask(models, "a"))
        await until(lambda: models.waiting)
        task.cancel()  # as the server does with requests that do not end in time
        await asyncio.wait([task])
        closing = asyncio.create_task(models.close())
        await asyncio.sleep(0)
        files.gate.set()
        await closing
        assert sorted(files.log) == ["+a", "+b", "-a", "-b"]

    run(main())


@pytest.mark.long
def test_a_model_whose_end_fails_is_unloaded_all_the_same(files, capsys):
    models = files.models("a", "b", ram_budget=SIZE)

    async def fail():
        raise RuntimeError("the exporter is gone")

    async def main():
        async with files.using(models, "a") as context:
            closed = []
            context.engine.close, context.trace = fail, SimpleNamespace(close=lambda: closed.append(True))
        assert await files.ask(models, "b") == "b"
        assert (states(models), models.num_bytes, closed) == ({"a": "unloaded", "b": "loaded"}, SIZE, [True])
        assert await files.ask(models, "a") == "a"
        assert "the exporter is gone" in capsys.readouterr().err

    run(main())


def test_a_model_is_unloaded_though_the_client_that_removes_it_leaves(files):
    models = files.models("a", "b")

    async def main():
        async with files.using(models, "a") as context:
            slow, close = asyncio.Event(), context.engine.close

            async def close_slowly():
                await slow.wait()
                await close()

            context.engine.close = close_slowly
        removing = asyncio.create_task(models.remove(models.entries[0]))
        await until(lambda: "a" not in states(models))
        removing.cancel()
        await asyncio.wait([removing])
        closing = asyncio.create_task(models.close())
        await asyncio.sleep(0)
        assert not closing.done()
        slow.set()
        await closing
        assert files.log == ["+a", "-a"]

    run(main())


def test_models_with_one_name_and_unknown_pins_are_refused():
    a, b = (ServedModel(model=name, names=("same",)) for name in "ab")
    with pytest.raises(ConfigError, match=r"model 'b': 'same' is the name of 'a', too"):
        checked([a, b], ServerConfig())
    with pytest.raises(ConfigError, match=r"pin='x': no model has this name. Give one of same"):
        checked([a], ServerConfig(pin=("x",)))
    assert checked([a], ServerConfig(pin=("same",)))[0].pin


@pytest.mark.parametrize("other", ["one-00001-of-00002.gguf", "one/x.gguf", "one-00001-of-00003.gguf"])
def test_two_models_of_one_name_in_a_directory_are_refused(tmp_path, other):
    for name in ("one.gguf", "one-00002-of-00002.gguf", other):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ConfigError, match=r"'one' is the name of .*, too\. Give names in \[\[model\]\] tables"):
        checked(models_in(str(tmp_path), {}, None), ServerConfig())


def test_a_directory_has_the_models_that_can_be_loaded(tmp_path):
    files = ("one.gguf", "two-00001-of-00002.gguf", "two-00002-of-00002.gguf", "mmproj-one.gguf", "notes.txt")
    for name in (*files, "three/x.gguf", "four/config.json", "five/a.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    assert [one.names for one in models_in(str(tmp_path), {}, None)] == [("four",), ("one",), ("three",), ("two",)]
    for wrong in (tmp_path / "five", tmp_path / "none"):
        with pytest.raises(ConfigError, match="Give a directory of models"):
            models_in(str(wrong), {}, None)
