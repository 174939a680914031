"""Live modules whose final output is one vector per token: scores are of pooled features, everywhere."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor, nn

import driftlens as dl
from driftlens.config.requests import AnalysisRequest
from driftlens.models.chain import pool_features
from driftlens.pipelines.analyze import analyze
from driftlens.utils.errors import SpecError
from tests.families import OPEN_CLIP, STACK, TRANSFORMERS_CLIP
from tests.quick import few
from tests.zoo.cases import perturbed, with_seed
from tests.zoo.suite import CLASSES, PAIRS, Suite
from tests.zoo.world import MODEL, TRANSFORMERS

NAMES, WIDTH, N, LENGTH = ("cat", "dog", "fox"), 6, 9, 4


class Residual(nn.Module):
    """x + tanh(linear(x)), token by token."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Tokens(nn.Module):
    """Tokens in, tokens out; padding is nobody's business but that of who pools."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def given(pool: Any) -> dict[str, Any]:
    base = with_seed(Tokens)().eval()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, LENGTH, WIDTH, generator=generator)
    mask = torch.arange(LENGTH) < torch.tensor([4, 3, 2, 4, 3, 2, 4, 3, 2])[:, None]
    rows = nn.functional.normalize(torch.randn(3, WIDTH, generator=generator), dim=1)
    return {
        "merged": perturbed(base, 1, 0.3),
        "experts": {"task": perturbed(base, 2, 0.3)},
        "data": {"task": [({"x": x, "attention_mask": mask.long()}, torch.arange(N) % 3)]},
        "heads": {"task": dl.Head(NAMES, rows, 10.0)},
        "pool": pool,
    }


@pytest.mark.slow
@STACK
@pytest.mark.shows(heads="class embeddings")
@pytest.mark.parametrize("pool", ["mean", "last"])
def test_scores_are_taken_behind_the_pooling(pool: Any, tmp_path: Path) -> None:
    modules = given(pool)
    run = dl.analyze(
        **modules,
        out=tmp_path / "run",
        progress="none",
        jacobian=dl.JacobianSettings(samples=N),
        adjoint=True,
    )
    ((batch, labels),) = modules["data"]["task"]
    head, mask = modules["heads"]["task"], batch["attention_mask"].bool()
    with torch.no_grad():
        outs = {"expert": modules["experts"]["task"](**batch), "merged": modules["merged"](**batch)}
        scores = {name: head.scores(pool_features(out, pool, mask)) for name, out in outs.items()}
    for name, found in scores.items():
        hits = (found.argmax(dim=1) == labels).double().mean().item()
        assert run.accuracy(variant=name)["value"].tolist() == pytest.approx([hits]), name
    told = run.outputs(variant="merged")
    assert told["pred"].tolist() == [NAMES[at] for at in scores["merged"].argmax(dim=1)]
    loss = [nn.functional.cross_entropy(found, labels, reduction="none") for found in scores.values()]
    drift = (outs["merged"] - outs["expert"]).masked_fill(~mask[..., None], 0)
    wanted = {"loss": loss[1] - loss[0], "final_drift": torch.ones(N)}
    rows = run.adjoint(variant="merged")
    assert bool((drift.flatten(1).norm(dim=1) > 0).all())
    for target, change in wanted.items():
        parts = rows[rows["target"] == target].groupby("sample_id", sort=False)
        assert parts["change"].first().tolist() == pytest.approx(change.tolist(), rel=1e-4, abs=1e-5)
        assert parts["part"].sum().tolist() == pytest.approx(change.tolist(), rel=1e-2, abs=1e-3)


@STACK
@pytest.mark.shows(heads="nn.Linear")
def test_a_linear_classifier_scores_models(tmp_path: Path) -> None:
    modules = given("mean")
    linear = with_seed(lambda: nn.Linear(WIDTH, 3))()
    run = dl.analyze(**modules | {"heads": {"task": linear}}, out=tmp_path / "run", progress="none")
    ((batch, labels),) = modules["data"]["task"]
    with torch.no_grad():
        out = modules["merged"](**batch)
        scores = linear(pool_features(out, "mean", batch["attention_mask"].bool()))
    hits = (scores.argmax(dim=1) == labels).double().mean().item()
    assert run.accuracy(variant="merged")["value"].tolist() == pytest.approx([hits])


def test_a_head_that_does_not_fit_is_refused_before_a_run_is_begun(tmp_path: Path) -> None:
    modules = given("mean") | {"heads": {"task": nn.Linear(WIDTH + 1, 3)}}
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        dl.analyze(**modules, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


PAGE = Path(__file__).resolve().parents[2] / "docs/live.md"


@pytest.mark.slow  # test_live_calibrate.py goes the same way in pieces
def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    assert {"at-rho-1", "featcal"} == set(names["run"].manifest.calibrations)  # type: ignore[attr-defined]
    assert (tmp_path / "calibrated/model.safetensors").is_file()
    assert (tmp_path / "report/report.html").is_file()


WORDS = {"no it": "yes", "no is": "red", "yes": "green"}
RULES: dict[str, dict[str, Any]] = {
    "free": {"metric": ["exact_match", "perplexity"], "prompt": "question : {input}"},
    "pick": {"classes": ["no it", "no is", "yes"]},
    "word": {"words": WORDS},
}
ROWS = {"free": PAIRS, "pick": [*CLASSES.items()], "word": [*CLASSES.items()]}


def suite_of(form: str, folder: Path) -> tuple[Suite, dict[str, Any]]:
    """Models in files, and the same in memory; the expert is a base of other weights."""
    suite = Suite(form, folder, learns=False)
    base, expert = (type(suite.model).from_pretrained(folder / name).eval() for name in ("base", "expert"))
    for parameter in expert.parameters():
        parameter.data.mul_(1.1)
    suite.model = expert
    suite.save("expert")
    return suite, {"base": base, "merged": base, "experts": dict.fromkeys(ROWS, expert)}


@pytest.mark.slow
@pytest.mark.parametrize("form", few(["decoder", "encoder-decoder"], (), some=["decoder"]))
def test_scores_are_those_of_the_same_models_in_files(form: str, tmp_path: Path) -> None:
    suite, modules = suite_of(form, tmp_path)
    data = {task: suite.data(task, ROWS[task], **RULES[task]) for task in ROWS}
    spec = suite.spec(data)
    spec["data"]["defaults"]["n_diagnosis"] = 4
    spec["data"]["free"]["n_diagnosis"] = len(PAIRS)
    files = analyze(spec, AnalysisRequest(out=tmp_path / "files", attribution=False))
    shown = {"calibration": {task: rows[:2] for task, rows in ROWS.items()}, "texts": RULES}
    live = dl.analyze(**modules, data=ROWS, tokenizer=suite.tokenizer, **shown, out=tmp_path / "live", progress="none")
    for table, key in (("accuracy", "metric"), ("outputs", "sample_id")):
        one, other = (
            getattr(run, table)().sort_values(["task", "variant", key]).reset_index(drop=True) for run in (files, live)
        )  # lines of a file are counted from 1, rows from 0
        pd.testing.assert_frame_equal(
            one.drop(columns="sample_id", errors="ignore"),
            other.drop(columns="sample_id", errors="ignore"),
            rtol=1e-5,
            atol=1e-4,  # scores as large as 30 in float32, and differences of such
        )
    assert live.manifest.architecture["tokenizer"] == files.manifest.architecture["tokenizer"]
    assert live.manifest.classes == files.manifest.classes
    again = live.calibrate(dl.FeatCal(lam=0.01, rho=1.0, update=("linear",)), name="fc")
    assert set(again.accuracy(variant="calibrated:fc")["metric"]) == set(files.accuracy()["metric"])
    bare = dl.open_run(live.path)
    with pytest.raises(SpecError, match="tokenizer"):
        bare.calibrate(dl.FeatCal(), name="no", modules={**modules, "data": ROWS})
    fitted = dl.FeatCal(lam=0.01, rho=1.0, update=("linear",)).fit(
        modules["merged"], modules["base"], modules["experts"], ROWS, tokenizer=suite.tokenizer, texts=RULES
    )
    assert len(fitted.history_)


SIZES = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 40,
}


def whole_hf() -> nn.Module:
    from transformers import CLIPConfig, CLIPModel

    text = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "vocab_size": 32,
    }
    vision = {key: value for key, value in TRANSFORMERS.items() if key != "projection_dim"}
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8))


def whole_open_clip() -> nn.Module:
    import open_clip

    return open_clip.CLIP(**MODEL)


def features(model: nn.Module, x: Tensor) -> Tensor:
    if hasattr(model, "encode_image"):
        return model.encode_image(x)
    return model.visual_projection(model.vision_model(x).pooler_output)


def clips(build: Callable[[], nn.Module], batch: Any) -> dict[str, Any]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        base = build()
    return {
        "base": base,
        "merged": perturbed(base, 1, 0.05).train(),
        "experts": {"cars": perturbed(base, 2, 0.05)},
        "data": {"cars": [batch]},
    }


@pytest.mark.slow
@pytest.mark.shows("live", "drift", "sites")
@pytest.mark.parametrize(
    "build",
    [
        pytest.param(whole_hf, id="hf", marks=TRANSFORMERS_CLIP),
        pytest.param(whole_open_clip, id="open_clip", marks=OPEN_CLIP),
    ],
)
def test_a_whole_clip_is_measured_and_calibrated_by_its_image_tower(
    build: Callable[[], nn.Module], tmp_path: Path
) -> None:
    x = torch.randn(6, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    tokens = torch.ones(6, 4, dtype=torch.long)
    plain = dl.analyze(**clips(build, x), out=tmp_path / "plain", progress="none")
    processed = {"input_ids": tokens, "attention_mask": tokens, "pixel_values": x}
    modules = clips(build, processed)
    run = dl.analyze(**modules, out=tmp_path / "run", progress="none")
    pd.testing.assert_frame_equal(run.layers(), plain.layers())
    with torch.no_grad():
        wanted = [features(model.eval(), x) for model in (clips(build, x)["merged"], modules["experts"]["cars"])]
    found = run.value("drift_l2_mean", task="cars")
    assert found == pytest.approx((wanted[0] - wanted[1]).norm(dim=1).mean().item(), rel=1e-4)
    assert modules["merged"].training and list(plain.manifest.notices) == []
    assert list(run.manifest.notices) == [
        "task cars: inputs input_ids, attention_mask are ignored; the image tower reads pixel_values"
    ]
    state = run.calibrate(dl.FeatCal(), name="featcal").calibrated_state("featcal")
    fitted = dl.FeatCal().fit(*(modules[name] for name in ("merged", "base", "experts", "data")))
    for key, value in fitted.model_.state_dict().items():
        torch.testing.assert_close(state[key], value, rtol=1e-5, atol=1e-6, msg=key)
