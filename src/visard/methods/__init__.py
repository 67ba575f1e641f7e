"""The methods by name. To add one: its file, its preset, its golden test, its docs card, and a line here."""

from __future__ import annotations

from typing import Any

from visard.core import Method
from visard.errors import UsageError, did_you_mean
from visard.methods.baselines import Central, Local, Pretrain, TargetOnly
from visard.methods.central_mmd import CentralMMD
from visard.methods.domain_adaptation import DAN, DANN
from visard.methods.encrypted_mmd import EncryptedMMD
from visard.methods.fedavg import FedAvg
from visard.methods.fedface import FedFace
from visard.methods.fedfr_da import FedFRDA
from visard.methods.fedfr_joint import FedFRJoint
from visard.methods.finetune import FineTune
from visard.methods.hf_maml import HFMaml

METHODS: dict[str, type[Method[Any]]] = {
    m.name: m
    for m in (
        Central,
        Local,
        Pretrain,
        FedAvg,
        HFMaml,
        TargetOnly,
        FineTune,
        DAN,
        DANN,
        FedFRDA,
        FedFRJoint,
        FedFace,
        EncryptedMMD,
        CentralMMD,
    )
}


def find(name: str) -> type[Method[Any]]:
    """The class of a method; one clear line if there is none of that name."""
    if name not in METHODS:
        raise UsageError(f"unknown method {name!r}{did_you_mean(name, METHODS)}")
    return METHODS[name]
