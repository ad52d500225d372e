"""Small vocabularies in the form of GGUF metadata."""

import numpy as np

_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_HIDDEN = [byte for byte in range(256) if byte not in _PRINTABLE]
BYTES = {byte: chr(byte) for byte in _PRINTABLE} | {byte: chr(256 + n) for n, byte in enumerate(_HIDDEN)}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
MERGED = ["\n\n", " a", "é", "12", "123", "he", "hello", " hello", "日本", "日", "🙂"]


def spelled(text):
    """A text in the byte alphabet of a byte-level vocabulary."""
    return "".join(BYTES[byte] for byte in text.encode())


def byte_level(pre="smollm", *, words=MERGED, control=("<|im_start|>", "<|im_end|>"), user=("<tool>",), **more):
    """Every byte, the words (each built by merges from its left), control tokens and user-defined tokens."""
    tokens, merges = [*control, *user, *(BYTES[byte] for byte in range(256))], []
    for word in map(spelled, words):
        for n in range(2, len(word) + 1):
            if word[:n] not in tokens:
                tokens.append(word[:n])
                merges.append(f"{word[: n - 1]} {word[n - 1]}")
    types = [CONTROL] * len(control) + [USER_DEFINED] * len(user)
    types += [NORMAL] * (len(tokens) - len(types))
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        **{f"tokenizer.{key}": value for key, value in more.items()},
    }


PIECES = ["▁", "a", "b", "c", "e", "h", "l", "o", "▁a", "ab", "▁ab", "he", "ll", "lo", "hell", "hello", "▁hello", "cc"]


def sentence_piece(*, pieces=PIECES, user=(), **more):
    """<unk>, <s>, </s>, a token for each byte, user-defined tokens, then pieces with descending scores."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *user, *pieces]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[USER_DEFINED] * len(user), *[NORMAL] * len(pieces)]
    scores = [0.0] * (len(tokens) - len(pieces)) + [-float(n) for n in range(len(pieces))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.scores": np.array(scores, np.float32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **{f"tokenizer.{key}": value for key, value in more.items()},
    }
