"""Which clients take part in a round."""

from __future__ import annotations

import torch

from visard.core import ClientId, Network


def sample_clients(net: Network, share: float) -> list[ClientId]:
    """A random share of the clients (at least one) by the server's generator, in their fixed order."""
    count = max(1, round(share * len(net.clients)))
    chosen = torch.randperm(len(net.clients), generator=net.rng)[:count].tolist()
    return [net.clients[i] for i in sorted(chosen)]
