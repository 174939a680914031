"""Sanity checks of compatible models: weights, tokenizers, adapters, configurations.

Entry points: `check_weights` for weights, `check_model_files` for everything that comes with them.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations, islice
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import torch
from torch import Tensor

from driftlens.checkpoints.alignment import TEXT_SIDE, KeyLayout, TowerKeyLayout
from driftlens.checkpoints.loading import decode_json_floats, is_lora_folder, read_json, weights_notices
from driftlens.checkpoints.lora import LoraSource, lora_base_model
from driftlens.checkpoints.tensor_sources import StateSource, check_finite, task_vector_change
from driftlens.checkpoints.unsupported import remote_code, wrap_library_errors
from driftlens.experiment.study_loading import OpenModels, find_lower_adapter, model_folder
from driftlens.models import vocabularies
from driftlens.models.architecture import Architecture
from driftlens.models.architectures.clip import CONFIG_FILE, activation_name
from driftlens.models.chain import LayerChain, WeightSlot
from driftlens.utils.errors import DriftLensError, IncompatibleModelsError, NumericsError, shorten_list
from driftlens.utils.files import read_json_object
from driftlens.utils.variants import (
    ModelChange,
    coarse_change_text,
    rounding_loss_text,
    task_of_expert,
    variant_kind,
)

# Relative distance of weights above which models hardly share a base. Matrices trained separately are
# uncorrelated, hence at least 1 apart, and sqrt(2) at equal norms. Fine-tuning moves weights by a few percent,
# and by 10 to 16 % where it was long and the model small.
MAX_DISTANCE_FROM_BASE = 0.5
# Unexplained shares of a merge: up to the first it is rounding, above the second a notice.
MAX_UNEXPLAINED, MUCH_UNEXPLAINED = 0.01, 0.9
# Published recipes add at most the whole change of an expert; a change added twice has coefficient 2.
MAX_COEFFICIENT = 1.5
# Up to this number of elements, models are read completely; above it, the first rows of every tensor.
MAX_ELEMENTS_READ = 1 << 28
# Elements of all models in memory at a time.
READ_CHUNK = 1 << 22
# Share of the weights' energy below which a difference is rounding; that of float32 is 4e-15, squared.
ROUNDING = 1e-12

# A problem makes an analysis impossible or meaningless; a notice needs the reader's judgement.
_Level = Literal["ok", "notice", "problem"]


@dataclass(frozen=True)
class Finding:
    """The result of one check: level, subject, text, and what to do about it."""

    level: _Level
    subject: str
    text: str
    hint: str = ""
    exit_code: int = 0


def error_finding(subject: str, error: DriftLensError) -> Finding:
    """Return an error as a finding of level "problem"."""
    return Finding("problem", subject, error.message, error.hint, error.exit_code)


def check_weights(chain: LayerChain, sources: Mapping[str, StateSource]) -> list[Finding]:
    """Check models for equal, distant or inconsistent weights; of large models a part is read."""
    findings = [
        Finding(
            "notice",
            model_label(copy),
            f"the {model_label(copy)} has the same weights as the {model_label(name)}",
            "It was not fine-tuned, or the file is wrong."
            if name == "base" and not _is_merged_variant(copy)
            else "Check both files.",
        )
        for name, copy in _pairs_of_equal_models(chain, sources)
    ]
    if not sources:
        return findings
    sampled, broken = WeightProducts.read_models(chain, sources)
    findings += [error_finding(model_label(name), error) for name, error in broken.items()]
    findings += check_distances(sampled)
    # A lone expert without a base spans nothing that a merge could be compared with.
    if sampled.experts and ("base" in sampled.names or len(sampled.experts) > 1):
        findings += [check_merge_fit(sampled, name) for name in sampled.names if _is_merged_variant(name)]
    return findings


def model_label(name: str) -> str:
    """Return a model's name for messages, given its name in the pool."""
    kind, _, which = name.partition(":")
    if which:
        return f"{kind} {which}" if kind == "baseline" else f"{kind} of {which}"
    return "merged model" if name == "merged" else name


def _is_merged_variant(name: str) -> bool:
    return variant_kind(name) in ("merged", "baseline")


def _pairs_of_equal_models(chain: LayerChain, sources: Mapping[str, StateSource]) -> list[tuple[str, str]]:
    """Return pairs of models with identical weights; reading stops once all differ."""
    pairs = list(combinations(sources, 2))
    for key in chain.parameter_keys():
        tensors = {name: sources[name].read(key) for name in {name for pair in pairs for name in pair}}
        pairs = [pair for pair in pairs if _is_equal_tensor(*(tensors[name] for name in pair))]
        if not pairs:
            break
    copies = {second for _, second in pairs}
    return [(original, copy) for original, copy in pairs if original not in copies]


def _is_equal_tensor(one: Tensor, other: Tensor) -> bool:
    """Return True if the tensors are equal in the narrower one's dtype."""
    # A copy that was saved in fewer bits is still a copy.
    narrow = min(one.dtype, other.dtype, key=lambda dtype: dtype.itemsize)
    return torch.equal(one.to(narrow), other.to(narrow))


def check_distances(sampled: WeightProducts) -> list[Finding]:
    """Report models that are unusually far from the base, or from the nearest expert without a base."""
    has_base = "base" in sampled.names
    close: list[tuple[float, float, int]] = []
    foreign = []
    for name in sampled.names:
        anchors = ["base"] if has_base else [expert for expert in sampled.experts if expert != name]
        if name == "base" or not anchors:
            continue
        distance, anchor = min((sampled._median_relative_distance(name, anchor), anchor) for anchor in anchors)
        if distance > MAX_DISTANCE_FROM_BASE:
            text = (
                f"the weights of the {model_label(name)} have relative distance {distance:.2f} from the "
                f"{model_label(anchor)} (median over matrices); models of one base stay far below "
                f"{MAX_DISTANCE_FROM_BASE}"
            )
            hint = "It seems to have another base; averages across bases are meaningless. Check the file."
            foreign.append(Finding("notice", model_label(name), text, hint))
            if name in sampled.in_one_byte:
                text = f"the {model_label(name)} is stored in one-byte floats without the scales that they need"
                error = IncompatibleModelsError(text, hint="Give the original weights, or the file with its scales.")
                foreign.append(error_finding(model_label(name), error))
        elif name in sampled.experts:
            close.append((sampled._relative_distance(name, anchor), distance, sampled.changed.get(name, 0)))
    if not close:
        return foreign
    whole, medians, changed = zip(*close, strict=True)
    nearest = "the base" if has_base else "the next expert"
    text = f"the experts' weights have relative distance {format_range(whole)} from {nearest}"
    text += f" (median over matrices {format_range(medians)})"
    if has_base:
        counts = " to ".join(str(count) for count in sorted({min(changed), max(changed)}))
        least = "" if sampled.is_whole else "at least "
        text += f"; {least}{counts} of {sampled.num_tensors} tensors differ from it"
    if not sampled.is_whole:
        text += "; only first rows of tensors were read"
    return [Finding("ok", "shared base", text), *foreign]


def check_merge_fit(sampled: WeightProducts, name: str) -> Finding:
    """Report if a merged model is no linear combination of the experts' task vectors (least squares)."""
    model, fits = model_label(name), _fit_task_vectors(sampled, name)
    origin = "the base" if "base" in sampled.names else "the experts' mean"
    if not fits:
        hint = "Nothing was merged: were names of adapters or tensors skipped? Compare them, and merge again."
        return Finding("notice", model, f"the {model} equals {origin}, up to rounding", hint)
    for (coefficients, share), note in zip(fits, ("", ", others in every tensor"), strict=True):
        if share <= MAX_UNEXPLAINED:
            text = f"the {model} is {origin} plus task vectors, coefficients {format_range(coefficients)}{note}"
            if not note and float(coefficients.max()) > MAX_COEFFICIENT:
                hint = "A change was added twice, or its LoRA scale is too large: merge again, check alpha and rslora."
                return Finding("notice", model, text, hint)
            return Finding("ok", model, f"{text}; {100 * share:.2f} % is left")
    share = fits[0][1]
    text = f"task vectors from {origin} leave {100 * share:.0f} % of the {model} unexplained"
    if share <= MUCH_UNEXPLAINED:
        return Finding("ok", model, text, "Methods that trim, rescale or train leave as much.")
    hint = "Methods that trim and rescale (TIES, DARE) leave much; else check the experts."
    return Finding("notice", model, text, hint)


def format_range(values: Sequence[float] | Tensor) -> str:
    """Return the smallest and the largest number as text, with one significant digit below 0.005."""
    numbers = torch.as_tensor(values, dtype=torch.float64)
    low, high = (f"{end:.2f}" if abs(end) >= 0.005 or not end else f"{end:.1g}" for end in numbers.aminmax())
    return low if low == high else f"{low} to {high}"


@dataclass(frozen=True)
class WeightProducts:
    """Inner products of the models' weights by tensor, estimated from first rows of large tensors.

    `grams` is [tensors, models, models]; `is_matrix` are tensors of two axes or more; `changed` counts, by model, those
    that differ from the base. A fused tensor counts once in `num_tensors` and has several Gram matrices. Models
    `in_one_byte` have weights in float8.
    """

    names: tuple[str, ...]
    grams: Tensor
    is_matrix: Tensor
    is_whole: bool
    changed: Mapping[str, int]
    num_tensors: int
    in_one_byte: Collection[str] = ()

    @classmethod
    def read_models(
        cls, chain: LayerChain, sources: Mapping[str, StateSource]
    ) -> tuple[WeightProducts, dict[str, NumericsError]]:
        """Read the weights of all models; return the products and the errors of models with NaN or infinity."""
        headers = next(iter(sources.values())).headers
        slots = list(dict.fromkeys(slot for layer in chain.layers for slot in chain.own_parameters(layer).values()))
        sizes = [torch.Size(slot.layer_shape(headers[slot.key].shape)).numel() for slot in slots]
        is_whole = sum(sizes) * len(sources) <= MAX_ELEMENTS_READ
        # The same rows of every model, so that inner products are of the same entries.
        limit = max(sizes) if is_whole else MAX_ELEMENTS_READ // (len(sources) * len(slots))
        grams = torch.zeros(len(slots), len(sources), len(sources), dtype=torch.float64)
        changed: dict[str, set[str]] = {name: set() for name in sources}
        broken: dict[str, NumericsError] = {}
        for slot, size, gram in zip(slots, sizes, grams, strict=True):
            num_read = 0
            for rows in row_ranges(slot, headers[slot.key].shape, limit, READ_CHUNK // len(sources)):
                pieces = _read_finite_rows(sources, slot.key, rows, broken)
                for name, piece in pieces.items() if "base" in pieces else ():
                    if slot.key not in changed[name] and not _is_equal_tensor(pieces["base"], piece):
                        changed[name].add(slot.key)
                if pieces:
                    stacked = torch.stack([piece.double().flatten() for piece in pieces.values()])
                    present = [position for position, name in enumerate(sources) if name in pieces]
                    gram[torch.tensor(present)[:, None], present] += stacked @ stacked.T
                    num_read += stacked.shape[1]
            gram *= size / max(num_read, 1)
        sound = [position for position, name in enumerate(sources) if name not in broken]
        sampled = cls(
            tuple(name for name in sources if name not in broken),
            grams[:, sound][:, :, sound],
            torch.tensor([len(headers[slot.key].shape) >= 2 for slot in slots]),
            is_whole,
            {name: len(keys) for name, keys in changed.items()},
            len({slot.key for slot in slots}),
            [
                name
                for name, source in sources.items()
                if any(source.headers[s.key].dtype.itemsize == 1 for s in slots)
            ],
        )
        return sampled, broken

    @property
    def experts(self) -> list[str]:
        """The names of the experts."""
        return [name for name in self.names if task_of_expert(name) is not None]

    def _relative_distance(self, name: str, anchor: str) -> float:
        """Return |model - anchor| / |anchor| over all weights."""
        apart, size = (squares.sum() for squares in self._squared_distances_and_norms(name, anchor))
        return float((apart / size).nan_to_num(0.0).sqrt())

    def _median_relative_distance(self, name: str, anchor: str) -> float:
        """Return the median over matrices of |model - anchor| / |anchor|."""
        apart, size = self._squared_distances_and_norms(name, anchor)
        return float((apart / size)[self.is_matrix].nan_to_num(0.0).sqrt().median().nan_to_num(0.0))

    def _squared_distances_and_norms(self, name: str, anchor: str) -> tuple[Tensor, Tensor]:
        i, j = self.names.index(name), self.names.index(anchor)
        own, other, between = self.grams[:, i, i], self.grams[:, j, j], self.grams[:, i, j]
        # Equal models cancel up to rounding, which may be negative.
        return (own - 2 * between + other).clamp_min(0), other


def _read_finite_rows(
    sources: Mapping[str, StateSource],
    key: str,
    rows: tuple[int, int] | None,
    broken: dict[str, NumericsError],
) -> dict[str, Tensor]:
    """Read rows of one tensor of every model; models with non-finite values are added to `broken`."""
    pieces = {name: source.read(key, rows) for name, source in sources.items() if name not in broken}
    for name in list(pieces):
        try:
            check_finite(sources[name].name, key, pieces[name])
        except NumericsError as error:
            broken[name] = error
            del pieces[name]
    return pieces


def row_ranges(slot: WeightSlot, shape: tuple[int, ...], limit: int, most: int) -> list[tuple[int, int] | None]:
    """Return the row ranges to read of a tensor, up to `limit` entries in chunks of at most `most`."""
    if not shape:
        return [None]
    start, stop = slot.rows or (0, shape[0])
    width = max(1, torch.Size(shape[1:]).numel())
    stop, step = min(stop, start + max(1, limit // width)), max(1, most // width)
    return [(row, min(row + step, stop)) for row in range(start, stop, step)]


def _fit_task_vectors(sampled: WeightProducts, name: str) -> list[tuple[Tensor, float]]:
    """Fit a merged model by task vectors: with one coefficient per expert, and with one per tensor and expert.

    Task vectors start at the base, and the unexplained share refers to the merged model's task vector. Without a base
    they start at the experts' mean, and the share refers to the larger of both energies. Each fit is (coefficients
    [moved tensors, experts], share left). Empty if the model equals the start, up to rounding.
    """
    grams, names = sampled.grams, sampled.names
    experts = [names.index(expert) for expert in sampled.experts]
    units = torch.eye(len(names), dtype=torch.float64)
    has_base = "base" in names
    start = units[names.index("base")] if has_base else units[experts].mean(dim=0)
    vectors, target = units[experts] - start, units[names.index(name)] - start
    # In these coordinates a model is a vector over models, and a tensor's Gram matrix is the inner product.
    inner, cross = vectors @ grams @ vectors.T, vectors @ (grams @ target)[..., None]
    energies, sizes = grams @ target @ target, torch.diagonal(inner, dim1=1, dim2=2).sum(dim=1)
    size = sizes.sum() / len(experts)
    energy = energies.sum() if has_base else torch.maximum(energies.sum(), size)
    total = torch.diagonal(grams, dim1=1, dim2=2).mean(dim=1)
    if energy <= ROUNDING * total.sum():
        return []
    # Of the others, what rounding leaves would be solved for.
    moved = sizes > ROUNDING * total

    def _coefficients_and_residual(coefficients: Tensor) -> tuple[Tensor, float]:
        residual = energies + (coefficients.mT @ (inner @ coefficients - 2 * cross))[:, 0, 0]
        return coefficients[moved, :, 0], float(residual.sum().clamp_min(0) / energy)

    # Equal experts make it singular, up to what rounding leaves; the smallest solution shares their coefficient.
    solve = partial(torch.linalg.lstsq, rcond=1e-8, driver="gelsd")
    shared = solve(inner.sum(dim=0), cross.sum(dim=0)).solution.expand_as(cross)
    return [_coefficients_and_residual(shared), _coefficients_and_residual(solve(inner, cross).solution)]


# Entries read of each tensor of a text tower. Few suffice, since fine-tuning changes nearly all.
_FEW_READ = 1 << 16


# Notices, each with a remedy.
_Doubt = Iterator[tuple[str, str]]


def check_model_files(models: OpenModels, changes: Mapping[str, ModelChange] | None = None) -> list[Finding]:
    """Check the files that come with weights: tokenizers, adapters, configurations, text towers."""
    changes = estimate_task_vectors(models) if changes is None else changes
    folders = {name: model_folder(models.origins[name], source) for name, source in models.stored.items()}
    home = folders.get("base") or Path(models.architecture.source)

    def _notices_of_model(name: str, source: StateSource, called: str) -> _Doubt:
        if code := remote_code(read_json_object(folders[name], "config.json"), needed=False):
            yield (
                f"{called} has remote code ({code}), which is not run; the library's model is used",
                "Check that both compute the same.",
            )
        yield from ((text, "Remove files of other models.") for text in weights_notices(source))
        yield from _unused_tensor_notices(models, source, called)
        if models.base is None or name == "base":
            return
        yield from _unmerged_change_notices(models, models.base, source, called)
        if isinstance(source, LoraSource) and (scalings := source.rslora_scalings):
            listed = ", ".join(
                f"{scaling:.3g} at rank {rank} ({math.sqrt(rank):.2g} times alpha / r)"
                for rank, scaling in scalings.items()
            )
            yield (
                f"the adapters of {called} set use_rslora, which scales them by alpha / sqrt(r): {listed}",
                "The flag is often wrong in published adapters; compare with their training.",
            )
        if name in changes:
            yield from _rounding_notices(changes[name], models, name, called)
            yield from _long_task_vector_notices(changes, name, called)
        if (folder := folders[name]) is not None:
            if isinstance(source, LoraSource):
                yield from _adapter_base_notices(models, folders["base"], source, called)
            if differing := vocabularies.tokenizer_changes(home, folder):
                yield (
                    f"the tokenizer of {called} differs from the base's: {', '.join(differing)}",
                    "The base's tokenizer is used; where ids differ, experts read other words.",
                )

    findings = [
        Finding("notice", model_label(name), text, hint)
        for name, source in models.stored.items()
        for text, hint in _notices_of_model(name, source, f"the {model_label(name)}")
    ]
    for name, folder in folders.items():
        called = f"the {model_label(name)}"
        try:
            for text, hint in _config_contradictions(models.architecture, folder, called) if folder else ():
                findings.append(error_finding(model_label(name), IncompatibleModelsError(text, hint=hint)))
        except DriftLensError as error:
            findings.append(error_finding(model_label(name), error))
    return findings


def _unused_tensor_notices(models: OpenModels, source: StateSource, called: str) -> _Doubt:
    """Report tensors of a checkpoint that its library ignores; of experts only those the base lacks."""
    layout, base = models.architecture.layout, models.base
    if not isinstance(layout, KeyLayout):
        return
    keys = [*layout.ignored_keys(source.headers, source.name)]
    if base is not None and base is not source:
        of_base = layout.ignored_keys(base.headers, base.name)
        keys = [key for key in keys if key not in of_base]
    if keys:
        model = models.architecture.chain.settings["model"]
        yield (
            f"{called} has {shorten_list([*map(repr, keys)], 2)}, which {model} does not use: not measured or merged, "
            f"and saved models {'keep' if source is base else 'lack'} them",
            "Copy them into the saved folder if needed.",
        )


def _unmerged_change_notices(models: OpenModels, base: StateSource, source: StateSource, called: str) -> _Doubt:
    """Report fine-tuned tensors outside all layers; saved models keep the base's values for them."""
    architecture, layout = models.architecture, models.architecture.layout
    if layout is None:
        return
    base_keys, own = (layout.non_layer_keys(model.headers, model.name) for model in (base, source))
    of_heads = {key for model in (base, source) for key in architecture.classifier_keys(model) or ()}
    # Heads differ by task and are reported elsewhere.
    of_heads |= {f"{key.removesuffix('weight')}bias" for key in of_heads}
    shared = [key for key in base_keys.keys() & own.keys() if own[key] not in of_heads]
    shared.sort(key=lambda key: (base.headers[base_keys[key]].nbytes, key))
    changed = list(islice((key for key in shared if _is_changed_tensor(base, base_keys[key], source, own[key])), 2))
    if not changed:
        return
    differ = f"({', '.join(changed)} differ{'s' * (len(changed) == 1)})"
    if not isinstance(layout, TowerKeyLayout) and not all(key.startswith(TEXT_SIDE) for key in changed):
        yield (
            f"{called} changed tensors outside its layers: they are not measured or merged, and "
            f"saved models hold the base's {differ}",
            "If outputs depend on them, copy the expert's.",
        )
        return
    part = "its own logit scale" if changed == ["logit_scale"] else "a fine-tuned text tower"
    heads = "" if architecture.open_text is None else "heads from prompts are the base's, and "
    yield (
        f"{called} has {part}, which is not used: {heads}saved models hold the base's {differ}",
        "To use its text tower, save its heads and set `heads.<task>.file`.",
    )


def _is_changed_tensor(base: StateSource, key: str, source: StateSource, source_key: str) -> bool:
    start, header = base.headers[key], source.headers[source_key]
    if start.shape != header.shape:
        return True
    if not start.dtype.is_floating_point:
        # An index.
        return False
    rows = row_ranges(WeightSlot(key), start.shape, _FEW_READ, _FEW_READ)[0]
    return not _is_equal_tensor(base.read(key, rows), source.read(source_key, rows))


def _adapter_base_notices(models: OpenModels, base_folder: Path | None, source: LoraSource, called: str) -> _Doubt:
    """Report adapters that were trained on other adapters or on another base."""
    folder = Path(source.name)
    if is_lora_folder(Path(source.base_name)):
        yield (
            f"the adapters of {called} were trained on the adapters {source.base_name}, which are added first",
            "If the base contains those already, give this expert as BASE+ADAPTERS.",
        )
        while lower := find_lower_adapter(folder):
            folder = Path(lower)
    (stated, revision), base = lora_base_model(folder), models.origins["base"]
    named = read_json_object(base_folder, "config.json").get("_name_or_path")
    places = [str(place or "") for place in (base, base_folder, models.architecture.source, named)]
    mismatch = ""
    if stated and {part for place in places for part in _model_names_in_path(place)}.isdisjoint(
        _model_names_in_path(stated)
    ):
        mismatch = f"{stated!r}, and the base is {base!r}"
    elif revision not in ("", "main") and not any(revision in place for place in places):
        mismatch = f"revision {revision!r} of {stated!r}, and the revision of {base!r} is unknown"
    if mismatch:
        yield (
            f"the adapters of {called} were trained on {mismatch}",
            "Adapters fit only their own base: give it, unless the weights are equal.",
        )


def estimate_task_vectors(models: OpenModels) -> dict[str, ModelChange]:
    """Estimate statistics of every expert's task vector from a sample of its entries; empty without a base."""
    base = models.sources.get("base")
    experts = {name: source for name, source in models.sources.items() if task_of_expert(name) is not None}
    return {} if base is None else {name: task_vector_change(base, source) for name, source in experts.items()}


# A task vector is reported from this norm, relative to the median of the others. Experts of one recipe stay
# below it though their tasks differ: 0.6 to 1.4 among experts of images, 0.4 to 3.1 among four of texts.
# Adapters of rank 32 that were trained with alpha / r and are scaled by alpha / sqrt(r) are 5.7 times as long
# as they should be; ten times the learning rate makes them about ten times as long.
LONG = 4.0


def _rounding_notices(change: ModelChange, models: OpenModels, name: str, called: str) -> _Doubt:
    """Report how much of a task vector is lost to rounding in the checkpoint's dtype."""
    start, end = (
        max(
            header.dtype.itemsize
            for header in models.sources[model].headers.values()
            if header.dtype.is_floating_point
        )
        for model in ("base", name)
    )
    if start == end:
        if text := coarse_change_text(change, called):
            yield text, "If weights of higher precision exist, give those."
    elif text := rounding_loss_text(change, called):
        stored = "its own dtype: training and rounding changes look alike"
        unrounded = "the base's dtype; measured and merged unrounded"
        yield (
            f"{text} ({unrounded if start < end else stored})",
            "Saving in the base's dtype rounds; `--out-dtype float32` keeps all."
            if start < end
            else "If weights of higher precision exist, give those.",
        )


def _long_task_vector_notices(changes: Mapping[str, ModelChange], name: str, called: str) -> _Doubt:
    norms = [change.norm for other, change in changes.items() if other != name and change.changed]
    typical = statistics.median(norms) if norms else 0.0
    # A model of another base is reported as such.
    if (
        typical
        and (norm := changes[name].norm) >= LONG * typical
        and changes[name].relative_norm <= MAX_DISTANCE_FROM_BASE
    ):
        yield (
            f"the task vector of {called} is {norm / typical:.3g} times as long as the others' "
            f"(norm {norm:.3g}, median {typical:.3g})",
            "It dominates a merge with equal scaling; check its learning rate or adapter scale (use_rslora, "
            "lora_alpha).",
        )


def _model_names_in_path(place: str) -> set[str]:
    """Return lower-case model names in a path or Hub id: its last part, or its cached repository."""
    path = PurePosixPath(place.replace("\\", "/").casefold())
    cached = [match[1] for part in path.parts if (match := re.fullmatch(r"models--(?:.*--)?(.+)", part))]
    is_file = path.suffix in (".safetensors", ".bin", ".pt", ".pth")
    return {name for name in ({path.stem, path.parent.name} if is_file else {path.name}) | set(cached) if name}


# Model types of a whole CLIP and of its image tower.
_CLIP = ("clip", "clip_vision_model")
_HF_PIXELS = ("image_mean", "image_std", "size", "crop_size", "resample", "rescale_factor", "do_normalize")
_OPEN_CLIP_PIXELS = ("mean", "std", "interpolation", "resize_mode")
# Entries of config.json that affect features, in any family.
COMPUTED_SETTINGS = (
    *("hidden_act", "hidden_activation", "activation_function", "layer_norm_eps", "layer_norm_epsilon"),
    *("rms_norm_eps", "num_attention_heads", "n_head", "num_key_value_heads", "patch_size", "image_size"),
    *("rope_theta", "rope_parameters", "qkv_bias", "position_embedding_type", "activation", "n_heads"),
    *("position_buckets", "max_relative_positions", "pos_att_type", "share_att_key", "norm_rel_ebd"),
    *("pooler_hidden_act", "classifier_pooling", "classifier_activation", "head_dim", "sliding_window"),
    *("layer_types", "partial_rotary_factor", "query_pre_attn_scalar", "attn_logit_softcapping"),
    *("final_logit_softcapping", "logit_scale", "logits_scaling", "embedding_multiplier", "clip_qkv"),
    *("attention_multiplier", "residual_multiplier", "num_experts_per_tok", "norm_topk_prob", "alibi"),
    *("scale_embedding", "dense_act_fn", "is_gated_act", "relative_attention_max_distance"),
)
_ACTIVATIONS = ("hidden_act", "quick_gelu", "activation_function")

# File, key and value of a model's configuration, and the value used for all models. Missing files make no
# statement; missing keys have the library's default.
_Statement = tuple[str, str, object, object]


def _config_contradictions(architecture: Architecture, folder: Path, called: str) -> _Doubt:
    """Yield contradictions between a folder's configuration and the loaded architecture."""
    is_open_clip = architecture.loader == "open-clip"
    reader = _compared_open_clip_settings if is_open_clip else _compared_hf_settings
    is_read = is_open_clip or architecture.loader.startswith("hf-")
    for file, key, stated, used in reader(architecture, folder) if is_read else ():
        if _is_equal_setting(stated, used):
            continue
        remedy = "Merge models of one architecture, or correct the file."
        if key in _ACTIVATIONS:
            remedy = "Set `architecture.source` to a configuration with the activation used in training."
        elif file.endswith("processor_config.json"):
            remedy = "Merge models with equal preprocessing, or correct the file."
        yield f"{file} of {called} has {key} {stated}, but {used} is used for all models", remedy


def _compared_hf_settings(architecture: Architecture, folder: Path) -> Iterator[_Statement]:
    """Yield settings of a transformers configuration to compare, with the library's defaults filled in."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = _read_json_or_empty(folder, "config.json")
    used: Any = {} if architecture.folder is None else dict(architecture.folder.configs).get("config.json")
    kind, is_clip = config.get("model_type"), config.get("model_type") in _CLIP
    if not isinstance(used, dict) or kind not in CONFIG_MAPPING:
        return
    if kind != used.get("model_type") and not (is_clip and used.get("model_type") in _CLIP):
        if architecture.loader == "hf-decoder" and "text_config" not in config:
            yield ("config.json", "model_type", kind, used.get("model_type"))
        return
    with wrap_library_errors(str(folder)):
        ours, theirs = (
            CONFIG_MAPPING[stated["model_type"]].from_dict(decode_json_floats(stated)).to_dict()
            for stated in (used, config)
        )
    for section in ("vision_config",) if is_clip else ("", "vision_config", "text_config"):
        # The configuration of a tower alone is that of the tower.
        our, their = (
            whole if not section or whole["model_type"] == "clip_vision_model" else whole.get(section, {})
            for whole in (ours, theirs)
        )
        for key in COMPUTED_SETTINGS:
            if key in our or key in their:
                yield (
                    "config.json",
                    key,
                    _canonical_activation_name(their.get(key)),
                    _canonical_activation_name(our.get(key)),
                )
    if architecture.preprocess is None:
        return
    file, default, pixels = (
        "preprocessor_config.json",
        {},
        _read_json_or_empty(folder, "preprocessor_config.json"),
    )
    if is_clip:
        default = getattr(transformers, "CLIPImageProcessorPil", transformers.CLIPImageProcessor)().to_dict()
        # As transformers 5 saves it.
        nested = _read_json_or_empty(folder, "processor_config.json").get("image_processor")
        file, pixels = ("processor_config.json", nested) if isinstance(nested, dict) else (file, pixels)
    if pixels:
        settings = default | dict(architecture.preprocess.settings)
        yield from _compared_pixel_settings(file, _HF_PIXELS, default | pixels, settings)


def _compared_open_clip_settings(architecture: Architecture, folder: Path) -> Iterator[_Statement]:
    config = _read_json_or_empty(folder, CONFIG_FILE)
    model, settings = config.get("model_cfg"), architecture.chain.settings
    if isinstance(model, dict):
        activation = "quick_gelu" if model.get("quick_gelu", False) else "gelu"
        yield (CONFIG_FILE, "quick_gelu", activation, settings["activation"])
        for key in ("patch_size", "image_size"):
            if isinstance(size := model.get("vision_cfg", {}).get(key), int):
                yield (CONFIG_FILE, key, [size] * 2, settings[key])
    pixels = config.get("preprocess_cfg")
    if isinstance(pixels, dict) and architecture.preprocess is not None:
        yield from _compared_pixel_settings(CONFIG_FILE, _OPEN_CLIP_PIXELS, pixels, architecture.preprocess.settings)


def _compared_pixel_settings(
    file: str, keys: Sequence[str], stated: Mapping[str, Any], used: Mapping[str, Any]
) -> Iterator[_Statement]:
    for key in keys:
        if key in stated and key in used:
            yield (file, key, _normalized_image_size(stated[key]), _normalized_image_size(used[key]))


def _read_json_or_empty(folder: Path, name: str) -> dict[str, Any]:
    return read_json(folder / name) if (folder / name).is_file() else {}


def _normalized_image_size(size: object) -> object:
    """Return image sizes as a mapping; a single number is the shorter edge or a square."""
    if isinstance(size, dict):
        numbers = [size[key] for key in ("shortest_edge", "height", "width") if key in size]
        return numbers[0] if len(set(numbers)) == 1 else numbers
    return size


def _canonical_activation_name(value: object) -> object:
    from transformers.activations import ACT2FN

    return activation_name(ACT2FN[value]) or value if isinstance(value, str) and value in ACT2FN else value


def _is_equal_setting(one: object, other: object) -> bool:
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_is_equal_setting, one, other))
    if isinstance(one, int | float) and isinstance(other, int | float):
        # Files of older versions have means and deviations with fewer digits.
        return math.isclose(one, other, rel_tol=1e-6)
    return one == other
