"""Encrypted MMD at a client (Kang et al. 2022): its training, and its end of an exchange of sealed messages.

    v (n, L)    features of a batch inside the unit ball, where the kernel compares them
    pull        gradient of the encrypted part of the loss, by v (chain rule, Eq. 14) or by the parameters (Eq. 12)

In an exchange a client offers its batches to its peers, answers their offers, and learns from the answers to its own
(`crypto.exchange`). `Learner` does its training (Eqs. 1, 2, 8, 9), `Party` handles messages.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from visard.core import Client, State, Weights
from visard.core.method import NotNegative
from visard.crypto import exchange, session
from visard.crypto.exchange import Plan
from visard.crypto.masked_weights import mask_weights
from visard.crypto.moments import MIXED
from visard.crypto.packed import block_of
from visard.crypto.paillier import BITS, check_bits
from visard.crypto.session import Letters, Scheme, SealedMail, Session
from visard.errors import PublicError, UsageError, VisardError
from visard.learning.features import features_of, input_batch
from visard.learning.heads import HeadSettings
from visard.learning.mmd import Compare, Polynomial, within
from visard.learning.train import STEPS, Optimiser, Training, batches, new_optimiser
from visard.learning.weights import load_weights, weights_of
from visard.numerics import moved, on_device

DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
Batch = dict[str, Any]  # rows, and the seed of their random changes, so that they can be seen again

LEARNT = ("within", "task", "mmd", "total")  # metrics of an exchange
QUALITY = ("balanced_accuracy", "weighted_f1", "mse")  # metrics of a test on labelled data


@dataclass(frozen=True, kw_only=True)
class Encryption:
    """How a client encrypts its data about batches, and how it meets the others."""

    scheme: Scheme = "paillier"  # or ckks: faster for long features, more bytes, needs the extra `ckks`
    noise: NotNegative = 0.0  # multiplier of the Gaussian noise on a client's moments; 0 = none (see the card)
    min_batch: int = 32  # smaller batches are refused: their moments are nearly the features themselves
    key_bits: int = BITS
    insecure_keys: bool = False  # allow short keys, for tests
    keys: str = ""  # folder of key files at each client; "" = a new key in the client's state
    pins: dict[str, str] = field(default_factory=dict)  # client -> fingerprint of its key, which all check

    def packages(self) -> dict[str, str]:
        """What computes with ciphertexts; see `Method.packages`."""
        return {"gmpy2": "crypto"} if self.scheme == "paillier" else {"tenseal": "ckks"}

    def check_encryption(self, where: str, batch_size: int, of: str = "") -> None:
        """Refuse settings that make no sense; `where` and `of` lead to them in the settings."""
        if batch_size < max(2, self.min_batch):
            raise UsageError(f"{where}.{of}batch_size = {batch_size}: below min_batch")
        check_bits(f"{where}.key_bits = {self.key_bits}", self.key_bits, self.insecure_keys, f"{where}.insecure_keys")

    def say_hello(self, me: str, kept: State, n: int) -> bytes:
        """The public keys for batches of n, which are new unless a file holds one, and a nonce."""
        words, kept["keys"] = session.hello(me, self.keys, self.key_bits, self.insecure_keys, self._block(n))
        return words

    def send_secrets(self, me: str, kept: State, plan: Plan, hellos: Letters) -> Letters:
        """To each partner, a part of the common secret under its key."""
        letters, kept["keys"] = session.introduce(
            me, kept["keys"], hellos, self.key_bits, plan.partners(me), self.pins, self._block(plan.largest)
        )
        return letters

    def open_session(self, me: str, kept: State, secrets: Mapping[str, bytes]) -> Session:
        """This client's end of the run: new once the partners' secrets have come, then from its state."""
        if secrets:
            return session.settle(me, kept.pop("keys"), secrets, self.key_bits)
        return Session.from_state(kept["session"])

    def _block(self, n: int) -> int:
        """Slots of a column under CKKS; 0 under Paillier."""
        return block_of(n) if self.scheme == "ckks" else 0


@dataclass
class Party:
    """A client during one step of an exchange in the packed protocol."""

    kept: State  # between steps: its end of the session, its batches and their features
    plan: Plan
    session: Session

    def offer(self, learner: Learner) -> SealedMail:
        """Draw the next batches and send the offers to the peers."""
        drawn = learner.draw(self.plan.batches)
        features = learner.look(drawn, apart=bool(self.plan.noise))
        self.kept.update(batches=drawn, features=features, session=self.session.to_state())
        return exchange.offer(self.session, self.plan, features)

    def answer(self, offers: Letters) -> SealedMail:
        """Compute with what the peers offered.

        Refuses a second question in one exchange, unless it is the same: masks cancel in the difference of answers.
        """
        features: Tensor = self.kept["features"]
        parts = [self.plan.name(), features.contiguous().numpy().tobytes(), *(offers[c] for c in sorted(offers))]
        digest = hashlib.sha256(b"".join(hashlib.sha256(p).digest() for p in parts)).digest()
        number, before = self.kept.get("answered", (-1, b""))
        if number == self.session.exchange and before != digest:
            raise PublicError(f"exchange {number}: another question was answered before")
        self.kept["answered"] = (self.session.exchange, digest)
        return self._answer(features, offers)

    def _answer(self, features: Tensor, offers: Letters) -> SealedMail:
        none = torch.zeros(len(features), dtype=torch.float64)
        return exchange.answer_packed(self.session, self.plan, features, offers, none)

    def take(self, received: Letters) -> tuple[list[tuple[Batch, Tensor]], Tensor | None]:
        """Each batch that was offered with its pull, and its loss if this client learns it; ends the exchange."""
        pulls, losses = self._take(self.kept.pop("features"), received)
        self.session = self.session.next()
        self.kept["session"] = self.session.to_state()
        return list(zip(self.kept.pop("batches"), pulls, strict=True)), losses

    def _take(self, features: Tensor, received: Letters) -> tuple[Tensor, Tensor | None]:
        return exchange.take_packed(self.session, self.plan, features, received)


@dataclass
class LearningParty(Party):
    """A client of encrypted MMD, in any of its protocols; it keeps its masks too."""

    learner: Learner
    weight: float  # lambda

    @property
    def chained(self) -> bool:
        """B: gradients by features under encryption, the rest by back-propagation at home."""
        return self.plan.variant not in ("naive", "compressed")

    def outputs(self, owner: str) -> int:
        """Numbers of the encrypted gradient of one batch of a client; all extractors have the same architecture."""
        return self.plan.size(owner) * self.plan.length if self.chained else self.learner.size

    def _answer(self, features: Tensor, offers: Letters) -> SealedMail:
        extra = torch.zeros(len(features), dtype=torch.float64)
        if self.plan.loss and self.session.me == self.plan.target and self.weight:
            # what the target adds to the loss of a batch that a source monitors (Section 4.2.3), in units of lambda
            decay = self.learner.decay() / self.weight
            extra = torch.stack([within(v, self.plan.kernel) + decay for v in features])
        if self.plan.variant == "packed":
            return exchange.answer_packed(self.session, self.plan, features, offers, extra)
        drawn = self.kept["batches"]
        by = None if self.chained else lambda i, slopes: self.learner.by_parameters(drawn[i], slopes)
        mail, self.kept["masks"] = exchange.answer_forward(self.session, self.plan, features, offers, extra, by)
        return mail

    def unveil(self, answers: Letters) -> SealedMail:
        """Decrypt the peers' masked gradients for them; keep the loss, if there is one. Not in the packed protocol."""
        mail, losses = exchange.unveil(self.session, self.plan, self.kept["features"], answers, self.outputs)
        if losses is not None:
            self.kept["losses"] = losses
        return mail

    def _take(self, features: Tensor, received: Letters) -> tuple[Tensor, Tensor | None]:
        if self.plan.variant == "packed":
            return super()._take(features, received)
        outputs = self.outputs(self.session.me)
        pulls = exchange.take_forward(self.session, self.plan, received, self.kept.pop("masks"), outputs)
        return pulls.reshape(features.shape) if self.chained else pulls, self.kept.pop("losses", None)

    def mask(self, weights: Weights) -> Weights:
        """A pooled source's weights after a step, of which the server can read the sum over the sources alone."""
        others = [c for c in self.plan.sources if c != self.session.me]
        return mask_weights(weights, self.session.masks(self.plan.target, others, b"weights"))

    def hand_over(self, exchanges: int) -> SealedMail:
        """The own classifier for the target alone, once the run's exchanges are over."""
        if self.session.exchange != exchanges:
            raise PublicError(f"the classifier goes after exchange {exchanges}: this is {self.session.exchange}")
        return self.session.conceal("classifier", head_to_bytes(self.kept["head"]), self.plan.target)

    def take_over(self, received: Letters, new: Callable[[], nn.Module]) -> list[nn.Module]:
        """The sources' classifiers."""
        heads = []
        for source in self.plan.sources:
            head = new()
            size = len(head_to_bytes(weights_of(head)))
            data = self.session.reveal("classifier", source, received.get(source, b""), size)
            load_weights(head, head_from_bytes(data, weights_of(head), source))
            heads.append(head)
        return heads

    def learn(self, received: Letters) -> dict[str, float]:
        """Take the gradients and train on the batches that were offered (Eq. 2); mean losses over the batches."""
        plan, sums = self.plan, dict[str, float]()
        taken, losses = self.take(received)
        decay = self.learner.decay()
        for i, (batch, pull) in enumerate(taken):
            metrics = self.learner.step(batch, pull, plan.kernel, plan.share(self.session.me), self.weight)
            if losses is not None:
                mmd = metrics["within"] + float(losses[i])  # the target's regulariser is in it
                metrics |= {"mmd": mmd, "total": metrics["task"] + self.weight * mmd + decay}
            sums = {k: sums.get(k, 0.0) + v / plan.batches for k, v in metrics.items()}
        self.learner.save()
        return {k: v for k, v in sums.items() if k != "within"}  # which the client keeps to itself


def begun(theta: Weights, head: Weights) -> State:
    """A client's initial state; an empty head keeps the client's own."""
    return {"theta": theta} | ({"head": head} if head else {})


def untouched(client: Client) -> Client:
    """The client with a copy of its random numbers, so that drawing now does not change later draws."""
    rng = torch.Generator()
    rng.set_state(client.rng.get_state())
    return replace(client, rng=rng)


@dataclass(frozen=True)
class Unlabelled:
    """How a target learns beside MMD (ours)."""

    entropy: float = 0.0  # weight of `information` under the classifier that its state has
    dropout: bool = True  # whether its network drops units in alignment


class Learner:
    """A client's extractor, classifier and optimiser, as its state has them. The target has no classifier to train."""

    def __init__(
        self, client: Client, training: Training, compare: Compare, head: HeadSettings | None, labelled: bool,
        lr: float, optimiser: Optimiser = "sgd", unlabelled: Unlabelled | None = None,
    ) -> None:  # fmt: skip
        """`head` None: a regressor. `unlabelled`: of the target, in alignment."""
        self.client, self.training, self.compare = client, training, compare
        self.view, self.state = client.data.train, client.state
        self.model = client.network()
        load_weights(self.model, self.state["theta"])
        on_device(self.model).train()
        self.head: Any = None
        self.unlabelled, self.guide = unlabelled or Unlabelled(), None
        if not self.unlabelled.dropout:
            for part in self.model.modules():
                if isinstance(part, DROPOUT):
                    part.eval()
        if self.unlabelled.entropy:
            if "head" not in self.state:
                raise PublicError("method.target_entropy: the target has no classifier to be sure with")
            guide = new_head(head, client.data.n_classes, client.embedding, self.state["head"])
            self.guide = on_device(guide).requires_grad_(False)
        if labelled:
            self.head = on_device(new_head(head, client.data.n_classes, client.embedding, self.state.get("head")))
        self.extractor = [p for p in self.model.parameters() if p.requires_grad]
        parameters = [*self.extractor, *(self.head.parameters() if labelled else [])]
        self.optimiser = new_optimiser(optimiser, parameters, lr, training.momentum, training.weight_decay)
        kept = {int(i): v for i, v in self.state.get("momentum", {}).items()}
        self.optimiser._velocity = {i: v if i == STEPS else moved(v) for i, v in kept.items()}

    def save(self) -> None:
        """Keep everything in the client's state."""
        self.state["theta"] = weights_of(self.model)
        self.state["momentum"] = {str(i): v for i, v in self.optimiser._velocity.items()}
        if self.head is not None:
            self.state["head"] = weights_of(self.head)

    def fit(self) -> float:
        """Pre-training (Eq. 1): a round of `training` on the own labels, which is kept; the mean loss."""
        losses = []
        for rows in batches(len(self.view), self.training, self.client.rng):
            batch = self._seeded(torch.from_numpy(rows))
            loss = self.head.loss(self.forward(batch), self.labels(batch))
            self.update(loss)
            losses.append(float(loss.detach()))
        self.save()
        return finite(sum(losses) / len(losses))

    def draw(self, count: int) -> list[Batch]:
        """Random batches of the fixed size."""
        n, rng = self.training.batch_size, self.client.rng
        if len(self.view) < n:
            raise PublicError(
                f"has {len(self.view)} training pictures, fewer than a batch of {n}: lower method.training.batch_size"
            )
        return [
            self._seeded(rows) for rows in [torch.randperm(len(self.view), generator=rng)[:n] for _ in range(count)]
        ]

    def sample(self) -> Tensor:
        """Features (4 n, L) of a few batches, from which a kernel is chosen."""
        return self.look(self.draw(4)).flatten(0, 1)

    def _seeded(self, rows: Tensor) -> Batch:
        return {"rows": rows, "seed": int(torch.randint(2**62, (), generator=self.client.rng))}

    def forward(self, batch: Batch) -> Tensor:
        """Raw features (n, E) of a batch; the same again for the same weights, also with dropout."""
        return self._features(self._inputs(batch), batch["seed"])

    def _inputs(self, batch: Batch) -> Tensor:
        rng = torch.Generator().manual_seed(batch["seed"])
        return input_batch(self.view, batch["rows"].numpy(), self.client.numerics, rng, self.training.augment)

    def _features(self, x: Tensor, seed: int) -> Tensor:
        torch.manual_seed(seed)  # for layers that draw by themselves
        with self.client.numerics.autocast():
            features: Tensor = self.model(x)
        return features.float()

    def labels(self, batch: Batch) -> Tensor:
        """Labels (n,) of a batch."""
        return moved(torch.from_numpy(np.asarray(self.view.labels))[batch["rows"]])

    @torch.no_grad()
    def look(self, chosen: Sequence[Batch], apart: bool = False) -> Tensor:
        """Features (batches, n, L) inside the ball, in float64; running statistics stay as they were.

        `apart`: refused if another first sample changes more than its own feature.
        """
        with self._statistics_kept():
            seen = [self.compare.inside(self.forward(b)).double() for b in chosen]
        if apart:
            x = self._inputs(chosen[0]).clone()
            x[0] += 3
            with self._statistics_kept():
                others = self.compare.inside(self._features(x, chosen[0]["seed"])).double()[1:]
            if not torch.allclose(others, seen[0][1:], rtol=0, atol=1e-5):
                raise VisardError(MIXED)
        return torch.stack(seen)

    def by_parameters(self, batch: Batch, slopes: Tensor) -> Tensor:
        """Gradients (outputs, P) by the extractor's parameters from gradients (outputs, n, L) by its features."""
        with self._statistics_kept():
            v = self.compare.inside(self.forward(batch))
        rows = []
        for slope in slopes:
            parts = torch.autograd.grad(v, self.extractor, slope.to(v.dtype), retain_graph=True, allow_unused=True)
            flat = [torch.zeros_like(p) if g is None else g for p, g in zip(self.extractor, parts, strict=True)]
            rows.append(torch.cat([g.flatten() for g in flat]).cpu().double())
        return torch.stack(rows)

    @contextmanager
    def _statistics_kept(self) -> Iterator[None]:
        """Restore the running statistics, which batch norm changes with every batch."""
        kept = {k: v.clone() for k, v in self.model.named_buffers()}
        yield
        for k, v in self.model.named_buffers():
            v.data.copy_(kept[k])

    def step(self, batch: Batch, pull: Tensor, kernel: Polynomial, share: float, weight: float) -> dict[str, float]:
        """One update (Eq. 2): own loss, `weight` (lambda) times the own part of MMD and the pull of the others."""
        features = self.forward(batch)
        v = self.compare.inside(features)
        own = within(v.double(), kernel)
        loss = weight * share * own
        metrics = {"within": float(own.detach())}
        if self.head is not None:
            task = self.head.loss(features, self.labels(batch))
            loss, metrics["task"] = loss + task.cpu(), finite(float(task.detach()))
        loss = loss + self.guidance(features)
        if pull.shape == v.shape:  # Eq. 14
            self.update(loss + weight * (pull * v.double()).sum())
        else:
            self.update(loss, weight * pull)
        return metrics

    def guidance(self, features: Tensor) -> Tensor | float:
        """The term of a target's own predictions in its loss; 0 if there is none."""
        if self.guide is None:
            return 0.0
        return self.unlabelled.entropy * information(self.guide.logits(features)).cpu()

    def update(self, loss: Tensor, beside: Tensor | None = None) -> None:
        """One step of the optimiser; `beside` is a gradient by the extractor's parameters to add, one after another."""
        self.optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        if beside is not None:
            parts = torch.split(beside, [p.numel() for p in self.extractor])
            for p, flat in zip(self.extractor, parts, strict=True):
                part = moved(flat.view(p.shape).to(p.dtype))
                p.grad = part if p.grad is None else p.grad + part
        if self.training.clip:
            self.optimiser.clip(self.training.clip)
        self.optimiser.step()

    def decay(self) -> float:
        """The regulariser of the extractor: half its squared length times the weight decay."""
        return 0.5 * self.training.weight_decay * sum(float((p.detach() ** 2).sum()) for p in self.extractor)

    @property
    def size(self) -> int:
        """P, of the extractor."""
        return sum(p.numel() for p in self.extractor)


def information(logits: Tensor) -> Tensor:
    r"""$\frac{1}{n}\sum_i H(p_i) - H(\frac{1}{n}\sum_i p_i)$ for predictions $p_i$ = softmax of logits (n, classes).

    Minus the mutual information of sample and class, in nats: small where a classifier is sure of every sample and
    the classes are about equally frequent (Krause, Perona, Gomes 2010; Liang, Hu, Feng 2020).
    """
    log_p = logits.log_softmax(1)
    mean = log_p.exp().mean(0)
    return (mean * mean.clamp_min(1e-12).log()).sum() - (log_p.exp() * log_p).sum(1).mean()


def finite(loss: float) -> float:
    """The loss, if it is a number."""
    if not math.isfinite(loss):
        raise PublicError(f"the loss became {loss} in training: lower method.training.lr")
    return loss


class Regressor(nn.Module):
    """A linear predictor of one number, with squared error, used like a head."""

    def __init__(self, embedding: int) -> None:
        super().__init__()
        self.linear = nn.Linear(embedding, 1)

    def loss(self, features: Tensor, labels: Tensor) -> Tensor:
        return mse_loss(self.logits(features)[:, 0], labels.to(features.dtype))

    def logits(self, features: Tensor) -> Tensor:
        values: Tensor = self.linear(features)
        return values


def new_head(settings: HeadSettings | None, classes: int, embedding: int, weights: Weights | None = None) -> Any:
    """A head, or without settings a regressor, with these weights or fresh."""
    head = settings.build(classes, embedding) if settings else Regressor(embedding)
    if weights:
        load_weights(head, weights)
    return head


def head_to_bytes(weights: Weights) -> bytes:
    """A classifier as it travels: its numbers in the order of their names."""
    return b"".join(weights[name].detach().float().contiguous().numpy().tobytes() for name in sorted(weights))


def head_from_bytes(data: bytes, like: Weights, source: str) -> Weights:
    """The classifier again, with the names and shapes of `like`."""
    numbers, found, at = torch.from_numpy(np.frombuffer(data, "<f4").copy()), dict[str, Tensor](), 0
    if not bool(torch.isfinite(numbers).all()):
        raise PublicError(f"the classifier of {source} is not finite")
    for name in sorted(like):
        found[name] = numbers[at : at + like[name].numel()].reshape(like[name].shape)
        at += like[name].numel()
    return found


@torch.no_grad()
def mean_output(heads: Sequence[Any], features: Tensor) -> Tensor:
    """The average of several classifiers (softmax outputs) or regressors on the same features."""
    outputs = [on_device(head).logits(moved(features)).cpu() for head in heads]
    return torch.stack(outputs if isinstance(heads[0], Regressor) else [o.softmax(1) for o in outputs]).mean(0)


def quality(client: Client, model: nn.Module, heads: Sequence[Any], everything: bool = False) -> dict[str, float]:
    """Balanced accuracy and weighted F1 on the client's test data, or the mean squared error of regressors.

    With `everything` on all its data: those that a target aligned had no labels for it.
    """
    data = client.data
    views = [view for view in ((data.train, data.val, data.test) if everything else (data.test,)) if len(view)]
    if not views:
        raise PublicError("has no test data")
    features = torch.cat([features_of(model, view, client.numerics.channels_last) for view in views])
    output, labels = mean_output(heads, features), np.concatenate([np.asarray(view.labels) for view in views])
    if isinstance(heads[0], Regressor):
        return {"mse": float(mse_loss(output[:, 0], torch.from_numpy(labels).to(output.dtype)))}
    return classification_metrics(labels, output.argmax(1).numpy())


def classification_metrics(labels: np.ndarray, found: np.ndarray) -> dict[str, float]:
    """Mean recall over the classes that occur, and F1 weighted by how often each occurs."""
    recalls, weighted_f1 = [], 0.0
    for c in np.unique(labels):
        is_c, says_c = labels == c, found == c
        hits, occurs = int((is_c & says_c).sum()), int(is_c.sum())
        recalls.append(hits / occurs)
        weighted_f1 += occurs / len(labels) * (2 * hits / (occurs + int(says_c.sum())))
    return {"balanced_accuracy": sum(recalls) / len(recalls), "weighted_f1": weighted_f1}
