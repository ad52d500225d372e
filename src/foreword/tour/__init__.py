"""A tour of what happens in a step: eight short lessons on the real library, each with an exercise that it checks.

`foreword tour` prints them; ``docs/tour/`` has the same as pages with pictures, which `make pages` writes.
"""

from foreword.tour.lessons import LESSONS

__all__ = ["LESSONS"]
