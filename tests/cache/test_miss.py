"""Why a prompt was not reused further: each reason, planted."""

from random import Random

import numpy as np
import pytest
from test_manager import Rig

from foreword.batch import KVGroup
from foreword.cache import MEANING, prefix_keys, with_adapter

PROMPT = list(range(1, 17))
OTHER = list(range(101, 117))


def why(rig, prompt, keys=None):
    tokens = np.array(prompt, np.int32)
    return rig.cache.why_missed(rig.cache.lookup(tokens, keys or {}), tokens, keys or {})


def test_a_prompt_that_is_all_in_the_cache_has_no_reason():
    rig = Rig()
    rig.start("a", PROMPT)
    assert why(rig, PROMPT) is None


@pytest.mark.parametrize("at", [1, 3, 4, 6, 8, 14])
def test_the_first_token_that_differs_is_told_with_both_sides(at):
    rig = Rig()
    rig.start("a", PROMPT)
    found = why(rig, [*PROMPT[:at], 999, *PROMPT[at + 1 :]])
    assert (found.reason, found.position) == ("differs", at)
    assert found.ours[0] == 999
    assert found.theirs[0] == PROMPT[at]
    assert found.num_reused == at
    assert found.public().theirs == ()


def test_nothing_like_it_and_the_end_of_what_was_computed():
    rig = Rig()
    assert why(rig, PROMPT).reason == "never_computed"
    rig.start("a", PROMPT[:8])
    assert (why(rig, PROMPT).reason, why(rig, PROMPT).position) == ("never_computed", 8)
    assert why(rig, OTHER).position == 0


@pytest.mark.parametrize(
    ("reason", "mine", "others"),
    [
        ("salt", prefix_keys(4, salt="a"), prefix_keys(4, salt="b")),
        ("salt", {}, prefix_keys(4, salt="b")),
        ("salt", prefix_keys(4, salt="a"), with_adapter(prefix_keys(4, salt="b"), 1, "law")),
        ("adapter", with_adapter({}, 1, "law"), {}),
        (
            "adapter",
            with_adapter(prefix_keys(4, salt="a"), 1, "law"),
            with_adapter(prefix_keys(4, salt="a"), 2, "code"),
        ),
        ("image", prefix_keys(4, images=[("cat", 4, 4)]), prefix_keys(4, images=[("dog", 4, 4)])),
    ],
)
def test_equal_tokens_under_other_keys_are_told(reason, mine, others):
    rig = Rig()
    rig.start("a", PROMPT, others)
    found = why(rig, PROMPT, mine)
    assert found.reason == reason
    assert found.position == (4 if reason == "image" else 0)
    assert found.theirs == ()
    assert found.public().reason == ("never_computed" if reason == "salt" else reason)


MINE, THEIRS = prefix_keys(4, salt="a"), prefix_keys(4, salt="b")


@pytest.mark.parametrize("others", [{}, THEIRS, with_adapter(THEIRS, 1, "law")])
def test_what_is_told_of_ones_own_content_does_not_change_with_that_under_another_salt(others):
    rig = Rig()
    rig.start("a", [*PROMPT[:3], 999, *PROMPT[4:]], MINE)
    alone = why(rig, PROMPT, MINE)
    assert (alone.reason, alone.position) == ("differs", 3)
    rig.start("b", PROMPT, others)
    assert why(rig, PROMPT, MINE) == alone


def test_ones_own_evicted_content_is_told_while_there_is_some_under_another_salt():
    rig = Rig(blocks=9, partial_reuse=False)
    rig.start("a", PROMPT, MINE)
    rig.end("a")
    rig.start("b", [PROMPT[0], *range(200, 231)], THEIRS)
    assert why(rig, PROMPT, MINE).reason == "evicted"


def test_that_content_under_another_salt_was_evicted_is_not_told():
    rig = Rig(blocks=9, partial_reuse=False)
    rig.start("a", PROMPT, THEIRS)
    rig.end("a")
    rig.start("b", PROMPT[:4], MINE)
    rig.start("c", list(range(200, 228)))
    assert why(rig, PROMPT, THEIRS).reason == "evicted"
    assert (why(rig, PROMPT, MINE).reason, why(rig, PROMPT, MINE).position) == ("never_computed", 4)


@pytest.mark.parametrize("kept", [0, 3])
def test_evicted_content_is_told_also_after_all_of_it_left(kept):
    rig = Rig(blocks=9, partial_reuse=False)
    rig.start("a", PROMPT)
    rig.end("a")
    rig.start("b", list(range(200, 200 + 4 * (8 - kept))))
    found = why(rig, PROMPT)
    assert found.reason == "evicted"
    assert found.position == 4 * kept


def test_content_that_was_evicted_under_another_salt_is_not_told():
    rig = Rig(blocks=9, partial_reuse=False)
    rig.start("a", PROMPT, prefix_keys(4, salt="a"))
    rig.end("a")
    rig.start("b", PROMPT[:8], prefix_keys(4, salt="b"))
    rig.start("c", list(range(200, 224)))  # takes the blocks of a
    assert why(rig, PROMPT, prefix_keys(4, salt="b")).reason == "never_computed"
    assert why(rig, PROMPT, prefix_keys(4, salt="a")).reason == "evicted"


def test_an_image_in_place_of_equal_tokens_inside_a_run_is_told():
    rig = Rig()
    rig.start("a", PROMPT)
    found = why(rig, PROMPT, prefix_keys(4, images=[("cat", 4, 4)]))
    assert (found.reason, found.position, found.num_reused) == ("image", 4, 4)


def test_the_end_of_a_cached_part_of_a_block_is_the_end_of_what_was_computed():
    rig = Rig()
    rig.start("a", PROMPT[:6])
    found = why(rig, PROMPT)
    assert (found.reason, found.position, found.theirs) == ("never_computed", 6, ())


def test_the_position_is_not_before_what_is_reused():
    """Under its own salt two tokens are cached, under another one more."""
    rig = Rig()
    rig.start("a", [1, 2, 9, 9], prefix_keys(4, salt="a"))
    rig.start("b", [1, 2, 3, 9], prefix_keys(4, salt="b"))
    found = why(rig, [1, 2, 3, 4, 5], prefix_keys(4, salt="a"))
    assert (found.reason, found.num_reused, found.position, found.ours) == ("differs", 2, 2, (3, 4, 5))


@pytest.mark.parametrize("seed", range(8))
def test_reasons_of_random_prompts_are_true(seed):
    """Compare with all prompts so far: other content that is reported is content that was computed."""
    random, rig = Random(seed), Rig(blocks=16, partial_reuse=seed % 2 == 0)
    computed: list[tuple[list[int], dict]] = []
    names: list[str] = []
    for step in range(60):
        prompt, salt = random.choices((1, 1, 2), k=random.randint(2, 14)), random.choice((None, None, "a"))
        if computed and random.random() < 0.7:
            prompt = random.choice(computed)[0][: random.randint(0, 10)] + prompt[:4]
        images = [("cat", random.randrange(len(prompt)), 3)] if random.random() < 0.2 else ()
        keys = prefix_keys(4, salt=salt, images=images)
        found = why(rig, prompt, keys)
        if found is not None:
            at, block = found.position, found.position // 4
            assert found.num_reused <= at < len(prompt)
            assert found.ours == tuple(prompt[at : at + 8])
            equal = [(p, k) for p, k in computed if p[:at] == prompt[:at]]
            own = [p for p, k in equal if all(k.get(b) == keys.get(b) for b in range(block))]
            if found.reason == "differs":
                assert found.theirs[0] != found.ours[0]
                assert any(tuple(p[at : at + len(found.theirs)]) == found.theirs for p in own)
            elif found.reason in ("salt", "image"):
                assert any(k.get(block) != keys.get(block) and p[at] == prompt[at] for p, k in equal if len(p) > at)
            elif found.reason == "evicted":
                same = {tuple(p[: 4 * block + 4]) for p, k in equal if k.get(block) == keys.get(block)}
                assert tuple(prompt[: 4 * block + 4]) in same
        while len(names) > 1:
            rig.end(names.pop(0))
        rig.start(str(step), prompt, keys)
        computed.append((prompt, keys))
        names.append(str(step))


def test_content_whose_window_is_gone_is_told():
    rig = Rig(groups=[KVGroup(4), KVGroup(4, sliding_window=4)], blocks=14)
    rig.start("a", PROMPT)
    rig.extend("a", list(range(50, 58)))
    rig.start("b", list(range(200, 212)))  # takes the blocks that left the window of a
    found = why(rig, [*PROMPT[:12], 999, 998])
    assert found.reason == "window"


def test_a_part_of_a_block_that_is_not_copied_is_told():
    rig = Rig(partial_reuse=False)
    rig.start("a", PROMPT)
    found = why(rig, [*PROMPT[:6], 999, 998])
    assert (found.reason, found.num_reused) == ("part_of_block", 4)


def test_a_special_token_that_is_no_end_of_a_text_is_the_templates():
    rig = Rig()
    rig.start("a", PROMPT)
    found = why(rig, [*PROMPT[:6], 999, 998])
    assert found.among({999}, ()).reason == "template"
    assert found.among({PROMPT[6]}, ()).reason == "template"
    assert found.among({999}, {999}).reason == "differs"
    assert found.among({5}, ()).reason == "differs"


def test_every_reason_has_a_meaning():
    rig = Rig(prefix_caching=False)
    assert why(rig, PROMPT).reason == "off"
    assert why(rig, PROMPT).explained(str) == [f"not reused from token 0 on: {MEANING['off']}"]


def test_what_is_remembered_of_forgotten_blocks_is_bounded():
    rig = Rig(blocks=9, partial_reuse=False)
    for i in range(30):
        rig.cache.tree.forgotten._size = 5
        rig.start("a", [100 + i] * 4 * 7)
        rig.end("a")
    assert len(rig.cache.tree.forgotten._seen) <= 5
    assert rig.cache.reset()
    assert not rig.cache.tree.forgotten._seen
