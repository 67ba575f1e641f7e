"""Ditto: Li, Hu, Beirami, Smith, Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021.

w    weights of the common backbone, learnt as in FedAvg       v_k   a client's own, which stay with it
lam  how strongly v_k is held near w (Eq. 2)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from visard.core import Client, State, Weights, Work
from visard.core.method import NotNegative
from visard.errors import UsageError
from visard.learning.features import client_head
from visard.learning.train import train
from visard.learning.weights import load_weights, weights_of
from visard.methods.fedavg import Down, FedAvg, Learnt, Task


@dataclass(frozen=True)
class Ditto(FedAvg):
    """FedAvg, and beside it a network of each client's own that is held near the common one."""

    name = "ditto"
    title = "federated averaging, and at each client a network of its own near the common one"
    paper = "Li et al. 2021 (ICML)"
    lam: NotNegative = 0.1  # lambda of Eq. 2; 0: every client alone

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.share_head:
            raise UsageError("method.share_head: a client of ditto has heads of its own, one for each of its networks")

    def work(self, client: Client, msg: Down) -> Work:
        once = super().work(client, msg)
        return once._replace(steps=2 * once.steps)

    def learn(self, client: Client, task: Task, msg: Down) -> Learnt:
        model, start = task.model, weights_of(task.model)
        common = super().learn(client, task, msg)  # Algorithm 1, line 5
        learnt = weights_of(model)
        own = client.state.get("own", {"theta": start})
        load_weights(model, own["theta"])
        kept: State = {"head": own["head"]} if "head" in own else {}
        head, labels, _ = client_head(replace(client, state=kept), self.head, None, model, self.head_start)
        done = train(  # line 6: v_k <- v_k - eta (grad F_k(v_k) + lam (v_k - w))
            model, head, client.data.train, self.training, client.rng, client.numerics,
            lr=msg.lr, labels=labels, anchor=msg.theta, mu=self.lam,
        )  # fmt: skip
        client.state["own"] = {"theta": weights_of(model), "head": weights_of(head)}
        load_weights(model, learnt)
        return Learnt(common.loss, common.gradients + done.steps, common.samples + done.pictures)

    def personal(self, state: State, theta: Weights | None) -> Weights | None:
        return state["own"]["theta"] if "own" in state else super().personal(state, theta)
