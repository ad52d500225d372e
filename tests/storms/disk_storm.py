"""Processes that save blocks on a disk and are killed at random moments: what they left gives equal tokens, or nothing.

    PYTHONPATH=src python tests/storms/disk_storm.py --runs 30
    PYTHONPATH=src python tests/storms/disk_storm.py --runs 1 --seed 17 --kind states

In each run, two processes share a directory that is too small for all they compute. One of them is killed, the other
one a moment later; then an engine answers prompts of both from the directory. There are runs of each kind of layers.
Ends with 1 at the first wrong answer.
"""

import argparse
import os
import signal
import sys
import tempfile
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random

from hash_model import HashExecutor

from foreword.batch import KVGroup, SamplingParams
from foreword.cache.disk import DiskTier
from foreword.cache.segment import DamagedError, read_segment
from foreword.engine import Engine, engine_config

V, M = 40, 128
KINDS = {
    "plain": (KVGroup(4),),
    "windows": (KVGroup(4), KVGroup(4, sliding_window=10)),
    "states": (KVGroup(4), KVGroup(4, recurrent=True)),
}
CAPACITY = 60_000
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, detokenize=False)


def make_engine(folder: Path | None, kind: str) -> Engine:
    groups = KINDS[kind]
    config = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "block_size": 4, "max_model_len": M, "flight_steps": 0}
    tiers = [] if folder is None else [partial(DiskTier, folder, capacity=CAPACITY)]
    return Engine(
        HashExecutor(V, groups, 150), vocab_size=V, max_model_len=M, kv_groups=list(groups), num_blocks=150,
        config=engine_config(config), tiers=tiers,
    )  # fmt: skip


def prompt_of(random: Random) -> list[int]:
    """One of a few beginnings with one of a few ends."""
    begin, end = Random(random.randrange(6)), Random(random.randrange(20))
    return begin.choices(range(1, V), k=60) + end.choices(range(1, V), k=30)


def answers(engine: Engine, prompts: list[list[int]]) -> tuple[list[list[int]], int]:
    """The tokens of each prompt, and how many prompt tokens came from the disk."""
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, GREEDY)
    outputs = {}
    while engine.has_work:
        outputs |= {output.request_id: output for output in engine.step()}
    found = [outputs[str(i)] for i in range(len(prompts))]
    return [output.outputs[0].token_ids for output in found], sum(
        sum(output.metrics.loaded_tokens.values()) for output in found
    )


def write_until_killed(folder: Path, seed: int, kind: str) -> None:
    random = Random(seed)
    while True:
        engine = make_engine(folder, kind)
        for _ in range(5):
            answers(engine, [prompt_of(random) for _ in range(3)])


def storm(folder: Path, seed: int, kind: str) -> int:
    """Return the prompt tokens that came from the disk. Raise AssertionError for a wrong answer."""
    random = Random(seed)
    children = []
    for number in range(2):
        child = os.fork()
        if not child:
            write_until_killed(folder, 2 * seed + number, kind)
        children.append(child)
    deadline = time.monotonic() + 60
    while not list(folder.glob("blocks-*/*.blocks")) and time.monotonic() < deadline:
        time.sleep(0.005)
    for child in children:
        time.sleep(random.random() * 0.2)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    engine, alone = make_engine(folder, kind), make_engine(None, kind)
    prompts = [prompt_of(random) for _ in range(8)]
    found, num_loaded = answers(engine, prompts)
    expected, _ = answers(alone, prompts)
    assert found == expected, f"{kind}, seed {seed}: {found} is not {expected}"
    [tier] = engine.tiers.members
    for path in folder.glob("blocks-*/*.blocks"):
        try:
            with suppress(FileNotFoundError):  # it was evicted meanwhile
                read_segment(path, tier._blocks)
        except DamagedError as error:
            raise AssertionError(f"{kind}, seed {seed}: {error}") from None
    engine.close()
    assert sum(path.stat().st_size for path in folder.glob("blocks-*/*")) < CAPACITY * 1.5
    return num_loaded


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=KINDS, action="append", help="of layers; default: all")
    given = parser.parse_args()
    for kind in given.kind or KINDS:
        total = 0
        for seed in range(given.seed, given.seed + given.runs):
            with tempfile.TemporaryDirectory() as folder:
                total += storm(Path(folder), seed, kind)
        print(f"{kind}: {given.runs} storms: every answer is right; {total} prompt tokens came from the disk")
        if not total:
            sys.exit(1)


if __name__ == "__main__":
    main()
