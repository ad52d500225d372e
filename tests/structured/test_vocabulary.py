"""The tokens of forced text, in each form of vocabulary."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))

from vocabularies import byte_level, sentence_piece

from foreword.batch import SamplingParams
from foreword.models.tokenizer import Tokenizer
from foreword.structured import GrammarCompiler
from foreword.structured.vocabulary import Vocabulary

FORMS = {"byte level": byte_level(), "sentence piece": sentence_piece()}
TEXTS = ["hello", " hello", "a", "  ab", '{"he": "llo"}', "\n\n", "é日本🙂", "hello hello", "\x02a"]


def vocabulary(form: str) -> Vocabulary:
    tokenizer = Tokenizer.from_gguf(FORMS[form])
    return Vocabulary(tokenizer, vocab_size=tokenizer.vocab_size + 5, eos_token_ids=tokenizer.eos_ids or [1])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("text", TEXTS)
def test_the_tokens_of_a_text_have_its_bytes(form: str, text: str):
    ours = vocabulary(form)
    assert ours.bytes_of(ours(text)) == text.encode()


@pytest.mark.one_in(4)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("text", TEXTS)
def test_a_forced_text_can_be_written(form: str, text: str):
    tokenizer, ours = Tokenizer.from_gguf(FORMS[form]), vocabulary(form)
    size = len(ours.tokens)
    compiler = GrammarCompiler(tokenizer, vocab_size=size, eos_token_ids=ours.eos_token_ids)
    grammar = compiler.grammar("a", SamplingParams(structured_outputs={"choice": [text]}))
    words, written, random = np.empty(-(-size // 32), np.int32), b"", np.random.default_rng(0)
    while not grammar.is_terminated:
        grammar.fill_mask(words)
        fits = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")[:size])
        token = int(random.choice(fits))
        assert grammar.accept([token]) == 1
        written += ours.tokens[token]
    assert written == text.encode()
