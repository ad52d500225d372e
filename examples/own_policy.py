"""A policy of your own: which request is admitted first, and which is preempted last.

python examples/own_policy.py [MODEL]
PYTHONPATH=examples foreword serve --policy own_policy:longest_first
"""

import sys

from foreword import LLM, SamplingParams


def longest_first(request):
    """Return the key of a request: the smallest is admitted first. Its last entry is the arrival, which breaks ties."""
    return (-len(request.prompt), request.arrival)


if __name__ == "__main__":
    with LLM(*(sys.argv[1:] or ["smollm2"]), policy=longest_first, max_num_seqs=1, max_model_len=256) as llm:
        prompts = [[5, 6], [5, 6, 7, 8], [5]]
        for output in llm.stream(prompts, SamplingParams(temperature=0, max_tokens=2)):
            if output.finished:
                print(len(output.prompt_token_ids), "prompt tokens: done")
