"""What a newcomer gets wrong first: one paragraph of what came, one of what to do, and nothing left behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.cli.conftest import Cli
from tests.zoo.decoders import CONFIGS, saved
from tests.zoo.world import World, merged_weights, save_transformers

Given = list[str]


@pytest.fixture
def asked(world: World, tmp_path: Path) -> Given:
    """`why` of a base, an expert and their merge, which would be answered."""
    save_transformers(merged_weights(world), tmp_path / "merged")
    task = world.tasks[0]
    models = [str(world.weights(name, "hf")) for name in ("base", task)]
    return ["why", *models, str(tmp_path / "merged"), "--out", str(tmp_path / "run"), "--offline"]


def instead(at: int, make: Callable[[Path], str]) -> Callable[[Given, Path], Given]:
    """The same question with another base (1), expert (2) or merge (3)."""
    return lambda given, folder: [*given[:at], make(folder), *given[at + 1 :]]


def with_data(**arrays: Any) -> Callable[[Given, Path], Given]:
    def asking(given: Given, folder: Path) -> Given:
        np.savez(folder / "images.npz", **arrays)
        return [*given, "--data", str(folder / "images.npz")]

    return asking


def pickled(folder: Path) -> str:
    torch.save(torch.nn.Linear(2, 2), folder / "whole.pt")
    return str(folder / "whole.pt")


def of_other_shapes(folder: Path) -> str:
    from safetensors.torch import load_file

    state = load_file(folder / "merged" / "model.safetensors")
    key = next(key for key in state if key.endswith("vision_model.encoder.layers.0.mlp.fc1.weight"))
    save_file(
        {**state, key: torch.zeros(len(state[key]) + 1, state[key].shape[1])}, folder / "wide.safetensors"
    )
    return str(folder / "wide.safetensors")


def of_another_family(folder: Path) -> str:
    saved(CONFIGS["Llama, untied"], folder / "llama", 0)
    return str(folder / "llama")


def rows(text: str) -> Callable[[Given, Path], Given]:
    """Rows of texts that are asked of a language model."""

    def asking(given: Given, folder: Path) -> Given:
        for seed, name in enumerate(("base", "one", "both")):
            saved(CONFIGS["Llama, untied"], folder / name, seed)
        (folder / "rows.csv").write_text(text)
        models = [str(folder / name) for name in ("base", "one", "both")]
        return ["why", *models, *given[4:], "--data", str(folder / "rows.csv")]

    return asking


def in_use(given: Given, folder: Path) -> Given:
    (folder / "run").mkdir()
    (folder / "run" / "thesis.tex").write_text("mine")
    return given


PIXELS = np.zeros((12, 16, 16, 3), np.uint8)
REFUSALS: dict[str, tuple[Callable[[Given, Path], Given], str, str]] = {
    "no such folder": (
        instead(2, lambda folder: str(folder / "exprt")),
        "there is no file or folder",
        "Check the path",
    ),
    "a hub name without network": (
        instead(1, lambda folder: "nobody/base"),
        "nobody/base on the Hub can't be had",
        "hf download nobody/base",
    ),
    "a pickled checkpoint": (instead(2, pickled), "holds more than tensors", "state = model.state_dict()"),
    "an expert of other shapes": (instead(2, of_other_shapes), "fc1.weight", "another model size"),
    "a merge of another family": (
        instead(3, of_another_family),
        "a language model of transformers",
        "of one architecture",
    ),
    "no column of texts": (rows("label,words\nyes,it rains\n"), "there are label, words", "`input`"),
    "a file without rows": (rows(""), "rows.csv", ""),
    "labels out of range": (
        with_data(x=PIXELS, y=np.arange(12), class_names=np.array(["cat", "dog"])),
        "label 2 is outside 0 to 1",
        "count from 0",
    ),
    "no images": (with_data(pictures=PIXELS), "no item named 'x_train.npy'", ""),
    "too few samples": (with_data(x=PIXELS[:2]), "holds 2 samples, too few", "few dozen"),
    "an occupied folder": (in_use, "is not empty", "--force"),
    "a command's typo": (lambda given, folder: ["wy", *given[1:]], "Did you mean 'why'?", "driftlens --help"),
    "a flag's typo": (lambda given, folder: [*given, "--dat", "x"], "--data", "driftlens why --help"),
    "a choice's typo": (
        lambda given, folder: ["demo", "--suite", "txt"],
        "'--suite': 'txt' is not one of",
        "--help",
    ),
    "a setting's typo": (
        lambda given, folder: [*given, "--set", "compute.devise=cpu"],
        "compute.devise: unknown key",
        "Did you mean 'device'?",
    ),
    "no such run": (
        lambda given, folder: ["show", str(folder / "runs")],
        "there is no such folder",
        "driftlens demo",
    ),
}


@pytest.mark.parametrize(
    ("spoil", "said", "way"),
    [pytest.param(*case, id=name) for name, case in REFUSALS.items()],
)
def test_a_first_mistake_is_answered_in_two_paragraphs(
    spoil: Callable[[Given, Path], Given], said: str, way: str, asked: Given, tmp_path: Path, run_cli: Cli
) -> None:
    given = spoil(asked, tmp_path)
    before = {*tmp_path.rglob("*")}
    done = run_cli(*given)
    assert done.code in (2, 4) and not done.out and "Traceback" not in done.err, done.err
    assert done.err.startswith("error: ") and "\n" not in done.message, (
        "the refusal comes first, in one paragraph"
    )
    assert said in done.message and done.hint and way in done.hint, done.err
    assert {path for path in tmp_path.rglob("*") if "probe" not in path.name} == before
