"""Runs between real parties: their requests, policies, keys, ledgers and connections."""
