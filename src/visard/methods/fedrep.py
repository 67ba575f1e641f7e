"""FedRep: Collins, Hassani, Mokhtari, Shakkottai, Exploiting Shared Representations for Personalized Federated
Learning, ICML 2021.

    phi   the representation: weights of the backbone, which are averaged       h_i   a client's own head, at home
    tau   passes over its pictures in which a client learns h_i alone, before it moves phi
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from visard.core import Client, Work
from visard.core.method import AtLeastOne
from visard.errors import UsageError
from visard.learning.train import Trained, Training, train
from visard.methods.fedavg import Down, FedAvg, Learnt, Task


@dataclass(frozen=True)
class FedRep(FedAvg):
    """In a round a client first fits its head to the received backbone, then the backbone to that head."""

    name = "fedrep"
    title = "averaging of the backbone, which each client trains under a head that it has fitted first"
    paper = "Collins et al. 2021 (ICML)"
    head_epochs: AtLeastOne = 5  # tau

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.share_head:
            raise UsageError("method.share_head: heads of fedrep stay at home")

    @property
    def fitting(self) -> Training:
        """How a client trains its head alone."""
        return replace(self.training, unit="epochs", amount=self.head_epochs)

    def work(self, client: Client, msg: Down) -> Work:
        first, then = self.fitting.work(msg.lr, len(client.data.train)), super().work(client, msg)
        return then._replace(steps=first.steps + then.steps)

    def learn(self, client: Client, task: Task, msg: Down) -> Learnt:
        def fit(how: Training, frozen: object) -> Trained:
            return train(
                task.model, task.head, client.data.train, how, client.rng, client.numerics,
                lr=msg.lr, labels=task.labels, mask=task.mask, anchor=msg.theta, mu=self.mu,
                penalty=task.drift, frozen=[part for part in (task.model, task.head) if part is frozen],
            )  # fmt: skip

        first = fit(self.fitting, task.model)  # Algorithm 1: tau steps of h_i with phi fixed
        then = fit(self.training, task.head)  # one of phi with h_i fixed
        return Learnt(then.loss, first.steps + then.steps, first.pictures + then.pictures)
