"""The contract: what a method is, what a client is, and the one channel between them.

A method talks to clients only through `Network.ask`. A client step is a function `(client, message) -> reply`;
of the client only `client.state` survives it. Every field of a reply declares its kind of data (`Disclosure`).
"""

from visard.core.client import (
    PUBLIC,
    BoundStep,
    Client,
    ClientId,
    ClientStep,
    M,
    R,
    State,
    Weights,
    Work,
    client_step,
    nothing,
)
from visard.core.method import Method, Setup, Stage
from visard.core.network import Network, Replies, mean_metrics, sample_clients
from visard.disclosure import Disclosure, Names, declared_kinds, possible_kinds

__all__ = [
    "PUBLIC",
    "BoundStep",
    "Client",
    "ClientId",
    "ClientStep",
    "Disclosure",
    "M",
    "Method",
    "Names",
    "Network",
    "R",
    "Replies",
    "Setup",
    "Stage",
    "State",
    "Weights",
    "Work",
    "client_step",
    "declared_kinds",
    "mean_metrics",
    "nothing",
    "possible_kinds",
    "sample_clients",
]
