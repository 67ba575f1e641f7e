"""A node of a deployment that plays with toys, and forges its answers when the run tells it to."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from visard.deployment.flower import require

require()

from tests.policies import ANYTHING  # noqa: E402

from visard.cli.deploy import take_part  # noqa: E402
from visard.deployment import supervisor  # noqa: E402
from visard.deployment.flower import client  # noqa: E402
from visard.engines.codec import decode, encode  # noqa: E402
from visard.engines.request import Request, unpack  # noqa: E402
from visard.processes import Recipe  # noqa: E402


class Forger(supervisor.Supervisor):
    """As `Supervisor`, but `settings["forge"]` names what it does to answers."""

    kept: tuple[bytes, bytes] | None = None

    def do(self, header: bytes, payload: bytes) -> tuple[bytes, bytes]:
        answer = super().do(header, payload)
        request = unpack(header, Request)
        forge = request.settings.get("forge", {}).get(request.client)
        if forge == "old":
            self.kept = self.kept or answer
            return self.kept
        if forge == "undeclared":
            from tests.toys import ToyUp

            up = decode(answer[1], ToyUp)
            body = encode(up).replace(b'"loss":', b'"face":1,"loss":')
            length = int.from_bytes(body[5:9], "little") + len(b'"face":1,')
            return answer[0], body[:5] + length.to_bytes(4, "little") + body[9:]
        if forge and forge.startswith("die uploading ") and not (mark := Path(forge[14:])).exists():
            client.push = lambda objects, names, put: upload_one(mark, objects, set(names), put)
        return answer


def upload_one(mark: Path, objects: dict[str, Any], names: set[str], put: Any) -> None:
    """Upload one of the parts of a reply, and die."""
    assert len(names) > 1
    name = min(names)
    put(name, [objects[name].deflate()])
    mark.touch()
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    server, keys, number, state, folder, roles = sys.argv[1:]
    supervisor.Supervisor = Forger  # type: ignore[misc]
    client.BEAT = 10.0  # on a busy machine a restart takes its time: the server is to wait for a minute
    recipe = Recipe("tests.toys:party_world", {"folder": folder, "roles": json.loads(roles)})
    take_part(server, Path(keys), number, recipe, Path(state), 0.5, ANYTHING.model_dump(mode="json"))
