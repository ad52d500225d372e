"""Scheduling: the tokens that each request computes in the next step, and the reason why the others wait."""

from foreword.scheduler.admission import admit
from foreword.scheduler.config import SchedulerConfig
from foreword.scheduler.ledger import Ledger, Reason
from foreword.scheduler.plan import StepPlan
from foreword.scheduler.policies import POLICIES, Policy
from foreword.scheduler.request import Request
from foreword.scheduler.scheduler import Scheduler

__all__ = ["POLICIES", "Ledger", "Policy", "Reason", "Request", "Scheduler", "SchedulerConfig", "StepPlan", "admit"]
