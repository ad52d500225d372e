"""Public names stay: the list of the last release is compared with the present names."""

import json

import surface


def test_nothing_public_of_the_last_release_is_gone():
    now = surface.surface()
    gone = {
        kind: missing
        for kind, names in json.loads(surface.LIST.read_text()).items()
        if (missing := sorted(set(names) - set(now.get(kind, ()))))
    }
    assert not gone, "announce it in CHANGELOG.md and keep it with a DeprecationWarning (docs/stability.md)"


def test_the_list_has_every_kind_of_name():
    listed = json.loads(surface.LIST.read_text())
    assert {kind for kind in surface.surface() if not kind.startswith("options of")} <= set(listed)
    assert "--max-tokens" in listed["options of foreword run"]
    assert "POST /v1/chat/completions" in listed["routes"]
    assert all(listed.values())
