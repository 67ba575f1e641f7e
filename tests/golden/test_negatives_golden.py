"""Negatives from other clients against slow loops: the softmax with further rows, a round of each kind, the noise."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests import pretended
from tests.e2e.smoke import smoke
from tests.golden.test_fedavg_golden import TRAINING
from tests.golden.test_fedfr_da_golden import HEAD, LR, MOMENTUM, begin
from tests.golden.test_fedfr_da_golden import TRAINING as OF_DA
from tests.golden.test_fedfr_da_golden import method as fedfr_da
from tests.toys import first_step, noise_faces, toy_engine, toy_network, toy_world
from torch import Tensor, nn

import visard
from visard.core import Disclosure
from visard.crypto.moments import epsilon
from visard.data.augment import augment, to_float
from visard.data.faces import FaceView
from visard.deployment.policy import Policy
from visard.engines.local import LocalNetwork
from visard.engines.world import World, derive, generator
from visard.errors import PublicError, UsageError, VisardError
from visard.learning.heads import HeadSettings
from visard.learning.train import batches
from visard.methods.domain_adaptation import SOURCE
from visard.methods.fedavg import FedAvg
from visard.methods.hf_maml import HFMaml, MetaTraining
from visard.methods.negatives import FARTHEST, Against, NegativeSettings, Show, corrected, near, with_noise
from visard.numerics import computing_on, on_device
from visard.report.run_folder import read_events

SCALE, MARGIN = 16.0, 0.2
COSFACE = HeadSettings("cosface", SCALE, MARGIN)


def slow_loss(f: Tensor, W: Tensor, y: Tensor, negatives: Tensor, kind: str = "cosface") -> Tensor:
    """The mean over the batch of the formula, a term at a time."""
    losses = []
    for i, label in enumerate(y.tolist()):
        sums = torch.zeros(())
        for j in range(len(W)):
            cos = torch.dot(f[i], W[j]) / f[i].norm() / W[j].norm()
            if j == label:
                own = SCALE * (cos - MARGIN if kind == "cosface" else torch.cos(torch.arccos(cos) + MARGIN))
            sums = sums + torch.exp(own if j == label else SCALE * cos)
        for v in negatives:
            sums = sums + torch.exp(SCALE * torch.dot(f[i], v) / f[i].norm() / v.norm())
        losses.append(torch.log(sums) - own)
    return torch.stack(losses).mean()


@pytest.mark.parametrize("kind", ["cosface", "arcface"])
def test_the_softmax_has_further_rows(kind: str) -> None:
    torch.manual_seed(1)
    head = HeadSettings(kind, SCALE, MARGIN).build(4, 6)
    f = torch.randn(5, 6, requires_grad=True)
    y, rows = torch.tensor([0, 3, 1, 1, 2]), torch.randn(7, 6)
    fast = torch.autograd.grad(Against(head, rows).loss(f, y), [f, head.weight])  # type: ignore[arg-type]
    slow = torch.autograd.grad(slow_loss(f, head.weight, y, rows, kind), [f, head.weight])
    for a, b in zip(fast, slow, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert [name for name, _ in Against(head, rows).named_parameters()] == ["head.weight"], "nothing trains the rows"  # type: ignore[arg-type]
    with pytest.raises(VisardError, match="outside the head's 4 classes"):
        Against(head, rows).loss(f, torch.tensor([0, 3, 1, 1, 4]))  # type: ignore[arg-type]


def test_rows_go_where_the_features_are() -> None:
    """Rows come from messages, on the CPU; the head and the features are on the device of the process."""
    torch.manual_seed(1)
    head, f, rows = COSFACE.build(4, 6), torch.randn(5, 6), torch.randn(7, 6)
    y = torch.tensor([0, 3, 1, 1, 2])
    expected = Against(head, rows).loss(f, y)  # type: ignore[arg-type]
    with computing_on(pretended.DEVICE) as device:
        found = on_device(Against(head, rows)).loss(f.to(device), y.to(device))  # type: ignore[arg-type]
    torch.testing.assert_close(found.detach().cpu(), expected.detach())


def slow_round(
    net: LocalNetwork, client: str, view: FaceView, labels: Tensor, theta: dict[str, Tensor], W: Tensor,
    negatives: Tensor, training: object, place: tuple[str, int, int, str], kind: str, decay: float,
) -> dict[str, Tensor]:  # fmt: skip
    """One client's round in plain PyTorch, from the class vectors that it has."""
    rng = generator(net.world.seed, *place)
    torch.manual_seed(derive(net.world.seed, *place, "default"))
    model, W = toy_network(), nn.Parameter(W.clone())
    model.load_state_dict(theta)
    parameters = [*model.parameters(), W]
    velocity = [torch.zeros_like(p) for p in parameters]
    model.train()
    for chosen in batches(len(view), training, rng):  # type: ignore[arg-type]
        x = augment(to_float(view.batch(chosen)), rng, training.augment)  # type: ignore[attr-defined]
        loss = slow_loss(model(x), W, labels[chosen], negatives, kind)
        with torch.no_grad():
            for p, g, v in zip(parameters, torch.autograd.grad(loss, parameters), velocity, strict=True):
                v.mul_(MOMENTUM).add_(g + decay * p)
                p.sub_(LR * v)
    return {k: v.detach().clone() for k, v in model.state_dict().items()}


def mean_of(thetas: list[dict[str, Tensor]], sizes: list[int]) -> dict[str, Tensor]:
    return {
        k: sum(n * theta[k].double() for n, theta in zip(sizes, thetas, strict=True)) / sum(sizes)  # type: ignore[misc]
        for k, v in thetas[0].items() if v.is_floating_point()
    }  # fmt: skip


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for key, value in expected.items():
        torch.testing.assert_close(found[key].double(), value, rtol=1e-4, atol=5e-5)


def test_class_vectors_of_the_others_in_a_round_of_fedavg(tmp_path: Path) -> None:
    """The first round has none; in the second the negatives of a client are the heads of the others after the first."""
    how = FedAvg(rounds=2, training=replace(TRAINING, schedule="constant"), head=COSFACE, negatives="class_vectors")
    net = toy_engine(tmp_path, toy_world(tmp_path))
    s = how.start(net.world.setup())
    net.begin("federate", 0)
    s = how.round(s, net)
    heads = {c: net.states.client_state(c)["head"]["weight"].clone() for c in net.clients}
    assert all(torch.equal(s.shown[c], heads[c]) for c in net.clients)
    slow = []
    for c in net.clients:
        view = net.world.clients[c].train
        others = torch.cat([heads[k] for k in net.clients if k != c])
        place = ("federate", 1, 1, c)
        slow.append(
            slow_round(net, c, view, torch.from_numpy(view.labels), s.theta, heads[c], others, how.training, place,
                       "cosface", how.training.weight_decay)
        )  # fmt: skip
    net.begin("federate", 1)
    after = how.round(s, net)
    same(after.theta, mean_of(slow, [len(net.world.clients[c].train) for c in net.clients]))


def slow_correction(shown: dict[str, Tensor], step: float) -> dict[str, Tensor]:
    """FedGC's regulariser term by term, and one step down its slope."""
    moved = {}
    for client, rows in shown.items():
        w, losses = rows.clone().requires_grad_(), []
        for i in range(len(rows)):
            own = torch.exp(SCALE * torch.dot(w[i], rows[i]) / w[i].norm() / rows[i].norm())
            others = torch.zeros(())
            for other, vectors in shown.items():
                for v in vectors if other != client else ():
                    others = others + torch.exp(SCALE * torch.dot(w[i], v) / w[i].norm() / v.norm())
            losses.append(-torch.log(own / (own + others)))
        moved[client] = rows - step * torch.autograd.grad(torch.stack(losses).sum(), w)[0]
    return moved


def test_class_vectors_of_different_clients_move_apart() -> None:
    torch.manual_seed(2)
    shown = {c: torch.randn(n, 6) for c, n in (("a", 3), ("b", 1), ("c", 4))}
    found, expected = corrected(shown, SCALE, 0.3), slow_correction(shown, 0.3)
    for c in shown:
        torch.testing.assert_close(found[c], expected[c], rtol=1e-4, atol=1e-5)
        assert not torch.allclose(found[c], shown[c], atol=1e-3)
    alone = corrected({"a": shown["a"], "b": torch.zeros(0, 6)}, SCALE, 0.3)
    assert torch.equal(alone["a"], shown["a"]), "nothing to keep away from"


def test_corrected_class_vectors_in_a_round_of_fedavg(tmp_path: Path) -> None:
    """In the second round a client begins with its class vectors as the server moved them, and sees no other's."""
    how = FedAvg(rounds=2, training=replace(TRAINING, schedule="constant"), head=COSFACE, negatives="corrected")
    net = toy_engine(tmp_path, toy_world(tmp_path))
    s = how.start(net.world.setup())
    net.begin("federate", 0)
    s = how.round(s, net)
    heads = {c: net.states.client_state(c)["head"]["weight"].clone() for c in net.clients}
    slow, moved = [], slow_correction(heads, 1.0)
    for c in net.clients:
        torch.testing.assert_close(s.shown[c], moved[c], rtol=1e-4, atol=1e-5)
        view, place = net.world.clients[c].train, ("federate", 1, 1, c)
        slow.append(
            slow_round(net, c, view, torch.from_numpy(view.labels), s.theta, moved[c], torch.zeros(0, 1), how.training,
                       place, "cosface", how.training.weight_decay)
        )  # fmt: skip
    net.begin("federate", 1)
    after = how.round(s, net)
    same(after.theta, mean_of(slow, [len(net.world.clients[c].train) for c in net.clients]))
    wrong = {c: rows[:-1] for c, rows in s.shown.items()}
    net.begin("federate", 2)
    with pytest.raises(VisardError, match="corrected class vectors for"):
        how.round(replace(s, shown=wrong), net)


def test_hf_maml_learns_against_them_too(tmp_path: Path) -> None:
    """The second round differs from that without negatives, and the first does not."""
    thetas = {}
    for kind in ("none", "class_vectors"):
        how = HFMaml(rounds=2, head=COSFACE, training=MetaTraining(batch_size=4, steps=2), negatives=kind)  # type: ignore[arg-type]
        net = toy_engine(tmp_path / kind, toy_world(tmp_path))
        s, thetas[kind] = how.start(net.world.setup()), []
        for r in range(2):
            net.begin("federate", r)
            s = how.round(s, net)
            thetas[kind].append(s.theta["5.weight"].clone())
    assert torch.equal(thetas["none"][0], thetas["class_vectors"][0])
    assert not torch.equal(thetas["none"][1], thetas["class_vectors"][1])


def test_class_vectors_of_the_others_in_the_first_round_of_fedfr_da(tmp_path: Path) -> None:
    """Targets show the means of their clusters before the first round; the source is shown none and shows none."""
    how = fedfr_da(negatives="class_vectors", dcl=0.0)
    net, s = begin(tmp_path, how)
    starts = {c: net.states.client_state(c)["start"]["weight"].clone() for c in s.labelled}
    assert {c: rows.shape for c, rows in s.shown.items()} == {c: rows.shape for c, rows in starts.items()}
    slow = []
    for c in (SOURCE, *s.labelled):
        view, place = net.world.clients[c].train, ("federate", 0, 1, c)
        if c == SOURCE:
            torch.manual_seed(derive(net.world.seed, *place, "default"))
            labels, W = torch.from_numpy(view.labels), torch.randn(view.n_classes, 8) / math.sqrt(8)
        else:
            kept = net.states.client_state(c)["labels"] >= 0
            view, labels, W = view.take(kept.numpy()), net.states.client_state(c)["labels"][kept], starts[c]
        others = torch.cat([starts[k] for k in s.labelled if k != c]) if c != SOURCE else torch.zeros(0, 8)
        slow.append(slow_round(net, c, view, labels, s.theta, W, others, OF_DA, place, HEAD.kind, OF_DA.weight_decay))
    net.begin("federate", 0)
    after = how.round(s, net)
    same(after.theta, mean_of(slow, [1, 1, 1]))
    assert list(after.shown) == s.labelled
    assert torch.equal(after.shown["target-0"], net.states.client_state("target-0")["head"]["weight"])


def public_world(folder: Path) -> World:
    faces = noise_faces(folder / "public", identities=9, images=4, seed=3)
    return toy_world(folder, public=FaceView.of(faces, np.arange(36)))


def test_public_people_near_the_own(tmp_path: Path) -> None:
    """Of each own person the nearest public ones by mean feature, and nothing more leaves than without."""
    how = FedAvg(
        rounds=2, training=TRAINING, head=COSFACE, head_start="means", negatives="public",
        negatives_by=NegativeSettings(nearest=2),
    )  # fmt: skip
    net = toy_engine(tmp_path, public_world(tmp_path))
    s = how.start(net.world.setup())
    model = toy_network().eval()
    model.load_state_dict(s.theta)
    public = net.world.public
    assert public is not None

    def means(view: FaceView) -> list[Tensor]:
        with torch.no_grad():
            f = model(to_float(view.batch(np.arange(len(view)))))
        unit = f / f.norm(dim=1, keepdim=True)
        sums = [unit[view.labels == k].sum(0) for k in range(view.n_classes)]
        return [v / v.norm() for v in sums]

    slow = []
    for c in net.clients:
        view = net.world.clients[c].train
        own, others = means(view), means(public)
        chosen = set()
        for w in own:
            by_distance = sorted(range(len(others)), key=lambda k: -float(torch.dot(w, others[k])))
            chosen |= set(by_distance[:2])
        assert 2 <= len(chosen) < len(others)
        rows, place = torch.stack([others[k] for k in sorted(chosen)]), ("federate", 0, 1, c)
        slow.append(
            slow_round(net, c, view, torch.from_numpy(view.labels), s.theta, torch.stack(own), rows, how.training,
                       place, "cosface", how.training.weight_decay)
        )  # fmt: skip
    net.begin("federate", 0)
    after = how.round(s, net)
    same(after.theta, mean_of(slow, [len(net.world.clients[c].train) for c in net.clients]))
    assert not after.shown
    plain = FedAvg(rounds=2, training=TRAINING, head=COSFACE)
    assert how.leaving(True) == plain.leaving(True)
    with pytest.raises(UsageError, match=r"partition\.public_identities"):
        how.start(toy_world(tmp_path).setup())


def test_a_public_person_without_pictures_is_no_neighbour() -> None:
    public = torch.eye(4)
    public[1] = 0
    assert torch.equal(near(torch.tensor([[0.1, 0.9, 0.2, 0.3]]), public, 2), public[2:])
    assert len(near(torch.randn(3, 4), public, 99)) == 3


def test_the_noise() -> None:
    rows = torch.nn.functional.normalize(torch.randn(400, 128), dim=1)
    noisy = with_noise(rows, 0.25, b"mine")
    difference = (noisy - rows).double()
    assert abs(float(difference.std()) - 0.25 * FARTHEST) < 0.01
    assert abs(float(difference.mean())) < 0.01
    assert torch.equal(noisy, with_noise(rows, 0.25, b"mine")), "asked again, the same"
    assert not torch.equal(noisy, with_noise(rows, 0.25, b"yours")), "of the client's secret"
    other = with_noise(-rows, 0.25, b"mine")
    assert float(((other + rows) - (noisy - rows)).abs().mean()) > 0.1, (
        "other rows have other noise, which cannot be taken off"
    )


@pytest.mark.parametrize("which", ["fedavg", "fedfr-da"])
def test_noisy_rows_leave_once_and_the_run_logs_epsilon(tmp_path: Path, which: str) -> None:
    by = NegativeSettings(noise=0.5, after=1)
    if which == "fedavg":
        how = FedAvg(rounds=3, training=TRAINING, head=COSFACE, negatives="noisy", negatives_by=by)
        net = toy_engine(tmp_path, toy_world(tmp_path))
        s = how.start(net.world.setup())
    else:
        how = fedfr_da(negatives="noisy", negatives_by=by)  # type: ignore[assignment]
        net, s = begin(tmp_path, how)  # type: ignore[assignment]
    assert not s.shown
    seen, asked = [], []
    for r in range(3):
        net.begin("federate", r)
        s = how.round(s, net)
        seen.append(dict(s.shown))
        asked.append(net.traffic.asked)
    everyone, showing = len(net.clients), len([c for c in net.clients if c != SOURCE])
    assert asked == [everyone + showing, everyone, everyone], "each client shows its rows once"
    assert all(torch.equal(rows, seen[2][c]) for c, rows in seen[0].items())
    assert net.traffic.figures["epsilon_of_negatives"] == pytest.approx(epsilon(0.5))
    client = next(c for c in net.clients if c != SOURCE)
    again = net.ask(how.show_noisy, {client: Show(s.theta)})[client].vectors
    assert torch.equal(again, seen[0][client]), "whatever network it is asked with"
    rows = how.people(enter(net, client))[1]
    assert len(again) == int(rows.max()) + 1
    assert how.leaving(False) >= {Disclosure.noisy_vectors}
    assert Disclosure.class_vectors not in how.leaving(True)


def enter(net: LocalNetwork, client: str) -> object:
    from visard.engines.local import enter as entered
    from visard.engines.request import Request

    return entered(net.world, Request(client=client), net.states.client_state(client))


@pytest.mark.parametrize("how", [FedAvg(), HFMaml(), fedfr_da(), FedAvg(negatives="public")])
def test_without_them_nothing_is_shown(tmp_path: Path, how: FedAvg) -> None:
    """A server that asks nevertheless is refused, whatever the settings of its run say to others."""
    kinds = {Disclosure.class_vectors, Disclosure.noisy_vectors}
    assert kinds <= how.discloses
    assert not kinds & how.leaving(True)
    world = toy_world(tmp_path)
    for step in (how.show, how.show_noisy):
        with pytest.raises(PublicError, match=r"method\.negatives"):
            first_step(world, step, next(iter(world.clients)), Show(world.new_weights()))


def test_a_policy_names_them() -> None:
    safe = Policy(methods=("fedavg",))
    for kind, value in (("class_vectors", "class_vectors"), ("noisy", "noisy_vectors")):
        how = FedAvg(negatives=kind)  # type: ignore[arg-type]
        with pytest.raises(PublicError, match=value):
            safe.check_kinds(how.leaving(False), "fedavg would send")
        Policy(methods=("fedavg",), kinds=(*safe.kinds, value)).check_kinds(how.leaving(False), "fedavg would send")
    safe.check_kinds(FedAvg(negatives="public").leaving(False), "fedavg would send")


def test_settings_that_do_not_go_together() -> None:
    with pytest.raises(UsageError, match="softmax head has no rows"):
        FedAvg(head=HeadSettings("softmax"), negatives="public")
    with pytest.raises(UsageError, match="sphereface2 head has no rows"):
        fedfr_da(head=HeadSettings("sphereface2"), negatives="class_vectors")
    with pytest.raises(UsageError, match=r"method\.share_head"):
        FedAvg(share_head=True, negatives="class_vectors")


@pytest.mark.parametrize("kind", ["class_vectors", "noisy"])
@pytest.mark.usefixtures("quick_children")
def test_same_bits_on_the_pool(tmp_path: Path, kind: str) -> None:
    """Also with clusters, of which a client may have more than people; both ledgers have what was shown."""
    own = [f"method.negatives={kind}", "evaluation.every=0", "evaluation.clients=false"]
    made = {}
    for engine in ("local", "pool"):
        out = tmp_path / engine
        more = ["engine.kind=pool", "engine.workers=2"] if engine == "pool" else []
        visard.run("fedfr-da", out=out, overrides=[*smoke("fedfr-da"), *own, *more])
        made[engine] = [(out / name).read_bytes() for name in ("model.safetensors", "ledger.json")]
        if kind == "noisy":
            figures = [e.get("figures", {}) for e in read_events(out / "events.jsonl")]
            assert pytest.approx(epsilon(1.0)) in [f.get("epsilon_of_negatives") for f in figures]
    assert made["local"] == made["pool"]
    name, value = ("Vectors", "class_vectors") if kind == "class_vectors" else ("NoisyVectors", "noisy_vectors")
    assert f'"{name}"' in made["local"][1].decode()
    assert f'"{value}"' in made["local"][1].decode()
