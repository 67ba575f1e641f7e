"""Evaluation of face features: arrays in, metrics out."""
