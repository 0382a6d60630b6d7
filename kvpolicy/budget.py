"""Budgets: how they are written and checked."""

from kvpolicy.text.budget import Budget as Budget
from kvpolicy.text.budget import Share as Share
from kvpolicy.text.budget import bytes_of as bytes_of
from kvpolicy.text.budget import check_budget as check_budget
from kvpolicy.text.budget import format_budget as format_budget
from kvpolicy.text.budget import parse_budget as parse_budget
from kvpolicy.text.budget import waterfill as waterfill
