r"""Encrypted MMD: Kang, Li, Zhang, Communicational and Computational Efficient Federated Domain Adaptation, TPDS 2022.

    theta      extractor: the sources pre-train one (Eq. 1), then every client has its own weights
    lambda     `weight`, of MMD in the loss (Eq. 2)           S    number of sources (Eqs. 18-20)

The clients, sources with labels and a target without, send each other sealed messages: an offer of a batch, an answer
to an offer. The server relays them (`letters`, and a `tags` entry for each receiver) and can read none of them. Here
are the requests and replies, the settings, and the rounds; what a client does is in `encrypted_mmd_party.py`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, TypeVar

import torch
from torch import Tensor

from visard.core import (
    BoundStep,
    Client,
    ClientId,
    Disclosure,
    M,
    Method,
    Names,
    Network,
    R,
    Replies,
    Setup,
    Stage,
    State,
    Weights,
    Work,
    client_step,
    mean_metrics,
    nothing,
)
from visard.core.method import CRAFTED_WEIGHTS, AtLeastOne, NotNegative, Number
from visard.crypto import session
from visard.crypto.exchange import Plan, Variant
from visard.crypto.masked_weights import mean_of_masked
from visard.crypto.moments import check_apart, epsilon
from visard.crypto.paillier import OPERATIONS, counted
from visard.crypto.session import Letters
from visard.errors import PublicError, UsageError
from visard.learning.heads import HeadSettings
from visard.learning.mmd import Compare, Polynomial, spoken_length
from visard.learning.train import Optimiser, Training
from visard.learning.weights import weights_of
from visard.methods.domain_adaptation import check_start, given_head
from visard.methods.encrypted_mmd_party import (
    LEARNT,
    QUALITY,
    Encryption,
    Learner,
    LearningParty,
    Unlabelled,
    begun,
    new_head,
    quality,
    untouched,
)

SEALED = frozenset({Disclosure.ciphertext, Disclosure.public_key, Disclosure.statistic})  # of sealed messages


@dataclass(frozen=True)
class Begin:
    theta: Weights
    head: Weights  # empty: a new one, or the own
    lr: float

    @property
    def classifier(self) -> Weights | None:
        """The classifier that was sent, if any: a secure sum adds changes to it (Section 4.4)."""
        return self.head or None


@dataclass(frozen=True)
class Pretrained:
    theta: Annotated[Weights, Disclosure.weights]
    classifier: Annotated[Weights, Disclosure.class_vectors]  # empty where classes are not shared
    loss: Annotated[float, Disclosure.metric]


@dataclass(frozen=True)
class Card:
    hello: Annotated[bytes, Disclosure.public_key]  # public key and a nonce


@dataclass(frozen=True)
class Relayed:
    """A request with the messages of other clients."""

    plan: Plan
    received: Letters = field(default_factory=dict)  # by sender: hellos, or sealed messages


@dataclass(frozen=True)
class Mail:
    letters: Annotated[Letters, Disclosure.ciphertext]
    tags: Annotated[Letters, Disclosure.ciphertext]
    figures: Annotated[dict[str, float], Disclosure.metric, Names(*OPERATIONS)]


@dataclass(frozen=True)
class Fit:
    plan: Plan
    longest: float = 1.0  # features of any client


@dataclass(frozen=True)
class Length:
    length: Annotated[float, Disclosure.statistic]  # root mean square of the client's features, rounded up


@dataclass(frozen=True)
class Measured:
    kernel: Annotated[Tensor, Disclosure.statistic]  # coefficients, from distances of the client's own features


@dataclass(frozen=True)
class Advance:
    plan: Plan
    received: Letters  # answers by sender; empty: nothing to learn from yet
    secrets: Letters  # in the first exchange
    theta: Weights  # of pooled sources; empty: the own
    head: Weights
    lr: float
    more: bool  # whether there is another exchange


@dataclass(frozen=True)
class Moved:
    letters: Annotated[Letters, Disclosure.ciphertext]
    tags: Annotated[Letters, Disclosure.ciphertext]
    masked: Annotated[Weights, Disclosure.ciphertext]  # of pooled sources, after a step: only their sum can be read
    figures: Annotated[dict[str, float], Disclosure.metric, Names(*LEARNT, *OPERATIONS)]


@dataclass(frozen=True)
class Common:
    """The server's knowledge of shared classes."""

    head: Weights  # of all sources
    theta: Weights = field(default_factory=dict)  # the pre-trained extractor, before alignment; empty: the own


@dataclass(frozen=True)
class Predicted:
    figures: Annotated[dict[str, float], Disclosure.metric, Names(*QUALITY)]


@dataclass(frozen=True)
class Start:
    theta: Weights  # the pre-trained extractor; of pooled sources their common one
    head: Weights  # the sources' common classifier, where classes are shared


@dataclass(frozen=True)
class Server(Start):
    length: int  # L, of what is compared
    hellos: Letters = field(default_factory=dict)  # public keys and nonces
    exchange: int = 0  # how many there have been


S = TypeVar("S", bound=Start)


@dataclass(frozen=True)
class AdaptingByMMD(Method[S]):
    """The common part of the encrypted method and its centralised reference."""

    rounds: Number = 10
    exchanges: AtLeastOne = 10  # of batches in a round
    weight: NotNegative = 1.0  # lambda, of MMD
    pooled: bool = False  # all sources are one domain (Eqs. 16, 17) instead of one each (Eqs. 18-20)
    target: ClientId = ""  # the client without labels; "" = the last client
    compare: Compare = Compare()
    training: Training = Training()  # batch_size is n_s
    target_batch: Number = 0  # n_t, samples of a batch of the target; 0: the same as for a source
    target_dropout: bool = True  # false: the target's network drops no units in alignment (ours)
    target_entropy: NotNegative = 0.0  # weight of information maximisation at the target (ours); 0: none
    optimiser: Optimiser = "sgd"  # of pre-training and alignment; adam keeps its moments from exchange to exchange
    head: HeadSettings = HeadSettings()
    tested: Literal["test", "all"] = "test"  # all: the target predicts all that it has, as is usual without labels
    pretrain_rounds: Number = 5  # of the sources; their extractors are averaged

    def __post_init__(self) -> None:
        if not self.rounds + self.pretrain_rounds:
            raise UsageError("method.rounds = 0: must be at least 1, or only pretrain_rounds")
        if self.training.optimiser != "sgd":
            raise UsageError(f"method.training.optimiser: here it is method.optimiser = {self.training.optimiser}")

    def stages(self) -> list[Stage[S]]:
        both = [Stage("pretrain", self.pretrain_rounds, self.pretrain), Stage("align", self.rounds, self.round)]
        return [stage for stage in both if stage.rounds]

    def training_of(self, is_target: bool) -> Training:
        """How a source or the target trains, with its own size of batches."""
        own = is_target and self.target_batch
        return replace(self.training, batch_size=self.target_batch) if own else self.training

    def unlabelled(self, is_target: bool) -> Unlabelled | None:
        """How the target learns in alignment; of others nothing."""
        return Unlabelled(self.target_entropy, self.target_dropout) if is_target else None

    @abstractmethod
    def pretrain(self, s: S, net: Network) -> S:
        """Section 4.1, Eq. 1."""

    @abstractmethod
    def round(self, s: S, net: Network) -> S:
        """Section 4.2, Eq. 2."""

    def class_vectors(self, s: S) -> Tensor | None:
        return s.head.get("weight")

    def biases(self, s: S) -> Tensor | None:
        return s.head.get("bias")


@dataclass(frozen=True)
class EncryptedMMD(Encryption, AdaptingByMMD[Server]):
    """Sources with labels and a target without align their features without showing them."""

    name = "encrypted-mmd"
    title = "domain adaptation by MMD under homomorphic encryption: features stay at home"
    paper = "Kang, Li, Zhang 2022"
    hostile = (
        "The sources' extractors of pre-training leave in the clear, so that gradients can be inverted as in "
        "fedavg. What the clients send each other later is sealed, but the server names the roles and the keys "
        "it relays: a client that pins keys (local.method.pins) and the target (require.method.target) is not "
        f"fooled. The kernel is a statistic of a source's features (kind statistic). {CRAFTED_WEIGHTS}"
    )
    discloses = frozenset({Disclosure.weights, Disclosure.class_vectors, Disclosure.metric, Disclosure.count}) | SEALED

    batches: AtLeastOne = 1  # in one exchange: more save time on a slow network, at gradients up to so many steps old
    protocol: Variant = "packed"  # or the paper's: naive, compressed (A), chain_rule (B), both
    task: Literal["classify", "regress"] = "classify"
    classes: Literal["own", "shared"] = "own"  # shared: all know the same classes, and the target gets the classifiers
    monitor: bool = False  # sources learn the loss (Section 4.2.3): one more equation about the target each batch
    sums: bool = True  # answers of several peers are masked, so that their owner can read the sum and no part

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.protocol == "packed" and self.compare.degree > 2:
            raise UsageError(f"method.compare.degree = {self.compare.degree}: packed computes degrees 1 and 2")
        if self.noise and self.protocol != "packed":
            raise UsageError(f"method.noise = {self.noise}: needs the packed protocol")
        if self.scheme == "ckks" and self.protocol != "packed":
            raise UsageError(f"method.scheme = ckks: carries the packed protocol, not {self.protocol}")
        if self.noise and self.monitor:
            raise UsageError("method.monitor: a monitored loss is not covered by method.noise")
        if self.monitor and self.pooled:
            raise UsageError("method.monitor: pooled sources have no loss of their own to monitor")
        if self.target_entropy and (self.classes != "shared" or self.task != "classify"):
            raise UsageError("method.target_entropy: needs shared classes, of which the target has a classifier")
        self.check_encryption("method", self.training.batch_size, "training.")
        if self.target_batch and self.target_batch < max(2, self.min_batch):
            raise UsageError(f"method.target_batch = {self.target_batch}: below min_batch")

    def leaving(self, moving: bool) -> frozenset[Disclosure]:
        kinds = super().leaving(moving)
        return kinds if self.classes == "shared" else kinds - {Disclosure.class_vectors}

    def without_labels(self, clients: Sequence[ClientId]) -> tuple[ClientId, ...]:
        return (self.target or clients[-1],) if self.classes == "own" else ()

    def start(self, setup: Setup) -> Server:
        if len(setup.clients) < 2:
            raise UsageError("encrypted-mmd needs a source and a target: two clients or more")
        if self.target and self.target not in setup.clients:
            raise UsageError(f"method.target = {self.target}: no such client; there are {', '.join(setup.clients)}")
        if self.pooled and len(setup.clients) < 3:
            raise UsageError("method.pooled: a source alone has no others to hide its weights among; there must be two")
        check_start(self.name, setup, self.pretrain_rounds)
        shared = self.task == "classify" and self.classes == "shared"
        head = head_of(self.head, setup) if shared else {}
        theta = setup.new_weights()
        if shared and not head and self.pretrain_rounds:  # one for all sources, so that they can be averaged
            head = weights_of(self.head.build(setup.classes, setup.embedding))
        if self.noise:
            check_apart(theta)
        return Server(theta, head, self.compare.length(setup.embedding))

    def plan(self, s: Server, net: Network) -> Plan:
        target = self.target or net.clients[-1]
        return self._plan(s.length, tuple(c for c in net.clients if c != target), target)

    def _plan(self, length: int, sources: tuple[ClientId, ...], target: ClientId) -> Plan:
        """What all clients agree on, except the kernel."""
        return Plan(
            self.protocol, Polynomial((1.0, -1.0)), length, self.training.batch_size, self.batches, self.key_bits,
            sources, target, self.pooled, self.monitor, self.sums, self.noise, self.scheme, self.target_batch,
        )  # fmt: skip

    def pretrain(self, s: Server, net: Network) -> Server:
        """Section 4.1, Eq. 1; several sources train together by averaging."""
        lr = self.training.lr_at(net.round, self.pretrain_rounds)
        asked = {c: Begin(s.theta, s.head, lr) for c in self.plan(s, net).sources}
        means, ups = net.reduce(self.fit, asked, mean=("theta", "classifier"), by=None, min_replies=len(asked))
        net.log(loss=sum(u.loss for u in ups.values()) / len(ups), lr=lr)
        s = replace(s, theta=means["theta"], head=means["classifier"])
        if self.classes == "shared" and net.round == self.pretrain_rounds - 1:  # without adaptation: to be beaten
            self.log_test(net, self.predict, self.plan(s, net).target, Common(s.head, s.theta))
        return s

    def round(self, s: Server, net: Network) -> Server:
        """Section 4.2: in each exchange offers, answers (and decryptions for each other), then every client's step."""
        secrets: dict[ClientId, Letters] = {}
        if not s.hellos:
            begin = dict.fromkeys(net.clients, Begin(s.theta, s.head, 0.0))
            hellos, secrets = meet(net, self.hello, self.introduce, begin, self.plan(s, net))
            s = replace(s, hellos=hellos)
        plan, lr = self.plan(s, net), self.training.lr_at(net.round, self.rounds)
        fit = Fit(plan)
        if self.compare.asks_lengths:  # so that no target is too far away to be attracted
            said = ask_all(net, self.say_length, dict.fromkeys(net.clients, fit))
            fit = Fit(plan, max(m.length for m in said.values()))
        seen = ask_all(net, self.measure, dict.fromkeys(plan.sources, fit))
        kernel = torch.stack([m.kernel for m in seen.values()]).mean(0)  # Eq. 7
        plan = plan.with_kernel(Polynomial(tuple(kernel.tolist())))
        received: dict[ClientId, Letters] = {}
        done: list[Mapping[ClientId, Mail | Moved]] = []
        for i in range(self.exchanges):
            if self.pooled and received:  # pooled sources need their common weights before they offer again
                s, moved = self.move(s, net, plan, lr, received, more=False)
                done, received = [*done, moved], {}
            s, moved = self.move(s, net, plan, lr, received, secrets if not i else {})  # Eqs. 2, 8, 9; then offers
            mail = ask_all(net, self.answer, relayed(plan, moved))  # Eqs. 11-15
            done += [moved, mail]
            if self.protocol != "packed":
                mail = ask_all(net, self.unveil, relayed(plan, mail))  # Section 4.2.2
                done.append(mail)
            received = {c: m.received for c, m in relayed(plan, mail).items()}
        s, moved = self.move(s, net, plan, lr, received, more=False)
        log(net, [*done, moved], lr=lr)
        if self.classes == "shared" and net.round == self.rounds - 1:  # the end of Section 4.2.3
            self.finish(s, net, plan)
        if self.noise:
            net.log(epsilon_of_a_batch=epsilon(self.noise))
        return replace(s, exchange=s.exchange + self.exchanges)

    def move(
        self, s: Server, net: Network, plan: Plan, lr: float, received: Mapping[ClientId, Letters],
        secrets: Mapping[ClientId, Letters] = {}, more: bool = True,
    ) -> tuple[Server, Replies[Moved]]:  # fmt: skip
        """Every client learns from the answers and makes new offers; pooled sources use their mean weights."""
        common = {c: (s.theta, s.head) for c in plan.sources if self.pooled}
        none: tuple[Weights, Weights] = ({}, {})
        moved = ask_all(
            net, self.advance,
            {
                c: Advance(plan, received.get(c, {}), secrets.get(c, {}), *common.get(c, none), lr, more)
                for c in net.clients
            },
        )  # fmt: skip
        if self.pooled and received:
            parts = [moved[c].masked for c in plan.sources]
            found = unjoined(mean_of_masked(parts, joined(s.theta, s.head)))
            s = replace(s, theta=found[0], head=found[1])
        return s, moved

    def finish(self, s: Server, net: Network, plan: Plan) -> None:
        """The target gets the sources' classifiers, which it alone can read; of pooled sources the common one."""
        if self.pooled:
            self.log_test(net, self.predict, plan.target, Common(s.head))
            return
        handed = ask_all(net, self.hand_over, dict.fromkeys(plan.sources, Relayed(plan)))
        post = session.deliver({c: (m.letters, m.tags) for c, m in handed.items()})
        self.log_test(net, self.conclude, plan.target, Relayed(plan, post[plan.target]))

    def log_test(self, net: Network, step: BoundStep[M, Predicted], target: ClientId, message: M) -> None:
        """Log how well the target predicts."""
        net.log(**ask_all(net, step, {target: message})[target].figures)

    @client_step(trains=lambda self, client, msg: self.training.work(msg.lr, len(client.data.train)))
    def fit(self, client: Client, msg: Begin) -> Pretrained:
        """Eq. 1, at a source."""
        client.state.update(begun(msg.theta, msg.head))
        loss = self._learner(client, True, msg.lr).fit()
        client.state.pop("momentum")
        return Pretrained(client.state["theta"], self._shared(client), loss)

    @client_step(trains=nothing)
    def hello(self, client: Client, msg: Begin) -> Card:
        client.state.update(begun(msg.theta, msg.head))
        return Card(self.say_hello(client.id, client.state, max(self.training.batch_size, self.target_batch)))

    @client_step(trains=nothing)
    def introduce(self, client: Client, msg: Relayed) -> Mail:
        self._check(msg.plan, msg.received)
        client.state["roles"] = (*msg.plan.sources, msg.plan.target)
        return Mail(self.send_secrets(client.id, client.state, msg.plan, msg.received), {}, {})

    @client_step(trains=nothing)
    def say_length(self, client: Client, msg: Fit) -> Length:
        """How long features are, once a round; batches are drawn as if this had not been asked."""
        return Length(spoken_length(self._learner(untouched(client), False, 0.0).sample()))

    @client_step(trains=nothing)
    def measure(self, client: Client, msg: Fit) -> Measured:
        """The kernel that suits a source's features, once a round."""
        kernel = self.compare.polynomial(self._learner(client, True, 0.0).sample(), msg.longest)
        return Measured(torch.tensor(kernel.c, dtype=torch.float64))

    @client_step(trains=lambda self, client, msg: self.work(msg, client.id))
    def advance(self, client: Client, msg: Advance) -> Moved:
        """Learn from the answers to the last batches, then offer the next ones."""
        if msg.theta:
            client.state.update(begun(msg.theta, msg.head))
        party = self._party(client, msg.plan, msg.lr, msg.secrets)
        with counted() as counts:
            metrics = party.learn(msg.received) if msg.received else {}
            letters, tags = party.offer(party.learner) if msg.more else ({}, {})
        masked: Weights = {}
        # received data is not sent back: masks of an exchange are used once
        if self.pooled and client.id != msg.plan.target and msg.received:
            masked = party.mask(joined(client.state["theta"], self._shared(client)))
        return Moved(letters, tags, masked, metrics | counts)

    @client_step(trains=nothing)
    def answer(self, client: Client, msg: Relayed) -> Mail:
        with counted() as counts:
            letters, tags = self._party(client, msg.plan).answer(msg.received)
        return Mail(letters, tags, counts)

    @client_step(trains=nothing)
    def unveil(self, client: Client, msg: Relayed) -> Mail:
        with counted() as counts:
            letters, tags = self._party(client, msg.plan).unveil(msg.received)
        return Mail(letters, tags, counts)

    @client_step(trains=nothing)
    def hand_over(self, client: Client, msg: Relayed) -> Mail:
        """A source's classifier, once, at the end, for the target alone."""
        if self.pooled or self.classes != "shared" or client.id == msg.plan.target:
            raise PublicError("the server asks for a classifier that this run keeps here")
        return Mail(*self._party(client, msg.plan).hand_over(self.rounds * self.exchanges), {})

    @client_step(trains=nothing)
    def conclude(self, client: Client, msg: Relayed) -> Predicted:
        """The target's extractor with the average of the sources' classifiers, on its own test data."""
        return self._test(client, self._party(client, msg.plan).take_over(msg.received, lambda: self._head(client)))

    @client_step(trains=nothing)
    def predict(self, client: Client, msg: Common) -> Predicted:
        """The same with the sources' common classifier."""
        if msg.theta:
            client.state["theta"] = msg.theta
        return self._test(client, [self._head(client, msg.head)])

    def _test(self, client: Client, heads: Sequence[Any]) -> Predicted:
        return Predicted(quality(client, self._learner(client, False, 0.0).model, heads, self.tested == "all"))

    def _head(self, client: Client, weights: Weights | None = None) -> Any:
        return new_head(self._kind, client.data.n_classes, client.embedding, weights)

    def work(self, msg: Advance, client: ClientId) -> Work | None:
        """A gradient step for each batch that was offered before; none in the first exchange."""
        return Work(msg.lr, self.batches, msg.plan.size(client)) if msg.received else None

    def _party(
        self, client: Client, plan: Plan, lr: float = 0.0, secrets: Mapping[ClientId, bytes] = {}
    ) -> LearningParty:
        end = self.open_session(client.id, client.state, secrets)
        self._check(plan, end.keys)
        if tuple(client.state["roles"]) != (*plan.sources, plan.target):  # a target answers without masks
            raise PublicError("the server's plan gives the clients other roles than before")
        learner = self._learner(client, client.id != plan.target, lr)
        return LearningParty(client.state, plan, end, learner, self.weight)

    def _check(self, plan: Plan, clients: Iterable[ClientId]) -> None:
        """Refuse another plan than this run's: a client computes only what its settings say."""
        if sorted((*plan.sources, plan.target)) != sorted(clients):  # a smaller sum would reveal more of this client
            raise PublicError("the server's plan is not for the clients of this session")
        if self.target not in ("", plan.target):
            raise PublicError(f"the server's plan has another target than {self.target}")
        if plan != self._plan(plan.length, plan.sources, plan.target).with_kernel(plan.kernel):
            raise PublicError("the server's plan differs from this client's settings")

    def _learner(self, client: Client, labelled: bool, lr: float) -> Learner:
        is_target = client.id == client.state.get("roles", ("",))[-1]
        return Learner(
            client, self.training_of(is_target), self.compare, self._kind, labelled, lr, self.optimiser,
            self.unlabelled(is_target),
        )  # fmt: skip

    @property
    def _kind(self) -> HeadSettings | None:
        """Of the classifier; None: a regressor."""
        return self.head if self.task == "classify" else None

    def _shared(self, client: Client) -> Weights:
        head: Weights = client.state["head"] if self.classes == "shared" else {}
        return head

    def personal(self, state: State, theta: Weights | None) -> Weights | None:
        return theta if self.pooled and "head" in state else state.get("theta", theta)  # a pooled source has no own


def ask_all(net: Network, step: BoundStep[M, R], messages: Mapping[ClientId, M]) -> Replies[R]:
    """Ask; the protocol needs every reply."""
    return net.ask(step, messages, min_replies=len(messages))


def meet(
    net: Network, hello: BoundStep[M, Card], introduce: BoundStep[Relayed, Mail], begin: Mapping[ClientId, M],
    plan: Plan,
) -> tuple[Letters, dict[ClientId, Letters]]:  # fmt: skip
    """The clients' hellos, and for each client the sealed secrets that the others sent it."""
    hellos = {c: card.hello for c, card in ask_all(net, hello, begin).items()}
    mail = ask_all(net, introduce, dict.fromkeys(begin, Relayed(plan, hellos)))
    return hellos, {c: {other: m.letters[c] for other, m in mail.items() if c in m.letters} for c in begin}


def relayed(plan: Plan, replies: Mapping[ClientId, Any]) -> dict[ClientId, Relayed]:
    """Requests with the messages that each client got; a client without messages gets none."""
    post = session.deliver({c: (m.letters, m.tags) for c, m in replies.items()})
    return {c: Relayed(plan, post[c]) for c in replies}


def joined(theta: Weights, head: Weights) -> Weights:
    """Extractor and classifier as one set of weights."""
    return {f"theta.{k}": v for k, v in theta.items()} | {f"head.{k}": v for k, v in head.items()}


def unjoined(weights: Weights) -> tuple[Weights, Weights]:
    """The extractor and the classifier again."""
    theta, head = ({k.partition(".")[2]: v for k, v in weights.items() if k.startswith(p)} for p in ("theta.", "head."))
    return theta, head


def head_of(how: HeadSettings, setup: Setup) -> Weights:
    """The common classifier of a file, where one is given; else none yet."""
    head = given_head(how, setup)
    if head and len(head["weight"]) != setup.classes:
        raise UsageError(f"model.class_vectors holds {len(head['weight'])} classes, the data have {setup.classes}")
    return head


def log(net: Network, replies: Sequence[Mapping[ClientId, Any]], **more: float) -> None:
    """Over all steps of a round: losses as means over the clients that know them, operations by client and as sums."""
    losses: list[tuple[dict[str, float], float]] = []
    counts: dict[ClientId, dict[str, float]] = {}
    for client, metrics in ((client, reply.figures) for step in replies for client, reply in step.items()):
        mine = counts.setdefault(client, dict.fromkeys(OPERATIONS, 0.0))
        counts[client] = {name: value + metrics.get(name, 0.0) for name, value in mine.items()}
        losses.append(({name: value for name, value in metrics.items() if name not in OPERATIONS}, 1))
    sums = {name: sum(mine[name] for mine in counts.values()) for name in OPERATIONS}
    net.log(**mean_metrics(losses) | sums | more)
    for client, mine in counts.items():
        net.log_client(client, **mine)
