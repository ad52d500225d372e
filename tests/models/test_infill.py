"""Gaps in texts: prompts of the model's own tokens, which end where the gap does."""

import pytest

from foreword import LLM, SamplingParams
from foreword.errors import RequestError
from foreword.models.infill import FORMS, find_infill
from models.infill_models import FIRST, NAME, TEXTS, write_model_with_gaps
from models.recorded import make


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    with LLM(write_model_with_gaps(tmp_path_factory.mktemp("infill"))) as llm:
        yield llm


def ids(llm, text):
    return llm.tokenizer.encode(text, add_special_tokens=False)


def test_the_prompt_is_the_texts_around_the_models_tokens(llm):
    before, after = TEXTS
    [output] = llm.infill(before, after, SamplingParams(max_tokens=3))
    want = [FIRST, *ids(llm, before), FIRST + 1, *ids(llm, after), FIRST + 2]
    assert list(output.prompt_token_ids) == want
    [direct] = llm.generate([want], SamplingParams(max_tokens=3, temperature=0.0))
    [filled] = llm.infill(before, after, SamplingParams(max_tokens=3, temperature=0.0))
    assert filled.outputs[0].token_ids == direct.outputs[0].token_ids


def test_special_tokens_in_the_texts_are_ordinary_text(llm):
    assert FIRST + 2 not in llm.tokenizer.encode_infill("<|fim_middle|>", "a")[:-1]


def test_an_output_ends_at_the_end_of_the_gap(llm):
    params = SamplingParams(max_tokens=20, logit_bias={FIRST + 3: 100.0})
    [output] = llm.infill(*TEXTS, params)
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].text == ""


def test_many_gaps_are_filled_as_each_alone(llm):
    params = SamplingParams(max_tokens=4, temperature=0.0)
    pairs = [TEXTS, TEXTS[::-1], ("", TEXTS[0])]
    together = llm.infill(*(list(texts) for texts in zip(*pairs, strict=True)), params)
    alone = [llm.infill(*pair, params)[0] for pair in pairs]
    assert [one.outputs[0].token_ids for one in together] == [one.outputs[0].token_ids for one in alone]


@pytest.mark.parametrize(("prefixes", "suffixes"), [(["a"], "b"), ("a", ["b"]), (["a"], ["b", "c"]), ([1], ["b"])])
def test_what_are_no_pairs_of_texts_is_refused(llm, prefixes, suffixes):
    with pytest.raises(RequestError, match=r"suffixes|prefix"):
        llm.infill(prefixes, suffixes)


def test_a_model_without_such_tokens_says_so(tmp_path):
    with LLM(make(tmp_path, NAME)) as llm, pytest.raises(RequestError, match="has no tokens for a gap in a text"):
        llm.infill(*TEXTS)


@pytest.mark.parametrize("form", FORMS)
def test_every_notation_is_found_by_its_tokens(form):
    tokens = {text: i for i, text in enumerate(text for text in form[:3] if text)}
    prompt = find_infill(tokens).prompt([90], [91], [92])
    middle = [tokens[form.middle]] if form.middle else []
    first, second = [tokens[form.prefix], 91], [tokens[form.suffix], 92]
    assert prompt == [90, *(second + first if form.suffix_first else first + second), *middle]
    assert find_infill(dict(list(tokens.items())[:-1])) is None
