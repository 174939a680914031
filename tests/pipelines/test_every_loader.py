"""Every loader there is: merged and calibrated folders hold, tensor by tensor, what the method says of them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers

import driftlens as dl
from driftlens.models.architecture import Architecture, load_architecture, loaders
from driftlens.models.texts import TextSample
from tests.quick import paced
from tests.zoo import saved_families, seq2seq, world
from tests.zoo.cases import perturbed, with_seed
from tests.zoo.decoders import CONFIGS
from tests.zoo.encoders import encoder, save
from tests.zoo.sentences import sentences
from tests.zoo.suite import files_of, spec_of_folders
from tests.zoo.tensors import assert_every_tensor, site_keys
from tests.zoo.tokenizers import WORDS, word_tokenizer
from tests.zoo.vlms import saved_vlms, text_spec

TASKS = {"a": ("yes", "no"), "b": ("red", "green", "blue")}


class Made(NamedTuple):
    """A spec of models on disk, the base's place, the experts', each task's own, and how many tensors none changes."""

    spec: dict[str, Any]
    base: Path
    experts: list[Path]
    heads: tuple[str, ...] = ()
    shared: int = 0


def of_folders(loader: str, save_as: Callable[[str, int, Path], object], folder: Path, data: Any) -> Made:
    """What `save_as(name, seed, place)` saves: the base and an expert a task."""
    for seed, name in enumerate(("base", *TASKS)):
        save_as(name, seed, folder / name)
    spec = spec_of_folders(
        loader,
        folder / "base",
        {task: folder / task for task in TASKS},
        {"defaults": {"n": 12, "n_diagnosis": 6, "batch_size": 5}, **data(folder)},
    )
    heads = load_architecture(loader, str(folder / "base")).classifier
    return Made(spec, folder / "base", [folder / task for task in TASKS], (f"{heads}.",) if heads else ())


def texts(folder: Path) -> dict[str, Any]:
    """Questions in other words for every task, whose answers are words, too."""
    for first, (task, answers) in enumerate(TASKS.items()):
        questions = map(" ".join, itertools.permutations(WORDS[5 * first : 5 * first + 5], 3))
        rows = [json.dumps({"input": text, "target": answers[at % len(answers)]}) for at, text in enumerate(questions)]
        for split, part in (("train", rows[::2]), ("test", rows[1::2])):
            (folder / f"{task}-{split}.jsonl").write_text("\n".join(part))
    return {task: files_of(folder, task, classes=True) for task in TASKS}


def images(folder: Path, size: int) -> dict[str, Any]:
    for seed, (task, classes) in enumerate(TASKS.items()):
        world.write_images(folder / f"{task}.npz", classes, seed, train=12, size=size)
    return {task: {"kind": "npz", "file": str(folder / f"{task}.npz")} for task in TASKS}


def decoder(folder: Path) -> Made:
    base = with_seed(lambda: transformers.AutoModelForCausalLM.from_config(CONFIGS["Qwen3"]))()

    def save_as(_name: str, seed: int, place: Path) -> None:
        perturbed(perturbed(base, 0, 0.2), seed, 0.1 * bool(seed)).save_pretrained(place)
        word_tokenizer().save_pretrained(place)

    return of_folders("hf-decoder", save_as, folder, texts)


def pair(loader: str, name: str, folder: Path) -> Made:
    base = seq2seq.model(name)

    def save_as(_name: str, seed: int, place: Path) -> None:
        seq2seq.save(perturbed(base, seed, 0.1 * bool(seed)), place)

    made = of_folders(loader, save_as, folder, texts)
    return made._replace(shared=int(any("final_logits_bias" in key for key in base.state_dict())))


def bert(folder: Path) -> Made:
    base = encoder("BERT", 3, seed=0)

    def save_as(name: str, seed: int, place: Path) -> None:
        model = perturbed(base, seed, 0.1 * bool(seed))
        model.config.num_labels = 3
        save(model, place, TASKS["b"])

    def data(place: Path) -> dict[str, Any]:
        return {"b": texts(place)["b"]}

    made = of_folders("hf-encoder", save_as, folder, data)
    made.spec["experts"].pop("a")
    known = load_architecture("hf-encoder", str(folder / "base"))
    assert known.own_head is not None
    return made._replace(experts=[folder / "b"], heads=tuple(known.own_head.names.values()))


def sentence_folder(folder: Path) -> Made:
    made = of_folders("hf-encoder", lambda _name, seed, place: sentences(place, seed), folder, texts)
    return made._replace(heads=("pooler.",))  # BERT's, which no embedding reads


def images_of(name: str, folder: Path) -> Made:
    family = saved_families.FAMILIES[name]

    def save_as(task: str, seed: int, place: Path) -> None:
        names = TASKS.get(task, ())
        saved_families.save(family, saved_families.trained(family, len(names) or 4, seed), place, names)

    return of_folders(family.loader, save_as, folder, lambda place: images(place, family.size))


def clip(form: world.Form, folder: Path) -> Made:
    built = world.build(folder / "world")
    base, *experts = (built.weights(name, form) for name in built.names)
    unchanged = sum(not key.startswith("visual.") for key in built.state("base")) if form == "open_clip" else 0
    return Made(built.spec(form, metrics={"jacobian": False}), base, experts, (), unchanged)


def vlm(folder: Path) -> Made:
    saved_vlms("LLaVA", folder)
    return Made(text_spec(folder), folder / "base", [folder / task for task in TASKS])


MADE: dict[str, tuple[str, Callable[[Path], Made]]] = {
    "Qwen3": ("hf-decoder", decoder),
    "T5": ("hf-t5", lambda folder: pair("hf-t5", "T5", folder)),
    "BART": ("hf-seq2seq", lambda folder: pair("hf-seq2seq", "BART", folder)),
    "BERT": ("hf-encoder", bert),
    "sentence-transformers": ("hf-encoder", sentence_folder),
    "ViT": ("hf-vit", lambda folder: images_of("ViT", folder)),
    "Swin": ("hf-auto", lambda folder: images_of("Swin", folder)),
    "timm ViT": ("timm", lambda folder: images_of("timm ViT", folder)),
    "CLIP of transformers": ("hf-clip", lambda folder: clip("hf", folder)),
    "CLIP of open_clip": ("open-clip", lambda folder: clip("open_clip", folder)),
    "LLaVA": ("hf-vlm", vlm),
} | {
    name: ("hf-seq2seq", lambda folder, name=name: pair("hf-seq2seq", name, folder))
    for name in seq2seq.NAMES
    if name not in ("T5", "BART")
}
"""By name, the loader and what it is to open."""


FAST, SOME = ("timm ViT", "CLIP of open_clip"), ("CLIP of transformers",)
"""Those that no other test walks from files to a folder faster, and what CI walks beside them."""


def test_no_loader_is_left_out() -> None:
    assert {loader for loader, _ in MADE.values()} == set(loaders)


@pytest.mark.slow
@pytest.mark.shows("sites", "reloads")
@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=paced(name, FAST, SOME)) for name in MADE if name not in seq2seq.NAMES),
        *seq2seq.families(some=()),
        pytest.param("T5", marks=pytest.mark.slow),
    ],
)
def test_every_tensor_is_what_merging_and_calibrating_made_of_it(name: str, tmp_path: Path) -> None:
    loader, make = MADE[name]
    spec, base, experts, heads, shared = make(tmp_path)
    scaling = spec["merge"]["scaling"]
    dl.merge(spec, out=tmp_path / "merged", method="task_arithmetic", parameters={"scaling": scaling})
    run = dl.analyze(spec, out=tmp_path / "run")
    assert run.layers(variant="merged")["closure_error"].max() < 1e-4
    run = run.calibrate(dl.FeatCal(lam=1e-3, rho=1), name="small", save_weights=tmp_path / "out")
    known = load_architecture(loader, spec["architecture"]["source"])
    for place, solved in {"merged": {}, "out": site_keys(known, base)}.items():
        assert_every_tensor(
            base, experts, tmp_path / place, scaling=scaling, heads=heads, solved=solved, shared=shared
        )
    if name in seq2seq.NAMES:
        assert_reloads(known, run.features("b", "calibrated:small", layer="final"), tmp_path)


def assert_reloads(known: Architecture, measured: Any, folder: Path) -> None:
    """The library's own features of a saved encoder-decoder are those that were measured of it, in float16."""
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder / "out", dtype=torch.float64).eval()
    assert known.preprocess is not None
    rows = [json.loads(line)["input"] for line in (folder / "b-test.jsonl").read_text().splitlines()]
    with torch.no_grad():
        answers = [model(**known.preprocess([TextSample(row)]), output_hidden_states=True) for row in rows]
    features = torch.cat([answer.decoder_hidden_states[-1][:, -1] for answer in answers])
    nearest = torch.cdist(torch.tensor(measured).double(), features).min(dim=1).values
    assert nearest.max() < 1e-3 * features.norm(dim=1).max()
