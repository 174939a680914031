"""Declarations of diagnostics: table, columns, and the option that enables each.

One file of `driftlens.diagnostics` adds one diagnostic. Spec, validation, walk and run directory read the registry.
This module does not need torch.

    @diagnostic("norm_gap", columns=(ColumnSchema("norm_gap", "float", "feature", "Difference of the mean norms."),))
    def norm_gap(seen: Seen) -> dict[str, float]:
        return {"norm_gap": float(norms(seen.variant).mean() - norms(seen.expert).mean())}
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from driftlens.utils.registry import Registry

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Kind = Literal["str", "int", "float", "bool"]
Worse = Literal["higher", "lower"] | None
Range = tuple[float | None, float | None]
Needs = Literal["view", "features", "jacobian", "weights"]
F = TypeVar("F", bound=Callable[..., Any])

ANY: Range = (None, None)


@dataclass(frozen=True)
class ColumnSchema:
    """One column of a table.

    Attributes:
        dtype: kind of value; a float that was not measured is null in the file and NaN in a frame.
        unit: "feature" is the length unit of the features, "1" a pure number, "" no number.
        meaning: one sentence for a reader of the table.
        worse: the direction that is worse, if there is one.
        range: lowest and highest possible value, up to rounding; None without a limit.
        option: key of the spec's `metrics` that enables it, for example "jacobian.spectral"; empty if it is always
            measured.
    """

    name: str
    dtype: Kind
    unit: str
    meaning: str
    worse: Worse = None
    range: Range = ANY
    option: str = ""


@dataclass(frozen=True)
class Seen:
    """The input of a diagnostic: one variant after one layer, on all diagnosis samples of one task.

    Attributes:
        variant: the variant's pooled features, [n, d] in float32.
        expert: the expert's pooled features, [n, d].
        columns: results of the `per_view` functions by name, [n] each in float64.
        base: `drift_l2` of the base model; None without one.
        head: the variant's score map (`driftlens.models.heads.ScoreMap`); None if classes are unknown.
        expert_head: the expert's score map.
        labels: class of each sample; None without labels.
    """

    variant: NDArray[np.float32]
    expert: NDArray[np.float32]
    columns: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    base: Mapping[str, NDArray[np.float64]] | None = None
    head: Any = None
    expert_head: Any = None
    labels: Sequence[str] | None = None


@dataclass(frozen=True)
class Diagnostic:
    """One family of quantities.

    Attributes:
        table: the table that it adds columns to. `layers` and `samples` are measured after every stored layer,
            `outputs` after the last one, for tasks with a head.
        needs: "view" and "features" are measured during the walk, "jacobian" by the attribution, "weights" without
            samples.
        option: key of the spec's `metrics` that enables it; empty if it is always measured.
        measure: for "view" and "features", `Seen` -> columns: one number each for `layers`, else one per sample.
        per_view: (layer view, pooling) -> named tensors [n], which reach `measure` as `Seen.columns`, joined over
            batches. Several diagnostics may share one.
    """

    name: str
    table: str
    columns: tuple[ColumnSchema, ...]
    needs: Needs
    option: str
    measure: Callable[..., Any]
    per_view: Callable[[Any, Any], Mapping[str, Any]] | None = None


diagnostics: Registry[Diagnostic] = Registry("diagnostic", "driftlens.diagnostics", "driftlens.diagnostics")


def diagnostic(
    name: str,
    *,
    columns: Sequence[ColumnSchema],
    table: str = "layers",
    needs: Needs = "features",
    option: str | None = None,
    per_view: Callable[[Any, Any], Mapping[str, Any]] | None = None,
) -> Callable[[F], F]:
    """Register a function as the diagnostic `name`. Without `option`, its name enables it.

    Args:
        name: the registered name.
        columns: the columns that it fills.
        table: the table that it adds columns to.
        needs: when it is measured, see `Diagnostic`.
        option: key of the spec's `metrics` that enables it.
        per_view: quantities of each batch, see `Diagnostic`.
    """

    def file(measure: F) -> F:
        switch = name if option is None else option
        diagnostics.register(name)(Diagnostic(name, table, tuple(columns), needs, switch, measure, per_view))
        return measure

    return file


def chosen(options: Collection[str], *needs: Needs) -> list[Diagnostic]:
    """List the diagnostics that are always measured or enabled, by name; those of the walk unless `needs` is given."""
    passes = needs or ("view", "features")
    there = (entry for entry in diagnostics.values() if entry.needs in passes)
    return [entry for entry in there if not entry.option or entry.option in options]
