"""A network of early layers and a small tail without batch norm, for benches that train a tail from nothing.

The blocks of a recogniser before block N, means over squares of its map, the projection on 256 principal components
(each of variance 1) of some pictures, and behind that two layers that train: 256 -> 256, ReLU, 256 -> 128.

    python -m benchmarks.early_trunk mobilefacenet.pt celeba early.safetensors [--before 13] [--pictures 2000]
    visard bench hf-maml --scale real --model early.safetensors --set model.train=last:2 ...
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from visard.inference.model import open_data
from visard.models.cut import split
from visard.models.files import open_model, save_model
from visard.models.inputs import Inputs
from visard.models.steps import Step, blocks_of, build, parse, to_text

COMPONENTS, EMBEDDING = 256, 128


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


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a recogniser in a file that visard reads as steps")
    parser.add_argument("faces", help="a face set; some of its pictures say what the components are")
    parser.add_argument("out", type=Path)
    parser.add_argument("--before", type=int, default=13, help="the first block that is left out (visard models cuts)")
    parser.add_argument("--square", type=int, default=2, help="side of the squares of the map")
    parser.add_argument("--pictures", type=int, default=2_000)
    args = parser.parse_args()
    torch.manual_seed(0)
    network, spec = open_model(args.model)
    view = open_data(args.faces)
    rows = np.sort(np.random.default_rng(0).permutation(len(view))[: args.pictures])
    made, graph = shortened(network, spec, view.faces.read(view.index[rows]), args.before, args.square)
    save_model(args.out, made.state_dict(), spec | {"graph": graph, "embedding": str(EMBEDDING)})


if __name__ == "__main__":
    main()
