"""The offline interface on a tiny random model, and on the default one."""

import asyncio
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from engine_rig import OnStep
from oracle_model import LetterTokenizer

from computing import replace_compute
from foreword import LLM, AsyncLLM, SamplingParams
from foreword.engine import EngineConfig, engine_config
from foreword.engine.build import build_engine, load
from foreword.engine.pool import pool_size
from foreword.engine.speculation import SpeculationConfig
from foreword.errors import ConfigError, EngineError, RequestError
from foreword.models.families import FAMILIES
from foreword.models.loader import LoadedModel
from foreword.models.spec import DecoderSpec, LayerSpec, RopeSpec, weight_names
from foreword.models.weights import float_tensor
from foreword.sampling import BadLogitsError
from models.recorded import make

V = 30


class TinyTokenizer(LetterTokenizer):
    def __init__(self) -> None:
        self.response_template, self.special_token_ids = None, {"<end>": 0}

    def chat_template(self, *, tools=False) -> str:
        return "{{ messages }}"

    def template_variables(self, *, tools=False) -> frozenset[str]:
        return frozenset({"messages"})

    def written_call(self, *, tools=False) -> str:
        return ""

    def apply_chat_template(self, messages, *, tools=None, add_generation_prompt=True, **extra) -> str:
        return "".join(m["content"] for m in messages) + ("x" if add_generation_prompt else "")


def tiny_model(windows=(None, 4, 4)) -> LoadedModel:
    rope = RopeSpec((1.0, 0.1))
    spec = DecoderSpec(
        architecture="tiny",
        vocab_size=V,
        hidden_size=8,
        intermediate_size=12,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        max_model_len=64,
        layers=tuple(LayerSpec(rope, window) for window in windows),
        norm_eps=1e-5,
        query_scale=0.5,
    )
    random = np.random.default_rng(1)
    weights = {name: float_tensor(random.normal(size=shape).astype(np.float32)) for name, shape in weight_names(spec)}
    return LoadedModel(spec, weights, TinyTokenizer(), (0,), "tiny", Path("tiny"), FAMILIES["llama"])


@pytest.fixture
def llm() -> LLM:
    return LLM(tiny_model(), executor="numpy", block_size=4, max_num_seqs=3, seed=1)


def test_one_prompt_or_many_of_text_or_tokens(llm: LLM):
    params = SamplingParams(temperature=0.0, max_tokens=4)
    (text,) = llm.generate("abc", params)
    (tokens,) = llm.generate([1, 2, 3], params)
    many = llm.generate(["abc", [1, 2, 3], np.array([1, 2, 3])], params)
    assert {tuple(o.outputs[0].token_ids) for o in (text, tokens, *many)} == {tuple(text.outputs[0].token_ids)}
    assert (text.prompt, tokens.prompt) == ("abc", None)
    assert llm.generate([], params) == []


def test_parameters_are_one_for_all_or_one_each_and_results_keep_the_order(llm: LLM):
    lengths = [9, 1, 5, 3]
    outputs = llm.generate(["a", "b", "c", "d"], [SamplingParams(max_tokens=n, ignore_eos=True) for n in lengths])
    assert [len(o.outputs[0].token_ids) for o in outputs] == lengths
    with pytest.raises(RequestError, match="4 prompts"):
        llm.generate(["a", "b", "c", "d"], [SamplingParams()])


def test_chat_goes_through_the_template(llm: LLM):
    params = SamplingParams(temperature=0.0, max_tokens=3)
    (one,) = llm.chat([{"role": "user", "content": "abc"}], params)
    assert one.prompt == "abcx"
    assert one.prompt_token_ids == [1, 2, 3, 24]
    assert len(llm.chat([[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]], params)) == 2
    for wrong in ([], None, 5):
        with pytest.raises(RequestError, match="messages"):
            llm.chat(wrong, params)


def test_a_text_or_a_message_is_a_conversation(llm: LLM):
    params = SamplingParams(temperature=0.0, max_tokens=3)
    (expected,) = llm.chat([{"role": "user", "content": "abc"}], params)
    message = {"role": "user", "content": "abc"}
    for given in ("abc", message, ["abc", [message]]):
        for output in (*llm.chat(given, params), *(o for o in llm.chat_stream(given, params) if o.finished)):
            assert (output.prompt, output.outputs[0].text) == (expected.prompt, expected.outputs[0].text)


@pytest.mark.parametrize("wrong", [{"temperature": 0}, [{"temperature": 0}], "greedy", 0])
def test_parameters_of_another_type_are_refused(llm: LLM, wrong):
    for call in (llm.generate, llm.chat, llm.stream, llm.chat_stream):
        with pytest.raises(RequestError, match=r"sampling_params = .* Give SamplingParams\("):
            call("abc", wrong)


def test_without_parameters_the_answer_is_greedy_and_long(llm: LLM):
    greedy = SamplingParams(temperature=0.0, max_tokens=1024)
    for call in (llm.generate, llm.chat):
        assert call("abc")[0].outputs == call("abc", greedy)[0].outputs


def test_a_sampling_parameter_is_no_variable_of_a_template(llm: LLM):
    with pytest.raises(RequestError, match=r"temperature = 0: is not an option of a chat. Pass SamplingParams\("):
        llm.chat("abc", temperature=0)


def test_a_conversation_is_rendered_outside_the_event_loop():
    threads = []

    class Watched(TinyTokenizer):
        def apply_chat_template(self, messages, **options) -> str:
            threads.append(threading.get_ident())
            return super().apply_chat_template(messages, **options)

    model = replace(tiny_model(), tokenizer=Watched())

    async def main() -> list:
        async with AsyncLLM(model, executor="numpy", block_size=4) as llm:
            messages = [{"role": "user", "content": "abc"}]
            return [output async for output in llm.chat(messages, SamplingParams(max_tokens=3))]

    assert asyncio.run(main())[-1].prompt == "abcx"
    assert threading.get_ident() not in threads


@pytest.mark.parametrize("prompts", [b"text", bytearray(b"text"), memoryview(b"text"), 3, None, {5}, iter([5])])
def test_what_is_no_prompt_is_refused(llm: LLM, prompts):
    with pytest.raises(RequestError, match=r"prompts = .*must be a text, token ids"):
        llm.generate(prompts)


def test_a_bad_prompt_in_a_list_is_named_and_nothing_starts(llm: LLM):
    with pytest.raises(RequestError, match=r"prompts\[1\].*prompt_token_ids\[0\] = 99"):
        llm.generate(["abc", [99], "abc"], SamplingParams())
    assert not llm.engine.has_work
    assert llm.engine.executor.cache.keys.any() == False  # noqa: E712


def test_progress_is_shown_on_request(llm: LLM, capsys: pytest.CaptureFixture[str]):
    llm.generate(["a", "b"], SamplingParams(max_tokens=2), progress=True)
    shown = capsys.readouterr()
    assert "2/2" in shown.err
    assert not shown.out


def test_an_interrupt_leaves_nothing_in_the_engine(llm: LLM):
    calls = []

    def interrupt(plan, batch):
        calls.append(plan)
        if len(calls) == 2:
            raise KeyboardInterrupt

    observer = OnStep(interrupt)
    llm.engine.observers.add(observer)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["abc", "def"], SamplingParams(max_tokens=9, ignore_eos=True))
    llm.engine.observers.remove(observer)
    assert not llm.engine.has_work
    assert llm.engine.cache.pool.num_used == 0
    assert len(llm.generate("abc", SamplingParams(max_tokens=2, ignore_eos=True))[0].outputs[0].token_ids) == 2


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "config", [{}, {"max_num_batched_tokens": 5}, {"async_scheduling": True}, {"prefix_caching": False}]
)
def test_a_hybrid_model_gives_the_same_output_however_it_is_served(config):
    prompts = [[1 + (i * j) % 29 for j in range(1, 14 + i)] for i in range(5)]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)

    def tokens(**config) -> list[list[int]]:
        engine = build_engine(load(tiny_model(), "numpy"), engine_config({"block_size": 4, **config}))
        for i, prompt in enumerate(prompts):
            engine.add_request(str(i), prompt, params)
        done = {}
        while engine.has_work:
            done |= {o.request_id: o.outputs[0].token_ids for o in engine.step()}
        engine.close()
        return [done[str(i)] for i in range(5)]

    assert tokens(max_num_seqs=4, **config) == tokens(max_num_seqs=1)


def test_the_pool_holds_all_requests_or_what_the_memory_allows():
    spec = tiny_model().spec  # one full and two windowed groups of one layer
    config = engine_config({"block_size": 4, "max_num_seqs": 2})
    size = pool_size(spec, config)
    one = 16 + 2 * 16  # a chunk of the whole prompt holds the window groups' blocks at once
    assert size.num_blocks == 1 + 2 * one
    assert size.block_bytes == 2 * 1 * 4 * 1 * 4 * 4
    small = pool_size(
        spec, engine_config({"block_size": 4, "max_num_seqs": 2, "kv_cache_bytes": 60 * size.block_bytes})
    )
    assert small.num_blocks == 60


@pytest.mark.parametrize("speculation", [None, SpeculationConfig(num_tokens=12)])
def test_the_pool_of_one_request_has_room_for_its_drafts(speculation):
    limits = {"block_size": 1, "max_num_seqs": 1, "max_num_batched_tokens": 8, "speculation": speculation}
    engine = build_engine(load(tiny_model(), "numpy"), engine_config(limits))  # with windows: drafts hold blocks
    assert engine.states.max_num_draft_tokens == (12 if speculation else 8)


def test_impossible_sizes_are_refused_with_what_would_work():
    spec = tiny_model().spec
    with pytest.raises(ConfigError, match="needs 6272; give that many"):
        pool_size(spec, EngineConfig(block_size=4, kv_cache_bytes=1000))
    with pytest.raises(ConfigError, match="made for 64 tokens"):
        pool_size(spec, EngineConfig(max_model_len=65))
    with pytest.raises(ConfigError, match=r"num_blocks=5: .* needs 49, .* max_model_len=4"):
        build_engine(load(tiny_model(), "numpy"), EngineConfig(block_size=4, num_blocks=5))
    with pytest.raises(ConfigError, match="'auto', 'native', 'numpy', 'torch'"):
        load(tiny_model(), "gpu")  # type: ignore[arg-type]


@pytest.mark.model
def test_the_default_model_answers(smollm2_path: Path):
    llm = LLM(str(smollm2_path), max_model_len=256)
    question = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    (out,) = llm.chat(question, SamplingParams(temperature=0.0, max_tokens=16))
    assert out.outputs[0].text == "The capital of France is Paris."
    assert out.outputs[0].finish_reason == "stop"


def test_a_draft_model_comes_from_the_settings(tmp_path: Path):
    path = make(tmp_path, "llama3")

    def tokens(**config) -> tuple[list[int], int]:
        engine = build_engine(load(path, "numpy"), engine_config({"block_size": 4, **config}))
        engine.add_request("a", [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
        steps = 0
        while engine.has_work:
            steps += 1
            done = engine.step()
        return done[0].outputs[0].token_ids, steps

    speculation = SpeculationConfig(method="draft_model", model=str(path), adaptive=False)
    (with_drafts, fewer), (without, steps) = tokens(speculation=speculation), tokens()
    assert with_drafts == without
    assert fewer < steps / 2


def test_a_draft_model_of_another_vocabulary_is_refused(tmp_path: Path):
    config = engine_config({"speculation": "draft_model", "speculation_model": str(make(tmp_path, "llama3"))})
    with pytest.raises(ConfigError, match="48 token ids, the target 30"):
        build_engine(load(tiny_model(), "numpy"), config)


def test_an_llm_closes_once_and_for_all(llm: LLM):
    with llm as same:
        assert same is llm
        assert repr(llm) == "<LLM 'tiny' on NumpyExecutor>"
        llm.generate("abc", SamplingParams(max_tokens=2))
    llm.close()
    assert repr(llm) == "<LLM 'tiny' on NumpyExecutor, closed>"
    with pytest.raises(EngineError, match="this LLM is closed"):
        llm.generate("abc")


def test_requests_of_another_user_of_the_engine_keep_their_outputs(llm: LLM):
    params = SamplingParams(temperature=0.0, max_tokens=3)
    expected = {name: llm.generate(name, params)[0].outputs[0].text for name in ("ab", "cd", "ef")}
    for name in ("0", "3", "mine"):  # also names that the LLM would use
        llm.engine.add_request(name, "ef", params)
    got = [output.outputs[0].text for output in llm.generate(["ab", "cd"], params)]
    assert got == [expected["ab"], expected["cd"]]
    others: dict[str, str] = {}
    while llm.engine.has_work:
        others |= {output.request_id: output.outputs[0].text for output in llm.engine.step()}
    assert others == dict.fromkeys(("0", "3", "mine"), expected["ef"])


@pytest.mark.parametrize("spoiled", [["a"], ["a", "b"]])
def test_a_request_that_fails_has_an_error_and_a_batch_that_fails_raises(llm: LLM, spoiled: list[str]):
    compute = llm.engine.executor.compute

    def broken(batch, logits_indices):
        logits = compute(batch, logits_indices)
        for i, b in enumerate(np.searchsorted(batch.query_start_loc[1:], logits_indices, side="right").tolist()):
            if batch.states.token_ids[batch.idx_mapping[b], 0] in [llm.tokenizer.encode(text)[0] for text in spoiled]:
                logits[i, 3] = np.nan
        return logits

    replace_compute(llm.engine.executor, broken)
    params = SamplingParams(temperature=0.0, max_tokens=3)
    if spoiled == ["a", "b"]:
        with pytest.raises(BadLogitsError, match="logits"):
            llm.generate(["a", "b"], params)
    else:
        bad, good = llm.generate(["a", "b"], params)
        assert bad.outputs[0].finish_reason == "error"
        assert isinstance(bad.error, BadLogitsError)
        assert good.outputs[0].finish_reason == "length"
    assert not llm.engine.has_work
