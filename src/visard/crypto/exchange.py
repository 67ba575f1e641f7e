r"""The sealed messages of one exchange of batches, whichever protocol computes them.

    packed   offer (own features, own key) -> answer (under the owner's key) -> take
    others   offer (own monomials, own key) -> answer (own masked gradient, the peer's key) -> unveil -> take

An offer is what a client sends of its batches, an answer what a peer computes from an offer and sends back. What a
client takes from the answers is $\sum_p w_p \nabla_{a_i} E_p k$ times its scale, for the weights of `Plan.weights`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from visard.crypto.forward import FRACTION, Forward
from visard.crypto.moments import gradient, mean_kernel, moments, noisy
from visard.crypto.packed import Packed, PackedCkks, Packing
from visard.crypto.session import TAG, Letters, Scheme, SealedMail, Session
from visard.learning.mmd import Polynomial

Variant = Literal["packed", "both", "chain_rule", "compressed", "naive"]
ByParameters = Callable[[int, Tensor], Tensor]  # batch, gradients by features (outputs, n, L) -> by parameters


@dataclass(frozen=True)
class Plan:
    """The parameters that all clients agree on."""

    variant: Variant
    kernel: Polynomial
    length: int  # L
    n: int  # samples of a batch of a source, and of the target's unless n_target says otherwise
    batches: int  # in one exchange
    bits: int
    sources: tuple[str, ...]
    target: str
    pooled: bool = False  # all sources are one domain (Eqs. 16, 17) instead of one each (Eqs. 18-20)
    loss: bool = False  # whether sources learn the loss
    sums: bool = True  # whether answers of several peers are masked, so that only their sum can be read
    noise: float = 0.0  # multiplier of the Gaussian noise on moments; packed alone
    scheme: Scheme = "paillier"  # ckks: packed alone
    n_target: int = 0  # samples of a batch of the target; 0: the same as for a source

    def with_kernel(self, kernel: Polynomial) -> Plan:
        return replace(self, kernel=kernel)

    def size(self, owner: str) -> int:
        """Samples of a client's batch: n_s or n_t."""
        return self.n_target or self.n if owner == self.target else self.n

    @property
    def largest(self) -> int:
        """Samples of the largest batch."""
        return max(self.n, self.n_target)

    def packed(self, owner: str) -> Packing:
        """How a client's batches are packed."""
        if self.scheme == "ckks":
            return PackedCkks(self.kernel, self.length, self.size(owner), self.largest)
        return Packed(self.kernel, self.length, self.bits)

    @property
    def forward(self) -> Forward:
        return Forward(self.kernel, self.length, self.variant in ("both", "compressed"))

    def weights(self, owner: str) -> dict[str, float]:
        """The peers of a client and how much their mean kernel counts in its gradient."""
        S = len(self.sources)
        if owner == self.target:
            return dict.fromkeys(self.sources, 1 / S)
        if not self.pooled:
            return {self.target: 1.0}
        others = {s: -self.n / (S * self.n - 1) for s in self.sources if s != owner}
        return {self.target: 1.0} | others

    def scale(self, owner: str) -> float:
        """-2 / n: L_p3 of a client's own batch; of pooled sources S times it, since their weights are averaged."""
        return -2 / self.size(owner)

    def share(self, owner: str) -> float:
        """The factor of the mean kernel inside a client's own batch; of pooled sources again S times it."""
        S = len(self.sources)
        return (self.n - 1) / (S * self.n - 1) if self.pooled and owner != self.target else 1.0

    def fellows(self, owner: str, me: str) -> list[str]:
        """The peers with which a client masks its answer to `owner`, which then can read the sum alone."""
        return [c for c in self.weights(owner) if c != me] if self.sums and self.variant == "packed" else []

    def partners(self, me: str) -> list[str]:
        """Everyone with whom a client needs a common secret."""
        owners = self.weights(me)
        return list(dict.fromkeys([*owners, *(c for o in owners for c in self.fellows(o, me))]))

    def name(self) -> bytes:
        """The same for the same plan, wherever it came from."""
        said = {k: v for k, v in asdict(self).items() if k != "n_target" or v}  # which came later
        return json.dumps(said, sort_keys=True).encode()

    def learns_loss(self, owner: str) -> bool:
        return self.loss and owner != self.target


def offer(session: Session, plan: Plan, features: Tensor) -> SealedMail:
    """Own batches (batches, n, L) for all peers."""
    how = plan.packed(session.me) if plan.variant == "packed" else plan.forward
    key: Any = session.lattice.private if session.lattice else session.private.public
    ciphers = [c for a in features for c in how.offer(key, a)]
    return _seal(session, plan, "offer", session.me, ciphers, list(plan.weights(session.me)))


def answer_packed(
    session: Session, plan: Plan, features: Tensor, offers: Mapping[str, bytes], extra: Tensor
) -> SealedMail:
    """To each peer, the own moments applied to its features; `extra` (batches,) is added to the loss it learns."""
    mail, own = [], plan.size(session.me)
    # once, so that all peers get the same noise
    said = [noisy(moments(b), own, plan.noise, session.noise_key(i, b)) for i, b in enumerate(features)]
    for owner in plan.weights(session.me):
        how, n = plan.packed(owner), plan.size(owner)
        size = how.offered(n)
        received = _open(session, plan, "offer", owner, owner, offers, size * plan.batches)
        weight, loss = plan.weights(owner)[session.me], plan.learns_loss(owner)
        key: Any = session.lattice.keys[owner] if session.lattice else session.keys[owner]
        ciphers: list[Any] = []
        for i, m in enumerate(said):
            mine = received[i * size : (i + 1) * size]
            ciphers += how.answer(key, mine, n, m, weight, loss, -float(extra[i]) / 2)
        if fellows := plan.fellows(owner, session.me):
            ciphers = how.mask(key, ciphers, session.masks(owner, fellows, plan.name() + offers[owner][:-TAG]))
        mail.append(_seal(session, plan, "answer", owner, ciphers, [owner]))
        if not session.lattice and plan.kernel.degree == 2:
            key.prepare(len(ciphers))  # for the next answer, while this client waits for the others
    return _together(mail)


def take_packed(
    session: Session, plan: Plan, features: Tensor, answers: Mapping[str, bytes]
) -> tuple[Tensor, Tensor | None]:
    """Gradients (batches, n, L) by own features, and the losses (batches,) if this client learns them."""
    me, weights = session.me, plan.weights(session.me)
    how, n, loss = plan.packed(me), plan.size(me), plan.learns_loss(me)
    size = how.answered(n, loss)
    received = [_open(session, plan, "answer", peer, me, answers, size * plan.batches) for peer in weights]
    key: Any = session.lattice.private if session.lattice else session.private
    summed, total = how.total(session.keys[me], received), sum(weights.values())
    gradients, losses = [], []
    for i, a in enumerate(features):
        values = how.values(key, summed[i * size : (i + 1) * size], n, loss)
        gradients.append(plan.scale(me) * gradient(a, values, plan.kernel, total))
        if loss:
            losses.append(-2 * float(mean_kernel(a, values, plan.kernel, total).mean()))
    return torch.stack(gradients), torch.tensor(losses, dtype=torch.float64) if loss else None


def answer_forward(
    session: Session, plan: Plan, features: Tensor, offers: Mapping[str, bytes], extra: Tensor, by: ByParameters | None
) -> tuple[SealedMail, Letters]:
    """To each peer, the own masked gradient under its key (and the loss, where it learns it); and the masks to keep.

    With `by` the gradient is by the parameters of the extractor (no chain rule), else by the features.
    """
    how, mail, masks = plan.forward, [], dict[str, bytes]()
    for peer, weight in plan.weights(session.me).items():
        size = how.offered(plan.size(peer))
        key, received = session.keys[peer], _open(session, plan, "offer", peer, peer, offers, size * plan.batches)
        ciphers: list[int] = []
        losses: list[int] = []
        kept: list[int] = []
        for i, a in enumerate(features):
            means = how.means(key, received[i * size : (i + 1) * size])
            slopes, known = how.terms.slopes(a)
            factor = plan.scale(session.me) * weight
            columns = factor * torch.cat([slopes, known[..., None]], 2)  # (n, L, monomials + 1)
            rows = by(i, columns.permute(2, 0, 1)).t() if by else columns.flatten(0, 1)
            masked, more = how.mask(key, how.combine(key, means, rows[:, :-1], rows[:, -1]))
            ciphers, kept = ciphers + masked, kept + more
            if plan.learns_loss(peer):
                factors, constant = how.terms.weights(a)
                losses += how.combine(key, means, -2 * factors[None], (extra[i] - 2 * constant)[None])
        mail.append(_seal(session, plan, "answer", peer, ciphers + losses, [peer]))
        key.prepare(len(ciphers) + len(losses))
        masks[peer] = b"".join(m.to_bytes(key.bits // 8, "big") for m in kept)
    return _together(mail), masks


def unveil(
    session: Session, plan: Plan, features: Tensor, answers: Mapping[str, bytes], outputs: Callable[[str], int]
) -> tuple[SealedMail, Tensor | None]:
    """Decrypt what the peers masked and send it back; `outputs` is the length of a client's gradient of one batch."""
    mail, losses, me = [], None, session.me
    length = session.private.public.bits // 8
    for owner in plan.weights(me):
        size = outputs(owner) * plan.batches
        learns = plan.learns_loss(me) and owner == plan.target
        ciphers = _open(session, plan, "answer", owner, me, answers, size + plan.batches * learns)
        masked = [m.to_bytes(length, "big") for m in plan.forward.unveil(session.private, ciphers[:size])]
        mail.append(session.seal("unveiled", me, masked, length, [owner]))
        if learns:
            plain = [session.private.decrypt(c) / (1 << 2 * FRACTION) for c in ciphers[size:]]
            own = torch.stack([plan.forward.terms.alone(b.double()) for b in features])
            losses = torch.tensor(plain, dtype=torch.float64) - 2 * own
    return _together(mail), losses


def take_forward(session: Session, plan: Plan, unveiled: Mapping[str, bytes], masks: Letters, outputs: int) -> Tensor:
    """The own gradient (batches, outputs), summed over the peers."""
    total = torch.zeros(plan.batches, outputs, dtype=torch.float64)
    for peer in plan.weights(session.me):
        key, data = session.keys[peer], unveiled.get(peer, b"")
        length = key.bits // 8
        parts = session.open("unveiled", peer, peer, data, length, outputs * plan.batches)
        own = [masks[peer][i : i + length] for i in range(0, len(masks[peer]), length)]
        numbers, masked = ([int.from_bytes(part, "big") for part in them] for them in (parts, own))
        total += plan.forward.unmask(key, numbers, masked, total.shape)
    return total


def _seal(session: Session, plan: Plan, kind: str, owner: str, ciphers: list[Any], to: list[str]) -> SealedMail:
    if plan.scheme == "ckks":
        return session.seal(kind, owner, ciphers, plan.packed(owner).cipher_bytes(kind), to)
    key = session.keys[owner]
    return session.seal(kind, owner, key.to_parts(ciphers), key.cipher_bytes, to)


def _open(
    session: Session, plan: Plan, kind: str, sender: str, owner: str, received: Mapping[str, bytes], count: int
) -> list[Any]:
    """The ciphertexts that came from `sender`; if none came, its seal is broken."""
    data, key = received.get(sender, b""), session.keys[owner]
    if plan.scheme == "ckks":  # whose numbers are checked where they are used
        return session.open(kind, sender, owner, data, plan.packed(owner).cipher_bytes(kind), count)
    return key.from_parts(session.open(kind, sender, owner, data, key.cipher_bytes, count), f"{kind} from {sender}")


def _together(mail: Sequence[SealedMail]) -> SealedMail:
    """Messages to several receivers as one posting."""
    return {to: m for letters, _ in mail for to, m in letters.items()}, {
        to: t for _, tags in mail for to, t in tags.items()
    }
