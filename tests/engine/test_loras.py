"""Adapters in the engine: several in one batch, loaded, replaced and dropped while requests run, within a budget."""

import asyncio
import os
import shutil
from random import Random

import numpy as np
import pytest

from foreword import LLM, AsyncLLM, SamplingParams
from foreword.cache import BlockStored
from foreword.cache.prefix import ROOT_HASH
from foreword.errors import ConfigError, EngineError, ModelError, RequestError
from foreword.kv_events.log import CacheLog
from foreword.native import available
from models.lora_files import merged, random_factors, write_peft
from models.recorded import TINY
from models.running import FLOATS
from models.tiny import random_tensors, write_model

CONFIG = TINY["llama3"]["config"] | {"eos_token_id": None}
SHAPES = TINY["llama3"]["shapes"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=1)
NAMES = ("law", "code", "verse")
PROMPT = [5, 9, 13, 2, 7, 30, 21, 4, 11]


def make_llm(path, executor="numpy", **options):
    return LLM(str(path), executor=executor, **{"block_size": 4, "max_num_seqs": 8, **FLOATS[executor], **options})


class Files:
    """A tiny model and its adapters, and each merged into a model of its own."""

    def __init__(self, folder):
        tensors = random_tensors(SHAPES)
        self.base = write_model(folder / "base", CONFIG, tensors)
        self.merged, self.adapters = {None: self.base}, {}
        for i, name in enumerate(NAMES):
            factors = random_factors(SHAPES, rank=(3, 16, 8)[i], seed=i)
            self.adapters[name] = write_peft(folder / name, factors, r=(3, 16, 8)[i], lora_alpha=(3, 16, 8)[i])
            self.merged[name] = write_model(folder / f"merged {name}", CONFIG, merged(tensors, factors, 1.0))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return Files(tmp_path_factory.mktemp("loras"))


@pytest.fixture(scope="module")
def expected(files):
    """{name: tokens and log-probabilities of prompts} of the models with merged weights."""
    prompts = some_prompts()
    return {name: list(map(outcome, make_llm(path).generate(prompts, GREEDY))) for name, path in files.merged.items()}


@pytest.fixture
def llm(files):
    with make_llm(files.base) as llm:
        for name, path in files.adapters.items():
            llm.load_lora(name, path)
        yield llm


def some_prompts():
    random = Random(3)
    stem = [random.randrange(1, 48) for _ in range(16)]
    return [stem[: random.randint(0, 15)] + [random.randrange(1, 48) for _ in range(3)] for _ in range(5)]


def outcome(output):
    [completion] = output.outputs
    return list(completion.token_ids), [
        e[t].logprob for e, t in zip(completion.logprobs, completion.token_ids, strict=True)
    ]


def tokens(output):
    return list(output.outputs[0].token_ids)


def assert_same(got, want):
    assert got[0] == want[0]
    np.testing.assert_allclose(got[1], want[1], atol=1e-4)


@pytest.mark.one_in(9)
@pytest.mark.parametrize("executor", FLOATS)
@pytest.mark.parametrize("config", [{}, {"max_num_batched_tokens": 5, "async_scheduling": True},
                                    {"num_blocks": 18, "check": "full"}, {"prefix_caching": False}],
                         ids=["plain", "chunks", "preempted", "no cache"])  # fmt: skip
def test_a_crowd_with_several_adapters_answers_as_models_with_merged_weights(files, expected, executor, config):
    work = [(name, i) for i in range(5) for name in files.merged] * 2
    Random(1).shuffle(work)
    prompts = some_prompts()
    with make_llm(files.base, executor, **config) as llm:
        for name, path in files.adapters.items():
            llm.load_lora(name, path)
        assert llm.loras == files.adapters
        outputs = llm.generate([prompts[i] for _, i in work], GREEDY, lora=[name for name, _ in work])
        assert (sum(o.metrics.num_preemptions for o in outputs) > 0) == ("num_blocks" in config)
        for (name, i), output in zip(work, outputs, strict=True):
            assert_same(outcome(output), expected[name][i])
        assert llm.engine.cache.pool.num_used == 0


def test_all_answers_differ_between_adapters(expected):
    assert len({tuple(expected[name][0][0]) for name in expected}) == len(expected)


@pytest.mark.skipif(not available(), reason="the native module is not built")
def test_the_native_executor_gives_equal_bits_alone_and_in_a_crowd(files):
    """In the formats of the default, where the adapters are in half precision."""
    prompts, names = some_prompts(), [*files.merged]
    with LLM(str(files.base), executor="native", block_size=4) as llm:
        for name, path in files.adapters.items():
            llm.load_lora(name, path)
        crowd = llm.generate(prompts * 4, GREEDY, lora=[names[i % 4] for i in range(20)])
        for i, output in enumerate(crowd):
            llm.engine.reset_prefix_cache()
            [alone] = llm.generate([prompts[i % 5]], GREEDY, lora=names[i % 4])
            assert outcome(alone) == outcome(output)


def test_prefixes_are_cached_for_each_adapter_alone(llm):
    params = SamplingParams(temperature=0.0, max_tokens=1)
    cached = [
        llm.generate(PROMPT, params, lora=name)[0].metrics.num_cached_tokens
        for name in (None, "law", "code", "law", None, "code")
    ]
    assert cached == [0, 0, 0, 8, 8, 8]


def test_cache_events_name_the_adapter_of_every_block(files):
    log = CacheLog()
    with make_llm(files.base, observers=[log]) as llm:
        llm.load_lora("law", files.adapters["law"])
        llm.generate([PROMPT, PROMPT], GREEDY, lora=["law", None])
        stored = [event for event in log.take(1000, 0) if isinstance(event, BlockStored)]
        first = {event.hash: event for event in stored if event.parent_hash == ROOT_HASH}
        assert {event.adapter for event in first.values()} == {(1, "law"), None}
        adapters = {ROOT_HASH: None} | {event.hash: event.adapter for event in stored}
        assert all(e.adapter == adapters[e.parent_hash] for e in stored if e.hash not in first)
        assert len(stored) > 4


def test_blocks_on_disk_belong_to_the_content_of_an_adapter(files, tmp_path):
    """Not to its number, which depends on the order of loading, nor to its name, its place and its files' times."""
    own = shutil.copytree(files.adapters["law"], tmp_path / "law")
    copied = shutil.copytree(own, tmp_path / "copy", copy_function=shutil.copyfile)
    weights = own / "adapter_model.safetensors"
    found = []
    for loaded, wanted in (
        ({"law": own, "code": files.adapters["code"]}, "law"),
        ({"code": files.adapters["code"], "law": own}, "law"),
        ({"copy": copied}, "copy"),
        ({"law": own}, "law"),
    ):
        if len(found) == 3:  # other weights of the same size, with the same name and time
            before, data = weights.stat(), weights.read_bytes()
            weights.write_bytes(data[:-8] + data[-16:-8])
            os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
            assert weights.read_bytes() != data
        with make_llm(files.base, cache_dir=str(tmp_path / "blocks")) as llm:
            for name, path in loaded.items():
                llm.load_lora(name, path)
            outputs = [llm.generate(PROMPT, GREEDY, lora=name)[0] for name in (wanted, None)]
            found.append([dict(output.metrics.loaded_tokens) for output in outputs])
            assert tokens(outputs[0]) != tokens(outputs[1])
    disk = {"disk": 8}
    assert found == [[{}, {}], [disk, disk], [disk, disk], [{}, disk]]


def test_streams_and_conversations_take_an_adapter_too(llm):
    want = {name: tokens(llm.generate(PROMPT, GREEDY, lora=name)[0]) for name in (None, "law")}
    finals = {o.prompt_index: tokens(o) for o in llm.stream([PROMPT, PROMPT], GREEDY, lora=[None, "law"]) if o.finished}
    assert finals == {0: want[None], 1: want["law"]}
    with pytest.raises(RequestError, match="'unheard'"):
        llm.generate([PROMPT, PROMPT], GREEDY, lora=["law", "unheard"])
    with pytest.raises(RequestError, match="2 prompts"):
        llm.generate([PROMPT, PROMPT], GREEDY, lora=["law"])


def test_a_replaced_adapter_ends_its_requests_and_shares_no_prefix(llm, files):
    want = {name: tokens(llm.generate(PROMPT, GREEDY, lora=name)[0]) for name in ("law", "code")}
    num_bytes = llm.engine.loras.num_bytes
    stream = llm.stream(PROMPT, GREEDY, lora="law")
    next(stream)
    next(stream)
    llm.load_lora("law", files.adapters["code"])
    assert llm.engine.loras.num_bytes > num_bytes
    [new] = llm.generate(PROMPT, GREEDY, lora="law")
    assert tokens(new) == want["code"]
    assert new.metrics.num_cached_tokens == 0
    *_, old = stream
    assert tokens(old) == want["law"]
    assert len(llm.engine.loras._versions) == 3


def test_a_dropped_adapter_ends_its_requests(llm):
    want, num_bytes = tokens(llm.generate(PROMPT, GREEDY, lora="law")[0]), llm.engine.loras.num_bytes
    stream = llm.stream(PROMPT, GREEDY, lora="law")
    next(stream)
    llm.drop_lora("law")
    assert llm.engine.loras.num_bytes == num_bytes
    with pytest.raises(RequestError, match="lora = 'law': is not the name of an adapter"):
        llm.generate(PROMPT, GREEDY, lora="law")
    *_, old = stream
    assert tokens(old) == want
    assert llm.engine.loras.num_bytes < num_bytes
    assert [*llm.loras] == ["code", "verse"]


def test_an_abort_frees_a_dropped_adapter(llm):
    stream = llm.stream(PROMPT, GREEDY, lora="law")
    next(stream)
    for name in NAMES:
        llm.drop_lora(name)
    assert llm.engine.loras.num_bytes > 0
    stream.close()
    assert llm.engine.loras.num_bytes == 0


def test_a_request_that_was_checked_before_its_adapter_was_dropped_is_refused_alone(llm):
    engine = llm.engine
    engine.add_request("other", PROMPT, GREEDY, lora="code")
    engine.step()
    group = engine.check("late", PROMPT, GREEDY, lora="law")
    llm.drop_lora("law")
    with pytest.raises(RequestError, match="request 'late': lora = 'law'"):
        engine.add(group)
    assert engine.num_unfinished == 1
    assert engine.states.num_computed_tokens.any()
    engine.abort("other")


def test_names_that_are_wrong_are_errors_that_change_nothing(llm, files):
    with pytest.raises(ConfigError, match=r"there is no adapter 'lwa'; did you mean 'law'\?"):
        llm.drop_lora("lwa")
    for name in ([], {"a": 1}, None, ""):
        with pytest.raises(ConfigError, match="the name of an adapter is"):
            llm.drop_lora(name)
    for name in ("", None, 5):
        with pytest.raises(ConfigError, match="the name of an adapter"):
            llm.load_lora(name, files.adapters["law"])
    for lora in (5, "", ["law"]):
        with pytest.raises(RequestError, match="lora = "):
            llm.engine.check("x", PROMPT, GREEDY, lora=lora)
    for lora, fix in (("lwa", r"Load it first; did you mean 'law'\?$"), ("", r"Load it first\.$")):
        with pytest.raises(RequestError, match=fix):
            llm.engine.check("x", PROMPT, GREEDY, lora=lora)
    assert [*llm.loras] == [*NAMES]


def test_an_adapter_that_cannot_be_used_leaves_the_one_of_its_name(llm, files, tmp_path):
    want = tokens(llm.generate(PROMPT, GREEDY, lora="law")[0])
    wrong = shutil.copytree(files.adapters["law"], tmp_path / "wrong")
    weights = wrong / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    num_bytes = llm.engine.loras.num_bytes
    with pytest.raises(ModelError, match="does not fit"):
        llm.load_lora("law", wrong)
    with pytest.raises(ModelError, match="No such file"):
        llm.load_lora("law", tmp_path / "nowhere")
    assert llm.engine.loras.num_bytes == num_bytes
    assert tokens(llm.generate(PROMPT, GREEDY, lora="law")[0]) == want


@pytest.mark.one_in(2)
@pytest.mark.parametrize("executor", FLOATS)
def test_the_least_recently_used_adapters_leave_memory_and_come_back(files, expected, executor):
    prompts = some_prompts()
    with make_llm(files.base, executor) as llm:
        sizes = []
        for name, path in files.adapters.items():
            before = llm.engine.loras.num_bytes
            llm.load_lora(name, path)
            sizes.append(llm.engine.loras.num_bytes - before)
    budget = max(sizes[0] + sizes[1], sizes[1] + sizes[2])
    with make_llm(files.base, executor, lora_bytes=budget) as llm:
        loras = llm.engine.loras
        for name, path in files.adapters.items():
            llm.load_lora(name, path)
        assert [lora.num_bytes > 0 for lora in loras._versions.values()] == [False, True, True]
        for name in ("law", "code", "verse", "law", "law", "verse", "code"):
            for i in (0, 1):
                [output] = llm.generate(prompts[i], GREEDY, lora=name)
                assert_same(outcome(output), expected[name][i])
            assert loras.num_bytes <= budget
        # All are needed at once: those of running requests stay beyond the budget, until they have ended.
        outputs = llm.generate([prompts[0]] * 3, GREEDY, lora=[*NAMES])
        for name, output in zip(NAMES, outputs, strict=True):
            assert_same(outcome(output), expected[name][0])
        assert loras.num_bytes <= budget


def test_an_adapter_that_vanished_or_was_changed_on_disk_is_named(files, tmp_path):
    paths = {name: shutil.copytree(path, tmp_path / name) for name, path in files.adapters.items()}
    with make_llm(files.base, lora_bytes=1) as llm:
        for name, path in paths.items():
            llm.load_lora(name, path)
        want = tokens(llm.generate(PROMPT, GREEDY, lora="law")[0])
        llm.generate(PROMPT, GREEDY, lora="code")
        (paths["law"] / "adapter_model.safetensors").touch()
        with pytest.raises(RequestError, match=r"lora = 'law': .*was changed since it was loaded"):
            llm.generate(PROMPT, GREEDY, lora="law")
        llm.load_lora("law", paths["law"])
        llm.generate(PROMPT, GREEDY, lora="code")
        assert tokens(llm.generate(PROMPT, GREEDY, lora="law")[0]) == want
        llm.generate(PROMPT, GREEDY, lora="code")
        shutil.rmtree(paths["law"])
        running = llm.stream(PROMPT, GREEDY, lora="code")
        next(running)
        with pytest.raises(RequestError, match=r"lora = 'law': .*cannot be read \(No such file"):
            llm.generate(PROMPT, GREEDY, lora="law")
        *_, last = running
        assert last.finished
        assert last.error is None


@pytest.mark.long
def test_random_changes_of_adapters_while_requests_run_change_no_other_request(files, expected):
    random, prompts = Random(5), some_prompts()
    with make_llm(files.base, max_num_batched_tokens=7, lora_bytes=120_000, async_scheduling=True) as llm:
        engine, running, number, held = llm.engine, {}, 0, {}
        for step in range(220):
            name = random.choice(NAMES)
            match random.randrange(8):
                case 0:
                    held[name] = random.choice(NAMES)
                    llm.load_lora(name, files.adapters[held[name]])
                case 1 if name in held and step < 180:
                    del held[name]
                    llm.drop_lora(name)
                case 2 | 3 if step < 180:
                    name, i, number = random.choice([None, *held]), random.randrange(5), number + 1
                    engine.add_request(str(number), prompts[i], GREEDY, lora=name)
                    running[str(number)] = (held[name] if name else None, i)
                case 4 if running:
                    ended = random.choice([*running])
                    engine.abort(ended)
                    del running[ended]
            for output in engine.step():
                name, i = running.pop(output.request_id)
                assert_same(outcome(output), expected[name][i])
        assert number > 30
        while engine.has_work:
            for output in engine.step():
                name, i = running.pop(output.request_id)
                assert_same(outcome(output), expected[name][i])
        assert engine.cache.pool.num_used == 0
        assert {lora.name for lora in engine.loras._versions.values()} == held.keys()
        assert engine.loras.num_bytes <= 120_000
        assert engine.loras.num_bytes == sum(lora.num_bytes for lora in engine.loras._versions.values())


def test_coroutines_load_and_drop_adapters_while_others_generate(files, expected):
    prompts = some_prompts()

    async def answer(llm, name, i):
        *_, last = [output async for output in llm.generate(prompts[i], GREEDY, lora=name)]
        assert_same(outcome(last), expected[name][i])

    async def main():
        async with AsyncLLM(str(files.base), executor="numpy", block_size=4) as llm:
            base = [asyncio.create_task(answer(llm, None, i)) for i in range(5)]
            for name, path in files.adapters.items():
                await llm.load_lora(name, path)
            assert llm.loras == files.adapters
            adapted = [asyncio.create_task(answer(llm, name, i)) for i in range(5) for name in NAMES]
            await asyncio.gather(*base, *adapted)
            await llm.drop_lora("law")
            with pytest.raises(RequestError, match="'law'"):
                await answer(llm, "law", 0)
            with pytest.raises(ConfigError, match="'law'"):
                await llm.drop_lora("law")
            with pytest.raises(ModelError):
                await llm.load_lora("law", "nowhere")

    asyncio.run(main())


def test_a_closed_llm_loads_nothing(files):
    llm = make_llm(files.base)
    llm.close()
    with pytest.raises(EngineError, match="closed"):
        llm.load_lora("law", files.adapters["law"])
