"""The lessons, one module each."""

from foreword.tour.lesson import Lesson
from foreword.tour.lessons import blocks, chunks, in_flight, preemption, prefix, slots, speculation, steps

LESSONS: tuple[Lesson, ...] = tuple(
    module.LESSON for module in (blocks, steps, slots, chunks, prefix, preemption, speculation, in_flight)
)
"""All lessons, in their order."""
