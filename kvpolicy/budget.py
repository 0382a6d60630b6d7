"""Budgets: how they are written and checked."""

from kvpolicy.spec.budget import Budget as Budget
from kvpolicy.spec.budget import Share as Share
from kvpolicy.spec.budget import bytes_of as bytes_of
from kvpolicy.spec.budget import check_budget as check_budget
from kvpolicy.spec.budget import format_budget as format_budget
from kvpolicy.spec.budget import parse_budget as parse_budget
from kvpolicy.spec.budget import waterfill as waterfill
