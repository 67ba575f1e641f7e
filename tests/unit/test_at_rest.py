"""Encrypted files: what comes back is what went in, and whatever is changed, moved or cut is one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.test_gallery import ABOUT, crowd

from visard import at_rest
from visard.at_rest import CHUNK, HEAD, MAGIC, TAG, Key, decrypt
from visard.engines.checkpoint import Checkpoint, Packs
from visard.errors import UsageError, VisardError
from visard.inference.gallery import Gallery
from visard.models.files import read_model, save_model

SPEC = {"model": "tiny", "embedding": "16", "size": "32"}
CHANGED = "was changed, cut short or given another name"


@pytest.fixture
def key(tmp_path: Path) -> Key:
    return Key.make(tmp_path / "my.key")


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(at_rest, "CHUNK", 64)
    return 64


def pieces(data: bytes, chunk: int) -> list[bytes]:
    """Head and chunks of an encrypted file."""
    body = data[HEAD:]
    return [data[:HEAD], *(body[i : i + chunk + TAG] for i in range(0, len(body), chunk + TAG))]


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK])
def test_what_comes_back_is_what_went_in(key: Key, size: int) -> None:
    data = os.urandom(size)
    stored = key.encrypt(data, "a file")
    assert decrypt(key, stored, "a file", "here") == data
    assert len(stored) == HEAD + size + TAG * max(1, -(-size // CHUNK))
    assert key.encrypt(data, "a file") != stored, "a new salt each time"
    assert size < 16 or data[:16] not in stored


def test_the_format_in_plain_steps(tmp_path: Path, small_chunks: int) -> None:
    """The construct once more, by hand: so that another program can read a file, and it does not change unnoticed."""
    secret = bytes(range(32))
    (tmp_path / "k").write_bytes(secret)
    (tmp_path / "k").chmod(0o600)
    key = Key.load(tmp_path / "k")
    assert key is not None
    data = os.urandom(150)
    head, *chunks = pieces(key.encrypt(data, "gallery staff.gallery"), small_chunks)
    assert head[: len(MAGIC)] == b"visard encrypted 1\n"
    assert head[len(MAGIC) : -32] == HKDF(SHA256(), 8, b"", b"visard id").derive(secret)
    own = HKDF(SHA256(), 32, head[-32:], b"visard file gallery staff.gallery").derive(secret)
    nonces = [b"\0" * 11 + b"\0", b"\0" * 10 + b"\1" + b"\0", b"\0" * 10 + b"\2" + b"\1"]
    plain = [AESGCM(own).decrypt(nonce, chunk, None) for nonce, chunk in zip(nonces, chunks, strict=True)]
    assert b"".join(plain) == data


@given(st.data())
def test_any_change_is_noticed(data: st.DataObject) -> None:
    key = Key(b"k" * 32, Path("my.key"))
    content = data.draw(st.binary(max_size=100))
    stored = bytearray(key.encrypt(content, "x"))
    at = data.draw(st.integers(0, len(stored) - 1))
    how = data.draw(st.sampled_from(["flip", "cut", "insert", "drop"]))
    if how == "flip":
        stored[at] ^= data.draw(st.integers(1, 255))
    elif how == "cut":
        del stored[at:]
    elif how == "insert":
        stored[at:at] = b"\0"
    else:
        del stored[at]
    with pytest.raises(VisardError):
        decrypt(key, bytes(stored), "x", "here")


def test_chunks_cannot_be_swapped_dropped_repeated_or_borrowed(key: Key, small_chunks: int) -> None:
    data = os.urandom(4 * small_chunks)
    head, a, b, c, d = pieces(key.encrypt(data, "x"), small_chunks)
    other = pieces(key.encrypt(data, "x"), small_chunks)
    wrong = {
        "swapped": [head, b, a, c, d],
        "the last one dropped": [head, a, b, c],
        "the first one dropped": [head, b, c, d],
        "repeated": [head, a, a, b, c, d],
        "more after the end": [head, a, b, c, d, d],
        "of another file with the same content": [head, a, other[2], c, d],
        "the head of another file": [other[0], a, b, c, d],
        "nothing but the head": [head],
        "half a head": [head[:30]],
    }
    assert decrypt(key, b"".join([head, a, b, c, d]), "x", "here") == data
    for what, parts in wrong.items():
        with pytest.raises(VisardError, match=r"^here (was changed|is encrypted with another key)"):
            print(what, decrypt(key, b"".join(parts), "x", "here"))


def test_another_key_another_name_and_no_encryption_are_said_apart(key: Key, tmp_path: Path) -> None:
    stored, other = key.encrypt(b"data", "x"), Key.make(tmp_path / "other.key")
    with pytest.raises(VisardError, match=r"^here is encrypted with another key than .*other\.key$"):
        decrypt(other, stored, "x", "here")
    with pytest.raises(VisardError, match=f"^here {CHANGED}"):
        decrypt(key, stored, "y", "here")
    with pytest.raises(VisardError, match="^here is not encrypted, although a key is given"):
        decrypt(key, b"plain", "x", "here")


def test_key_files(tmp_path: Path) -> None:
    key, path = Key.make(tmp_path / "k"), tmp_path / "k"
    assert path.stat().st_mode & 0o777 == 0o600
    loaded = Key.load(path)
    assert loaded is not None
    assert loaded.id == key.id
    assert Key.load(None) is None
    with pytest.raises(UsageError, match="never overwritten"):
        Key.make(path)
    path.chmod(0o640)
    with pytest.raises(UsageError, match=r"can be read by others \(mode 640\): chmod 600 it"):
        Key.load(path)
    path.chmod(0o600)
    for content in (b"", b"short", bytes(33)):
        path.write_bytes(content)
        with pytest.raises(UsageError, match="is no key: visard keys file"):
            Key.load(path)
    for missing in (tmp_path / "gone", tmp_path):
        with pytest.raises(UsageError, match="cannot be read"):
            Key.load(missing)


def some_gallery(seed: int = 0) -> Gallery:
    names, features = crowd(seed=seed)
    return Gallery.enrol(names, features, ABOUT)


def test_a_gallery(key: Key, tmp_path: Path) -> None:
    whole, path = some_gallery(), tmp_path / "staff.gallery"
    whole.save(path, key)
    again = Gallery.load(path, key)
    assert again.names == whole.names
    assert again.about == whole.about
    for name in ("templates", "pictures", "probes", "owner"):
        assert np.array_equal(getattr(again, name), getattr(whole, name)), name
    content = path.read_bytes()
    assert b"p003" not in content
    assert whole.templates[3].tobytes()[:16] not in content
    assert path.stat().st_mode & 0o777 == 0o600


def test_galleries_cannot_be_exchanged(key: Key, tmp_path: Path) -> None:
    staff, guests, plain = (tmp_path / f"{name}.gallery" for name in ("staff", "guests", "plain"))
    some_gallery(0).save(staff, key)
    some_gallery(1).save(guests, key)
    some_gallery(2).save(plain)
    with pytest.raises(UsageError, match=r"staff\.gallery is encrypted: give its key \(--encrypt-with KEYFILE\)"):
        Gallery.load(staff)
    with pytest.raises(VisardError, match=r"plain\.gallery is not encrypted, although a key is given"):
        Gallery.load(plain, key)
    staff.write_bytes(guests.read_bytes())
    with pytest.raises(VisardError, match=rf"staff\.gallery {CHANGED}"):
        Gallery.load(staff, key)


def test_people_are_removed_with_all_that_is_theirs() -> None:
    whole = some_gallery()
    left = whole.without(["p003", "p007"])
    assert left.names == tuple(n for n in whole.names if n not in ("p003", "p007"))
    assert len(left.templates) == len(left.pictures) == 28
    assert len(left.probes) == len(whole.probes) - 8
    for row, owner in zip(left.probes, left.owner, strict=True):
        before = int(np.flatnonzero((whole.probes == row).all(axis=1))[0])
        assert whole.names[whole.owner[before]] == left.names[owner]
    assert not left._problem()
    with pytest.raises(UsageError, match="'x' is not enrolled"):
        whole.without(["x"])
    with pytest.raises(UsageError, match="everyone"):
        whole.without(whole.names)


def test_class_vectors(key: Key, tmp_path: Path) -> None:
    path, held = tmp_path / "class_vectors.safetensors", {"class_vectors": torch.randn(5, 16)}
    save_model(path, held, SPEC, key=key)
    weights, spec = read_model(path, key)
    assert torch.equal(weights["class_vectors"], held["class_vectors"])
    assert spec["embedding"] == "16"
    with pytest.raises(UsageError, match="is encrypted: give its key"):
        read_model(path)
    save_model(tmp_path / "plain.safetensors", held, SPEC)
    assert torch.equal(read_model(tmp_path / "plain.safetensors", key)[0]["class_vectors"], held["class_vectors"])


def filled(folder: Path, key: Key | None) -> Checkpoint:
    states = Checkpoint(folder, "hash", key=key)
    for step in range(2):
        for client in "ab":
            state = {"client": client, "step": step, "secret": torch.full((40,), 3.25)}
            file = states.packs.write(states.new_pack, state, states.state_file(client), client)
            assert file is not None
            states.adopt(client, file)
        (folder / "ledger.jsonl").touch()
        states.commit({"template": torch.full((40,), 3.25), "step": step}, 0)
    return states


def test_a_checkpoint(key: Key, tmp_path: Path) -> None:
    filled(tmp_path / "c", key)
    pattern = torch.full((4,), 3.25).numpy().tobytes()
    files = [path for path in (tmp_path / "c").rglob("*") if path.is_file()]
    assert not [path for path in files if pattern in path.read_bytes()]
    filled(tmp_path / "plain", None)
    assert [path for path in (tmp_path / "plain").rglob("*") if path.is_file() and pattern in path.read_bytes()]
    again = Checkpoint(tmp_path / "c", "hash", key=key)
    assert again.resume()
    assert again.server_state(dict)["step"] == 1
    assert again.client_state("b")["client"] == "b"


def test_unchanged_states_are_not_written_again(key: Key, tmp_path: Path) -> None:
    (tmp_path / "clients").mkdir()
    packs = Packs(tmp_path, key)
    first = packs.write("clients/1", {"x": 1}, None, "a")
    assert first is not None
    assert packs.write("clients/1", {"x": 1}, first, "a") is None
    assert packs.write("clients/1", {"x": 2}, first, "a") is not None


def test_another_client_s_state_is_refused(key: Key, tmp_path: Path) -> None:
    states = filled(tmp_path / "c", key)
    file = states.state_file("a")
    with pytest.raises(VisardError, match=f"the state of b in .* {CHANGED}"):
        states.packs.read(file, "b")


def test_a_checkpoint_with_another_key_or_none(key: Key, tmp_path: Path) -> None:
    filled(tmp_path / "c", key)
    filled(tmp_path / "plain", None)
    with pytest.raises(VisardError, match="c is encrypted: give its key"):
        Checkpoint(tmp_path / "c", "hash").resume()
    with pytest.raises(VisardError, match=r"c is encrypted with another key than .*other\.key"):
        Checkpoint(tmp_path / "c", "hash", key=Key.make(tmp_path / "other.key")).resume()
    with pytest.raises(VisardError, match="plain is not encrypted, although a key is given"):
        Checkpoint(tmp_path / "plain", "hash", key=key).resume()


def test_a_manifest_cannot_be_forged_without_the_key(key: Key, tmp_path: Path) -> None:
    """Who can write to the disk, but has no key, gives client a an earlier state and makes the chain fit again."""
    folder = tmp_path / "c"
    states = filled(folder, key)
    forged = states.committed.clients | {"a": states.committed.clients["b"]}
    position = type(states.committed)(**{**vars(states.committed), "clients": forged})
    states.chain._key, states.chain._last = None, ""  # as far as an attacker gets
    lines = states.chain.path.read_text().splitlines()[:1]
    states.chain._last = lines[0].split('"')[1]
    states.chain.path.write_text(lines[0] + "\n")
    states.chain.append(2, states._content(position))
    states._write_manifest(position)
    with pytest.raises(VisardError, match="was changed or replaced"):
        Checkpoint(folder, "hash", key=key).resume()


def test_nothing_decrypted_is_written_anywhere(key: Key, tmp_path: Path) -> None:
    some_gallery().save(tmp_path / "staff.gallery", key)
    before = sorted(tmp_path.rglob("*"))
    program = (
        "import os, sys\n"
        "from visard.at_rest import Key\n"
        "from visard.inference.gallery import Gallery\n"
        "written = []\n"
        "def hook(event, given):\n"
        "    if event == 'open' and isinstance(given[2], int) and given[2] & (os.O_WRONLY | os.O_RDWR):\n"
        "        written.append(given[0])\n"
        "sys.addaudithook(hook)\n"
        "gallery = Gallery.load('staff.gallery', Key.load('my.key'))\n"
        "gallery.comparison_threshold(0.1)\n"
        "print(len(gallery), written)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=os.environ | {"TMPDIR": str(tmp_path)},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.stdout == "30 []\n", done.stderr
    assert sorted(tmp_path.rglob("*")) == before
