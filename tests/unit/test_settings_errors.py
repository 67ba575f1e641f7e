"""Wrong settings at any depth: one line that names the setting."""

from __future__ import annotations

import pytest

from visard.config import load
from visard.errors import UsageError


@pytest.mark.parametrize(
    ("preset", "override", "said"),
    [
        ("fedavg", "partition.split=[0.5,0.1,0.1]", "preset fedavg: partition: split (0.5, 0.1, 0.1) must sum to 1"),
        ("fedavg", 'data={sets=[{path="a",rol="x"}]}', "unknown setting data.sets.rol (did you mean 'role'?)"),
        ("fedavg", "rounds=5", "unknown setting rounds (did you mean 'method.rounds'?)"),
        ("fedavg", "lr=0.1", "unknown setting lr (did you mean 'method.training.lr'?)"),
        ("fedavg", "clients=5", "unknown setting clients (did you mean 'partition.clients'?)"),
        ("fedavg", "parties.a.foo=1", "unknown setting parties.a.foo"),
        ("fedfr-da", "method.clustering.d=-1", "method.clustering.d = -1.0: must be positive, auto or stable"),
        (
            "fedfr-da",
            "method.clustering.method=foo",
            "preset fedfr-da: method.clustering.method: unknown clustering 'foo'",
        ),
        ("fedavg", "method.training.lr=-1", "method.training.lr = -1: input should be greater than 0"),
    ],
)
def test_the_setting_is_named(preset: str, override: str, said: str) -> None:
    with pytest.raises(UsageError) as error:
        load(preset, [override])
    assert said in str(error.value)
    assert "\n" not in str(error.value)
