"""The contract: what a method is, what a client is, and the one channel between them.

A method talks to clients only through `Network.ask`. A client step is a function `(client, message) -> reply`;
of the client only `client.state` survives it. Every field of a reply carries the kind of thing that leaves.
"""

from visard.core.client import PUBLIC, Client, ClientId, State, Weights
from visard.core.leaves import Leaves, declared_kinds
from visard.core.method import Method, ScoreRequest, Scores, Setup, Stage
from visard.core.network import Network, Replies
from visard.core.steps import BoundStep, ClientStep, M, R, client_step

__all__ = [
    "PUBLIC",
    "BoundStep",
    "Client",
    "ClientId",
    "ClientStep",
    "Leaves",
    "M",
    "Method",
    "Network",
    "R",
    "Replies",
    "ScoreRequest",
    "Scores",
    "Setup",
    "Stage",
    "State",
    "Weights",
    "client_step",
    "declared_kinds",
]
