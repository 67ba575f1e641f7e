"""HF-MAML where there is much left to learn: the early layers of a recogniser, and a small tail without batch norm.

    python -m benchmarks.early_trunk mobilefacenet.pt celeba WORK [--seeds 0 1 2] [--batches 20]

The blocks of a recogniser before block N, means over squares of its map, the projection on 256 principal components
(each of variance 1) of some pictures, and behind that two layers that train from random weights: 256 -> 256, ReLU,
256 -> 128. 20 clients of 8 people with 30 pictures each, otherwise the rows of `visard bench hf-maml --scale real`:
meta-learning with exact h against plain descent with as many steps, and the network as it is before training. Clients
tune on fifty batches, or on as many as --batches says. WORK holds the network and a run folder for each row and seed;
what is there is not made again.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from visard.inference.model import open_data
from visard.models.cut import split
from visard.models.files import open_model, save_model
from visard.models.inputs import Inputs
from visard.models.steps import Step, blocks_of, build, parse, to_text
from visard.runs.run import run
from visard.studies import find
from visard.studies.execute import Job
from visard.studies.results import paired

COMPONENTS, EMBEDDING = 256, 128
FARS = "0.1", "0.01"
BATCHES = 50  # of tuning
ROWS = (
    "equal not trained", "equal FedAvg local, plain steps", "equal HF-MAML local, exact, alpha 0.01",
    "equal HF-MAML local, exact, alpha 0.1", "equal HF-MAML local, exact, alpha 0.5",
)  # fmt: skip
CHANGES = (
    "model.train=last:2", "partition.min_images=30", "partition.public_identities=0", "partition.test_identities=7",
    "partition.identities=160",
)  # fmt: skip


def steps_of(graph: str, before: int, square: int, numbers: int) -> list[Step]:
    """The blocks before number `before`, means over squares, and three layers: components, hidden, embedding."""
    steps = parse(graph)
    steps = steps[: blocks_of(steps)[before].start]

    def add(op: str, **settings: object) -> None:
        steps.append(Step(op, (len(steps),), settings))

    def linear(channels: int, width: int) -> None:
        add("linear", width=width, channels=channels, bias=True)

    add("avg_pool", kernel=[square, square], stride=[square, square], pad=[0, 0], ceil=False, whole=True)
    add("reshape", shape=[numbers])
    linear(numbers, COMPONENTS)
    linear(COMPONENTS, COMPONENTS)
    add("relu")
    linear(COMPONENTS, EMBEDDING)
    return steps


def components(x: Tensor) -> tuple[Tensor, Tensor]:
    """Matrix and bias of the projection of rows (n, D) on their first components, each of variance 1."""
    mean = x.mean(0)
    _, lengths, directions = torch.linalg.svd(x - mean, full_matrices=False)
    W = directions[:COMPONENTS] * (len(x) ** 0.5 / lengths[:COMPONENTS, None])
    return W, -W @ mean


@torch.no_grad()
def shortened(
    network: nn.Module, spec: dict[str, str], pictures: np.ndarray, before: int, square: int
) -> tuple[nn.Module, str]:
    """The network with components of these pictures (n, H, W, 3), and its steps."""
    given = network.state_dict()
    trunk, inputs = split(network, f"block{before}")[0], Inputs.of_spec(spec)
    maps = [trunk(inputs.tensor(pictures[i : i + 64])) for i in range(0, len(pictures), 64)]
    x = torch.cat([nn.functional.avg_pool2d(m, square).flatten(1) for m in maps])
    graph = to_text(steps_of(spec["graph"], before, square, x.shape[1]))
    made = build(graph, EMBEDDING, int(spec["size"]))
    own = made.state_dict()
    place = f"block{before}.linear0"
    own[f"{place}.weight"], own[f"{place}.bias"] = components(x)
    kept = {k: given[k] for k in own if int(k.partition(".")[0].removeprefix("block")) < before}
    made.load_state_dict(own | kept)
    return made, graph


def made_from(model: str, faces: str, out: Path, before: int, square: int = 2, count: int = 2_000) -> None:
    """Write the network; components are those of `count` pictures of the face set."""
    torch.manual_seed(0)
    network, spec = open_model(model)
    view = open_data(faces)
    rows = np.sort(np.random.default_rng(0).permutation(len(view))[:count])
    made, graph = shortened(network, spec, view.faces.read(view.index[rows]), before, square)
    save_model(out, made.state_dict(), spec | {"graph": graph, "embedding": str(EMBEDDING)})


def settings_of(row: str, seed: int, network: Path, faces: str, work: Path, batches: int) -> tuple[str, list[str]]:
    """Preset and changed settings of a row's run; clients tune on `batches` batches."""
    job = Job(find("hf-maml", "real", network).row(row), seed, work)
    tuning = f"evaluation.tuning.batches={batches}"
    changed = (f"data.source={faces}", f"model.weights={network}", *CHANGES, tuning)
    names = {text.partition("=")[0] for text in changed}
    return job.row.preset, [*(text for text in job.overrides() if text.partition("=")[0] not in names), *changed]


def measured(row: str, seed: int, network: Path, faces: str, work: Path, batches: int = BATCHES) -> list[float]:
    """TAR of a row in per cent: each FAR, before and after tuning, trained clients and later ones."""
    preset, overrides = settings_of(row, seed, network, faces, work, batches)
    folder = work / (row if batches == BATCHES else f"{row}, {batches} batches") / f"seed-{seed}"
    if not (folder / "metrics.json").exists():
        run(preset, overrides=overrides, out=folder, overwrite=folder.exists())
    found = json.loads((folder / "metrics.json").read_text())
    return [
        100 * found[who]["summary"][f"{state}/tar@far={far}"]["mean"]
        for far in FARS for state in ("untuned", "tuned") for who in ("clients", "held_out")
    ]  # fmt: skip


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a recogniser in a file that visard reads as steps")
    parser.add_argument("faces", help="a face set, here CelebA")
    parser.add_argument("work", type=Path)
    parser.add_argument("--before", type=int, default=13, help="the first block that is left out (visard models cuts)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--batches", type=int, default=BATCHES, help="batches that clients tune on")
    given = parser.parse_args()
    network = given.work.resolve() / "early.safetensors"
    if not network.exists():
        network.parent.mkdir(parents=True, exist_ok=True)
        made_from(given.model, given.faces, network, given.before)
    found = {
        row: [measured(row, seed, network, given.faces, given.work, given.batches) for seed in given.seeds]
        for row in ROWS
    }
    columns = [
        f"FAR {far}, {who}, {state}" for far in FARS for state in ("untuned", "tuned") for who in ("trained", "later")
    ]
    print(f"| | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")
    for row, runs in found.items():
        means = [f"{statistics.mean(column):.1f}" for column in zip(*runs, strict=True)]
        print(f"| {row.removeprefix('equal ')} | {' | '.join(means)} |")
    for row, other in [(a, b) for a in ROWS for b in ROWS[:2] if ROWS.index(a) > ROWS.index(b)]:
        cells = []
        for one, two in zip(zip(*found[row], strict=True), zip(*found[other], strict=True), strict=True):
            less = paired(dict(enumerate(one)), dict(enumerate(two)))
            within = "" if less.low is None else f" ({less.low:+.1f} to {less.high:+.1f})"
            cells.append(f"{less.mean:+.1f}{within}")
        print(f"| {row.removeprefix('equal ')} less {other.removeprefix('equal ')} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
