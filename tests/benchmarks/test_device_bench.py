"""The benchmark of a device's host part computes steps, and its packets have the changes alone."""

from parts import device

from foreword.bench.traffic import WORKLOADS


def test_a_packet_of_a_decode_step_does_not_depend_on_the_context():
    decode = next(w for w in WORKLOADS if w.name == "S1 decode 64")
    result = next(device.run(num_steps=40, workloads=(decode,)))
    assert result.packet_bytes == 2048  # 64 rows of four int32 each, header and new blocks, in whole KiB
    assert result.step_us >= result.launch_us > 0
