"""The run spec: its sections other than `data`. Entry point: `load_spec`."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, ByteSize, ConfigDict, Discriminator, Field, JsonValue, Tag, model_validator

from driftlens.config.data import Data
from driftlens.config.packaged import published_task
from driftlens.config.types import (
    PYTHON_TARGET,
    Bytes,
    ClassNames,
    Count,
    Flag,
    LocalPath,
    Name,
    Number,
    Selection,
    Source,
    SpecSection,
    Text,
    Texts,
    field_error,
    parse_yaml,
    read_yaml_mapping,
    to_yaml,
    unknown_keys_error,
    validate_section,
)
from driftlens.utils.errors import SpecError, did_you_mean
from driftlens.utils.registry import diagnostics


class Vocab(SpecSection):
    """The alignment of vocabularies of language models: extra rows are cut, missing ones are copied from the base."""

    rows: Literal["base"]


class ArchitectureSpec(SpecSection):
    """The loader, and its options, that builds the network of all variants.

    Attributes:
        loader: name of a registered loader; or `python:package.module:function`, which needs trust.
        source: Hub id, folder, open_clip model name or model_config.json.
        blocks: path of the list of blocks, or a pattern of block paths (`layer?`), if a loader may find several.
        vocab: how language models with other vocabularies are aligned; null refuses them.
    """

    loader: Annotated[str, Field(pattern=f"^([a-z0-9][a-z0-9-]*|python:{PYTHON_TARGET})$")]
    source: Source | None = None
    blocks: Text | None = None
    vocab: Vocab | None = None

    @model_validator(mode="after")
    def _require_source_of_loader(self) -> ArchitectureSpec:
        if self.source is None and ":" not in self.loader:
            raise field_error(
                f"the loader {self.loader} needs `source`",
                "Name a Hub id, a folder, an open_clip model name or a model_config.json.",
            )
        return self


class WeightsSpec(SpecSection):
    """The weights of one variant: a file, a folder or a Hub id."""

    weights: Source


class _MethodSpec(SpecSection):
    """The name of a registered merge or calibration method with its own settings, which its code validates."""

    # Built here, because validators that a spec builds for its sections later would accept NaN.
    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False, defer_build=False)
    __pydantic_extra__: dict[str, JsonValue] = Field(init=False)

    @property
    def parameters(self) -> dict[str, JsonValue]:
        """The method's own settings by name, sorted."""
        return dict(sorted(self.__pydantic_extra__.items()))


class MergeSpec(_MethodSpec):
    """The merge method, with its settings, that combines the experts."""

    method: Text


class Calibration(_MethodSpec):
    """The method and settings that calibrate the merged model; those left out or null come from the preset."""

    method: Text = "featcal"
    preset: Text | None = None
    sites: Texts | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_null_settings(cls, section: Any) -> Any:
        # Specs of older runs have all settings of FeatCal, most of them null.
        if not isinstance(section, Mapping):
            return section
        plain = {key: list(value) if isinstance(value, tuple) else value for key, value in section.items()}
        return {key: value for key, value in plain.items() if value is not None}


class Layers(SpecSection):
    """The blocks that are stored and shown (all are computed), and the pooling of tokens to one vector per layer.

    Attributes:
        select: `blocks`, a pattern on module paths, or a list of patterns and layer numbers.
        pool: how tokens are pooled; by default as the model's modality requires.
    """

    select: Selection = "blocks"
    pool: Literal["cls", "mean", "last", "all"] | None = None


class JacobianMetrics(SpecSection):
    """Settings of path-averaged Jacobians: quadrature nodes double until |p - A e| / |p| is within `tolerance`."""

    nodes: Count = 4
    max_nodes: Count = 32
    tolerance: Annotated[Number, Field(gt=0)] = 1e-4
    samples: Count = 32
    spectral: Flag = False

    @model_validator(mode="after")
    def _require_ordered_node_counts(self) -> JacobianMetrics:
        if self.max_nodes < self.nodes:
            raise field_error(f"max_nodes is {self.max_nodes}, below nodes, which is {self.nodes}")
        return self


def _jacobian_union_tag(value: Any) -> str | None:
    if value is False:
        return "off"
    return "settings" if isinstance(value, dict | JacobianMetrics) else None


class Metrics(SpecSection):
    """The diagnostics computed in addition to drift, mismatch and propagation.

    Further keys enable diagnostics by name; see the registry in `driftlens.utils.registry`.
    """

    model_config = ConfigDict(extra="allow", frozen=True)
    __pydantic_extra__: dict[str, Flag] = Field(init=False)

    jacobian: Annotated[
        Annotated[JacobianMetrics, Tag("settings")] | Annotated[Literal[False], Tag("off")],
        Discriminator(
            _jacobian_union_tag,
            custom_error_type="jacobian",
            custom_error_message="expected a mapping such as {nodes: 4}, or false",
        ),
    ] = JacobianMetrics()
    contributions: Flag = True
    prefix: Flag = True
    cka: Flag = False
    adjoint: Flag = False

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_diagnostics(cls, section: Any) -> Any:
        usual = list(cls.model_fields)
        further = [key for key in section if key not in usual] if isinstance(section, Mapping) else []
        # Imported only for further keys, since importing all diagnostics is slow.
        options = {entry.option for entry in diagnostics.values()} if further else set()
        if unknown := [key for key in further if key not in options]:
            allowed = [*usual, *sorted(options - {"", *usual})]
            raise unknown_keys_error(unknown, allowed)
        return section

    @property
    def enabled(self) -> frozenset[str]:
        """The names of diagnostics that are switched on."""
        return frozenset(name for name, value in self if value)


class Compute(SpecSection):
    """Device and dtype of the computation; features beyond `feature_budget` are stored on disk."""

    device: Annotated[str, Field(pattern=r"^(auto|cpu|(cuda|mps|xpu)(:[0-9]+)?)$")] = "auto"
    dtype: Literal["float32", "float64"] = "float32"
    deterministic: Flag = True
    feature_budget: Bytes = ByteSize(2 * 2**30)


def _canonical_suite_name(name: str) -> str:
    try:
        return published_task(name).name
    except SpecError as error:
        raise field_error(error.message, error.hint) from None


SuiteTask = Annotated[Text, AfterValidator(_canonical_suite_name)]
"""A published task (see `driftlens.config.packaged`), which provides class names and templates."""


class TextHead(SpecSection):
    """A zero-shot head: the base's text tower embeds class names in templates; `suite` fills in a published task's."""

    model_config = ConfigDict(
        json_schema_extra={"required": [], "anyOf": [{"required": ["templates"]}, {"required": ["suite"]}]}
    )

    suite: SuiteTask | None = None
    templates: Annotated[tuple[Annotated[str, Field(pattern=r"\{\}")], ...], Field(min_length=1)]
    classes: ClassNames = None

    @model_validator(mode="before")
    @classmethod
    def _fill_in_suite_templates(cls, section: Any) -> Any:
        suite = section.get("suite") if isinstance(section, Mapping) else None
        if not isinstance(suite, str) or "templates" in section:
            return section
        return {**section, "templates": published_task(_canonical_suite_name(suite)).templates}


class FileHead(SpecSection):
    """A head of precomputed unit-norm class embeddings [classes, d], stored as one tensor of a file."""

    suite: SuiteTask | None = None
    file: LocalPath
    tensor: Text
    logit_scale: Annotated[Number, Field(gt=0)]
    classes: ClassNames = None


class LinearHeadSpec(SpecSection):
    """A linear classifier shared by all variants of a task; `own` takes it from the expert's checkpoint.

    `weight` and `bias` are its keys there; by default the only matrix of the file and the bias with it.
    """

    suite: SuiteTask | None = None
    linear: Annotated[Literal["own"] | LocalPath, Field(union_mode="left_to_right")]
    weight: Text | None = None
    bias: Text | None = None
    normalize: Flag = False
    classes: ClassNames = None


def _head_union_tag(head: Any) -> str:
    if isinstance(head, dict):
        return "file head" if "file" in head else "linear head" if "linear" in head else "text head"
    if isinstance(head, LinearHeadSpec):
        return "linear head"
    return "file head" if isinstance(head, FileHead) else "text head"


Head = Annotated[
    Annotated[TextHead, Tag("text head")]
    | Annotated[FileHead, Tag("file head")]
    | Annotated[LinearHeadSpec, Tag("linear head")],
    Discriminator(_head_union_tag),
]


VERSION = 1
MAX_EXPERTS = 1000

T = TypeVar("T")
PerName = Annotated[dict[Name, T], AfterValidator(lambda entries: dict(sorted(entries.items())))]


class RunSpec(SpecSection):
    """The complete settings of a run, with defaults filled in and paths absolute; made by `load_spec`.

    Attributes:
        experts: weights per task, sorted by the task's name.
        heads: how a task's features become class scores; tasks without one have no accuracy.
        baselines: further variants to measure.
        names: names of tasks and variants in exhibits; not part of the digest.
        task_id: if the task of an input is unknown where the model is used, repairs with a map per task are refused.
    """

    version: Literal[1]
    name: Text = "run"
    architecture: ArchitectureSpec
    base: WeightsSpec | None = None
    merged: WeightsSpec | None = None
    merge: MergeSpec | None = None
    experts: Annotated[PerName[WeightsSpec], Field(min_length=1, max_length=MAX_EXPERTS)]
    baselines: PerName[WeightsSpec] = Field(default_factory=dict)
    heads: PerName[Head] = Field(default_factory=dict)
    data: Data = Data()
    layers: Layers = Layers()
    metrics: Metrics = Metrics()
    calibration: Calibration | None = None
    compute: Compute = Compute()
    names: dict[Text, Text] = Field(default_factory=dict)
    task_id: Literal["known", "unknown"] = "known"

    @property
    def tasks(self) -> tuple[str, ...]:
        """The names of all tasks, sorted."""
        return tuple(self.experts)

    @model_validator(mode="after")
    def _require_one_merged_model(self) -> RunSpec:
        if (self.merged is None) == (self.merge is None):
            which = "neither" if self.merged is None else "both"
            raise field_error(
                f"expected exactly one of merged and merge, got {which}",
                "Write `merged: {weights: FILE}`, or `merge: {method: task_arithmetic, scaling: 0.3}`.",
            )
        return self

    @model_validator(mode="after")
    def _refuse_unknown_tasks(self) -> RunSpec:
        # The key of that task in `data` would be ambiguous.
        if "defaults" in self.experts:
            raise field_error(
                "a task can't be called 'defaults'", "That key of `data` holds the defaults of all tasks."
            )
        for section, named in (("heads", self.heads), ("data", self.data.tasks)):
            for task in named:
                if task not in self.experts:
                    experts = ", ".join(self.experts)
                    raise field_error(
                        f"{section}.{task}: no expert is called {task!r}; experts are {experts}",
                        did_you_mean(task, self.experts) or f"Add experts.{task}, or remove {section}.{task}.",
                    )
        return self

    def as_dict(self) -> dict[str, Any]:
        """Convert the spec to plain mappings, lists, numbers and text, which `load_spec` accepts."""
        return self.model_dump(mode="json")

    def dump(self) -> str:
        """Return the spec as YAML with all defaults; `load_spec` reads it back to an equal spec."""
        return to_yaml(self.as_dict())

    def digest(self) -> str:
        """Return the SHA-256 digest of the spec, independent of the order of keys in the file."""
        # Names and task_id change no numbers, so runs that differ in them only are comparable.
        document = self.model_dump(mode="json", exclude={"names", "task_id"})
        canonical = json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(canonical.encode("ascii")).hexdigest()


def load_spec(source: Path | str | Mapping[str, Any] | RunSpec, overrides: Sequence[str] = ()) -> RunSpec:
    """Load and validate a spec; fill in all defaults and make all paths absolute.

    Args:
        source: a YAML file, or its values. Relative paths start at the file's folder, or at the current folder
            without a file.
        overrides: `a.b=value` each, the value in YAML, applied in order before validation.
    """
    folder, where = Path.cwd(), "spec"
    if isinstance(source, RunSpec):
        raw = source.as_dict()
    elif isinstance(source, Mapping):
        raw = copy.deepcopy(dict(source))
    elif not isinstance(source, str | os.PathLike):
        raise SpecError(
            f"expected a spec, a YAML file or its values, got {type(source).__name__}",
            hint="Modules are for dl.analyze, by keyword: merged=, experts=, data=.",
        )
    else:
        file, where = Path(source).absolute(), str(source)
        folder, raw = file.parent, _read_spec_file(file, where)
    for text in overrides:
        set_spec_value(raw, text)
    # Checked first: unknown keys of another version would hide the reason.
    if raw.get("version") != VERSION:
        raise SpecError(
            f"{where}: version: expected {VERSION}, got {raw.get('version')!r}",
            hint=f"Add `version: {VERSION}`; `driftlens init` shows the form that this DriftLens reads.",
        )
    return validate_section(RunSpec, raw, where, {"folder": folder})


def _read_spec_file(file: Path, where: str) -> dict[str, Any]:
    raw = read_yaml_mapping(file, "spec", "`driftlens init` writes a commented spec to start from.")
    if is_mergekit_recipe(raw):
        raise SpecError(
            f"{where} is a mergekit recipe, not a spec",
            hint=f"`driftlens init {shlex.quote(where)}` writes a spec of its models.",
        )
    if file.name == "spec.yaml" and (file.parent / "manifest.json").is_file():
        # Specs of older runs have these keys, which nothing reads.
        raw.pop("projection", None)
        for section, key in (("compute", "solve_dtype"), ("metrics", "groups")):
            if isinstance(settings := raw.get(section), dict):
                settings.pop(key, None)
    return raw


def set_spec_value(raw: dict[str, Any], text: str) -> None:
    """Set one value of a spec in place from text such as `a.b=value`, with the value in YAML."""
    path, equals, value = text.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise SpecError(f"--set {text}: expected a.b=value", hint="Example: --set data.defaults.n=64.")
    here = raw
    for depth, key in enumerate(keys[:-1], start=1):
        # An absent section, or one left empty in the file, starts as an empty mapping.
        if here.get(key) is None:
            here[key] = {}
        here = here[key]
        if not isinstance(here, dict):
            parent = ".".join(keys[:depth])
            raise SpecError(f"--set {text}: {parent} is {here!r}, not a mapping", hint=f"Set {parent} itself.")
    here[keys[-1]] = parse_yaml(value, f"--set {text}")


# Every mergekit recipe has one of these keys, and no spec has any.
_RECIPE_KEYS = ("merge_method", "models", "slices", "modules", "gate_mode")


def is_mergekit_recipe(content: Mapping[str, Any]) -> bool:
    """Return True if the keys of a file's content are those of a mergekit recipe."""
    return "version" not in content and not content.keys().isdisjoint(_RECIPE_KEYS)


_Settings = Mapping[str, Any]
# Methods that merge two models, one of which is `base_model`: there it is an expert and not a base.
_PAIRWISE = ("slerp", "nuslerp", "nearswap", "arcee_fusion")
# Methods that merge weights instead of task vectors.
_WEIGHT_METHODS = ("linear", "nuslerp", "multislerp", "karcher", "passthrough")


@dataclass(frozen=True)
class MergekitRecipe:
    """A mergekit recipe: its models as `MODEL` or `MODEL+ADAPTER`, and the closest `merge` section of a spec."""

    method: str
    base: str | None
    experts: tuple[str, ...]
    merge: _Settings


def parse_recipe(content: _Settings) -> MergekitRecipe:
    """Parse the content of a mergekit recipe."""
    method = content.get("merge_method")
    if not isinstance(method, str):
        raise _recipe_error(f"merge_method is {method!r}", "Recipes for mergekit-yaml need a `merge_method`.")
    parts = [*_recipe_sections(content)]
    base = next((part["base_model"] for part in parts if part.get("base_model") is not None), None)
    entries = [
        entry for part in parts for entry in _list_of_mappings(part, "models") + _list_of_mappings(part, "sources")
    ]
    listed = {_model_with_adapter(entry.get("model")): _mapping_or_empty(entry.get("parameters")) for entry in entries}
    base = None if base is None else _model_with_adapter(base)
    names = [*dict.fromkeys([*listed, *([base] if base else [])])]
    if base is not None and not (method in _PAIRWISE and len(names) == 2):
        names.remove(base)
    else:
        base = None
    if not names:
        raise _recipe_error("it names no models besides the base", "Write `models` or `slices` with `sources`.")
    shared: dict[str, Any] = {}
    for part in parts:
        shared |= _mapping_or_empty(part.get("parameters"))
    own = [{**shared, **listed.get(name, {})} for name in names]
    return MergekitRecipe(method, base, tuple(names), _nearest_merge_section(method, own, has_base=base is not None))


def _recipe_sections(content: _Settings) -> Iterator[_Settings]:
    """Yield all mappings of a mergekit recipe that may name models: the recipe, its modules and their slices."""
    yield content
    modules = [entry for entry in _mapping_or_empty(content.get("modules")).values() if isinstance(entry, Mapping)]
    yield from modules
    for part in (content, *modules):
        yield from _list_of_mappings(part, "slices")


def _list_of_mappings(part: _Settings, key: str) -> list[_Settings]:
    entries = part.get(key) or []
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
        raise _recipe_error(f"{key} is {str(entries)[:80]!r}", "Write a list of mappings.")
    return entries


def _mapping_or_empty(value: Any) -> _Settings:
    return value if isinstance(value, Mapping) else {}


def _model_with_adapter(name: Any) -> str:
    """Return a mergekit model, given as text or as a mapping, as `MODEL` or `MODEL+ADAPTER`."""
    if isinstance(name, Mapping) and "model" in name:
        name = "+".join(_path_with_revision(part) for part in (name["model"], name.get("lora")) if part)
    if not isinstance(name, str) or not all(name.split("+")):
        raise _recipe_error(f"the model {str(name)[:80]!r} is no path or Hub id", "Write PATH, or PATH+ADAPTER.")
    return name


def _path_with_revision(part: Any) -> str:
    if not isinstance(part, Mapping):
        return str(part)
    return f"{part.get('path')}@{part['revision']}" if part.get("revision") else str(part.get("path"))


def _nearest_merge_section(method: str, own: list[dict[str, Any]], *, has_base: bool) -> dict[str, Any]:
    """Return the spec's `merge` section closest to a mergekit method, with settings that all experts share."""

    def shared_setting(name: str, default: float) -> float:
        values = [settings.get(name, default) for settings in own]
        is_number = isinstance(values[0], int | float) and not isinstance(values[0], bool)
        return float(values[0]) if is_number and values == values[:1] * len(values) else default

    if method == "slerp" and len(own) == 2:
        return {"method": "slerp"}
    if not has_base or method in _WEIGHT_METHODS:
        return {"method": "average"}
    # Spec methods have one value for all experts, so settings that differ keep their default.
    scaling, density, weight = (
        shared_setting("lambda", 1.0),
        shared_setting("density", 1.0),
        shared_setting("weight", 1.0),
    )
    drop = {"scaling": scaling * weight, "drop_rate": round(1 - density, 6)}
    nearest: dict[str, dict[str, Any]] = {
        "model_stock": {"method": "model_stock"},
        "ties": {"method": "ties", "scaling": scaling, "density": density, "trim_scope": "per_tensor"},
        "dare_ties": {"method": "ties", **drop, "density": 1.0, "merge_func": "sum"},
        "dare_linear": {"method": "dare", **drop},
        "task_arithmetic": {"method": "task_arithmetic", "scaling": scaling * weight},
    }
    return nearest.get(method, {"method": "task_arithmetic"})


def _recipe_error(what: str, hint: str) -> SpecError:
    return SpecError(f"mergekit recipe: {what}", hint=hint)
