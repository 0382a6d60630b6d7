"""Reports: what a cache holds."""

from kvpolicy.reporting.report import LayerReport as LayerReport
from kvpolicy.reporting.report import Report as Report
