"""Keys of a deployment: what is made, what is added later, and one line for what cannot be."""

from __future__ import annotations

import hashlib
import shutil
import stat
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("cryptography") is None:
    pytest.skip("needs the package cryptography: pip install 'visard[flower]'", allow_module_level=True)

from cryptography import x509

from visard.cli.deploy import own_folder
from visard.deployment.keys import (
    Assignment,
    PartyKeys,
    ServerKeys,
    add_party,
    bind_roles,
    fingerprints,
    make_keys,
)
from visard.errors import UsageError, VisardError
from visard.files import only_user

pytestmark = pytest.mark.flower


def test_a_number_that_has_roles_is_never_given_again(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", 2, ["server.example"], Assignment({"node-2": ("house-2",)}))
    (tmp_path / "keys" / "server" / "nodes" / "node-2.pub").unlink()
    purposes = add_party(tmp_path / "keys" / "server", tmp_path / "late", [])
    assert "--node 3" in purposes[tmp_path / "late"]
    assert "house-2" not in purposes[tmp_path / "late"]


def test_a_party_that_comes_later_gets_the_next_number_and_its_roles(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", 2, ["server.example"], Assignment({"node-1": ("house-1",)}))
    purposes = add_party(tmp_path / "keys" / "server", tmp_path / "late", ["house-3"])
    assert list(purposes) == [tmp_path / "late"]
    assert "--node 3 --role house-3" in purposes[tmp_path / "late"]
    server, own = ServerKeys.load(tmp_path / "keys"), PartyKeys.load(tmp_path / "late", "3")
    assert list(server.parties) == ["node-1", "node-2", "node-3"]
    assert server.assignment.of == {"node-1": ("house-1",), "node-3": ("house-3",)}
    assert server.parties["node-3"].public_numbers() == own.private.public_key().public_numbers()
    assert own.ca.read_bytes() == server.ca.read_bytes()
    assert stat.S_IMODE((tmp_path / "late" / "node-3.key").stat().st_mode) == 0o600
    with pytest.raises(UsageError, match="late is not empty"):
        add_party(tmp_path / "keys" / "server", tmp_path / "late", [])
    with pytest.raises(UsageError, match="house-1 belongs to node-1 and to node-4"):
        add_party(tmp_path / "keys" / "server", tmp_path / "later", ["house-1"])
    assert not (tmp_path / "later").exists()


def test_roles_are_bound_to_keys_that_exist(tmp_path: Path) -> None:
    purposes = make_keys(tmp_path / "keys", 2, ["server.example"], Assignment({"node-1": ("house-1",)}))
    assert "it has none yet: visard keys bind" in purposes[tmp_path / "keys" / "node-2"]
    bind_roles(tmp_path / "keys" / "server", ["2=house-2", "1=pool", "1=house-1"])
    bound = {"node-1": ("house-1", "pool"), "node-2": ("house-2",)}
    assert ServerKeys.load(tmp_path / "keys").assignment.of == bound
    with pytest.raises(UsageError, match="there is no key of node-3 in"):
        bind_roles(tmp_path / "keys", ["3=house-3"])
    with pytest.raises(UsageError, match="house-1 belongs to node-1 and to node-2"):
        bind_roles(tmp_path / "keys", ["2=house-1"])
    assert ServerKeys.load(tmp_path / "keys").assignment.of == bound


@pytest.mark.parametrize("host", ["", "ex ample", "a:9443", "-x", "a..b", "https://a", "x" * 64, "é.example"])
def test_what_is_no_host_is_refused(tmp_path: Path, host: str) -> None:
    with pytest.raises(UsageError, match="neither a name nor an address"):
        make_keys(tmp_path / "keys", 1, [host])
    assert not (tmp_path / "keys").exists()


def test_hosts_are_in_the_certificate(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", 1, ["server_1.example", "10.0.0.7", "fd00::1"])
    certificate = x509.load_pem_x509_certificate((tmp_path / "keys" / "server" / "server.crt").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["server_1.example", "localhost"]
    assert [str(a) for a in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.7", "fd00::1", "127.0.0.1"]


def test_a_file_is_no_folder_for_keys(tmp_path: Path) -> None:
    (tmp_path / "keys").touch()
    with pytest.raises(UsageError, match="keys is a file, not a folder"):
        make_keys(tmp_path / "keys", 1, ["a"])


def test_a_state_folder_that_others_can_open_is_refused(tmp_path: Path) -> None:
    made = own_folder(tmp_path / "new" / "state")
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    made.chmod(0o755)
    with pytest.raises(UsageError, match="other accounts can open this folder; give a new one, or: chmod 700"):
        own_folder(made)


def test_two_processes_do_not_share_a_folder(tmp_path: Path) -> None:
    raises = pytest.raises(VisardError, match="being written by another visard")
    with only_user(tmp_path), raises, only_user(tmp_path):
        pass
    with only_user(tmp_path):
        pass
    with pytest.raises(VisardError, match="cannot write"), only_user(tmp_path / "nowhere"):
        pass


def test_a_fingerprint_is_the_same_at_the_party_and_at_the_server(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", 2, ["localhost"])
    server, whole = (fingerprints(tmp_path / "keys" / name) for name in ("server", ""))
    own = fingerprints(tmp_path / "keys" / "node-2")
    assert whole == server
    assert own == {"node-2": server["node-2"]}
    assert len({*server.values()}) == 2
    der = subprocess.run(
        ["openssl", "pkey", "-pubin", "-outform", "DER", "-in", tmp_path / "keys" / "server" / "nodes" / "node-1.pub"],
        capture_output=True, check=True,
    ).stdout if shutil.which("openssl") else None  # fmt: skip
    assert der is None or hashlib.sha256(der).hexdigest() == server["node-1"]
    with pytest.raises(UsageError, match="holds no key of a node"):
        fingerprints(tmp_path)
