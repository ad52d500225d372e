"""The energy of the processors, where the system shows it: RAPL's counters in /sys/class/powercap."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

POWERCAP = Path("/sys/class/powercap")
_WHOLE = "package-"  # the names of zones of whole processors; others are parts of them, or the machine


@dataclass(slots=True)
class _Zone:
    """A counter of microjoules that begins again at ``span``. last: what it was; total: since the first reading."""

    path: Path
    span: int
    last: int
    total: int = 0


class EnergyMeter:
    """Joules of all processors since it was made.

    A counter begins again after some minutes of full power, so it has to be read more often. reason: why nothing can
    be read, "" if it can.
    """

    def __init__(self, root: Path = POWERCAP) -> None:
        self._zones: list[_Zone] = []
        self.reason = "the system shows no RAPL counters in /sys/class/powercap"
        for path in sorted(root.glob("*:*")):
            try:
                if (path / "name").read_text().startswith(_WHOLE):
                    span = int((path / "max_energy_range_uj").read_text()) + 1
                    self._zones.append(_Zone(path / "energy_uj", span, int((path / "energy_uj").read_text())))
            except (OSError, ValueError) as error:
                self.reason = f"{path}/energy_uj cannot be read ({type(error).__name__}); the system lets only root"
                self._zones.clear()
                return
        if self._zones:
            self.reason = ""

    def joules(self) -> float | None:
        """Return the energy so far; None if it cannot be read."""
        if not self._zones:
            return None
        try:
            for zone in self._zones:
                now = int(zone.path.read_text())
                zone.total += (now - zone.last) % zone.span
                zone.last = now
        except (OSError, ValueError) as error:
            self._zones.clear()
            self.reason = f"{POWERCAP} cannot be read any more ({type(error).__name__})"
            return None
        return sum(zone.total for zone in self._zones) / 1e6
