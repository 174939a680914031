"""Analyses, calibrators, mergers and models of every kind give the CPU's numbers on the pretended accelerator.

So they do where it knows no float64, as sums and solves then are the host's, and where copies wait as long as they may.
Attention is by products and softmax on both: the CPU's own kernel for it rounds in another way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import driftlens as dl
from driftlens.calibration.calibrator import calibrators
from driftlens.checkpoints.tensor_sources import module_source
from driftlens.data.samples import Batch
from driftlens.engine.pool import ModelPool, attachment_tensors
from driftlens.engine.walk import iter_final_features
from driftlens.merging.method import merge_methods
from driftlens.models.architectures.language import causal_chain
from driftlens.models.architectures.module_list import sequential_chain
from driftlens.models.chain import LayerChain, adapters
from driftlens.models.tracing.block_call import move_to_device
from driftlens.utils.registry import diagnostics
from tests.accelerator import LACKED, turn
from tests.accelerator.subjects import models, pool_on, same, small, tables
from tests.calibration.helpers import context
from tests.quick import few
from tests.zoo import decoders, live_families, mixtures
from tests.zoo.hand_made import two_texts
from tests.zoo.small import TINY
from tests.zoo.world import World, build

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
BEHAVIOURS: dict[str, dict[str, Any]] = {
    "lazy": {"is_lazy": True},
    "poor": {"no_double": True, "is_lazy": True},
    "lacking": {"no_double": True, "lacks": LACKED},
}
behaviours = pytest.mark.parametrize("switches", BEHAVIOURS.values(), ids=BEHAVIOURS)
METRICS = {"jacobian": {"samples": 2, "spectral": True}, "cka": True, "adjoint": True}


@pytest.fixture(scope="module")
def world(pretended: torch.device, tmp_path_factory: pytest.TempPathFactory) -> World:
    return build(tmp_path_factory.mktemp("world") / "models")


@pytest.fixture(scope="module")
def on_cpu(world: World, tmp_path_factory: pytest.TempPathFactory) -> dict[str, pd.DataFrame]:
    with sdpa_kernel([SDPBackend.MATH]):
        run = dl.analyze(world.one_task(metrics=METRICS), out=tmp_path_factory.mktemp("cpu") / "run", progress="none")
    return tables(run.path)


@pytest.mark.parametrize(
    "switches",
    [pytest.param({}, marks=pytest.mark.every), {"no_double": True, "is_lazy": True}],
    ids=["plain", "poor"],
)
def test_an_analysis_with_all_there_is(
    sim: torch.device,
    world: World,
    on_cpu: dict[str, pd.DataFrame],
    tmp_path: Path,
    switches: dict[str, bool],
) -> None:
    turn(**switches)
    run = dl.analyze(world.one_task(metrics=METRICS), out=tmp_path / "run", device="sim", progress="none")
    assert run.manifest.device == "pretended accelerator"
    assert any("has no float64" in said for said in run.manifest.notices) == ("no_double" in switches)
    found = tables(run.path)
    assert found.keys() == on_cpu.keys() and len(found) > 6
    # Whatever diagnostic there is was switched on, and found some number.
    for name, each in ((name, diagnostics[name]) for name in diagnostics):
        numbers = [column.name for column in each.columns if column.dtype == "float"]
        assert found[each.table][numbers].notna().any().any(), name
    for name, table in found.items():
        pd.testing.assert_frame_equal(table, on_cpu[name], check_exact=True)
    assert pd.read_parquet(tmp_path / "run/tables/resources.parquet")["peak_gpu_bytes"].max() > 0


def solution(name: str, device: torch.device, dtype: torch.dtype = torch.float32) -> dict[Any, Tensor]:
    """All that a calibrator solves for or learns, and what it says of it."""
    method = small(name)
    options: dict[str, Any] = {"pool": pool_on(models(), device, dtype), "parts": models().samples(2)}
    takes = method.takes_sites
    on = context(models(), method.update, **options) if takes else context(models(), **options, sites={})
    solved: dict[Any, Tensor] = {}
    for layer in method.calibrate(on):
        solved |= {(layer.layer, key): value for key, value in layer.updates.items()}
        for task, attached in layer.attachments.items():
            solved |= attachment_tensors({task: attached}, layer.layer)
        for report in layer.reports:
            numbers = {key: value for key, value in vars(report).items() if isinstance(value, float)}
            del numbers["seconds"]
            solved |= {(layer.layer, report.site, key): torch.tensor(value) for key, value in numbers.items()}
        drift = torch.tensor(list(layer.drift_l2_mean.values()))
        solved[layer.layer, "drift"] = drift
    assert solved
    return solved


@pytest.fixture(scope="module", params=sorted(calibrators))
def calibrated(pretended: torch.device, request: pytest.FixtureRequest) -> tuple[str, dict[Any, Tensor]]:
    """A calibrator, and what it makes on the CPU."""
    with sdpa_kernel([SDPBackend.MATH]):
        return request.param, solution(request.param, CPU)


@behaviours
def test_a_calibration(sim: torch.device, calibrated: tuple[str, dict[Any, Tensor]], switches: dict[str, Any]) -> None:
    name, expected = calibrated
    turn(**switches)
    found = solution(name, sim)
    assert found.keys() == expected.keys()
    assert not [key for key in expected if not same(found[key], expected[key])]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["featcal", "residual"])
def test_a_calibration_of_narrow_features(sim: torch.device, name: str, dtype: torch.dtype) -> None:
    expected = solution(name, CPU, dtype)
    turn(no_double=True)
    found = solution(name, sim, dtype)
    assert found.keys() == expected.keys()
    assert not [key for key in expected if not same(found[key], expected[key])]


@pytest.mark.parametrize("name", [name for name in merge_methods if merge_methods[name].needs_samples])
def test_a_merge_that_runs_models(sim: torch.device, world: World, tmp_path: Path, name: str) -> None:
    settings = {"steps": 2} if name == "adamerging" else {}

    def merged(device: str, **switches: bool) -> dict[str, Tensor]:
        turn(**switches)
        out = tmp_path / f"{device}{len(switches)}"
        dl.merge(world.spec(), method=name, parameters=settings, out=out, device=device)
        return load_file(next(out.glob("*.safetensors")))

    expected = merged("cpu")
    for found in (merged("sim"), merged("sim", no_double=True)):
        assert found.keys() == expected.keys()
        assert not [key for key in expected if not same(found[key], expected[key])]


def of_adapter(name: str) -> tuple[nn.Module, LayerChain, Any]:
    model, generator = TINY[name]().float(), torch.Generator().manual_seed(0)
    inputs = two_texts(generator, 3) if name == "seq2seq" else torch.randn(3, 3, 16, 16, generator=generator)
    return model, adapters[name].chain(model), inputs


def of_family(name: str) -> tuple[nn.Module, LayerChain, Any]:
    family = live_families.FAMILIES[name]
    model, inputs = family.build().eval(), family.data(torch.Generator().manual_seed(3), 3)
    return model, sequential_chain(model, inputs, blocks=family.blocks), inputs


def of_decoder(config: Any) -> tuple[nn.Module, LayerChain, Any]:
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    inputs = mixtures.tokens(torch.Generator().manual_seed(0), 3)
    return model, causal_chain(model, inputs)[0], inputs


MODELS: dict[str, Callable[[], tuple[nn.Module, LayerChain, Any]]] = {
    **{name: functools.partial(of_adapter, name) for name in adapters},
    **{
        name: functools.partial(of_family, name)
        for name, family in live_families.FAMILIES.items()
        if not family.refused
    },
    **{
        f"decoder {name}": functools.partial(of_decoder, config)
        for name, config in {**decoders.CONFIGS, **decoders.MORE, **decoders.MIXTURES}.items()
    },
}


# Those whose buffers, caches, masks or routes are made in different ways.
SOME = (
    *adapters,
    *("ViT (torchvision)", "ConvNeXt (timm)", "Swin (transformers)", "BERT", "DeBERTa-v3", "T5, its encoder"),
    *("decoder Llama", "decoder GPT-2", "decoder BLOOM", "decoder Qwen3.5", "decoder Gemma 3n", "decoder Falcon-H1"),
    *("decoder Mixtral", "decoder gpt-oss"),
)


@pytest.mark.parametrize("name", few(MODELS, (), some=SOME))
def test_a_model(sim: torch.device, name: str) -> None:
    model, chain, inputs = MODELS[name]()
    batches, source = [Batch(0, 3, inputs)], module_source(model, "merged")
    finals, libraries = [], []
    for device in (CPU, sim):
        move_to_device(model, device)
        pool = ModelPool(chain, model, {"merged": source}, device=device, dtype=torch.float32)
        with torch.no_grad():
            [(_, final)] = iter_final_features(pool, "merged", batches)
            finals.append(final)
            libraries.append(pool.library_states("merged", _on(inputs, device))[-1][chain.layers[-1].stream])
    assert finals[1].device.type == sim.type and same(finals[1], finals[0].cpu())
    assert same(libraries[1], libraries[0].cpu())


def _on(inputs: Any, device: torch.device) -> Any:
    return {key: value.to(device) for key, value in inputs.items()} if isinstance(inputs, dict) else inputs.to(device)
