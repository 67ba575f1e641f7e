"""A head of one's own: NormFace (Wang et al., L2 Hypersphere Embedding for Face Verification, ACM MM 2017).

visard run --plugin examples/normface.py fedavg --set method.head.kind=normface --set method.head.scale=20
"""

from torch import Tensor

from visard.learning.heads import Head, cosine
from visard.plugins import register


@register("heads", "normface")
class NormFace(Head):
    r"""Softmax of scaled cosines without a margin: $L = -\log[e^{s\cos\theta_y} / \sum_j e^{s\cos\theta_j}]$."""

    def __init__(self, classes: int, embedding: int, scale: float = 20.0) -> None:
        super().__init__(classes, embedding)
        self.scale = scale

    def scores(self, f: Tensor, w: Tensor, labels: Tensor | None) -> Tensor:
        return self.scale * cosine(f, w)
