"""The energy of processors, by a folder like that of the system."""

import pytest

from foreword.energy import EnergyMeter


def write(root, name, kind, energy, span=999_999):
    zone = root / name
    zone.mkdir(exist_ok=True)
    for file, value in (("name", kind), ("energy_uj", energy), ("max_energy_range_uj", span)):
        (zone / file).write_text(f"{value}\n")


def test_the_energy_of_whole_processors_is_added(tmp_path):
    write(tmp_path, "intel-rapl:0", "package-0", 100)
    write(tmp_path, "intel-rapl:0:0", "core", 5)
    write(tmp_path, "intel-rapl:1", "package-1", 999_000)
    write(tmp_path, "intel-rapl:2", "psys", 7)
    meter = EnergyMeter(tmp_path)
    assert (meter.reason, meter.joules()) == ("", 0.0)
    write(tmp_path, "intel-rapl:0", "package-0", 400_100)
    write(tmp_path, "intel-rapl:0:0", "core", 300_000)
    write(tmp_path, "intel-rapl:1", "package-1", 0)  # it has begun again
    assert meter.joules() == pytest.approx(0.401)


@pytest.mark.parametrize("present", [False, True])
def test_without_counters_there_is_a_reason_and_no_number(tmp_path, present):
    if present:
        write(tmp_path, "intel-rapl:0", "package-0", "x")
    meter = EnergyMeter(tmp_path)
    assert meter.joules() is None
    assert ("cannot be read" if present else "no RAPL counters") in meter.reason


def test_a_counter_that_is_gone_ends_the_numbers(tmp_path):
    write(tmp_path, "intel-rapl:0", "package-0", 1)
    meter = EnergyMeter(tmp_path)
    (tmp_path / "intel-rapl:0" / "energy_uj").unlink()
    assert meter.joules() is None
    assert "any more" in meter.reason
