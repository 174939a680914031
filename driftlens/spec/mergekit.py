"""mergekit's recipes (0.1.5), read without torch: methods, what each takes, and what a recipe sets for every tensor."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import TypeAdapter, ValidationError

from driftlens.base.errors import SpecError, did_you_mean
from driftlens.base.files import PathLike
from driftlens.spec.yaml_text import read_mapping, to_yaml

Settings = Mapping[str, Any]
MANY = 2**31
REQUIRED = object()
"""Stands for the default of a parameter that a recipe must give."""
_LARGEST = 2.0**63
"""Beyond this no setting means anything, and what lies between two of a list would overflow."""
_MOST_STEPS = 1000
_CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The form that models of many families speak."""
_DTYPES = ("float16", "bfloat16", "float32")
_KEYS = (
    *("merge_method", "models", "slices", "modules", "base_model", "parameters", "dtype", "out_dtype"),
    *("tokenizer_source", "tokenizer", "chat_template"),
)
_OWN = ("merge_method", "models", "slices", "modules", "gate_mode")
"""Of these every recipe has one, and no spec has any."""
_PARTNERLESS = "such a model can be compared with nothing but itself."
_STACKED = (
    "Drift compares a layer with the same layer of each expert, and a stacked, moved or repeated layer has no such "
    "partner: merge it with mergekit; " + _PARTNERLESS
)


_reader = functools.cache(TypeAdapter)
"""Reads a kind of value as pydantic does; making one takes longer than reading with it."""


class Parameter(NamedTuple):
    """What a recipe may set: the default, of what there is one value each, and the kind of value."""

    default: Any
    scope: Literal["recipe", "model", "expert"] = "recipe"
    kind: Any = float

    def read(self, name: str, value: Any) -> Any:
        """The value, as mergekit takes it: numbers may be text."""
        if value is None and self.default is None:
            return None
        try:
            number = _reader(self.kind).validate_python(value)
        except ValidationError:
            number = None
        if number is None or not abs(number) <= _LARGEST:
            wanted = {bool: "true or false", int: "a whole number"}.get(self.kind, "a finite number")
            raise refused(f"{name} is {value!r}", f"It takes {wanted}.")
        if name == "max_iter" and not 1 <= number <= _MOST_STEPS:
            raise refused(f"{name} is {number}; expected a whole number at least 1 and at most {_MOST_STEPS}")
        if name in ("tol", "eps") and number < 0:
            raise refused(f"{name} is {number:g}; expected a finite number at least 0")
        return number


class Method(NamedTuple):
    """One of mergekit's methods.

    Attributes:
        near: the method of ours that is nearest, whose paper a card names.
        parameters: by name.
        base: whether `base_model` must be named, may be, or is a model like all others.
        models: fewest and most of them, with a base that counts as one.
    """

    near: str
    parameters: Mapping[str, Parameter]
    base: Literal["required", "optional", "ignored"] = "required"
    models: tuple[int, int] = (1, MANY)


def _of_steps(near: str, normalize: bool, *, rescale: bool = False, **more: float) -> Method:
    """A method that sums up thinned-out steps from the base."""
    return Method(
        near,
        {
            "weight": Parameter(REQUIRED, "expert"),
            "density": Parameter(1.0, "expert"),
            **{name: Parameter(value, "expert") for name, value in more.items()},
            "normalize": Parameter(normalize, kind=bool),
            "rescale": Parameter(rescale, kind=bool),
            "int8_mask": Parameter(False, kind=bool),
            "lambda": Parameter(1.0),
        },
    )


_WEIGHT = {"weight": Parameter(REQUIRED, "expert")}
_T = {"t": Parameter(REQUIRED)}
METHODS: Mapping[str, Method] = {
    "linear": Method(
        "average",
        {"weight": Parameter(REQUIRED, "model"), "normalize": Parameter(True, kind=bool)},
        base="ignored",
    ),
    "slerp": Method("slerp", _T, models=(2, 2)),
    "nuslerp": Method(
        "slerp",
        _WEIGHT
        | {
            "nuslerp_row_wise": Parameter(False, kind=bool),
            "nuslerp_flatten": Parameter(True, kind=bool),
        },
        base="optional",
        models=(2, 2),
    ),
    "multislerp": Method(
        "karcher",
        _WEIGHT | {"normalize_weights": Parameter(True, kind=bool), "eps": Parameter(1e-8)},
        base="optional",
    ),
    "karcher": Method(
        "karcher", {"max_iter": Parameter(10, kind=int), "tol": Parameter(1e-5)}, base="ignored"
    ),
    "model_stock": Method("model_stock", {"filter_wise": Parameter(False, kind=bool)}, models=(3, MANY)),
    "nearswap": Method("average", _T, models=(2, 2)),
    "arcee_fusion": Method("average", {}, models=(2, 2)),
    "sce": Method("ties", {"int8_mask": Parameter(False, kind=bool), "select_topk": Parameter(1.0)}),
    "ram": Method("task_arithmetic", {"epsilon": Parameter(1e-5)}),
    "ramplus_tl": Method(
        "task_arithmetic",
        {"epsilon": Parameter(1e-5), "r": Parameter(0.1), "alpha": Parameter(0.2)},
    ),
    "passthrough": Method(
        "average", {"scale": Parameter(None, "model", float | None)}, base="ignored", models=(1, 1)
    ),
    "task_arithmetic": _of_steps("task_arithmetic", False),
    "ties": _of_steps("ties", True),
    "breadcrumbs": _of_steps("breadcrumbs", False, gamma=0.01),
    "breadcrumbs_ties": _of_steps("breadcrumbs", False, gamma=0.01),
    "dare_linear": _of_steps("dare", False, rescale=True),
    "dare_ties": _of_steps("dare", False, rescale=True),
    "della": _of_steps("della", True, rescale=True, epsilon=0.15),
    "della_linear": _of_steps("della", False, rescale=True, epsilon=0.15),
}
"""By mergekit's names."""
_IGNORED = {name for method in METHODS.values() for name in method.parameters} | {"embed_slerp", "scale"}
"""Parameters of some method: mergekit passes over those that are not the method's own."""


class Source(NamedTuple):
    """A model of a slice, as `MODEL` or `MODEL+ADAPTER`, and what is set for it alone."""

    model: str
    settings: Settings


class Slice(NamedTuple):
    """Layers from `first` to `end`, None the last, of these models, and what is set for all of them.

    `base` is the base of the method, where it knows one.
    """

    first: int
    end: int | None
    sources: tuple[Source, ...]
    settings: Settings
    base: str | None


@dataclass(frozen=True)
class Recipe:
    """What a file asks for.

    Attributes:
        method: mergekit's name.
        base: the base where the method knows one, else None.
        home: whose configuration, form and tokenizer are saved: the base that is named, else the first model.
        slices: one after the other, all layers in order.
        settings: of all layers and models, those that stand higher up in the file last.
        dtype: what tensors are cast to before they are merged; None leaves them as they are stored.
        out_dtype: what is written; None is what comes out.
        tokenizer: whose tokenizer is saved: `base`, `union` or a model; None is that of `home`.
        chat_template: `auto`, or the template itself; None leaves it.
        tokens: whose rows would have a source of their own in a model that lacks them.
        notices: what stands in the file, and is passed over as mergekit does.
        text: the recipe, as a card tells it.
    """

    method: str
    base: str | None
    home: str
    slices: tuple[Slice, ...]
    settings: tuple[Settings, ...]
    dtype: str | None = None
    out_dtype: str | None = None
    tokenizer: str | None = None
    chat_template: str | None = None
    tokens: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()
    text: str = ""

    @property
    def known(self) -> Method:
        """What is known of the method."""
        return METHODS[self.method]

    @property
    def models(self) -> tuple[str, ...]:
        """Every model once, in the order of the file; `home` last where the file does not list it."""
        names = [source.model for part in self.slices for source in part.sources]
        return tuple(dict.fromkeys([*names, self.home]))

    def slice_of(self, key: str, layers: int) -> tuple[Slice, float]:
        """The slice that a tensor of a model with so many layers belongs to, and how far along it lies, 0 to 1."""
        number = layer_of(key)
        layer = number if number is not None else 0 if "embed" in key else layers - 1
        part = next(part for part in self.slices if layer < (part.end or layers))
        last = (part.end or layers) - part.first - 1
        along = (layer - part.first) / last if last else 1.0
        return part, 0.0 if number is None else along

    def values(self, key: str, layers: int) -> dict[str, Any]:
        """All parameters for a tensor; lists of those of which each model or expert has one."""
        part, along = self.slice_of(key, layers)
        shared = (part.settings, *self.settings)

        def value(name: str, levels: Sequence[Settings], model: str = "") -> Any:
            parameter = self.known.parameters[name]
            for level in levels:
                if (
                    name in level
                    and (given := _setting(level[name], key, along, name, parameter)) is not None
                ):
                    return given
            if parameter.default is REQUIRED:
                of_model = f" of {model}" if model else ""
                raise refused(
                    f"{name} is missing for {key}{of_model}", f"{self.method} needs it for every tensor."
                )
            return parameter.default

        resolved = dict[str, Any]()
        for name, parameter in self.known.parameters.items():
            if parameter.scope == "recipe":
                resolved[name] = value(name, shared)
                continue
            sources = [
                source for source in part.sources if parameter.scope == "model" or source.model != part.base
            ]
            resolved[name] = [value(name, (source.settings, *shared), source.model) for source in sources]
        averaged = self.method == "linear" and resolved["normalize"]
        averaged |= self.method == "multislerp" and resolved["normalize_weights"]
        if averaged and not sum(resolved["weight"]):
            raise refused(f"the weights sum to 0 for {key}", "They are divided by their sum: give others.")
        if self.known.near == "della":
            for density, spread in zip(resolved["density"], resolved["epsilon"], strict=True):
                if 0 < density < 1 and not spread < density < 1 - spread:
                    raise refused(
                        f"density is {density:g} and epsilon {spread:g}",
                        "density - epsilon and density + epsilon lie between 0 and 1.",
                    )
        return resolved


def layer_of(key: str) -> int | None:
    """The number of the layer that a tensor belongs to; None for what is before and behind all layers."""
    number = re.search(r"\.(\d+)\.", key)
    return None if number is None else int(number[1])


def read_recipe(file: PathLike) -> Recipe:
    """A recipe of mergekit in a file."""
    return recipe_of(read_mapping(Path(file), "recipe", "It needs `merge_method` and `models`."))


def is_recipe(given: Settings) -> bool:
    """Whether what a file holds is meant for mergekit, by its keys."""
    return "version" not in given and not given.keys().isdisjoint(_OWN)


def recipe_of(given: Settings) -> Recipe:
    """A recipe of mergekit, as its file spells it."""
    raw = dict(given)
    method = str(raw.get("merge_method"))
    if "gate_mode" in raw:
        raise refused(
            "it makes a mixture of its models (gate_mode)", "Make it with mergekit-moe: " + _PARTNERLESS
        )
    if method not in METHODS:
        hint = did_you_mean(method, METHODS) or f"There are {', '.join(METHODS)}."
        raise refused(f"merge_method is {method!r}", hint)
    raw, outer = _without_modules(raw)
    notices = _passed_over(raw, method)
    base = None if raw.get("base_model") is None else _model(raw["base_model"])
    settings = tuple(_settings(level, method, notices) for level in (*outer, raw.get("parameters")))
    slices = tuple(_slices(raw, method, base, notices))
    if METHODS[method].base == "ignored":
        slices = tuple(part._replace(base=None) for part in slices)
    _require_models(method, slices)
    dtype, out_dtype = (_dtype(raw, key) for key in ("dtype", "out_dtype"))
    tokenizer, template, tokens = _tokenizer(raw)
    known = None if METHODS[method].base == "ignored" else base or slices[0].base
    said = tuple(dict.fromkeys(notices))
    return Recipe(
        method,
        known,
        base or known or slices[0].sources[0].model,
        slices,
        settings,
        dtype,
        out_dtype,
        tokenizer,
        template,
        tokens,
        said,
        to_yaml(dict(given)),
    )


def _without_modules(raw: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """The recipe with what it says of its one module in its own place, and that module's parameters."""
    keys = [key for key in ("models", "slices", "modules") if raw.get(key)]
    if len(keys) != 1:
        listed = " and ".join(keys) or "none of them"
        raise refused(f"it has {listed}", "Write exactly one of `models`, `slices` and `modules`.")
    if keys != ["modules"]:
        return raw, []
    modules = raw.pop("modules")
    module = next(iter(modules.values())) if isinstance(modules, dict) and len(modules) == 1 else None
    if not isinstance(module, dict):
        raise refused("modules are several, or none", "A language model has one: its decoder.")
    inner = {key: module[key] for key in ("models", "slices") if module.get(key)}
    if len(inner) != 1:
        raise refused("a module has models and slices, or neither", "Write one of them.")
    return raw | inner, [module.get("parameters")]


def _passed_over(level: Settings, method: str, known: Collection[str] = _KEYS, place: str = "") -> list[str]:
    """What is said of keys that mergekit reads nothing of; a SpecError for what nobody wrote on purpose."""
    notices = []
    for key in [key for key in level if key not in known]:
        if (hint := _slip(key, known)) and key not in _IGNORED:
            raise refused(f"{key} can't be followed", hint)
        text = f"`{key}` {place or 'at the top of the recipe'} is passed over, as mergekit does"
        is_known = key in METHODS[method].parameters
        notices.append(f"{text}; to be used it stands under `parameters`" if is_known else text)
    return notices


def _model(name: Any) -> str:
    """`MODEL` or `MODEL+ADAPTER`, which may be spelled out as a mapping."""
    if isinstance(name, dict) and "model" in name:
        name = "+".join(_path(part) for part in (name["model"], name.get("lora")) if part)
    if not isinstance(name, str) or not name or name.count("+") > 1 or not all(name.split("+")):
        raise refused(
            f"the model {name!r} is no path or Hub id",
            "Write PATH, or PATH+ADAPTER for a model with an adapter.",
        )
    return name


def _path(part: Any) -> str:
    if not isinstance(part, dict):
        return str(part)
    return f"{part.get('path')}@{part['revision']}" if part.get("revision") else str(part.get("path"))


def _slices(raw: Settings, method: str, base: str | None, notices: list[str]) -> Iterator[Slice]:
    if "models" in raw:
        sources = _sources(raw["models"], method, notices)
        if base is not None and base not in [source.model for source in sources]:
            sources = (*sources, Source(base, {}))  # as mergekit adds it
        yield Slice(0, None, sources, {}, base)
        return
    parts = raw["slices"]
    first = 0
    for part in parts if isinstance(parts, list) else [parts]:
        if not isinstance(part, dict) or "sources" not in part:
            raise refused(f"a slice is {part!r}", "It has `sources`, and may have `parameters`.")
        notices += _passed_over(part, method, ("sources", "base_model", "parameters"), "of a slice")
        part_base = base if part.get("base_model") is None else _model(part["base_model"])
        sources = _sources(part.get("sources"), method, notices)
        spans = [entry.get("layer_range") for entry in part["sources"]]
        read = [_span(span) for span in spans]
        if (span := read[0]) is None or None in read or span[0] >= span[1]:
            raise refused(
                f"a slice takes the layers {spans}", "Write `layer_range: [FIRST, END]` for every source."
            )
        if span[0] != first or any(other != span for other in read):
            raise refused(f"a slice takes the layers {spans}, and layer {first} comes next", _STACKED)
        yield Slice(first, span[1], sources, _settings(part.get("parameters"), method, notices), part_base)
        first = span[1]


def _span(given: Any) -> tuple[int, int] | None:
    """First layer and end, as mergekit takes them: numbers may be text."""
    try:
        first, end = _reader(tuple[int, int]).validate_python(given)
    except ValidationError:
        return None
    return first, end


def _sources(entries: Any, method: str, notices: list[str]) -> tuple[Source, ...]:
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise refused(f"models is {entries!r}", "Write a list of `model: PATH` with `parameters`.")
    for entry in entries:
        notices += _passed_over(entry, method, ("model", "parameters", "layer_range"), "of a model")
    sources = tuple(
        Source(_model(entry.get("model")), _settings(entry.get("parameters"), method, notices))
        for entry in entries
    )
    if len({source.model for source in sources}) < len(sources):
        raise refused("a model is named twice", "Name each once, with all its weight.")
    return sources


def _require_models(method: str, slices: Sequence[Slice]) -> None:
    known = METHODS[method]
    low, high = known.models
    for part in slices:
        names, base = [source.model for source in part.sources], part.base
        if base is None and known.base == "required":
            raise refused(f"{method} needs base_model", "Name the model that the others were trained from.")
        if known.base == "required" and base not in names:
            raise refused("a slice leaves the base out", f"{method} reads it: list {base} among the sources.")
        count = len(names) - (known.base == "optional" and base in names)
        if not low <= count <= high:
            wanted = f"{low}" if low == high else f"at least {low}" if high == MANY else f"{low} to {high}"
            counted = ", the base among them" if known.base == "required" else ""
            raise refused(f"{method} merges {wanted} models{counted}, and there are {count}")


def _settings(level: Any, method: str, notices: list[str]) -> Settings:
    """The parameters of one place in the file, checked; names that only other methods have are passed over."""
    if level is None:
        return {}
    known = METHODS[method].parameters
    if not isinstance(level, dict):
        raise refused(f"parameters is {level!r}", f"Write a mapping of {', '.join(known) or 'nothing'}.")
    for name, value in level.items():
        if name in known:
            _require_setting(value, name, known[name])
        elif (hint := _slip(name, known)) and name not in _IGNORED:
            raise refused(f"{method} has no parameter {name!r}", hint)
        else:
            notices.append(f"`{name}` is no parameter of {method}, and is passed over, as mergekit does")
    return {name: value for name, value in level.items() if name in known}


def _slip(name: Any, known: Collection[str]) -> str:
    """What somebody meant who wrote a name that nothing has, or what there is if it is none; else nothing."""
    there = f"What is read: {', '.join(known)}."
    return did_you_mean(name, known) if isinstance(name, str) and name else there


def _require_setting(value: Any, name: str, parameter: Parameter) -> None:
    """Refuse what `_setting` can't read: it takes a number, numbers along the layers, or either behind filters."""
    entries = value if isinstance(value, list) else [value]
    filtered = [entry for entry in entries if isinstance(entry, dict)]
    values = [entry.get("value") for entry in filtered] if filtered else [value]
    if len(filtered) not in (0, len(entries)) or not all(
        isinstance(entry.get("filter"), str | None) and "value" in entry for entry in filtered
    ):
        raise refused(
            f"{name} is {value!r}",
            "Write a number, a list of numbers from the first layer to the last, or a list of `filter` and `value`.",
        )
    for given in values:
        numbers = given if isinstance(given, list) else [given]
        if not numbers or any(isinstance(number, list | dict) for number in numbers):
            raise refused(f"{name} is {given!r}", "Every value is a finite number, or true or false.")
        if parameter.kind is int and len(numbers) > 1:
            raise refused(f"{name} is {given!r}", "It takes a whole number.")
        for number in numbers:
            if number is not None:
                parameter.read(name, number)


def _setting(setting: Any, key: str, along: float, name: str, parameter: Parameter) -> Any:
    """A setting for one tensor: of filters the first that fits, of a list over layers what lies between its entries."""
    entries = setting if isinstance(setting, list) else [setting]
    if any(isinstance(entry, Mapping) for entry in entries):
        fit = (entry for entry in entries if entry.get("filter") in (None, "*") or entry["filter"] in key)
        return next((_setting(entry["value"], key, along, name, parameter) for entry in fit), None)
    if not isinstance(setting, list):
        return None if setting is None else parameter.read(name, setting)
    values = [parameter.read(name, entry) for entry in entries]
    if any(isinstance(value, bool) or value is None for value in values):
        return values[int(along * (len(values) - 1))]
    place = along * (len(values) - 1)
    low = int(place)
    share = place - low
    # In this order, as mergekit rounds it.
    return (1 - share) * values[low] + share * values[min(len(values) - 1, low + 1)]


def _dtype(raw: Settings, key: str) -> str | None:
    name = str(raw.get(key) or "").removeprefix("torch.")
    if name and name not in _DTYPES:
        raise refused(f"{key} is {raw[key]!r}", f"There are {', '.join(_DTYPES)}.")
    return name or None


def _tokenizer(raw: Settings) -> tuple[str | None, str | None, tuple[str, ...]]:
    """Whose tokenizer is saved, the chat template, and tokens that every model must have."""
    source, block, template = raw.get("tokenizer_source"), raw.get("tokenizer"), raw.get("chat_template")
    tokens: Any = {}
    template = _CHATML if template == "chatml" else template
    if block is not None:
        if source is not None:
            raise refused("it has tokenizer_source and tokenizer", "Write one of them.")
        if not isinstance(block, dict) or block.keys() - {"source", "tokens", "pad_to_multiple_of"}:
            raise refused(f"tokenizer is {block!r}", "It has `source`: base, union or a model.")
        tokens = block.get("tokens") or {}
        is_plain = isinstance(tokens, dict) and all(
            isinstance(settings, dict) and not settings.get("force") for settings in tokens.values()
        )
        if not is_plain or block.get("pad_to_multiple_of"):
            raise refused(
                "tokenizer changes the vocabulary (tokens that are forced, pad_to_multiple_of)",
                "Experts and merge must have one vocabulary for their features to be compared: leave it as it is.",
            )
        source = block.get("source", "union")
    if source is not None and not isinstance(source, str):
        raise refused(f"tokenizer_source is {source!r}", "Write base, union or a model.")
    if template is not None and not isinstance(template, str):
        raise refused(f"chat_template is {template!r}", "Write `auto`, or the template.")
    if template not in (None, "auto") and "{" not in str(template):
        raise refused(
            f"chat_template is {template!r}",
            "Write `auto`, `chatml` or the template itself: mergekit's others are not shipped.",
        )
    # So mergekit before 0.1 named a model.
    return source and source.removeprefix("model:"), template, tuple(map(str, tokens))


def refused(what: str, hint: str = "") -> SpecError:
    """The refusal of something that a recipe asks for."""
    return SpecError(f"mergekit recipe: {what}", hint=hint)
