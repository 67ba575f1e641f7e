"""Policies for tests that are about something else."""

from __future__ import annotations

from visard.deployment.policy import Between, Bounds, Policy
from visard.disclosure import Disclosure
from visard.methods import METHODS

LOOSE = Bounds(
    requests=10**6, runs=10**4, lr=Between(at_least=0, at_most=1e6), batch=1, pictures=1, parties=1, distance=1e6
)
ANYTHING = Policy(methods=("toy", *METHODS.built_in), kinds=tuple(k.value for k in Disclosure), bounds=LOOSE)
