"""What a run changed: the given network and the trained one, tested on the same people."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from visard.clustering.cluster import Clustering, Known, cluster
from visard.core import Weights
from visard.data.faces import FaceView
from visard.engines.world import World, world_of_run
from visard.errors import VisardError
from visard.evaluation.groups import DOMAIN, errors_by
from visard.evaluation.paired import BOOTSTRAP, Change, compare
from visard.learning.features import embed
from visard.learning.weights import load_weights
from visard.models.files import read_model
from visard.numerics import computing_on

MOST_PICTURES = 4000  # of an estimate
SOURCE = "source"  # the test on people of the source
Features = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Test:
    """People that the adaptation did not see, before and after; `estimate`: groups of pictures stand for people."""

    name: str
    estimate: bool
    people: int
    pictures: int
    changes: tuple[Change, ...]  # one for each false accept rate
    groups: dict[str, Any] = field(default_factory=dict)  # errors by site or domain, before and after

    @classmethod
    def of(cls, said: dict[str, Any]) -> Test:
        """From plain values."""
        return cls(**said | {"changes": tuple(Change(**change) for change in said["changes"])})


@dataclass(frozen=True)
class BeforeAndAfter:
    """The world of a finished run with both networks."""

    world: World
    before: Weights
    after: Weights
    far: tuple[float, ...]
    clustering: Clustering

    @classmethod
    def of_run(cls, folder: Path, far: tuple[float, ...]) -> BeforeAndAfter:
        """Of the finished run in a folder, which began with given weights; `far` are the rates to compare at."""
        world, method = world_of_run(str(folder))
        whole = read_model(folder / "model.safetensors")[0]
        after = whole if world.trunk is None else world.trunk.of_tail(whole)
        return cls(world, world.new_weights(), after, far, getattr(method, "clustering", Clustering()))

    def features(self, view: FaceView) -> tuple[Features, Features]:
        """Of the pictures of a view, before and after."""
        found = []
        with computing_on(self.world.numerics.device):
            for weights in (self.before, self.after):
                network = self.world.network()
                load_weights(network, weights)
                found.append(embed(network, view))
        return found[0], found[1]

    def tests(self) -> tuple[Test, ...]:
        """On people that training did not see, those of the source last; an estimate where no names are known."""
        found = []
        for name, view in sorted(self.world.benchmarks.items(), key=lambda test: test[0] == SOURCE):
            old, new = self.features(view)
            rows = compare(old, new, view.identity, self.far)
            found.append(Test(name, False, len(np.unique(view.identity)), len(view), rows, self.groups(view, old, new)))
        if all(test.name == SOURCE for test in found) and self.world.clients:
            found.insert(0, self.estimate())
        return tuple(found)

    def groups(self, view: FaceView, old: Features, new: Features) -> dict[str, Any]:
        """Errors by site or domain at one threshold for all, before and after, and pictures that could not be enrolled;
        nothing where there is one group alone.
        """
        if len(np.unique(view.domain)) < 2:
            return {}
        return {
            when: errors_by([x], [view], DOMAIN, fmr=self.far[0], bootstrap=BOOTSTRAP).to_dict()
            for when, x in (("before", old), ("after", new))
        }

    def estimate(self) -> Test:
        """An estimate without labels: pictures that the given network puts into one group count as one person. Groups
        are pure rather than complete, so hard pairs of one person are missing, and accept rates are too high before and
        after.
        """
        both: tuple[list[Features], list[Features]] = ([], [])
        people, base = [], 0
        each = max(1, MOST_PICTURES // len(self.world.training))
        for client in self.world.training:
            view = self.world.clients[client].train
            if view.labelled:
                continue
            view = view.take(np.unique(np.linspace(0, len(view) - 1, min(each, len(view))).astype(np.int64)))
            features = self.features(view)
            labels = cluster(features[0], self.clustering, known=Known.of(view, self.clustering)).labels
            for part, x in zip(both, features, strict=True):
                part.append(x[labels >= 0])
            people.append(labels[labels >= 0] + base)
            base += int(labels.max(initial=-1)) + 1
        if base < 2:
            raise VisardError("too few groups for an estimate: give people with names to test on (--test)")
        old, new = (np.concatenate(part) for part in both)
        identity = np.concatenate(people)
        return Test("groups at the sites", True, base, len(identity), compare(old, new, identity, self.far))
