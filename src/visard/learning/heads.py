"""Classification heads that shape the embedding: ArcFace and its sub-centres, CosFace, AdaFace, softmax, SphereFace2.

Symbols: f (B, embedding) features; W (classes, embedding) class vectors; y (B,) labels; theta_j the angle
between f and w_j in radians; s (SphereFace2: r) the scale; m the margin (radians for ArcFace, else cosine).
Common to all:
- All is computed in float32 even under autocast: bfloat16 keeps 8 bits, too coarse for cosines near 1.
- A vector of length zero has no direction: it gets cosine 0 and gradient 0 instead of 0/0.
- Classes outside `mask` get logit -inf after the margin, so their softmax and gradient are exactly 0.
"""

import math
from abc import ABC, abstractmethod
from contextlib import nullcontext
from dataclasses import dataclass
from inspect import signature
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, softplus

from visard.errors import UsageError, VisardError, did_you_mean
from visard.plugins import Registry

PastPi = Literal["monotone", "plain", "easy"]

EPS = 1e-7  # 1 - EPS is the float32 just below 1: the last cosine with a non-zero sine


def direction(x: Tensor) -> Tensor:
    """Rows of x (N, D) at length 1; a zero row stays zero and passes no gradient."""
    length = torch.linalg.vector_norm(x, dim=1, keepdim=True)
    # the rare case below, at every step, would show; on a device it shows less than looking at a number there
    if len(x) and x.device.type == "cpu" and float(length.detach().min()) > 1e-12:
        straight: Tensor = x / length
        return straight
    # The factor cuts the gradient of a zero row, which the clamp alone would multiply by 1e12.
    unit: Tensor = x / length.clamp_min(1e-12) * (length > 1e-12)
    return unit


def cosine(features: Tensor, weight: Tensor) -> Tensor:
    """cos theta (B, classes); rounding may carry it past ±1 by 1e-7, which the uses below clamp away."""
    return direction(features) @ direction(weight).t()


def arc_margin(cos: Tensor, margin: float, past_pi: PastPi = "monotone") -> Tensor:
    """cos(theta + m) from cos theta = cos, elementwise; m in radians.

    Written as cos theta cos m - sin theta sin m with sin theta = sqrt((1 - cos)(1 + cos)): no arccos, and no
    cancellation in 1 - cos^2. Under the root cos is clamped to ±(1 - 1e-7): at ±1 its gradient is infinite.
    Past theta + m = pi the curve would turn and reward a worse angle: `monotone` continues with
    cos theta - m sin m, `plain` lets it turn (as InsightFace does), `easy` adds m only where theta < pi/2.
    """
    inner = cos.clamp(-1 + EPS, 1 - EPS)
    sin = torch.sqrt((1 - inner) * (1 + inner))
    moved = cos * math.cos(margin) - sin * math.sin(margin)
    match past_pi:
        case "plain":
            return moved
        case "easy":
            return torch.where(cos > 0, moved, cos)
        case "monotone":
            return torch.where(cos > -math.cos(margin), moved, cos - margin * math.sin(margin))


def spread(cos: Tensor, t: float) -> Tensor:
    """g(z) = 2((z + 1)/2)^t - 1: widens the gap between high cosines and the crowd around 0.

    The clamp at z = -1 keeps a base of -1e-8 from becoming NaN under a broken power t.
    """
    return 2 * ((cos + 1) / 2).clamp_min(0) ** t - 1


def balanced_bias(classes: int, scale: float, margin: float, t: float, balance: float) -> float:
    """The b at which, with all cosines 0, the positive and the K - 1 negatives pull equally on a class.

    Solves lambda sigma(-(a_y + b)) = (1 - lambda)(K - 1) sigma(a_n + b), a_y = r(g(0)-m), a_n = r(g(0)+m).
    With z = lambda / ((1 - lambda)(K - 1)) and q = sqrt((1 - z)^2 + 4 z e^(a_y - a_n)) the root is
    b = ln(2z) - a_n - ln(1 - z + q); for z > 1 that sum cancels, the same root is ln((q + z - 1)/2) - a_y.
    """
    g0 = 2 * math.pow(0.5, t) - 1
    a_y, a_n = scale * (g0 - margin), scale * (g0 + margin)
    z = balance / ((1 - balance) * max(classes - 1, 1))  # one class alone: as if it had one rival
    q = math.sqrt((1 - z) ** 2 + 4 * z * math.exp(a_y - a_n))
    if z > 1:
        return math.log((q + z - 1) / 2) - a_y
    return math.log(2 * z) - a_n - math.log(1 - z + q)


class Head(nn.Module, ABC):
    """One class vector per identity; `loss` is the mean over the batch and what calling the head returns.

    features (B, embedding), labels (B,) int64, mask (classes,) bool: True = the class is present here.
    """

    biased: ClassVar[bool] = False  # whether heads of this kind have biases beside their class vectors
    several: ClassVar[bool] = False  # whether a class has more vectors than its row of `weight`

    def __init__(self, classes: int, embedding: int) -> None:
        super().__init__()
        if classes < 1 or embedding < 1:
            raise UsageError(f"a head needs at least 1 class and 1 dimension, got {classes} and {embedding}")
        self.classes, self.embedding = classes, embedding
        # Rows of length about 1: a normalised row turns by (learning rate / length^2), so a short one spins.
        self.weight = nn.Parameter(torch.randn(classes, embedding) / math.sqrt(embedding))

    def logits(self, features: Tensor, labels: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """(B, classes) float32 scores; with labels the margin is applied; absent classes are -inf."""
        wide = torch.promote_types(features.dtype, torch.float32)
        device = features.device.type
        with torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext():
            scores = self.scores(features.to(wide), self.weight.to(wide), labels)
        return scores if mask is None else scores.masked_fill(~mask, -torch.inf)

    def loss(self, features: Tensor, labels: Tensor, mask: Tensor | None = None) -> Tensor:
        """Mean over the batch, a float32 scalar."""
        self._check(features, labels, mask)
        return cross_entropy(self.logits(features, labels, mask), labels)

    def forward(self, features: Tensor, labels: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.loss(features, labels, mask)

    @abstractmethod
    def scores(self, f: Tensor, w: Tensor, labels: Tensor | None) -> Tensor:
        """`logits` before the mask, all in one type of float."""

    def _check(self, features: Tensor, labels: Tensor, mask: Tensor | None, lowest: int = 0) -> None:
        if features.ndim != 2 or features.shape[1] != self.embedding or labels.shape != features.shape[:1]:
            shapes = f"features {tuple(features.shape)}, labels {tuple(labels.shape)}"
            raise VisardError(f"a head for {self.embedding}-d features got {shapes}")
        if len(labels) == 0:
            raise VisardError("head got an empty batch: a mean over nothing is undefined")
        if labels.device.type != "cpu":  # looking at numbers there would wait for them; a device checks by itself
            return
        low, high = (int(v) for v in torch.aminmax(labels))
        if low < lowest or high >= self.classes:
            raise VisardError(f"label {low if low < lowest else high} outside the head's {self.classes} classes")
        if mask is not None:
            if mask.dtype != torch.bool or mask.shape != (self.classes,):
                raise VisardError(f"mask must be bool ({self.classes},), got {mask.dtype} {tuple(mask.shape)}")
            absent = labels[(labels >= 0) & ~mask[labels]]
            if len(absent):
                raise VisardError(f"label {int(absent[0])} belongs to a class that the mask says is absent")


class MarginHead(Head):
    """Logits s cos theta_j for j != y and s phi(theta_y) for the target; a subclass gives phi.

    detach_margin = True treats phi(theta_y) - cos theta_y as a constant (d logit / d cos = s for every class,
    as InsightFace does); False differentiates through it.
    """

    def __init__(self, classes: int, embedding: int, scale: float, margin: float, detach_margin: bool = False) -> None:
        super().__init__(classes, embedding)
        _check_scale(scale)
        self.scale, self.margin, self.detach_margin = scale, margin, detach_margin

    def scores(self, f: Tensor, w: Tensor, labels: Tensor | None) -> Tensor:
        return self._with_margin(cosine(f, w), labels)

    def _with_margin(self, cos: Tensor, labels: Tensor | None) -> Tensor:
        """Logits from cosines (B, classes)."""
        if labels is None:
            return self.scale * cos
        rows = labels[:, None]
        return self.scale * cos.scatter_add(1, rows, self._change(cos, rows))

    @abstractmethod
    def _change(self, cos: Tensor, rows: Tensor) -> Tensor:
        """phi(theta_y) - cos theta_y (B, 1); `rows` (B, 1) are the labels."""

    def extra_repr(self) -> str:
        return f"{self.classes}, {self.embedding}, scale={self.scale}, margin={self.margin}"


class ArcFace(MarginHead):
    r"""Additive angular margin (Deng et al., CVPR 2019, Eq. 3); m in radians.

    L = -log[e^{s cos(\theta_y + m)} / (e^{s cos(\theta_y + m)} + \sum_{j \ne y} e^{s cos \theta_j})].
    cos(theta + m) and what happens past pi: see `arc_margin`, whose clamp keeps d phi / d cos =
    sin(theta + m) / sin(theta) below about 1,000 at a perfect match, where it would be infinite.
    """

    def __init__(
        self, classes: int, embedding: int, scale: float = 64.0, margin: float = 0.5,
        detach_margin: bool = False, past_pi: PastPi = "monotone",
    ) -> None:  # fmt: skip
        super().__init__(classes, embedding, scale, margin, detach_margin)
        if not 0 <= margin < math.pi:
            raise UsageError(f"arcface margin is in radians, from 0 to below pi: got {margin}")
        if past_pi not in get_args(PastPi):
            raise UsageError(f"past_pi must be one of {', '.join(get_args(PastPi))}: got {past_pi!r}")
        self.past_pi = past_pi

    def _change(self, cos: Tensor, rows: Tensor) -> Tensor:
        target = (cos.detach() if self.detach_margin else cos).gather(1, rows)
        return arc_margin(target, self.margin, self.past_pi) - target


class SubCenterArcFace(ArcFace):
    r"""Sub-centre ArcFace (Deng et al., ECCV 2020, Eqs. 3 and 4): K class vectors for each class, m in radians.

    \theta_j is the smallest angle between f and the `centres` of class j, so that pictures of a wrong label may gather
    around a centre that is not the class's main one. `weight` (classes, embedding) are the first centres, `more`
    (classes, K - 1, embedding) the others.
    """

    several = True

    def __init__(
        self, classes: int, embedding: int, scale: float = 64.0, margin: float = 0.5,
        detach_margin: bool = False, past_pi: PastPi = "monotone", centres: int = 3,
    ) -> None:  # fmt: skip
        super().__init__(classes, embedding, scale, margin, detach_margin, past_pi)
        if not (isinstance(centres, int) and centres >= 1):
            raise UsageError(f"subcenter-arcface has 1 centre of a class or more: got {centres}")
        self.centres = centres
        self.more = nn.Parameter(torch.randn(classes, centres - 1, embedding) / math.sqrt(embedding))

    def scores(self, f: Tensor, w: Tensor, labels: Tensor | None) -> Tensor:
        others = cosine(f, self.more.to(w.dtype).flatten(0, 1)).view(len(f), self.classes, self.centres - 1)
        cos = torch.cat([cosine(f, w)[:, :, None], others], 2).amax(2)
        return self._with_margin(cos, labels)


class CosFace(MarginHead):
    r"""Additive cosine margin (Wang et al., CVPR 2018, Eq. 4); m in units of cosine.

    L = -log[e^{s(cos \theta_y - m)} / (e^{s(cos \theta_y - m)} + \sum_{j \ne y} e^{s cos \theta_j})].
    The margin is a constant, so detach_margin changes nothing, and the way through it is never differentiated.
    """

    def __init__(
        self,
        classes: int,
        embedding: int,
        scale: float = 64.0,
        margin: float = 0.35,
        detach_margin: bool = False,
    ) -> None:
        super().__init__(classes, embedding, scale, margin, detach_margin=True)
        if not 0 <= margin < 2:
            raise UsageError(f"cosface margin is in units of cosine, from 0 to below 2: got {margin}")

    def _change(self, cos: Tensor, rows: Tensor) -> Tensor:
        return cos.new_full(rows.shape, -self.margin)


class AdaFace(Head):
    r"""A margin that follows the quality of a picture (Kim, Jain, Liu, CVPR 2022, Eqs. 4 to 8); m for both its parts.

    The length of a feature says how good its picture is: z = clip(h (|f| - \mu) / \sigma, -1, 1) with the mean and the
    standard deviation of lengths over the batches so far, averaged exponentially. The target's logit is
    s [cos(\theta_y - m z) - m (1 + z)]: good pictures get more of a margin where they are easy, poor ones less.
    The average starts with the first batch of a round (the released code: with 20 and 100) and is no part of the state.
    """

    def __init__(
        self, classes: int, embedding: int, scale: float = 64.0, margin: float = 0.4, detach_margin: bool = False,
        h: float = 0.333, pace: float = 0.01,
    ) -> None:  # fmt: skip
        super().__init__(classes, embedding)
        _check_scale(scale)
        if not (0 <= margin < 1 and h > 0 and 0 < pace <= 1):
            raise UsageError(f"adaface needs 0 <= margin < 1, h > 0 and 0 < pace <= 1: got {margin}, {h}, {pace}")
        self.scale, self.margin, self.detach_margin, self.h, self.pace = scale, margin, detach_margin, h, pace
        self.lengths: tuple[Tensor, Tensor] | None = None  # mean and standard deviation

    def scores(self, f: Tensor, w: Tensor, labels: Tensor | None) -> Tensor:
        cos = cosine(f, w)
        if labels is None:
            return self.scale * cos
        rows, z = labels[:, None], self._quality(f.detach())
        target = (cos if not self.detach_margin else cos.detach()).gather(1, rows)
        theta = torch.arccos(target.clamp(-1 + EPS, 1 - EPS)) - self.margin * z
        moved = torch.cos(theta.clamp(1e-3, math.pi - 1e-3)) - self.margin * (1 + z)
        return self.scale * cos.scatter_add(1, rows, moved - target)

    def _quality(self, f: Tensor) -> Tensor:
        """z of each row (B, 1)."""
        length = torch.linalg.vector_norm(f, dim=1, keepdim=True).clamp(1e-3, 100)
        mean, std = length.mean(), length.std(unbiased=True) if len(length) > 1 else torch.zeros_like(length.mean())
        if self.lengths is not None:
            mean, std = (old + self.pace * (new - old) for old, new in zip(self.lengths, (mean, std), strict=True))
        if self.training:
            self.lengths = mean, std
        z: Tensor = (self.h * (length - mean) / (std + 1e-3)).clamp(-1, 1)
        return z


class Softmax(Head):
    r"""Softmax without margin: logits w_j . f + b_j, or with `normalise` s cos \theta_j (no bias then).

    Without `normalise` the features carry their own length and s plays no part.
    """

    biased = True

    def __init__(
        self, classes: int, embedding: int, scale: float = 64.0, normalise: bool = False, bias: bool = True
    ) -> None:
        super().__init__(classes, embedding)
        _check_scale(scale)
        self.scale, self.normalise = scale, normalise
        self.bias = nn.Parameter(torch.zeros(classes)) if bias and not normalise else None

    def scores(self, f: Tensor, w: Tensor, labels: Tensor | None) -> Tensor:
        if self.normalise:
            return self.scale * cosine(f, w)
        scores = f @ w.t()
        return scores if self.bias is None else scores + self.bias.to(scores.dtype)


class SphereFace2(Head):
    r"""One binary classifier per class (Wen et al., ICLR 2022, Eq. 8); m in units of g, \lambda = `balance`.

    L = (\lambda / r) log(1 + e^{-r(g(cos \theta_y) - m) - b})
        + ((1 - \lambda) / r) \sum_{j \ne y} log(1 + e^{r(g(cos \theta_j) + m) + b}),  g: see `spread`.
    A label of -1 is a picture of an unknown identity: a negative for every class. log(1 + e^x) is softplus, which
    does not overflow. `bias` is one number for all classes (`shared`) or one each (`per_class`);
    `balanced` starts it where positives and negatives pull equally (`balanced_bias`): from 0 the negatives
    hardly learn at first. detach_margin = True takes d logit / d cos = r, as if g and m were a constant.
    """

    biased = True

    def __init__(
        self, classes: int, embedding: int, scale: float = 30.0, margin: float = 0.4, t: float = 3.0,
        balance: float = 0.7, bias: Literal["shared", "per_class"] = "shared",
        bias_start: Literal["balanced", "zero"] = "balanced", detach_margin: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(classes, embedding)
        _check_scale(scale)
        if not (t >= 1 and 0 < balance < 1 and margin >= 0):
            got = f"{t}, {balance}, {margin}"
            raise UsageError(f"sphereface2 needs t >= 1, 0 < balance < 1 and margin >= 0: got {got}")
        if bias not in ("shared", "per_class") or bias_start not in ("balanced", "zero"):
            choice = "bias is shared or per_class and starts balanced or zero"
            raise UsageError(f"sphereface2: {choice}, got {bias!r} and {bias_start!r}")
        self.scale, self.margin, self.t, self.balance = scale, margin, t, balance
        self.detach_margin = detach_margin
        start = balanced_bias(classes, scale, margin, t, balance) if bias_start == "balanced" else 0.0
        self.bias = nn.Parameter(torch.full((1 if bias == "shared" else classes,), start))

    def scores(self, f: Tensor, w: Tensor, labels: Tensor | None) -> Tensor:
        cos = cosine(f, w)
        score = spread(cos, self.t)
        if labels is not None:
            score = score + self.margin * (1 - 2 * _one_hot(labels, self.classes, score.dtype))
        if self.detach_margin:
            score = cos + (score - cos).detach()
        return self.scale * score + self.bias.to(score.dtype)

    def loss(self, features: Tensor, labels: Tensor, mask: Tensor | None = None) -> Tensor:
        """Sum over the classes, mean over the batch."""
        self._check(features, labels, mask, lowest=-1)
        score = self.logits(features, labels, mask)
        target = _one_hot(labels, self.classes, score.dtype).bool()
        # Filling before the softplus gives the entries of the other kind value 0 and gradient exactly 0.
        pull = softplus(-score.masked_fill(~target, torch.inf)).sum()
        push = softplus(score.masked_fill(target, -torch.inf)).sum()
        return (self.balance * pull + (1 - self.balance) * push) / (self.scale * len(labels))


def _one_hot(labels: Tensor, classes: int, dtype: torch.dtype) -> Tensor:
    """(B, classes); a label of -1 gives a row of zeros."""
    return (labels[:, None] == torch.arange(classes, device=labels.device)).to(dtype)


def _check_scale(scale: float) -> None:
    if not (scale > 0 and math.isfinite(scale)):
        raise UsageError(f"a head's scale must be a positive number, got {scale}")


HEADS: Registry[type[Head]] = Registry(
    "heads",
    {
        "arcface": ArcFace,
        "subcenter-arcface": SubCenterArcFace,
        "cosface": CosFace,
        "adaface": AdaFace,
        "softmax": Softmax,
        "sphereface2": SphereFace2,
    },
    lambda value: isinstance(value, type) and issubclass(value, Head),
)


@dataclass(frozen=True)
class HeadSettings:
    """`[method.head]`: the classification head of a training run."""

    kind: str = "cosface"  # a name in HEADS
    scale: float = 30.0
    margin: float = 0.35  # arcface: radians; cosface: cosine; ignored by heads that have none
    options: dict[str, Any] | None = None  # the head's other parameters, for example past_pi of arcface

    def __post_init__(self) -> None:
        if self.kind not in HEADS:
            raise UsageError(f"method.head.kind: unknown head {self.kind!r}{did_you_mean(self.kind, HEADS)}")

    @property
    def biased(self) -> bool:
        """Whether heads of this kind have biases beside their class vectors."""
        return HEADS[self.kind].biased

    def check_shared(self, where: str) -> None:
        """Refuse a head that cannot be shared as a matrix of class vectors."""
        if self.biased or HEADS[self.kind].several:
            what = "biases" if self.biased else "further centres"
            raise UsageError(f"{where}: {what} of {self.kind} are not shared, use arcface or cosface")

    def build(self, classes: int, embedding: int) -> Head:
        """A freshly initialised head."""
        return build_head(self.kind, classes, embedding, self.scale, self.margin, **self.options or {})


def build_head(
    kind: str,
    classes: int,
    embedding: int,
    scale: float | None = None,
    margin: float | None = None,
    **options: Any,
) -> Head:
    """The head of that kind; `None` leaves its own default, and a head without a margin ignores it."""
    make = HEADS.find(kind)
    known = signature(make).parameters
    if odd := sorted(options.keys() - known.keys()):
        raise UsageError(f"head {kind}: unknown option {odd[0]!r}{did_you_mean(odd[0], known)}")
    shared = {"scale": scale, "margin": margin}
    options |= {name: value for name, value in shared.items() if value is not None and name in known}
    return make(classes, embedding, **options)
