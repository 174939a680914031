"""Modules of every kind handed in as they are: their drift is right, or they are refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from torch import Tensor, nn

import driftlens as dl
from driftlens.engine.pool import ModelPool
from driftlens.engine.walk import LibraryDrift
from driftlens.pipelines import analyze as reopening
from driftlens.runs.run import DriftRun
from driftlens.utils.errors import IncompatibleModelsError, NumericsError, SpecError
from tests.quick import few
from tests.zoo.cases import Stack, perturbed, with_seed
from tests.zoo.small import small

WORDS = 40


def llama() -> nn.Module:
    return small("LlamaModel", vocab_size=WORDS, num_key_value_heads=1)


def gpt2() -> nn.Module:
    return small("GPT2Model", vocab_size=WORDS, n_positions=32)


def bert(**settings: Any) -> nn.Module:
    return small("BertModel", vocab_size=WORDS, max_position_embeddings=32, **settings)


def t5() -> nn.Module:
    """Smooth, unlike the first version's, which has a ReLU."""
    return small("T5Model", vocab_size=WORDS, dropout_rate=0.0, feed_forward_proj="gated-gelu")


def words(n: int = 6, length: int = 7, seed: int = 0) -> Tensor:
    return torch.randint(2, WORDS, (n, length), generator=torch.Generator().manual_seed(seed))


def models(build: Callable[[], nn.Module], scale: float = 0.05) -> dict[str, nn.Module]:
    base = with_seed(build)().eval()
    return {name: perturbed(base, seed, scale) for name, seed in (("base", 0), ("merged", 1), ("expert", 2))}


def analyzed(given: dict[str, nn.Module], data: Any, out: Path, **options: Any) -> DriftRun:
    return dl.analyze(
        base=given["base"],
        merged=given["merged"],
        experts={"task": given["expert"]},
        data={"task": data},
        out=out,
        progress="none",
        **options,
    )


def fitted(given: dict[str, nn.Module], data: Any, calibrator: dl.FeatCal | None = None, **options: Any) -> Any:
    calibrator = calibrator or dl.FeatCal()
    return calibrator.fit(given["merged"], given["base"], {"task": given["expert"]}, {"task": data}, **options)


def final_drift(given: dict[str, nn.Module], **inputs: Tensor) -> float:
    with torch.no_grad():
        outs = [given[name](**inputs).last_hidden_state[:, -1] for name in ("merged", "expert")]
    return float((outs[0] - outs[1]).norm(dim=1).mean())


LLAMA, GPT2, BERT, T5 = map(pytest.mark.family, ("Llama", "GPT-2", "BERT", "T5 (transformers)"))


@pytest.mark.shows("live", "drift")
@pytest.mark.parametrize(
    "build",
    [
        pytest.param(llama, id="llama", marks=[LLAMA, pytest.mark.slow]),
        pytest.param(gpt2, id="gpt2", marks=GPT2),
    ],
)
def test_a_decoder_runs_without_its_cache_and_keeps_its_configuration(
    build: Callable[[], nn.Module], tmp_path: Path
) -> None:
    given = models(build)
    assert given["merged"].config.use_cache is True
    ids = words()
    run = analyzed(given, [{"input_ids": ids}], tmp_path / "run", pool="last")
    layers = run.layers(variant="merged")
    assert layers["closure_error"].max() < 1e-4
    assert layers["drift_l2_mean"].iloc[-1] == pytest.approx(final_drift(given, input_ids=ids), rel=1e-4)
    assert all(module.config.use_cache is True for module in given.values())
    fitted(given, [{"input_ids": ids}])


@pytest.mark.parametrize("blocks", ["encoder.block", "decoder.block"])
def test_what_t5_computes_from_weights_for_its_blocks_is_refused_where_it_differs(blocks: str, tmp_path: Path) -> None:
    batch = {"input_ids": words(), "decoder_input_ids": words(length=4, seed=1)}
    with pytest.raises(IncompatibleModelsError, match=rf"block '{blocks}.\d' is given '\d'.*computed from weights"):
        analyzed(models(t5), [batch], tmp_path / "run", blocks=blocks)
    with pytest.raises(IncompatibleModelsError, match="differs between base and expert:task"):
        fitted(models(t5), [batch], blocks=blocks)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@T5
@pytest.mark.shows("live", "drift", "attribution", sites="all but the position bias")
def test_t5_is_measured_and_calibrated_as_a_whole(tmp_path: Path) -> None:
    """Its position bias and its encoder's output, computed from each model's own weights, are part of the layers."""
    lengths = torch.tensor([7, 3, 5, 4, 7, 6])
    seen = (torch.arange(7) < lengths[:, None]).long()
    batch = {
        "input_ids": words(),
        "attention_mask": seen,
        "decoder_input_ids": words(length=4, seed=1),
        "decoder_attention_mask": seen[:, :4],
    }
    given = models(t5)
    run = analyzed(given, [batch], tmp_path / "run", jacobian=dl.JacobianSettings())
    found = run.layers(variant="merged")
    assert found["closure_error"].max() < 1e-4 and found["jacobian_error"].max() < 1e-3
    assert list(found["stream"].unique()) == ["encoder", "hidden"]
    assert found["final_share"].sum() + found["remainder_share"].iloc[-1] == pytest.approx(1, abs=1e-4)
    with torch.no_grad():
        outs = [given[name](**batch) for name in ("merged", "expert")]
    drift = outs[0].last_hidden_state - outs[1].last_hidden_state
    last = drift[torch.arange(6), seen[:, :4].sum(dim=1) - 1]
    assert found["drift_l2_mean"].iloc[-1] == pytest.approx(float(last.norm(dim=1).mean()), rel=1e-4)
    drift = (outs[0].encoder_last_hidden_state - outs[1].encoder_last_hidden_state) * seen[..., None]
    means = drift.sum(dim=1) / lengths[:, None]
    at_norm = found[found["path"] == "encoder.final_layer_norm"]["drift_l2_mean"].item()
    assert at_norm == pytest.approx(float(means.norm(dim=1).mean()), rel=1e-4)
    result = fitted(given, [batch], dl.FeatCal(lam=1e-5, rho=1, alpha=1.0, update=("linear",)))
    assert result is not None


class Conditioned(nn.Module):
    """Blocks scaled by what a time embedding makes of the second input."""

    def __init__(self, learned: bool = True) -> None:
        super().__init__()
        self.stem = nn.Linear(5, 6)
        self.time = nn.Linear(1, 6) if learned else None
        self.register_buffer("table", torch.linspace(0, 1, 6))
        self.blocks = nn.ModuleList(ConditionedBlock() for _ in range(3))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        condition = time * self.table if self.time is None else self.time(time)
        hidden = self.stem(x)
        for block in self.blocks:
            hidden = block(hidden, condition)
        return hidden


class ConditionedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x)) * (1 + condition)


def conditioned() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {"x": torch.randn(6, 5, generator=generator), "time": torch.rand(6, 1, generator=generator)}


def test_a_condition_computed_from_weights_is_refused_and_one_of_inputs_alone_is_not(
    tmp_path: Path,
) -> None:
    with pytest.raises(IncompatibleModelsError, match=r"'blocks\.0' is given '1', which is computed from weights"):
        analyzed(models(Conditioned), [conditioned()], tmp_path / "refused")
    given = models(lambda: Conditioned(learned=False))
    layers = analyzed(given, [conditioned()], tmp_path / "run").layers(variant="merged")
    with torch.no_grad():
        drift = given["merged"](**conditioned()) - given["expert"](**conditioned())
    assert layers["drift_l2_mean"].iloc[-1] == pytest.approx(drift.norm(dim=1).mean().item(), rel=1e-4)


def padded(more: int = 0, mask: Callable[[Tensor], Tensor] = lambda mask: mask) -> transformers.BatchEncoding:
    """Six samples of lengths 3 to 7, padded to the longest and by `more` tokens beyond."""
    lengths = torch.tensor([7, 3, 5, 4, 7, 6])
    ids = torch.nn.functional.pad(words(), (0, more))
    seen = torch.arange(ids.shape[1]) < lengths[:, None]
    return transformers.BatchEncoding({"input_ids": ids * seen, "attention_mask": mask(seen.long())})


@pytest.mark.slow
@BERT
@pytest.mark.shows("live", "attribution")
@pytest.mark.parametrize("pool", ["cls", "mean", "last", "all"])
def test_padding_changes_no_drift(pool: Any, tmp_path: Path) -> None:
    given = models(bert)
    jacobian = dl.JacobianSettings(samples=2)
    runs = [analyzed(given, [padded(more)], tmp_path / f"run{more}", pool=pool, jacobian=jacobian) for more in (0, 9)]
    one, other = (run.layers() for run in runs)
    assert max(one["closure_error"].max(), other["closure_error"].max()) < 1e-4
    # Directions are drawn anew for every shape; that padding is none of them shows in their size.
    np.testing.assert_allclose(one["random_gain_mean"], other["random_gain_mean"], rtol=0.15)
    own = ["closure_error", "jacobian_error", "random_gain_mean"]
    pd.testing.assert_frame_equal(other.drop(columns=own), one.drop(columns=own), rtol=1e-6, atol=1e-6)


@BERT
@pytest.mark.shows("drift")
def test_mean_pooled_drift_of_padded_samples_is_that_of_their_tokens(tmp_path: Path) -> None:
    given, batch = models(bert), padded(4)
    found = analyzed(given, [batch], tmp_path / "run", pool="mean").layers(variant="merged")
    seen = batch["attention_mask"].bool()
    with torch.no_grad():
        outs = [given[name](**batch).last_hidden_state for name in ("merged", "expert")]
    want = [(outs[0][i, seen[i]].mean(0) - outs[1][i, seen[i]].mean(0)).norm().item() for i in range(6)]
    assert found["drift_l2_mean"].iloc[-1] == pytest.approx(np.mean(want), rel=1e-5)


@pytest.mark.parametrize(
    "mask",
    [
        pytest.param("seen", id="an entry", marks=pytest.mark.slow),
        pytest.param(lambda batch: (batch["input_ids"] != 0).float(), id="a function that gives floats"),
    ],
)
def test_a_mask_may_be_named_or_computed(mask: Any, tmp_path: Path) -> None:
    class Renamed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = bert()

        def forward(self, input_ids: Tensor, seen: Tensor) -> Tensor:
            return self.inner(input_ids=input_ids, attention_mask=seen).last_hidden_state

    batch = padded()
    renamed = {"input_ids": batch["input_ids"], "seen": batch["attention_mask"]}
    given = models(Renamed)
    found = analyzed(given, [renamed], tmp_path / "run", pool="mean", mask=mask).layers()
    inner = {name: module.inner for name, module in given.items()}
    want = analyzed(inner, [batch], tmp_path / "want", pool="mean").layers()
    np.testing.assert_allclose(found["drift_l2_mean"], want["drift_l2_mean"], rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "options", "words_"),
    [
        (lambda m: (1.0 - m) * -1e9, {}, r"attention_mask is torch.float32 \[6, 7\]"),
        (lambda m: m[:, None, None] > 0, {}, r"attention_mask is torch.bool \[6, 1, 1, 7\]"),
        (lambda m: m, {"mask": "nosuch"}, "nosuch is NoneType"),
        (lambda m: m, {"mask": lambda batch: batch["input_ids"][:, 3:] > 0}, r"the mask is \[6, 4\]"),
    ],
    ids=["additive", "four axes", "no such entry", "other tokens"],
)
def test_a_mask_that_can_not_be_read_is_refused_with_what_to_do(
    change: Callable[[Tensor], Tensor], options: dict[str, Any], words_: str, tmp_path: Path
) -> None:
    with pytest.raises(SpecError, match=words_) as caught:
        analyzed(models(bert), [padded(mask=change)], tmp_path / "run", **options)
    assert "Set `mask` to" in caught.value.hint


def test_samples_that_look_padded_are_pointed_out(tmp_path: Path) -> None:
    given, batch = models(lambda: bert(pad_token_id=0)), padded()
    run = analyzed(given, [{"input_ids": batch["input_ids"]}], tmp_path / "run")
    (notice,) = run.manifest.notices
    assert notice.startswith("task task: 4 of 6 samples look padded in 'input_ids'")
    assert not analyzed(given, [{"input_ids": words()}], tmp_path / "full").manifest.notices


class TiedBlocks(nn.Module):
    """Three blocks, whose first linear module has one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TiedBlock() for _ in range(3))
        self.out = nn.Linear(5, 2)
        for block in self.blocks[1:]:
            block.first.weight = self.blocks[0].first.weight

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class TiedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5, bias=False), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.tanh(self.first(x)))


def test_a_weight_of_several_places_is_left_alone_and_named_or_refused_by_name() -> None:
    given, data = models(TiedBlocks), torch.randn(32, 5, generator=torch.Generator().manual_seed(0))
    calibrator = fitted(given, data)
    assert list(calibrator.modules_) == [f"blocks.{i}.second" for i in range(3)]
    assert any("blocks.0.first, blocks.1.first, blocks.2.first" in notice for notice in calibrator.notices_)
    tied = calibrator.model_.blocks[0].first.weight
    assert tied is calibrator.model_.blocks[2].first.weight
    assert torch.equal(tied, given["merged"].blocks[0].first.weight)
    with pytest.raises(IncompatibleModelsError, match=r"blocks.0.first shares its weight with blocks.1.first"):
        fitted(given, data, sites=["*.first"])


class Looking(Stack):
    """Blocks that read something of the module that no argument shows, so that they can't be run alone."""

    def forward(self, x: Tensor) -> Tensor:
        self.blocks[1].hint = self.embed(x).mean(dim=1, keepdim=True)
        return super().forward(x)


class LookingBlock(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block, self.hint = block, None

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) if self.hint is None else self.block(x) + self.hint


def looking() -> nn.Module:
    module = Looking()
    module.blocks[1] = LookingBlock(module.blocks[1])
    return module


def test_a_broken_closure_is_an_error_and_stops_a_calibration_before_it_solves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, data = models(looking), torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    with pytest.raises(NumericsError, match=r"after layer 3 \(blocks.1\), task 'task'.*closure error 0") as caught:
        analyzed(given, data, tmp_path / "run", blocks="blocks")
    assert caught.value.context["closure_error"] > caught.value.context["tolerance"]
    monkeypatch.setattr(dl.FeatCal, "calibrate", lambda *_: pytest.fail("solved"))
    with pytest.raises(NumericsError, match="closure error"):
        fitted(given, data, blocks="blocks")


@pytest.mark.parametrize(("asked", "held"), [({}, 1), ({"closure_samples": 3}, 3), ({"closure_samples": None}, 6)])
def test_a_few_samples_are_held_against_the_library_before_a_fit(
    asked: dict[str, Any], held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, data = models(Stack), torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    counts, compare = [], LibraryDrift.compare

    def compared(self: LibraryDrift, *of: Any) -> None:
        counts.append(len(self.batch.inputs))
        compare(self, *of)

    monkeypatch.setattr(LibraryDrift, "compare", compared)
    fitted(given, data, blocks="blocks", **asked)
    assert {*counts} == {held}


def test_every_expert_of_a_fit_is_held_against_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    given, data = models(Stack), torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    experts = {"first": given["expert"], "second": given["expert"]}
    library_states = ModelPool.library_states

    def altered(self: ModelPool, model: str, *of: Any) -> Any:
        states = library_states(self, model, *of)
        if model == "expert:second":
            states[2] = {name: leaf * 1.01 for name, leaf in states[2].items()}
        return states

    monkeypatch.setattr(ModelPool, "library_states", altered)
    with pytest.raises(NumericsError, match=r"feature of expert:second after layer 3 \(blocks.1\), task 'second'"):
        dl.FeatCal().fit(given["merged"], given["base"], experts, dict.fromkeys(experts, data), blocks="blocks")


def test_models_without_drift_are_closed(tmp_path: Path) -> None:
    base = with_seed(Stack)().eval()
    given = dict.fromkeys(("base", "merged", "expert"), base)
    run = analyzed(given, torch.randn(6, 5), tmp_path / "run", blocks="blocks")
    assert run.layers()["drift_l2_mean"].max() == 0 and run.layers()["closure_error"].isna().all()


@pytest.mark.parametrize("dtype", few([torch.bfloat16, torch.float16], [torch.bfloat16]))
def test_modules_in_half_precision_are_computed_in_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    single = models(Stack)
    half = {name: copy.deepcopy(module).to(dtype) for name, module in single.items()}
    wide = {name: copy.deepcopy(module).float() for name, module in half.items()}
    data = torch.randn(32, 5, generator=torch.Generator().manual_seed(0))
    runs = [analyzed(given, data, tmp_path / str(i), blocks="blocks") for i, given in enumerate((half, wide))]
    assert {run.manifest.dtype for run in runs} == {"float32"}
    np.testing.assert_allclose(*(run.layers()["drift_l2_mean"] for run in runs), rtol=1e-6)
    found, want = (fitted(given, data, dl.FeatCal(lam=1e-5), blocks="blocks").model_ for given in (half, wide))
    eps = torch.finfo(dtype).eps
    for name, value in want.state_dict().items():
        assert found.state_dict()[name].dtype == dtype
        change = (found.state_dict()[name].float() - value).norm() / value.norm()
        assert change < 4 * eps, name


class Hurried(nn.Linear):
    """Products as processors with bfloat16 units compute them, where the process allows it."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32 or torch.get_float32_matmul_precision() != "medium":
            return super().forward(x)
        return nn.functional.linear(x.bfloat16().float(), self.weight.bfloat16().float(), self.bias)


def hurried() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(Hurried(5, 5), nn.Tanh()) for _ in range(3)), Hurried(5, 4))


@pytest.mark.slow
def test_a_process_that_allows_fewer_bits_changes_nothing_and_a_run_that_has_them_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, data = models(hurried), torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    want = analyzed(given, data, tmp_path / "want")
    weights = fitted(given, data).model_.state_dict()
    torch.set_float32_matmul_precision("medium")
    try:
        found = analyzed(given, data, tmp_path / "found")
        fitted_weights = fitted(given, data).model_.state_dict()
        assert torch.get_float32_matmul_precision() == "medium"
        monkeypatch.setattr(reopening, "full_precision_matmul", nullcontext)
        with pytest.raises(NumericsError, match="differs from float64") as caught:
            analyzed(given, data, tmp_path / "bypassed")
    finally:
        torch.set_float32_matmul_precision("highest")
    assert "TF32, bfloat16" in caught.value.hint
    pd.testing.assert_frame_equal(found.layers(), want.layers())
    torch.testing.assert_close(fitted_weights, weights, rtol=0, atol=0)
    assert 0 < found.manifest.precision["task"] < 1e-4
