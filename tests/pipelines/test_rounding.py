"""What number types lose of the changes that experts, merges and calibrations make, and task vectors that stand out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from driftlens.checkpoints.tensor_sources import count_differences
from driftlens.config.spec import load_spec
from driftlens.experiment.merging import merge_experts
from driftlens.experiment.sanity_checks import check_model_files
from driftlens.experiment.study_loading import open_models
from tests.pipelines.checking import saved, visual
from tests.zoo.world import Weights, World


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
def test_entries_are_counted_by_their_rank_among_all_numbers_of_a_type(dtype: torch.dtype) -> None:
    bits = {1: torch.int8, 2: torch.int16}[dtype.itemsize]
    width = 8 * dtype.itemsize
    numbers = torch.arange(-(1 << (width - 1)), 1 << (width - 1)).to(bits).view(dtype).float()
    ordered = numbers[numbers.isfinite()].unique()  # both zeros are one
    generator = torch.Generator().manual_seed(0)
    near = ordered[(ordered - 0.01).abs().argmin() - 9 :][:18]
    near = torch.cat((near, -near, torch.tensor([0.0, -0.0]), ordered[ordered.abs() < 0.02][:9]))
    start, end = (near[torch.randint(len(near), (4000,), generator=generator)] for _ in range(2))
    end = torch.where(torch.rand(4000, generator=generator) < 0.3, start * (1 + 2e-4), end)
    ranks = [torch.searchsorted(ordered, tensor.to(dtype).float()) for tensor in (start, end)]
    apart, differs = (ranks[0] - ranks[1]).abs(), start != end
    change = count_differences(start, end, dtype)
    assert (change.entries, change.changed) == (4000, int(differs.sum()))
    assert change.lost == int((differs & (apart == 0)).sum()) > 50
    assert change.steps == int((differs & (apart == 1)).sum()) > 50
    assert change.norm == pytest.approx(float((end - start).double().norm()))


def moved_by(size: float) -> Callable[[Weights, Weights], Weights]:
    """The base moved by so much of the task vector that an expert of the world has."""
    return lambda base, expert: {key: base[key] + size * (expert[key] - base[key]) for key in base}


def one_step(base: Weights, expert: Weights) -> Weights:
    """Of every other number of the base the next that bfloat16 has."""

    def stepped(start: Tensor) -> Tensor:
        bits = start.bfloat16().contiguous().view(torch.int16)
        return (bits + (torch.arange(bits.numel()).reshape(bits.shape) % 2).to(torch.int16)).view(torch.bfloat16)

    return visual(base, stepped)


CASES: dict[str, tuple[torch.dtype, torch.dtype, Callable[[Weights, Weights], Weights], str]] = {
    "nothing": (torch.float32, torch.float32, moved_by(1), ""),
    "rounded_but_far": (torch.bfloat16, torch.bfloat16, moved_by(3), ""),
    "wider": (
        torch.bfloat16,
        torch.float32,
        moved_by(0.003),
        "equal the base's again in bfloat16 (the base's",
    ),
    "coarser": (
        torch.float32,
        torch.bfloat16,
        moved_by(0.003),
        "equal the base's again in bfloat16 (its own",
    ),
    "one_step": (
        torch.bfloat16,
        torch.bfloat16,
        one_step,
        "50.0 % of these tensors' entries equal the base's",
    ),
    "long": (torch.float32, torch.float32, moved_by(4.3), "times as long as the others"),
}


def with_models(
    world: World,
    folder: Path,
    dtypes: tuple[torch.dtype, torch.dtype],
    change: Callable[[Weights, Weights], Weights],
) -> dict[str, object]:
    """A spec whose base and expert of flowers are stored in these types, the expert changed like this."""
    base, expert = world.state("base"), world.state("flowers")
    base = {key: value.to(dtypes[0]).float() for key, value in base.items()}
    entries = {"base": base, "flowers": change(base, expert), "shapes": world.state("shapes")}
    kinds = dict(zip(entries, (*dtypes, dtypes[0]), strict=True))
    placed = {
        name: saved({key: value.to(kinds[name]) for key, value in weights.items()}, folder / f"{name}.safetensors")
        for name, weights in entries.items()
    }
    return world.spec(base=placed.pop("base"), experts=placed)


def told(spec: dict[str, object], name: str = "flowers") -> list[str]:
    findings = check_model_files(open_models(load_spec(spec)))
    return [finding.text for finding in findings if name in finding.subject and "text tower" not in finding.text]


@pytest.mark.parametrize(("base", "expert", "change", "text"), CASES.values(), ids=list(CASES))
def test_what_a_type_loses_of_an_expert_and_its_length_are_told(
    base: torch.dtype,
    expert: torch.dtype,
    change: Callable[[Weights, Weights], Weights],
    text: str,
    world: World,
    tmp_path: Path,
) -> None:
    lines = told(with_models(world, tmp_path, (base, expert), change))
    assert [text in line for line in lines] == [True] * bool(text), lines


@pytest.mark.parametrize("out_dtype", [None, "float32"])
def test_a_merge_keeps_what_its_type_can_hold_and_tells_what_it_lost(
    out_dtype: str | None, world: World, tmp_path: Path
) -> None:
    spec = with_models(world, tmp_path, (torch.bfloat16, torch.float32), moved_by(0.003)) | {"metrics": {}}
    spec["experts"] = {"flowers": spec["experts"]["flowers"]}
    spec["heads"] = spec["data"] = {}
    out = tmp_path / "out.safetensors"
    lines = merge_experts(load_spec(spec), "task_arithmetic", {"scaling": 0.5}, out, out_dtype=out_dtype)
    base, expert, merged = (load_file(tmp_path / f"{name}.safetensors") for name in ("base", "flowers", "out"))
    base = {key: start for key, start in base.items() if key.startswith("visual.")}
    exact = {key: start.float() + 0.5 * (expert[key] - start.float()) for key, start in base.items()}
    kept = getattr(torch, out_dtype or "bfloat16")
    for key, value in exact.items():
        assert merged[key].dtype == kept
        torch.testing.assert_close(merged[key], value.to(kept), rtol=1e-6 if out_dtype else 0, atol=0)
    changed = sum(int((exact[key] != start.float()).sum()) for key, start in base.items())
    equal = sum(
        int(((exact[key] != start.float()) & (exact[key].bfloat16() == start)).sum()) for key, start in base.items()
    )
    share = f"{100 * equal / changed:.1f} %"
    text = f"about {share} of the entries that the merge changes equal the base's again in bfloat16"
    told_of = [line for line in lines if "the merge changes" in line]
    assert [line.startswith(text) for line in told_of] == [True] * (out_dtype is None)
