"""The pure functions that methods use, each with a golden test."""
