"""What `merge_to_files` does for every method: pieces, dtypes, integers, and refusals of what a method gives back."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from driftlens.checkpoints.tensor_sources import InMemorySource
from driftlens.engine.sites import record_activations
from driftlens.experiment import merging
from driftlens.experiment.merging import _site_moments, _StreamedMerge, merge_to_files, save_merge
from driftlens.merging.method import Reads, merge_by_name, merge_methods
from driftlens.utils.distributed import ProgressReporter
from driftlens.utils.errors import (
    Cancelled,
    CheckpointError,
    DriftLensError,
    NumericsError,
    RunError,
    ShapeError,
    SpecError,
)
from driftlens.utils.progress import CancelToken, ProgressEvent
from driftlens.utils.variants import expert_name
from tests.merging.applying import FEW, Tensors, open_models, random_model, study_of
from tests.quick import few, temporary_entries
from tests.zoo import hand_made as tiny

BASE, EXPERTS = random_model(0), {task: random_model(seed) for seed, task in enumerate("ab", start=1)}


@pytest.fixture(autouse=True)
def none_stays() -> Iterator[None]:
    with temporary_entries(merge_methods):
        yield


@pytest.fixture
def threads() -> Iterator[None]:
    """Torch is given two."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def filed(function: Callable[..., Any], reads: Reads, **known: Any) -> str:
    merge_methods.method("toy", title="Toy", source="none", laws=set(), reads=reads, **known)(function)
    return "toy"


def test_large_tensors_come_in_runs_of_rows_only_where_every_entry_stands_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(merging, "PIECE", 200)
    models, seen = open_models(BASE, EXPERTS), []

    def entry(base: Tensors, experts: dict[str, Tensors]) -> Tensors:
        seen.extend(value.numel() for value in base.values())
        return {name: (experts["a"][name] + experts["b"][name]) / 2 for name in base}

    pieces = merge_to_files(models, merge_by_name(filed(entry, "entry")))
    assert 200 >= max(seen) > 0 and sum(seen) == sum(value.numel() for value in BASE.values())
    seen.clear()
    with temporary_entries(merge_methods):
        merge_methods.method("whole", title="", source="", laws=set(), reads="tensor")(entry)
        whole = merge_to_files(models, merge_by_name("whole"))
    assert max(seen) == max(value.numel() for value in BASE.values())
    for name in BASE:
        assert torch.equal(pieces.read(name), whole.read(name))
        assert torch.equal(pieces.read(name, (0, 1)), pieces.read(name)[:1])


def test_arithmetic_is_in_float32_and_the_result_in_the_dtype_of_the_base() -> None:
    half = {name: value.half() for name, value in BASE.items()}
    models = open_models(half, EXPERTS)
    merged = merge_to_files(models, merge_by_name("task_arithmetic", {"scaling": 0.5}))
    for name, start in half.items():
        vectors = sum(expert[name] - start.float() for expert in EXPERTS.values())
        assert torch.equal(merged.read(name), (start.float() + 0.5 * vectors).half())


def test_integers_are_those_of_the_base_and_no_method_sees_them(tmp_path: Path) -> None:
    count = torch.tensor([3, 4])
    models = open_models({**BASE, "steps": count}, {task: {**e, "steps": count + 9} for task, e in EXPERTS.items()})

    def model(base: Tensors, experts: dict[str, Tensors]) -> Iterator[tuple[str, Tensor]]:
        assert "steps" not in base and len(base) == len(BASE)
        return ((name, experts["a"][name]) for name in base)

    merged = merge_to_files(models, merge_by_name(filed(model, "model")), beside=tmp_path / "merged.safetensors")
    assert torch.equal(merged.read("steps"), count)
    assert torch.equal(merged.read("norm.weight"), EXPERTS["a"]["norm.weight"])
    assert not list(tmp_path.iterdir())


def test_a_weight_that_two_modules_share_is_merged_once() -> None:
    models = open_models(BASE, EXPERTS)
    layers = models.architecture.chain.layers
    tied = dict(layers[1].parameters)
    tied["key.weight"], tied["key.bias"] = tied["query.weight"], tied["query.bias"]
    object.__setattr__(layers[1], "parameters", tied)
    called: list[Tensor] = []

    def site(base: Tensors, experts: dict[str, Tensors]) -> Tensors:
        called.append(base["weight"])
        return experts["b"]

    merged = merge_to_files(models, merge_by_name(filed(site, "site")))
    assert len(called) == 3 * 6 - 1
    assert torch.equal(merged.read("blocks.0.query.bias"), EXPERTS["b"]["blocks.0.query.bias"])


APART = [name for name, entry in merge_methods.items() if entry.reads != "model" and not entry.needs_samples]


@pytest.mark.parametrize("name", APART)
def test_what_is_merged_as_it_is_written_has_the_same_bits_in_any_order_and_twice(name: str) -> None:
    half = {key: value.half() for key, value in BASE.items()}
    models, merge = open_models(half, EXPERTS), merge_by_name(name, FEW.get(name, {}))
    whole, streamed = merge_to_files(models, merge), _StreamedMerge(models, merge, ProgressReporter())
    assert streamed.headers == whole.headers
    for key in [*reversed(whole.headers), *whole.headers]:
        assert torch.equal(streamed.read(key), whole.read(key)), key
        assert torch.equal(streamed.read(key, (0, 1)), whole.read(key, (0, 1))), key
    assert whole.change is not None and whole.change.entries
    for part, value in vars(whole.change).items():
        assert getattr(streamed.change, part) == (value if part == "dtype" else pytest.approx(value)), part


def test_a_merge_that_is_saved_waits_on_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def on_disk(*_: object) -> dict[str, Tensor]:
        raise AssertionError("it is written twice")

    monkeypatch.setattr(merging, "_create_file_backed_tensors", on_disk)
    save_merge(open_models(BASE, EXPERTS), merge_by_name("average"), tmp_path / "merged.safetensors")
    assert load_file(tmp_path / "merged.safetensors").keys() == BASE.keys()


NAME, NAMED = "norm.weight", "5.head.0"
WRONG: dict[str, tuple[Callable[[str, Tensor], list[tuple[str, Tensor]]], type[DriftLensError], str]] = {
    "left out": (
        lambda name, value: [] if name == NAMED else [(name, value)],
        ShapeError,
        f"{NAME!r} came not",
    ),
    "twice": (
        lambda name, value: [(name, value)] * (1 + (name == NAMED)),
        ShapeError,
        f"{NAME!r} came twice",
    ),
    "wrong shape": (lambda name, value: [(name, value[:1])], ShapeError, r"came as \[1"),
    "would broadcast": (
        lambda name, value: [(name, value.mean())],
        ShapeError,
        r"came as \[\], not",
    ),
    "unknown": (lambda name, value: [(f"{name}s", value)], CheckpointError, "holds no tensor"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_what_a_method_may_not_give_is_refused(fault: str, tmp_path: Path) -> None:
    given, kind, message = WRONG[fault]

    def model(base: Tensors, experts: dict[str, Tensors]) -> Iterator[tuple[str, Tensor]]:
        for name, value in base.items():
            yield from given(name, value)

    with pytest.raises(kind, match=message):
        merge_to_files(open_models(BASE, EXPERTS), merge_by_name(filed(model, "model")), beside=tmp_path / "x")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("reads", ["entry", "tensor", "site", "model", "moments"])
def test_the_file_that_holds_nan_is_named_whatever_is_read(reads: Reads) -> None:
    broken = {**EXPERTS["b"], "blocks.1.up.weight": EXPERTS["b"]["blocks.1.up.weight"] * torch.nan}
    models = open_models(BASE, {"a": EXPERTS["a"], "b": broken})

    def toy(base: Tensors, experts: dict[str, Tensors], *more: object) -> Any:
        found = {name: experts["b"][name] for name in base}
        return found.items() if reads == "model" else found

    study = study_of(models) if reads == "moments" else None
    with pytest.raises(NumericsError, match=r"^b: tensor 'blocks\.1\.up\.weight'"):
        merge_to_files(models, merge_by_name(filed(toy, reads)), study)


@pytest.mark.parametrize("reads", ["entry", "site", "model"])
def test_progress_goes_by_tensor_and_a_merge_can_be_cancelled_on_its_way(reads: Reads, tmp_path: Path) -> None:
    def toy(base: Tensors, experts: dict[str, Tensors]) -> Any:
        found = {name: experts["b"][name] for name in base}
        return found.items() if reads == "model" else found

    models, events, token = open_models(BASE, EXPERTS), [], CancelToken()
    method = filed(toy, reads)
    merge_to_files(models, merge_by_name(method), reporter=ProgressReporter(events.append))
    done = [event.done for event in events]
    assert done == sorted(done) and set(done) == set(range(len(BASE) + 1))
    assert {event.total for event in events} == {len(BASE)}

    def stop(event: ProgressEvent) -> None:
        if event.done == 5:
            token.cancel()

    reporter = ProgressReporter(stop, token)
    with pytest.raises(Cancelled):
        merge_to_files(models, merge_by_name(method), beside=tmp_path / "merged.safetensors", reporter=reporter)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", few(merge_methods, (), some=["ties", "slerp", "tsv_m", "regmean"]))
def test_two_threads_give_bit_by_bit_what_one_gives(name: str, threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a width where products and decompositions are parted among threads."""
    monkeypatch.setattr(tiny, "STACK_WIDTH", 256)
    method, tasks = merge_methods[name], "ab" if name == "slerp" else "abc"
    models = open_models(random_model(0), {task: random_model(at) for at, task in enumerate(tasks, start=1)})
    digests = []
    for count in (1, 2):
        torch.set_num_threads(count)
        study = study_of(models) if method.needs_samples else None
        merged = merge_to_files(models, merge_by_name(name, FEW.get(name, {})), study)
        assert torch.get_num_threads() == count
        written = (merged.read(key).numpy().tobytes() for key in sorted(merged.headers))
        digests.append(hashlib.sha256(b"".join(written)).hexdigest())
    assert digests[0] == digests[1]


def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(RunError, match="No space left"):
        merge_to_files(open_models(BASE, EXPERTS), merge_by_name("average"), beside=tmp_path / "merged.safetensors")
    assert not list(tmp_path.iterdir())


def test_a_base_that_only_the_rule_for_the_rest_needs_is_needed_too() -> None:
    def site(base: Tensors, experts: dict[str, Tensors]) -> Tensors:
        return experts["a"]

    models = open_models(BASE, EXPERTS)
    sources = {expert_name(task): InMemorySource(task, EXPERTS[task]) for task in EXPERTS}
    baseless = type(models)(models.architecture, None, sources, {})
    filed(site, "site", needs_base=False, others="task_arithmetic")
    with pytest.raises(SpecError, match="needs a base"):
        merge_to_files(baseless, merge_by_name("toy"))
    with temporary_entries(merge_methods):
        merge_methods.method("plain", title="", source="", laws=set(), reads="site", needs_base=False)(site)
        assert torch.equal(
            merge_to_files(baseless, merge_by_name("plain")).read("blocks.2.up.bias"),
            EXPERTS["a"]["blocks.2.up.bias"],
        )


def test_the_rule_for_the_rest_gets_the_settings_it_shares() -> None:
    def site(base: Tensors, experts: dict[str, Tensors], *, scaling: float = 0.3, rank: int = 2) -> Tensors:
        return dict(base)

    filed(site, "site", others="task_arithmetic")
    merged = merge_to_files(open_models(BASE, EXPERTS), merge_by_name("toy", {"scaling": 0.7}))
    vectors = sum(expert[NAME] - BASE[NAME] for expert in EXPERTS.values())
    torch.testing.assert_close(merged.read(NAME), BASE[NAME] + 0.7 * vectors)
    assert torch.equal(merged.read("blocks.0.up.weight"), BASE["blocks.0.up.weight"])


def test_a_masked_token_has_no_part_in_the_moments() -> None:
    models = open_models(BASE, EXPERTS)
    study = study_of(models)
    chain = models.architecture.chain
    mask = torch.tensor([True, True, False, False, True])

    def start(inputs: Any) -> Any:
        state, side = chain.start(inputs)
        tensors = {**side.tensors, "hidden_mask": mask.expand(len(inputs), -1)}
        return state, dataclasses.replace(side, tensors=tensors)

    study.pool.chain = dataclasses.replace(chain, start=start)
    samples = study.tasks["a"].calibration
    assert samples is not None
    state, side = start(samples.load(range(len(samples))))
    for layer in chain.layers[:2]:
        state = layer.call(study.pool.parameters("expert:a", layer), state, side)
    seen, _ = record_activations(
        chain.layers[2], study.pool.parameters("expert:a", chain.layers[2]), state, side, ["down"]
    )
    rows = seen.inputs["down"][:, mask].flatten(0, 1).double()
    assert len(rows) == 3 * len(samples)
    moments = next(moments for layer, moments in _site_moments(study) if layer.path == "blocks.1")
    torch.testing.assert_close(moments["down"]["a"], rows.mT @ rows / len(rows), rtol=1e-5, atol=1e-7)
    assert moments["down"]["a"].dtype == torch.float64
    assert moments["query"]["a"] is moments["key"]["a"]  # which read the same
