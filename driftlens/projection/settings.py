"""What a projection is asked to be, and the key under which a run keeps it."""

from __future__ import annotations

import difflib
import hashlib
import importlib.metadata
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypedDict, get_args

from driftlens.errors import SpecError
from driftlens.files import sha256_of
from driftlens.records import layout
from driftlens.records.run import DriftRun

Method = Literal["pca", "umap", "tsne"]
FitOn = Literal["all", "expert"]
METHODS: tuple[Method, ...] = get_args(Method)

MOST_POINTS = 10_000
"""Neighbours are compared all with all: beyond this, that takes more memory than a viewer has."""

PARAMETERS: Mapping[Method, Mapping[str, Any]] = {
    "pca": {},
    "umap": {"pca_dims": 50, "n_neighbors": 15, "min_dist": 0.1, "metric": "euclidean", "init": "pca"},
    "tsne": {"pca_dims": 50, "perplexity": 30.0, "metric": "euclidean", "init": "pca"},
}
"""What the libraries are called with; rows are brought to norm 1 first, so that euclidean distance follows cosine."""

_LIBRARIES: Mapping[Method, Sequence[str]] = {
    "pca": ("numpy", "scikit-learn"),
    "umap": ("numpy", "scikit-learn", "umap-learn", "pynndescent", "numba"),
    "tsne": ("numpy", "scipy", "scikit-learn"),
}


@dataclass(frozen=True)
class Settings:
    """One projection, with everything resolved against its run.

    Attributes:
        task: the task.
        layer: index of the layer.
        method: how to get to two dimensions.
        seed: of the method's random numbers.
        variants: whose features are drawn beside the expert's, in order.
        fit_on: "all" fits one layout on every row; "expert" on the expert's alone, so that variants added later
            don't move it.
        max_points: most points, over expert and variants together.
    """

    task: str
    layer: int
    method: Method
    seed: int
    variants: tuple[str, ...]
    fit_on: FitOn
    max_points: int

    @property
    def roles(self) -> tuple[str, ...]:
        """The expert, and the variants drawn beside it."""
        return ("expert", *self.variants)

    def as_dict(self) -> dict[str, Any]:
        """The settings as JSON knows them."""
        return {**asdict(self), "variants": list(self.variants)}


class Choices(TypedDict, total=False):
    """What may be asked of a projection beside run and task; what is left out is as `settings_of` has it.

    Attributes:
        layer: index, "final" or module path; the final one.
        method: "pca", "umap" or "tsne"; PCA.
        seed: of the method's random numbers; 0. With one, a layout repeats on one machine with the same libraries;
            elsewhere only the stored coordinates do.
        variants: whose features to draw beside the expert's; None, which is every variant but the base.
        fit_on: "all", or "expert" for a layout that variants added later don't move; "all".
        max_points: most points, over expert and variants together; 2000. Samples beyond are left out, evenly over
            classes.
    """

    layer: int | str
    method: str
    seed: int
    variants: Sequence[str] | None
    fit_on: str
    max_points: int


def settings_of(
    run: DriftRun,
    task: str,
    *,
    layer: int | str = "final",
    method: str = "pca",
    seed: int = 0,
    variants: Sequence[str] | None = None,
    fit_on: str = "all",
    max_points: int = 2000,
) -> Settings:
    """The settings, checked; arguments as in `Choices`.

    Raises:
        SpecError: no such method or reference, t-SNE asked to place rows it was not fitted on, or a bad count.
        LayerNotFoundError: the run has no such layer.
    """
    known_method = _one_of("method", method, METHODS)
    known_fit = _one_of("fit_on", fit_on, get_args(FitOn))
    if known_method == "tsne" and known_fit == "expert":
        raise SpecError(
            "t-SNE can't place rows that it was not fitted on", hint="Choose pca or umap, or fit on all."
        )
    chosen = (
        [variant for variant in run.variants if variant != "base"] if variants is None else list(variants)
    )
    chosen = [variant for variant in dict.fromkeys(chosen) if variant != "expert"]
    if not 1 + len(chosen) <= max_points <= MOST_POINTS:
        raise SpecError(f"max_points should be from {1 + len(chosen)} to {MOST_POINTS}, got {max_points}")
    return Settings(task, run.layer_index(layer), known_method, seed, tuple(chosen), known_fit, max_points)


def feature_digests(run: DriftRun, settings: Settings) -> dict[str, str]:
    """SHA-256 of the features of every role, which decide a layout.

    Raises:
        DataError: no such task or variant, or its features of this layer are not stored.
        RunError: a file is missing.
    """
    found = {}
    for role in settings.roles:
        run.features(settings.task, role, settings.layer)  # says what is missing
        relative = layout.feature_file(settings.task, role, settings.layer)
        listed = run.manifest.files.get(relative)
        found[role] = listed.sha256 if listed else sha256_of(run.path / relative)
    return found


def library_versions(method: Method) -> dict[str, str | None]:
    """Versions of the packages that make a layout; None for one that is not installed."""
    return {name: _version(name) for name in _LIBRARIES[method]}


def content_key(settings: Settings, features: Mapping[str, str], versions: Mapping[str, str | None]) -> str:
    """A name for the layout that these features, settings and libraries give, in hexadecimal."""
    parts = {
        "settings": settings.as_dict(),
        "parameters": PARAMETERS[settings.method],
        "features": features,
        "versions": versions,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def _one_of(what: str, given: str, allowed: Sequence[Any]) -> Any:
    if given in allowed:
        return given
    near = difflib.get_close_matches(given, allowed, n=1)
    hint = f"Did you mean {near[0]!r}?" if near else ""
    raise SpecError(f"no {what} {given!r}; there are {', '.join(allowed)}", hint=hint)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
