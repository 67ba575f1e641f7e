"""FedFR-DA: heads never leave a client, and go on from round to round."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from tests.golden.test_fedfr_da_golden import TRAINING, begin, method

from visard.methods.domain_adaptation import SOURCE


def test_heads_go_on_where_they_stopped(tmp_path: Path) -> None:
    """At a learning rate of next to nothing the second round leaves the heads of the first one as they were."""
    how = method(training=replace(TRAINING, lr=1e-12, weight_decay=0.0), target_head="random")
    net, server = begin(tmp_path, how)
    kept = []
    for r in range(2):
        net.begin("federate", r)
        server = how.round(server, net)
        kept.append({c: net.states.client_state(c)["head"]["weight"].clone() for c in (SOURCE, *server.labelled)})
    assert len(kept[0]) == 3
    for c in kept[0]:
        torch.testing.assert_close(kept[1][c], kept[0][c], rtol=0, atol=1e-6)
    assert not torch.allclose(kept[0]["target-0"][:2], kept[0]["target-1"][:2], atol=0.1), "random, each its own"
