"""What secure aggregation adds to a round, next to the bare cost of making and adding the same number of mask bytes.

    python -m benchmarks.secure_sum [--large] [--signed] [--round]

All clients and the server in one process, one after the other: seconds are CPU seconds, over all of them, from the keys
to the mean; only packing messages for a network is left out. A tenth of the clients is lost after sharing, so that
masks of lost clients are opened too. `--large` adds 20 clients with 250 MB. `--round` compares with the training of a
round of celeba-fedavg (20 clients, an epoch of 1,100 pictures each) on noise, which takes as long as faces do.
The memory of the server is what it holds at most between the first reply and the mean, beside the model that it sent.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch

from visard import models
from visard.aggregation.rules import Mean
from visard.aggregation.secure import Plan, SecureAggregation, SecureReduction, masked
from visard.core import Client, Disclosure, Weights
from visard.crypto.secure_sum import add_masks
from visard.crypto.signatures import Signer
from visard.data.faces import FaceSet, FaceSetWriter
from visard.learning.heads import build_head
from visard.learning.train import Training, train
from visard.numerics import Numerics

ASKED = b"asked"
STEPS = SecureAggregation.steps()
SUMS = itertools.count(1)


@dataclass(frozen=True)
class Down:
    theta: Weights


@dataclass(frozen=True)
class Up:
    theta: Annotated[Weights, Disclosure.weights]
    loss: Annotated[float, Disclosure.metric]


def clients(n: int, signed: bool) -> dict[str, Client]:
    found = {}
    for i in range(n):
        name, secret = f"c{i:04d}", i.to_bytes(32, "big")
        signer = Signer.of_secret(secret) if signed else None
        rng: Any = torch.Generator()
        found[name] = Client(name, None, {}, rng, None, 8, None, secret=secret, signer=lambda s=signer: s)  # type: ignore
    return found


def messages(numbers: int) -> tuple[Down, Callable[[], Up]]:
    """A network in ten entries, and what a client makes of it."""
    sent = Down({f"w{i}": torch.zeros(numbers // 10) for i in range(10)})
    update = {k: 0.01 * torch.randn(v.shape) for k, v in sent.theta.items()}
    return sent, lambda: Up(update, 1.0)


def protocol(n: int, numbers: int, signed: bool) -> tuple[float, int]:
    """CPU seconds of one sum, and how many masks were made."""
    rule, sent = Mean(secure=True, signed=signed), messages(numbers)
    here = clients(n, signed)
    lost = set(list(here)[::10]) if n >= 10 else set()
    begun = time.process_time()
    context = f"benchmark {next(SUMS)}"  # with keys of its own
    reduction = SecureReduction(("theta",), context, rule, dict.fromkeys(here, 1.0))
    keys = {c: STEPS["secure_keys"](here[c], m) for c, m in reduction.invitations(here).items()}
    shares = {c: STEPS["secure_shares"](here[c], m) for c, m in reduction.circles(keys).items()}
    reduction.begin(shares, sent[0], Up, (), {})
    for name, reply in replies(reduction, here, sent, lost):
        reduction.take(name, sent[0], reply)
    agreed = {c: STEPS["secure_agree"](here[c], m) for c, m in reduction.lists().items()}
    opened = {c: STEPS["secure_open"](here[c], m) for c, m in reduction.openings(agreed).items()}
    means, _ = reduction.result(opened)
    seconds = time.process_time() - begun
    masks = sum(len(Plan.parse(reduction.plan(c)).around) + 2 for c in reduction.arrived)  # one is taken off again
    masks += sum(len(Plan.parse(reduction.plan(c)).around.keys() & set(reduction.arrived)) for c in lost)
    update = sent[1]().theta
    assert all(torch.allclose(means["theta"][k], update[k], atol=1e-6) for k in update), "the mean is right"
    return seconds, masks


def replies(
    reduction: SecureReduction, here: dict[str, Client], sent: tuple[Down, Callable[[], Up]], lost: set[str]
) -> Iterator[tuple[str, Any]]:
    for name in here:
        if name not in lost:
            yield name, masked(here[name], Plan.parse(reduction.plan(name)), sent[0], sent[1](), (), {})


def bare(masks: int, numbers: int) -> float:
    """CPU seconds to make and add so many masks; of very many, a tenth is done and counted ten times."""
    part = masks if masks * numbers < 4e9 else masks // 10
    total = np.zeros(numbers, np.uint32)
    begun = time.process_time()
    for i in range(part):
        add_masks(total, [(i.to_bytes(16, "big"), +1)], ASKED)
    return (time.process_time() - begun) * masks / part


def memory(n: int, numbers: int) -> float:
    """What the server holds at most while replies come and the mean is made, in messages: in a process of its own."""
    code = f"from benchmarks.secure_sum import held; held({n}, {numbers})"

    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return float(done.stdout)


def held(n: int, numbers: int) -> None:
    """Print the growth of this process over `n` replies and the mean, in messages."""
    rule, sent = Mean(secure=True, neighbours=2), messages(numbers)
    here = clients(n, False)
    reduction = SecureReduction(("theta",), "benchmark 1", rule, dict.fromkeys(here, 1.0))
    keys = {c: STEPS["secure_keys"](here[c], m) for c, m in reduction.invitations(here).items()}
    shares = {c: STEPS["secure_shares"](here[c], m) for c, m in reduction.circles(keys).items()}
    reduction.begin(shares, sent[0], Up, (), {})
    folder = tempfile.TemporaryDirectory()  # clients are elsewhere: what they send comes from a file
    for name, reply in replies(reduction, here, sent, set()):
        reply.theta["masked"].numpy().tofile(Path(folder.name) / name)
    like = reply
    before = _peak(reset=True)
    for name in here:
        vector = torch.from_numpy(np.fromfile(Path(folder.name) / name, np.int32))
        reduction.take(name, sent[0], Up({"masked": vector}, like.loss))
    opened = {c: STEPS["secure_open"](here[c], m) for c, m in reduction.openings({}).items()}
    reduction.result(opened)
    grown = _peak() - before
    folder.cleanup()
    print(grown / (4 * numbers))


def _peak(reset: bool = False) -> float:
    """Most bytes of this process in memory, since it was last asked to begin anew."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    line = next(text for text in Path("/proc/self/status").read_text().splitlines() if text.startswith("VmHWM"))
    return 1024.0 * int(line.split()[1])


def training(pictures: int = 1100, size: int = 64) -> float:
    """CPU seconds of one client's part of a round of celeba-fedavg."""
    with tempfile.TemporaryDirectory() as name:
        rng, identity = np.random.default_rng(0), np.arange(pictures) % 200
        writer = FaceSetWriter(
            Path(name) / "faces", count=pictures, size=size, names=[f"p{i:03d}" for i in range(200)],
            domains=["noise"], attributes=[], info={"kind": "noise"},
        )  # fmt: skip
        with writer:
            rows = rng.integers(0, 256, (pictures, size, size, 3)).astype(np.uint8)
            none = np.zeros((pictures, 0), np.int8)
            writer.write(0, rows, identity, np.zeros(pictures, int), none, [str(i) for i in range(pictures)])
        view = FaceSet.open(Path(name) / "faces").all()
        net = Numerics().prepare(models.build("tiny", embedding=models.default_embedding("tiny"), size=size))
        head = build_head("cosface", 200, models.default_embedding("tiny"), 20.0, 0.1)
        begun = time.process_time()
        train(net, head, view, Training(lr=0.1, batch_size=32), torch.Generator().manual_seed(0), Numerics())
        return time.process_time() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--large", action="store_true", help="20 clients with 250 MB too")
    parser.add_argument("--signed", action="store_true", help="with aggregation.signed = true")
    parser.add_argument("--round", action="store_true", help="compare with the training of a round of celeba-fedavg")
    given = parser.parse_args()
    torch.set_num_threads(1)
    row = "{:>8} {:>6} {:>11} {:>7} {:>9} {:>8} {:>6} {:>11}".format
    print(row("clients", "MB", "neighbours", "masks", "secure s", "bare s", "ratio", "s a client"))
    for n, mb, times in [(20, 2.3, 5), (200, 2.3, 1), (20, 250.0, 1)][: 3 if given.large else 2]:
        numbers = int(mb * 1e5 / 4) * 10
        pairs = []
        for _ in range(times):
            seconds, masks = protocol(n, numbers, given.signed)
            pairs.append((seconds, bare(masks, numbers)))
        secure, plain = (statistics.median(p[i] for p in pairs) for i in (0, 1))
        ratio = statistics.median(a / b for a, b in pairs)
        figures = (f"{secure:.2f}", f"{plain:.2f}", f"{ratio:.2f}", f"{secure / n:.3f}")
        print(row(n, mb, min(100, n - 1), masks, *figures), flush=True)
        if given.round and n == 20 and mb == 2.3:
            whole = 20 * statistics.median(training() for _ in range(3))
            print(f"a round of celeba-fedavg trains for {whole:.1f} s: the sum is {100 * secure / whole:.1f} % of it")
    for n in (5, 20):
        print(f"{n} clients: the server holds {memory(n, 5_000_000):.1f} messages of 20 MB at most")


if __name__ == "__main__":
    main()
