"""The pre-tokenizers of byte-level vocabularies, by the names that GGUF files have for them (tokenizer.ggml.pre).

A pre-tokenizer splits a text into words, which merges never cross. A GGUF file holds its name alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers


@dataclass(frozen=True, slots=True)
class Preset:
    """patterns: each splits what those before it left in one piece; a match and the text between matches are words.

    nfc: the text is normalised first. whole_words_first: a word that is a token is not built by merges. add_bos: a text
    begins with the bos token unless the file says otherwise.
    """

    patterns: tuple[str, ...]
    nfc: bool = False
    whole_words_first: bool = False
    add_bos: bool = False

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        """Return the pre-tokenizer of the `tokenizers` package."""
        own = self.patterns[-1:] == (_GPT2_WORDS,)  # which ByteLevel has built in
        bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=own)
        return pre_tokenizers.Sequence([*map(_split, self.patterns[:-1] if own else self.patterns), bytes_of])


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    if pattern == _DIGIT:
        return pre_tokenizers.Digits(individual_digits=True)  # the same, and faster
    return pre_tokenizers.Split(Regex(pattern), "isolated")


_DIGIT = r"\p{N}"
_SUFFIXES = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _words(num_digits: str, after_symbols: str = r"[\r\n]*", symbol: str = r"[^\s\p{L}\p{N}]") -> str:
    """Return a pattern of contractions, words with one leading symbol, runs of ``num_digits`` digits, symbols, line
    ends and spaces.
    """
    return rf"{_SUFFIXES}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{num_digits}| ?{symbol}+{after_symbols}|{_SPACES}"


def _cased_words(num_digits: str, suffixes: str = "") -> str:
    """Split text into words, where a word also ends before an upper-case letter that follows a lower-case one."""
    start = r"[^\r\n\p{L}\p{N}]?"
    words = f"{start}{_UPPER}*{_LOWER}+{suffixes}|{start}{_UPPER}+{_LOWER}*{suffixes}"
    return rf"{words}|\p{{N}}{num_digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


_DEEPSEEK_3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", _DIGIT)
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", "[0-9][0-9][0-9]")

_KINDS: Sequence[tuple[Preset, str]] = (
    (Preset(_DEFAULT), "default"),
    (
        Preset((_GPT2_WORDS,)),
        "gpt-2 a.x-4.0 exaone4 gigachat granite-docling jais jina-de jina-es jina-v2-de jina-v2-es mellum modern-bert "
        "mpt olmo phi-2 trillion",
    ),
    (Preset((_DIGIT, _GPT2_WORDS)), "smollm starcoder codeshell command-r exaone mellum2 minerva-7b refact"),
    (
        Preset((_words("{1,3}"),), whole_words_first=True, add_bos=True),
        "llama-bpe llama-v3 llama3 falcon-h1 falcon3 jina-v5-nano lfm2 midm-2.0 pixtral",
    ),
    (Preset((_words("{1,3}"),)), "dbrx chatglm-bpe glm4 smaug-bpe"),
    (Preset((_words(""),), nfc=True), "qwen2 deepseek-r1-qwen f2llmv2 kormo megrez"),
    (Preset((_words(""),)), "grok-2 hunyuan solar-open stablelm2"),
    (Preset((_words("", "", r"[^\s\p{L}\p{N}\r\n]"),)), "seed-coder"),
    (Preset((_cased_words(""),), whole_words_first=True, add_bos=True), "tekken"),
    (Preset((_cased_words("{1,3}", f"{_SUFFIXES}?"),)), "gpt-4o kanana2 llama4 minimax-m2 talkie"),
    (Preset(_DEEPSEEK_3), "deepseek-v3 hunyuan-dense hy_v4 joyai-llm"),
    (Preset(_DEEPSEEK_CODER), "deepseek-coder"),
)
PRESETS: Mapping[str, Preset] = {name: preset for preset, names in _KINDS for name in names.split()}
"""By tokenizer.ggml.pre, with the patterns that llama.cpp and the models' own tokenizers have for the names."""

_SIGNS: Mapping[tuple[str, int], str] = {
    ("<|begin_of_text|>", 128000): "llama-bpe",
    ("<|endoftext|>", 0): "smollm",
    ("<|endoftext|>", 50256): "gpt-2",
    ("<|endoftext|>", 100257): "dbrx",
    ("<|endoftext|>", 151643): "qwen2",
    ("<｜begin▁of▁sentence｜>", 32013): "deepseek-coder",
}


def preset_of_vocabulary(tokens: Sequence[str]) -> str | None:
    """Return the name that belongs to a well-known vocabulary, by the place of one of its control tokens; None for any
    other.
    """
    return next((pre for (token, i), pre in _SIGNS.items() if i < len(tokens) and tokens[i] == token), None)
