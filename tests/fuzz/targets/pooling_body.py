"""Bodies of pooling requests, parsed."""

import json

from foreword.jsonfile import parse_json
from foreword.openai.pooling import parse_classify, parse_embeddings, parse_rerank, parse_score
from fuzz.mutations import mutate_json
from fuzz.target import Target
from fuzz.targets.chat_messages import RequestErrorOf

COMMON = {"model": "m", "user": "u", "priority": 1, "cache_salt": "s", "truncate_prompt_tokens": -1}
BODIES = (
    {**COMMON, "input": ["a", [1, 2]], "encoding_format": "base64", "dimensions": 3, "normalize": False},
    {**COMMON, "text_1": "a", "text_2": ["b", "c"]},
    {**COMMON, "query": "a", "documents": ["b", {"text": "c"}], "top_n": 1, "return_documents": False},
)


def read(data, folder):
    body = parse_json(data, "the body", RequestErrorOf)
    given = body if isinstance(body, dict) else {}
    if "query" in given:
        parse_rerank(body)
    elif "text_1" in given:
        parse_score(body)
    else:
        parse_embeddings(body)
        parse_classify({key: value for key, value in given.items() if key in (*COMMON, "input")})


TARGET = Target(lambda: [json.dumps(body).encode() for body in BODIES], read, mutate_json)
