"""Variants of a run: their names, the metrics that score them, and counts of weight changes. Torch is not needed."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from driftlens.utils.errors import start_sentence
from driftlens.utils.registry import ANY, Range

Part = Literal["base", "expert", "merged", "calibrated", "baseline"]

# Kinds of models that presets suit, next to loaders.
EMBEDDINGS = "embeddings"
ADAPTERS = "LoRA adapters"

_ANCHOR = "-anchor"
# Also underscores that could be read as a colon, and leading dots: names map to files one to one, and no name
# leaves its folder.
_UNSAFE = re.compile(r"_(?=[_:])|(?<=[_:])_|^\.|[^A-Za-z0-9._-]")
# Bytes for an escaped name: file systems allow 255 bytes, and suffixes are appended.
LONGEST_FILE_NAME = 240


def suited_preset(suited: Mapping[str, str], model_kinds: Iterable[str]) -> str | None:
    """Return the preset for models of these kinds, of which the first counts most; None for the defaults.

    Args:
        suited: preset by kind of models; that of `""` is for all others.
        model_kinds: see `Manifest.model_kinds`.
    """
    return next((suited[kind] for kind in (*model_kinds, "") if kind in suited), None)


def variant_kind(variant: str) -> Part:
    """Return the kind of a variant: base, expert, merged, calibrated or baseline."""
    part = variant.partition(":")[0]
    assert part in ("base", "expert", "merged", "calibrated", "baseline"), variant
    return part  # type: ignore[return-value]


def expert_name(task: str) -> str:
    """Return the name of a task's expert in the model pool, `expert:TASK`."""
    return f"expert:{task}"


def baseline_variant(name: str) -> str:
    """Return the variant name of an additional checkpoint, `baseline:NAME`."""
    return f"baseline:{name}"


def task_of_expert(model: str) -> str | None:
    """Return the task of an expert by the model's name in the pool; None for other models."""
    part, _, task = model.partition(":")
    return task if part == "expert" else None


def calibrated_variant(name: str) -> str:
    """Return the variant name of a calibration, `calibrated:NAME`."""
    return f"calibrated:{name}"


def calibration_name(variant: str) -> str | None:
    """Return the calibration name in `calibrated:NAME`; None for other variants and for controls."""
    part, _, name = variant.partition(":")
    return name if part == "calibrated" else None


def next_free_name(stem: str, taken: Container[str]) -> str:
    """Return the first unused name of `featcal`, `featcal-2`, and so on."""
    numbered = (f"{stem}-{count}" for count in itertools.count(2))
    return next(name for name in itertools.chain([stem], numbered) if name not in taken)


def control_variant(name: str) -> str:
    """Return the variant name of a calibration's control, which is its anchor without calibration."""
    return baseline_variant(f"{name}{_ANCHOR}")


def is_control(variant: str) -> bool:
    """Return True if the variant is the control of a calibration: its anchor without calibration."""
    return variant_kind(variant) == "baseline" and variant.endswith(_ANCHOR)


def has_attribution(variant: str) -> bool:
    """Return True if the variant's drift is attributed to layers: all but the base and controls."""
    return variant != "base" and not is_control(variant)


def display_name(variant: str) -> str:
    """Return a variant's display name: "merged", "featcal", or "featcal, anchor only" for a control."""
    if is_control(variant):
        return f"{variant.partition(':')[2].removesuffix(_ANCHOR)}, anchor only"
    return variant.partition(":")[2] or variant


def safe_file_name(name: str) -> str:
    """Convert a task or variant name into a file name: `:` becomes `__`, unsafe characters are percent-escaped."""
    if not name:
        raise ValueError("an empty name can't be a file name")

    def _escape_character(match: re.Match[str]) -> str:
        return "__" if match[0] == ":" else "".join(f"%{byte:02X}" for byte in match[0].encode())

    return _UNSAFE.sub(_escape_character, name)


# Prefix of metrics that another tool has measured and `driftlens attach` has added.
ATTACHED = "harness:"


@dataclass(frozen=True)
class Metric:
    """A metric that scores a variant on a task, such as accuracy or perplexity.

    A `share` of correctly answered samples has Wilson's interval and paired changes; a `number` has bootstrap
    intervals. `needs` names the required input. `is_directed` is False if `worse` is a guess.
    """

    name: str
    title: str
    description: str = ""
    range: Range = (0.0, 1.0)
    worse: Literal["higher", "lower"] = "lower"
    kind: Literal["share", "number"] = "share"
    needs: Literal["head", "choices", "target", "number", "passages", "pair", ""] = ""
    is_directed: bool = True

    @property
    def is_averaged(self) -> bool:
        """True if the metric may be averaged over tasks: higher is better, within -1 and 1."""
        low, high = self.range
        return self.worse == "lower" and low is not None and low >= -1 and high is not None and high <= 1

    @property
    def full_description(self) -> str:
        """The description of the metric for users, with range and direction."""
        low, high = self.range
        ends = [] if low is None else [f"at least {low:g}" if high is None else f"{low:g} to {high:g}"]
        better = f"{'lower' if self.worse == 'higher' else 'higher'} is better"
        ends.append(better if self.is_directed else "direction unknown")
        return f"{self.description or 'Measured by another tool.'} {', '.join(ends).capitalize()}."

    @property
    def is_external(self) -> bool:
        """True if the metric was measured by another tool, such as lm-evaluation-harness."""
        return self.name.startswith(ATTACHED)


_RANKING: tuple[tuple[str, str, str, Literal["share", "number"]], ...] = (
    ("ndcg@10", "nDCG@10", "Normalized discounted cumulative gain of the first 10 passages.", "number"),
    ("accuracy@1", "accuracy@1", "Share of queries whose most similar passage is relevant.", "share"),
    ("precision@5", "precision@5", "Share of relevant passages among the 5 most similar ones.", "number"),
    ("mrr@10", "MRR@10", "Reciprocal rank of the first relevant passage; 0 beyond rank 10.", "number"),
)
_ALL = (
    Metric(
        "accuracy",
        "accuracy",
        "Share of samples whose highest score is that of the true class.",
        needs="head",
    ),
    Metric(
        "exact_match",
        "exact match",
        "Share of generated answers equal to the target, ignoring case and spaces.",
        needs="target",
    ),
    Metric("choice", "choice accuracy", "Share of samples whose target is the likeliest choice.", needs="choices"),
    Metric(
        "spearman",
        "Spearman correlation",
        "Rank correlation of predicted and target numbers: of the similarity of two texts, the score of a head, or "
        "the generated number (0 if there is none).",
        (-1.0, 1.0),
        kind="number",
        needs="number",
    ),
    Metric(
        "preference",
        "preference accuracy",
        "Share of pairs whose preferred text (input) scores above the other one (target).",
        needs="pair",
    ),
    Metric(
        "perplexity",
        "perplexity",
        "Exponential of the mean negative log-likelihood of the target tokens.",
        (1.0, None),
        worse="higher",
        kind="number",
        needs="target",
    ),
    *(Metric(name, title, description, kind=kind, needs="passages") for name, title, description, kind in _RANKING),
)
# By name, in the order in which tables show them.
METRICS: Mapping[str, Metric] = MappingProxyType({metric.name: metric for metric in _ALL})

ACCURACY = METRICS["accuracy"]

_Way = tuple[Literal["share", "number"], Literal["higher", "lower"]]
# Patterns of other tools' metric names, in lower case; the first match counts.
_BY_NAME: tuple[tuple[str, _Way], ...] = (
    (r"perplexity|^(bits_per_byte|ter|wer|brier_score)$", ("number", "higher")),
    (r"^(acc|exact_match|em|f1|mc[12])(_|$)|accuracy|_acc$|\bpass(@|_at_)", ("share", "lower")),
    (r"^(bleu|blue|chrf|meteor|mcc|pearson|rouge|spearman)", ("number", "lower")),
)


def metric_by_name(name: str) -> Metric:
    """Return the metric with this name; infer range and direction of an unknown one from its name.

    Names of `driftlens attach` (`harness:acc`, `harness:exact_match,strict-match`) are matched without the filter.
    """
    if name in METRICS:
        return METRICS[name]
    if not name.startswith(ATTACHED):
        return Metric(name, name)
    title = name.removeprefix(ATTACHED)
    searched = title.partition(",")[0].lower()
    way = next((way for pattern, way in _BY_NAME if re.search(pattern, searched)), None)
    kind, worse = way or ("number", "lower")
    ends: Range = (0.0, 1.0) if kind == "share" else (0.0, None) if worse == "higher" else ANY
    return Metric(name, title, "", ends, worse, kind, is_directed=way is not None)


def metrics_title(metrics: Iterable[Metric]) -> str:
    """Return a common title of several metrics: the name if there is one, else "score (NAMES)"."""
    titles = list(dict.fromkeys(metric.title for metric in metrics))
    return titles[0] if len(titles) == 1 else f"score ({', '.join(titles)})"


def describe_metrics(metrics: Iterable[Metric]) -> list[str]:
    """Describe metrics with range and direction, one line each; those with the same description share a line."""
    names: dict[str, dict[str, None]] = {}
    for metric in metrics:
        name = metric.title.partition(",")[0] if metric.is_external else metric.title
        name = start_sentence(name) if metric.description else name
        names.setdefault(metric.full_description, {})[name] = None
    return [f"{', '.join(named)}: {text}" for text, named in names.items()]


# Smallest share of a change lost to rounding that is reported.
_SAID = 0.01
# Share of changed entries at one rounding step from which on rounding is as large as the change.
COARSE = 0.5


@dataclass(frozen=True)
class ModelChange:
    """Counts of weights that differ between two models, before and after rounding to `dtype`.

    Attributes:
        entries: number of entries of the tensors that differ.
        changed: entries that differ before rounding.
        lost: changed entries that are equal in `dtype`.
        steps: changed entries that are one step of `dtype` apart.
        energy: squared norm of the difference.
        start: squared norm of the unchanged model.
    """

    dtype: str
    entries: int = 0
    changed: int = 0
    lost: int = 0
    steps: int = 0
    energy: float = 0.0
    start: float = 0.0

    def __add__(self, other: ModelChange) -> ModelChange:
        counts = {name: value + getattr(other, name) for name, value in vars(self).items() if name != "dtype"}
        # Parts may be stored in different types; the one with more changed entries names the sum.
        return ModelChange(self.dtype if self.changed >= other.changed else other.dtype, **counts)

    @property
    def norm(self) -> float:
        """The norm of the weight difference."""
        return math.sqrt(self.energy)

    @property
    def relative_norm(self) -> float:
        """The norm of the weight difference relative to the norm of the unchanged model."""
        return math.sqrt(self.energy / self.start) if self.start else 0.0


def rounding_loss_text(change: ModelChange, subject: str, whose: str = "the base's") -> str:
    """Describe the share of changed weights that rounding reverts; "" if it is negligible.

    Args:
        change: counts of the change.
        subject: the subject that changes entries.
        whose: the owner of the unchanged entries.
    """
    share = change.lost / change.changed if change.changed else 0.0
    if share < _SAID:
        return ""
    return f"about {100 * share:.1f} % of the entries that {subject} changes equal {whose} again in {change.dtype}"


def saving_loss_text(change: ModelChange, subject: str, whose: str = "the base's") -> list[str]:
    """Warn that saving in a narrower dtype reverts some changed weights; empty if that is negligible.

    Args:
        change: counts of the change.
        subject: the subject that changes entries.
        whose: the owner of the unchanged entries.
    """
    text = rounding_loss_text(change, subject, whose)
    return [f"{text}, the dtype of the output; `--out-dtype float32` keeps them"] if text else []


def coarse_change_text(change: ModelChange, subject: str) -> str:
    """Warn that most weight changes are one rounding step of the stored dtype; "" if they are larger."""
    if not change.changed or change.steps / change.changed < COARSE:
        return ""
    steps, kept = change.steps / change.changed, 1 - change.changed / change.entries
    return (
        f"about {100 * steps:.1f} % of the entries that {subject} changes are one step of {change.dtype} from the "
        f"base's, and {100 * kept:.1f} % of these tensors' entries equal the base's: smaller changes were already "
        "lost"
    )
