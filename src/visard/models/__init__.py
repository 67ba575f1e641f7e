"""Backbones: pictures (B, 3, size, size) in [-1, 1] to embeddings (B, embedding), not normalised.

To add one: its file, and a line in BACKBONES. Weights come from torch's default generator, which the caller seeds.
"""

from collections.abc import Callable, Mapping
from functools import partial
from inspect import signature

from torch import nn

from visard.errors import UsageError
from visard.models import steps
from visard.models.inputs import Inputs, entering
from visard.models.iresnet import DEPTHS, IResNet
from visard.models.mobilefacenet import MobileFaceNet
from visard.models.resnet18 import ResNet18
from visard.models.sensors import CnnGru, Mlp
from visard.models.spherenet import SphereNet
from visard.models.tiny import Tiny
from visard.plugins import Registry

# name -> f(embedding, size) -> network, whose default for `embedding` counts where settings give none
BACKBONES: Registry[Callable[[int, int], nn.Module]] = Registry(
    "backbones",
    {
        **{name: partial(IResNet, depths) for name, depths in DEPTHS.items()},
        "mobilefacenet": MobileFaceNet,
        "spherenet20": partial(SphereNet, (1, 2, 4, 1)),
        "spherenet64": partial(SphereNet, (3, 7, 16, 3)),
        "resnet18": ResNet18,
        "tiny": Tiny,
        "tiny_nobn": partial(Tiny, batchnorm=False),
        # for sensor readings: size is how many numbers a row has
        "mlp": partial(Mlp, 32),
        "mlp128": partial(Mlp, 128),
        "cnn_gru": CnnGru,
    },
    one="model",
)
SENSORS = ("mlp", "mlp128", "cnn_gru")
NAMES = [name for name in BACKBONES.built_in if name not in SENSORS]


ONNX = "onnx"  # the name of networks that a text of steps describes, where an ONNX file was converted


def build(name: str, *, embedding: int | None = None, size: int = 112, graph: str | None = None) -> nn.Module:
    """A new network; `embedding` None is its own default (512; tiny 128), `size` the side of its pictures.

    Of networks for sensor readings `size` is how many numbers a row has. `graph` has the steps of a converted one.
    """
    if name == ONNX:
        if graph is None or embedding is None:
            raise UsageError("model.name = onnx: the network is in a file, give it with model.weights = FILE.onnx")
        return steps.build(graph, embedding, size)
    make = BACKBONES.find(name)
    if size < 32 and name in NAMES:
        raise UsageError(f"{name} needs pictures of at least 32 x 32, got size {size}")
    if embedding is not None and embedding < 1:
        raise UsageError(f"{name}: the embedding needs at least 1 dimension, got {embedding}")
    return make(embedding or default_embedding(name), size)


def build_spec(spec: Mapping[str, str], side: int | None = None) -> nn.Module:
    """A new network as the spec of a model file describes it.

    With `side`: as a run takes it, for pictures of so many pixels in [-1, 1], whatever the network itself expects.
    """
    name = spec["model"]
    made = build(name, embedding=int(spec["embedding"]), size=int(spec["size"]), graph=spec.get("graph"))
    return made if side is None or name in SENSORS else entering(made, Inputs.of_spec(dict(spec)), side)


def default_embedding(name: str) -> int:
    """The length of the embedding unless one is asked for."""
    embedding = signature(BACKBONES.find(name)).parameters.get("embedding")
    return embedding.default if embedding is not None and isinstance(embedding.default, int) else 512
