"""The text that a decoder prints about a damaged sound is in the error of its request alone."""

import ctypes
import random
import subprocess
import sys
from io import BytesIO

import numpy as np
import pytest

from foreword.errors import RequestError
from foreword.media.decoders import MOST_PRINTED, Printed, SeekableBytes, captured
from foreword.media.limits import MediaLimits
from foreword.media.sounds import read_sound


def print_in_c(text: str) -> None:
    libc = ctypes.CDLL(None)
    libc.fputs(text.encode(), ctypes.c_void_p.in_dll(libc, "stderr"))


def test_what_c_code_prints_in_a_block_is_kept_and_printed_nowhere(capfd):
    printed = Printed()
    with captured(printed):
        print_in_c("\n[src/layer.c:step():7] error: no bits\nmore\n" + "x" * 10 * MOST_PRINTED)
        print("python", file=sys.stderr)
    print_in_c("after\n")
    assert printed.text == "error: no bits"
    assert capfd.readouterr().err == "python\nafter\n"


def test_the_stream_of_c_is_as_before_after_an_error(capfd):
    with pytest.raises(KeyError), captured(Printed()):
        raise KeyError
    print_in_c("after\n")
    assert capfd.readouterr().err == "after\n"


def test_a_file_in_memory_stays_where_it_is_at_a_place_that_no_file_has():
    file = SeekableBytes(b"abc")
    assert (file.seek(2), file.seek(-5), file.seek(1 << 80), file.seek(-1, 1)) == (2, 2, 2, 1)


DAMAGED = """
import sys
from foreword.errors import RequestError
from foreword.media.limits import MediaLimits
from foreword.media.sounds import read_sound
try:
    read_sound("file", sys.stdin.buffer.read(), MediaLimits())
except RequestError as error:
    print(error)
"""


def test_damaged_sounds_print_nothing_and_their_errors_have_the_decoders_words():
    soundfile = pytest.importorskip("soundfile", reason="needs soundfile, of the extra foreword[speech]")
    written = BytesIO()
    soundfile.write(written, np.sin(np.arange(4000) / 20), 8000, format="MP3")
    dice, found = random.Random(5), []
    for _ in range(300):
        damaged = bytearray(written.getvalue())
        for _ in range(30):
            damaged[dice.randrange(len(damaged))] = dice.randrange(256)
        try:
            read_sound("file", bytes(damaged), MediaLimits())
        except RequestError as error:
            if "its decoder says: " in str(error):
                found.append(bytes(damaged))
    assert found
    done = subprocess.run([sys.executable, "-c", DAMAGED], input=found[0], capture_output=True, check=True)
    assert b"its decoder says: " in done.stdout
    assert done.stderr == b""
