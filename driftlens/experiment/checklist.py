"""Checks of a merge from its files alone, read once, tensor by tensor, without building a model.

Entry point: `check_merge_files`. It needs no support for the architecture: models are compared by the names of their
tensors, and layers are told by the numbers in these names.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from driftlens.checkpoints.loading import TOKENIZERS, find_config_folder
from driftlens.checkpoints.lora import UNGATHERED, LoraSource
from driftlens.checkpoints.tensor_sources import StateSource, TensorHeader, count_differences, rename_keys
from driftlens.experiment.sanity_checks import (
    COMPUTED_SETTINGS,
    LONG,
    MUCH_UNEXPLAINED,
    READ_CHUNK,
    ROUNDING,
    Finding,
    WeightProducts,
    check_distances,
    check_merge_fit,
    error_finding,
    format_range,
    model_label,
    row_ranges,
)
from driftlens.experiment.study_loading import open_model_or_adapter, split_adapter
from driftlens.models.architectures.encoders import BUFFERS
from driftlens.models.chain import WeightSlot
from driftlens.models.vocabularies import num_token_ids, tokenizer_changes
from driftlens.utils.errors import CheckpointError, DriftLensError, pluralize, shorten_list
from driftlens.utils.files import file_sha256, read_json_object
from driftlens.utils.variants import COARSE, ModelChange, coarse_change_text, rounding_loss_text, task_of_expert

# Wrappers that libraries put before the names of a model's tensors.
_PREFIX = re.compile(r"^(?:(?:base_model|module|model|_orig_mod|language_model|transformer|text_model)\.)*")
_LAYER = re.compile(r"^(.*?)\.?(\d+)\.(.+)$")
# Names of token tables and of heads that may be tied to them.
_TABLES = re.compile(r"(embed_tokens|wte|word_embeddings|tok_embeddings|shared|token_embedding)\.weight$")
_HEADS = re.compile(r"(lm_head|embed_out|output_projection)\.weight$")
_BUFFER = re.compile("|".join(BUFFERS))
# Entries read of each tensor to count what rounding to the stored dtype lost.
_SAMPLED = 1 << 14
# A tensor this many times as large as the base's, or as small, was scaled by mistake.
_OUTLIER = 10.0
# A merge has less than this share of its largest coefficient of an expert, or keeps so little of all experts, only by
# mistake or by choice.
_LOST, _ALL_LOST = 0.05, 0.01
# Experts of which a merge keeps at least this share of its largest are not called lost: they resemble another one.
_SIMILAR = 0.25
# Task vectors of a module below this cosine work against each other.
_OPPOSED = -0.3


@dataclass
class Checklist:
    """The findings on a merge, the share of each expert that it keeps by layer, and the cosines of task vectors.

    Attributes:
        models: role -> path of every model, the first one being compared with.
        findings: one per check and outcome.
        kept: task -> layer -> projection of merged - base on the expert's task vector, divided by its squared norm.
        interference: module -> smallest cosine of two task vectors, and share of conflicting signs.
        is_like_expert: True if the merged model holds so little of the experts that it seems to be another expert.
    """

    models: Mapping[str, str]
    findings: list[Finding] = field(default_factory=list)
    kept: dict[str, dict[str, float]] = field(default_factory=dict)
    interference: dict[str, dict[str, float]] = field(default_factory=dict)
    is_like_expert: bool = False

    @property
    def has_doubts(self) -> bool:
        """True if any check found something to look at."""
        return any(finding.level != "ok" for finding in self.findings)

    @property
    def exit_code(self) -> int:
        """The highest exit code of models that can't be read or compared; 0 without any."""
        return max((finding.exit_code for finding in self.findings), default=0)

    def text(self) -> str:
        """Return the models, then a line per finding, marked ✓, ! or ✗, with what to do below it."""
        width = max((len(finding.subject) for finding in self.findings), default=0)
        marks = {"ok": "✓", "notice": "!", "problem": "✗"}
        lines = [*(f"{model_label(name)}: {place}" for name, place in self.models.items()), ""]
        for finding in self.findings:
            lines.append(f"{marks[finding.level]} {finding.subject:<{width}}  {finding.text}")
            if finding.level != "ok":
                lines += [f"  {'':<{width}}  {line}" for line in finding.hint.splitlines()]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Return findings and numbers as JSON values."""
        return dataclasses.asdict(self)


class _LastPieceSource:
    """A source that keeps the piece read last: adapters read the same piece of their base right after it."""

    def __init__(self, source: StateSource) -> None:
        self.name, self.headers = source.name, source.headers
        self._read = functools.lru_cache(maxsize=1)(source.read)

    def read(self, key: str, rows: tuple[int, int] | None = None) -> Tensor:
        """Read a tensor, or its rows [start, stop)."""
        return self._read(key, rows)


@dataclass
class _Statistics:
    """Sums over tensors of one pass; rows and columns are the base, then the changes of the other models.

    Attributes:
        names: the models, the base first.
        grams: inner products by tensor, [models, models].
        conflicts: by tensor, entries that two experts or more change, and those changed in both directions.
        changes: by model, counts of changed and rounded entries in a sample of every tensor.
        broken: by model, tensors with NaN or infinity.
        is_matrix: whether a tensor has two axes or more.
        num_changed: by model, the number of tensors that differ from the base.
    """

    names: tuple[str, ...]
    grams: dict[str, Tensor] = field(default_factory=dict)
    conflicts: dict[str, tuple[int, int]] = field(default_factory=dict)
    changes: dict[str, ModelChange] = field(default_factory=dict)
    broken: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    is_matrix: dict[str, bool] = field(default_factory=dict)
    num_changed: Counter[str] = field(default_factory=Counter)

    @property
    def expert_positions(self) -> dict[str, int]:
        """The row of every expert, by task."""
        tasks = {task_of_expert(name): position for position, name in enumerate(self.names)}
        return {task: position for task, position in tasks.items() if task is not None}

    def sum_over(self, keys: Collection[str]) -> Tensor:
        """Return the inner products over these tensors."""
        zero = torch.zeros(len(self.names), len(self.names), dtype=torch.float64)
        return sum((self.grams[key] for key in keys), zero)

    def weight_products(self) -> WeightProducts:
        """Return inner products of weights instead of changes, for the checks that other commands share."""
        to_weights = torch.eye(len(self.names), dtype=torch.float64)
        to_weights[:, 0] = 1
        grams = torch.stack([to_weights @ gram @ to_weights.T for gram in self.grams.values()])
        is_matrix = torch.tensor([self.is_matrix[key] for key in self.grams])
        return WeightProducts(self.names, grams, is_matrix, True, dict(self.num_changed), len(grams))


def check_merge_files(
    base: str | None, experts: Mapping[str, str], merged: str | None = None, *, offline: bool = False
) -> Checklist:
    """Check base, experts and merged model by their files: same base, configuration, values, and what was kept.

    Memory holds a few million entries of every model at a time.

    Args:
        base: folder, weights file or Hub id; None if there is none, and task vectors are not checked.
        experts: task -> folder of a model or of LoRA adapters, weights file or Hub id.
        merged: the merged model, if there is one.
        offline: True to use only the Hub's local cache.

    Raises:
        DriftLensError: the first model can't be read, which the others are compared with.
    """
    places = {} if base is None else {"base": base}
    places |= {f"expert:{task}": place for task, place in experts.items()} | ({"merged": merged} if merged else {})
    checklist, sources, first = Checklist(places), dict[str, StateSource](), next(iter(places))
    for name, place in places.items():
        try:
            source = open_model_or_adapter(place, sources.get("base"), offline=offline)
            sources[name] = _LastPieceSource(source) if name == first else source
        except DriftLensError as error:
            if name == first:
                raise
            checklist.findings.append(error_finding(model_label(name), error))
    # Adapters have no configuration; a model given with them has.
    folders = {name: find_config_folder(split_adapter(places[name])[0]) for name in sources}
    configs = {name: read_json_object(folder, "config.json") for name, folder in folders.items() if folder}
    # Adapters may come with a tokenizer of more tokens.
    homes = {
        name: Path(source.name) if isinstance(source, LoraSource) else folders[name]
        for name, source in sources.items()
    }
    checklist.findings += [*_check_configs(configs), *_check_tokenizers(homes)]
    aligned = dict[str, StateSource]()
    for name, source in sources.items():
        try:
            aligned[name] = _with_names_of(sources[first], source)
        except DriftLensError as error:
            checklist.findings.append(error_finding(model_label(name), error))
    checklist.findings += [*_check_tensors(aligned), *_check_token_ids(aligned, homes)]
    checklist.findings += _check_heads(aligned, configs)
    statistics = _read_statistics(aligned)
    checklist.findings += [*_check_values(statistics), *_check_adapters(aligned, statistics)]
    if len(statistics.names) > 1 and statistics.grams:
        products = statistics.weight_products()
        checklist.findings += check_distances(products)
        if "base" in products.names:
            checklist.findings += [*_check_rounding(statistics), *_check_lengths(statistics)]
            checklist.interference = _interference(statistics)
            checklist.findings += _check_interference(checklist.interference)
        if "merged" in products.names and products.experts:
            checklist.findings.append(check_merge_fit(products, "merged"))
            checklist.kept = _kept_by_layer(statistics) if "base" in products.names else {}
            checklist.findings += _check_kept(checklist.kept, statistics) if checklist.kept else ()
            checklist.is_like_expert = bool(checklist.kept) and _is_like_expert(checklist.kept, statistics)
            if checklist.is_like_expert:
                text = "the merged model holds almost nothing of the experts: it looks like an expert itself"
                hint = "If the last model is an expert, too, write TASK=MODEL."
                checklist.findings.append(Finding("problem", "roles", text, hint))
    return checklist


def _is_like_expert(kept: Mapping[str, Mapping[str, float]], statistics: _Statistics) -> bool:
    """Return True if a merged model differs from the base, but not by the experts' changes."""
    wholes = [layers["all layers"] for layers in kept.values() if layers]
    merged, experts = statistics.names.index("merged"), [*statistics.expert_positions.values()]
    total = statistics.sum_over(statistics.grams)
    cross, energy = total[experts, merged], float(total[merged, merged])
    fit = torch.linalg.lstsq(total[experts][:, experts], cross[:, None], rcond=1e-8, driver="gelsd")
    is_other = float(cross @ fit.solution[:, 0]) < (1 - MUCH_UNEXPLAINED) * energy
    # DARE leaves as much unexplained, but keeps the experts' changes; task vectors of one base share little.
    return bool(wholes) and energy > ROUNDING * float(total[0, 0]) and is_other and fmean(wholes) < _LOST


def _with_names_of(base: StateSource, source: StateSource) -> StateSource:
    """Give the tensors of a model the base's names, if only wrappers before them differ.

    Raises:
        CheckpointError: fewer than half of the base's tensors are there.
    """
    if source.headers.keys() >= base.headers.keys():
        return source
    own = {_PREFIX.sub("", key): key for key in source.headers}
    names = {key: key if key in source.headers else own.get(_PREFIX.sub("", key)) for key in base.headers}
    found = {key: old for key, old in names.items() if old is not None}
    if 2 * len(found) < len(names):
        raise CheckpointError(
            f"{source.name} has {len(found)} of the base's {len(names)} tensors; its first are "
            f"{shorten_list([*source.headers], 2)}, the base's {shorten_list([*base.headers], 2)}",
            hint="It has another architecture or file format. Convert it, or give the base of its fine-tuning.",
        )
    rest = {key: key for key in source.headers if key not in found.values() and key not in found}
    return rename_keys(source, {**found, **rest})


def _check_configs(configs: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    """Compare the settings that change what a model computes with those of the base."""
    (first, base), *others = configs.items() or [("", {})]
    compared, are_equal = 0, True
    for name, config in configs.items():
        if quantized := config.get("quantization_config"):
            method = quantized.get("quant_method", "") if isinstance(quantized, dict) else quantized
            text = f"the {model_label(name)} is quantized ({method}): its files hold codes, not weights"
            yield Finding("problem", model_label(name), text, "Dequantize it and save in bfloat16 or float32.")
    for name, config in others:
        for path, ours, theirs in _setting_pairs(base, config):
            compared += 1
            if ours != theirs:
                are_equal = False
                text = f"config.json of the {model_label(name)} has {path} {theirs}, the {model_label(first)} {ours}"
                hint = "The merge computes with one of them. Merge models of one configuration, or correct the file."
                yield Finding("problem", "configuration", text, hint)
    if compared and are_equal:
        text = f"{pluralize(compared, 'setting')} of config.json in {pluralize(len(configs), 'model')} agree"
        yield Finding("ok", "configuration", text)


def _setting_pairs(base: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield the settings that both configurations state: name, the base's value, the other's."""
    for section in ("", "text_config", "vision_config"):
        ours, theirs = (_stated_settings(whole.get(section) if section else whole) for whole in (base, other))
        for key in ("model_type", *COMPUTED_SETTINGS):
            if ours.get(key) is not None and theirs.get(key) is not None:
                yield f"{section}.{key}".lstrip("."), ours[key], theirs[key]


def _stated_settings(config: Any) -> Mapping[str, Any]:
    """Return a configuration with RoPE's base where older files have it: next to the other settings."""
    if not isinstance(config, dict):
        return {}
    rope = config.get("rope_parameters")
    if not isinstance(rope, dict) or "rope_theta" not in rope:
        return config
    return {**config, **rope, "rope_parameters": {key: rope[key] for key in rope if key != "rope_theta"}}


def _check_tokenizers(folders: Mapping[str, Path | None]) -> Iterator[Finding]:
    """Compare tokenizer files and special tokens with those of the base."""
    (first, home), *others = folders.items()
    num_equal, are_equal = 0, True
    for name, folder in others:
        if home is None or folder is None:
            continue
        if differing := tokenizer_changes(home, folder):
            are_equal = False
            text = f"the tokenizer of the {model_label(name)} differs from that of the {model_label(first)}: "
            text += ", ".join(differing)
            hint = "Where ids differ, models read other words. Merge models of one tokenizer."
            yield Finding("notice", "tokenizer", text, hint)
        num_equal += all(map(_has_tokenizer, (home, folder)))
    if num_equal and are_equal:
        yield Finding("ok", "tokenizer", f"files and special tokens of {num_equal + 1} models agree")


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / file).is_file() for file in (*TOKENIZERS, "tokenizer_config.json"))


def _check_tensors(sources: Mapping[str, StateSource]) -> Iterator[Finding]:
    """Report missing and additional tensors, other shapes, and dtypes that hold codes."""
    (first, base), same = next(iter(sources.items())), list[str]()
    anchor = f"the {model_label(first)}"
    for name, source in sources.items():
        called, own = f"the {model_label(name)}", source.headers
        codes = [
            key
            for key, header in own.items()
            if header.dtype.itemsize == 1 and header.dtype != torch.bool and header.shape
        ]
        if codes:
            text = f"{called} has {len(codes)} tensors of one byte per entry: {codes[0]} ({own[codes[0]].dtype}) ..."
            yield Finding("problem", model_label(name), text, "Give the weights before quantization.")
        if name == first:
            continue
        missing = _missing_tensors(base, source)
        extra = [key for key in own if key not in base.headers and _is_weight(key, own[key])]
        shapes = [key for key in own if key in base.headers and own[key].shape != base.headers[key].shape]
        if empty := [key for key in shapes if own[key].shape == (0,)]:
            text = f"{called} has {pluralize(len(empty), 'tensor')} of shape [0]: {shorten_list(empty, 2)}"
            yield Finding("problem", "tensors", text, UNGATHERED)
        if missing:
            text = f"{called} lacks {pluralize(len(missing), 'tensor')} of {anchor}: {shorten_list(missing, 2)}"
            yield Finding("problem", "tensors", text, "Download or save it again: a shard or a module was lost.")
        if extra:
            text = f"{called} has {pluralize(len(extra), 'tensor')} that {anchor} lacks: {shorten_list(extra, 2)}"
            yield Finding("notice", "tensors", text, "Heads of a task may be added; other tensors are not merged.")
        for key in [key for key in shapes if key not in empty][:2]:
            is_table = _TABLES.search(key) or _HEADS.search(key)
            kind = "vocabulary" if is_table else "tensors"
            text = f"{key} is {[*own[key].shape]} in {called} and {[*base.headers[key].shape]} in {anchor}"
            hint = (
                "Rows of the vocabulary differ: align tokenizers first." if is_table else "Merge models of one shape."
            )
            yield Finding("notice" if is_table else "problem", kind, text, hint)
        if not (missing or extra or shapes):
            same.append(name)
    if same:
        text = f"{pluralize(len(base.headers), 'tensor')} of {anchor}: equal shapes in {len(same) + 1} models"
        yield Finding("ok", "tensors", text)


def _is_weight(key: str, header: TensorHeader) -> bool:
    """Return False for indices and other buffers, which some versions of a library save and others compute."""
    return header.dtype.is_floating_point and not _BUFFER.search(key)


def _missing_tensors(base: StateSource, source: StateSource) -> list[str]:
    """Return the weights that a model lacks, without tied heads and towers that are left out as a whole."""
    stacks = {match[1] for key in source.headers if (match := _LAYER.match(key))}
    missing = [
        key
        for key, header in base.headers.items()
        if key not in source.headers and not _HEADS.search(key) and _is_weight(key, header)
    ]
    of_stacks = [key for key in missing if (match := _LAYER.match(key)) and match[1] in stacks]
    has_left_out_tower = any((match := _LAYER.match(key)) and match[1] not in stacks for key in missing)
    return of_stacks if has_left_out_tower else missing


def _check_token_ids(sources: Mapping[str, StateSource], folders: Mapping[str, Path | None]) -> Iterator[Finding]:
    """Report tokenizers with more ids than their model has rows, and more so than the base's."""
    excess, counts = dict[str, int](), dict[str, int]()
    for name, source in sources.items():
        table = next((key for key in source.headers if _TABLES.search(key)), "")
        folder, rows = folders[name], source.headers[table].shape[0] if table else 0
        # Usually all models have one tokenizer, which may take seconds to parse.
        file = None if folder is None else folder / "tokenizer.json"
        digest = file_sha256(file) if file is not None and file.is_file() else ""
        if digest not in counts:
            counts[digest] = num_token_ids(folder)
        ids = counts[digest]
        excess[name] = max(0, ids - rows) if table else 0
        # Published text models keep ids of images that they can't read.
        if excess[name] > next(iter(excess.values())):
            text = f"the tokenizer of the {model_label(name)} has ids up to {ids - 1}, but {table} has {rows} rows"
            hint = "Texts with the other ids fail. Save it with the tokenizer of these rows, or merge again with both."
            yield Finding("problem", "vocabulary", text, hint)


def _check_heads(sources: Mapping[str, StateSource], configs: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    """Report heads that the configuration ties to the token table although the file holds another matrix."""
    for name, source in sources.items():
        table = next((key for key in source.headers if _TABLES.search(key)), None)
        head = next((key for key in source.headers if _HEADS.search(key)), None)
        config = configs.get(name, configs.get("base", {}))
        tied = config.get("tie_word_embeddings")
        # An encoder-decoder's setting also scales features; its stored head is used.
        if table is None or tied is None or config.get("is_encoder_decoder"):
            continue
        called = f"the {model_label(name)}"
        if tied and head is not None and source.headers[head].shape == source.headers[table].shape:
            if not _have_equal_rows(source, table, head):
                text = (
                    f"{called} stores {head}, but config.json ties it to {table}: the stored head is lost on loading"
                )
                hint = "Set tie_word_embeddings to false, or merge the table only."
                yield Finding("problem", "tied head", text, hint)
                continue
        elif not tied and head is None:
            text = f"config.json of {called} has tie_word_embeddings false, but no head is stored: it would be random"
            yield Finding("problem", "tied head", text, "Set tie_word_embeddings to true, or save the head.")
            continue
        if name == "merged":
            yield Finding(
                "ok", "tied head", f"the head of {called} is {'tied' if tied else 'stored'} as config.json says"
            )


def _have_equal_rows(source: StateSource, one: str, other: str) -> bool:
    rows = (0, min(64, source.headers[one].shape[0]))
    return torch.equal(source.read(one, rows), source.read(other, rows))


def _read_statistics(sources: Mapping[str, StateSource]) -> _Statistics:
    """Read all tensors that the base and every model share, in pieces, and sum up what the checks need."""
    names, base = tuple(sources), next(iter(sources.values()))
    statistics = _Statistics(names, changes={name: ModelChange("") for name in names[1:]})
    first, num_experts = int(names[0] == "base"), len(statistics.expert_positions)
    for key, header in base.headers.items():
        present = [name for name in names if key in sources[name].headers]
        has_same_shape = all(sources[name].headers[key].shape == header.shape for name in present)
        if not header.dtype.is_floating_point or header.dtype.itemsize == 1 or not has_same_shape or not header.shape:
            continue
        gram, disputed, opposed = torch.zeros(len(names), len(names), dtype=torch.float64), 0, 0
        for index, rows in enumerate(
            row_ranges(WeightSlot(key), header.shape, header.nbytes, READ_CHUNK // len(names))
        ):
            pieces = {name: sources[name].read(key, rows) for name in present}
            start = pieces[names[0]].float().flatten()
            stacked = torch.zeros(len(names), start.numel())
            stacked[0] = start
            for name in present[1:]:
                torch.sub(pieces[name].float().flatten(), start, out=stacked[names.index(name)])
                if index == 0:
                    start_piece, end_piece = (pieces[model].flatten()[:_SAMPLED] for model in (names[0], name))
                    # Experts are merged in the narrower dtype of both, unless it is set; a merge is what is stored.
                    dtypes = [end_piece.dtype, *([start_piece.dtype] if name != "merged" else [])]
                    narrow = min(dtypes, key=lambda dtype: dtype.itemsize)
                    statistics.changes[name] += count_differences(start_piece, end_piece, narrow)
            gram += (stacked @ stacked.T).double()
            if num_experts > 1:
                changes = stacked[first : first + num_experts]
                # Experts that change an entry, and their signs summed up: opposite ones make the sum smaller.
                signs = changes.sign()
                total, count = signs.sum(dim=0).abs_(), signs.abs_().sum(dim=0)
                disputed += int(torch.count_nonzero(count > 1))
                opposed += int(torch.count_nonzero(total < count))
        broken = torch.nonzero(~torch.isfinite(torch.diagonal(gram))).flatten().tolist()
        # What is subtracted from a broken base is broken, too.
        for position in [0] if 0 in broken else broken:
            statistics.broken[names[position]].append(key)
        if not torch.isfinite(gram).all():
            continue
        statistics.grams[key], statistics.conflicts[key] = gram, (disputed, opposed)
        statistics.is_matrix[key] = len(header.shape) > 1
        statistics.num_changed.update(
            name for position, name in enumerate(names) if position and gram[position, position]
        )
    return statistics


def _check_values(statistics: _Statistics) -> Iterator[Finding]:
    """Report NaN and infinity, and tensors whose size is far from the base's."""
    for name, keys in statistics.broken.items():
        text = f"the {model_label(name)} has NaN or infinity in {pluralize(len(keys), 'tensor')}: "
        hint = "Save it again; float16 overflows where bfloat16 does not."
        if all(_TABLES.search(key) or _HEADS.search(key) for key in keys):
            hint = "Rows of tokens that a model lacks may not have been filled: merge with the base's tokenizer."
        yield Finding("problem", "values", text + shorten_list(keys, 2), hint)
    largest = dict[str, tuple[float, str]]()
    for key, gram in statistics.grams.items():
        size = float(gram[0, 0])
        sizes = size + 2 * gram[0] + torch.diagonal(gram)
        for position, name in enumerate(statistics.names[1:], start=1):
            if size and statistics.is_matrix[key]:
                ratio = float((sizes[position].clamp_min(0) / size).sqrt())
                largest[name] = max(largest.get(name, (0.0, "")), (max(ratio, 1 / max(ratio, 1e-12)), key))
    for name, (ratio, key) in largest.items():
        if ratio > _OUTLIER:
            text = f"the norm of {key} differs by a factor of {ratio:.3g} between the {model_label(name)} and the "
            text += model_label(statistics.names[0])
            yield Finding(
                "problem", "values", text, "A scale is missing or applied twice (fp8, LoRA alpha): check the file."
            )
    if not statistics.broken and all(ratio <= _OUTLIER for ratio, _ in largest.values()):
        text = "all are finite"
        if largest:
            most, anchor = max(ratio for ratio, _ in largest.values()), model_label(statistics.names[0])
            text += f"; norms of matrices are within a factor of {most:.2f} of those of the {anchor}"
        yield Finding("ok", "values", text)


def _check_adapters(sources: Mapping[str, StateSource], statistics: _Statistics) -> Iterator[Finding]:
    """Report LoRA modules that change nothing or are missing."""
    matrices = [
        key.removesuffix(".weight")
        for key, header in next(iter(sources.values())).headers.items()
        if key.endswith(".weight") and len(header.shape) == 2
    ]
    for name, source in sources.items():
        if not isinstance(source, LoraSource):
            continue
        lost, count = source.lost_modules(matrices)
        if lost:
            text = f"{len(lost)} of {count} modules that the {model_label(name)} targets have no tensors: "
            hint = "Download or save the adapters again: a file or a layer was lost."
            yield Finding("notice", "adapters", text + shorten_list(lost, 2), hint)
        keys, position = [key for key in source.adapted_keys if key in statistics.grams], statistics.names.index(name)
        dead = [key for key in keys if not statistics.grams[key][position, position]]
        if dead:
            text = f"{len(dead)} of {len(keys)} LoRA modules of the {model_label(name)} change nothing: "
            text += shorten_list(dead, 2)
            yield Finding(
                "notice", "adapters", text, "B is zero there: the adapter was not trained, or saved too early."
            )
        else:
            yield Finding("ok", "adapters", f"all {len(keys)} LoRA modules of the {model_label(name)} change weights")


def _check_rounding(statistics: _Statistics) -> Iterator[Finding]:
    """Report changes of which rounding reverted most entries, or would revert them in the base's dtype."""
    are_precise = True
    for name, change in statistics.changes.items():
        text = coarse_change_text(change, f"the {model_label(name)}")
        hint = "If weights of higher precision exist, give those."
        if not text and change.lost > COARSE * change.changed:
            text = rounding_loss_text(change, f"the {model_label(name)}")
        if name == "merged" or change.lost:
            hint = "Merge and save in float32 (--out-dtype float32), or serve adapters without merging them."
        if text:
            are_precise = False
            yield Finding("notice", "rounding", text, hint)
    if are_precise:
        yield Finding("ok", "rounding", "most changes are larger than a step of the dtype they are stored in")


def _check_lengths(statistics: _Statistics) -> Iterator[Finding]:
    """Compare the norms of the experts' task vectors."""
    total = statistics.sum_over(statistics.grams)
    norms = {
        f"expert:{task}": float(total[position, position].sqrt())
        for task, position in statistics.expert_positions.items()
    }
    if len(norms) < 2:
        return
    (short, least), (long, most) = (pick(norms.items(), key=lambda entry: entry[1]) for pick in (min, max))
    text = f"their norms are {least:.3g} to {most:.3g}" if most > 1.01 * least else f"all have norm {most:.3g}"
    if not least:
        text = f"the {model_label(short)} equals the base"
        yield Finding("problem", "task vectors", text, "It was not fine-tuned, or its adapter was not applied.")
    elif most > LONG * least:
        text += f": the {model_label(long)} changes {most / least:.3g} times as much as the {model_label(short)}"
        hint = "It dominates a merge with equal weights: give it a smaller one, or check learning rate and LoRA scale."
        yield Finding("notice", "task vectors", text, hint)
    else:
        yield Finding("ok", "task vectors", text)


def _layer_of(key: str) -> str:
    """Return the layer of a tensor by the first number in its name, such as `layers.3`; else `other`."""
    match = _LAYER.match(key)
    return f"{match[1].rpartition('.')[2]}.{match[2]}" if match else "other"


def _module_of(key: str) -> str:
    """Return the module of a tensor inside its layer, such as `self_attn.q_proj`."""
    match = _LAYER.match(key)
    return (match[3] if match else key).removesuffix(".weight").removesuffix(".bias")


def _keys_by(statistics: _Statistics, name_of: Any) -> dict[str, list[str]]:
    groups = defaultdict[str, list[str]](list)
    for key in statistics.grams:
        groups[name_of(key)].append(key)
    return groups


def _interference(statistics: _Statistics) -> dict[str, dict[str, float]]:
    """Return, by module with matrices, the smallest cosine of two task vectors and the share of opposite signs."""
    experts = [*statistics.expert_positions.values()]
    found = dict[str, dict[str, float]]()
    for module, keys in _keys_by(statistics, _module_of).items():
        keys = [key for key in keys if statistics.is_matrix[key]]
        gram = statistics.sum_over(keys)
        norms = torch.diagonal(gram).sqrt()
        cosines = [
            float(gram[i, j] / (norms[i] * norms[j])) for i, j in combinations(experts, 2) if norms[i] and norms[j]
        ]
        disputed, opposed = (sum(statistics.conflicts[key][at] for key in keys) for at in (0, 1))
        if cosines and disputed:
            found[module] = {"cosine": min(cosines), "sign_conflicts": opposed / disputed}
    return found


def _check_interference(interference: Mapping[str, Mapping[str, float]]) -> Iterator[Finding]:
    if not interference:
        return
    module, worst = min(interference.items(), key=lambda entry: entry[1]["cosine"])
    text = f"the smallest cosine of two task vectors is {round(worst['cosine'], 2) + 0.0:.2f} (in {module}, where "
    text += f"{100 * worst['sign_conflicts']:.0f} % of the entries that two experts change have opposite signs)"
    hint = "Averages cancel there: try ties, or a merge that fits data (driftlens merge --compare)."
    is_opposed = worst["cosine"] < _OPPOSED
    yield Finding("notice" if is_opposed else "ok", "interference", text, hint if is_opposed else "")


def _kept_by_layer(statistics: _Statistics) -> dict[str, dict[str, float]]:
    """Return, by task and layer, the projection of merged - base on the expert's task vector over its squared norm."""
    merged = statistics.names.index("merged")
    groups = {"all layers": [*statistics.grams], **_keys_by(statistics, _layer_of)}
    sums = {layer: statistics.sum_over(keys) for layer, keys in groups.items()}
    return {
        task: {
            layer: float(gram[merged, position] / gram[position, position])
            for layer, gram in sums.items()
            if gram[position, position]
        }
        for task, position in statistics.expert_positions.items()
    }


def _check_kept(kept: Mapping[str, Mapping[str, float]], statistics: _Statistics) -> Iterator[Finding]:
    """Report experts of which the merge keeps little, and layers that were not merged."""
    merged, experts = statistics.names.index("merged"), [*statistics.expert_positions.values()]
    total, wholes = statistics.sum_over(statistics.grams), [shares.get("all layers", 0.0) for shares in kept.values()]
    # What an expert shares with another one is kept without it.
    fit = torch.linalg.lstsq(total[experts][:, experts], total[experts, merged][:, None], rcond=1e-8, driver="gelsd")
    own = fit.solution[:, 0].tolist()
    for (task, by_layer), whole, coefficient in zip(kept.items(), wholes, own, strict=True):
        if not by_layer:
            continue
        layers = [share for layer, share in by_layer.items() if layer != "all layers"]
        text = f"the merge keeps {whole:.2f} of the change of {model_label(f'expert:{task}')}"
        text += f" (by layer {format_range(layers)})"
        is_left_out = coefficient < _LOST * max(own) and whole < _SIMILAR * max(wholes)
        if is_left_out or max(wholes) < _ALL_LOST:
            text += f", and {round(coefficient, 2) + 0.0:.2f} without its overlap with other experts" * is_left_out
            hint = "Check the recipe and the names of tensors. If the last model is an expert, too, write TASK=MODEL."
            yield Finding("problem", "kept", text, hint)
        else:
            yield Finding("ok", "kept", text)
    groups = _keys_by(statistics, _layer_of)
    sizes = {layer: torch.diagonal(statistics.sum_over(keys)) for layer, keys in groups.items()}
    # Methods that trim keep little of some layers, but not nothing.
    same = [
        layer
        for layer, size in sizes.items()
        if size[merged]
        <= ROUNDING * size[0]
        < max(size[position] for position in statistics.expert_positions.values())
    ]
    if 0 < len(same) < len(sizes):
        text = "layers of the merged model that equal the base's though experts change them: "
        hint = "Were these layers merged? Check the recipe's layer ranges."
        yield Finding("notice", "kept", text + shorten_list(same, 3), hint)
