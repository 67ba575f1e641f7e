r"""Negatives from other clients: directions that the features of a client's own people must keep away from.

A local head knows only the people of one client, so nothing keeps them apart from all others. With
`method.negatives` the softmax of a client gets more rows, which are fixed within a round:

    L = -log[e^{s phi(theta_y)} / (e^{s phi(theta_y)} + \sum_{j \ne y} e^{s cos theta_j} + \sum_k e^{s cos(f, v_k)})]

    public         v_k: mean features of public people near the client's own (AdaFedFR, 2024); nothing more leaves
    noisy          v_k: mean features of the other clients' people, shown once, with noise for differential privacy (the
                   idea of PrivacyFace: Meng et al., ICLR 2022)
    class_vectors  v_k: the other clients' class vectors as they are, which are face templates
    corrected      no v_k: the server gets the class vectors and moves those of different clients apart (FedGC: Niu and
                   Deng, AAAI 2022), each client gets its own back, and none gets another's

The noise has $\sigma$ = `noise` times 2, the farthest that a direction moves when one person takes another's place.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from visard.core import Client, ClientId, Disclosure, Method, Network, Setup, Weights, client_step, nothing
from visard.core.method import AtLeastOne, Number, Positive, S
from visard.crypto.moments import epsilon
from visard.data.faces import FaceView
from visard.errors import PublicError, UsageError
from visard.learning.features import class_means, features_of, shared_features
from visard.learning.heads import HEADS, Head, HeadSettings, MarginHead, cosine, direction
from visard.learning.weights import load_weights

Negatives = Literal["none", "public", "noisy", "class_vectors", "corrected"]
PLAIN = ("class_vectors", "corrected")  # with which class vectors leave as they are
Shown = dict[ClientId, Tensor]  # rows (people, E) that each client has shown
FARTHEST = 2.0  # that a direction moves when its person is another one


@dataclass(frozen=True)
class NegativeSettings:
    """Where negatives come from, in detail."""

    nearest: AtLeastOne = 10  # public: this many public people for each of the client's own
    noise: Positive = 1.0  # noisy: standard deviation over the farthest that one person moves a row
    after: Number = 0  # noisy: rounds before clients show their rows, for networks that start untrained
    correction: Positive = 1.0  # corrected: step of the server (FedGC's lambda times its learning rate)


@dataclass(frozen=True)
class Show:
    theta: Weights  # the network that the clients have now


@dataclass(frozen=True)
class Vectors:
    vectors: Annotated[Tensor, Disclosure.class_vectors]


@dataclass(frozen=True)
class NoisyVectors:
    vectors: Annotated[Tensor, Disclosure.noisy_vectors]


class Against(Head):
    """A head whose softmax has further rows (K, E), which nothing trains: a label never means one of them."""

    def __init__(self, head: MarginHead, rows: Tensor) -> None:
        nn.Module.__init__(self)
        self.head, self.rows = head, rows
        self.classes, self.embedding = head.classes, head.embedding

    def logits(self, features: Tensor, labels: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """(B, classes + K) float32 scores."""
        own = self.head.logits(features, labels, mask)
        return torch.cat([own, self.scores(features.to(own), self.rows.to(own), None)], 1)

    def loss(self, features: Tensor, labels: Tensor, mask: Tensor | None = None) -> Tensor:
        """Mean over the batch, a float32 scalar."""
        self.head._check(features, labels, mask)
        return cross_entropy(self.logits(features, labels, mask), labels)

    def scores(self, f: Tensor, w: Tensor, labels: Tensor | None) -> Tensor:
        return self.head.scale * cosine(f, w)


def near(own: Tensor, public: Tensor, each: int) -> Tensor:
    """Those rows of `public` (m, E) that are among the `each` nearest, by cosine, of a row of `own`; in their order."""
    present = public.abs().sum(1) > 0  # a public person without pictures has no direction
    rows = torch.nonzero(present).flatten()
    cosines = cosine(own, public[rows])
    best = cosines.topk(min(each, len(rows)), dim=1).indices
    return public[rows[torch.unique(best)]]


def with_noise(rows: Tensor, noise: float, secret: bytes) -> Tensor:
    """Rows with noise that a client's secret and the rows determine: asked again for them, it is the same noise."""
    exact = rows.detach().contiguous().numpy().tobytes()
    key = hmac.digest(secret, b"negatives" + hashlib.sha256(exact).digest(), "sha256")
    rng = np.random.Generator(np.random.Philox(key=int.from_bytes(key[:16], "big")))
    drawn = rng.normal(0.0, noise * FARTHEST, tuple(rows.shape))
    return (rows.double() + torch.from_numpy(drawn)).float()


def corrected(shown: Shown, scale: float, step: float) -> Shown:
    r"""FedGC's server: class vectors after one step away from those of other clients, down the slope of

        Reg = \sum_i -log[e^{s cos(w_i, c_i)} / (e^{s cos(w_i, c_i)} + \sum_j e^{s cos(w_i, c_j)})]

    where c are the same vectors taken as constants and j runs over the vectors of all clients but that of i.
    """
    moved = {}
    for client, rows in shown.items():
        others = [shown[c] for c in sorted(shown) if c != client and len(shown[c])]
        if not (others and len(rows)):
            moved[client] = rows
            continue
        w = rows.detach().clone().requires_grad_()
        own = scale * (direction(w) * direction(rows.detach())).sum(1, keepdim=True)
        logits = torch.cat([own, scale * cosine(w, torch.cat(others).detach())], 1)
        loss = cross_entropy(logits, torch.zeros(len(w), dtype=torch.int64), reduction="sum")
        (slope,) = torch.autograd.grad(loss, w)
        moved[client] = rows.detach() - step * slope
    return moved


@dataclass(frozen=True)
class WithNegatives(Method[S]):
    """For methods whose clients keep their own head in their state, as `head`."""

    negatives: Negatives = "none"  # further directions from which a client's people are kept away
    negatives_by: NegativeSettings = NegativeSettings()

    def check_negatives(self, head: HeadSettings) -> None:
        """One clear line for heads whose loss is no softmax of cosines."""
        if self.negatives != "none" and not issubclass(HEADS.find(head.kind), MarginHead):
            raise UsageError(
                f"method.negatives = {self.negatives}: a {head.kind} head has no rows for them, take cosface"
            )

    def check_public(self, setup: Setup) -> None:
        """Refuse a run without the public identities that it needs."""
        if self.negatives == "public" and not setup.public_classes:
            raise UsageError("method.negatives = public needs public people: set partition.public_identities")

    def shows(self) -> frozenset[Disclosure]:
        """The kinds that leave a client for the sake of negatives."""
        vectors = Disclosure.class_vectors
        shown = {"noisy": Disclosure.noisy_vectors, "class_vectors": vectors, "corrected": vectors}
        return frozenset({shown[self.negatives]} if self.negatives in shown else ())

    def gathered(
        self, known: Shown, net: Network, theta: Weights, clients: Iterable[ClientId], done: int, scale: float
    ) -> Shown:
        """The class vectors that clients have shown, updated by those that show theirs after `done` rounds.

        `scale` is that of their heads.
        """
        if self.negatives in PLAIN:
            plain = net.ask(self.show, dict.fromkeys(clients, Show(theta)))
            shown = known | {c: up.vectors for c, up in plain.items()}
            return corrected(shown, scale, self.negatives_by.correction) if self.negatives == "corrected" else shown
        if self.negatives == "noisy" and done >= self.negatives_by.after:
            net.log(epsilon_of_negatives=epsilon(self.negatives_by.noise))
            new = [c for c in clients if c not in known]
            # a party shows its people once: one whose reply was lost is left out
            noisy = net.ask(self.show_noisy, dict.fromkeys(new, Show(theta)), min_replies=0) if new else {}
            return known | {c: up.vectors for c, up in noisy.items()}
        return known

    def rows_for(self, known: Shown, client: ClientId) -> Tensor | None:
        """What a client is sent: the rows that the others have shown, or its own as the server corrected them."""
        if self.negatives == "corrected":
            return known.get(client)
        rows = [known[c] for c in sorted(known) if c != client and len(known[c])]
        return torch.cat(rows) if rows else None

    def people(self, client: Client) -> tuple[FaceView, Tensor]:
        """Training pictures of a client, and for each the row of the head that is its person's."""
        return client.data.train, torch.from_numpy(client.data.train.labels)

    def against(self, client: Client, head: Head, model: nn.Module, theta: Weights, rows: Tensor | None) -> Head:
        """The head to train with in this round, with the `rows` that were sent; `model` holds the weights `theta`."""
        if self.negatives == "corrected":
            if rows is not None and len(rows):
                if rows.shape != head.weight.shape:
                    raise PublicError(f"got {len(rows)} corrected class vectors for {len(head.weight)} people")
                head.weight.data.copy_(rows)
            return head
        if self.negatives == "public":
            if client.public is None:
                raise PublicError("has no public pictures")
            features = shared_features(model, theta, client.public, client.numerics.channels_last)
            labels = torch.from_numpy(client.public.labels)
            public = class_means(features, labels, client.public.n_classes)
            rows = near(self.means(client, model), public, self.negatives_by.nearest)
        return Against(head, rows) if rows is not None and isinstance(head, MarginHead) else head

    def means(self, client: Client, model: nn.Module) -> Tensor:
        """Directions (people, E) of the mean features of the client's people."""
        view, labels = self.people(client)
        if not len(view):
            return torch.zeros(0, client.embedding)
        return class_means(features_of(model, view, client.numerics.channels_last), labels, int(labels.max()) + 1)

    @client_step(trains=nothing)
    def show(self, client: Client, msg: Show) -> Vectors:
        """The client's class vectors as they are; before its first round there are none."""
        if self.negatives not in PLAIN:
            raise PublicError("this run does not show class vectors (method.negatives)")
        head = client.state.get("head") or client.state.get("start") or {}
        return Vectors(head.get("weight", torch.zeros(0, client.embedding)))

    @client_step(trains=nothing)
    def show_noisy(self, client: Client, msg: Show) -> NoisyVectors:
        """Mean features with noise, once in a run: more would say more, and asked again the answer is the same."""
        if self.negatives != "noisy":
            raise PublicError("this run does not show class vectors with noise (method.negatives)")
        if "shown" not in client.state:
            load_weights(model := client.network(), msg.theta | client.state.get("batch_norm", {}))
            client.state["shown"] = with_noise(self.means(client, model), self.negatives_by.noise, client.secret)
        return NoisyVectors(client.state["shown"])
