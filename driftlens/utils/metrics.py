"""Metrics of a task's test samples: range, direction and interval of each.

This module needs neither torch nor pandas. `pipelines/evaluation.py` computes the metrics.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from driftlens.utils.diagnostic import ANY, Range

# Prefix of metrics that another tool has measured and `driftlens attach` has added.
ATTACHED = "harness:"


@dataclass(frozen=True)
class Metric:
    """One way to score a variant on a task.

    A `share` of correctly answered samples has Wilson's interval and paired changes; a `number` has bootstrap
    intervals. `needs` names the required input: class scores (`head`), answer choices, target texts, numbers, passages
    to rank, or one score for each text of a `pair`.
    """

    name: str
    title: str
    description: str = ""
    range: Range = (0.0, 1.0)
    worse: Literal["higher", "lower"] = "lower"
    kind: Literal["share", "number"] = "share"
    needs: Literal["head", "choices", "target", "number", "passages", "pair", ""] = ""
    hub: str = ""
    is_directed: bool = True
    """True if `worse` is known; for metrics of other tools it may not be."""

    @property
    def is_averaged(self) -> bool:
        """True if the metric may be averaged over tasks: higher is better, within -1 and 1."""
        low, high = self.range
        return self.worse == "lower" and low is not None and low >= -1 and high is not None and high <= 1

    @property
    def described(self) -> str:
        """A description for readers, with range and direction."""
        low, high = self.range
        ends = [] if low is None else [f"at least {low:g}" if high is None else f"{low:g} to {high:g}"]
        better = f"{'lower' if self.worse == 'higher' else 'higher'} is better"
        ends.append(better if self.is_directed else "direction unknown")
        return f"{self.description or 'Measured by another tool.'} {', '.join(ends).capitalize()}."

    @property
    def is_attached(self) -> bool:
        """True if another tool has measured the metric."""
        return self.name.startswith(ATTACHED)


_ALL = (
    Metric(
        "accuracy",
        "accuracy",
        "Share of test samples whose highest score is that of the true class.",
        needs="head",
        hub="accuracy",
    ),
    Metric(
        "exact_match",
        "exact match",
        "Share of greedily generated answers equal to the target, ignoring case and spaces.",
        needs="target",
        hub="exact_match",
    ),
    Metric(
        "choice",
        "choice accuracy",
        "Share of test samples whose target has the largest log-likelihood of all choices, summed over tokens "
        "(for encoder-decoders including the end token).",
        needs="choices",
        hub="accuracy",
    ),
    Metric(
        "spearman",
        "Spearman correlation",
        "Rank correlation of predicted and target numbers. The prediction is the embedding similarity of a pair "
        "of texts, the score of a head, or the generated number (0 if there is none).",
        range=(-1.0, 1.0),
        kind="number",
        needs="number",
        hub="spearmanr",
    ),
    Metric(
        "preference",
        "preference accuracy",
        "Share of pairs whose preferred text (input) scores above the other one (target).",
        needs="pair",
        hub="accuracy",
    ),
    Metric(
        "perplexity",
        "perplexity",
        "Exponential of the mean negative log-likelihood of the target tokens.",
        range=(1.0, None),
        worse="higher",
        kind="number",
        needs="target",
        hub="perplexity",
    ),
    Metric(
        "ndcg@10",
        "nDCG@10",
        "Normalized discounted cumulative gain of the first 10 passages, averaged over queries.",
        kind="number",
        needs="passages",
        hub="ndcg_at_10",
    ),
    Metric(
        "accuracy@1",
        "accuracy@1",
        "Share of queries whose most similar passage is relevant.",
        needs="passages",
        hub="accuracy_at_1",
    ),
    Metric(
        "precision@5",
        "precision@5",
        "Share of relevant passages among the 5 most similar ones, averaged over queries.",
        kind="number",
        needs="passages",
        hub="precision_at_5",
    ),
    Metric(
        "mrr@10",
        "MRR@10",
        "Reciprocal rank of the first relevant passage (0 beyond rank 10), averaged over queries.",
        kind="number",
        needs="passages",
        hub="mrr_at_10",
    ),
)
# By name, in the order in which tables show them.
METRICS: Mapping[str, Metric] = MappingProxyType({metric.name: metric for metric in _ALL})

ACCURACY = METRICS["accuracy"]

_Way = tuple[Literal["share", "number"], Literal["higher", "lower"]]
# Patterns of other tools' metric names, in lower case; the first match counts.
_BY_NAME: tuple[tuple[str, _Way], ...] = (
    (r"perplexity|^(bits_per_byte|ter|wer|brier_score)$", ("number", "higher")),
    # XSTest's safe prompts should be answered, its contrasting ones refused: RTA is "refuses to answer".
    (r"^inverted_rta_(?!.*contrast)|^rta_(?!harm)(?=.*contrast)|^inverted_.*(asr|harm)", ("share", "lower")),
    (r"benign$|^refusal_prf", ("share", "lower")),
    (r"^(inverted_)?rta_|(\b|_)(asr|harm(fulness)?)(\b|_)", ("share", "higher")),
    (r"^(acc|exact_match|em|f1|mc[12])(_|$)|accuracy|_acc$|\bpass(@|_at_)", ("share", "lower")),
    (r"^(bleu|blue|chrf|meteor|mcc|pearson|rouge|spearman)", ("number", "lower")),
)


def metric_called(name: str) -> Metric:
    """Return the metric of a name. For an unknown name, infer range and direction from the name.

    Names of `driftlens attach` (`harness:acc`, `harness:exact_match,strict-match`) are matched without the filter.
    """
    if name in METRICS:
        return METRICS[name]
    if not name.startswith(ATTACHED):
        return Metric(name, name, hub=name)
    title = name.removeprefix(ATTACHED)
    hub, _, part = title.partition(",")
    # Parts of a task have the task's metric, except that benign prompts should be answered.
    told = f"{hub},benign" if part == "benign" else hub
    way = next((way for pattern, way in _BY_NAME if re.search(pattern, told.lower())), None)
    kind, worse = way or ("number", "lower")
    ends: Range = (0.0, 1.0) if kind == "share" else (0.0, None) if worse == "higher" else ANY
    return Metric(name, title, "", ends, worse, kind, hub=hub, is_directed=way is not None)


def title_of(metrics: Iterable[Metric]) -> str:
    """Return the common title of several metrics: the name of a single one, else `score` with their names."""
    titles = list(dict.fromkeys(metric.title for metric in metrics))
    return titles[0] if len(titles) == 1 else f"score ({', '.join(titles)})"


def descriptions_of(metrics: Iterable[Metric]) -> list[str]:
    """Describe metrics with range and direction; metrics with one description share a line."""
    names: dict[str, dict[str, None]] = {}
    for metric in metrics:
        name = metric.hub if metric.is_attached else metric.title
        names.setdefault(metric.described, {})[
            f"{name[:1].upper()}{name[1:]}" if metric.description else name
        ] = None
    return [f"{', '.join(named)}: {text}" for text, named in names.items()]
