"""FedAvg: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, 2017;
with FedProx's proximal term (Li et al., Federated Optimization in Heterogeneous Networks, 2020).

    theta   weights of the backbone     mu   strength of the proximal term
"""

from __future__ import annotations

from dataclasses import dataclass

from visard.core import Client
from visard.core.method import NotNegative
from visard.learning.train import Training, train
from visard.methods.averaging import Averaging, Down, Learnt, Task


@dataclass(frozen=True)
class FedAvg(Averaging):
    """Every round the clients train the shared backbone on their own faces and the server averages."""

    name = "fedavg"
    title = "federated averaging: the backbone is shared, the pictures stay"
    paper = "McMahan et al. 2017; proximal term Li et al. 2020"

    training: Training = Training()
    mu: NotNegative = 0.0  # FedProx

    def rate(self, round: int) -> float:
        return self.training.lr_at(round, self.rounds)

    def learn(self, client: Client, task: Task, msg: Down) -> Learnt:
        done = train(
            task.model, task.head, client.data.train, self.training, client.rng, client.numerics,
            lr=msg.lr, labels=task.labels, mask=task.mask, anchor=msg.theta, mu=self.mu, penalty=task.drift,
        )  # fmt: skip
        return Learnt(done.loss, done.steps, done.pictures)
