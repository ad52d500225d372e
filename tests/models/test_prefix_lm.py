"""Prompts whose tokens see each other (HRM-Text): equal to what transformers recorded with `token_type_ids`."""

from dataclasses import replace

import numpy as np
import pytest

from foreword import LLM, SamplingParams
from foreword.errors import RequestError
from foreword.insight.outputs import compare, measure, recorded, recorded_outputs
from foreword.models.loader import load_model
from foreword.trace.reader import Trace
from models.recorded import TINY, make
from models.running import EXECUTORS, FLOATS, all_logits, log_probs, whole

NAME = "hrm-text"
TEXT, PREFIXES = TINY[NAME]["token_ids"], TINY[NAME]["prefixes"]
LENGTHS = [int(count) for count in PREFIXES]
PROMPTS = [TEXT[:count] for count in LENGTHS]
GREEDY = [found["greedy"] for found in PREFIXES.values()]
PARAMS = SamplingParams(temperature=0.0, max_tokens=len(GREEDY[0]), ignore_eos=True, detokenize=False)
OPTIONS = {"max_model_len": 64, "block_size": 4, "check": "full"}


def llm_of(tmp_path, kind="numpy", *, changes=None, **options):
    folder = tmp_path if (tmp_path / "config.json").exists() else make(tmp_path, NAME, **changes or {})
    return LLM(folder, executor=kind, **FLOATS.get(kind, {}), **{**OPTIONS, **options})


def tokens_of(outputs):
    return [[one.token_ids for one in output.outputs] for output in outputs]


def cached(output):
    return output.metrics.num_cached_tokens


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", ["hrm-text", "hrm-text-biased"])
def test_logits_are_those_of_transformers_beside_causal_requests(tmp_path, name, executor):
    model, tiny = load_model(make(tmp_path, name)), TINY[name]
    assert model.spec.prefix_lm
    text, found = tiny["token_ids"], tiny["prefixes"]
    expected = [one["last_logits"] for one in found.values()] + [tiny["last_logits"]]
    inputs = [{"bidirectional_ranges": [(0, int(count))]} for count in found] + [{}]
    texts = [text] * len(inputs)
    first = [(i, int(count)) for i, count in enumerate(found) if int(count) < len(text)]
    parts = [first, [(i, 1) for i, _ in first], [(i, len(text) - count - 1) for i, count in first]]
    others = [(i, len(text)) for i in range(len(texts)) if i not in dict(first)]
    for chunks in (whole(texts), [parts[0] + others[:1], parts[1] + others[1:], parts[2]]):
        for got, want in zip(all_logits(model, texts, chunks, executor, 4, inputs=inputs), expected, strict=True):
            np.testing.assert_allclose(got[-len(want) :], want, atol=1e-4)


@pytest.mark.parametrize("speculation", ["off", "ngram"])
@pytest.mark.parametrize("kind", [*FLOATS, "transformers"])
def test_requests_get_the_tokens_of_transformers(tmp_path, kind, speculation):
    """In mixed batches, with all of a repeated prompt but its last token from the cache, and for several samples."""
    if kind == "transformers":
        pytest.importorskip(kind)
    with llm_of(tmp_path, kind, speculation=speculation) as llm:
        for expected in ([0] * len(PROMPTS), [count - 1 for count in LENGTHS]):
            outputs = llm.generate(PROMPTS, PARAMS, progress=False)
            assert tokens_of(outputs) == [[one] for one in GREEDY]
            assert [cached(output) for output in outputs] == expected
        several = llm.generate(PROMPTS, replace(PARAMS, n=3), progress=False)
        assert tokens_of(several) == [[one] * 3 for one in GREEDY]


@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_preempted_request_computes_the_same_range_again(tmp_path, kind, prefix_caching):
    """Steps have no more tokens than the longest prompt, and its output follows in another step."""
    sizes = {"max_model_len": 40, "num_blocks": 14, "max_num_batched_tokens": 24, "watermark": 0.0}
    with llm_of(tmp_path, kind, **sizes, prefix_caching=prefix_caching, speculation="off") as llm:
        outputs = llm.generate(PROMPTS[::-1], PARAMS, progress=False)
    assert tokens_of(outputs) == [[one] for one in GREEDY[::-1]]
    assert sum(output.metrics.num_preemptions for output in outputs)


@pytest.mark.parametrize("kind", FLOATS)
def test_log_probabilities_of_given_tokens_are_those_of_transformers(tmp_path, kind):
    """So a continuation is scored with a prompt whose tokens see each other."""
    with llm_of(tmp_path, kind) as llm:
        for count, found in zip(LENGTHS[:-1], list(PREFIXES.values())[:-1], strict=True):
            params = replace(PARAMS, forced_tokens=TEXT[count:], max_tokens=len(TEXT) - count, logprobs=0)
            (output,) = llm.generate([TEXT[:count]], params, progress=False)
            want = log_probs(np.array(found["last_logits"])[:-1], TEXT[-5:])
            got = [entry.chosen.logprob for entry in output.outputs[0].logprobs[-5:]]
            np.testing.assert_allclose(got, want, atol=1e-4)


def test_only_an_equal_prompt_is_reused(tmp_path):
    """Neither a part of it, nor with its answer, which other keys and values follow."""
    with llm_of(tmp_path) as llm:
        (first,) = llm.generate([TEXT[:17]], PARAMS, progress=False)
        answered = [*TEXT[:17], *first.outputs[0].token_ids]
        for prompt in (TEXT[:16], TEXT[:18], answered):
            (output,) = llm.generate([prompt], PARAMS, progress=False)
            assert cached(output) == 0
            assert output.metrics.cache_miss.reason == "input"
        with llm_of(tmp_path / NAME, prefix_caching=False) as other:
            assert tokens_of([output]) == tokens_of(other.generate([answered], PARAMS, progress=False))
        (again,) = llm.generate([TEXT[:17]], PARAMS, progress=False)
        assert cached(again) == 16


@pytest.mark.parametrize("kind", FLOATS)
def test_a_part_of_a_prompt_that_is_still_cached_is_completed(tmp_path, kind):
    """Another request has taken the other blocks."""
    with llm_of(tmp_path, kind, max_model_len=40, num_blocks=12) as llm:
        llm.generate([TEXT], replace(PARAMS, max_tokens=1), progress=False)
        llm.generate([TEXT[3:20]], replace(PARAMS, max_tokens=10), progress=False)
        (output,) = llm.generate([TEXT], PARAMS, progress=False)
    assert 0 < cached(output) < 20
    assert tokens_of([output]) == [[GREEDY[-1]]]


def test_a_recording_is_replayed_on_the_model(tmp_path):
    file = tmp_path / "steps.jsonl"
    with llm_of(tmp_path, record=str(file)) as llm:
        llm.generate(PROMPTS, replace(PARAMS, logprobs=0), progress=False)
    outputs = recorded_outputs(Trace.read(file))
    with llm_of(tmp_path / NAME) as llm:
        report = compare(outputs, recorded(outputs), measure(llm, outputs), tolerance=1e-3)
    assert report.ok
    assert report.num_compared == sum(map(len, GREEDY))
    assert all(output.is_text for output in outputs)


def test_vectors_in_place_of_tokens_are_a_part_of_the_prompt(tmp_path):
    vectors = np.random.default_rng(3).standard_normal((2, 9, 32)).astype(np.float32)
    vectors[1, :8] = vectors[0, :8]
    with llm_of(tmp_path) as llm:
        one, other, same = (llm.generate([{"prompt_embeds": vectors[i]}], PARAMS, progress=False)[0] for i in (0, 1, 0))
    assert [cached(output) for output in (one, other, same)] == [0, 0, 8]
    assert tokens_of([one]) == tokens_of([same])


def test_a_text_to_embed_is_a_prompt_too(tmp_path):
    found = {}
    for kind in FLOATS:
        with llm_of(tmp_path / NAME if found else tmp_path, kind) as llm:
            found[kind] = llm.embed(PROMPTS, progress=False)
            again = llm.embed(PROMPTS, progress=False)
            np.testing.assert_allclose(again, found[kind], atol=1e-5)
    for other in found.values():
        np.testing.assert_allclose(other, found["numpy"], atol=1e-4)


def test_what_has_no_meaning_for_such_prompts_is_refused_by_name(tmp_path):
    with llm_of(tmp_path, max_num_batched_tokens=20) as llm:
        with pytest.raises(RequestError, match=r"24 tokens.* at most 20 tokens.*max_num_batched_tokens"):
            llm.generate([TEXT], PARAMS)
        with pytest.raises(RequestError, match=r"prompt_logprobs = 0: .*see those.*forced_tokens"):
            llm.generate([TEXT[:9]], replace(PARAMS, prompt_logprobs=0))
        assert tokens_of(llm.generate([TEXT[:9]], PARAMS, progress=False)) == [[GREEDY[1]]]


@pytest.mark.parametrize("kind", FLOATS)
def test_attention_is_causal_if_the_configuration_says_so(tmp_path, kind):
    with llm_of(tmp_path, kind, changes={"prefix_lm": False}, max_num_batched_tokens=20) as llm:
        (output,) = llm.generate([TEXT], replace(PARAMS, prompt_logprobs=0), progress=False)
    want = log_probs(np.array(TINY[NAME]["last_logits"])[:-1], TEXT[-5:])
    got = [entry.chosen.logprob for entry in output.prompt_logprobs[-5:]]
    np.testing.assert_allclose(got, want, atol=1e-4)
