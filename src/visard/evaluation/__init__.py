"""Evaluation of face features: verification, identification, per-client figures."""

from visard.evaluation.identification import FpirPoint, GallerySplit, Identification, identify, split_gallery
from visard.evaluation.personal import ClientSummary, jain_index, summarise
from visard.evaluation.roc import Curve, FarPoint
from visard.evaluation.scores import Histogram, Limits, Roc, roc_of, stream_roc
from visard.evaluation.verification import Interval, PairList, Verification, make_pairs, verify_all, verify_pairs

__all__ = [
    "ClientSummary",
    "Curve",
    "FarPoint",
    "FpirPoint",
    "GallerySplit",
    "Histogram",
    "Identification",
    "Interval",
    "Limits",
    "PairList",
    "Roc",
    "Verification",
    "identify",
    "jain_index",
    "make_pairs",
    "roc_of",
    "split_gallery",
    "stream_roc",
    "summarise",
    "verify_all",
    "verify_pairs",
]
