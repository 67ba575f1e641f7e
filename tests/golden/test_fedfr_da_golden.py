"""FedFR-DA against slow loops: Eqs. 1-3, and Algorithm 1 with plain autograd, line by line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.e2e.smoke import smoke
from tests.property.test_finch_property import literal_cfinch
from tests.toys import noise_faces, toy_engine, toy_network
from torch import Tensor, nn

from visard.clustering.cluster import Clustering
from visard.data.augment import Augment, augment, to_float
from visard.data.faces import FaceSet
from visard.data.partition import partition
from visard.data.partition_kinds import PartitionSettings
from visard.deployment.join import refuse_oracle
from visard.engines.local import LocalNetwork
from visard.engines.world import World, derive, generator
from visard.errors import UsageError, VisardError
from visard.learning.heads import HeadSettings
from visard.learning.train import Training, batches, train
from visard.methods.domain_adaptation import DAN, DANN, SOURCE
from visard.methods.fedfr_da import Down, FedFRDA, Server
from visard.methods.finetune import FineTune
from visard.numerics import Numerics
from visard.report.run_folder import read_events
from visard.runs.run import run

LAMBDA, E, LR, MOMENTUM, DECAY = 0.7, 5, 0.05, 0.9, 0.01
TRAINING = Training(
    lr=LR, batch_size=4, clip=0.0, momentum=MOMENTUM, weight_decay=DECAY, unit="iterations", amount=E,
    augment=Augment(flip=True), schedule="constant",
)  # fmt: skip
HEAD = HeadSettings("arcface", 16.0, 0.2)


def domain_world(folder: Path, targets: int = 2) -> World:
    """Noise faces; people with an odd number are the source, the others belong to the targets."""
    faces = noise_faces(folder / "faces", identities=16, images=8)
    settings = PartitionSettings(
        kind="domains", clients=targets, source_domain="Male", target_domain="!Male", test_identities=2,
        split=(0.75, 0.0, 0.25),
    )  # fmt: skip
    federation = partition(FaceSet.open(faces.path), settings, 0).federation(faces)
    return World(
        seed=0, clients=federation.clients, training=tuple(federation.training), benchmarks=federation.unseen,
        classes=federation.identities, embedding=8, build=toy_network, numerics=Numerics(),
        start_from={k: v.clone() for k, v in toy_network().state_dict().items()},
    )  # fmt: skip


def method(**changes: object) -> FedFRDA:
    settings = {
        "rounds": 3, "training": TRAINING, "head": HEAD, "dcl": LAMBDA, "clustering": Clustering(d=0.5),
        "source_head": "random",
    }  # fmt: skip
    return FedFRDA(**(settings | changes))  # type: ignore[arg-type]


def begin(folder: Path, how: FedFRDA, targets: int = 2) -> tuple[LocalNetwork, Server]:
    """A network and the server after stage 2."""
    torch.manual_seed(5)
    net = toy_engine(folder, domain_world(folder, targets))
    server = how.start(net.world.setup())
    net.begin("label", 0)
    return net, how.label_all(server, net)


def slow_arcface(features: Tensor, W: Tensor, labels: Tensor, s: float, m: float) -> Tensor:
    """Mean over the batch, written out with arccos."""
    losses = []
    for f, y in zip(features, labels.tolist(), strict=True):
        cos = (W / W.norm(dim=1, keepdim=True)) @ (f / f.norm())
        logits = s * cos
        target = s * torch.cos(torch.arccos(cos[y]) + m)
        others = torch.cat([logits[:y], logits[y + 1 :], target[None]])
        losses.append(torch.logsumexp(others, 0) - target)
    return torch.stack(losses).mean()


def slow_client(
    net: LocalNetwork, client: str, theta: dict[str, Tensor], lam: float, ask: int = 1
) -> dict[str, Tensor]:
    """Lines 14-19 for one client of the first round, in plain PyTorch; target labels are those it keeps."""
    place = ("federate", 0, 1, client)
    state = net.states.client_state(client)
    rng, view = generator(net.world.seed, *place), net.world.clients[client].train
    labels = torch.from_numpy(view.labels)
    if client != SOURCE:
        labels = state["labels"]
        view, labels = view.take((labels >= 0).numpy()), labels[labels >= 0]
    model = toy_network()
    model.load_state_dict(theta)  # line 14
    torch.manual_seed(derive(net.world.seed, *place, "default"))
    W = nn.Parameter(torch.randn(int(labels.max()) + 1, 8) / 8**0.5)
    if client != SOURCE and state["start"]:
        W = nn.Parameter(state["start"]["weight"].clone())
    parameters = [*model.parameters(), W]
    velocity = [torch.zeros_like(p) for p in parameters]
    anchors = [theta[name] for name, _ in model.named_parameters()]
    model.train()
    for chosen in batches(len(view), TRAINING, rng):  # line 15
        x = augment(to_float(view.batch(chosen)), rng, TRAINING.augment)
        F = slow_arcface(model(x), W, labels[chosen], HEAD.scale, HEAD.margin)  # Eq. 2 over a batch
        distance = sum(((p - a) ** 2).sum() for p, a in zip(model.parameters(), anchors, strict=True))
        h = F + lam / 2 * distance if client == SOURCE else F  # Eq. 3, lines 16-17
        gradients = torch.autograd.grad(h, parameters)
        with torch.no_grad():
            for p, g, v in zip(parameters, gradients, velocity, strict=True):
                v.mul_(MOMENTUM).add_(g + DECAY * p)
                p.sub_(LR * v)
    return {k: v.detach().clone() for k, v in model.state_dict().items()}


@pytest.mark.parametrize("with_source", [True, False])
@pytest.mark.parametrize("target_head", ["means", "random"])
def test_one_round_of_algorithm_1(tmp_path: Path, with_source: bool, target_head: str) -> None:
    how = method(with_source=with_source, target_head=target_head)
    net, s = begin(tmp_path, how)
    clients = [SOURCE, *s.labelled] if with_source else s.labelled
    assert len(s.labelled) == 2
    slow = [slow_client(net, c, s.theta, LAMBDA) for c in clients]
    net.begin("federate", 0)
    after = how.round(s, net)
    for key, value in after.theta.items():
        if value.is_floating_point():  # line 21: 1 / N whatever the clients hold
            expected = torch.stack([theta[key].double() for theta in slow]).mean(0)
            torch.testing.assert_close(value.double(), expected, rtol=1e-4, atol=5e-5)  # arccos in float32
        else:
            assert value == max(theta[key] for theta in slow)


def test_a_share_of_the_targets_takes_part(tmp_path: Path) -> None:
    how = method(participation=0.5)
    net, s = begin(tmp_path, how, targets=4)
    asked = []
    for round in range(12):
        net.begin("federate", round)
        drawn = how.drawn(s.labelled, net)
        asked.append(tuple(drawn))
        assert 1 <= len(drawn) <= 3, "half of five clients, of which one is the source"
        assert drawn == [c for c in s.labelled if c in drawn]
    assert {c for drawn in asked for c in drawn} == set(s.labelled)
    assert len(set(asked)) > 2
    net.begin("federate", 0)
    how.round(s, net)
    assert net.traffic.asked == len(asked[0]) + 1, "the source takes part in each round"


def test_equation_3_moves_the_source_alone(tmp_path: Path) -> None:
    """DCL changes what the source sends and nothing else, and keeps it nearer to theta_r."""
    moved = {}
    for lam in (0.0, LAMBDA):
        how = method(dcl=lam)
        net, s = begin(tmp_path / str(lam), how)
        net.begin("federate", 0)
        moved[lam] = net.ask(how.local, {c: Down(s.theta, LR, True) for c in net.clients})
    assert not torch.equal(moved[0.0][SOURCE].theta["5.weight"], moved[LAMBDA][SOURCE].theta["5.weight"])
    for c in s.labelled:
        assert all(torch.equal(v, moved[LAMBDA][c].theta[k]) for k, v in moved[0.0][c].theta.items())
    names = [name for name, _ in toy_network().named_parameters()]
    far = {
        lam: sum(float(((ups[SOURCE].theta[k] - s.theta[k]) ** 2).sum()) for k in names) for lam, ups in moved.items()
    }
    assert far[LAMBDA] < far[0.0]


@pytest.mark.parametrize("centre", [False, True])
@pytest.mark.parametrize("metric", ["euclidean", "chord"])
def test_stage_2_clusters_each_target_alone(tmp_path: Path, metric: str, centre: bool) -> None:
    """Lines 5-8: features of theta_s, C-FINCH by the literal description, each client's own pictures only."""
    how = method(clustering=Clustering(d=0.5, metric=metric, centre=centre))  # type: ignore[arg-type]
    net, s = begin(tmp_path, how)
    model = toy_network()
    model.load_state_dict(s.theta)
    model.eval()
    for client in ("target-0", "target-1"):
        view = net.world.clients[client].train
        with torch.no_grad():
            features = model(to_float(view.batch(np.arange(len(view))))).numpy()
        unit = features / np.linalg.norm(features, axis=1, keepdims=True)
        if centre:
            unit = unit - unit.mean(0)
            unit /= np.linalg.norm(unit, axis=1, keepdims=True)
        slow = np.array(literal_cfinch(unit, 0.5, metric)[-1])
        found = net.states.client_state(client)["labels"].numpy()
        sizes = {label: int((slow == label).sum()) for label in slow}
        assert (found >= 0).tolist() == [sizes[label] >= 2 for label in slow]
        kept = found >= 0
        assert len(set(zip(found[kept], slow[kept], strict=True))) == len(set(found[kept])) == len(set(slow[kept]))


def test_heads_stay_and_persist(tmp_path: Path) -> None:
    how = method()
    net, s = begin(tmp_path, how)
    heads = []
    for r in range(2):
        net.begin("federate", r)
        s = how.round(s, net)
        heads.append({c: net.states.client_state(c)["head"]["weight"] for c in net.clients})
    widths = {c: len(w) for c, w in heads[0].items()}
    assert widths[SOURCE] == net.world.clients[SOURCE].n_classes
    assert all(heads[1][c].shape == heads[0][c].shape and not torch.equal(heads[1][c], heads[0][c]) for c in widths)
    assert all(k.split(".")[0].isdigit() for k in s.theta), "only the backbone is averaged"


def test_the_source_starts_from_its_pretrained_head(tmp_path: Path) -> None:
    W = torch.nn.functional.normalize(torch.arange(7 * 8, dtype=torch.float32).view(7, 8).sin(), dim=1)
    for choice in ("pretrained", "random"):
        folder = tmp_path / choice
        world = domain_world(folder)
        world.class_vectors = W[: world.clients[SOURCE].n_classes]
        net = toy_engine(folder, world)
        how = FedFRDA(
            rounds=1, training=Training(lr=1e-9, batch_size=4, unit="iterations", amount=1, weight_decay=0.0),
            head=HEAD, clustering=Clustering(d=0.5), source_head=choice,  # type: ignore[arg-type]
        )  # fmt: skip
        s = how.start(world.setup())
        net.begin("label", 0)
        s = how.label_all(s, net)
        net.begin("federate", 0)
        how.round(s, net)
        kept = net.states.client_state(SOURCE)["head"]["weight"]
        assert torch.allclose(kept, world.class_vectors, atol=1e-6) == (choice == "pretrained")


def test_the_source_starts_from_the_means_of_its_people(tmp_path: Path) -> None:
    """Row k of its head: the direction of the sum of the unit features of person k, as the given network has them."""
    net, s = begin(tmp_path, how := method(training=STILL, source_head="means"))
    net.begin("federate", 0)
    how.round(s, net)
    found, view = net.states.client_state(SOURCE)["head"]["weight"], net.world.clients[SOURCE].train
    network = toy_network()
    network.load_state_dict(s.theta)
    for k in range(view.n_classes):
        total = torch.zeros(8)
        for row in np.flatnonzero(view.labels == k):
            with torch.no_grad():
                feature = network.eval()(to_float(view.batch([row])))[0]
            total += feature / feature.norm()
        assert torch.allclose(found[k], total / total.norm(), atol=1e-5)


def test_targets_alone_need_no_source(tmp_path: Path) -> None:
    world = domain_world(tmp_path)
    world.training = tuple(c for c in world.training if c != SOURCE)
    del world.clients[SOURCE]
    for how in (method(), method(with_source=False, pretrain_rounds=1)):
        with pytest.raises(UsageError, match=r"needs a source .*without one: method.with_source = false"):
            how.start(world.setup())
    how, net = method(with_source=False), toy_engine(tmp_path, world)
    s = how.start(world.setup())
    net.begin("label", 0)
    s = how.label_all(s, net)
    net.begin("federate", 0)
    assert how.round(s, net).begun is False
    assert sorted(net.traffic.figures) == ["loss_target", "lr"]


STILL = Training(lr=1e-9, batch_size=4, unit="iterations", amount=1, weight_decay=0.0)  # nothing moves


def given(folder: Path, head: HeadSettings) -> tuple[LocalNetwork, Server, FedFRDA, dict[str, Tensor]]:
    """A run that starts from a head in a file, after stage 2."""
    world = domain_world(folder)
    torch.manual_seed(9)
    kept = {k: torch.randn_like(v) for k, v in head.build(world.clients[SOURCE].n_classes, 8).state_dict().items()}
    world.class_vectors, world.biases = kept["weight"], kept.get("bias")
    net = toy_engine(folder, world)
    how = method(training=STILL, head=head, source_head="pretrained")
    s = how.start(world.setup())
    net.begin("label", 0)
    return net, how.label_all(s, net), how, kept


@pytest.mark.parametrize("kind", ["arcface", "softmax", "sphereface2"])
def test_the_whole_head_of_a_file_goes_on(tmp_path: Path, kind: str) -> None:
    net, s, how, kept = given(tmp_path, HeadSettings(kind, 16.0, 0.2))  # type: ignore[arg-type]
    net.begin("federate", 0)
    how.round(s, net)
    found = net.states.client_state(SOURCE)["head"]
    assert found.keys() == kept.keys()
    assert all(torch.allclose(found[k], v, atol=1e-6) for k, v in kept.items())


@pytest.mark.parametrize("choice", ["pretrained", "random"])
def test_a_source_that_misses_the_first_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, choice: str) -> None:
    """It starts in the second as it would have in the first: with the head of the file, or without that of stage 1."""
    net, s, how, kept = given(tmp_path, HEAD)
    if choice == "random":
        how = method(training=STILL, pretraining=STILL, pretrain_rounds=1)
        net.begin("pretrain", 0)
        s = how.stages()[0].run(s, net)
        kept = net.states.client_state(SOURCE)["head"]

    def offline(*args: object, **named: object) -> object:
        if named["mu"]:
            raise VisardError("the source is offline")
        return train(*args, **named)  # type: ignore[arg-type]

    heads = []
    for r in range(3):
        with monkeypatch.context() as patch:
            if r == 0:
                patch.setattr("visard.methods.fedfr_da.train", offline)
            net.begin("federate", r)
            s = how.round(s, net)
        assert [p["client"] for p in net.traffic.problems] == ([SOURCE] if r == 0 else [])
        heads.append(net.states.client_state(SOURCE).get("head", {}).get("weight"))
    assert torch.allclose(heads[1], kept["weight"], atol=1e-5) == (choice == "pretrained")
    assert torch.allclose(heads[2], heads[1], atol=1e-5), "and keeps it"


def test_a_head_that_cannot_be_had_is_refused(tmp_path: Path) -> None:
    world = domain_world(tmp_path)
    with pytest.raises(UsageError, match=r"source_head = pretrained: give model.class_vectors too"):
        method(source_head="pretrained").start(world.setup())
    method(source_head="pretrained", with_source=False).start(world.setup())
    world.class_vectors = torch.zeros(world.clients[SOURCE].n_classes, 8)
    softmax = HeadSettings("softmax")
    for how in (method(source_head="pretrained", head=softmax), DAN(head=softmax), DANN(head=softmax)):
        with pytest.raises(UsageError, match="holds no biases, the softmax head has some"):
            how.start(world.setup())
    world.biases = torch.zeros(world.clients[SOURCE].n_classes)
    with pytest.raises(UsageError, match="holds biases, the arcface head has none"):
        method(source_head="pretrained").start(world.setup())


def test_targets_without_labels_are_counted(tmp_path: Path) -> None:
    how = method(clustering=Clustering(d=0.5, min_size=2))
    net, _ = begin(tmp_path, how)
    assert net.traffic.figures["left_out"] == 0
    net.world.clients["target-1"] = replace(
        net.world.clients["target-1"], train=net.world.clients["target-1"].train.take([0])
    )
    s = how.start(net.world.setup())
    net.begin("label", 1)
    assert how.label_all(s, net).labelled == ["target-0"]
    assert net.traffic.figures["left_out"] == 1


def test_the_number_of_people_is_an_oracle(tmp_path: Path) -> None:
    """A run says so, a deployment refuses it, at the server and at a party."""
    told = Clustering(method="kmeans")
    for how in (method(clustering=told), FineTune(clustering=told)):
        assert how.oracle() == "the number of people"
        with pytest.raises(UsageError, match="only a simulation knows"):
            refuse_oracle(how)  # type: ignore[arg-type]
    for known in (Clustering(), Clustering(method="kmeans", clusters=3)):
        refuse_oracle(method(clustering=known))
    overrides = [*smoke("fedfr-da"), "method.clustering.method=kmeans", "method.rounds=1", "evaluation.every=0"]
    done = run("fedfr-da", out=tmp_path / "run", overrides=overrides)
    assert [e["text"] for e in read_events(done.folder / "events.jsonl") if e["event"] == "warning"] == [
        "fedfr-da gets the number of people, which only a simulation knows"
    ]
