r"""How much privacy a run has spent: epsilon at a delta, from the noise of each sum and how its clients were drawn.

A sum over clients has noise of standard deviation `noise` times the longest update that one client can have in it.
Two values of epsilon are computed, for runs that differ in one client:

amplified   towards a reader of the models who does not know which clients took part in which round. Clients that are
            drawn one by one (Poisson) are counted by privacy loss distributions, for a client that is there or not; a
            fixed number of clients by Renyi divergences (Wang et al. 2019), for a client that is replaced by another,
            so that the sum changes by twice the longest update. Both by the package dp-accounting.
plain       towards the server and everyone else who knows the cohorts: $k$ rounds with one client in them are one
            Gaussian mechanism of noise $z / \sqrt k$, whose epsilon is exact (Balle and Wang 2018, Theorem 8).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from visard.errors import UsageError

Sampling = Literal["fixed", "poisson"]
INTERVAL = 1e-3  # of privacy losses; distributions are rounded up to it
PRECISION = 1e-3  # relative, of a noise that is chosen for an epsilon
NEVER = 1e-6  # of delta: largest probability that any round draws an empty cohort, which is drawn again


@dataclass(frozen=True)
class Sum:
    """How the clients of one sum were drawn, and how much noise is in it."""

    sampling: Sampling
    asked: int  # clients of a cohort of fixed size; else 0
    share: float  # that a client is in the cohort
    clients: int  # of the run
    noise: float  # standard deviation over the longest update

    @property
    def everyone(self) -> bool:
        """Whether all clients are in it, so that sampling hides nothing."""
        return self.share >= 1

    def expected(self, asked: int) -> float:
        """How many clients a cohort has on average; dividing the sum by this does not reveal the count."""
        return self.share * self.clients if self.sampling == "poisson" else asked


def largest_delta(clients: int) -> float:
    """The largest delta that is meaningful for so many clients."""
    return float(max(2, clients) ** -1.1)


def epsilon_plain(inverse: float, delta: float) -> float:
    r"""Epsilon of Gaussian mechanisms whose $1/z^2$ add up to `inverse`; infinite where one of them had no noise."""
    if inverse == 0:
        return 0.0
    if not math.isfinite(inverse):
        return math.inf
    mu = math.sqrt(inverse)

    def above(epsilon: float) -> bool:
        return _delta(mu, epsilon) > delta

    return _least(above, 1e-9)


def _delta(mu: float, epsilon: float) -> float:
    """Delta of a Gaussian mechanism of sensitivity `mu` and standard deviation 1."""
    from scipy.special import log_ndtr

    first, second = log_ndtr(mu / 2 - epsilon / mu), epsilon + log_ndtr(-mu / 2 - epsilon / mu)
    return float(math.exp(first) - math.exp(second)) if second < first else 0.0


def _least(above: Callable[[float], bool], tolerance: float) -> float:
    """The least positive number, up to a relative tolerance from above, where `above` is no longer true."""
    low, high = 0.0, 1.0
    while above(high):
        low, high = high, 2 * high
        if high > 1e9:
            return math.inf
    while high - low > tolerance * high:
        middle = (low + high) / 2
        low, high = (middle, high) if above(middle) else (low, middle)
    return high


def epsilon_amplified(sums: tuple[tuple[Sum, int], ...], delta: float) -> float:
    """Epsilon of sums, each with its number of times, for a reader of the models who does not know the cohorts."""
    if not sums:
        return 0.0
    if any(each.noise == 0 for each, _ in sums):
        return math.inf
    if all(each.everyone for each, _ in sums):
        return epsilon_plain(sum(count / each.noise**2 for each, count in sums), delta)
    return _counted(sums, delta)


@functools.lru_cache(maxsize=512)
def _counted(sums: tuple[tuple[Sum, int], ...], delta: float) -> float:
    accounting = package()
    relation = accounting.NeighboringRelation
    if any(each.sampling == "fixed" and not each.everyone for each, _ in sums):
        accountant = accounting.rdp.RdpAccountant(neighboring_relation=relation.REPLACE_ONE)
        for each, count in sums:
            if each.sampling == "poisson" and not each.everyone:
                raise UsageError("aggregation.dp: cohorts of fixed size and clients drawn one by one in one run")
            # one client replaced by another moves the sum by up to twice the longest update
            event = accounting.GaussianDpEvent(each.noise / 2)
            if not each.everyone:
                event = accounting.SampledWithoutReplacementDpEvent(each.clients, each.asked, event)
            accountant.compose(event, count)
    else:
        accountant = accounting.pld.PLDAccountant(value_discretization_interval=INTERVAL)
        for each, count in sums:
            event = accounting.PoissonSampledDpEvent(each.share, accounting.GaussianDpEvent(each.noise))
            accountant.compose(event, count)
        delta = delta * (1 - 1e-3)  # the rest is for empty cohorts
    return float(accountant.get_epsilon(delta))


def empty_cohort(sum: Sum, rounds: int) -> float:
    """The probability that one of so many rounds draws no client at all."""
    return 0.0 if sum.everyone else min(1.0, rounds * (1 - sum.share) ** sum.clients)


def noise_for(epsilon: Callable[[float], float], target: float) -> float:
    """The least noise whose `epsilon` is not above the target, up to a small part of it."""
    found = _least(lambda noise: epsilon(noise) > target, PRECISION)
    if not math.isfinite(found):
        raise UsageError(f"aggregation.dp.epsilon = {target:g}: no noise is large enough for it")
    return found


def package() -> Any:
    """The package dp-accounting, or one line where it is not installed."""
    try:
        import dp_accounting
        from dp_accounting import pld, rdp  # noqa: F401 (attributes of the package from here on)
    except ImportError:
        raise UsageError("aggregation.dp needs the package dp_accounting: pip install 'visard[dp]'") from None
    if not hasattr(dp_accounting, "SampledWithoutReplacementDpEvent"):
        raise UsageError("aggregation.dp needs dp-accounting 0.6: pip install 'visard[dp]'")
    return dp_accounting
