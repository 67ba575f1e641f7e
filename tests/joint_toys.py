"""A small world with public people, and FedFR-joint (Liu et al. 2022) a second time: loops, float64, autograd."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.toys import noise_faces, toy_network
from visard.core import PUBLIC
from visard.data.augment import augment, to_float
from visard.data.faces import ClientData, FaceSet
from visard.data.partition import partition
from visard.data.partition_kinds import PartitionSettings
from visard.engines.world import World, generator
from visard.learning.train import batches
from visard.methods.fedfr_joint import FedFRJoint
from visard.numerics import Numerics


def joint_world(folder: Path, clients: int = 3, seed: int = 0) -> World:
    """Fourteen people: two to test on, four public ones, the rest over the clients."""
    faces = FaceSet.open(folder / "faces") if (folder / "faces").exists() else noise_faces(folder / "faces", 14, 7)
    settings = PartitionSettings(
        kind="equal", clients=clients, test_identities=2, public_identities=4, split=(0.6, 0.0, 0.4)
    )  # fmt: skip
    found = partition(faces, settings, seed).federation(faces)
    assert found.public is not None
    none = found.public.take([])
    return World(
        seed=seed, clients=found.clients | {PUBLIC: ClientData(found.public, none, none)},
        training=tuple(found.training), benchmarks=found.unseen, classes=found.identities, embedding=8,
        build=toy_network, numerics=Numerics(), public=found.public,
    )  # fmt: skip


def unit(v: Tensor) -> Tensor:
    return v / v.norm()


def slow_cosface(f: Tensor, vectors: Tensor, y: int, s: float, m: float) -> Tensor:
    """Eq. 1 and 3 for one feature: -log of the target's share."""
    cosines = [torch.dot(unit(f), unit(v)) for v in vectors]
    target = torch.exp(s * (cosines[y] - m))
    others = sum((torch.exp(s * c) for j, c in enumerate(cosines) if j != y), torch.zeros((), dtype=f.dtype))
    return -torch.log(target / (target + others))


def slow_contrast(f: Tensor, f_glob: Tensor, f_prev: Tensor, tau: float) -> Tensor:
    """Eq. 5 for one feature."""
    g = torch.exp(torch.dot(unit(f), unit(f_glob)) / tau)
    p = torch.exp(torch.dot(unit(f), unit(f_prev)) / tau)
    return -torch.log(g / (g + p))


def slow_bce(f: Tensor, omega: Tensor, b: Tensor, k: int | None, s: float, m: float, t: float, lam: float) -> Tensor:
    """Eq. 6 for one transformed feature with the repaired g; k = None: a picture of nobody here."""
    total = torch.zeros((), dtype=f.dtype)
    for j, w in enumerate(omega):
        g = 2 * ((torch.dot(unit(f), unit(w)) + 1) / 2) ** t - 1
        if j == k:
            total = total + lam / s * torch.log(1 + torch.exp(-s * (g - m) - b))
        else:
            total = total + (1 - lam) / s * torch.log(1 + torch.exp(s * (g + m) + b))
    return total


def slow_balanced_bias(K: int, s: float, m: float, t: float, lam: float) -> float:
    """The b at which lam sigma(-(a_y + b)) = (1 - lam)(K - 1) sigma(a_n + b), by bisection."""
    g0 = 2 * 0.5**t - 1

    def excess(b: float) -> float:
        pull = lam / (1 + math.exp(s * (g0 - m) + b))
        push = (1 - lam) * (K - 1) / (1 + math.exp(-(s * (g0 + m) + b)))
        return push - pull

    low, high = -100.0, 100.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) < 0 else (low, middle)
    return low


@dataclass
class SlowClient:
    """What a client has after its training, in float64."""

    theta: dict[str, Tensor]
    Phi: Tensor
    W: Tensor
    Pi: Tensor
    shift: Tensor  # of Pi
    Omega: Tensor
    b: Tensor
    hard: list[int]


def slow_features(theta: dict[str, Tensor], pictures: Any) -> Tensor:
    """Features in evaluation mode, one picture at a time."""
    model = toy_network().double()
    model.load_state_dict(theta)
    model.eval()
    with torch.no_grad():
        return torch.cat([model(to_float(p[None]).double()) for p in pictures])


def slow_training(
    world: World, method: FedFRJoint, client: str, round: int, theta: dict[str, Tensor], Phi: Tensor, lr: float,
    before: SlowClient | None,
) -> SlowClient:  # fmt: skip
    """ClientTraining of Algorithm 1."""
    rng = generator(world.seed, "federate", round, 1, client)
    own, public = world.clients[client].train, world.public
    assert public is not None
    every = range(len(own))
    f_own = slow_features(theta, own.batch(list(every)))
    f_public = slow_features(theta, public.batch(list(range(len(public)))))
    threshold = method.public.threshold
    hard = [i for i, p in enumerate(f_public) if max(float(unit(p) @ unit(o)) for o in f_own) > threshold]  # line 16
    K = own.n_classes
    means = [unit(torch.stack([unit(f_own[i]) for i in every if own.labels[i] == k]).sum(0)) for k in range(K)]
    how = method.branch
    W = (before.W if before else torch.stack(means)).clone().requires_grad_()
    Omega = (before.Omega if before else torch.stack(means)).clone().requires_grad_()
    Pi = (before.Pi if before else torch.eye(8, dtype=torch.float64)).clone().requires_grad_()
    shift = (before.shift if before else torch.zeros(8, dtype=torch.float64)).clone().requires_grad_()
    balanced = slow_balanced_bias(K, how.scale, how.margin, how.t, how.balance)
    start = balanced if how.bias_start == "balanced" else 0.0
    b = (before.b if before else torch.tensor([start], dtype=torch.float64)).clone().requires_grad_()
    Phi = Phi.double().clone().requires_grad_()
    model, glob = toy_network().double(), toy_network().double()
    model.load_state_dict(theta)
    glob.load_state_dict(theta)
    prev = toy_network().double()
    if before:
        prev.load_state_dict(before.theta)
    glob.eval(), prev.eval()
    labels = [int(y) for y in own.labels] + [K + int(public.labels[i]) for i in hard]
    parameters = [*model.parameters(), Phi, Pi, shift, W, Omega, b]
    velocity = [torch.zeros_like(p) for p in parameters]
    model.train()
    for chosen in batches(len(labels), method.training, rng):
        pictures = [own.batch([i])[0] if i < len(own) else public.batch([hard[i - len(own)]])[0] for i in chosen]
        x = augment(torch.cat([to_float(p[None]) for p in pictures]), rng, method.training.augment).double()
        f = model(x)
        with torch.no_grad():
            fg, fp = glob(x), prev(x)
        loss = torch.zeros((), dtype=torch.float64)
        for i, row in enumerate(chosen):
            y = labels[row]
            loss = loss + method.cosine_weight * slow_cosface(
                f[i], torch.cat([W, Phi]), y, method.head.scale, method.head.margin
            )
            if before:  # the first round has nothing to leave behind
                loss = loss + method.contrast.weight * slow_contrast(f[i], fg[i], fp[i], method.contrast.tau)
            loss = loss + how.weight * slow_bce(
                Pi @ f[i] + shift, Omega, b[0], y if y < K else None, how.scale, how.margin, how.t, how.balance
            )
        gradients = torch.autograd.grad(loss / len(chosen), parameters)  # lines 19-24
        with torch.no_grad():
            for p, g, v in zip(parameters, gradients, velocity, strict=True):
                v.mul_(method.training.momentum).add_(g + method.training.weight_decay * p)
                p.sub_(lr * v)
    after = {k: v.detach().clone() for k, v in model.state_dict().items()}
    return SlowClient(after, *(p.detach() for p in (Phi, W, Pi, shift, Omega, b)), hard)
