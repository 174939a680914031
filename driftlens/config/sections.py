"""The sections of the spec other than `data`: models, layers, metrics, calibration, compute, heads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    ByteSize,
    ConfigDict,
    Discriminator,
    Field,
    JsonValue,
    Tag,
    model_validator,
)

from driftlens.config.published import published_task
from driftlens.config.types import (
    PYTHON_TARGET,
    Bytes,
    Count,
    Flag,
    LocalPath,
    Number,
    Part,
    Selection,
    Source,
    Text,
    Texts,
    problem,
    unknown_keys,
)
from driftlens.utils.diagnostic import diagnostics
from driftlens.utils.errors import SpecError


class Vocab(Part):
    """What becomes of language models with other vocabularies: rows beyond the base's go, missing ones are its."""

    rows: Literal["base"]


class Architecture(Part):
    """Which code builds the network.

    Attributes:
        loader: the library and model family, by the name of a registered loader, which whoever opens models looks up:
            finding the loaders means importing torch. Or `python:package.module:function`, which needs trust.
        source: Hub id, folder, open_clip model name or model_config.json.
        blocks: path of the list of blocks, or a pattern of the blocks' own paths (`layer?`), for loaders that read any
            model and may find several lists.
        vocab: how language models with other vocabularies than the base's are aligned; null refuses them.
    """

    loader: Annotated[str, Field(pattern=f"^([a-z0-9][a-z0-9-]*|python:{PYTHON_TARGET})$")]
    source: Source | None = None
    blocks: Text | None = None
    vocab: Vocab | None = None

    @model_validator(mode="after")
    def _libraries_need_a_source(self) -> Architecture:
        if self.source is None and ":" not in self.loader:
            raise problem(
                f"the loader {self.loader} needs `source`",
                "Name a Hub id, a folder, an open_clip model name or a model_config.json.",
            )
        return self


class Weights(Part):
    """Where the parameters of one variant lie: a file, a folder, a Hub id, or `pretrained:TAG` of open_clip."""

    weights: Source


class _Method(Part):
    """A registered method and, flat beside it, the method's own settings, those that its signature declares.

    Who looks the method up refuses others; here a setting need only be a value that the file can hold.
    """

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)
    __pydantic_extra__: dict[str, JsonValue] = Field(init=False)

    @property
    def parameters(self) -> dict[str, JsonValue]:
        """The method's own settings by name, sorted."""
        return dict(sorted(self.__pydantic_extra__.items()))


class Merge(_Method):
    """How the experts are merged."""

    method: Text


class Calibration(_Method):
    """How the merged model is calibrated; a setting that is left out, or null, comes from the preset."""

    method: Text = "featcal"
    preset: Text | None = None
    sites: Texts | None = None

    @model_validator(mode="before")
    @classmethod
    def _null_is_left_out(cls, section: Any) -> Any:
        # Specs of older runs spell out every setting of FeatCal, most of them null.
        if not isinstance(section, Mapping):
            return section
        plain = {key: list(value) if isinstance(value, tuple) else value for key, value in section.items()}
        return {key: value for key, value in plain.items() if value is not None}


class Layers(Part):
    """Which blocks are stored and shown (all are walked), and how a layer's features become one vector.

    `select`: `blocks`, a pattern on module paths, or a list of patterns and layer numbers; `pool` suits the model.
    """

    select: Selection = "blocks"
    pool: Literal["cls", "mean", "last", "all"] | None = None


class JacobianMetrics(Part):
    """Path-averaged Jacobians by Gauss-Legendre quadrature, whose nodes double until |p - A e| / |p| is good enough."""

    nodes: Count = 4
    max_nodes: Count = 32
    tolerance: Annotated[Number, Field(gt=0)] = 1e-4
    samples: Count = 32
    spectral: Flag = False

    @model_validator(mode="after")
    def _range_of_nodes(self) -> JacobianMetrics:
        if self.max_nodes < self.nodes:
            raise problem(f"max_nodes is {self.max_nodes}, below nodes, which is {self.nodes}")
        return self


def _jacobian_kind(given: Any) -> str | None:
    if given is False:
        return "off"
    return "settings" if isinstance(given, dict | JacobianMetrics) else None


class Metrics(Part):
    """What is measured beyond drift, mismatch and propagation.

    Further keys switch on diagnostics by their names; `driftlens.utils.diagnostic` has the registry.
    """

    model_config = ConfigDict(extra="allow", frozen=True)
    __pydantic_extra__: dict[str, Flag] = Field(init=False)

    jacobian: Annotated[
        Annotated[JacobianMetrics, Tag("settings")] | Annotated[Literal[False], Tag("off")],
        Discriminator(
            _jacobian_kind,
            custom_error_type="jacobian",
            custom_error_message="expected a mapping such as {nodes: 4}, or false",
        ),
    ] = JacobianMetrics()
    contributions: Flag = True
    prefix: Flag = True
    cka: Flag = False
    adjoint: Flag = False
    groups: Flag = False

    @model_validator(mode="before")
    @classmethod
    def _only_known_diagnostics(cls, section: Any) -> Any:
        usual = list(cls.model_fields)
        further = [key for key in section if key not in usual] if isinstance(section, Mapping) else []
        # Finding the diagnostics means importing them, which a spec without further keys can do without.
        options = {entry.option for entry in diagnostics.values()} if further else set()
        if unknown := [key for key in further if key not in options]:
            allowed = [*usual, *sorted(options - {"", *usual})]
            raise unknown_keys(unknown, allowed)
        return section

    @property
    def options(self) -> frozenset[str]:
        """Options that are switched on."""
        return frozenset(name for name, value in self if value)


class Compute(Part):
    """Where and in which precision numbers are computed; features of a task beyond the budget spill to disk."""

    device: Annotated[str, Field(pattern=r"^(auto|cpu|(cuda|mps|xpu)(:[0-9]+)?)$")] = "auto"
    dtype: Literal["float32", "float64"] = "float32"
    deterministic: Flag = True
    feature_budget: Bytes = ByteSize(2 * 2**30)


def _each_once(names: tuple[str, ...]) -> tuple[str, ...]:
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise problem(
            f"class names occur more than once: {', '.join(twice)}", "Each row needs a name of its own."
        )
    return names


ClassNames = Annotated[Texts, AfterValidator(_each_once)] | LocalPath | None
"""Class names in the order of the rows, or a JSON file of them; None leaves naming to the data source."""


def _known_suite(name: str) -> str:
    try:
        return published_task(name).name
    except SpecError as error:
        raise problem(error.message, error.hint) from None


SuiteTask = Annotated[Text, AfterValidator(_known_suite)]
"""A task of the published suites (`driftlens.config.published`), which brings its class names and templates."""


class TextHead(Part):
    """Class embeddings made by the base's text tower from names and templates; `{suite: cars}` is a whole head."""

    model_config = ConfigDict(
        json_schema_extra={"required": [], "anyOf": [{"required": ["templates"]}, {"required": ["suite"]}]}
    )

    suite: SuiteTask | None = None
    templates: Annotated[tuple[Annotated[str, Field(pattern=r"\{\}")], ...], Field(min_length=1)]
    classes: ClassNames = None

    @model_validator(mode="before")
    @classmethod
    def _templates_of_the_suite(cls, section: Any) -> Any:
        suite = section.get("suite") if isinstance(section, Mapping) else None
        if not isinstance(suite, str) or "templates" in section:
            return section
        return {**section, "templates": published_task(_known_suite(suite)).templates}


class FileHead(Part):
    """Class embeddings [classes, d] of unit norm, computed beforehand and stored as one tensor of a file."""

    suite: SuiteTask | None = None
    file: LocalPath
    tensor: Text
    logit_scale: Annotated[Number, Field(gt=0)]
    classes: ClassNames = None


class LinearHead(Part):
    """A linear classifier, the same for all variants of a task; `own` is that in the expert's checkpoint.

    `weight` and `bias` are its keys there; if left out the only matrix of the file, and the bias beside it.
    """

    suite: SuiteTask | None = None
    linear: Annotated[Literal["own"] | LocalPath, Field(union_mode="left_to_right")]
    weight: Text | None = None
    bias: Text | None = None
    normalize: Flag = False
    classes: ClassNames = None


def _head_kind(head: Any) -> str:
    if isinstance(head, dict):
        return "file head" if "file" in head else "linear head" if "linear" in head else "text head"
    if isinstance(head, LinearHead):
        return "linear head"
    return "file head" if isinstance(head, FileHead) else "text head"


Head = Annotated[
    Annotated[TextHead, Tag("text head")]
    | Annotated[FileHead, Tag("file head")]
    | Annotated[LinearHead, Tag("linear head")],
    Discriminator(_head_kind),
]
