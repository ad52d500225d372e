"""`make bench-regress`: what counts as a change, and samples of a checkout."""

from itertools import product
from random import Random

import pytest
from regression.differences import CONFIDENCE, FEWEST, Difference, Interval, table
from regression.worker import Samples, short

from foreword.bench.requests import make

TURNS = 15


def samples(random: Random, *, factor: float = 1.0, drift: float = 0.0, noise: float = 0.02):
    """Samples of the base, of the base again, and of a change that takes ``factor`` of the time."""
    found = [], [], []
    for turn in range(TURNS):
        common = 100.0 * (1 + drift * turn) * (1.5 if random.random() < 0.2 else 1.0)
        for one, times in zip(found, (1.0, 1.0, factor), strict=True):
            one.append(common * times * (1 + random.gauss(0, noise)))
    return found


@pytest.mark.parametrize("n", [FEWEST, 9, 12, 15])
def test_an_interval_holds_the_median_with_the_confidence_and_a_narrower_one_does_not(n):
    """Yield all 2^n ways in which n values lie above and below the median of their distribution."""
    ways = [sum(signs) for signs in product((0, 1), repeat=n)]  # values below the median

    def covered(k: int) -> float:
        """Return the share of cases in which the median is between the k-th value and the k-th from the end."""
        return sum(k <= below <= n - k for below in ways) / len(ways)

    interval = Interval.of(range(n))
    k = interval.low + 1
    assert (interval.low, interval.high) == (k - 1, n - k)
    assert covered(k) >= CONFIDENCE > covered(k + 1)


def test_fewer_turns_have_no_interval():
    with pytest.raises(ValueError, match="at least 8"):
        Interval.of([1.0] * (FEWEST - 1))


@pytest.mark.parametrize(("factor", "verdict"), [(1.1, "slower"), (0.9, "faster")])
def test_a_change_of_ten_percent_is_found_while_the_machine_becomes_slower(factor, verdict):
    found = [Difference.of("a", "s", *samples(Random(seed), factor=factor, drift=0.1)) for seed in range(50)]
    assert [one.verdict for one in found].count(verdict) >= 48
    assert all(abs(one.ratio.median - factor) < 0.05 for one in found)


def test_the_same_commit_is_seldom_a_change():
    verdicts = [Difference.of("a", "s", *samples(Random(seed), drift=0.1)).verdict for seed in range(300)]
    assert sum(verdict in ("slower", "faster") for verdict in verdicts) <= 3
    assert verdicts.count("unsteady") <= 8


def test_a_base_that_differs_from_itself_says_nothing_of_a_change():
    first, second, changed = samples(Random(0), factor=1.3)
    assert Difference.of("a", "s", first, [1.2 * one for one in second], changed).verdict == "unsteady"


def test_the_table_has_every_figure_and_names_what_changed():
    random = Random(1)
    found = [
        Difference.of(name, "µs", *samples(random, factor=factor))
        for name, factor in (("as before", 1.0), ("worse", 1.5), ("better", 0.5))
    ]
    lines = table(found)
    assert [line[:10].strip() for line in lines[1:4]] == ["as before", "worse", "better"]
    assert all(
        f"{one.ratio.low:.3f} to {one.ratio.high:.3f}" in line for one, line in zip(found, lines[1:], strict=False)
    )
    assert lines[4:] == ["slower: worse", "faster: better", "unsteady: nothing"]


def test_a_checkout_is_measured(talker):
    taken = Samples(str(talker), num_threads=1)
    for name, figures in (("host 8", ["prepare, 8", "commit, 8"]), ("engine 1", ["engine, 1"]), ("W1", ["W1"])):
        for _ in range(2):
            sample = taken.take(name)
            assert list(sample) == figures
            assert all(0 < seconds < 60 for seconds in sample.values())


def test_a_short_workload_has_fewer_tokens_of_the_same_requests():
    requests = make("W5")
    few = short(requests)
    assert len(few.prompts) == len(few.output_lens) == 32
    assert all(a == b[: len(a)] for a, b in zip(few.prompts, requests.prompts, strict=False))
    assert max(few.output_lens) == 16
