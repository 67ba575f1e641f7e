"""Where class vectors of public people come from if no file gives them: a first stage, or mean features."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from visard.core import PUBLIC, Client, Leaves, Network, Weights, client_step
from visard.core.method import S
from visard.methods.fitting import Fit, Fitted, Fitting
from visard.ops.features import class_means, features_of
from visard.ops.training import load_weights


@dataclass(frozen=True)
class Measure:
    theta: Weights


@dataclass(frozen=True)
class Proxies:
    Phi: Annotated[Tensor, Leaves.class_vectors]  # of public people, from the public party


class WithProxies(Fitting[S]):
    """A method that starts from public people, whom one party (`PUBLIC`) trains on or measures."""

    def fit_public(self, theta: Weights, net: Network) -> Fitted:
        """One round of supervised training at the public party."""
        how = self.supervised()
        lr = how.training.lr_at(net.round, how.rounds)
        done = net.ask(self.fit, {PUBLIC: Fit(theta, lr, class_vectors=True)})[PUBLIC]
        net.log(loss=done.loss, lr=lr)
        return done

    def public_means(self, theta: Weights, net: Network) -> Tensor:
        """Mean features (K_g, E) of the public people."""
        return net.ask(self.measure, {PUBLIC: Measure(theta)})[PUBLIC].Phi

    @client_step
    def measure(self, client: Client, msg: Measure) -> Proxies:
        load_weights(model := client.network(), msg.theta)
        view = client.data.train
        features = features_of(model, view, client.numerics.channels_last)
        return Proxies(class_means(features, torch.from_numpy(view.labels), view.n_classes))
