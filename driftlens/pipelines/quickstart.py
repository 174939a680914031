"""Quick diagnosis: the spec of a small analysis from models alone, and from data if there is some.

Entry points: `models_by_role` for the models on a command line, then `draft`.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from driftlens.checkpoints.loading import (
    fetch_config_folder,
    fetch_if_hub_id,
    find_config_folder,
    is_hub_id,
    is_lora_folder,
    open_checkpoint,
    read_config,
    read_json,
)
from driftlens.checkpoints.unsupported import detect_family, detect_loader, has_image_processor, loader_hint
from driftlens.config.spec import (
    MergekitRecipe,
    RunSpec,
    is_mergekit_recipe,
    load_spec,
    parse_recipe,
    set_spec_value,
)
from driftlens.config.types import read_yaml_mapping, to_yaml
from driftlens.demo import PROBES
from driftlens.utils.distributed import Permissions
from driftlens.utils.errors import DataError, SpecError, pluralize
from driftlens.utils.files import expand_home

if TYPE_CHECKING:
    from driftlens.config.data import DataDefaults
    from driftlens.data.sources import SplitView

# Samples per task at most: enough for an interval, few enough for a minute with two experts of 270M parameters.
COUNTS = {"n": 32, "n_diagnosis": 12, "n_test": 64}
# Samples per batch: small, as larger ones were slower in models of 100 to 270M parameters.
BATCH = 8
# Samples per task whose drift is attributed to layers, and nodes of each integral.
TRACED, NODES = 4, 2
# Most different answers of a task that are still scored as classes, and the number of answers that are looked at.
MAX_CLASSES, _READ_ANSWERS = 20, 1280
_PROMPT = "a photo of a {}."
_IMAGE_LOADERS = ("open-clip", "hf-clip", "hf-vit", "timm")
_CLIPS = ("open-clip", "hf-clip")
# Names of files and folders that do not name a task.
_GENERIC = re.compile(r"(pytorch_)?model|adapter_model|finetuned|final|best|last|expert|weights|checkpoint([-_]\d+)?")
# The usual name of an open_clip configuration next to a file of weights.
_OPEN_CLIP = "model_config.json"
_CONFIGS = ("open_clip_config.json", "config.json")


class ModelRoles(NamedTuple):
    """Base, experts by task and merged model of an analysis, and notices on automatic choices.

    `base` is None if a recipe has none; `merged` may be the settings of a merge.
    """

    base: str | None
    experts: Mapping[str, str]
    merged: str | Mapping[str, Any]
    chosen: tuple[str, ...] = ()


class DraftSpec(NamedTuple):
    """A generated spec, its YAML text, and notices on automatic choices."""

    spec: RunSpec
    text: str
    chosen: tuple[str, ...]


def _read_recipe(models: Sequence[str]) -> MergekitRecipe | None:
    """Read a mergekit recipe given instead of base and experts; None if the first path is no YAML file."""
    if not models or Path(models[0]).suffix.lower() not in (".yaml", ".yml"):
        return None
    content = read_yaml_mapping(expand_home(models[0]), "recipe", "Give a recipe of mergekit, or models.")
    if not is_mergekit_recipe(content):
        raise SpecError(
            f"{models[0]} is not a mergekit recipe",
            hint=f"For a spec, run `driftlens analyze {shlex.quote(models[0])}`; else give BASE EXPERT... MERGED.",
        )
    return parse_recipe(content)


def run_recipe(models: Sequence[str], out: Path, *, force: bool, offline: bool) -> list[str]:
    """Run a lone mergekit recipe with `mergekit-yaml`; return the models with the merged one added.

    Raises:
        SpecError: mergekit is not installed, or its run failed.
    """
    if len(models) > 1 or _read_recipe(models) is None:
        return [*models]
    from driftlens.runs.writer import refuse_occupied_folder

    refuse_occupied_folder(out, force=force)
    recipe, file = models[0], shlex.quote(models[0])
    program = shutil.which("mergekit-yaml")
    if program is None:
        raise SpecError(
            f"there is no merged model after {recipe}, and mergekit-yaml is not installed to make it",
            hint=f"Make the merge first: mergekit-yaml {file} merged/, then: driftlens why {file} merged/",
        )
    # The card would ask the Hub.
    command = [program, recipe, str(out), "--no-write-model-card"]
    environment = {**os.environ, **({"HF_HUB_OFFLINE": "1"} if offline else {})}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace")
    if done.returncode:
        last = [line for line in done.stderr.splitlines() if line.strip()][-1:]
        raise SpecError(
            f"mergekit-yaml could not merge {recipe}: {''.join(last) or f'exit status {done.returncode}'}",
            hint=f"Run it alone to see its whole output: mergekit-yaml {file} {shlex.quote(str(out))}",
        )
    return [*models, str(out)]


def has_merged_model(models: Sequence[str]) -> bool:
    """Return True if the last model is a merged one: no expert named TASK=MODEL, and not the only one."""
    task, sign, _ = models[-1].partition("=")
    is_named_expert = bool(sign and task) and not expand_home(models[-1]).exists()
    return not is_named_expert and len(models) > (1 if _read_recipe(models) else 2)


def models_by_role(models: Sequence[str], *, is_merged: bool = True) -> ModelRoles:
    """Assign base, experts and merged model from a list in this order, or from a mergekit recipe.

    `is_merged` is False if there is no merged model yet.
    """
    recipe = _read_recipe(models)
    base, experts, names, chosen = None, list[str](), dict[str, str](), tuple[str, ...]()
    merge: dict[str, Any] = {"method": "task_arithmetic", "scaling": 0.3}
    if not is_merged:
        models = [*models, ""]
    if recipe is not None:
        base, merged, experts, merge = recipe.base, models[-1], [*recipe.experts], dict(recipe.merge)
        if base is None:
            chosen = (f"the recipe ({recipe.method}) names no base: task vectors are not measured",)
        if not is_merged:
            nearest = f"the recipe's {recipe.method} is replaced by {merge['method']}, the nearest method"
            chosen = (*chosen, f"{nearest}; `driftlens why RECIPE MERGED` measures mergekit's own merge")
    else:
        if len(models) < 3:
            raise SpecError(
                f"expected a base, one or more experts{', and the merged model' * is_merged}, in this order; got "
                f"{pluralize(len([*filter(None, models)]), 'model')}",
                hint=f"Give BASE EXPERT EXPERT{' MERGED' * is_merged}, each a folder, a file of weights or a Hub "
                f"id; or a mergekit recipe{' and its merged model' * is_merged}.",
            )
        base, merged = models[0], models[-1]
        for expert in models[1:-1]:
            # TASK=MODEL, unless it is a path.
            task, sign, place = expert.partition("=")
            is_named = bool(sign) and not expand_home(expert).exists()
            experts.append(place if is_named else expert)
            names |= {place: task} if is_named and task else {}
    every = [name for name in (base, *experts, merged) if name]
    twice = next((name for name, count in Counter(every).items() if count > 1), None)
    if twice is not None:
        raise SpecError(f"{twice} is given twice", hint="The order is BASE EXPERT... MERGED.")
    for name in every:
        part = name if expand_home(name).exists() else name.partition("+")[0]
        if not expand_home(part).exists() and not is_hub_id(part):
            raise SpecError(f"there is no file or folder {name}", hint="Check the path.")
    for role, whole in (("base", base), ("merged model", merged)):
        if whole and is_lora_folder(expand_home(whole)):
            raise SpecError(
                f"{whole}, the {role}, holds LoRA adapters, not a whole model",
                hint="Only experts may be adapters; the order is BASE EXPERT... MERGED.",
            )
    tasks = [names.get(place, task) for place, task in zip(experts, _task_names(experts), strict=True)]
    if twice := next((task for task, count in Counter(tasks).items() if count > 1), None):
        raise SpecError(f"two tasks are called {twice}", hint="Name them: TASK=EXPERT.")
    return ModelRoles(base, dict(zip(tasks, experts, strict=True)), merged or merge, chosen)


def _task_names(experts: Sequence[str]) -> list[str]:
    """Name tasks after the experts' files, or after their folders if file names are generic."""
    names = list[str]()
    for place in experts:
        parts = reversed(Path(place.rpartition("+")[2]).parts)
        stems = [part.strip("/").removesuffix(".safetensors") for part in parts]
        stem = next((word for word in stems if not _GENERIC.fullmatch(word.lower())), stems[0])
        names.append(re.sub(r"[^\w.-]+", "-", stem) or "task")
    # "defaults" is a key of the spec's data section, so no task can have that name.
    counts, numbered = Counter(names), Counter[str]()
    for index, name in enumerate(names):
        numbered[name] += 1
        names[index] = f"{name}-{numbered[name]}" if counts[name] > 1 or name == "defaults" else name
    return names


def draft_spec(
    roles: ModelRoles, data: Sequence[str], overrides: Sequence[str], access: Permissions = Permissions()
) -> DraftSpec:
    """Build the spec of a small analysis; without data, built-in samples are used.

    Args:
        roles: the models.
        data: paths: one for all tasks, one per expert in their order, or TASK=PATH.
        overrides: `a.b=value` each.
        access: network access and trust in code.
    """
    # A loader given by the user wins: some models can't be detected.
    names_loader = any(text.startswith("architecture.loader=") for text in overrides)
    first = roles.base or next(iter(roles.experts.values()))
    architecture = {} if names_loader else _detect_architecture(first, access)
    loader = architecture.get("loader") or _override_value(overrides, "architecture.loader")
    source = architecture.get("source") or _override_value(overrides, "architecture.source")
    config = read_config(source, "config.json", offline=access.offline) if loader == "hf-auto" else None
    reads = "image" if loader in _IMAGE_LOADERS or has_image_processor(config or {}) else "text"
    entries, chosen = _data_entries([*roles.experts], data, reads)
    chosen += roles.chosen
    content: dict[str, Any] = {
        "version": 1,
        "name": "why" if isinstance(roles.merged, str) else "picked",
        "architecture": architecture,
        **({"base": {"weights": _absolute_model_path(roles.base)}} if roles.base else {}),
        "experts": {task: {"weights": _absolute_model_path(place)} for task, place in roles.experts.items()},
        **(
            {"merged": {"weights": _absolute_model_path(roles.merged)}}
            if isinstance(roles.merged, str)
            else {"merge": dict(roles.merged)}
        ),
        "data": {
            "defaults": {**COUNTS, "batch_size": BATCH},
            **entries,
        },
        "metrics": {
            "jacobian": {"nodes": NODES, "max_nodes": 4 * NODES, "samples": TRACED, "tolerance": 1e-2},
            "prefix": False,
        },
    }
    spec = load_spec(content, overrides)
    from driftlens.data.sources import open_split

    # Only the opened data shows how many samples there are, and whether class names can be prompts.
    heads: dict[str, Any] = {}
    reads_words = loader in _CLIPS and roles.base is not None and _has_text_tower(roles.base, access)
    for task, entry in spec.data.tasks.items():
        views = {split: open_split(entry, split, access) for split in ("calibration", "test")}
        content["data"][task] |= _sample_counts(views["calibration"], views["test"], spec.data.defaults, task)
        words = views["test"].class_names
        if reads == "text":
            content["data"][task] |= _answer_scoring_settings(views["test"], loader)
        elif words and reads_words and not all(word.isdecimal() for word in words):
            heads[task] = {"templates": [_PROMPT]}
    if heads:
        content["heads"] = heads
        chosen.append(f"no prompts found; using {_PROMPT!r}. Accuracy may be lower than published")
    for text in overrides:
        set_spec_value(content, text)
    return DraftSpec(load_spec(content), to_yaml(content), tuple(chosen))


def _has_text_tower(place: str, access: Permissions) -> bool:
    keys = open_checkpoint(fetch_if_hub_id(place, offline=access.offline), offline=access.offline).headers
    return any(key.endswith("token_embedding.weight") for key in keys)


def _override_value(overrides: Sequence[str], key: str) -> str:
    return next((text.partition("=")[2] for text in overrides if text.startswith(f"{key}=")), "")


def _absolute_model_path(place: str) -> str:
    """Make paths absolute, also in MODEL+ADAPTER; keep Hub ids."""
    parts = [place] if expand_home(place).exists() else place.split("+")
    return "+".join(str(expand_home(part).resolve()) if expand_home(part).exists() else part for part in parts)


def _detect_architecture(place: str, access: Permissions) -> dict[str, str]:
    """Detect the loader of a model from the configuration in its folder or next to its file."""
    whole = place if expand_home(place).exists() else place.partition("+")[0]
    folder = find_config_folder(whole)
    # `base/base.safetensors` looks like a Hub id, but a file that exists is one.
    if folder is None and not expand_home(whole).exists():
        folder = fetch_config_folder(whole, offline=access.offline)
    for name in _CONFIGS if folder is not None else ():
        assert folder is not None
        if not (folder / name).is_file():
            continue
        source = str(folder / name) if name != "config.json" else _absolute_model_path(whole)
        if expand_home(source).is_file() and name == "config.json":
            source = str(folder.resolve())
        if loader := detect_loader(read_json(folder / name)):
            return {"loader": loader, "source": source}
    # No configuration: the names of tensors reveal the family at least, for the message.
    keys = open_checkpoint(fetch_if_hub_id(whole, offline=access.offline), offline=access.offline).headers
    family = detect_family(keys)
    by_keys = f" (its keys suggest {family.what})" if family else ""
    configuration = expand_home(whole).parent / _OPEN_CLIP
    if family and family.loader == "open-clip" and configuration.is_file():
        return {"loader": family.loader, "source": str(configuration.resolve())}
    loader = family.loader if family and family.loader not in ("", "adapters") else "LOADER"
    raise SpecError(
        f"there is no configuration next to {place}{by_keys}",
        hint=f"Give the folder that its library saved, or add --set architecture.loader={loader} --set "
        "architecture.source=SOURCE: a Hub id, a folder or an open_clip name."
        if loader != "LOADER" or not family
        else loader_hint(""),
    )


def _data_entries(
    tasks: Sequence[str], data: Sequence[str], reads: str
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    if not data:
        entry, samples = PROBES[reads]
        notice = f"no --data: using {samples} that belong to no task. Pass your own for reliable results"
        return {task: dict(entry) for task in tasks}, [notice]
    named = {name: path for name, sign, path in (text.partition("=") for text in data) if sign}
    named = {name: path for name, path in named.items() if not expand_home(f"{name}={path}").exists()}
    # Not strict: a wrong number of paths is reported below, with the tasks' names.
    places = named or dict(zip(tasks, data if len(data) > 1 else [*data] * len(tasks), strict=False))
    if {*places} != {*tasks} or len(data) not in (1, len(tasks)):
        raise SpecError(
            f"--data is given for {', '.join(places)}; the tasks are {', '.join(tasks)}",
            hint=f"Give one path for all, or one per task: {' '.join(f'--data {task}=PATH' for task in tasks[:3])}.",
        )
    from driftlens.data.rows import infer_data_entry

    entries = {task: infer_data_entry(expand_home(path), reads=reads) for task, path in places.items()}
    return {task: dict(entry) for task, entry in entries.items()}, []


def _sample_counts(calibration: SplitView, test: SplitView, defaults: DataDefaults, task: str) -> dict[str, int]:
    """Return how many samples of a split there are, where that is fewer than the default number.

    If all splits share one source, most samples are used for measurements.
    """
    is_one = calibration.origin == test.origin
    most = len(calibration) // 4 if is_one else len(calibration)
    num_left = len(test) - (min(defaults.n, most) if is_one else 0)
    if most < 1 or num_left < 2:
        raise DataError(
            f"task {task}: {test.origin} holds only {len(test)} samples",
            hint="Give a few dozen; labels are optional.",
        )
    asked = {name: getattr(defaults, name) for name in COUNTS}
    found = {"n": most, "n_diagnosis": num_left, "n_test": num_left}
    return {name: count for name, count in found.items() if asked[name] != "all" and count < asked[name]}


def _answer_scoring_settings(view: SplitView, loader: str) -> dict[str, Any]:
    """Return how to score answers: as classes if there are few distinct ones, else by perplexity."""
    answers = [view.read(position).target for position in range(min(len(view), _READ_ANSWERS))]
    if not all(answers):
        return {}
    if len({*answers}) <= min(MAX_CLASSES, len(answers) // 2):
        return {"classes": True}
    return {"metric": "perplexity"} if loader in ("hf-decoder", "hf-seq2seq", "hf-t5", "hf-vlm") else {}
