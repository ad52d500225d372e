"""Choose the replica of a model for a request. The same routers run online and in simulations."""

from foreword.routing.prefixes import PrefixIndex, text_prefix
from foreword.routing.routers import ROUTERS, Placement, Router, make_router

__all__ = ["ROUTERS", "Placement", "PrefixIndex", "Router", "make_router", "text_prefix"]
