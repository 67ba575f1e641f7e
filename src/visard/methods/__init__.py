"""The methods by name. To add one: its file, its preset, its golden test, its docs card, and a line here.

`listing.json` is what `visard methods` shows without importing them; `visard methods --json` makes it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from visard.plugins import Registry

if TYPE_CHECKING:
    from visard.core import Method


def _is_method(value: Any) -> bool:
    from visard.core import Method

    return isinstance(value, type) and issubclass(value, Method)


METHODS: Registry[type[Method[Any]]] = Registry(
    "methods",
    {
        "central": "visard.methods.baselines:Central",
        "local": "visard.methods.baselines:Local",
        "pretrain": "visard.methods.baselines:Pretrain",
        "fedavg": "visard.methods.fedavg:FedAvg",
        "hf-maml": "visard.methods.hf_maml:HFMaml",
        "ditto": "visard.methods.ditto:Ditto",
        "fedrep": "visard.methods.fedrep:FedRep",
        "fedbabu": "visard.methods.fedbabu:FedBabu",
        "target-only": "visard.methods.baselines:TargetOnly",
        "finetune": "visard.methods.finetune:FineTune",
        "dan": "visard.methods.domain_adaptation:DAN",
        "dann": "visard.methods.domain_adaptation:DANN",
        "fedfr-da": "visard.methods.fedfr_da:FedFRDA",
        "fedfr-joint": "visard.methods.fedfr_joint:FedFRJoint",
        "fedface": "visard.methods.fedface:FedFace",
        "encrypted-mmd": "visard.methods.encrypted_mmd:EncryptedMMD",
        "central-mmd": "visard.methods.central_mmd:CentralMMD",
    },
    _is_method,
)
