"""The event log of a run, and the page that shows one run or several side by side."""

from visard.report.events import EventLog, read_events
from visard.report.html import build_report

__all__ = ["EventLog", "build_report", "read_events"]
