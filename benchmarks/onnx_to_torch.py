"""ONNX files as networks that train: how far they are from onnxruntime, whether they train, and whether they come back.

For each network: the largest difference of features to onnxruntime on 100 random pictures, relative to the largest
number; the loss before and after 20 steps on 8 pictures; the same difference of the trained network and its export.

    python -m benchmarks.onnx_to_torch                                 our own networks, minutes on one core
    python -m benchmarks.onnx_to_torch FILE.onnx:imagenet --only       a file and the preset of its input
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

from visard.models import build
from visard.models.convert import convert
from visard.models.onnx import export_onnx

OURS = {
    "tiny": 64, "mobilefacenet": 112, "iresnet18": 112, "iresnet50": 112, "spherenet20": 112, "resnet18": 112
}  # fmt: skip
PICTURES, STEPS = 100, 20


def exported(name: str, size: int, folder: Path) -> Path:
    """A fresh network with statistics of random pictures, as an ONNX file."""
    torch.manual_seed(0)
    network = build(name, embedding=128, size=size).train()
    with torch.no_grad():
        for _ in range(4):
            network(torch.randn(4, 3, size, size))
    path = folder / f"{name}.onnx"
    export_onnx(network, path, {"model": name, "embedding": "128", "size": str(size)})
    return path


def losses(network: nn.Module, size: int) -> tuple[float, float]:
    """The loss of eight pictures as classes of their own before and after some steps."""
    rng = torch.Generator().manual_seed(1)
    x, head = torch.randn(8, 3, size, size, generator=rng), torch.randn(8, 128, generator=rng)
    trained = [p for p in network.parameters() if p.requires_grad]
    optimiser = torch.optim.SGD(trained, lr=0.01, momentum=0.9)
    found: list[float] = []

    def loss() -> Tensor:
        features = nn.functional.normalize(network(x))
        w = nn.functional.normalize(head[:, : features.shape[1]])
        return nn.functional.cross_entropy(16 * features @ w.T, torch.arange(8))

    for _ in range(STEPS):
        optimiser.zero_grad()
        now = loss()
        found.append(now.item())
        now.backward()
        nn.utils.clip_grad_norm_(trained, 5.0)
        optimiser.step()
    return found[0], loss().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="FILE.onnx, or FILE.onnx:PRESET")
    parser.add_argument("--only", action="store_true", help="not our own networks")
    parser.add_argument("--pictures", type=int, default=PICTURES)
    given = parser.parse_args()
    print("| network | parameters | difference | loss, 20 steps | of the export again |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        todo = [(Path(f.partition(":")[0]), f.partition(":")[2] or None) for f in given.files]
        for name, size in [] if given.only else OURS.items():
            todo.append((exported(name, size, folder), None))
        for path, preset in todo:
            found = convert(path, name=preset, check=given.pictures)
            network, size = found.network.eval(), int(found.spec["size"])
            count = sum(p.numel() for p in network.parameters())
            before, after = losses(network, size)
            again = export_onnx(network, folder / "again.onnx", found.spec)
            print(
                f"| {path.stem} | {count:,} | {found.difference:.1e} | {before:.2f} -> {after:.2f} | "
                f"{again.difference:.1e} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
