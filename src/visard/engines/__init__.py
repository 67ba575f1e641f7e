"""Engines: the loop of rounds, and the ways in which client steps are run."""
