"""For PYTHONPATH of the processes of a test: who looks up or calls an address outside is written down and refused."""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from typing import Any

HOME = {"localhost", "", "0.0.0.0", "::", socket.gethostname()}


def outside(host: object) -> bool:
    """Whether a name or address is not of this machine."""
    if isinstance(host, bytes):
        host = host.decode()
    if not isinstance(host, str) or host in HOME:
        return False
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return True


def watch(event: str, args: tuple[Any, ...]) -> None:
    if event in ("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"):
        host = args[0]
    elif event == "socket.connect" and isinstance(args[1], tuple):
        host = args[1][0]
    else:
        return
    if outside(host):
        with open(os.environ["VISARD_LOOKUPS"], "a") as file:
            file.write(f"{' '.join(sys.argv[:3])}: {event} {host}\n")
        raise OSError(f"{host} is outside")


if "VISARD_LOOKUPS" in os.environ:
    with open(os.environ["VISARD_LOOKUPS"] + ".watched", "a") as started:
        started.write(f"{os.getpid()}\n")
    sys.addaudithook(watch)
