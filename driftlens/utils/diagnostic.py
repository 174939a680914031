"""What a diagnostic declares of itself: its table, its columns, the option that switches it on.

One file of `driftlens.diagnostics` adds one: spec, preflight, walk and run directory ask the registry. Nothing here
needs torch, so a spec and a saved run are read without it.

    @diagnostic("norm_gap", columns=(Column("norm_gap", "float", "feature", "Difference of the mean norms."),))
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
class Column:
    """One column of a table.

    Attributes:
        name: as it stands in the file.
        dtype: kind of value; a float that was not measured is null in the file and NaN in a frame.
        unit: "feature" is the length unit of the features themselves, "1" a pure number, "" no number at all.
        meaning: one sentence for a reader who has only the table.
        worse: which direction is worse, where one is.
        range: lowest and highest value there can be, up to rounding; None where there is no limit.
        option: key of the spec's `metrics` that asks for it, "jacobian.spectral" for one further inside; empty for what
            is always measured.
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
    """What a diagnostic is shown: one variant behind one layer, on all diagnosis samples of one task.

    Attributes:
        variant: its pooled features, [n, d] in float32.
        expert: the expert's, [n, d].
        columns: what the `per_view` functions found, [n] each in float64, by name.
        base: `drift_l2` of the base model, as in `columns`; None without one.
        head: its score map (`driftlens.models.heads.ScoreMap`); None where no classes are known.
        expert_head: the expert's.
        labels: class of each sample; None without.
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
        name: its own.
        table: of the run that it adds columns to. Those of `layers` and `samples` are measured behind every stored
            layer, those of `outputs` behind the last one of tasks with a head.
        columns: that it fills.
        needs: "view" and "features" are measured while the models are walked through, "jacobian" by the attribution
            afterwards, "weights" without a sample.
        option: key of the spec's `metrics` that switches it on; empty for what is always measured.
        measure: for "view" and "features" `Seen` -> columns: one number each for `layers`, else one per sample.
        per_view: (layer view, pooling) -> tensors [n] by names that no other diagnostic gives; they reach `measure`
            joined over all batches as `Seen.columns`. Several diagnostics may share one.
    """

    name: str
    table: str
    columns: tuple[Column, ...]
    needs: Needs
    option: str
    measure: Callable[..., Any]
    per_view: Callable[[Any, Any], Mapping[str, Any]] | None = None


diagnostics: Registry[Diagnostic] = Registry("diagnostic", "driftlens.diagnostics", "driftlens.diagnostics")


def diagnostic(
    name: str,
    *,
    columns: Sequence[Column],
    table: str = "layers",
    needs: Needs = "features",
    option: str | None = None,
    per_view: Callable[[Any, Any], Mapping[str, Any]] | None = None,
) -> Callable[[F], F]:
    """Decorator that files a function as the diagnostic `name`; arguments as the attributes of `Diagnostic`.

    Without `option` it is switched on by its own name.
    """

    def file(measure: F) -> F:
        switch = name if option is None else option
        diagnostics.register(name)(Diagnostic(name, table, tuple(columns), needs, switch, measure, per_view))
        return measure

    return file


def chosen(options: Collection[str], *needs: Needs) -> list[Diagnostic]:
    """The diagnostics that are always measured or switched on, by name: of the walk, unless it says what they need."""
    wanted = needs or ("view", "features")
    there = (entry for entry in diagnostics.values() if entry.needs in wanted)
    return [entry for entry in there if not entry.option or entry.option in options]
