"""One file adds one merge method: a toy of every `reads`, each in a module of its own, found wherever it should be.

Every toy's result is compared with the same computation written here, from state dicts or the library's own modules.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import driftlens as dl
from driftlens.merging.method import READS, merge_methods
from driftlens.runs.manifest import read_manifest
from driftlens.utils.errors import SpecError
from tests.cli.conftest import Cli, run_cli
from tests.merging.applying import LAWS, apply, assert_same, states
from tests.pipelines.checking import check, found
from tests.pipelines.fixtures import spec_file, world
from tests.quick import few, temporary_entries
from tests.zoo.world import Weights, World, tower, write_spec

__all__ = ["run_cli", "spec_file", "world"]

SHARE = 0.25

HEAD = '''
"""A toy."""

from typing import Annotated

import torch

from driftlens.merging.method import merge_methods
from driftlens.utils.registry import Bounds

Share = Annotated[float, Bounds(0, 1, low_open=True), "how far from the base"]


def mean_vector(base, experts, name):
    start = base[name]
    return sum(expert[name] - start for expert in experts.values()) / len(experts)


@merge_methods.method(
    "toy_{reads}", title="Toy of {reads}", source="arXiv:0000.0000", laws={{"expert_order_free"}}, reads="{reads}"{more}
)
'''

TOYS = {
    "entry": '''
def toy(base, experts, *, share: Share = 0.5):
    """A step along the mean task vector."""
    return {name: base[name] + share * mean_vector(base, experts, name) for name in base}
''',
    "tensor": '''
def toy(base, experts, *, share: Share = 0.5):
    """The mean of task vectors of which small entries, beside the tensor's largest, are dropped."""
    def kept(vector):
        return vector * (vector.abs() >= share * vector.abs().max())

    return {
        name: base[name] + sum(kept(expert[name] - base[name]) for expert in experts.values()) / len(experts)
        for name in base
    }
''',
    "site": '''
def toy(base, experts, *, share: Share = 0.5):
    """Every output of a module moves alike, by the size of the module's whole task vector."""
    step = mean_vector(base, experts, "weight")
    size = share * step.norm()
    merged = {"weight": base["weight"] + size * step / step.norm(dim=1, keepdim=True)}
    if "bias" in base:
        merged["bias"] = base["bias"] + size * mean_vector(base, experts, "bias")
    return merged
''',
    "model": '''
def toy(base, experts, *, share: Share = 0.5):
    """The mean task vector without entries that are small beside the largest of the whole model."""
    largest = max(mean_vector(base, experts, name).abs().max() for name in base)
    for name in reversed(list(base)):
        start = {name: base[name]}
        step = mean_vector(start, experts, name)
        yield name, start[name] + step * (step.abs() >= share * largest)
''',
    "moments": '''
def toy(base, experts, moments, *, share: Share = 0.5):
    """RegMean, with moments whose off-diagonal entries are shrunk."""
    shrunk = {task: share * gram + (1 - share) * gram.diag().diag() for task, gram in moments.items()}
    wanted = sum(experts[task]["weight"].double() @ gram for task, gram in shrunk.items())
    merged = {"weight": torch.linalg.solve(sum(shrunk.values()), wanted, left=False)}
    if "bias" in base:
        merged["bias"] = base["bias"] + mean_vector(base, experts, "bias")
    return merged
''',
    "samples": '''
def toy(base, experts, study, *, share: Share = 0.5):
    """One step of gradient descent on how far along the mean task vector the first layer's outputs fit the experts'."""
    name = next(name for name in base if base[name].dim() == 4)
    along = torch.tensor(0.0, requires_grad=True)
    loss = 0
    for task in sorted(experts):
        at = study.tasks[task]
        assert at.calibration.labels is None and at.diagnosis.ids == at.calibration.ids and at.test is None
        images = at.calibration.load(range(len(at.calibration)))
        merged = base[name] + along * mean_vector(base, experts, name)
        kernels = (merged, experts[task][name])
        mine, theirs = (torch.nn.functional.conv2d(images, k, stride=k.shape[-1]) for k in kernels)
        loss = loss + (mine - theirs).square().mean()
    (slope,) = torch.autograd.grad(loss, along)
    for name in base:
        start = {name: base[name]}
        yield name, start[name] - share * slope * mean_vector(start, experts, name)
''',
}
MORE = {
    "moments": ', others="toy_other"',
}
OTHER = """

@merge_methods.method("toy_other", title="Other", source="none", laws=set())
def other(base, experts, *, share: Share = 0.5):
    return {name: base[name] + share * mean_vector(base, experts, name) for name in base}
"""


@pytest.fixture(params=few(TOYS, ["entry", "moments"]))
def toy(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """What a toy reads, while it is there."""
    reads: str = request.param
    name = f"a_toy_of_{reads}"
    text = HEAD.format(reads=reads, more=MORE.get(reads, "")) + TOYS[reads].lstrip("\n")
    folder = tmp_path / "plugin"
    folder.mkdir()
    (folder / f"{name}.py").write_text(text + (OTHER if reads == "moments" else ""), encoding="utf-8")
    before = set(merge_methods)
    with temporary_entries(merge_methods), pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        importlib.import_module(name)
        yield reads
    del sys.modules[name]
    assert set(merge_methods) == before


def spec_of(world: World, reads: str, form: Any = "open_clip", **settings: Any) -> dict[str, Any]:
    merge = {"method": f"toy_{reads}", "share": SHARE, **settings}
    return world.spec(form, merge=merge, metrics={"jacobian": False}, heads=None)


def test_the_spec_and_preflight_know_it_and_its_settings(
    toy: str, world: World, spec_file: Path, run_cli: Cli
) -> None:
    text = found(check(spec_of(world, toy)), "ok", "merge").text
    assert text.startswith(f"Toy of {toy} (arXiv:0000.0000), share {SHARE}; it reads {READS[toy]}")  # type: ignore[index]
    others = {"site": "Simple Averaging", "moments": "Other"}
    assert ("merges all other parameters by" in text) == (toy in others) and others.get(toy, "") in text
    refusals = {
        "shar=0.1": ("has no parameter 'shar'", "Did you mean 'share'?"),
        "share=0": ("share is 0; expected a finite number more than 0 and at most 1", ""),
        "share=big": ("share is 'big'; expected a finite number", ""),
        "share=.inf": ("inf", ""),
    }
    file = write_spec(spec_file, spec_of(world, toy))
    for override, (message, hint) in refusals.items():
        refused = run_cli("validate", file, "--set", f"merge.{override}")
        assert refused.code == 2 and message in refused.out + refused.err and hint in refused.out + refused.err
        command = run_cli("merge", file, "--method", f"toy_{toy}", "--set", override, "--out", file.parent / "x")
        assert command.code == 2 and message in command.err and hint in command.err
    for misspelt in ({"shar": 0.1}, {"share": 2}):
        with pytest.raises(SpecError):
            dl.analyze(spec_of(world, toy, **misspelt), out=file.parent / "run", progress="none")
    assert sorted(path.name for path in file.parent.iterdir()) == ["plugin", file.name]


@pytest.mark.slow
def test_a_run_is_made_of_it_and_says_so(toy: str, world: World, spec_file: Path, run_cli: Cli) -> None:
    run = dl.analyze(spec_of(world, toy), out=spec_file.parent / "run", progress="none")
    merge = dict(read_manifest(run.path).merge)
    assert merge.pop("change")["changed"] > 0  # what its number type left of it
    assert ("samples" in merge) == (toy in ("samples", "moments")) and merge.pop("samples", "some")
    assert merge == {
        "method": f"toy_{toy}",
        "title": f"Toy of {toy}",
        "source": "arXiv:0000.0000",
        "reads": toy,
        "parameters": {"share": SHARE},
    }
    assert run.value("drift_l2_mean", task=world.tasks[0], variant="merged") > 0
    merged = tower(load_file(run.path / "models" / "merged.safetensors"))
    assert all(torch.isfinite(value).all() for value in merged.values())
    for name, value in EXPECTED.get(toy, lambda _: merged)(world).items():
        torch.testing.assert_close(merged[name], value.float(), rtol=1e-4, atol=1e-5)
        assert not torch.equal(merged[name], tower(world.state("base"))[name]), name

    file = spec_file.parent / "again.safetensors"
    spec = write_spec(spec_file, world.spec())
    done = run_cli("merge", spec, "--method", f"toy_{toy}", "--set", f"share={SHARE}", "--out", file)
    assert done.code == 0, done.err
    again = tower(load_file(file))
    assert all(torch.equal(again[name], value) for name, value in merged.items())
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
    assert (metadata["merge_title"], metadata["merge_source"]) == (f"Toy of {toy}", "arXiv:0000.0000")
    assert metadata["merge_parameters"] == f"share={SHARE}"
    assert not list(spec_file.parent.glob(".partial-*"))


def test_its_laws_are_checked_by_those_of_all_methods(toy: str) -> None:
    method = merge_methods[f"toy_{toy}"]
    assert_same(*LAWS["expert_order_free"](method))
    base, experts = states(method)
    assert not all(torch.equal(value, base[name]) for name, value in apply(method, base, experts).items())
    with pytest.raises(AssertionError):
        assert_same(*LAWS["equal_experts_are_fixed"](method))


def test_samples_that_it_reads_and_that_are_not_there_are_refused_before_anything_is_opened(
    toy: str, world: World, spec_file: Path, run_cli: Cli
) -> None:
    spec = spec_of(world, toy)
    del spec["data"]["shapes"]
    out = spec_file.parent / "merged.safetensors"
    done = run_cli("merge", write_spec(spec_file, spec), "--method", f"toy_{toy}", "--out", out)
    if toy in ("moments", "samples"):
        message = "needs calibration samples; shapes has none"
        assert message in found(check(spec), "problem", "merge").text
        assert done.code == 2 and message in done.err and not out.exists()
    else:
        assert done.code == 0 and out.exists()


def steps(world: World) -> tuple[Weights, list[Weights], Weights]:
    """In float64: the base, every task vector, and their mean."""
    base = {name: value.double() for name, value in tower(world.state("base")).items()}
    experts = [tower(world.state(task)) for task in world.tasks]
    vectors = [{name: expert[name].double() - value for name, value in base.items()} for expert in experts]
    mean = {name: torch.stack([vector[name] for vector in vectors]).mean(0) for name in base}
    return base, vectors, mean


def expected_entry(world: World) -> Weights:
    base, _, mean = steps(world)
    return {name: torch.lerp(value, value + mean[name], SHARE) for name, value in base.items()}


def expected_tensor(world: World) -> Weights:
    base, vectors, _ = steps(world)
    found = {}
    for name, value in base.items():
        rows = 3 if ".in_proj_" in name else 1  # queries, keys and values apart
        parts = [part for vector in vectors for part in vector[name].chunk(rows)]
        kept = [torch.where(part.abs() < SHARE * part.abs().amax(), 0, part) for part in parts]
        trimmed = [torch.cat(kept[first : first + rows]) for first in range(0, len(kept), rows)]
        found[name] = value + torch.stack(trimmed).mean(0)
    return found


def expected_model(world: World) -> Weights:
    base, _, mean = steps(world)
    largest = torch.cat([value.flatten() for value in mean.values()]).abs().max()
    kept = {name: torch.where(value.abs() < SHARE * largest, 0, value) for name, value in mean.items()}
    return {name: base[name] + value for name, value in kept.items() if value.any()}


EXPECTED: dict[str, Callable[[World], Weights]] = {
    "entry": expected_entry,
    "tensor": expected_tensor,
    "model": expected_model,
}
"""Of modules, moments and samples, `tests/merging` has the same for the methods that there are."""
