"""The fair policy: what each owner is served, and why its requests wait."""

from collections import Counter
from random import Random

import pytest

from foreword.scheduler import Request
from foreword.scheduler.shares import EXPECTED, MOST_IDLE, Shares
from scheduler.scheduler_rig import Rig


def served(shares, *, seed=0, steps=400):
    """Return the tokens of each owner. All have requests of random lengths waiting, and one request runs at a time."""
    random, account, waiting, tokens, arrival = Random(seed), Shares(), [], Counter(), 0
    for _ in range(steps):
        for owner, share in shares.items():
            while sum(request.owner == owner for _, request in waiting) < 3:
                length = random.randint(1, 60)
                request = Request(
                    request_id=str(arrival), prompt=[0] * length, arrival=arrival, max_len=length + 100,
                    owner=owner, share=share,
                )  # fmt: skip
                key = account.key(request)
                account.added(request, key[0])
                waiting.append((key, request))
                arrival += 1
        waiting.sort(key=lambda one: one[0])
        _, request = waiting.pop(0)
        account.admitted(request)
        request.has_run, request.output = True, [0] * random.randint(1, 100)
        account.ended(request)
        tokens[request.owner] += len(request)
    return tokens


def test_owners_are_served_in_the_proportion_of_their_shares():
    tokens = served({"a": 1.0, "b": 1.0, "c": 2.0})
    assert tokens["a"] == pytest.approx(tokens["b"], rel=0.15)
    assert tokens["c"] == pytest.approx(2 * tokens["b"], rel=0.15)


def test_an_owner_with_one_request_does_not_wait_for_all_of_another():
    rig = Rig(policy="fair", max_num_seqs=1)
    for i in range(5):
        rig.add(f"many {i}", 4, max_len=6, owner="many")
    rig.add("one", 4, max_len=6, owner="one")
    order = []
    while rig.scheduler.has_work:
        rig.step()
        order += [request.request_id for request in rig.plan.admitted]
    assert order.index("one") == 1


def test_a_request_waits_for_the_share_of_its_owner_and_no_other_is_named():
    rig = Rig(policy="fair", max_num_seqs=1)
    for name, owner in (("a", "x"), ("b", "x"), ("c", "y")):
        rig.add(name, 4, max_len=6, owner=owner)
    rig.step()
    assert rig.why("b") == "share tokens=6"
    assert rig.why("c") == "max_num_seqs running=1 limit=1"


def test_many_idle_owners_are_forgotten_and_the_requests_of_others_end():
    account, requests = Shares(), []
    for i in range(MOST_IDLE + 10):
        request = Request(request_id=str(i), prompt=[0], arrival=i, max_len=2, owner=str(i))
        account.added(request, account.key(request)[0])
        requests.append(request)
    late = Request(request_id="late", prompt=[0], arrival=10**6, max_len=2, owner="late")
    account.added(late, 10**9)
    account.admitted(late)
    for request in requests:
        account.ended(request)
    assert len(account._ends) <= MOST_IDLE + 1


def test_what_was_not_computed_is_given_back():
    account = Shares()
    request = Request(request_id="a", prompt=[0] * 10, arrival=0, max_len=10_000, owner="x")
    account.added(request, account.key(request)[0])
    after = Request(request_id="b", prompt=[0], arrival=1, max_len=2, owner="x")
    assert account.key(after)[0] == (10 + EXPECTED) << 10
    account.ended(request)
    assert account.key(after)[0] == 0
