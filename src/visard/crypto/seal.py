"""The cipher library behind CKKS, or a clear line where it is not installed. The only place that imports it."""

from __future__ import annotations

import functools
from typing import Any

from visard.crypto import residues
from visard.errors import UsageError


@functools.cache
def library() -> Any:
    try:
        import tenseal.sealapi as seal
        import zstandard  # noqa: F401
    except ImportError:
        raise UsageError("CKKS needs tenseal: pip install 'visard[ckks]'") from None
    return seal


class Ring:
    """The one set of parameters, 128-bit secure by the library's own table, and what works in it."""

    def __init__(self) -> None:
        seal = library()
        parameters = seal.EncryptionParameters(seal.SCHEME_TYPE.CKKS)
        parameters.set_poly_modulus_degree(residues.DEGREE)
        parameters.set_coeff_modulus(seal.CoeffModulus.Create(residues.DEGREE, list(residues.BITS)))
        if tuple(m.value() for m in parameters.coeff_modulus()) != residues.PRIMES:
            raise UsageError("tenseal chooses other primes than visard expects: install the version of constraints.txt")
        self.context = seal.SEALContext(parameters, True, seal.SEC_LEVEL_TYPE.TC128)
        if not self.context.parameters_set():
            raise UsageError(f"tenseal refuses the parameters: {self.context.parameters_error_message()}")
        self.encoder, self.evaluator = seal.CKKSEncoder(self.context), seal.Evaluator(self.context)
        self.parms = {
            residues.KEY: self.context.key_parms_id(),
            residues.OFFER: self.context.first_parms_id(),
            residues.ANSWER: self.context.last_parms_id(),
        }

    def encode(self, values: list[float], scale: float) -> Any:
        plain = library().Plaintext()
        self.encoder.encode(values, scale, plain)
        return plain


@functools.cache
def ring() -> Ring:
    return Ring()
