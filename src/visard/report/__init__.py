"""The event log of a run, and the page that shows one run or several side by side."""

from visard.report.page import build_report
from visard.report.run_folder import EventLog, read_events

__all__ = ["EventLog", "build_report", "read_events"]
