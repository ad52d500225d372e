"""Record ranks.json: random vocabularies of tiktoken, and the token ids that tiktoken has for texts.

Needs the package tiktoken alone: python tests/data/models/make_ranks.py
"""

import base64
import json
import random
from collections import Counter
from itertools import pairwise
from pathlib import Path

import tiktoken

LETTERS = "".join((r"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]{0}",
                   r"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]{1}(?i:'s|'t|'re|'ve|'m|'ll|'d)?"))  # fmt: skip
PATTERN = "|".join(
    (r"[\p{Han}]+", LETTERS.format("*", "+"), LETTERS.format("+", "*"), r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*",
     r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+")
)  # fmt: skip
"""Of Kimi K2, as its own tokenizer has it."""
WORDS = [
    *(
        "the",
        "cat",
        "Hello",
        "don't",
        "I'LL",
        "你好世界",
        "中文abc",
        "naïve",
        "Größe",
        "1234567",
        " x",
        "\n\n",
        "  a\t",
    ),
    *(
        "🙂🙃",
        "foo_bar",
        "ABCdef",
        "ไทย",
        "日本語テキスト",
        "a1b2",
        "...",
        "!?",
        "\r\n",
        "aaaaaaa",
        "abababab",
        "한국어",
    ),
]
NAMES = ("[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>")


def merged(parts, pair):
    found = []
    for part in parts:
        if found and found[-1] + part == pair:
            found[-1] = pair
        else:
            found.append(part)
    return found


def vocabulary(rng, size):
    """Every byte in any order, then the most frequent pairs of words, some in another order."""
    ranks = {bytes([byte]): rank for rank, byte in enumerate(rng.sample(range(256), 256))}
    words = [[bytes([byte]) for byte in word.encode()] for word in (*WORDS, *(" " + word for word in WORDS))]
    while len(ranks) < size:
        pairs = Counter(a + b for word in words for a, b in pairwise(word))
        pair = max((p for p in pairs if p not in ranks), key=lambda p: (pairs[p] + 3 * rng.random(), p))
        ranks[pair] = len(ranks)
        words = [merged(word, pair) for word in words]
    return ranks


def case(seed):
    rng = random.Random(seed)
    ranks = vocabulary(rng, 360)
    special = {name: len(ranks) + i for i, name in enumerate(NAMES)} | {"<think>": len(ranks) + 20}
    others = set(range(len(ranks), len(ranks) + 256)) - set(special.values())
    every = special | {f"<|reserved_token_{token_id}|>": token_id for token_id in others}
    encoding = tiktoken.Encoding("kimi", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=every)
    texts = ["".join(rng.choice(WORDS) + rng.choice([" ", "", "\n", "  ", "'s"]) for _ in range(n)) for n in range(40)]
    texts += ["[BOS]hello<|im_end|>", f"<|reserved_token_{len(ranks) + 9}|> x", "<think>a</think>"]
    return {
        "ranks": [base64.b64encode(token).decode() for token in ranks],
        "special": special,
        "texts": texts,
        "ids": [encoding.encode(text, allowed_special="all") for text in texts],
    }


if __name__ == "__main__":
    record = {"tiktoken": tiktoken.__version__, "cases": [case(seed) for seed in range(3)]}
    (Path(__file__).parent / "ranks.json").write_text(json.dumps(record, ensure_ascii=False) + "\n")
