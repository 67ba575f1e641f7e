"""The event log of a run, and the page that shows one run or several side by side."""
