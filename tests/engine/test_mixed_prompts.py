"""Prompts with embeddings and rotary positions through the engine: what is served, what is cached, what is refused."""

import asyncio

import numpy as np
import pytest
from engine_rig import make_engine
from oracle_model import OracleExecutor

from foreword import LLM, AsyncLLM, SamplingParams
from foreword.engine.speculation import SpeculationConfig
from foreword.errors import RequestError
from foreword.executors import Capability
from models.recorded import make
from models.test_mrope import RECORDED
from models.tiny import random_tensors, write_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, logprobs=1, ignore_eos=True)
IDS = np.random.default_rng(1).integers(3, 48, 21).tolist()


@pytest.fixture
def folder(tmp_path):
    return str(make(tmp_path, "gemma2"))


@pytest.fixture
def mrope_folder(tmp_path):
    recorded = RECORDED["sections"]
    return str(write_model(tmp_path / "mrope", recorded["config"], random_tensors(recorded["shapes"])))


def rows(llm, ids=IDS):
    model = llm.model
    return model.weights["embed"].dequantize()[ids] * np.float32(model.spec.embedding_scale)


def tokens(outputs):
    return [[c.token_ids for c in output.outputs] for output in outputs]


def test_a_list_of_prompts_may_mix_all_forms(folder):
    with LLM(folder, block_size=4, max_num_batched_tokens=9) as llm:
        text = llm.tokenizer.decode(IDS[:8])
        vectors = {"prompt_embeds": rows(llm)}
        outputs = llm.generate([text, IDS, vectors, {"prompt_token_ids": IDS}], GREEDY)
        assert tokens(outputs)[1:] == tokens([outputs[1]] * 3)
        assert tokens(llm.generate(vectors, GREEDY)) == tokens([outputs[1]])
        assert [len(o.prompt_token_ids) for o in outputs[1:]] == [21, 21, 21]
        assert outputs[2].prompt_token_ids == [0] * 21
        [streamed] = [output for output in llm.stream(vectors, GREEDY) if output.finished]
        assert tokens([streamed]) == tokens([outputs[1]])


def test_the_callers_arrays_are_not_kept(folder):
    with LLM(folder, block_size=4, max_num_batched_tokens=8) as llm:
        want = tokens(llm.generate(IDS, GREEDY))
        vectors, mask = rows(llm).astype(np.float32), np.zeros(21, np.bool_)
        prompt = {"prompt_embeds": vectors, "prompt_token_ids": IDS, "prompt_is_token_ids": mask}
        stream = llm.stream(prompt, GREEDY)
        vectors[:], mask[:] = 0, True
        assert tokens([output for output in stream if output.finished]) == want


def test_many_completions_share_the_prompt(folder):
    params = SamplingParams(n=3, seed=5, max_tokens=6, ignore_eos=True)
    with LLM(folder, block_size=4) as llm:
        assert tokens(llm.generate({"prompt_embeds": rows(llm)}, params)) == tokens(llm.generate(IDS, params))


def test_async_streams_take_embeddings(folder):
    async def outputs():
        async with AsyncLLM(folder, block_size=4) as llm:
            return [o async for o in llm.generate({"prompt_embeds": rows(llm)}, GREEDY)], llm.model

    with LLM(folder, block_size=4) as llm:
        want = tokens(llm.generate(IDS, GREEDY))
    assert tokens(asyncio.run(outputs())[0][-1:]) == want


def test_a_prefix_is_found_up_to_the_first_vector_that_differs(folder):
    with LLM(folder, block_size=4) as llm:
        vectors = rows(llm)

        def cached(vectors, ids=None, mask=None):
            prompt = {"prompt_embeds": vectors}
            if mask is not None:
                prompt |= {"prompt_token_ids": ids, "prompt_is_token_ids": mask}
            return llm.generate(prompt, GREEDY)[0].metrics.num_cached_tokens

        assert cached(vectors) == 0
        assert cached(vectors) == 20
        changed = vectors.copy()
        changed[9] += 1
        assert cached(changed) == 8  # the whole block with the vector is another one
        assert cached(vectors, IDS, np.arange(21) >= 12) == 12
        assert cached(vectors, IDS, np.arange(21) >= 12) == 20
        assert llm.generate(IDS, GREEDY)[0].metrics.num_cached_tokens == 0


def test_a_further_turn_finds_prompt_and_answer_of_an_image_conversation(mrope_folder):
    with LLM(mrope_folder, block_size=4) as llm:
        vectors, mask = rows(llm), np.r_[[True] * 3, [False] * 9, [True] * 9]
        positions = np.tile(np.arange(21), (3, 1))
        positions[:, 3:12] = 3 + np.stack([np.zeros(9, int), np.arange(9) // 3, np.arange(9) % 3])
        positions[:, 12:] -= 6
        first = {"prompt_embeds": vectors, "prompt_token_ids": IDS, "prompt_is_token_ids": mask,
                 "mrope_positions": positions, "mrope_delta": -6}  # fmt: skip
        [answer] = llm.generate(first, GREEDY)
        new = [7, 8, 9]
        ids = [*IDS, *answer.outputs[0].token_ids, *new]
        after = np.tile(np.arange(21, len(ids)) - 6, (3, 1))
        further = {
            "prompt_embeds": np.concatenate([vectors, np.zeros((len(ids) - 21, vectors.shape[1]))]),
            "prompt_token_ids": ids, "prompt_is_token_ids": [*mask.tolist(), *[True] * (len(ids) - 21)],
            "mrope_positions": np.concatenate([positions, after], 1), "mrope_delta": -6,
        }  # fmt: skip
        [output] = llm.generate(further, GREEDY)
        assert output.metrics.num_cached_tokens == 26  # all but the last token of the answer, which was not computed
        positions[2, 5] += 1
        assert llm.generate(first, GREEDY)[0].metrics.num_cached_tokens == 4
        assert llm.generate(IDS, GREEDY)[0].metrics.num_cached_tokens == 0
        llm.engine.reset_prefix_cache()
        assert tokens(llm.generate(further, GREEDY)) == tokens([output])


def test_vectors_whose_logits_are_no_numbers_end_their_request_alone(folder):
    with LLM(folder, block_size=4) as llm:
        want = tokens(llm.generate(IDS, GREEDY))
        huge = np.full((5, 32), 3e38, np.float32)
        huge[::2] *= -1
        bad, good = llm.generate([{"prompt_embeds": huge}, IDS], GREEDY)
        assert bad.outputs[0].finish_reason in ("error", "length")
        assert tokens([good]) == want


@pytest.mark.parametrize("method", ["ngram", "suffix", "draft_model"])
def test_speculation_changes_nothing(folder, method):
    model = folder if method == "draft_model" else None
    speculation = SpeculationConfig(method=method, model=model, min_match=1, adaptive=False)
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    ids = IDS[:7] * 3
    with LLM(folder, block_size=4) as llm, LLM(folder, block_size=4, speculation=speculation) as drafting:
        vectors, mask = rows(llm, ids), np.arange(21) % 5 > 1
        mixed = {"prompt_embeds": vectors, "prompt_token_ids": ids, "prompt_is_token_ids": mask}
        want = tokens(llm.generate(ids, params))
        assert tokens(drafting.generate([mixed, {"prompt_embeds": vectors}, ids], params)) == want * 3


def test_executors_without_the_capability_refuse_by_name():
    for prompt, name in (
        ({"prompt_embeds": np.ones((3, 2), np.float32)}, "PROMPT_EMBEDS"),
        ({"prompt_token_ids": [1, 2], "mrope_positions": [[0, 1]] * 3}, "MROPE"),
        ({"prompt_token_ids": [1, 2], "mrope_delta": 1}, "MROPE"),
    ):
        engine = make_engine()
        with pytest.raises(RequestError, match=rf"(?s)request 'a': .*OracleExecutor .*Capability\.{name}"):
            engine.add_request("a", prompt, GREEDY)
        assert not engine.has_work


class Reads(OracleExecutor):
    """An executor that says that it takes embeddings and rotary positions, for checks before they are read."""

    capabilities = OracleExecutor.capabilities | {Capability.PROMPT_EMBEDS, Capability.MROPE}
    hidden_size, mrope_dims = 4, 3


NAN = np.array([[0, 0, 0, 0], [0, np.nan, 0, 0]])
EMBEDS = np.zeros((2, 4))
BOTH = {"prompt_embeds": EMBEDS, "prompt_token_ids": [1, 2], "prompt_is_token_ids": [True, False]}
TEXT = {"prompt_token_ids": [1, 2, 3]}
POSITIONS = np.zeros((3, 3), np.int64)


@pytest.mark.parametrize(
    ("prompt", "field", "reason"),
    [
        ({"prompt_embeds": NAN}, "prompt_embeds[1, 1]", "nan: is not a finite float32"),
        ({"prompt_embeds": EMBEDS + 1e300}, "prompt_embeds[0, 0]", "inf: is not a finite float32"),
        ({**BOTH, "prompt_embeds": NAN}, "prompt_embeds[1, 1]", "not a finite"),
        ({"prompt_embeds": np.zeros((2, 5))}, "prompt_embeds", r"float64 [2, 5]': must be floats [tokens, 4]"),
        ({"prompt_embeds": EMBEDS[0]}, "prompt_embeds", "must be floats [tokens, 4]"),
        ({"prompt_embeds": EMBEDS[:0]}, "prompt_embeds", "tokens ≥ 1"),
        ({"prompt_embeds": EMBEDS.astype(int)}, "prompt_embeds", "int64 [2, 4]': must be floats"),
        ({"prompt_embeds": EMBEDS.astype(complex)}, "prompt_embeds", "must be floats"),
        ({"prompt_embeds": [[0.5, 1.0], [0.5]]}, "prompt_embeds", "must be floats"),
        ({"prompt_embeds": "vectors"}, "prompt_embeds", "must be floats"),
        ({"prompt_embeds": np.broadcast_to(0.0, (10**12, 4))}, "prompt_embeds", "leaves no room for an output"),
        ({"prompt_embeds": range(10**12)}, "prompt_embeds", "must be floats"),
        ({**BOTH, "prompt_is_token_ids": range(10**12)}, "prompt_is_token_ids", "must be bool [2]"),
        ({**BOTH, "prompt_is_token_ids": None}, "prompt_is_token_ids", "belong together"),
        ({**BOTH, "prompt_token_ids": None}, "prompt_is_token_ids", "belong together"),
        ({**BOTH, "prompt_is_token_ids": [True]}, "prompt_is_token_ids", "must be bool [2]"),
        ({**BOTH, "prompt_is_token_ids": [1, 0]}, "prompt_is_token_ids", "must be bool [2]"),
        ({**BOTH, "prompt_token_ids": [1, 2, 3]}, "prompt_token_ids", "prompt_embeds has 2 positions"),
        ({**BOTH, "prompt_token_ids": [1], "prompt_is_token_ids": [False] * 2}, "prompt_token_ids", "has 2 positions"),
        ({**BOTH, "prompt_token_ids": [30, 2]}, "prompt_token_ids[0]", "must be in [0, 29]"),
        ({**TEXT, "prompt_is_token_ids": [True] * 3}, "prompt_is_token_ids", "is given without prompt_embeds"),
        ({}, "prompt_token_ids", "must be a flat list"),
        ({**TEXT, "prompt_embed": EMBEDS}, "prompt", "is not a key of a prompt. Did you mean 'prompt_embeds'?"),
        ({**TEXT, 5: 1}, "prompt", "is not a key of a prompt. Use prompt_embeds, "),
        ({**TEXT, "mrope_positions": POSITIONS[:2]}, "mrope_positions", "[3, n] with n ≤ 3"),
        ({**TEXT, "mrope_positions": np.zeros((3, 4), int)}, "mrope_positions", "[3, n] with n ≤ 3"),
        ({**TEXT, "mrope_positions": POSITIONS - 1}, "mrope_positions", "must be integers ≥ 0"),
        ({**TEXT, "mrope_positions": POSITIONS + 2**31}, "mrope_positions", "that fit int32"),
        ({**TEXT, "mrope_positions": POSITIONS + 0.5}, "mrope_positions", "must be integers"),
        ({**TEXT, "mrope_positions": "abc"}, "mrope_positions", "must be integers"),
        ({**TEXT, "mrope_positions": range(10**12)}, "mrope_positions", "must be integers"),
        ({**TEXT, "mrope_positions": [range(10**12)] * 3}, "mrope_positions", "must be integers"),
        ({**TEXT, "mrope_positions": POSITIONS, "mrope_delta": -4}, "mrope_delta", "at least −3"),
        ({**TEXT, "mrope_positions": POSITIONS, "mrope_delta": 2**31}, "mrope_delta", "must be an int32"),
        ({**TEXT, "mrope_positions": POSITIONS, "mrope_delta": 1.0}, "mrope_delta", "must be an int32"),
        ({**TEXT, "mrope_delta": -1}, "mrope_delta", "at least −0"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_field_and_a_fix(prompt, field, reason):
    engine = make_engine(executor=Reads)
    with pytest.raises(RequestError) as caught:
        engine.add_request("a", prompt, GREEDY)
    assert (caught.value.request_id, caught.value.field) == ("a", field)
    assert reason in str(caught.value)
    assert caught.value.fix
    assert not engine.has_work


@pytest.mark.parametrize("params", [{"prompt_logprobs": 1}, {"truncate_prompt_tokens": 1}], ids=str)
def test_parameters_that_need_token_ids_are_refused_for_embeddings(params):
    with pytest.raises(RequestError, match=next(iter(params))):
        make_engine(executor=Reads).add_request("a", BOTH, SamplingParams(max_tokens=2, **params))


def test_vectors_where_the_prompt_is_a_token_are_not_read():
    engine = make_engine(executor=Reads)
    prompt = {"prompt_embeds": NAN[::-1], "prompt_token_ids": [3, -1], "prompt_is_token_ids": [True, False]}
    engine.add_request("a", prompt, GREEDY)
    assert engine._outputs.groups["a"].prompt.token_ids.tolist() == [3, 0]
    engine.add_request("b", {**BOTH, "prompt_is_token_ids": [True, True]}, SamplingParams(max_tokens=2))
    assert "prompt_embeds" not in engine._outputs.groups["b"].inputs
