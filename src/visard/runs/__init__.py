"""A run from settings to a finished run folder, and the evaluation of its models."""
