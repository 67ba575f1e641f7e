"""A look at the features of the public pictures: are they still apart, or has everything collapsed into one point?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np

from visard.core import PUBLIC, Client, Leaves, Method, Network, Weights, client_step
from visard.core.method import S
from visard.ops.features import features_of
from visard.ops.positive import variance
from visard.ops.training import load_weights

PICTURES = 256  # evenly over the public ones


@dataclass(frozen=True)
class Look:
    theta: Weights


@dataclass(frozen=True)
class Seen:
    variance: Annotated[float, Leaves.metric]  # of unit features; 0 = all in one point


class Looking(Method[S]):
    """A method with a step that measures the features where the public pictures are."""

    def watch(self, net: Network, theta: Weights) -> None:
        """Log the variance of the features."""
        net.log(**{"Feature variance": net.ask(self.look, {PUBLIC: Look(theta)})[PUBLIC].variance})

    @client_step
    def look(self, client: Client, msg: Look) -> Seen:
        model, view = client.network(), client.data.train
        load_weights(model, msg.theta)
        some = view.take(np.unique(np.linspace(0, len(view) - 1, PICTURES).astype(np.int64)))
        return Seen(variance(features_of(model, some, client.numerics.channels_last)))
