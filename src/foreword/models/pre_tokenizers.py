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


def _words(
    num_digits: str,
    after_symbols: str = r"[\r\n]*",
    symbol: str = r"[^\s\p{L}\p{N}]",
    letters: str = r"\p{L}+",
    spaces: str = _SPACES,
) -> str:
    """Return a pattern of contractions, words with one leading symbol, runs of ``num_digits`` digits, symbols, line
    ends and spaces.
    """
    words = rf"[^\r\n\p{{L}}\p{{N}}]?{letters}"
    return rf"{_SUFFIXES}|{words}|\p{{N}}{num_digits}| ?{symbol}+{after_symbols}|{spaces}"


def _cased_words(num_digits: str, suffixes: str = "", *, but: str = "", after_symbols: str = r"[\r\n/]*") -> str:
    """Split text into words, where a word also ends before an upper-case letter that follows a lower-case one.

    but: the letters that no word has, as part of a class.
    """
    start = r"[^\r\n\p{L}\p{N}]?"
    upper, lower = (f"{letters[:-1]}{but}]" for letters in (_UPPER, _LOWER))
    words = f"{start}{upper}*{lower}+{suffixes}|{start}{upper}+{lower}*{suffixes}"
    return rf"{words}|\p{{N}}{num_digits}| ?[^\s\p{{L}}\p{{N}}]+{after_symbols}|{_SPACES}"


_MARKED_WORDS = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_DEEPSEEK_3 = (r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _MARKED_WORDS)
# Most letters of two cases. Escapes, since editors may write some of these characters in another way.
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
    "\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d"
    "\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4"
    "\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a"
    "\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK = (
    r"[\r\n]",
    rf"\s?[{_CASED}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    "[一-龥ࠀ-一가-퟿]+",
    _DIGIT,
)
_YOUTU = (
    "[\uac00-\ud7a3\u3131-\u318e]+"
    "|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    "|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
)
# Runs of digits in threes from the right. One pattern that looks ahead for each three takes quadratic time.
_THREES = (r"(?<!\d)\d++\b", r"\A\d{1,2}(?=(?:\d{3})+\z)", r"\G\d{3}")
_AFMOE = (
    *(r"\p{N}+", r"\A\p{N}{1,2}(?=(?:\p{N}{3})+\z)", r"\p{N}{3}"),
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f"
    "\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+",
    _MARKED_WORDS,
)
_KIMI = _cased_words("{1,3}", f"{_SUFFIXES}?", but=r"&&[^\p{Han}]", after_symbols=r"[\r\n]*")
_MARKED = r"(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+"
_ONE_LINE = r"\s*[\r\n]|\s+(?!\S)|\s+"
# Behind a space no line ends: without the look behind, each part of a run of spaces would search the rest of it.
_HALVED = "|".join(
    [r"(?<![^\S\r\n])\s*[\r\n]+", *(rf"\s{{{1 << i}}}(?!\S)" for i in (9, 8, 7, 6, 5, 4, 3, 2)), r"\s{1,2}(?!\S)|\s"]
)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", _DIGIT)
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", "[0-9][0-9][0-9]")

_KINDS: Sequence[tuple[Preset, str]] = (
    (Preset(_DEFAULT), "default"),
    (
        Preset((_GPT2_WORDS,)),
        "gpt-2 a.x-4.0 exaone4 gigachat granite-docling jais jina-de jina-es jina-v1-en jina-v2-code jina-v2-de "
        "jina-v2-es mellum modern-bert mpt olmo phi-2 roberta-bpe trillion",
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
    (Preset(_DEEPSEEK), "deepseek-llm"),
    (Preset((_words("", symbol=r"[^\s\p{L}\p{M}\p{N}]", letters=r"[\p{L}\p{M}]+"),), nfc=True), "qwen35"),
    (Preset((_words("{1,3}", spaces=_HALVED),)), "jais-2"),
    (Preset((r"\p{N}{1,3}", _words("+")), whole_words_first=True), "minicpm5"),
    (Preset((_words("", spaces=_ONE_LINE),)), "bailingmoe bailingmoe2 llada-moe"),
    (Preset((_words("", r"[\r\n/]?", letters=_MARKED, spaces=_ONE_LINE),)), "exaone-moe"),
    (Preset((r"[^\n]+|\n+", _words(""))), "laguna"),
    (Preset((_YOUTU, _cased_words("", f"{_SUFFIXES}?")), whole_words_first=True), "youtu"),
    (Preset((_cased_words("{1,3}", f"{_SUFFIXES}?"),), whole_words_first=True), "granite-embed-multi-97m"),
    (Preset((*_THREES, _cased_words("{1,3}", f"{_SUFFIXES}?"))), "tiny_aya cohere2moe"),
    (Preset((rf"\p{{Han}}+|{_KIMI}",)), "kimi-k2"),
    (Preset(_AFMOE), "afmoe"),
    (Preset((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2_WORDS, "[0-9][0-9][0-9]")), "falcon"),
    (Preset((_BLOOM,)), "bloom gpt3-finnish poro-chat"),
    (Preset((_BLOOM, _DIGIT)), "viking"),
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
