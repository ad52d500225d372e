"""The type of a policy."""

from collections.abc import Callable

from foreword.scheduler.request import Request

Policy = Callable[[Request], tuple[int, ...]]
