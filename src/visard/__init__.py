"""Federated face recognition across parties whose pictures may not leave home."""
