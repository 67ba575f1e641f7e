"""Break every equation of the five papers once, and see that the tests named for it fail.

    python -m tests.mutations              all mutants
    python -m tests.mutations NAME...      those whose name begins with one of these
    python -m tests.mutations --list       what there is

A mutant is a piece of one source line and what replaces it. It names no file: the piece must be found exactly once
below src/visard, wherever that is. Each is applied to a copy of the source tree, which is what its tests import; on the
copy as it is the same tests must pass. Run on demand, not with the tests: it takes some minutes.
"""

from __future__ import annotations

import argparse
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "visard"
SECONDS = 240  # for the tests of one mutant; they take 5 to 20
GUARD = "mutation_guard"  # a plugin of pytest that stops where another copy is imported

Selection = tuple[str, ...]  # arguments of pytest: tests, or -k and an expression


@dataclass(frozen=True)
class Mutant:
    """One way of getting an equation wrong."""

    name: str
    breaks: str  # paper and equation
    snippet: str
    replacement: str
    tests: Selection


def golden(name: str, *tests: str) -> Selection:
    """Tests of tests/golden/test_<name>_golden.py; none named: the whole file."""
    return _selected(f"tests/golden/test_{name}_golden.py", tests)


def mutant(name: str, *tests: str) -> Selection:
    """Tests of tests/golden/test_mutants_<name>.py."""
    return _selected(f"tests/golden/test_mutants_{name}.py", tests)


def unit(name: str, *tests: str) -> Selection:
    """Tests of tests/unit/test_<name>.py."""
    return _selected(f"tests/unit/test_{name}.py", tests)


def prop(name: str, *tests: str) -> Selection:
    """Tests of tests/property/test_<name>_property.py."""
    return _selected(f"tests/property/test_{name}_property.py", tests)


def _selected(file: str, tests: Sequence[str]) -> Selection:
    return tuple(f"{file}::test_{test}" for test in tests) or (file,)


# ---- tests that several mutants share ------------------------------------------------------------------------------
ARCFACE = golden("heads", "arcface_is_equation_3")
COSFACE = golden("heads", "cosface_is_equation_4")
ADAFACE = golden("heads", "adaface_is_equations_4_to_8")
PHOTOGRAPHS = golden("labels", "faces_of_one_photograph_by_loops", "a_chain_does_not_unite_two_faces_of_a_photograph")
NEGATIVES = golden("negatives")
SPHERE = golden("heads", "sphereface2_is_equation_8")
BIAS = golden("heads", "sphereface2_start_of_the_bias", "sphereface2_bias_balances_the_two_pulls")
LIMITS = golden("limits")
ROBUST = golden("robust")
OPTIMISERS = golden("optimisers")
COMPRESSION = golden("compression")
DP = golden("dp")
DP_ENGINE = ("tests/engines/test_dp.py", "-k", "not every_engine and not batch_norm and not budget_and_reports")
DP_SHARES = ("tests/engines/test_dp_shares.py", "-k", "not every_engine and not flower_gives")
PEOPLE = ("tests/engines/test_people.py", "-k", "not every_engine and not flower_gives")
DP_PARTY = ("tests/engines/test_guard.py", "-k", "budget")
HOSTILE = ("tests/engines/test_hostile.py", "-k", "fields_that or entries_that or absurd")
CLAIMS = ("tests/engines/test_hostile.py", "-k", "claim or stated or statement or limits_are")
MEAN = golden("average", "literal_numbers", "against_a_slow_loop")
SGD = golden("sgd", "the_bits_of_torch")
DA_ROUND = golden("fedfr_da", "one_round_of_algorithm_1")
DCL = golden("fedfr_da", "equation_3_moves_the_source_alone")
CFINCH = prop("finch", "cfinch_is_the_paper_taken_literally")
HF = golden("hf_maml", "exact_on_a_quadratic")
HF_NETWORK = golden("hf_maml", "a_network_against_torch_func")
HF_ROUND = golden("hf_maml", "one_round_of_algorithm_1")
DRIFT = golden("hf_maml", "equation_4_and_that_it_starts_at_zero")
JOINT = golden("fedfr_joint", "algorithm_1")
CONTRAST = golden("fedfr_joint", "eq_5_contrastive", "eq_5_in_numbers")
KD = mutant("distillation")
PERSONAL = unit("personal", "1_to_n_finds_local_people_among_strangers")
HINGE = golden("fedface", "equation_2_and_7_with_literal_numbers")
EQ9 = golden("fedface", "equation_9_with_literal_numbers")
EQ9_LOOP = golden("fedface", "equation_9_as_a_slow_loop_and_its_gradient_by_autograd")
FEDFACE = golden("fedface", "algorithm_1_line_by_line")
MMD = golden("mmd", "equations_3_to_6_by_loops", "a_literal_case")
KERNELS = golden("adapting", "multi_kernel_mmd_by_loops")
TAYLOR = golden("mmd", "taylor_is_the_truncated_series")
FITTED = golden("mmd", "the_fitted_kernel_is_the_least_squares_one")
MOMENTS = golden("mmd", "moment_form_is_autograd")
MONOMIALS = golden("mmd", "equation_7_and_15")
PACKED = golden("encrypted_protocols", "packed")
FORWARD = golden("encrypted_protocols", "the_paper_s_protocol")
ENCRYPTED = golden("encrypted_mmd", "equations_18_to_20")
LAMBDA = mutant("encrypted", "equation_2_with_a_weight")
POOLED = golden("encrypted_mmd", "equations_16_and_17")
MONITORED = golden("encrypted_mmd", "the_monitored_loss_is_the_plain_one")
CENTRAL = golden("central_mmd")
PAILLIER = mutant("paillier")
CKKS = golden("ckks", "gradients_and_loss")
FOLDS = golden("protocols", "ten_folds")
IDENTIFY = unit("identification", "identify_matches_plain_loops")

# fmt: off
MUTANTS = (
    # ---- negatives from other clients ----
    Mutant("negatives-scale", "negatives, softmax with further rows", "return self.head.scale * cosine(f, w)",
           "return cosine(f, w)", NEGATIVES),
    Mutant("negatives-own", "negatives, of the others alone",
           "for c in sorted(known) if c != client and len(known[c])]", "for c in sorted(known) if len(known[c])]",
           NEGATIVES),
    Mutant("negatives-nearest", "negatives, public people near the own",
           "best = cosines.topk(min(each, len(rows)), dim=1).indices",
           "best = (-cosines).topk(min(each, len(rows)), dim=1).indices", NEGATIVES),
    Mutant("negatives-noise", "negatives, sensitivity of a direction", "rng.normal(0.0, noise * FARTHEST, ",
           "rng.normal(0.0, noise, ", NEGATIVES),
    Mutant("negatives-corrected", "negatives, FedGC: away from the others",
           "moved[client] = rows.detach() - step * slope", "moved[client] = rows.detach() + step * slope",
           golden("negatives", "class_vectors_of_different_clients_move_apart")),
    Mutant("negatives-once", "negatives, noisy rows are shown once", "if \"shown\" not in client.state:",
           "if True:", NEGATIVES),
    # ---- heads: ArcFace Eq. 3, CosFace Eq. 4, SphereFace2 Eq. 8 ----
    Mutant("arcface-margin-sign", "heads, ArcFace Eq. 3", "moved = cos * math.cos(margin) - sin * math.sin(margin)",
           "moved = cos * math.cos(margin) + sin * math.sin(margin)", ARCFACE),
    Mutant("arcface-sine", "heads, ArcFace Eq. 3", "sin = torch.sqrt((1 - inner) * (1 + inner))",
           "sin = (1 - inner) * (1 + inner)", ARCFACE),
    Mutant("arcface-past-pi", "heads, ArcFace past pi", "moved, cos - margin * math.sin(margin))",
           "moved, cos + margin * math.sin(margin))", unit("heads", "arc_margin_falls_over_the_whole_half_circle")),
    Mutant("margin-detached", "heads, gradient through the margin",
           "target = (cos.detach() if self.detach_margin else cos).gather(1, rows)",
           "target = (cos if self.detach_margin else cos.detach()).gather(1, rows)",
           golden("heads", "arcface_detached_margin_has_gradient_s")),
    Mutant("subcentre-nearest", "heads, sub-centre ArcFace Eq. 3", "others], 2).amax(2)", "others], 2).mean(2)",
           golden("heads", "subcentre_arcface_takes_the_nearest_centre_of_each_class")),
    Mutant("adaface-angle", "heads, AdaFace Eq. 6", "1 - EPS)) - self.margin * z", "1 - EPS)) + self.margin * z",
           ADAFACE),
    Mutant("adaface-addition", "heads, AdaFace Eq. 7", "- self.margin * (1 + z)", "- self.margin", ADAFACE),
    Mutant("adaface-pace", "heads, AdaFace: lengths over batches", "(old + self.pace * (new - old) for",
           "(new + self.pace * (new - old) for", ADAFACE),
    Mutant("cosface-margin-sign", "002 Eqs. 1 and 3, CosFace Eq. 4", "cos.new_full(rows.shape, -self.margin)",
           "cos.new_full(rows.shape, self.margin)",
           COSFACE + golden("fedfr_joint", "eq_1_and_3_cosface_over_own_and_public_people")),
    Mutant("cosface-scale", "002 Eqs. 1 and 3, CosFace Eq. 4", "self.scale * cos.scatter_add(1, rows, self._change",
           "cos.scatter_add(1, rows, self._change", COSFACE),
    Mutant("cosine-length", "heads, length of class vectors", "return direction(features) @ direction(weight).t()",
           "return direction(features) @ weight.t()", COSFACE),
    Mutant("mask-zero", "001 global head: logits of absent classes", "scores.masked_fill(~mask, -torch.inf)",
           "scores.masked_fill(~mask, 0.0)", prop("heads", "masked_classes_have_no_gradient_and_no_say")),
    Mutant("sphereface2-g-exponent", "002 Eq. 6, g", "2 * ((cos + 1) / 2).clamp_min(0) ** t - 1",
           "(2 * ((cos + 1) / 2).clamp_min(0)) ** t - 1", SPHERE + golden("fedfr_joint", "g_is_the_repaired_one")),
    Mutant("sphereface2-margin-sign", "002 Eq. 6, m'", "score = score + self.margin * (1 - 2 *",
           "score = score - self.margin * (1 - 2 *", SPHERE),
    Mutant("sphereface2-balance", "002 Eq. 6, lambda", "(self.balance * pull + (1 - self.balance) * push)",
           "((1 - self.balance) * pull + self.balance * push)", golden("fedfr_joint", "eq_6_one_against_all")),
    Mutant("sphereface2-scale", "002 Eq. 6, 1 / s'", "/ (self.scale * len(labels))", "/ len(labels)",
           golden("fedfr_joint", "eq_6_one_against_all")),
    Mutant("sphereface2-bias-sign", "002 Eq. 6, b", "self.scale * score + self.bias.to(score.dtype)",
           "self.scale * score - self.bias.to(score.dtype)", SPHERE),
    Mutant("sphereface2-start-classes", "002 start of b", "z = balance / ((1 - balance) * max(classes - 1, 1))",
           "z = balance / ((1 - balance) * max(classes, 1))", BIAS),
    Mutant("sphereface2-start-sign", "002 start of b", "math.log(2 * z) - a_n - math.log(1 - z + q)",
           "math.log(2 * z) + a_n - math.log(1 - z + q)", BIAS),
    # ---- averages and steps that all share ----
    Mutant("average-unweighted", "0. averaging weights n_k / sum n", "self._sum[key].add_(value, alpha=n)",
           "self._sum[key].add_(value)", MEAN),
    Mutant("average-first-unweighted", "0. averaging weights n_k / sum n",
           "value.to(torch.float64, copy=True).mul_(n)", "value.to(torch.float64, copy=True)", MEAN),
    Mutant("average-not-divided", "0. averaging weights n_k / sum n", "self.total += n", "self.total += 1", MEAN),
    Mutant("average-counters", "0. integer entries", "self._sum[key] = torch.maximum(self._sum[key], value)",
           "self._sum[key] = torch.minimum(self._sum[key], value)", MEAN),
    Mutant("average-figures", "0. averaging weights n_k / sum n", "weight[name] = weight.get(name, 0.0) + n",
           "weight[name] = weight.get(name, 0.0) + 1", mutant("averages")),
    Mutant("reduce-group", "0. a group counts with all its weight", "entries[-1].weight += weight",
           "entries[-1].weight += 0", golden("aggregation")),
    Mutant("reduce-weight", "0. equal weights where no field is named", "weight = 1 if by is None else",
           "weight = reply.n if by is None else", golden("aggregation")),
    Mutant("reduce-rule", "0. the run's aggregation rule", "Reduction(self.world.aggregation, fields, by,",
           "Reduction(Mean(), fields, by,", golden("aggregation", "the_rule_of_the_run_is_used")),
    Mutant("limit-share", "0. largest share", "shares[place] = min(limit, exact[place] * room / rest)",
           "shares[place] = exact[place] * room / rest", LIMITS),
    Mutant("limit-rest", "0. largest share", "room, rest = room - shares[place], rest - exact[place]",
           "room, rest = room - shares[place], rest", LIMITS),
    Mutant("limit-equal", "0. largest share", "if limit * len(exact) <= 1:", "if limit * len(exact) < 0:", LIMITS),
    Mutant("limit-median", "0. longest update", "return max(bound * median_low(found), SMALL * sent)",
           "return max(bound * max(found), SMALL * sent)", LIMITS),
    Mutant("limit-small", "0. longest update", "return max(bound * median_low(found), SMALL * sent)",
           "return bound * median_low(found)", LIMITS),
    Mutant("limit-alone", "0. longest update", "return sent or math.inf", "return math.inf", LIMITS),
    Mutant("limit-direction", "0. longest update", "result[key] = (base.double() + scale * _update(",
           "result[key] = (scale * base.double() + scale * _update(", LIMITS),
    Mutant("limit-scale", "0. longest update", "scale = allowed[part] / lengths[part]", "scale = 1.0", LIMITS),
    Mutant("limit-overflow", "0. longest update", "if math.isfinite(lengths[part]) and scale > 0:",
           "if scale >= 0:", LIMITS),
    Mutant("limit-parts", "0. running statistics apart", "return STATISTIC if is_statistic(key, ()) else WHOLE",
           "return WHOLE", LIMITS),
    Mutant("far-ratio", "0. who is named", "norm > RATIO * middle and", "norm > 0 * middle and", LIMITS),
    Mutant("far-spread", "0. who is named", "_log(middle) + MADS * scale", "_log(middle)", LIMITS),
    Mutant("far-share", "0. who is named", "if not norm > SHARE * base:", "if not norm > 0:", LIMITS),
    Mutant("far-gross", "0. who is named", "(1.0 if lone else GROSS) * base", "(1.0 if lone else math.inf) * base",
           LIMITS),
    Mutant("held-weights", "0. largest share", "weights = limits.capped(weights, self.rule.max_weight or 1.0)",
           "weights = list(weights)", LIMITS),
    Mutant("held-layout", "0. most replies decide", "if frozenset(entry.layout) != usual[0][0]:",
           "if frozenset(entry.layout) != frozenset(entries[0].layout):", LIMITS),
    Mutant("held-weight-checked", "0. a weight that is none", "or not 0 < weight < math.inf:", "or False:", LIMITS),
    Mutant("held-overflow", "0. an average that overflows", "bool(torch.isfinite(v).all()) for v in floats",
           "True for v in floats", LIMITS),
    Mutant("absurd", "0. absurd values", "ABSURD = 1e6 ", "ABSURD = 1e60 ", HOSTILE),
    Mutant("absurd-variance", "0. absurd values", 'if low < 0 and before is not None and key.endswith("running_var"):',
           "if False:", HOSTILE),
    Mutant("missing-field", "0. absurd values", "if not optional:", "if False:", HOSTILE),
    Mutant("rows", "0. class vectors of others", "if rows is not None and len(value) > rows:", "if False:", HOSTILE),
    Mutant("stated-pictures", "0. statements", "most = self.world.stated.get(client)", "most = None", CLAIMS),
    Mutant("stated-identities", "0. statements", 'found |= {client: stated} if name == "identities" else {}',
           "found |= {}", CLAIMS),
    Mutant("most-identities", "0. statements", "    if total > most:", "    if False:", CLAIMS),
    Mutant("parties-limited", "0. limits between parties", "if found.real_parties else found", "if False else found",
           CLAIMS),
    Mutant("sgd-momentum", "0. SGD", "weight_decay=self.weight_decay, momentum=self.momentum, lr=self.lr",
           "weight_decay=self.weight_decay, momentum=0.0, lr=self.lr", SGD),
    Mutant("sgd-decay", "0. SGD; 004 Eq. 1, gamma L_Theta",
           "weight_decay=self.weight_decay, momentum=self.momentum, lr=self.lr",
           "weight_decay=0.0, momentum=self.momentum, lr=self.lr", SGD),
    Mutant("sgd-clip", "0. clipping", "factor = norm / (length + 1e-6)", "factor = length / (norm + 1e-6)",
           SGD + golden("training", "gradient_clipping_bounds_a_step")),
    Mutant("adam-second-moment", "0. Adam", "v.mul_(B2).addcmul_(g, g, value=1 - B2)",
           "v.mul_(B2).addcmul_(g, g, value=1 - B1)", unit("adam", "the_same_steps_as_torch")),
    Mutant("adam-bias", "0. Adam", "value=-self.lr * self.factors[i] / small)", "value=-self.lr * self.factors[i])",
           unit("adam", "the_same_steps_as_torch")),
    Mutant("cosine-schedule", "0. learning rate", "(1 + math.cos(math.pi * round / rounds))",
           "(1 - math.cos(math.pi * round / rounds))", golden("training", "cosine_schedule")),
    Mutant("iterations-one-more", "000 E iterations", "training.unit == \"iterations\" and done == training.amount",
           "training.unit == \"iterations\" and done > training.amount",
           golden("training", "iterations_cycle_through_shuffled_passes")),
    Mutant("flip-channels", "0. flip of the width", "view.faces.through(x.flip(3))", "view.faces.through(x.flip(1))",
           mutant("evaluation", "the_mirror_image_is_left_and_right")),
    # ---- 000 FedFR, Zhuang et al. ----
    Mutant("000-eq2-labels", "000 Eq. 2, pseudo labels",
           "return client.data.train.take(known.numpy()), client.state[\"labels\"][known]",
           "return client.data.train.take(known.numpy()), client.state[\"labels\"][known].flip(0)", DA_ROUND),
    Mutant("000-eq3-sign", "000 Eq. 3", "p.grad.add_(p - start, alpha=mu)", "p.grad.add_(start - p, alpha=mu)",
           DA_ROUND + DCL),
    Mutant("000-eq3-factor", "000 Eq. 3, lambda / 2", "p.grad.add_(p - start, alpha=mu)",
           "p.grad.add_(p - start, alpha=2 * mu)", DA_ROUND),
    Mutant("000-eq3-missing", "000 Eq. 3", "mu=self.dcl if source else 0.0", "mu=0.0", DCL),
    Mutant("000-eq3-everywhere", "000 Eq. 3 at the source alone", "mu=self.dcl if source else 0.0", "mu=self.dcl", DCL),
    Mutant("000-alg1-uniform", "000 Algorithm 1 line 21: 1 / N",
           "self.local, messages, mean=\"theta\", by=\"n\" if self.weighting == \"data\" else None",
           "self.local, messages, mean=\"theta\", by=\"n\"",
           DA_ROUND),
    Mutant("000-alg1-heads", "000 Algorithm 1: heads stay and persist", "    if \"head\" in state:", "    if False:",
           mutant("fedfr_da", "heads_go_on_where_they_stopped")),
    Mutant("000-participation", "000 a share of the targets",
           "found = [client for client in labelled if client in chosen]", "found = list(labelled)",
           golden("fedfr_da", "a_share_of_the_targets_takes_part")),
    Mutant("000-means-head", "000 start of a target's head",
           "client.state.update(labels=pseudo.labels, start={\"weight\": pseudo.means}",
           "client.state.update(labels=pseudo.labels, start={\"weight\": -pseudo.means}",
           mutant("clusters", "the_head_of_a_target_starts_at_the_means_of_its_clusters")),
    Mutant("cfinch-no-d", "000 C-FINCH: only below d", "components(kappa, distance < d)",
           "components(kappa, distance < np.inf)", CFINCH),
    Mutant("cfinch-at-d", "000 C-FINCH: strictly below d", "components(kappa, distance < d)",
           "components(kappa, distance <= d)", mutant("clusters", "neighbours_at_exactly_d_stay_apart")),
    Mutant("cfinch-first-level", "000 C-FINCH: d at every level", "components(kappa, distance < d)",
           "components(kappa, (distance < d) | bool(levels))", CFINCH),
    Mutant("cfinch-centroids", "000 C-FINCH: means of original samples", "centroids = means(x, labels, clusters)",
           "centroids = means(centroids, merged, clusters)",
           mutant("clusters", "centroids_are_means_of_pictures_not_of_centroids")),
    Mutant("cfinch-partition", "000 C-FINCH: the last level",
           "Clusters(levels[-1].labels, d,", "Clusters(levels[0].labels, d,",
           mutant("clusters", "the_labelling_is_the_last_level")),
    Mutant("finch-graph", "000 FINCH link rule", "graph, directed=False)",
           "graph, directed=True, connection=\"strong\")", CFINCH),
    Mutant("finch-mean", "000 FINCH: mean of a cluster", ".astype(np.float64) / sizes", ".astype(np.float64)",
           prop("finch", "means_of_clusters")),
    Mutant("finch-cosine", "000 metric of FINCH", "(distance**2 / 2 if metric == \"cosine\" else distance)",
           "(distance**2 if metric == \"cosine\" else distance)", prop("finch", "neighbours_whatever_the_block")),
    Mutant("cfinch-chord", "000 metric of C-FINCH", "    if metric != \"euclidean\":", "    if metric == \"cosine\":",
           mutant("clusters", "chords_are_between_directions")),
    Mutant("cluster-centring", "000 features at length 1",
           "x = directions(x - x.mean(axis=0, dtype=np.float64).astype(np.float32))",
           "x = x - x.mean(axis=0, dtype=np.float64).astype(np.float32)",
           mutant("clusters", "centred_features_have_length_1_again")),
    Mutant("cluster-min-size", "000 singletons", "kept = known[sizes[inverse] >= min_size]",
           "kept = known[sizes[inverse] > min_size]", unit("clusters", "small_clusters_lose_their_label")),
    Mutant("cluster-origin", "000 neighbours far from the origin", "torch.from_numpy(x if unit else _near_origin(x))",
           "torch.from_numpy(x)", unit("clusters", "neighbours_far_from_the_origin_are_exact")),
    Mutant("cluster-photograph", "labels, faces of one photograph", "plain[i] + self.weight * len(mine & others)",
           "plain[i] + 0 * len(mine & others)", PHOTOGRAPHS),
    Mutant("cluster-photograph-nearest", "labels, faces of one photograph",
           "penalised[row.indices] += self.weight * row.data", "penalised[row.indices] += 0 * row.data", PHOTOGRAPHS),
    Mutant("cluster-unsure", "labels, pictures between two people", ">= settings.min_separation", ">= -1",
           golden("labels", "unsure_pictures_lose_their_label_by_loops")),
    Mutant("cluster-poor", "labels, pictures of little quality",
           "np.flatnonzero(known.quality >= settings.min_quality)", "np.flatnonzero(known.quality >= 0)",
           golden("labels", "pictures_of_little_quality_are_not_clustered")),
    Mutant("cluster-stable", "labels, d by stability", "best = int(np.argmax(flat)) if",
           "best = int(np.argmin(flat)) if", golden("labels", "the_stable_distance_by_loops")),
    Mutant("cluster-separation", "choice of d: silhouette without the picture itself",
           "directions(centroids[own] * sizes[own, None] - x)", "directions(centroids[own])",
           unit("threshold", "separation_by_loops")),
    Mutant("quality-f", "000 F-score", "2 * self.precision * self.recall / both", "both / 2",
           mutant("clusters", "the_f_score_is_the_harmonic_mean")),
    Mutant("quality-pairs", "000 F-score", "same = float((table.cell * (table.cell - 1)).sum())",
           "same = float((table.cell * table.cell).sum())", unit("clusters", "pairwise_counts_pairs")),
    Mutant("quality-bcubed", "000 BCubed", "PRF(float((square / table.a).sum()) / table.n, float((square / table.b)",
           "PRF(float((square / table.b).sum()) / table.n, float((square / table.a)",
           unit("clusters", "bcubed_goes_picture_by_picture")),
    Mutant("quality-nmi", "000 NMI", "total = sum(entropies) / 2", "total = max(entropies)",
           unit("clusters", "nmi_is_that_of_scikit_learn")),
    Mutant("000-finetune-labels", "000 Fine-tune: clusters of two clients",
           "torch.where(found.labels >= 0, found.labels + count, -1)",
           "torch.where(found.labels >= 0, found.labels, -1)", golden("adapting", "fine_tuning_labels")),
    # ---- baselines of 000: DAN and DANN ----
    Mutant("adapting-weight", "DAN and DANN: weight of the penalty (audit 2)", "return self.weight * gap", "return gap",
           mutant("adapting", "the_penalty_counts_weight_times")),
    Mutant("adapting-no-penalty", "DAN and DANN: the penalty", "return self.weight * gap", "return 0 * gap",
           mutant("adapting", "the_penalty_counts_weight_times")),
    Mutant("adapting-halves", "DAN and DANN: source and target half of a batch",
           "gap = penalty(features[:half].float(), features[half:].float())",
           "gap = penalty(features[half:].float(), features[:half].float())",
           mutant("adapting", "the_penalty_counts_weight_times")),
    Mutant("dan-unit", "DAN: features at length 1", "x, y = direction(source), direction(target)",
           "x, y = source, target", mutant("adapting", "dan_compares_directions")),
    Mutant("dan-bandwidth-mean", "DAN: bandwidths", "squared_distances(features, features).sum()) / (n * (n - 1))",
           "squared_distances(features, features).sum()) / (n * n)",
           golden("adapting", "bandwidths_are_around_the_mean_distance")),
    Mutant("dan-bandwidth-half", "DAN: bandwidths", "(2.0 ** (k - middle) / 2) ** 0.5", "(2.0 ** (k - middle)) ** 0.5",
           golden("adapting", "bandwidths_are_around_the_mean_distance")),
    Mutant("dann-reversal", "DANN Eqs. 17-18", "return -ctx.strength * gradients[0], None",
           "return ctx.strength * gradients[0], None", golden("adapting", "reversal_is_minus_strength")),
    Mutant("dann-strength", "DANN schedule", "return 2 / (1 + math.exp(-gamma * progress)) - 1",
           "return 1 / (1 + math.exp(-gamma * progress))", golden("adapting", "schedule_of_the_reversal")),
    Mutant("dann-labels", "DANN: labels of the domains",
           "torch.cat([torch.zeros(len(source)), torch.ones(len(target))])",
           "torch.cat([torch.ones(len(source)), torch.zeros(len(target))])", golden("adapting", "domain_loss_by_hand")),
    Mutant("dann-scale", "DANN: size of the critic's input", "scale = head.embedding**0.5", "scale = 1.0",
           golden("adapting", "a_dann_step_by_hand")),
    Mutant("dann-progress", "DANN: progress within a round", "msg.progress + msg.share * min(1.0, len(gaps) / steps)",
           "msg.progress", mutant("adapting", "the_reversal_grows_within_a_round")),
    # ---- 001 HF-MAML ----
    Mutant("001-eq1-sign", "001 Eq. 1", "move(g, -beta)", "move(g, beta)", HF),
    Mutant("001-eq1-no-hessian", "001 Eq. 1, alpha h", "torch._foreach_add_(g, above, alpha=-alpha / (2 * d))",
           "torch._foreach_add_(g, above, alpha=0.0)", HF),
    Mutant("001-eq1-hessian-sign", "001 Eq. 1, alpha h", "torch._foreach_add_(g, above, alpha=-alpha / (2 * d))",
           "torch._foreach_add_(g, above, alpha=alpha / (2 * d))", HF),
    Mutant("001-eq2-sign", "001 Eq. 2", "move(inner, -alpha)", "move(inner, alpha)", HF),
    Mutant("001-eq2-not-adapted", "001 Eq. 2", "move(inner, -alpha)", "move(inner, 0.0)", HF),
    Mutant("001-eq2-batch", "001 Eq. 2, D'", "_, g = gradient(D1)", "_, g = gradient(D)", HF_NETWORK),
    Mutant("001-eq3-factor", "001 Eq. 3, 1 / 2 delta", "alpha=-alpha / (2 * d))", "alpha=-alpha / d)", HF),
    Mutant("001-eq3-one-sided", "001 Eq. 3, both probes", "move(g, -d)", "move(g, 0.0)", HF),
    Mutant("001-eq3-batch", "001 Eq. 3, D''", "_, above = gradient(D2)", "_, above = gradient(D1)", HF_NETWORK),
    Mutant("001-eq3-delta", "001 Eq. 3, delta / |g|", "d = delta / max(length, 1e-12) if scale_delta else delta",
           "d = delta * length if scale_delta else delta",
           mutant("meta", "probes_are_delta_apart_whatever_the_length_of_g")),
    Mutant("001-momentum", "001 Table IV, momentum of the update", "torch._foreach_mul_(list(velocity), momentum)",
           "torch._foreach_mul_(list(velocity), 0.0)", golden("hf_maml", "momentum_of_the_update_on_a_quadratic")),
    Mutant("001-exact-sign", "001 Eq. 1, exact h", "torch._foreach_add_(g, list(h), alpha=-alpha)",
           "torch._foreach_add_(g, list(h), alpha=alpha)", HF),
    Mutant("001-exact-place", "001 Eq. 1, h at the old p", "move(g, 0.0)", "move(inner, -alpha)", HF_NETWORK),
    Mutant("001-three-batches", "001 D, D', D'' are different", "np.take(order, range(k * size, (k + 1) * size)",
           "np.take(order, range(size)", golden("hf_maml", "three_different_batches")),
    Mutant("001-statistics", "001 one pass a step writes statistics", "quietly=lambda: still_statistics(model),",
           "quietly=nullcontext,", golden("hf_maml", "one_pass_a_step_writes_statistics")),
    Mutant("001-eq4-sign", "001 Eq. 4", "return 1 - (direction(features.float())",
           "return 1 + (direction(features.float())", DRIFT),
    Mutant("001-eq4-C", "001 Eq. 4, C", "return self.C * cosine_drift(features, reference)",
           "return cosine_drift(features, reference)", DRIFT),
    Mutant("001-eq4-reference", "001 Eq. 4, f_global is frozen",
           "self.model = copy.deepcopy(model).requires_grad_(False).train()", "self.model = model", DRIFT),
    Mutant("001-eq4-missing", "001 Eq. 4 in a step", "else value + drift.penalty(features, batch.reference)",
           "else value", HF_ROUND),
    Mutant("001-alg1-weights", "001 Algorithm 1: n_k / sum n",
           "last, mean=(\"theta\", \"W\"), by=by)", "last, mean=(\"theta\", \"W\"), by=None)",
           HF_ROUND + golden("fedavg", "one_round")),
    Mutant("001-alg1-head-weights", "001 Algorithm 1: average of a",
           "return Server(means[\"theta\"], s.fixed, means[\"W\"], shown)",
           "return Server(means[\"theta\"], s.fixed, s.W, shown)",
           HF_ROUND),
    Mutant("001-alg1-head-stays", "001 local head persists", "client.state[\"head\"] = weights_in(head)", "pass",
           mutant("meta", "a_head_of_its_own_goes_on_where_it_stopped")),
    Mutant("001-validation", "001 Figures 1 and 2: validation pictures",
           "own = client.data.test if tuning.between == \"test\" else client.data.val", "own = client.data.test",
           unit("tuned", "tests_between_rounds_can_be_of_validation_pictures")),
    Mutant("001-tuning-momentum", "001 tuning: momentum 0.9 (audit 3)", "lr=tuning.lr, momentum=tuning.momentum,",
           "lr=tuning.lr, momentum=0.0,", mutant("tuning", "tuning_is_momentum_sgd_by_hand")),
    Mutant("001-tuning-decay", "001 tuning", "weight_decay=0.0, batch_size=tuning.batch_size",
           "weight_decay=0.05, batch_size=tuning.batch_size", mutant("tuning", "tuning_is_momentum_sgd_by_hand")),
    Mutant("001-tuning-batches", "001 tuning: 5 batches", "unit=\"iterations\", amount=tuning.batches, partial=False",
           "unit=\"iterations\", amount=tuning.batches + 1, partial=False",
           mutant("tuning", "tuning_is_momentum_sgd_by_hand")),
    Mutant("001-pairs-half", "001 pairs: half genuine", "half = count // 2", "half = count // 3",
           unit("tuned", "half_the_pairs_are_of_one_person")),
    Mutant("001-fairness-std", "001 fairness: std over clients", "float(x.std(ddof=ddof))", "float(x.var(ddof=ddof))",
           unit("verification", "summary_of_clients")),
    Mutant("001-jain", "001 fairness: Jain", "float(x.sum() ** 2 / (len(x) * np.square(x).sum()))",
           "float(x.sum() ** 2 / np.square(x).sum())", golden("evaluation", "jain_index_by_hand")),
    Mutant("001-lognormal", "001 lognormal: C S_i / sum S", "np.exp(log_s - log_s.max())", "log_s - log_s.min()",
           unit("partition", "lognormal_counts_follow_the_formula")),
    Mutant("001-lognormal-sigma", "001 lognormal: sigma", "log_s = rng.normal(mu, sigma, parts)",
           "log_s = rng.normal(mu, sigma**2, parts)", unit("partition", "lognormal_counts_follow_the_formula")),
    Mutant("001-rounding", "001 lognormal: the total stays", "order = np.argsort(-(exact - counts), kind=\"stable\")",
           "order = np.argsort(exact - counts, kind=\"stable\")", unit("partition", "largest_remainder")),
    Mutant("001-split", "001 stratified split", "bounds = np.cumsum(fractions)[:2]",
           "bounds = np.cumsum(fractions[::-1])[:2]", prop("partition", "split_fractions_hold_on_average")),
    # ---- 002 FedFR, Liu et al. ----
    Mutant("002-eq2-weights", "002 Eq. 2: N_i / N", "{\"local\": up.n, \"trained\": trained, \"uniform\": 1}",
           "{\"local\": 1, \"trained\": trained, \"uniform\": 1}",
           mutant("joint", "equations_2_and_4_with_literal_numbers")),
    Mutant("002-eq2-trained", "002 weights of the released code", "trained = up.n + (public if",
           "trained = up.n + 0 * (public if", mutant("joint", "equations_2_and_4_with_literal_numbers")),
    Mutant("002-eq4-not-sent", "002 Eq. 4, the bug of the released code",
           "return Server(means[\"theta\"], means.get(\"Phi\"))",
           "return Server(means[\"theta\"], s.Phi)",
           golden("fedfr_joint", "a_second_round_uses_the_averaged_class_matrix")),
    Mutant("002-eq3-public-labels", "002 Eq. 3, classes of public people",
           "labels.append(torch.from_numpy(self.public.labels) + self.own.n_classes)",
           "labels.append(torch.from_numpy(self.public.labels))", JOINT),
    Mutant("002-eq3-public-vectors", "002 Eq. 3, Phi in the softmax", "joined.weight.data[view.n_classes :] = Phi",
           "joined.weight.data[view.n_classes :] = -Phi", JOINT),
    Mutant("002-hn-threshold", "002 hard negatives: above t_HN", "closest(pictures, others) > threshold",
           "closest(pictures, others) < threshold",
           golden("fedfr_joint", "hard_negatives_are_those_near_any_own_picture")),
    Mutant("002-hn-max", "002 hard negatives: any local picture", "torch.maximum(best, cosines.amax(1), out=best)",
           "torch.maximum(best, cosines.mean(1), out=best)",
           golden("fedfr_joint", "hard_negatives_are_those_near_any_own_picture")),
    Mutant("002-hn-length", "002 hard negatives: cosine", "left = direction(moved(pictures[i : i + rows]))",
           "left = moved(pictures[i : i + rows])",
           golden("fedfr_joint", "hard_negatives_are_those_near_any_own_picture")),
    Mutant("002-eq5-swapped", "002 Eq. 5", "return softplus((c_p - c_g) / tau)", "return softplus((c_g - c_p) / tau)",
           CONTRAST),
    Mutant("002-eq5-tau", "002 Eq. 5, tau", "return softplus((c_p - c_g) / tau)", "return softplus((c_p - c_g) * tau)",
           CONTRAST),
    Mutant("002-eq5-unit", "002 Eq. 5, cosine", "unit = direction(f)", "unit = f", CONTRAST),
    Mutant("002-eq5-teacher", "002 Eq. 5, the last local model", "teacher(model, previous, follow)",
           "teacher(model, theta, follow)", JOINT),
    Mutant("002-eq5-weight", "002 Eq. 7, alpha_2", "{\"con\": (self.weight, lambda", "{\"con\": (1.0, lambda", JOINT),
    Mutant("002-eq5-mode", "002 Eq. 5, teachers in evaluation mode", "frozen = copy.deepcopy(model).eval()",
           "frozen = copy.deepcopy(model).train()", JOINT),
    Mutant("002-eq6-public", "002 Eq. 6, a public picture is everybody's negative", "torch.where(y < K, y, -1)",
           "torch.where(y < K, y, 0)", JOINT),
    Mutant("002-eq6-transform", "002 Eq. 6, f' = Pi(f)", "self.head.loss(self.transform(features), labels)",
           "self.head.loss(features, labels)", JOINT),
    Mutant("002-eq6-detach", "002 Eq. 6, gradient into Theta", "        if self.settings.detach:",
           "        if not self.settings.detach:", golden("fedfr_joint", "detach_keeps_the_branch_from_the_backbone")),
    Mutant("002-eq7-alpha1", "002 Eq. 7, alpha_1", "{\"cos\": (weight, lambda", "{\"cos\": (1.0, lambda", JOINT),
    Mutant("002-eq7-alpha3", "002 Eq. 7, alpha_3", "{\"branch\": (branch.settings.weight, lambda",
           "{\"branch\": (1.0, lambda", JOINT),
    Mutant("002-eq7-unweighted", "002 Eq. 7", "torch.stack([terms[name][0] * value for name, value in found.items()])",
           "torch.stack([value for name, value in found.items()])", JOINT),
    Mutant("002-start-vectors", "002 W starts at mean features", "for fresh in (joined,) if added is None",
           "for fresh in () if added is None", mutant("joint", "class_vectors_of_a_client_start_at_mean_features")),
    Mutant("002-keeps-vectors", "002 W persists", "start_at(joined, client.state[\"W\"])", "pass", JOINT),
    Mutant("002-personal-model", "002 Table 3: Theta_l, before the average", "return state[\"theta\"] | (transform_of",
           "return theta | (transform_of", unit("fedfr_joint", "which_model_is_personal")),
    Mutant("002-kd-student", "002 Table 2, KD: the teacher is the global model (audit 1)",
           "taught = fixed.logits(glob(x))", "taught = self.head.logits(f)", KD),
    Mutant("002-kd-head", "002 Table 2, KD: class vectors as they were", "taught = fixed.logits(glob(x))",
           "taught = self.head.logits(glob(x))", KD),
    Mutant("002-kd-network", "002 Table 2, KD: the teacher is the global model", "taught = fixed.logits(glob(x))",
           "taught = fixed.logits(f)", KD),
    Mutant("002-kd-weight", "002 Table 2, KD: weight", "{\"kd\": (how.kd_weight, term)}", "{\"kd\": (1.0, term)}", KD),
    Mutant("002-kd-direction", "002 Table 2, KD: KL(teacher, student)", "kl_div(student_log, taught, reduction",
           "kl_div(taught, student_log, reduction",
           unit("fedfr_joint", "distillation_is_zero_for_equal_logits_and_matches_its_definition")),
    Mutant("002-kd-temperature", "002 Table 2, KD: T^2", "log_target=True) * temperature**2", "log_target=True)",
           unit("fedfr_joint", "distillation_is_zero_for_equal_logits_and_matches_its_definition")),
    Mutant("002-personal-pairs", "002 personal 1:1: one local picture",
           "below=int(mine.sum()), far=far", "below=None, far=far",
           unit("personal", "1_to_1_is_every_pair_with_a_local_picture")),
    Mutant("002-legacy-gallery", "002 personal 1:N: gallery not renormalised (audit 4)",
           "means: Floats = (sums / count[:, None]).astype(np.float32)",
           "means: Floats = (sums / np.linalg.norm(sums, axis=1, keepdims=True)).astype(np.float32)",
           mutant("evaluation", "the_legacy_gallery_is_not_renormalised")),
    Mutant("002-legacy-threshold", "002 legacy FPIR: ceil(probes FPIR)", "math.ceil(len(wanted) * rate)",
           "math.ceil(len(names) * rate)", PERSONAL + golden("protocols", "legacy_rule")),
    Mutant("002-legacy-above", "002 legacy TPIR: strictly above", "(mate[mated] > largest[k - 1])",
           "(mate[mated] >= largest[k - 1])", mutant("evaluation", "a_legacy_mate_at_the_threshold_is_missed")),
    # ---- 003 FedFace ----
    Mutant("003-eq2-mean", "003 Eq. 2: mean over pictures",
           "squared_hinge(features, self.weight[labels], self.margin).mean()",
           "squared_hinge(features, self.weight[labels], self.margin).sum()", HINGE + FEDFACE),
    Mutant("003-eq2-together", "003 Eq. 2 of a cohort", ".index_add(0, of, hinge) / batch", ".index_add(0, of, hinge)",
           FEDFACE),
    Mutant("003-eq4-together", "003 Eq. 4 of a cohort", "W.grad.div_(scale[:, None])", "W.grad.div_(1.0)", FEDFACE),
    Mutant("003-eq5-together", "003 Eq. 5, line 9: n_i / n", "share = n / n.sum()",
           "share = torch.ones_like(n) / len(n)", golden("fedface", "two_clients_with_literal_numbers") + FEDFACE),
    Mutant("003-eq5-reduce", "003 Eq. 5, line 9: n_i / n", "asked, mean=\"theta\", by=\"n\")  # lines 5 to 9",
           "asked, mean=\"theta\", by=\"loss\")", FEDFACE),
    Mutant("ditto-near", "Ditto Eq. 2: lambda", "anchor=msg.theta, mu=self.lam,", "anchor=msg.theta, mu=0.0,",
           golden("personal", "ditto")),
    Mutant("ditto-own", "Ditto: v_k goes on from where it was", 'own = client.state.get("own", {"theta": start})',
           'own: State = {"theta": start}', golden("personal", "ditto")),
    Mutant("fedrep-first", "FedRep: the head under a fixed backbone", "first = fit(self.fitting, task.model)",
           "first = fit(self.fitting, None)", golden("personal", "fedrep")),
    Mutant("fedrep-then", "FedRep: the backbone under a fixed head", "then = fit(self.training, task.head)",
           "then = fit(self.training, None)", golden("personal", "fedrep")),
    Mutant("fedbabu-head", "FedBABU: the head is never trained together", 'msg, self.training, ("body",))',
           'msg, self.training, ("body", "head"))', golden("personal", "fedbabu")),
    Mutant("partition-exclude", "003 people of LFW are left out",
           "role: np.setdiff1d(np.flatnonzero(faces.roles == role), out)", "role: np.flatnonzero(faces.roles == role)",
           unit("partition", "excluded_identities_are_nowhere")),
    Mutant("pamap2-target", "004 PAMAP2 without statistics of the target",
           "x = np.array(values) / np.array(UNITS + UNITS)",
           "x = (np.array(values) - np.mean(values, 0)) / (np.std(values, 0) + 1e-6)",
           unit("readings", "pamap2_readings_of_a_user_do_not_depend_on_the_others")),
    Mutant("widar-domains", "004 orientations as domains", "for name in (*BY[by], \"gesture\")",
           "for name in (*BY[\"user\"], \"gesture\")", unit("readings", "widar_domains_by_orientation_or_location")),
    Mutant("figure-5", "003 Figure 5: pairs that turned", "after & ~before if now else before & ~after",
           "before & ~after if now else after & ~before", unit("bench_fedface", "figure_5_counts_pairs_that_turned")),
    Mutant("003-vectors-rate", "003 a rate of class vectors, in a cohort", "_step([W], lr * vectors_rate,",
           "_step([W], lr,", FEDFACE),
    Mutant("003-vectors-rate-alone", "003 a rate of class vectors", "momentum=self.momentum, lr=self.lr * factor",
           "momentum=self.momentum, lr=self.lr", FEDFACE + SGD),
    Mutant("003-figure-4", "003 Figure 4: all class vectors everywhere", "mask = mask if self.mask_absent else None",
           "mask = mask", golden("fedavg", "without_the_mask_everybody_of_a_global_head_is_a_negative")),
    Mutant("003-eq6-unit", "003 Eq. 6: mean of unit features",
           "sums.index_add_(0, labels, direction(features).double())", "sums.index_add_(0, labels, features.double())",
           golden("fedface", "equation_6_is_the_direction_of_the_mean_unit_feature")),
    Mutant("003-eq6-length", "003 Eq. 6: normalised", "return direction(sums).float()", "return sums.float()",
           golden("fedface", "equation_6_is_the_direction_of_the_mean_unit_feature")),
    Mutant("003-eq7-sign", "003 Eq. 7", "(margin - cos).clamp_min(0) ** 2", "(cos - margin).clamp_min(0) ** 2", HINGE),
    Mutant("003-eq7-square", "003 Eq. 7", "(margin - cos).clamp_min(0) ** 2", "(margin - cos).clamp_min(0)", HINGE),
    Mutant("003-eq7-hinge", "003 Eq. 7", "(margin - cos).clamp_min(0) ** 2", "(margin - cos) ** 2", HINGE),
    Mutant("003-eq7-unit", "003 Eq. 7: both at length 1", "cos = (direction(features) * direction(w)).sum(1)",
           "cos = (direction(features) * w).sum(1)",
           mutant("fedface", "a_class_vector_of_any_length_is_used_at_length_1")),
    Mutant("003-line7-length", "003 Algorithm 1 line 7", "direction(head.weight.detach()), len(view), done.loss)",
           "head.weight.detach(), len(view), done.loss)", mutant("fedface", "a_class_vector_leaves_at_length_1")),
    Mutant("003-eq8-rows", "003 Eq. 8: who did not answer keeps its row",
           "rows = s.W | {c: up.w for c, up in ups.items()}", "rows = {c: up.w for c, up in ups.items()}",
           mutant("fedface", "who_was_not_asked_keeps_its_class_vector")),
    Mutant("003-eq9-hinge", "003 Eq. 9", "(how.margin - distance(cos, how.distance)).clamp_min(0) * slope",
           "(how.margin - distance(cos, how.distance)).clamp_min(-0.1) * slope", EQ9),
    Mutant("003-eq9-gradient-twice", "003 Eq. 9: both orders of a pair", "result[rows] = 2 * push @ W",
           "result[rows] = push @ W", EQ9 + EQ9_LOOP),
    Mutant("003-eq9-gradient-sign", "003 Eq. 9",
           "push = -2 * (how.margin - distance(cos, how.distance)).clamp_min(0) *",
           "push = 2 * (how.margin - distance(cos, how.distance)).clamp_min(0) *", EQ9),
    Mutant("003-eq9-along", "003 Eq. 9: nothing along a row",
           "return (result - (result * W).sum(1, keepdim=True) * W) *", "return result *", EQ9),
    Mutant("003-eq9-nearest", "003 FedAwS: k nearest", "push = (-2 * distance(near, how.distance)",
           "push = (2 * distance(near, how.distance)", EQ9_LOOP),
    Mutant("003-eq9-nearest-both-ends", "003 FedAwS: gradient of both ends",
           "result.index_add_(0, other.flatten(), (push * W[rows][:, None]).flatten(0, 1))", "pass", EQ9_LOOP),
    Mutant("003-eq9-distance", "003 Eq. 9: d", "\"half\": gap / 2, \"squared\": 2 * gap",
           "\"half\": gap, \"squared\": 2 * gap", EQ9_LOOP),
    Mutant("003-eq9-share", "003 Eq. 9: reduction", "\"per_class\": 1 / max(1, others)",
           "\"per_class\": 1 / max(1, classes)", EQ9),
    Mutant("003-line10-sign", "003 Algorithm 1 line 10", "W = direction(W - how.weight * gradient(W, how))",
           "W = direction(W + how.weight * gradient(W, how))", EQ9),
    Mutant("003-line10-weight", "003 Algorithm 1 line 10, lambda", "W = direction(W - how.weight * gradient(W, how))",
           "W = direction(W - gradient(W, how))", EQ9),
    Mutant("003-line10-length", "003 Algorithm 1 line 10: rows at length 1",
           "W = direction(W - how.weight * gradient(W, how))", "W = W - how.weight * gradient(W, how)", EQ9),
    Mutant("003-fixed-vectors", "003 random fixed class vectors",
           "PositiveHead(self.own(client, msg), self.margin, self.train_vectors)",
           "PositiveHead(self.own(client, msg), self.margin)", mutant("fedface", "fixed_class_vectors_stay")),
    Mutant("003-collapse", "003 collapse: mean cosine off the diagonal",
           "return total / (len(W) * (len(W) - 1)), largest", "return total / (len(W) * len(W)), largest", FEDFACE),
    # ---- 004 MMD under encryption ----
    Mutant("004-eq2-weight-own", "004 Eq. 2, lambda L_p1", "loss = weight * share * own", "loss = share * own", LAMBDA),
    Mutant("004-eq2-weight-pull", "004 Eq. 2, lambda L_p3",
           "self.update(loss + weight * (pull * v.double()).sum())",
           "self.update(loss + (pull * v.double()).sum())",
           LAMBDA),
    Mutant("004-eq2-weight-parameters", "004 Eq. 2, lambda L_p3 without the chain rule",
           "self.update(loss, weight * pull)",
           "self.update(loss, pull)",
           LAMBDA),
    Mutant("004-eq2-task", "004 Eq. 2, L_C",
           "loss, metrics[\"task\"] = loss + task.cpu(), finite(",
           "loss, metrics[\"task\"] = loss + 0 * task.cpu(), finite(",
           ENCRYPTED),
    Mutant("004-eq2-central", "004 Eq. 2, centralised", "learner.update(task + self.weight * own)",
           "learner.update(task + own)", CENTRAL),
    Mutant("004-eq3-sign", "004 Eq. 3", "within(a, kernel) + within(b, kernel) + between(a, b, kernel)",
           "within(a, kernel) + within(b, kernel) - between(a, b, kernel)", MMD),
    Mutant("004-eq3-missing", "004 Eq. 3", "within(a, kernel) + within(b, kernel) + between(a, b, kernel)",
           "2 * within(a, kernel) + between(a, b, kernel)", MMD),
    Mutant("004-eq4-biased", "004 Eqs. 4 and 5", "return k[off].sum() / (n * (n - 1))", "return k[off].sum() / (n * n)",
           MMD),
    Mutant("004-eq4-diagonal", "004 Eqs. 4 and 5", "return k[off].sum() / (n * (n - 1))", "return k.sum() / (n * n)",
           MMD + golden("mmd", "the_estimate_is_unbiased")),
    Mutant("004-eq6-factor", "004 Eq. 6", "return -2 * kernel(squared_distances(a, b)).mean()",
           "return -kernel(squared_distances(a, b)).mean()", MMD),
    Mutant("004-distance", "004 squared distance", "(a * a).sum(1)[:, None] - 2 * a @ b.t()",
           "(a * a).sum(1)[:, None] - a @ b.t()", MMD),
    Mutant("004-rbf-width", "004 Gaussian kernel", "torch.exp(-d / (2 * s * s))", "torch.exp(-d / (s * s))", KERNELS),
    Mutant("004-rbf-sum", "004 mean of Gaussian kernels", "for s in bandwidths]).mean(0)",
           "for s in bandwidths]).sum(0)", KERNELS),
    Mutant("004-eq7-factorial", "004 Eq. 7, Taylor", "(-alpha) ** i / math.factorial(i)", "(-alpha) ** i / max(1, i)",
           mutant("mmd", "taylor_coefficients_with_literal_numbers")),
    Mutant("004-eq7-sign", "004 Eq. 7, Taylor", "(-alpha) ** i / math.factorial(i)", "alpha**i / math.factorial(i)",
           TAYLOR),
    Mutant("004-eq7-horner", "004 Eq. 7, polynomial", "value = value * d + coefficient",
           "value = value * d - coefficient", TAYLOR),
    Mutant("004-fitted", "004 fitted kernel", "kernel = torch.exp(-alpha * d)", "kernel = torch.exp(-alpha * d / 2)",
           FITTED),
    Mutant("004-fitted-unit", "004 fitted kernel, units", "Polynomial(tuple(float(c) / unit**i for",
           "Polynomial(tuple(float(c) for", FITTED),
    Mutant("004-alpha", "004 alpha from the median", "return 1 / float(off.median())",
           "return 1 / (2 * float(off.median()))", mutant("mmd", "alpha_is_one_over_the_median")),
    Mutant("004-eq7-cross", "004 Eq. 7, monomials", "((i,), (i,)): -2.0", "((i,), (i,)): -1.0", MONOMIALS),
    Mutant("004-eq15-power", "004 Eq. 15, slope of a monomial", "slope = c * times * monomial(",
           "slope = c * monomial(", MONOMIALS),
    Mutant("004-eq11-mean", "004 Eq. 11", "sent = values.mean(0) if self.compressed else values / len(b)",
           "sent = values.sum(0) if self.compressed else values / len(b)", FORWARD),
    Mutant("004-eq11-naive", "004 Eq. 10", "sent = values.mean(0) if self.compressed else values / len(b)",
           "sent = values.mean(0) if self.compressed else values", FORWARD),
    Mutant("004-eq12-parameters", "004 Eq. 12", "rows = by(i, columns.permute(2, 0, 1)).t() if by",
           "rows = -by(i, columns.permute(2, 0, 1)).t() if by", ENCRYPTED),
    Mutant("004-moments-M2", "004 moment form", "by_z * (2 * m.M2 + m.Q *", "by_z * (m.M2 + m.Q *", MOMENTS),
    Mutant("004-moments-Q", "004 moment form", "by_z * (2 * m.M2 + m.Q *", "by_z * (2 * m.M2 - m.Q *", MOMENTS),
    Mutant("004-moments-norm", "004 moment form", "norm = [-by_z * m.B1, zero]", "norm = [by_z * m.B1, zero]", MOMENTS),
    Mutant("004-moments-constant", "004 moment form", "-by_z * (c1 / (2 * c2) * m.B1 + m.B3)",
           "-by_z * (c1 / (2 * c2) * m.B1 - m.B3)", MOMENTS),
    Mutant("004-moments-s", "004 moment form", "4 * c2 * (z - 2 * s * a)", "4 * c2 * (z - s * a)", MOMENTS),
    Mutant("004-moments-cubic", "004 moment form", "weights * (2 * c1 * a + 4 * c2 * square * a)",
           "weights * (2 * c1 * a + 2 * c2 * square * a)", MOMENTS),
    Mutant("004-moments-loss", "004 moment form, loss", "- c1 * s + c2 * (2 * (a * z)", "+ c1 * s + c2 * (2 * (a * z)",
           MOMENTS),
    Mutant("004-moments-loss-B3", "004 moment form, loss", "A.append(-2 * c2 * by_e * m.B3[None])",
           "A.append(-c2 * by_e * m.B3[None])", MOMENTS),
    Mutant("004-linear", "004 degree 1 is mean matching",
           "2 * kernel.c[1] * (weights * a - values[0, :L])",
           "2 * kernel.c[1] * (weights * a + values[0, :L])",
           PACKED),
    Mutant("004-linear-loss", "004 degree 1, loss",
           "- 2 * c1 * a @ values[0, :L] + c1 * float(values[0, L])",
           "- c1 * a @ values[0, :L] + c1 * float(values[0, L])",
           PACKED),
    Mutant("004-eq17-pooled", "004 Eqs. 16 and 17: other sources", "{s: -self.n / (S * self.n - 1) for s in",
           "{s: self.n / (S * self.n - 1) for s in", POOLED),
    Mutant("004-eq16-share", "004 Eqs. 16 and 17: own pairs", "(self.n - 1) / (S * self.n - 1) if self.pooled",
           "1.0 if self.pooled", POOLED),
    Mutant("004-eq18-mean", "004 Eqs. 18-20: 1 / S", "dict.fromkeys(self.sources, 1 / S)",
           "dict.fromkeys(self.sources, 1.0)", ENCRYPTED),
    Mutant("004-eq18-central", "004 Eq. 18, centralised: 1 / S", "(a.detach(), b, kernel) / len(sources)",
           "(a.detach(), b, kernel)", CENTRAL),
    Mutant("004-eq20-scale", "004 L_p3: -2 / n", "return -2 / self.size(owner)", "return -1 / self.size(owner)",
           ENCRYPTED),
    Mutant("004-target-batch", "004 n_t other than n_s", "return -2 / self.size(owner)", "return -2 / self.n",
           golden("encrypted_mmd", "equations_18_to_20")),
    Mutant("004-pooled-rows", "004 Eq. 16 in one place: S n samples",
           "batch_size=training.batch_size * (len(everyone.data.parts) - 1))", "batch_size=training.batch_size)",
           golden("central_mmd")),
    Mutant("004-information", "004 information maximisation (ours)", "(mean * mean.clamp_min(1e-12).log()).sum() -",
           "-(mean * mean.clamp_min(1e-12).log()).sum() -", golden("central_mmd")),
    Mutant("004-monitored", "004 Section 4.2.3: the loss",
           "m, weight, loss, -float(extra[i]) / 2)",
           "m, weight, loss, -float(extra[i]))",
           MONITORED),
    Mutant("004-monitored-total", "004 Section 4.2.3: the loss",
           "metrics[\"task\"] + self.weight * mmd + decay",
           "metrics[\"task\"] + mmd + decay",
           MONITORED),
    Mutant("004-decay", "004 Eq. 1, L_Theta", "return 0.5 * self.training.weight_decay * sum(",
           "return self.training.weight_decay * sum(", mutant("mmd", "the_regulariser_is_half_the_squared_length")),
    Mutant("004-ball", "004 features inside the ball", "v * (INSIDE / length.clamp_min(self.radius))",
           "v * (INSIDE / length.clamp_max(self.radius))", mutant("mmd", "long_features_are_shortened_to_the_ball")),
    Mutant("004-prediction", "004 mean of the sources' classifiers",
           "[o.softmax(1) for o in outputs]",
           "outputs",
           mutant("mmd", "predictions_are_means_of_probabilities")),
    Mutant("004-balanced-accuracy", "004 balanced accuracy", "sum(recalls) / len(recalls)",
           "sum(w * r for w, r in zip(weights, recalls))", mutant("mmd", "balanced_accuracy_and_weighted_f1_by_hand")),
    Mutant("004-weighted-f1", "004 weighted F1",
           "(2 * hits / (occurs + int(says_c.sum())))",
           "(hits / (occurs + int(says_c.sum())))",
           mutant("mmd", "balanced_accuracy_and_weighted_f1_by_hand")),
    Mutant("004-pretrain-mean", "004 Section 4.1: mean of the sources",
           "mean=(\"theta\", \"classifier\"), by=None",
           "mean=(\"theta\", \"classifier\"), by=lambda up: 1.0 + up.loss",
           mutant("encrypted", "pre_training_ends_in_the_mean_of_the_sources")),
    # ---- ciphers of 004 ----
    Mutant("paillier-encrypt", "004 Paillier: (1 + n m) r^n", "return int((1 + m * self.n) * noise % self.n2)",
           "return int((1 + m) * noise % self.n2)", unit("paillier", "decryption_is_the_textbook_one")),
    Mutant("paillier-noise", "004 Paillier: |n| / 2 bits of noise (audit 5)", "secrets.randbits(self.bits // 2)",
           "secrets.randbits(16)", PAILLIER),
    Mutant("paillier-base", "004 Paillier: h_n = h^n", "FixedBase(int(gmp.powmod(h, n, n2)), n2, bits // 2)",
           "FixedBase(int(h), n2, bits // 2)", prop("crypto", "homomorphism")),
    Mutant("paillier-sign", "004 Paillier: negative numbers",
           "return m - int(self.public.n) if 2 * m > self.public.n else m", "return m", prop("crypto", "homomorphism")),
    Mutant("paillier-refresh-answer", "004 results are re-randomised",
           "answers.append([key.refresh(c) for c in shifted])", "answers.append(list(shifted))",
           mutant("paillier", "an_answer_has_randomness_of_its_own")),
    Mutant("paillier-refresh-gradient", "004 results are re-randomised", "results.append(key.refresh(total))",
           "results.append(total)", mutant("paillier", "a_gradient_has_randomness_of_its_own")),
    Mutant("paillier-mask", "004 masks are uniform modulo n",
           "masks = [secrets.randbelow(int(key.n)) for _ in ciphers]",
           "masks = [secrets.randbelow(1 << 40) for _ in ciphers]", FORWARD),
    Mutant("sum-masks", "004 masks that cancel", "[(1 if me < other else -1, seed)", "[(1, seed)",
           unit("encrypted_sums", "masks_cancel_and_are_new_for_every_question")),
    Mutant("fixed-point-round", "004 fixed point", "torch.round(x * 2.0**self.bits)", "torch.floor(x * 2.0**self.bits)",
           prop("crypto", "fixed_point_is_within_half_a_unit")),
    Mutant("fixed-point-unit", "004 fixed point", "unit = 1 << self.bits", "unit = 1 << (self.bits + 1)",
           prop("crypto", "fixed_point_is_within_half_a_unit")),
    Mutant("packed-headroom", "004 slots: bits before the point (audit 6)", "HEADROOM = 7", "HEADROOM = 5",
           mutant("packing", "the_largest_sum_of_answers_fits_its_slots")),
    Mutant("packed-constants", "004 scale of constants", "constants = FixedPoint(2 * FRACTION).encode(rows.constant)",
           "constants = FixedPoint(FRACTION).encode(rows.constant)", PACKED),
    Mutant("packed-slots", "004 packing: two bits stay free", "return (self.key_bits - 2) // self.width",
           "return (self.key_bits + 2) // self.width",
           mutant("packing", "a_full_plaintext_stays_below_half_the_modulus")),
    Mutant("packed-sign", "004 packing: negative slots", "v = v - (mask + 1) if v >= half else v", "v = v",
           prop("crypto", "packing_round_trip_and_sums")),
    Mutant("ckks-scale", "004 CKKS: scale of an answer", "ANSWERED = PRODUCT / PRIMES[2] / PRIMES[1]",
           "ANSWERED = PRODUCT / PRIMES[2] / PRIMES[2]", unit("ckks", "rotations_factors_and_constants")),
    Mutant("ckks-constants", "004 CKKS: scale of constants", "ring().encode(constants.tolist(), PRODUCT)",
           "ring().encode((2 * constants).tolist(), PRODUCT)", unit("ckks", "rotations_factors_and_constants")),
    Mutant("ckks-flood", "004 CKKS: noise of an answer", "% (2 * span) - span", "% span",
           unit("ckks", "the_flood_is_uniform_down_to_the_lowest_bit")),
    Mutant("ckks-diagonals", "004 CKKS: rotations", "padded[r, (r + d) % period]", "padded[r, (r - d) % period]", CKKS),
    Mutant("ckks-masks", "004 CKKS: masks that cancel", "array[0, 0] = (array[0, 0] + by) %",
           "array[0, 0] = (array[0, 0] + 0 * by) %", unit("encrypted_sums", "the_owner_reads_the_sum_and_no_part")),
    Mutant("noise-scale", "004 noise on moments", "scale = multiplier * SENSITIVITY / n", "scale = multiplier / n",
           unit("encrypted_leaks", "noise_has_the_scale_that_the_guarantee_needs")),
    Mutant("noise-epsilon", "004 epsilon", "eps + log_ndtr(-1 / (2 * sigma) - eps * sigma)",
           "eps + log_ndtr(1 / (2 * sigma) - eps * sigma)",
           unit("encrypted_leaks", "epsilon_is_what_an_accountant_finds")),
    Mutant("trust-sensitivity", "004 sensitivity of the moments", "SENSITIVITY = math.sqrt(8)",
           "SENSITIVITY = math.sqrt(11)", unit("encrypted_leaks", "the_sensitivity_is_reached_and_never_exceeded")),
    Mutant("trust-monomials", "004 products with f = 1 are not sent", "{g for f, g, _ in terms if f and g}",
           "{g for f, g, _ in terms if g}", golden("mmd", "only_monomials_that_the_peer_multiplies_are_sent")),
    Mutant("trust-alone", "004 the peer adds them to its loss", "dtype=torch.float64) - 2 * own",
           "dtype=torch.float64) - own", MONITORED),
    Mutant("trust-refresh", "004 uniform refreshes", "return int(c * powers_of(int(self.n)).draw() % self.n2)",
           "return int(c * self._noise() % self.n2)", 
           unit("planted_modulus", "a_linked_modulus_read_coefficients_through_powers_of_one_base")),
    Mutant("trust-products", "004 products of powers are uniform", "digit = byte >> (8 - DIGIT)",
           "digit = (byte >> (8 - DIGIT)) & ~1", unit("planted_modulus", "powers_and_their_products_are_uniform")),
    Mutant("trust-factors", "004 enough factors for the bound", "DISTANCE = 258", "DISTANCE = 128",
           unit("planted_modulus", "there_are_enough_factors_for_the_bound")),
    Mutant("trust-fresh", "004 a power serves once", "return self._fresh.popleft()", "return self._fresh[0]",
           unit("planted_modulus", "prepared_powers_are_handed_out_once_each")),
    Mutant("trust-fork", "004 a power serves once", "os.register_at_fork(after_in_child=powers_of.cache_clear)", "None",
           unit("planted_modulus", "a_copy_of_the_process_hands_out_other_powers")),
    Mutant("trust-certificate", "004 certificates are checked",
           "check_certificate(key, hellos[who][size:certified], f\"the key of {who}\")", "pass",
           unit("planted_modulus", "no_client_goes_on_with_a_key_whose_certificate_is_wrong")),
    Mutant("trust-root", "004 certificates are checked", "gmp.powmod(root, n, n) != rho", "False",
           unit("planted_modulus", "certificates_of_honest_keys_hold_and_changed_ones_do_not")),
    Mutant("trust-soundness", "004 certificates of 128 bits", "ROOTS = 8", "ROOTS = 7",
           unit("planted_modulus", "the_soundness_of_the_certificate_is_128_bits")),
    Mutant("trust-small", "004 certificates need no small factor",
           "if n < 2 or gmp.gcd(n, gmp.primorial(ALPHA - 1)) != 1:", "if n < 2:",
           unit("planted_modulus", "certificates_of_honest_keys_hold_and_changed_ones_do_not")),
    Mutant("trust-last-round", "004 a classifier leaves once", "== \"shared\" and net.round == self.rounds - 1:",
           "== \"shared\" and net.round <= self.rounds - 1:",
           unit("encrypted_classifier", "it_leaves_once_after_the_last_round_and_the_target_predicts_with_it")),
    Mutant("trust-early", "004 a classifier leaves once", "if self.session.exchange != exchanges:", "if False:",
           unit("encrypted_classifier", "a_classifier_is_not_handed_over_early_or_where_it_stays_at_home")),
    Mutant("trust-conceal", "004 a classifier is encrypted",
           "_aead(self.secrets[to], place).encrypt(nonce, data, place)", "data + bytes(AEAD_TAG)",
           unit("encrypted_classifier", "what_is_concealed_opens_in_its_place_alone")),
    Mutant("trust-masks-once", "004 masks serve once", "client.id != msg.plan.target and msg.received:",
           "client.id != msg.plan.target:",
           unit("encrypted_classifier", "a_pooled_source_masks_what_it_computed_and_not_what_it_was_sent")),
    Mutant("trust-masked-weights", "004 pooled weights are masked", "total = total + sign * torch",
           "total = total + 0 * sign * torch",
           unit("encrypted_classifier", "masked_weights_add_up_and_nothing_else_does")),
    Mutant("align-weight", "004 alignment beside another loss", "return moved(self.align.weight * total)",
           "return moved(total)",
           golden("aligning", "one_round_with_alignment")),
    # ---- evaluation ----
    Mutant("tar-above-target", "6. TAR@FAR: FAR <= target",
           "np.searchsorted(steps.false, allowed(target, steps.impostors), side=\"right\")) - 1",
           "np.searchsorted(steps.false, allowed(target, steps.impostors) + 1, side=\"right\")) - 1",
           golden("evaluation", "tar_at_far_conservative")),
    Mutant("tar-rounding", "6. TAR@FAR: FAR <= target", "    while k / total > target:", "    while k / total > 1:",
           mutant("evaluation", "a_rate_a_hair_below_k_impostors_allows_one_less")),
    Mutant("tar-strict", "6. TAR@FAR: the largest TAR",
           "np.searchsorted(steps.false, allowed(target, steps.impostors), side=\"right\")) - 1",
           "np.searchsorted(steps.false, allowed(target, steps.impostors), side=\"left\")) - 1",
           golden("evaluation", "tar_at_far_conservative")),
    Mutant("tar-of-all", "6. TAR@FAR: share of genuine", "FarPoint(target, true / G, false / N,",
           "FarPoint(target, true / N, false / N,", unit("scores", "scores_at_hand_match_the_definitions")),
    Mutant("eer", "6. EER", "return int(steps.false[i]) * G - (G - int(steps.true[i])) * N",
           "return int(steps.false[i]) * G - int(steps.true[i]) * N", golden("evaluation", "equal_error_rate")),
    Mutant("eer-between", "6. EER between corners", "rise * (-before / (after - before))) / N", "rise) / N",
           golden("evaluation", "equal_error_rate")),
    Mutant("auc", "6. AUC", "twice = (rise * (up[1:] + up[:-1])).sum()", "twice = (rise * (up[1:] + up[1:])).sum()",
           golden("evaluation", "area_under_curve")),
    Mutant("folds-tar-interpolation", "6. ten folds: TAR at FAR",
           "found[k] = slope * (target - far[i - 1]) + FINE[i - 1]", "found[k] = FINE[i]",
           mutant("evaluation", "the_distance_of_a_rate_lies_between_those_of_the_grid")),
    Mutant("folds-plateau", "6. ten folds: the last distance of a rate",
           "np.searchsorted(far, target, side=\"right\")) - 1", "np.searchsorted(far, target, side=\"left\"))",
           golden("protocols", "a_rate_that_is_hit_exactly_is_that_of_the_released_code")),
    Mutant("folds-roc", "6. ten folds: ROC of all pairs", "roc = roc_of(cosine[truth], cosine[~truth], far=rates)",
           "roc = roc_of(d[truth], d[~truth], far=rates)",
           mutant("evaluation", "the_distance_of_a_rate_lies_between_those_of_the_grid")),
    Mutant("folds-pairs", "6. ten folds of pairs", "chosen = (score.sum(axis=1, keepdims=True) - score).argmax(axis=2)",
           "chosen = score.argmax(axis=2)", unit("verification", "fold_accuracy_is_the_lfw_protocol")),
    Mutant("groups-std", "6. RFW: ddof 1", "std=float(accuracy.std(ddof=1))", "std=float(accuracy.std())",
           golden("protocols", "groups")),
    Mutant("groups-ratio", "6. RFW: skewed error ratio", "return high / low", "return low / high",
           golden("protocols", "groups")),
    Mutant("template-media", "6. IJB: mean over a medium", "weight = 1.0 / size[group]", "weight = np.ones(count)",
           golden("protocols", "pooling")),
    Mutant("template-score", "6. IJB: switch D", "        weight *= scores", "        weight /= scores",
           golden("protocols", "pooling")),
    Mutant("template-norm", "6. IJB: switch N", "weight = weight / length", "weight = weight * length",
           golden("protocols", "pooling")),
    Mutant("rank-ties", "6. 1:N: ties count against", "rank[part] = (identities >= mate[part, None]).sum(axis=1)",
           "rank[part] = (identities > mate[part, None]).sum(axis=1) + 1",
           unit("identification", "ties_count_against_the_method")),
    Mutant("tpir-rank", "6. 1:N: the mate must be rank 1", "np.where(rank == 1, searched.mate, -np.inf)",
           "searched.mate", IDENTIFY),
    Mutant("fpir-non-mated", "6. 1:N: FPIR over non-mated probes", "searched.rank, searched.top[~searched.mated]",
           "searched.rank, searched.top", IDENTIFY),
    Mutant("tpir-share", "6. 1:N: share of all mated probes", "int(steps.true[i]) / len(found)",
           "int(steps.true[i]) / steps.genuine", IDENTIFY),
    Mutant("gallery-mean", "6. 1:N: normalised mean template", "return names, unit_rows(sums, \"gallery templates\")",
           "return names, sums.astype(np.float32)", mutant("evaluation", "a_person_with_more_pictures_is_not_nearer")),
    Mutant("galleries-mean", "6. 1:N: G1 and G2 averaged", "tpir[rate] = sum(known) / len(known)",
           "tpir[rate] = max(known)", golden("protocols", "search_in_each_gallery")),
    Mutant("arcface-points", "6. five points of alignment", "return ARCFACE * (size / 112)",
           "return ARCFACE * (size / 128)", golden("align", "literal_values")),
    # ---- 0. robust rules (Yin et al. 2018; Pillutla et al. 2022; Blanchard et al. 2017) -----------------------------
    Mutant("robust-median", "0. coordinate median", "(ordered[half - 1].double() + ordered[half].double()) / 2",
           "ordered[half].double()", ROBUST),
    Mutant("robust-trim", "0. trimmed mean", "ordered[k : n - k].double().mean(0)",
           "ordered[k:].double().mean(0)", ROBUST),
    Mutant("robust-share", "0. number of hostile replies", "Fraction(repr(self.hostile)) * replies",
           "Fraction(self.hostile) * replies", ROBUST),
    Mutant("robust-one", "0. number of hostile replies", ", int(self.hostile > 0))", ", 0)", ROBUST),
    Mutant("robust-counter", "0. counters by the lower median", "return ordered[(len(ordered) - 1) // 2]",
           "return ordered[-1]", ROBUST),
    Mutant("robust-parts", "0. running statistics apart", "found.setdefault(part_of(key), []).append(key)",
           'found.setdefault("", []).append(key)', ROBUST),
    Mutant("robust-sent", "0. distances", "update -= sent[places].double()",
           "update -= 2 * sent[places[:1]].double()", ROBUST),
    Mutant("robust-distance", "0. distances", "squares[:, None] + squares[None, :] - 2 * products",
           "squares[:, None] + squares[None, :] - products", ROBUST),
    Mutant("robust-weiszfeld", "0. geometric median", "pull = weights / far.clamp(min=SMOOTHING * typical)",
           "pull = weights / far.clamp(min=typical)", ROBUST),
    Mutant("robust-weights", "0. geometric median by weight",
           "weights = torch.tensor(replies.weights, dtype=torch.float64)",
           "weights = torch.ones(len(replies.weights), dtype=torch.float64)", ROBUST),
    Mutant("robust-z", "0. distance to a mean of replies", "(squared @ share - 0.5 * share @ squared @ share)",
           "(squared @ share)", ROBUST),
    Mutant("robust-end", "0. tolerance of Weiszfeld", "TOLERANCE = 1e-7", "TOLERANCE = 1e-1", ROBUST),
    Mutant("robust-score", "0. Krum: n - f - 2 nearest", "squared.sort(1).values[:, 1 : n - f - 1].sum(1)",
           "squared.sort(1).values[:, 1 : n - f].sum(1)", ROBUST),
    Mutant("robust-enough", "0. Krum: n >= 2 f + 3", "return self._needs(replies, 2 * self.most(replies) + 3)",
           "return self._needs(replies, 2 * self.most(replies) + 2)", ROBUST),
    Mutant("robust-multi", "0. multi-Krum", "return self.chosen or replies - self.most(replies) - 2",
           "return self.chosen or replies - self.most(replies)", ROBUST),
    Mutant("robust-bulyan-aside", "0. Bulyan: chosen one after the other", "left.pop(int(score.argmin()))",
           "left.pop(int(score.argmax()))", ROBUST),
    Mutant("robust-bulyan-left", "0. Bulyan: Krum among those left", "min(f, len(left) - 3)", "f", ROBUST),
    Mutant("robust-bulyan-count", "0. Bulyan: n - 2 f chosen", "f, n - 2 * f)", "f, n - f)", ROBUST),
    Mutant("robust-bulyan-near", "0. Bulyan: n - 4 f nearest to the median", "_near_median(v, n - 4 * f)",
           "_near_median(v, n - 2 * f)", ROBUST),
    Mutant("robust-bulyan-enough", "0. Bulyan: n >= 4 f + 3", "4 * self.most(replies) + 3",
           "4 * self.most(replies) + 2", ROBUST),
    Mutant("robust-order", "0. order of replies", "sorted(range(len(entries)), key=lambda i: entries[i].name)",
           "list(range(len(entries)))", ROBUST),
    Mutant("robust-held", "0. pieces of held replies", "at = start * like.element_size()", "at = start", ROBUST),
    Mutant("robust-limits", "0. limits hold before the rule", "entry.place = store.put(value)",
           "store.put(value)", ROBUST),
    # ---- 0. server optimisers (Reddi et al. 2021, Algorithm 2; Hsu et al. 2019) -------------------------------------
    Mutant("optimiser-momentum", "0. FedAvgM", 'self.momentum * kept["m"] + delta',
           'self.momentum * kept["m"] + (1 - self.momentum) * delta', OPTIMISERS),
    Mutant("optimiser-first", "0. m_t", 'self.beta1 * kept["m"] + (1 - self.beta1) * delta',
           'self.beta1 * kept["m"] + delta', OPTIMISERS),
    Mutant("optimiser-tau", "0. x_{t+1}", '(kept["v"].sqrt() + self.tau)',
           '(kept["v"] + self.tau**2).sqrt()', OPTIMISERS),
    Mutant("optimiser-start", "0. v_{-1}", 'return self.tau**2 if name == "v" else 0.0', "return 0.0", OPTIMISERS),
    Mutant("optimiser-adagrad", "0. FedAdagrad", "return v + square", "return square", OPTIMISERS),
    Mutant("optimiser-adam", "0. FedAdam", "return self.beta2 * v + (1 - self.beta2) * square",
           "return self.beta2 * v + square", OPTIMISERS),
    Mutant("optimiser-yogi", "0. FedYogi", "square * (v - square).sign()", "(v - square)", OPTIMISERS),
    Mutant("optimiser-statistics", "0. trained entries alone",
           "if not value.is_floating_point() or is_statistic(key, statistics):",
           "if not value.is_floating_point():", OPTIMISERS),
    Mutant("optimiser-memory", "0. state of the optimiser", "found: State = decode(data, dict, MAX_HEADER_OF_FILES)",
           "found: State = {}", OPTIMISERS),
    Mutant("optimiser-chain", "0. state of the optimiser",
           "memory = [position.memory_digest] if position.memory else []",
           "memory: list[str] = []", OPTIMISERS),
    # ---- 0. differential privacy (McMahan et al. 2018; Andrew et al. 2021; Canonne et al. 2020) ----------------------
    Mutant("dp-clip", "0. bounded updates", "clip / length * (1 - 2.0**-40)", "1.0", DP),
    Mutant("dp-clip-short", "0. updates within the bound stay", "1.0 if length <= clip else clip / length",
           "clip / length if length else 1.0 * clip / max(length, clip)", DP),
    Mutant("dp-trunc", "0. the grid makes no norm longer", "np.trunc(update * (scale / self.unit))",
           "np.ceil(update * (scale / self.unit))", DP),
    Mutant("dp-noise", "0. noise by the bound", "return noise * clip, 0.0", "return noise, 0.0", DP),
    Mutant("dp-noise-left-out", "0. noise",
           "noisy = self._sum + discrete_gaussian(stream", "noisy = self._sum + 0 * discrete_gaussian(stream", DP),
    Mutant("dp-split", "0. noise of updates and count", "(noise**-2 - (2 * counted) ** -2) ** -0.5 * clip",
           "(noise**-2 - counted**-2 / 9) ** -0.5 * clip", DP),
    Mutant("dp-adapt", "0. the quantile", "math.exp(-dp.clip_rate * (within - dp.quantile))",
           "math.exp(dp.clip_rate * (within - dp.quantile))", DP),
    Mutant("dp-count", "0. the count of updates within the bound", "half = (2 * self._within - self._units)",
           "half = (self._within - self._units)", DP),
    Mutant("dp-accept", "0. discrete Gaussian: acceptance", "(size - sigma**2 / t) ** 2) / (2 * sigma**2)",
           "(size - sigma**2 / t) ** 2) / (2.2 * sigma**2)", DP),
    Mutant("dp-zero", "0. discrete Gaussian: one zero", "good &= ~(minus & (size == 0))", "good &= True", DP),
    Mutant("dp-sign", "0. discrete Gaussian: signs", "np.where(minus, -size, size)", "np.where(minus, size, size)", DP),
    Mutant("dp-uniform", "0. discrete Gaussian: uniform numbers",
           "= ((words >> np.uint64(11))", "= ((words >> np.uint64(12))", DP),
    Mutant("dp-replaced", "0. accounts: one client for another", "GaussianDpEvent(each.noise / 2)",
           "GaussianDpEvent(each.noise)", DP),
    Mutant("dp-poisson", "0. accounts: the share that is drawn", "PoissonSampledDpEvent(each.share, ",
           "PoissonSampledDpEvent(each.share / 1.2, ", DP),
    Mutant("dp-poisson-noise", "0. accounts: the noise", "accounting.GaussianDpEvent(each.noise))",
           "accounting.GaussianDpEvent(1.05 * each.noise))", DP),
    Mutant("dp-plain", "0. accounts without sampling", "log_ndtr(mu / 2 - epsilon / mu)",
           "log_ndtr(mu / 2 - epsilon / mu - 0.01)", DP),
    Mutant("dp-delta", "0. delta", "float(max(2, clients) ** -1.1)", "float(max(2, clients) ** -1.0)", DP),
    Mutant("dp-target", "0. a target for all rounds", "{replace(sum, noise=z): rounds}, rounds / z**2",
           "{replace(sum, noise=z): 1}, 1 / z**2", DP),
    Mutant("dp-divisor", "0. the expected number of clients",
           "noisy.astype(np.float64) * (self._grid.unit / self._expected)",
           "noisy.astype(np.float64) * (self._grid.unit / max(1, self._clients))", DP_ENGINE),
    Mutant("dp-budget", "0. the budget of a run", "_most(sums, plain))) > budget", "_most(sums, plain))) > 2 * budget",
           DP_ENGINE),
    Mutant("dp-digest", "0. other noise for other sums", "stream = self._stream(digest)", 'stream = self._stream(b"")',
           DP_ENGINE),
    Mutant("dp-place", "0. other noise in other rounds", "{self.stage} {self.round} {what}", "{self.stage} {what}",
           DP_ENGINE),
    Mutant("dp-secret", "0. the server's own secret", "self.states.secret() if real else",
           "self.world.secret_of(SERVER) if real else", DP_ENGINE),
    Mutant("dp-bernoulli", "0. each client by itself", 'limit = share if dp.sampling == "poisson"',
           'limit = share if dp.sampling == "none"', DP_ENGINE),
    Mutant("dp-single", "0. replies outside of sums", "if self._dp is not None and step.name != TEST",
           "if False and step.name != TEST", DP_ENGINE),
    Mutant("dp-nobody", "0. cohorts of nobody", "> NEVER * self.delta", "> self.delta + 1e9", DP_ENGINE),
    Mutant("dp-figures", "0. figures of single clients", "empty[name] = {} if isinstance(value, dict) else math.nan",
           "empty[name] = value", DP),
    Mutant("dp-share", "0. shares of the noise",
           "math.sqrt(self.least - self.colluders)", "math.sqrt(self.members)", DP_SHARES),
    Mutant("dp-colluders", "0. clients that tell their noise",
           "math.sqrt(self.least - self.colluders)", "math.sqrt(self.least)", DP_SHARES),
    Mutant("dp-opening", "0. sums with too little noise",
           "        if arrived < self.least:", "        if arrived < 0:", DP_SHARES),
    Mutant("dp-opening-client", "0. a client opens no such sum",
           "plan.private.check_opening(len(plan.members.keys() & set(message.arrived)))", "pass", DP_SHARES),
    Mutant("dp-share-question", "0. noise of another question",
           "_bytes_of(names, message) + integers.tobytes()", "integers.tobytes()", DP_SHARES),
    Mutant("dp-share-label", "0. noise of another place", "stream = Stream(secret, self.label.encode(), digest)",
           'stream = Stream(secret, b"", hashlib.sha256(integers.tobytes()).digest())', DP_SHARES),
    Mutant("dp-share-secret", "0. noise of a secret",
           "stream = Stream(secret, self.label", 'stream = Stream(b"", self.label', DP_SHARES),
    Mutant("dp-share-count", "0. the count in a secure sum",
           "float(mean[-1]) / self.count_scale + 0.5", "float(mean[-1]) + 0.5", DP_SHARES),
    Mutant("dp-party", "0. the budget of a party", "epsilon_plain(total, protect.dp_delta)) > protect.dp_epsilon",
           "epsilon_plain(total, protect.dp_delta)) > 10 * protect.dp_epsilon", DP_PARTY),
    Mutant("dp-party-total", "0. a party adds up", "total += request.noise**-2", "total = request.noise**-2", DP_PARTY),
    Mutant("dp-party-again", "0. the same request again", "        if last == asked:", "        if False:", DP_PARTY),
    Mutant("dp-party-noise", "0. sums without noise",
           "if not 0 < request.noise < math.inf:", "if not 0 <= request.noise:", DP_PARTY),
    Mutant("dp-party-kept", "0. what was spent is kept",
           "self.guard.folder.spend(request.client, total, asked)", "pass", DP_PARTY),
    Mutant("people-bound", "0. each person is bounded", "self.grid.update(message, reply), self.clip)",
           "self.grid.update(message, reply), 1e6)", PEOPLE),
    Mutant("people-memory", "0. each person remembers its own", "kept[str(label)] = person.state", "pass", PEOPLE),
    Mutant("people-count", "0. people are counted", 'for c in clients) if dp.unit == "person" else len(clients)',
           "for c in clients) if False else len(clients)", PEOPLE),
    Mutant("people-cohort", "0. clients are drawn, not people", "q = 1.0 if share is None or people else",
           "q = 1.0 if share is None else", PEOPLE),
    Mutant("people-drawn", "0. people are drawn", "if numbers[label] < self.share or",
           "if numbers[label] < 1 or", PEOPLE),
    Mutant("people-secret", "0. people are drawn by a secret", 'Stream(secret, b"people"',
           'Stream(b"", b"people"', PEOPLE),
    Mutant("people-length", "0. sums that people can have", "if length > people * clip * (1 + 1e-9):",
           "if False:", PEOPLE),
    Mutant("people-most", "0. no more people than there are", "if not 0 <= within <= people <= most:",
           "if False:", PEOPLE),
    Mutant("people-range", "0. room in a secure sum", "largest = self.people * max(", "largest = max(", PEOPLE),
    Mutant("people-within", "0. the count of people in a secure sum", "people.within - people.people / 2",
           "people.within - 0.5", PEOPLE),
    Mutant("people-twice", "0. a person is at one client", "owner.setdefault(number, client)) != client:",
           "owner.setdefault(number, client)) is None:", PEOPLE),
    Mutant("people-unit", "0. a client sums where the run says so", 'if dp is None or dp.unit != "person" or',
           "if dp is None or", PEOPLE),
    # ---- 0. compressed replies (Alistarh et al. 2017; Karimireddy et al. 2019) ---------------------------------------
    Mutant("compress-random", "0. stochastic rounding", "(places + drawn).floor()",
           "(places + 0.5).floor()", COMPRESSION),
    Mutant("compress-levels", "0. levels", "largest - float(low)) / LEVELS)",
           "largest - float(low)) / (LEVELS + 1))", COMPRESSION),
    Mutant("compress-feedback", "0. error feedback", "if key in left:",
           "if key in left and not left:", COMPRESSION),
    Mutant("compress-rest", "0. error feedback", "(sent.double() + update - opened(packed, sent).double()).float()",
           "(opened(packed, sent).double() - sent.double()).float()", COMPRESSION),
    Mutant("compress-statistics", "0. statistics as they are", "if value.dtype not in WIDE or is_statistic(key, ()) or",
           "if value.dtype not in WIDE or", COMPRESSION),
    Mutant("compress-length", "0. what a server refuses", "packed.shape == (HEAD + sent.numel(),)",
           "packed.numel() >= HEAD", COMPRESSION),
    Mutant("compress-ledger", "0. true sizes", "self.stage, self.round, client, value, self.world.statistics",
           "self.stage, self.round, client, opened, self.world.statistics", COMPRESSION),
)
# fmt: on


class Missing(Exception):
    """A snippet that is not there exactly once."""


def locate(mutant: Mutant, src: Path) -> Path:
    """The one file below `src` that has the snippet."""
    found = [(p, n) for p in sorted((src / PACKAGE).rglob("*.py")) if (n := p.read_text().count(mutant.snippet))]
    if len(found) != 1 or found[0][1] != 1:
        places = ", ".join(f"{p.relative_to(src)} x{n}" for p, n in found) or "nowhere"
        raise Missing(f"{mutant.name}: {mutant.snippet!r} is in {places}")
    return found[0][0]


class Copy:
    """A copy of the source tree that one process of pytest at a time imports."""

    def __init__(self, folder: Path) -> None:
        self.src = folder / "src"
        shutil.copytree(ROOT / "src", self.src, ignore=shutil.ignore_patterns("__pycache__"))
        (folder / f"{GUARD}.py").write_text(
            "import visard\n\n\ndef pytest_configure(config):\n"
            f"    assert visard.__file__.startswith({str(self.src)!r}), visard.__file__\n"
        )
        # no folder of the caller's: an installed or exported visard must not come first
        self.env = os.environ | {
            "PYTHONPATH": os.pathsep.join(map(str, (self.src, folder, ROOT))), "OMP_NUM_THREADS": "1",
        }  # fmt: skip

    def change(self, mutant: Mutant) -> tuple[Path, str]:
        """Apply a mutant; the file and what it held."""
        file = locate(mutant, self.src)
        text = file.read_text()
        self.write(file, text.replace(mutant.snippet, mutant.replacement))
        return file, text

    def write(self, file: Path, text: str) -> None:
        """Write a source file; what was compiled from the one before might pass for its own, so it goes."""
        file.write_text(text)
        for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*"):
            compiled.unlink()

    def run(self, tests: Selection, seconds: float) -> tuple[int | None, str]:
        """What pytest returns (None: it took too long) and says."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", GUARD, *tests]
        process = subprocess.Popen(
            command, cwd=ROOT, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip
        try:
            said, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return None, ""
        return process.returncode, said


def passes(copy: Copy, tests: Selection, seconds: float) -> str:
    """Nothing if the tests pass on the copy as it is, else what is wrong."""
    code, said = copy.run(tests, seconds)
    if code is None:
        return "time is up without the mutant"
    if code or not re.search(r"\d+ passed", said):
        return f"no pass without the mutant: {_last(said)}"
    return ""


def outcome(copy: Copy, mutant: Mutant, seconds: float) -> str:
    """killed, SURVIVED, or what else happened."""
    try:
        file, text = copy.change(mutant)
    except Missing:
        return "snippet not found"
    try:
        code, said = copy.run(mutant.tests, seconds)
    finally:
        copy.write(file, text)
    if code is None:
        return "time is up"
    return {0: "SURVIVED", 1: "killed"}.get(code, f"not run: {_last(said)}")


def _last(said: str) -> str:
    return (said.strip().splitlines() or ["nothing said"])[-1]


def chosen(names: Sequence[str]) -> list[Mutant]:
    """The mutants whose names begin with one of these, all if there are none."""
    found = [m for m in MUTANTS if not names or any(m.name.startswith(name) for name in names)]
    if unknown := [name for name in names if not any(m.name.startswith(name) for m in MUTANTS)]:
        sys.exit(f"no mutant is called {unknown[0]}: see --list")
    return found


def check(mutants: Iterable[Mutant]) -> list[str]:
    """What is wrong with the list itself."""
    wrong = [f"{name}: twice in the list" for name, n in Counter(m.name for m in MUTANTS).items() if n > 1]
    for m in mutants:
        try:
            locate(m, ROOT / "src")
        except Missing as error:
            wrong.append(str(error))
        if m.snippet == m.replacement or "\n" in m.snippet:
            wrong.append(f"{m.name}: changes nothing, or is more than a line")
    return wrong


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the mutants; 1 unless every one is killed."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description="Mutants of the papers' equations.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="the mutants whose names begin so (all)")
    parser.add_argument("--list", action="store_true", help="say what there is and whether its snippets are there")
    parser.add_argument("-j", type=int, default=2, choices=(1, 2), help="at a time (2)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"for the tests of one mutant ({SECONDS})")
    given = parser.parse_args(arguments)
    mutants, bad = chosen(given.names), 0
    width = max(len(m.name) for m in mutants)
    for line in check(mutants):
        print(line, flush=True)
        bad += 1
    if given.list:
        for m in mutants:
            print(f"{m.name:{width}}  {m.breaks}")
        print(f"{len(mutants)} mutants")
        return int(bad > 0)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(given.j) as pool:
        copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        for i in range(given.j):
            copies.put(Copy(Path(folder) / str(i)))

        def together(group: list[Mutant]) -> list[str]:
            """All mutants that have the same tests, after these tests without any."""
            copy = copies.get()
            try:
                wrong = passes(copy, group[0].tests, given.seconds)
                return [wrong or outcome(copy, m, given.seconds) for m in group]
            finally:
                copies.put(copy)

        groups: dict[Selection, list[Mutant]] = {}
        for m in mutants:
            groups.setdefault(m.tests, []).append(m)
        results: Counter[str] = Counter()
        for group, said in zip(groups.values(), pool.map(together, groups.values()), strict=True):
            for m, found in zip(group, said, strict=True):
                print(f"{m.name:{width}}  {found:8}  {m.breaks}", flush=True)
                results[found] += 1
    killed = results.pop("killed", 0)
    print(f"{killed} of {len(mutants)} killed", *(f"{n} {said}" for said, n in results.items()), sep=", ")
    return int(bad > 0 or killed < len(mutants))


if __name__ == "__main__":
    sys.exit(main())
