"""Requests: the arguments of each command as one model, from which flags, keywords and forms are derived.

A field defines name, type, bounds, default and description once. `driftlens.cli.flags` turns fields into flags,
`fields_as_keywords` into keywords of functions:

@fields_as_keywords(request=SweepRequest)
def sweep(run: PathLike | DriftRun, request: SweepRequest, around: JobArguments) -> Run: ...

sweep("runs/ta8", param={"lam": [0.1]}, progress="none")
"""

from __future__ import annotations

import functools
import inspect
import json
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar

from pydantic import BeforeValidator, Field, PlainSerializer, ValidationError, model_validator
from pydantic.fields import FieldInfo

from driftlens.config.data import ViewsSetting
from driftlens.config.renamed import with_current_names
from driftlens.config.types import (
    Count,
    Flag,
    Seed,
    SpecSection,
    Text,
    field_error,
    parse_yaml,
    require_task_name,
    to_spec_error,
)
from driftlens.utils.errors import SpecError, did_you_mean

T = TypeVar("T")

# The calibrator if neither a request nor the spec of the run names one.
DEFAULT_METHOD = "featcal"
# Largest number of sample draws in one sweep.
MOST_DRAWS = 1000


def split_names(text: str | Sequence[str]) -> list[str]:
    """Split comma-separated text, or the values of a repeated option, into names."""
    joined = text if isinstance(text, str) else ",".join(text)
    return [part.strip() for part in joined.split(",") if part.strip()]


def parse_layers(text: str | Sequence[str]) -> list[int | str]:
    """Parse comma-separated layer indices and patterns."""
    # More than nine digits cannot be an index, and could be a module name.
    return [int(part) if re.fullmatch("[0-9]{1,9}", part) else part for part in split_names(text)]


def _split_assignment(text: str, option: str, example: str) -> tuple[str, str]:
    name, equals, value = (part.strip() for part in text.partition("="))
    if not name or not equals:
        raise SpecError(f"{option} {text}: expected name=value", hint=f"Example: {option} {example}.")
    return name, value


def _parse_assignments(texts: Sequence[str] | None) -> dict[str, Any]:
    """Parse the values of repeated `--set name=value` options as YAML."""
    pairs = (_split_assignment(text, "--set", "scaling=0.4") for text in texts or ())
    return {name: parse_yaml(value, f"--set {name}") for name, value in pairs}


def parse_value_lists(texts: Sequence[str]) -> dict[str, list[Any]]:
    """Parse repeated `--param name=1,2` options as lists of YAML values by name; a repeated name adds values."""
    by_name: dict[str, list[Any]] = {}
    for text in texts:
        name, values = _split_assignment(text, "--param", "lam=0.01,0.05")
        by_name.setdefault(name, []).extend(parse_yaml(f"[{values}]", f"--param {name}"))
    return by_name


def parse_methods(texts: Sequence[str]) -> list[tuple[str, dict[str, Any]]]:
    """Parse comma-separated method names, each with settings after colons, such as `ties:scaling=0.4`."""
    methods = []
    # Commas inside brackets belong to a list of values, not to the list of methods.
    for text in re.split(r",(?![^\[]*\])", ",".join(texts)):
        name, *settings = text.strip().split(":")
        methods.append((name, _parse_assignments(settings)))
    return methods


def _format_list_entry(entry: object) -> str:
    """Format a list entry as on the command line: a name, a number, or a method with settings."""
    if not isinstance(entry, tuple):
        return str(entry)
    method, settings = entry
    return ":".join([method, *(f"{name}={json.dumps(value)}" for name, value in settings.items())])


def _parse_display_names(text: str) -> dict[str, str]:
    return dict(_split_assignment(pair, "--names", "mnist=MNIST,merged=Ours") for pair in split_names(text))


@dataclass(frozen=True)
class Option:
    """The command-line form of a request field, if it is not `--its-name VALUE`.

    Attributes:
        name: the option, such as `--set`; `--no-...` for flags that are on by default.
        parameter: the name in environment variables, if it is not the field's.
        unset: the help text for leaving it out, if it is not the default.
        read: words of the command line (a list if repeatable) -> the value.
    """

    name: str = ""
    parameter: str = ""
    metavar: str | None = None
    unset: str = ""
    read: Callable[[Any], Any] | None = None
    is_list: bool = True

    @classmethod
    def from_field(cls, field: FieldInfo) -> Option:
        """Return the command-line option of a field; fields without a description have none."""
        option: Any = field.json_schema_extra or {}
        return cls(**option)

    def flag_name(self, field: str) -> str:
        """Return the option's name on the command line, such as `--save-weights`."""
        return re.split("[/ ]", self.name)[0] or f"--{field.replace('_', '-')}"


def _option_field(text: str, default: Any = None, **option: Any) -> Any:
    """Define a request field with description, default and attributes of its command-line `Option`."""
    # pydantic copies other defaults, but would take the class `dict` itself as the value.
    how = {"default_factory": default} if default is dict else {"default": default}
    return Field(description=text, json_schema_extra=option, **how)


class Request(SpecSection, title="calibrate"):
    """The options of one command, for the command line and for Python keywords."""

    # Hidden from type checkers, which derive the arguments from the fields.
    if not TYPE_CHECKING:

        def __init__(self, **values: Any) -> None:
            try:
                super().__init__(**values)
            except ValidationError as error:
                raise to_spec_error(error, values, self.model_config.get("title", "")) from None

    @classmethod
    def field_defaults(cls) -> dict[str, Any]:
        """Return all field names and defaults; `...` marks required fields."""
        return {
            name: ... if field.is_required() else field.get_default(call_default_factory=True)
            for name, field in cls.model_fields.items()
        }

    @model_validator(mode="before")
    @classmethod
    def _convert_numpy_scalars(cls, keywords: Any) -> Any:
        if not isinstance(keywords, Mapping):
            return keywords
        named = with_current_names(keywords)
        # Requests are stored as JSON, which has no scalars of numpy or torch.
        return {name: value.item() if getattr(value, "ndim", None) == 0 else value for name, value in named.items()}

    def to_cli_args(self) -> list[str]:
        """Return this request as a list of command-line arguments."""
        # `--name=value` in one word, so that a value that starts with a dash is not read as an option.
        options = []
        for name, field in type(self).model_fields.items():
            option, value = Option.from_field(field), getattr(self, name)
            if not field.description or value == field.get_default(call_default_factory=True):
                continue
            spelled = option.flag_name(name)
            if isinstance(value, bool):
                options.append(spelled)
            elif isinstance(value, dict):
                options += [f"{spelled}={key}={json.dumps(entry)}" for key, entry in value.items()]
            elif isinstance(value, tuple):
                options.append(f"{spelled}={','.join(map(_format_list_entry, value))}")
            else:
                options.append(f"{spelled}={value}")
        return options

    def with_changes(self, **changes: Any) -> Self:
        """Return a validated copy with some fields changed."""
        return type(self)(**{**dict(self), **changes})


def check_keywords(command: str, keywords: Mapping[str, Any], allowed: Mapping[str, Any]) -> None:
    """Raise an error for a keyword that a command does not accept."""
    for name in keywords:
        if name not in allowed:
            raise SpecError(
                f"{command} has no {name!r}; it takes {', '.join(allowed)}", hint=did_you_mean(name, allowed)
            )


def _layers_as_python_types(layers: Any) -> Any:
    """Convert layers to text and int, since stored requests have no ranges or numpy integers."""
    if layers is None or isinstance(layers, str | int):
        return layers
    return tuple(layer if isinstance(layer, str) else operator.index(layer) for layer in layers)


_MERGED_TO = "A .safetensors file or a folder for the original library; with --compare a folder (merges/<name>)."
# Number types of saved models.
OutDtype = Literal["float32", "float16", "bfloat16"]
LayerPatterns = Annotated[tuple[str | int, ...] | None, BeforeValidator(_layers_as_python_types)]
# Names alone are methods without settings.
Methods = Annotated[
    tuple[tuple[Text, dict[str, Any]], ...],
    BeforeValidator(lambda pairs: pairs and [(pair, {}) if isinstance(pair, str) else pair for pair in pairs]),
]


_ATTRIBUTION = _option_field(
    "Skip the attribution of drift to layers; `driftlens analyze RUN` adds it later.",
    True,
    name="--no-attribution",
    parameter="no_attribution",
)
_OUT_DTYPE = _option_field("Number type: float32, float16 or bfloat16; default: the base's.")
_OVERRIDES = _option_field("Override a value of the spec; repeatable.", (), name="--set", metavar="a.b=value")


def _method_settings_field(text: str) -> Any:
    return _option_field(text, dict, name="--set", metavar="name=value", read=_parse_assignments)


class CalibrationRequest(Request):
    """The options of one calibration. Missing values come from the preset, then from the run's spec."""

    name: Annotated[str, Field(pattern=r"^([A-Za-z0-9_-][A-Za-z0-9._-]*)?$")] = _option_field(
        "Name; the variant is called calibrated:NAME.", "", unset="the method's name"
    )
    method: Text | None = _option_field("A registered calibrator.", unset=DEFAULT_METHOD)
    preset: Text | None = _option_field("Settings of a paper or study; see `driftlens doctor --methods`.")
    parameters: dict[str, Any] = _method_settings_field("Method setting, such as lam=0.05; repeatable.")
    samples: Count | None = _option_field("Calibration samples per task.", unset="the spec's")
    views: ViewsSetting = _option_field(
        "Augmented copies per sample: crop:3, mix:3, words:3, auto or none.",
        unset="the spec's",
        metavar="kind:copies",
        read=str,
        is_list=False,
    )
    layers: LayerPatterns = _option_field(
        "Layer numbers or patterns on module paths; default: all blocks.", read=parse_layers
    )
    sites: tuple[Text, ...] | None = _option_field(
        "Patterns on module paths, or groups (q, k, v, o, gate, up, down, norms); default: linear and norm modules.",
        read=split_names,
    )
    interpolate: Annotated[float, Field(ge=0, le=1.5)] | None = _option_field(
        "Interpolate between base (0) and repair (1), up to 1.5 (WiSE-FT); --auto chooses a value.",
        unset="1",
        read=str,
        is_list=False,
    )
    auto: Flag = _option_field(
        "Choose on held-out calibration samples between the merged model, the base, these settings, those of the "
        "run's calibrations, views and, without --method, other merges and methods.",
        False,
    )
    save_weights: Path | None = _option_field(
        "A .safetensors file, or a folder with model card that the original library loads."
    )
    save_adapter: Path | None = _option_field(
        "Folder for the change from the base as LoRA adapters that peft loads; needs --rank."
    )
    rank: Count | None = _option_field("Largest rank of a module's adapter.")
    out_dtype: OutDtype | None = _OUT_DTYPE
    resume: Flag = _option_field("Resume an interrupted calibration.", False)
    replace: Flag = _option_field("Replace the calibration of this name.", False)
    attribution: Flag = _ATTRIBUTION

    @model_validator(mode="after")
    def _require_adapter_with_rank(self) -> Self:
        if (self.save_adapter is None) != (self.rank is None):
            raise field_error("save_adapter and rank need each other", "Give both, such as a rank of 16, or none.")
        return self

    @property
    def without_exports(self) -> Self:
        """The request without options that change no results: exports, and skipping the attribution."""
        return self.with_changes(save_weights=None, save_adapter=None, rank=None, attribution=True)


class SweepRequest(Request, title="sweep"):
    """The options of a sweep over calibration settings, or of a comparison of calibration methods.

    `param` maps a setting of every method, `n` (calibration samples per task) or `corruption` to the values to visit.
    """

    param: dict[str, list[Any]] = _option_field(
        "Method setting, or n (samples per task), with values: lam=0.01,0.05. Repeatable.",
        dict,
        metavar="name=values",
        read=parse_value_lists,
    )
    seeds: Annotated[Count, Field(le=MOST_DRAWS)] = _option_field("Number of sample draws; the first is the run's.", 1)
    grid: Flag = _option_field("All combinations, or one factor at a time.", False, name="--grid/--one-factor")
    methods: Methods | None = _option_field(
        "Methods to sweep or, with nothing to vary, to compare; settings after colons; `all` for all.",
        unset=DEFAULT_METHOD,
        metavar="A,B:key=value,...",
        read=parse_methods,
    )
    preset: Text | None = _option_field("Settings of a paper or study for what is not varied.")
    samples: Count | None = _option_field("Calibration samples per task.", unset="the spec's")
    resume: Flag = _option_field("Skip finished points.", False)
    replace: Flag = _option_field("Replace earlier sweeps of the same factors.", False)

    @property
    def is_comparison(self) -> bool:
        """True if no setting is swept, so that calibration methods are compared."""
        return self.methods is not None and not self.param

    @model_validator(mode="after")
    def _require_setting_to_vary(self) -> Self:
        if self.is_comparison and (self.preset or self.seeds > 1 or self.grid):
            raise field_error("`preset`, `seeds` and `grid` need a setting to vary", "Name one with `param`.")
        return self


class MergeRequest(Request, title="merge"):
    """The options of merging a spec's experts by one method."""

    method: Text | None = _option_field("Merge method; see `driftlens doctor --methods`.")
    out: Path | None = _option_field(_MERGED_TO)
    out_dtype: OutDtype | None = _OUT_DTYPE
    parameters: dict[str, Any] = _method_settings_field("Method setting; repeatable.")


class ComparisonRequest(Request, title="compare_merges"):
    """The options of merging a spec's experts by several methods and ranking the results."""

    merges: Methods | None = _option_field(
        "Merges to rank without labels by distance to the experts; `all` for every method.",
        name="--compare",
        parameter="compare",
        metavar="A,B:key=value,...",
        read=parse_methods,
    )
    out: Path | None = _option_field(_MERGED_TO)


class AnalysisRequest(Request, title="analyze"):
    """The options of a drift analysis.

    Attributes:
        synthetic: marks generated data.
        weights: compares task vectors.
        scores: scores models on the test samples; `DriftRun.measure` adds scores later.
    """

    out: Path | None = _option_field("Run directory; default: runs/<name>.")
    resume: Flag = _option_field("Resume an interrupted run.", False)
    force: Flag = _option_field("Replace an existing run.", False)
    overrides: tuple[str, ...] = _OVERRIDES
    attribution: Flag = _ATTRIBUTION
    synthetic: Flag = False
    weights: Flag = True
    scores: Flag = True

    @model_validator(mode="after")
    def _refuse_resume_with_force(self) -> Self:
        if self.resume and self.force:
            raise field_error("`resume` continues an existing run, `force` replaces it", "Give one of them.")
        return self


class PreflightRequest(Request, title="validate"):
    """The options of checking a spec before any weights are read."""

    overrides: tuple[str, ...] = _OVERRIDES
    deep: Flag = _option_field("Also score every expert on its own data.", False)


class ProjectionRequest(Request, title="project"):
    """The options of projecting features to two dimensions.

    Attributes:
        layer: index, `final` or module path.
        seed: makes a layout repeatable on one machine with the same libraries.
        variants: variants to show in addition to the expert; None for all but the base.
        max_points: the largest number of points over all variants, taken evenly over classes.
    """

    layer: int | str = "final"
    method: Literal["pca", "umap", "tsne"] = "pca"
    seed: Annotated[Seed, Field(lt=2**32)] = 0
    variants: tuple[str, ...] | None = None
    max_points: int = 2000


class ViewRequest(Request, title="view"):
    """The options of an HTML page to explore samples in a browser."""

    out: Path | None = _option_field(
        "Output page.", name="--out -o", metavar="FILE", unset="view.html in the run's `reports`"
    )
    tasks: tuple[str, ...] = _option_field("Only this task; repeatable.", (), name="--task", metavar="TASK")
    method: Literal["pca", "umap", "tsne"] = _option_field(
        "Projection: pca (fast), umap or tsne (slow, cached in the run).", "pca"
    )
    samples: Annotated[Count, Field(le=100_000)] = _option_field("Largest number of samples over all tasks.", 20_000)


class ExhibitRequest(Request, title="export"):
    """The options of a figure or table for a paper; `layer` applies to exhibits of one layer."""

    style: Literal["neurips", "icml-column", "slide"] = _option_field(
        "Width of the venue: neurips, icml-column or slide.", "neurips"
    )
    task: str | None = _option_field("Task of single-task exhibits; default: median gain (intro) or largest drift.")
    calibrated: str | tuple[str, ...] | None = _option_field(
        "Comma-separated calibrations; default: the shown one, best or pinned (tables: all).", read=str, is_list=False
    )
    tasks: tuple[str, ...] | None = _option_field("Comma-separated tasks.", read=split_names, is_list=False)
    names: dict[str, str] = _option_field(
        "Display names, such as mnist=MNIST,merged=Ours; override `names` in the spec.",
        dict,
        metavar="NAME=SHOWN,...",
        read=_parse_display_names,
        is_list=False,
    )
    method: str = _option_field("Projection of features: pca, umap or tsne.", "pca")
    layer: int | str = "final"


class ExportRequest(ExhibitRequest, title="analyze"):
    """The options of writing figures and tables for a paper to files."""

    figures: tuple[str, ...] = _option_field(
        "Figure; repeatable: amplification, contributions, decomposition, drift, efficiency, intro, output-drift, "
        "scatter-grid or sweeps. Default: all figures and tables with measured numbers.",
        (),
        name="--figure",
        metavar="ID",
    )
    tables: tuple[str, ...] = _option_field(
        "Table; repeatable: accuracy, runtime or self-checks.", (), name="--table", metavar="ID"
    )
    card: Flag = _option_field("Image to share (1200 x 630 pixels); no exhibits unless named.", False)
    formats: str = _option_field(
        "File formats; csv, json and txt are always written.", "pdf,svg,png,tex,csv", name="--format"
    )
    out: Path = _option_field("Folder for the files.", Path("exhibits"))


class LiveInputs(Request):
    """The sampling, batching and tokenization of data for live modules.

    Attributes:
        blocks: path of the list of blocks, or a pattern of block paths (`layer?`), if generic modules need it.
        mask: which tokens count, for generic modules: a batch's entry, a function from a batch to a mask [n, t], or
            False without padding; `attention_mask` is found automatically. A record has True instead of a function.
        n: samples per task, drawn at random; None takes all.
        seed: of the samples and of random directions.
        batch_size: samples per forward pass.
        tokenizer: the models' tokenizer; data are rows of text then (mappings, or pairs of question and answer), and
            answers are scored as for files. Decoders end in their final norm then. A record has True instead.
        texts: per task the text rules of a spec's `data` entry: `prompt`, `words`, `classes`, `metric`, ...
    """

    blocks: str | None = None
    mask: Annotated[Any, PlainSerializer(lambda mask: True if callable(mask) else mask)] = None
    n: Count | None = 256
    seed: Seed = 0
    batch_size: Count = 32
    tokenizer: Annotated[Any, PlainSerializer(lambda tokenizer: None if tokenizer is None else True)] = None
    texts: dict[str, Any] | None = None


class LiveSettings(LiveInputs, title="analyze"):
    """The settings of an analysis of live modules, as recorded in the run.

    Attributes:
        layers: layers whose rows and features are stored: `blocks`, a glob on module paths, or a list.
        pool: how tokens become one vector per sample; None chooses by the models' modality. Scores use these vectors.
        n_calibration: like `n`, for calibration samples.
        cka: True to compute linear CKA.
        jacobian: settings of path-averaged Jacobians; None or False leaves them out.
        adjoint: True to attribute changes of loss and margin to layers; needs `jacobian`.
        name: of the run.
    """

    layers: Annotated[str | int | tuple[str | int, ...], BeforeValidator(_layers_as_python_types)] = "blocks"
    pool: Literal["cls", "mean", "last", "all"] | None = None
    n_calibration: Count | None = 256
    cka: Flag = False
    jacobian: Annotated[
        Any,
        # True stands for the default settings.
        BeforeValidator(lambda given: ({} if given else None) if isinstance(given, bool) else given),
        # A dataclass is stored as a mapping.
        PlainSerializer(lambda made: made if made is None or isinstance(made, Mapping) else vars(made)),
    ] = None
    adjoint: Flag = False
    name: Text = "live"


class FitRequest(LiveInputs, title="fit"):
    """The options of calibrating a copy of a live module with `fit`.

    Attributes:
        layers: which layers, by pattern or index; all blocks if left out.
        sites: patterns on module paths; linear and norm modules inside blocks if left out.
        closure_samples: how many samples of each task are compared with the library's own forward passes; None takes a
            whole batch. The merged model reads those of the first task only.
    """

    layers: LayerPatterns = None
    sites: tuple[Text, ...] | None = None
    closure_samples: Count | None = 1


# Fields of `Modules` that every analysis needs. They default to None there, so that one message lists all missing ones.
REQUIRED = ("merged", "experts", "data")


@dataclass(frozen=True)
class Modules:
    """Live modules (merged, experts, base, baselines) and their data, as passed by the caller; none is changed.

    Attributes:
        merged: the merged model.
        experts: one per task, of the same class and shape.
        data: per task: a tensor, a tuple `(inputs, labels)`, a Dataset, a DataLoader or other batches, labelled or not.
        base: the common base, if there is one.
        baselines: other merged models to compare with, by name.
        heads: score maps per task, or linear classifiers whose rows are numbered; with labels they give accuracy.
        calibration: samples per task for calibrating, as `data`; a calibration takes those of `data` if left out.
        device: where it is computed; the merged model's own device by default.
    """

    merged: Any = None
    experts: Mapping[str, Any] | None = None
    data: Mapping[str, Any] | None = None
    base: Any = None
    baselines: Mapping[str, Any] | None = None
    heads: Mapping[str, Any] | None = None
    calibration: Mapping[str, Any] | None = None
    device: Any = None

    def __post_init__(self) -> None:
        for by_name in (self.experts, self.data, self.baselines, self.heads, self.calibration):
            for name in by_name or ():
                require_task_name(name)

    @property
    def missing_fields(self) -> list[str]:
        """The names of required fields that are None."""
        return [name for name in REQUIRED if getattr(self, name) is None]


def fields_as_keywords(**kinds: type[Any]) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Return a decorator that replaces request parameters by keyword arguments, one per field of the request."""

    def _replace_request_parameters(function: Callable[..., T]) -> Callable[..., T]:
        parameters = inspect.signature(function).parameters
        own = {name: parameter for name, parameter in parameters.items() if name not in kinds}
        fields = {name: _signature_parameters(kind) for name, kind in kinds.items()}
        by_field = {field: parameter for of_kind in fields.values() for field, parameter in of_kind.items()}
        # A function's own parameters come first, and again last, because they win over fields of the same name.
        accepted = own | by_field | own
        if main := next((field for name in kinds for field in fields[name] if name != "around"), None):
            accepted[main] = accepted[main].replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD)
        # A signature requires the order of kinds; within a kind, sorting keeps the order.
        signature = inspect.Signature(sorted(accepted.values(), key=lambda parameter: parameter.kind))

        @functools.wraps(function)
        def _call_with_requests(*positional: Any, **named: Any) -> T:
            named = with_current_names(named)
            # Before `bind`, whose TypeError would not name the most similar keyword.
            check_keywords(function.__name__, named, accepted)
            bound = signature.bind(*positional, **named).arguments
            # Only bound fields are passed, so that a request knows which ones the caller has set.
            parts = {
                name: kind(**{key: bound[key] for key in fields[name] if key in bound}) for name, kind in kinds.items()
            }
            return function(**{name: bound[name] for name in own if name in bound}, **parts)

        # Editors and `help` read this attribute, which type checkers don't allow on a function.
        vars(_call_with_requests)["__signature__"] = signature
        return _call_with_requests

    return _replace_request_parameters


def _signature_parameters(kind: type[Any]) -> dict[str, inspect.Parameter]:
    """Return the fields of a request as optional keyword-only parameters of a signature."""
    if not issubclass(kind, Request):
        parameters = inspect.signature(kind).parameters.items()
        return {name: one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for name, one in parameters}
    keyword = inspect.Parameter.KEYWORD_ONLY
    return {name: inspect.Parameter(name, keyword, default=value) for name, value in kind.field_defaults().items()}
