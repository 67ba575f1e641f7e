"""Pure functions that methods are made of, each with a golden test."""
