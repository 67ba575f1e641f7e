"""HF-MAML: Gansekoele, Hess and Bhulai, Meta-Learning for Federated Face Recognition in Imbalanced Data Regimes, 2024.

Algorithm 1 is federated averaging of w (and, with a global head, of a) in which a client learns by the update of
Eqs. 1 to 3 (`visard.learning.meta`); the embedding regularisation, Eq. 4, is in `visard.learning.objective`.
"""

from __future__ import annotations

from dataclasses import dataclass

from visard.core import Client
from visard.learning.meta import MetaTraining, meta_train
from visard.learning.train import HeadSettings
from visard.methods.averaging import Averaging, Down, Learnt, Task


@dataclass(frozen=True)
class HFMaml(Averaging):
    """The clients train a model that a few batches of a client make its own; the server averages."""

    name = "hf-maml"
    title = "Hessian-free meta-learning: a model that any client makes its own in a few batches"
    paper = "Gansekoele, Hess and Bhulai 2024"

    rounds: int = 30
    head: HeadSettings = HeadSettings("arcface", 8.0, 0.5)
    training: MetaTraining = MetaTraining()

    def rate(self, round: int) -> float:
        return self.training.beta_at(round, self.rounds)

    def learn(self, client: Client, task: Task, msg: Down) -> Learnt:
        done = meta_train(
            task.model, task.head, client.data.train, self.training, client.rng, client.numerics,
            beta=msg.lr, labels=task.labels, mask=task.mask, drift=task.drift,
        )  # fmt: skip
        return Learnt(done.loss, done.gradients, done.samples)
