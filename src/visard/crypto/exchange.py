r"""The messages of one exchange of batches, whichever protocol computes them.

    packed   offer (own features, own key) -> answer (under the owner's key) -> take
    others   offer (own monomials, own key) -> answer (own masked gradient, the peer's key) -> unveil -> take

What a party takes is $\sum_p w_p \nabla_{a_i} E_p k$ times its scale, for the weights of `Plan.weights`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from visard.crypto.forward import FRACTION, Forward
from visard.crypto.moments import moments, noisy
from visard.crypto.packed import Packed
from visard.crypto.packed_ckks import PackedCkks
from visard.crypto.session import TAG, Letters, Scheme, SealedMail, Session
from visard.learning.mmd import Polynomial

Variant = Literal["packed", "both", "chain_rule", "compressed", "naive"]
ByParameters = Callable[[int, Tensor], Tensor]  # batch, gradients by features (outputs, n, L) -> by parameters


@dataclass(frozen=True)
class Plan:
    """What all parties agree on."""

    variant: Variant
    kernel: Polynomial
    length: int  # L
    n: int  # samples of a batch
    batches: int  # in one exchange
    bits: int
    sources: tuple[str, ...]
    target: str
    pooled: bool = False  # all sources are one domain (Eqs. 16, 17) instead of one each (Eqs. 18-20)
    loss: bool = False  # whether sources learn the loss
    sums: bool = True  # whether answers of several peers are masked, so that only their sum can be read
    noise: float = 0.0  # multiplier of the Gaussian noise on moments; packed alone
    scheme: Scheme = "paillier"  # ckks: packed alone

    def with_kernel(self, kernel: Polynomial) -> Plan:
        return replace(self, kernel=kernel)

    @property
    def packed(self) -> Any:
        """`Packed` or `PackedCkks`: alike but for their keys and ciphertexts."""
        if self.scheme == "ckks":
            return PackedCkks(self.kernel, self.length, self.n)
        return Packed(self.kernel, self.length, self.bits)

    @property
    def forward(self) -> Forward:
        return Forward(self.kernel, self.length, self.variant in ("both", "compressed"))

    def weights(self, owner: str) -> dict[str, float]:
        """The peers of a party and how much their mean kernel counts in its gradient."""
        S = len(self.sources)
        if owner == self.target:
            return dict.fromkeys(self.sources, 1 / S)
        if not self.pooled:
            return {self.target: 1.0}
        others = {s: -self.n / (S * self.n - 1) for s in self.sources if s != owner}
        return {self.target: 1.0} | others

    def scale(self) -> float:
        """-2 / n: L_p3 of a party's own batch; of pooled sources S times it, since their weights are averaged."""
        return -2 / self.n

    def share(self, owner: str) -> float:
        """The factor of the mean kernel inside a party's own batch; of pooled sources again S times it."""
        S = len(self.sources)
        return (self.n - 1) / (S * self.n - 1) if self.pooled and owner != self.target else 1.0

    def fellows(self, owner: str, me: str) -> list[str]:
        """With whom a party masks its answer to `owner`, which then can read the sum alone; none: it reads each."""
        return [c for c in self.weights(owner) if c != me] if self.sums and self.variant == "packed" else []

    def partners(self, me: str) -> list[str]:
        """Everyone with whom a party needs a common secret."""
        owners = self.weights(me)
        return list(dict.fromkeys([*owners, *(c for o in owners for c in self.fellows(o, me))]))

    def name(self) -> bytes:
        """The same for the same plan, wherever it came from."""
        return json.dumps(asdict(self), sort_keys=True).encode()

    def learns_loss(self, owner: str) -> bool:
        return self.loss and owner != self.target

    def answers(self, owner: str) -> int:
        """Ciphertexts of one answer to a party in the packed protocol."""
        return self.batches * int(self.packed.answered(self.n, self.learns_loss(owner)))


def offer(session: Session, plan: Plan, features: Tensor) -> SealedMail:
    """Own batches (batches, n, L) for all peers."""
    how = plan.packed if plan.variant == "packed" else plan.forward
    key: Any = session.lattice.private if session.lattice else session.private.public
    ciphers = [c for a in features for c in how.offer(key, a)]
    return _seal(session, plan, "offer", session.me, ciphers, list(plan.weights(session.me)))


def answer_packed(
    session: Session, plan: Plan, features: Tensor, offers: Mapping[str, bytes], extra: Tensor
) -> SealedMail:
    """To each peer, the own moments applied to its features; `extra` (batches,) is added to the loss it learns."""
    size, post = plan.packed.offered(plan.n), Posting()
    # once: all peers hear the same
    said = [noisy(moments(b), plan.n, plan.noise, session.noise_key(i, b)) for i, b in enumerate(features)]
    for owner in plan.weights(session.me):
        received = _open(session, plan, "offer", owner, owner, offers.get(owner, b""), size * plan.batches)
        weight, loss = plan.weights(owner)[session.me], plan.learns_loss(owner)
        key: Any = session.lattice.keys[owner] if session.lattice else session.keys[owner]
        ciphers: list[Any] = []
        for i, m in enumerate(said):
            mine = received[i * size : (i + 1) * size]
            more = -float(extra[i]) / 2
            ciphers += plan.packed.answer(key, mine, plan.n, m, weight, loss, more)
        if fellows := plan.fellows(owner, session.me):
            ciphers = plan.packed.mask(key, ciphers, session.masks(owner, fellows, plan.name() + offers[owner][:-TAG]))
        post.add(_seal(session, plan, "answer", owner, ciphers, [owner]))
    return post.done


def take_packed(
    session: Session, plan: Plan, features: Tensor, answers: Mapping[str, bytes]
) -> tuple[Tensor, Tensor | None]:
    """Gradients (batches, n, L) by own features, and the losses (batches,) if this party learns them."""
    weights, me = plan.weights(session.me), session.me
    size, loss = plan.answers(me) // plan.batches, plan.learns_loss(me)
    received = [_open(session, plan, "answer", p, me, answers.get(p, b""), size * plan.batches) for p in weights]
    key: Any = session.lattice.private if session.lattice else session.private
    summed, total = plan.packed.total(session.keys[me], received), sum(weights.values())
    gradients, losses = [], []
    for i, a in enumerate(features):
        values = plan.packed.values(key, summed[i * size : (i + 1) * size], plan.n, loss)
        gradients.append(plan.scale() * plan.packed.gradient(a, values, total))
        if loss:
            losses.append(-2 * plan.packed.mean_kernel(a, values, total))
    return torch.stack(gradients), torch.tensor(losses, dtype=torch.float64) if loss else None


def answer_forward(
    session: Session, plan: Plan, features: Tensor, offers: Mapping[str, bytes], extra: Tensor, by: ByParameters | None
) -> tuple[SealedMail, Letters]:
    """To each peer, the own masked gradient under its key (and the loss, where it learns it); and the masks to keep.

    With `by` the gradient is by the parameters of the extractor (no chain rule), else by the features.
    """
    how, post, masks = plan.forward, Posting(), dict[str, bytes]()
    size = how.offered(plan.n)
    for peer, weight in plan.weights(session.me).items():
        key = session.keys[peer]
        received = session.open("offer", peer, peer, offers.get(peer, b""), size * plan.batches)
        ciphers: list[int] = []
        losses: list[int] = []
        kept: list[int] = []
        for i, a in enumerate(features):
            means = how.means(key, received[i * size : (i + 1) * size])
            slopes, known = how.terms.slopes(a)
            columns = plan.scale() * weight * torch.cat([slopes, known[..., None]], 2)  # (n, L, monomials + 1)
            rows = by(i, columns.permute(2, 0, 1)).t() if by else columns.flatten(0, 1)
            masked, more = how.mask(key, how.combine(key, means, rows[:, :-1], rows[:, -1]))
            ciphers, kept = ciphers + masked, kept + more
            if plan.learns_loss(peer):
                factors, constant = how.terms.weights(a)
                losses += how.combine(key, means, -2 * factors[None], (extra[i] - 2 * constant)[None])
        post.add(session.seal("answer", peer, ciphers + losses, [peer]))
        masks[peer] = b"".join(m.to_bytes(key.bits // 8, "big") for m in kept)
    return post.done, masks


def unveil(
    session: Session, plan: Plan, answers: Mapping[str, bytes], outputs: int
) -> tuple[SealedMail, Tensor | None]:
    """Decrypt what the peers masked and send it back; `outputs` is the length of one batch's gradient."""
    post, losses, me = Posting(), None, session.me
    size = outputs * plan.batches
    for owner in plan.weights(me):
        learns = plan.learns_loss(me) and owner == plan.target
        count = size + plan.batches * learns
        ciphers = session.open("answer", owner, me, answers.get(owner, b""), count)
        post.add(session.seal_plain("unveiled", me, plan.forward.unveil(session.private, ciphers[:size]), owner))
        if learns:
            plain = [session.private.decrypt(c) / (1 << 2 * FRACTION) for c in ciphers[size:]]
            losses = torch.tensor(plain, dtype=torch.float64)
    return post.done, losses


def take_forward(session: Session, plan: Plan, unveiled: Mapping[str, bytes], masks: Letters, outputs: int) -> Tensor:
    """The own gradient (batches, outputs), summed over the peers."""
    total = torch.zeros(plan.batches, outputs, dtype=torch.float64)
    for peer in plan.weights(session.me):
        key = session.keys[peer]
        length = key.bits // 8
        numbers = session.open_plain("unveiled", peer, peer, unveiled.get(peer, b""), outputs * plan.batches)
        own = [int.from_bytes(masks[peer][i : i + length], "big") for i in range(0, len(masks[peer]), length)]
        total += plan.forward.unmask(key, numbers, own, total.shape)
    return total


def _seal(session: Session, plan: Plan, kind: str, owner: str, ciphers: list[Any], to: list[str]) -> SealedMail:
    if plan.scheme == "ckks":
        return session.seal_parts(kind, owner, ciphers, plan.packed.cipher_bytes(kind), to)
    return session.seal(kind, owner, ciphers, to)


def _open(session: Session, plan: Plan, kind: str, sender: str, owner: str, data: bytes, count: int) -> list[Any]:
    if plan.scheme == "ckks":
        return session.open_parts(kind, sender, owner, data, plan.packed.cipher_bytes(kind), count)
    return session.open(kind, sender, owner, data, count)


class Posting:
    """Gathers what goes to several receivers."""

    def __init__(self) -> None:
        self.done: SealedMail = ({}, {})

    def add(self, post: SealedMail) -> None:
        for mine, more in zip(self.done, post, strict=True):
            mine.update(more)
