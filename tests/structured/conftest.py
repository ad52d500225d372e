"""Lets the tests of this folder import its helpers and those of the engine's tests, in every import mode of pytest."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "engine")]
