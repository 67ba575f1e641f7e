"""What one batch of encrypted MMD costs: packed against the paper's protocols, and two real processes over a socket.

    python -m benchmarks.encrypted_mmd [--bits 3072] [--lengths 4,64,256] [--out FILE.json]

Both directions, n = 64 samples on each side, degree 2. CPU seconds of both parties together (key generation and tables
excluded: once a run), and all bytes that travel. Rows marked * are scaled from a part of the gradient that was
computed: the share is in the table. The error is the largest difference to autograd, relative to the largest entry.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import multiprocessing
import socket
import struct
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from visard.crypto import ckks
from visard.crypto.forward import Forward
from visard.crypto.moments import gradient, moments
from visard.crypto.packed import Packed, PackedCkks
from visard.crypto.paillier import PrivateKey, PublicKey, generate
from visard.learning import mmd
from visard.learning.mmd import Polynomial, taylor

N = 64
PARAMETERS = 1028  # of the extractor whose gradient `naive` and `compressed` encrypt, at L = 4


@dataclass(frozen=True)
class Row:
    protocol: str
    length: int
    cpu_seconds: float
    kilobytes: float
    computed: float  # share that was computed; the rest is scaled
    error: float | None


def features(L: int, seed: int) -> Tensor:
    x = torch.randn(N, L, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x / x.norm(dim=1).max()


def exact(a: Tensor, b: Tensor, kernel: Polynomial) -> Tensor:
    x = a.clone().requires_grad_()
    mmd.between(x, b, kernel).backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    return x.grad


def packed(a: Tensor, b: Tensor, kernel: Polynomial, keys: Keys) -> tuple[float, float, float]:
    """Seconds, bytes and error of one direction."""
    plan = plan_of(kernel, a.shape[1], keys)
    begun = time.process_time()
    offer = plan.offer(keys.offering, a)
    answer = plan.answer(keys.public, offer, N, moments(b), 1.0)
    found = -2 / N * gradient(a, plan.values(keys.private, answer, N), plan.kernel, 1.0)
    seconds = time.process_time() - begun
    truth = exact(a, b, kernel)
    error = float((found - truth).abs().max() / truth.abs().max())
    return seconds, len(offer) * plan.cipher_bytes("offer") + len(answer) * plan.cipher_bytes("answer"), error


@dataclass(frozen=True)
class Keys:
    """A party's keys of either scheme."""

    private: Any
    public: Any

    @property
    def offering(self) -> Any:
        """What it encrypts its own features with."""
        return self.private if isinstance(self.private, ckks.PrivateKey) else self.public


def new_keys(scheme: str, bits: int) -> Keys:
    if scheme == "ckks":
        return Keys(*ckks.generate(N))
    private = generate(bits, insecure=bits < 2048)
    return Keys(private, private.public)


def plan_of(kernel: Polynomial, L: int, keys: Keys) -> Any:
    if isinstance(keys.private, ckks.PrivateKey):
        return PackedCkks(kernel, L, N)
    return Packed(kernel, L, keys.public.bits)


def prepare(public: Any) -> None:
    """What is done once a run: the table of a Paillier key, loading a CKKS key."""
    if isinstance(public, ckks.PublicKey):
        public.check("a key")
    else:
        public.encrypt(0)


def papers(
    a: Tensor, b: Tensor, kernel: Polynomial, peer: PrivateKey, compressed: bool, chained: bool, part: int
) -> tuple[float, float, float, float]:
    """Seconds (scaled from `part` rows), bytes, share computed and error of one direction of a paper's protocol."""
    L, key = a.shape[1], peer.public
    plan = Forward(kernel, L, compressed)
    slopes, known = plan.terms.slopes(a)
    rows, constants = -2 / N * slopes.flatten(0, 1), -2 / N * known.flatten()
    outputs, monomials = (N * L if chained else PARAMETERS), len(plan.terms.received)
    if not chained:  # any linear map of the right size costs what the one of an extractor costs
        mix = torch.randn(PARAMETERS, N * L, generator=torch.Generator().manual_seed(1), dtype=torch.float64) / N
        rows, constants = mix @ rows, mix @ constants
    sent = monomials * (1 if compressed else N)
    begun = time.process_time()
    means = plan.means(key, plan.offer(key, b))
    first = time.process_time() - begun
    count = min(part, outputs)
    begun = time.process_time()
    ciphers = plan.combine(key, means, rows[:count], constants[:count])
    masked, masks = plan.mask(key, ciphers)
    found = plan.unmask(key, plan.unveil(peer, masked), masks, (count,))
    rest = (time.process_time() - begun) * outputs / count
    truth = exact(a, b, kernel).flatten()
    truth = truth if chained else mix @ truth
    error = float((found - truth[:count]).abs().max() / truth.abs().max())
    size = (sent + outputs) * key.cipher_bytes + outputs * key.bits // 8
    return first + rest, size, count / outputs, error


def compare(bits: int, lengths: Sequence[int], part: int, schemes: Sequence[str]) -> list[Row]:
    both = {scheme: (new_keys(scheme, bits), new_keys(scheme, bits)) for scheme in schemes}
    for pair in both.values():
        for mine in pair:
            prepare(mine.public)
    keys = [mine.private for mine in both["paillier"]]
    kernel, table = taylor(0.5, 2), []
    for L in lengths:
        a, b = features(L, 0), features(L, 1)
        for scheme, (one, two) in both.items():
            name = "packed" if scheme == "paillier" else f"packed, {scheme}"
            table.append(_row(name, L, [packed(a, b, kernel, one), packed(b, a, kernel, two)], 1.0))
        variants = [("both", True, True)] if L <= 64 else []
        if L == 4:
            variants += [("chain_rule", False, True), ("compressed", True, False), ("naive", False, False)]
        for name, compressed, chained in variants:
            found = [papers(a, b, kernel, keys[1], compressed, chained, part)]
            found.append(papers(b, a, kernel, keys[0], compressed, chained, part))
            table.append(_row(name, L, [(f[0], f[1], f[3]) for f in found], found[0][2]))
        print(*(_line(r) for r in table if r.length == L), sep="\n", flush=True)
    return table


def _row(name: str, L: int, runs: Sequence[tuple[float, float, float]], computed: float) -> Row:
    return Row(name, L, sum(r[0] for r in runs), sum(r[1] for r in runs) / 1000, computed, max(r[2] for r in runs))


def _line(r: Row) -> str:
    mark = "" if r.computed == 1 else f" * ({r.computed:.1%} of the rows computed)"
    return (
        f"L={r.length:<4} {r.protocol:12} {r.cpu_seconds:10.3f} CPU s {r.kilobytes:12.1f} kB  error {r.error:.1e}{mark}"
    )


@dataclass(frozen=True)
class Socket:
    scheme: str
    length: int
    wall_seconds: float  # a batch, from the features to the gradient
    cpu_seconds: float  # of one party
    kilobytes: float  # sent by one party


def party(scheme: str, L: int, bits: int, repeats: int, link: socket.socket, seed: int, result: object) -> None:
    """One of two processes: own offer, the answer to the peer's, own gradient."""
    torch.set_num_threads(1)
    mine = new_keys(scheme, bits)
    plan = plan_of(taylor(0.5, 2), L, mine)
    theirs: Any
    if scheme == "ckks":
        theirs = ckks.PublicKey(mine.public.block, _exchange(link, mine.public.data))
    else:
        theirs = PublicKey.from_bytes(_exchange(link, mine.public.to_bytes()), bits)
    for key in (mine.public, theirs):
        prepare(key)
    _exchange(link, b"ready")
    walls, cpus, sent = [], [], 0
    for i in range(repeats):
        a = features(L, 2 * i + seed)
        begun, cpu = time.perf_counter(), time.process_time()
        offer = _pack(plan.offer(mine.offering, a), bits)
        got = _unpack(_exchange(link, offer), scheme, plan.cipher_bytes("offer"))
        if scheme == "paillier":
            theirs.check(got)
        answer = _pack(plan.answer(theirs, got, N, moments(a), 1.0), bits)
        values = plan.values(mine.private, _unpack(_exchange(link, answer), scheme, plan.cipher_bytes("answer")), N)
        gradient(a, values, plan.kernel, 1.0)
        walls.append(time.perf_counter() - begun)
        cpus.append(time.process_time() - cpu)
        sent = len(offer) + len(answer)
    result.put((min(walls), min(cpus), sent / 1000))  # type: ignore[attr-defined]


def _pack(ciphers: Sequence[int | bytes], bits: int) -> bytes:
    return b"".join(c if isinstance(c, bytes) else c.to_bytes(bits // 4, "big") for c in ciphers)


def _unpack(data: bytes, scheme: str, size: int) -> list[Any]:
    parts = [data[i : i + size] for i in range(0, len(data), size)]
    return list(parts) if scheme == "ckks" else [int.from_bytes(part, "big") for part in parts]


def _receive(link: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = link.recv(min(1 << 20, size - len(data)))
        if not more:
            raise SystemExit("the other process ended")
        data += more
    return data


def _exchange(link: socket.socket, data: bytes) -> bytes:
    """Send and receive at once: neither waits for the other to read."""
    sender = threading.Thread(target=link.sendall, args=(struct.pack(">Q", len(data)) + data,))
    sender.start()
    (size,) = struct.unpack(">Q", _receive(link, 8))
    got = _receive(link, size)
    sender.join()
    return got


def two_processes(bits: int, lengths: Sequence[int], repeats: int, schemes: Sequence[str]) -> list[Socket]:
    context, table = multiprocessing.get_context("spawn"), []
    for scheme, L in itertools.product(schemes, lengths):
        with socket.create_server(("127.0.0.1", 0)) as server:
            one = socket.create_connection(server.getsockname())
            two, _ = server.accept()
        results = context.Queue()
        parties = [
            context.Process(target=party, args=(scheme, L, bits, repeats, s, i, results))
            for i, s in enumerate((one, two))
        ]
        for p in parties:
            p.start()
        found = [results.get(timeout=900) for _ in parties]
        for p in parties:
            p.join()
        wall, cpu, sent = (max(f[i] for f in found) for i in range(3))
        table.append(Socket(scheme, L, wall, cpu, sent))
        said = f"{wall:8.3f} s a batch, {cpu:8.3f} CPU s and {sent:8.1f} kB a party"
        print(f"two processes {scheme:8} L={L:<4} {said}", flush=True)
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bits", type=int, default=3072)
    parser.add_argument("--lengths", default="4,64,256")
    parser.add_argument("--rows", type=int, default=24, help="rows of the paper's gradient that are computed")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--skip", choices=["compare", "socket"])
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    lengths = [int(x) for x in chosen.lengths.split(",")]
    schemes = ["paillier"]
    if importlib.util.find_spec("tenseal"):
        schemes.append("ckks")
    else:
        print("without CKKS: the extra `ckks` is not installed")
    rows = [] if chosen.skip == "compare" else compare(chosen.bits, lengths, chosen.rows, schemes)
    for L in lengths:
        by = {r.protocol: r for r in rows if r.length == L}
        for name in [n for n in by if not n.startswith("packed")]:
            for mine in [n for n in by if n.startswith("packed")]:
                faster, smaller = (
                    by[name].cpu_seconds / by[mine].cpu_seconds,
                    by[name].kilobytes / by[mine].kilobytes,
                )
                print(f"L={L}: {mine} is {faster:.3g} times faster than {name} and sends {smaller:.3g} times less")
    pairs = [] if chosen.skip == "socket" else two_processes(chosen.bits, lengths, chosen.repeats, schemes)
    if chosen.out:
        result = {"bits": chosen.bits, "n": N, "python": sys.version.split()[0]}
        found = {"protocols": [asdict(r) for r in rows], "two_processes": [asdict(p) for p in pairs]}
        chosen.out.write_text(json.dumps(result | found, indent=1) + "\n")


if __name__ == "__main__":
    main()
