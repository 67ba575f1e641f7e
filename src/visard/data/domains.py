"""Which domain an identity belongs to: where most of its pictures are."""

import numpy as np
import numpy.typing as npt

from visard.data.attributes import matching
from visard.data.faces import FaceSet
from visard.errors import UsageError
from visard.names import did_you_mean

Ints = npt.NDArray[np.int64]


def home_domain(faces: FaceSet) -> Ints:
    """The domain number of each identity of the set (the smaller number where two tie)."""
    table = np.zeros((len(faces.names), len(faces.domains)), np.int64)
    np.add.at(table, (faces.identity, faces.domain), 1)
    return np.asarray(table.argmax(axis=1), np.int64)


def domain_groups(faces: FaceSet, identities: Ints) -> dict[str, Ints]:
    """`identities` by domain; of a set with one domain all of them, called "test"."""
    if len(faces.domains) == 1:
        return {"test": identities}
    home = home_domain(faces)[identities]
    groups = {name: identities[home == number] for number, name in enumerate(faces.domains)}
    return {name: group for name, group in groups.items() if len(group)}


def identities_in(faces: FaceSet, where: str | tuple[str, ...], identities: Ints) -> Ints:
    """Those of `identities` in the named domains, or with most pictures fitting an attribute expression."""
    if isinstance(where, str) and where not in faces.domains and not faces.attribute_names:
        where = (where,)  # without attributes it can only be a misspelt domain
    if isinstance(where, str) and where not in faces.domains:
        fits = np.bincount(faces.identity, matching(faces, where), len(faces.names))
        pictures = np.bincount(faces.identity, minlength=len(faces.names))
        chosen = identities[2 * fits[identities] > pictures[identities]]
    else:
        names = (where,) if isinstance(where, str) else where
        for name in names:
            if name not in faces.domains:
                hint = did_you_mean(name, faces.domains)
                raise UsageError(f"{faces.path.name} has no domain {name!r}{hint}")
        wanted = [faces.domains.index(name) for name in names]
        chosen = identities[np.isin(home_domain(faces)[identities], wanted)]
    if not len(chosen):
        raise UsageError(f"{faces.path.name} has no identity with enough pictures in domain {where!r}")
    return chosen
