"""Parties inside a pool: what centralised training holds of each."""

from __future__ import annotations

import copy

import numpy as np

from visard.core import Client, ClientId, State
from visard.data.faces import ClientData, FaceView
from visard.errors import VisardError

SOURCES: ClientId = "sources"  # all of them as one party


def party(pool: Client, name: ClientId, target: ClientId, state: State) -> Client:
    """A party of the pool as a client with a network of its own."""
    own = copy.deepcopy(pool.network())
    return Client(name, _data(pool, name, target), state, pool.rng, lambda: own, pool.embedding, pool.numerics)


def _data(pool: Client, name: ClientId, target: ClientId) -> ClientData:
    parts = pool.data.parts
    if target not in parts or len(parts) < 2:
        raise VisardError(f"has no party {target!r} beside others: partition.kind = one_domain is needed")
    members = [c for c in parts if c != target] if name == SOURCES else [name]
    views = [parts[c] for c in members]
    domains = np.unique(np.concatenate([view.domain for view in views]))

    def of(view: FaceView) -> FaceView:
        return FaceView.of(view.faces, view.index[np.isin(view.domain, domains)], pool.data.train.classes)

    train = FaceView.of(views[0].faces, np.concatenate([view.index for view in views]), pool.data.train.classes)
    return ClientData(train, of(pool.data.val), of(pool.data.test))
