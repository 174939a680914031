"""What waits of every batch: what a library reads where its forward pass begins, and what is answered or handed over.

The numbers are those of docs/architecture.md, "What a device is waited for".
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import driftlens as dl
from driftlens.data import live
from driftlens.engine import pool
from driftlens.engine.pool import LayerMap, ModelPool
from driftlens.jobs.analyze import evaluation
from driftlens.models.language import generation
from tests.accelerator.counting import Apart, Waits, of_phases, plant, since, waited
from tests.zoo.cases import perturbed, with_seed
from tests.zoo.suite import PAIRS, Suite
from tests.zoo.vlms import picture_spec, saved_vlms

pytestmark = pytest.mark.slow

FORMS = ("decoder", "encoder-decoder")
BEGINNINGS: dict[str, dict[str | int, Waits]] = {
    "decoder": {"begun": (1, 0, 0), 1: (1, 0, 0)},
    "encoder-decoder": {"begun": (3, 0, 0), 1: (3, 0, 0)},
    "LLaVA": {"begun": (3, 2, 0), 5: (3, 0, 0)},
    "Qwen3-VL": {
        "begun": (20, 10, 3),
        1: (1, 2, 1),
        **dict.fromkeys((2, 3, 4), (0, 3, 0)),
        5: (13, 4, 2),
    },
}
"""Of a batch of one sample at most: before the layers, and in layers by number, of others none.

The fifth is the projector here, behind three blocks of a tower; those of Qwen read which patches are whose.
"""


def heard(patch: pytest.MonkeyPatch, spec: dict[str, Any], out: Path, size: int) -> tuple[Any, Apart]:
    """Waits by phases, and apart from these where batches begin, layer by layer, and where it's answered."""
    apart, call = Apart(), LayerMap.__call__

    def crossing(self: LayerMap, *given: Any) -> Any:
        return apart.listening(call, self.layer.index)(self, *given)  # type: ignore[arg-type]

    patch.setattr(LayerMap, "__call__", crossing)
    for owner, called in ((ModelPool, "begun"), (ModelPool, "library_states"), (evaluation, "generate")):
        patch.setattr(owner, called, apart.listening(getattr(owner, called), called))
    spec["data"]["defaults"] = {"n": 2, "n_diagnosis": 4, "batch_size": size}
    return of_phases(spec, out, apart), apart


def more_than(most: dict[str | int, Waits], apart: Apart) -> list[str | int]:
    """Where there was waited more often than so many times a call."""
    places = [place for place in apart.calls if place not in ("library_states", "generate")]
    found = {place: (apart.read[place], apart.to_host[place], apart.to_device[place]) for place in places}
    return [
        place
        for place, numbers in found.items()
        if any(
            number > apart.calls[place] * each
            for number, each in zip(numbers, most.get(place, (0, 0, 0)), strict=True)
        )
    ]


@pytest.mark.parametrize("name", BEGINNINGS)
def test_a_batch_waits_where_it_begins(
    sim: torch.device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    """Padding, and tokens that a model doesn't know, are looked for before texts leave the host."""
    if name in FORMS:
        suite = Suite(name, tmp_path, learns=False)
        spec = suite.spec({"a": suite.data("a", PAIRS)})
    else:
        saved_vlms(name, tmp_path)
        spec = picture_spec(tmp_path, metrics={"jacobian": False})
    with monkeypatch.context() as patch:
        wide, at_once = heard(patch, spec, tmp_path / "wide", 4)
    with monkeypatch.context() as patch:
        narrow, apart = heard(patch, spec, tmp_path / "narrow", 1)
    assert wide == narrow and at_once.calls["library_states"] == apart.calls["library_states"]
    assert not more_than(BEGINNINGS[name], apart)
    if name == FORMS[0]:
        plant(monkeypatch, pool, "on_device", lambda _, made: made)
        assert more_than(BEGINNINGS[name], heard(monkeypatch, spec, tmp_path / "planted", 1)[1]) == ["begun"]


def asked(sim: torch.device, form: str, folder: Path) -> tuple[Suite, Any]:
    suite = Suite(form, folder, learns=False)
    return suite, suite.model.to(sim).eval()


ANSWERED = {"decoder": (4, 2, (0, 1)), "encoder-decoder": (3, 2, (0, 2))}
"""What the library reads of a batch at most: before the first token and behind each; copies that it makes."""


@pytest.mark.parametrize("is_planted", [False, True], ids=["as it is", "planted"])
@pytest.mark.parametrize("form", FORMS)
def test_answers_wait_token_by_token_and_are_copied_once(
    sim: torch.device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, form: str, is_planted: bool
) -> None:
    suite, module = asked(sim, form, tmp_path)
    first, behind, copies = ANSWERED[form]
    if is_planted:
        plant(monkeypatch, generation, "fitted", lambda _, made: made)
    own = module.generate
    for num_tokens, size in ((4, 8), (8, 8), (8, 4)):
        apart, before = Apart(), waited()
        monkeypatch.setattr(module, "generate", apart.listening(own, "library"))
        generation.generate(
            module, suite.reader, [question for question, _ in PAIRS], num_tokens, batch_size=size
        )
        batches = apart.calls["library"]
        assert batches == len(PAIRS) // size
        assert apart.read["library"] <= batches * (first + behind * num_tokens)
        assert (apart.to_host["library"], apart.to_device["library"]) == tuple(batches * n for n in copies)
        assert apart.outside(since(before), (0, 0, 0)) == (batches * is_planted, batches, 0)


@pytest.mark.parametrize("is_planted", [False, True], ids=["as it is", "planted"])
@pytest.mark.parametrize("form", FORMS)
def test_likelihoods_are_copied_once_for_all_answers(
    sim: torch.device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, form: str, is_planted: bool
) -> None:
    """The library reads its mask for each, a decoder's twice where it pads, and where questions are encoded."""
    suite, module = asked(sim, form, tmp_path)
    if is_planted:
        plant(monkeypatch, generation, "_of_tokens", lambda given, _: given[0])
    questions = [question for question, _ in PAIRS]
    for answers in (["yes", "no it"], ["yes", "no it", "red", "blue is green"]):
        before = waited()
        generation.log_likelihoods(module, suite.reader, questions, [answers] * len(questions))
        read, to_host, to_device = since(before)
        most = 2 * len(answers) if form == "decoder" else 1 + len(answers)
        assert (to_host, to_device) == (1, 0)
        assert (read <= most) != is_planted


def test_batches_that_lie_on_the_device_are_copied_once(
    sim: torch.device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    base = with_seed(lambda: nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))))()
    merged, expert = (perturbed(base, seed, 0.1).to(sim) for seed in (1, 2))
    x, seen = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)).to(sim), []
    for size in (8, 2):
        with monkeypatch.context() as patch:
            apart = Apart()
            patch.setattr(live, "_parsed", apart.listening(live._parsed, "read"))
            before = waited()
            dl.analyze(
                merged=merged,
                experts={"task": expert},
                data={"task": [*x.split(size)]},
                out=tmp_path / f"{size}",
                jacobian=False,
                batch_size=size,
                device="sim",
                progress="none",
            )
            seen.append(apart.outside(since(before), (0, 0, 0)))
            assert apart.calls["read"] == apart.to_host["read"] == len(x) // size
    assert seen[0] == seen[1]
