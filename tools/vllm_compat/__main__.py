"""Record releases of vLLM, or compare the newest one with the last recorded."""

from __future__ import annotations

import argparse
import sys

from vllm_compat.changes import changes
from vllm_compat.facts import facts_of
from vllm_compat.releases import PATH, Releases
from vllm_compat.wheels import newest, sources_of


def record(names: list[str]) -> None:
    """Read releases, beside those that are recorded."""
    packages, facts = {}, {}
    if PATH.exists():
        known = Releases.read()
        packages, facts = dict(known.packages), {name: known.of(name) for name in known.names}
    for name in names:
        packages[name], sources = sources_of(name)
        facts[name] = facts_of(sources)
        print(f"{name} ({packages[name]}): {sum(fact is not None for fact in facts[name].values())} found", flush=True)
    Releases.of_facts(packages, facts).write()


def check(name: str | None) -> int:
    """Print what a release, the newest unless it is named, changes of the last recorded one; 1 if anything."""
    known = Releases.read()
    release, last = name or newest(), known.names[-1]
    if release == last:
        print(f"{release} is recorded")
        return 0
    _, sources = sources_of(release)
    found = list(changes(known.of(last), facts_of(sources)))
    print(f"{last} → {release}: {len(found)} of what is watched changed")
    for change in found:
        print(f"\n{change.key}")
        for line in (*change.fields, *change.signatures):
            print(f"  {line}")
        if change.bodies:
            print(f"  bodies: {', '.join(change.bodies)}")
    print(f"\nRecord it with `PYTHONPATH=tools python -m vllm_compat record {release}` once the adapters follow.")
    return int(bool(found))


parser = argparse.ArgumentParser(prog="vllm_compat", description=__doc__)
commands = parser.add_subparsers(dest="command", required=True)
commands.add_parser("record", help="read releases into releases.json").add_argument("releases", nargs="+")
commands.add_parser("check", help="compare a release with the last recorded one").add_argument("release", nargs="?")
options = parser.parse_args()
if options.command == "record":
    record(options.releases)
else:
    sys.exit(check(options.release))
