"""`driftlens merge`: what it writes is loaded by the original library and is the sum it should be."""

from __future__ import annotations

import json
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import driftlens as dl
from driftlens.merging.method import merge_methods
from driftlens.pipelines import compare_merges
from driftlens.results.verdict import recommend_command
from driftlens.runs.run import DriftRun
from driftlens.runs.verify import verify_files
from driftlens.utils.errors import Cancelled, NumericsError, RunError
from driftlens.utils.progress import CancelToken, ProgressEvent
from tests.cli.conftest import Cli
from tests.forked import Forked
from tests.quick import temporary_entries
from tests.zoo.towers import under_transformers_names
from tests.zoo.world import NUM_TRAIN, SCALING, World, clip, merged_weights, pixels, tower, write_spec

METHOD = ("--method", "task_arithmetic", "--set", f"scaling={SCALING}")


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-7)


def test_a_merged_state_dict_is_one_that_open_clip_loads(
    world: World, finished: DriftRun, spec_file: Path, tmp_path: Path, run_cli: Cli
) -> None:
    file = tmp_path / "merged.safetensors"
    assert run_cli("merge", write_spec(spec_file, world.spec()), *METHOD, "--out", file).code == 0
    saved = load_file(file)
    clip(saved)  # strict: every key, every shape
    same(saved, merged_weights(world))
    text = [name for name in saved if not name.startswith("visual.")]
    assert text and all(torch.equal(saved[name], world.state("base")[name]) for name in text)
    of_run = load_file(finished.path / "models/merged.safetensors")
    assert all(torch.equal(saved[name], of_run[name]) for name in saved)


def test_without_a_method_the_specs_own_merge_is_made_and_saved_in_the_dtype_that_is_asked_for(
    world: World, spec_file: Path, tmp_path: Path, run_cli: Cli
) -> None:
    file, spec = tmp_path / "merged.safetensors", write_spec(spec_file, world.spec())
    result = run_cli("merge", spec, "--out", file, "--out-dtype", "float16")
    assert result.code == 0, result.err
    saved = load_file(file)
    assert {tensor.dtype for tensor in saved.values() if tensor.is_floating_point()} == {torch.float16}
    same(
        {name: saved[name] for name in merged_weights(world)},
        {k: v.half() for k, v in merged_weights(world).items()},
    )
    given = world.spec(merge=None, merged={"weights": str(file)})
    refused = run_cli("merge", write_spec(spec_file, given), "--out", tmp_path / "out")
    assert refused.code == 2 and "--method" in refused.err and not (tmp_path / "out").exists()


def test_the_file_says_with_which_parameters_it_was_merged_defaults_included(
    world: World, spec_file: Path, tmp_path: Path, run_cli: Cli
) -> None:
    file = tmp_path / "merged.safetensors"
    spec = write_spec(spec_file, world.spec())
    assert run_cli("merge", spec, "--method", "task_arithmetic", "--out", file).code == 0
    with safe_open(file, framework="pt") as opened:
        found = opened.metadata()
    assert (found["merge_method"], found["merge_parameters"]) == ("task_arithmetic", "scaling=0.3")


def test_a_merged_folder_is_one_that_open_clip_loads(
    world: World, spec_file: Path, tmp_path: Path, run_cli: Cli
) -> None:
    """An expert's own text tower is not merged, and the card says so."""
    import open_clip

    weights = world.state("flowers")
    weights["transformer.resblocks.0.ln_1.bias"] += 0.01
    save_file(weights, tmp_path / "own.safetensors")
    own = {"flowers": {"weights": str(tmp_path / "own.safetensors")}}
    spec = world.spec()
    spec["experts"] = spec["experts"] | own

    result = run_cli("merge", write_spec(spec_file, spec), *METHOD, "--out", tmp_path / "merged")
    said = "the expert of flowers has a fine-tuned text tower, which is not used"
    assert result.code == 0 and result.err.count("text tower") == 1 and f"notice: {said}" in result.err
    module, _, preprocess = open_clip.create_model_and_transforms(f"local-dir:{tmp_path / 'merged'}")
    same(dict(module.state_dict()), merged_weights(world))
    assert tuple(preprocess.transforms[-1].mean) == (0.5, 0.4, 0.3)
    card = (tmp_path / "merged/README.md").read_text(encoding="utf-8")
    assert said in card


def test_a_merged_folder_is_one_that_transformers_loads(
    world: World,
    spec_file: Path,
    tmp_path: Path,
    run_cli: Cli,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As its card says, whose Python is run here."""
    from transformers import CLIPImageProcessor, CLIPVisionModelWithProjection

    folder = tmp_path / "merged"
    assert run_cli("merge", write_spec(spec_file, world.spec("hf")), *METHOD, "--out", folder).code == 0
    module, loading = CLIPVisionModelWithProjection.from_pretrained(folder, output_loading_info=True)
    assert not any(loading.values()), loading
    assert list(CLIPImageProcessor.from_pretrained(folder).image_mean) == [0.5, 0.4, 0.3]
    same(dict(module.state_dict()), under_transformers_names(tower(merged_weights(world))))

    card = ModelCard.load(folder / "README.md")
    assert card.data.library_name == "transformers" and "merge" in card.data.tags
    assert f"| scaling | {SCALING} |" in card.text and str(world.folder) not in card.content
    assert all(f"| expert:{task} | {task} |" in card.text for task in world.tasks)
    picture = np.load(world.data(world.tasks[0]))["x_test"][0]
    Image.fromarray(picture).save(folder / "image.png")
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {}
    with torch.no_grad():
        exec(card.text.partition("```python\n")[2].partition("```")[0], names)
        pixels_of = pixels(world.data(world.tasks[0]), ["test/0"]).float()
        expected = clip(merged_weights(world)).encode_image(pixels_of)
    torch.testing.assert_close(names["features"], expected, rtol=1e-4, atol=1e-5)


def test_an_average_needs_no_base_and_holds_the_image_tower_alone(
    world: World, spec_file: Path, tmp_path: Path, run_cli: Cli
) -> None:
    file = tmp_path / "average.safetensors"
    spec = world.spec(base=None, merge={"method": "average"})
    assert run_cli("merge", write_spec(spec_file, spec), "--method", "average", "--out", file).code == 0
    experts = [world.state(task) for task in world.tasks]
    saved = load_file(file)
    clip(experts[0]).visual.load_state_dict(saved, strict=True)
    same(saved, tower({name: (experts[0][name] + experts[1][name]) / 2 for name in experts[0]}))


def test_a_merge_that_can_not_be_leaves_no_file(world: World, spec_file: Path, tmp_path: Path, run_cli: Cli) -> None:
    spec, file = (
        write_spec(spec_file, world.spec(merge={"method": "average"}, base=None)),
        tmp_path / "out.safetensors",
    )
    for method, words in (("task_arithmetic", "needs a base"), ("avrage", "Did you mean 'average'?")):
        refused = run_cli("merge", spec, "--method", method, "--out", file)
        assert refused.code == 2 and words in refused.err
    assert run_cli("merge", spec, "--method", "average", "--set", "scaling", "--out", file).code == 2
    taken = run_cli("merge", spec, "--method", "average", "--out", spec_file.parent)
    assert taken.code == 4 and "exists already" in taken.err
    assert run_cli("merge", spec, "--method", "average", "--set", "scaling=1", "--out", file).code == 2
    assert list(tmp_path.iterdir()) == [spec]


@pytest.fixture
def failing() -> Iterator[None]:
    """Register a merge method of that name, which always fails."""
    with temporary_entries(merge_methods):

        @merge_methods.method("failing", title="Failing", source="none", laws=set())
        def failing(base: object, experts: object) -> dict[str, Tensor]:
            raise NumericsError("the step < 0")

        yield


@pytest.mark.usefixtures("failing")
def test_merges_are_compared_without_labels_and_failures_are_rows(
    world: World, spec_file: Path, tmp_path: Path, run_cli: Cli
) -> None:
    """Numbers are those of the experts' and the merge's own forwards, taken here from open_clip itself."""
    values, out = world.spec(), tmp_path / "compared"
    values["data"]["defaults"]["n"] = NUM_TRAIN
    spec = write_spec(spec_file, values)
    asked = f"average,task_arithmetic:scaling={SCALING},failing"
    done = run_cli("merge", spec, "--compare", asked, "--out", out, "--json")
    assert done.code == 0 and "merge" in done.err
    document = json.loads(done.out)
    assert document == json.loads((out / "merges.json").read_text())
    rows = {row["merge"]: row for row in document["merges"]}
    own, broken = rows[f"task_arithmetic scaling={SCALING}"], rows["failing"]
    assert broken["place"] is None and broken["reason"] and document["merges"][-1] == broken
    placed = [row for row in document["merges"] if row["place"]]
    assert [row["place"] for row in placed] == list(range(1, len(placed) + 1)) and "base" in rows
    assert [row["disagreement"] for row in placed] == sorted(row["disagreement"] for row in placed)
    wanted = []
    for task in world.tasks:
        images = pixels(world.data(task), [f"train/{at}" for at in range(NUM_TRAIN)])
        with torch.no_grad():
            found, expert = (
                clip(weights).double().encode_image(images) for weights in (merged_weights(world), world.state(task))
            )
        wanted.append(((found - expert).norm(dim=1).mean() / expert.norm(dim=1).mean()).item())
    assert own["drift_rel"] == pytest.approx(np.mean(wanted), rel=1e-4)
    assert own["drift_rel_low"] < own["drift_rel"] < own["drift_rel_high"] and own["n"] == 12
    for row in placed[1:]:
        assert row["behind_low"] <= row["behind"] == pytest.approx(row["disagreement"] - placed[0]["disagreement"])
        assert row["is_tied"] is (row["behind_low"] <= 0)
    kinds = {file.suffix for file in out.iterdir() if file.is_file()}
    assert kinds == {".csv", ".json"} and document["trained_on"] == ""


def test_a_ranking_on_samples_that_experts_were_trained_on_says_so(
    world: World, spec_file: Path, tmp_path: Path, run_cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_spec(spec_file, world.spec())
    monkeypatch.setattr(compare_merges, "training_overlap_text", lambda *_: "experts were probably trained on them")
    out = tmp_path / "compared"
    done = run_cli("merge", spec_file, "--compare", "average", "--out", out)
    assert "Unreliable: experts were probably trained on them. Compare on samples that no expert has seen." in done.out
    assert json.loads((out / "merges.json").read_text())["trained_on"] == "experts were probably trained on them"


@pytest.mark.slow
def test_the_commands_that_a_verdict_proposes_about_merges_work(folder: Path, run_cli: Cli) -> None:
    command = shlex.split(recommend_command(dl.open_run(folder), -1, ()))
    assert command[1] == "merge"
    done = run_cli(*command[1:], "--progress", "none")
    assert done.code == 0, done.err
    file = folder / "merges" / "merges.json"
    found = json.loads(file.read_text())
    rows = {row["merge"]: row for row in found["merges"]}
    assert found["present"] == f"task_arithmetic scaling={SCALING}" and found["present"] in rows
    own = rows[found["present"]]
    for name in ("base", "average", "tsv_m"):
        row = rows[name]
        assert row["nearer_low"] <= row["nearer"] == pytest.approx(own["disagreement"] - row["disagreement"])
    assert verify_files(folder).ok and recommend_command(dl.open_run(folder), -1, ()).split()[1] != "merge"

    rows["average"].update(nearer=0.2, nearer_low=0.1, nearer_high=0.3, place=1)
    file.write_text(json.dumps(found))
    better = shlex.split(recommend_command(dl.open_run(folder), -1, ()))
    assert better[1] == "analyze"
    done = run_cli(*better[1:], "--no-attribution", "--progress", "none")
    assert done.code == 0, done.err
    made = dl.open_run(better[-1])
    assert made.manifest.merge["method"] == "average" and {*made.tasks} == {*dl.open_run(folder).tasks}


def test_a_comparison_is_refused_where_its_folder_is_taken_before_anything_is_opened(
    world: World, spec_file: Path, tmp_path: Path, run_cli: Cli
) -> None:
    folder, file = tmp_path / "taken", tmp_path / "file"
    folder.mkdir()
    (folder / "merges.csv").write_text("of another comparison")
    file.write_text("mine")
    spec = write_spec(spec_file, world.spec(base={"weights": "nowhere.safetensors"}))
    for out in (folder, file):
        refused = run_cli("merge", spec, "--compare", "average", "--out", out)
        assert refused.code == 4 and refused.message == f"{out} exists already" and refused.hint
    with pytest.raises(RunError, match="exists already"):
        dl.compare_merges(spec, ["average"], out=folder)
    assert (folder / "merges.csv").read_text() == "of another comparison"
    assert sorted(tmp_path.iterdir()) == sorted([spec, folder, file])


@pytest.mark.slow
@pytest.mark.parametrize("label", ["expert of shapes", "base", "average", "ties"])
def test_a_comparison_stops_between_models_and_leaves_nothing(label: str, world: World, tmp_path: Path) -> None:
    token, said = CancelToken(), list[str]()

    def stop(event: ProgressEvent) -> None:
        assert not said or said[-1] != label, "it went on"
        said.append(event.label)
        if event.label == label:
            token.cancel()

    out, kept = tmp_path / "out", ["average", "ties"]
    with pytest.raises(Cancelled):
        dl.compare_merges(world.spec(), kept, out=out, progress="none", on_progress=stop, cancel=token)
    assert not out.exists() and not list(tmp_path.rglob(".partial-*"))


@pytest.mark.slow
def test_ctrl_c_stops_a_comparison_and_leaves_nothing(world: World, spec_file: Path, tmp_path: Path) -> None:
    """In a process of its own, in the middle of a merge that would take minutes."""
    spec, out = write_spec(spec_file, world.spec()), tmp_path / "out"
    asked = ["--compare", "average,wudi:steps=20000", "--out", str(out)]
    with Forked("merge", str(spec), *asked, "--progress", "jsonl") as process:
        for line in process.stderr:
            if json.loads(line)["label"] == "wudi steps=20000":
                break
        process.send_signal(signal.SIGINT)
        _, written = process.communicate(timeout=300)
        assert process.returncode == 130 and "Traceback" not in written
    assert not out.exists() and not list(tmp_path.rglob(".partial-*"))


KEY = "visual.transformer.resblocks.1.mlp.c_fc.weight"


def spoiled(state: dict[str, Tensor], fault: str) -> dict[str, Tensor]:
    """An expert's weights with one thing wrong, or unusual."""
    if fault == "missing tensor":
        return {key: value for key, value in state.items() if key != KEY}
    if fault == "unknown tensor":
        return {**state, "visual.extra": torch.ones(3)}
    if fault == "NaN":
        return {**state, KEY: state[KEY] * torch.nan}
    return {key: value.half() for key, value in state.items()} if fault == "half precision" else state


@pytest.mark.parametrize(
    ("fault", "asked", "code", "words"),
    [
        ("missing tensor", "average,ties", 4, KEY.removeprefix("visual.")),
        pytest.param("unknown tensor", "average,ties", 4, "has 'extra'", marks=pytest.mark.slow),
        ("NaN", "average,ties", 4, "own.safetensors"),
        ("no fault", "average,ties:scalling=1", 2, "no parameter 'scalling'"),
        pytest.param("no fault", "average,ties:scaling=1e9", 2, "scaling is 1000000000", marks=pytest.mark.slow),
        pytest.param("no fault", "average,ties:scaling=.nan", 2, "scaling is nan", marks=pytest.mark.slow),
        pytest.param("half precision", "average,ties", 0, "", marks=pytest.mark.slow),
        ("twins", "average,ties,slerp,tsv_m,wudi:steps=2", 0, ""),
    ],
)
def test_bad_input_of_a_comparison_is_one_paragraph_and_nothing_is_written(
    fault: str, asked: str, code: int, words: str, world: World, tmp_path: Path, run_cli: Cli
) -> None:
    values, own, out = world.spec(), tmp_path / "own.safetensors", tmp_path / "out"
    save_file(spoiled(world.state("shapes" if fault == "twins" else "flowers"), fault), own)
    values["experts"]["flowers"] = {"weights": str(own)}
    spec = write_spec(tmp_path / "run.yaml", values)
    done = run_cli("merge", spec, "--compare", asked, "--out", out, "--progress", "none")
    assert done.code == code, done.err
    if code:
        assert words in done.message and "Traceback" not in done.err and "\n\n" not in done.err
        assert sorted(tmp_path.iterdir()) == [own, spec]
        return
    rows = json.loads((out / "merges.json").read_text())["merges"]
    assert all(row["place"] and not row["reason"] for row in rows)
    assert all(np.isfinite([row["disagreement"], row["drift_rel"]]).all() for row in rows)


@pytest.mark.slow
def test_what_reads_samples_is_judged_on_others(world: World, spec_file: Path, tmp_path: Path, run_cli: Cli) -> None:
    """RegMean gets three quarters of the samples; with too few to hold any out, nothing is compared or left behind."""
    values, out = world.spec(), tmp_path / "compared"
    few = run_cli("merge", write_spec(spec_file, values), "--compare", "regmean", "--out", out)
    assert few.code == 4 and "flowers" in few.message and not out.exists()
    for task in world.tasks:
        entry = values["data"][task]
        entry["calibration"] = {"file": entry["file"], "x": "x_test", "y": "y_test"}
        entry["test"] = {"file": entry.pop("file"), "x": "x_train", "y": "y_train"}
    values["data"]["defaults"] = values["data"].get("defaults", {}) | {"n": 9}
    done = run_cli("merge", write_spec(spec_file, values), "--compare", "average,regmean", "--out", out)
    assert done.code == 0 and "calibration samples that no method has read" in done.out
    assert json.loads((out / "merges.json").read_text())["samples"] == dict.fromkeys(world.tasks, 2)
    assert not [file for file in out.iterdir() if file.is_dir()]


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--compare", "average", "--method", "average"),
        ("--compare", "nonsense"),
        ("--compare", "task_arithmetic:scalin=1"),
        ("--compare", "task_arithmetic", "--set", "scaling=1"),
        ("--method", "average"),
    ],
)
def test_what_can_not_be_compared_is_refused_before_anything_is_opened(
    arguments: tuple[str, ...], world: World, spec_file: Path, run_cli: Cli
) -> None:
    spec = write_spec(spec_file, world.spec())
    assert run_cli("merge", spec, *arguments).code == 2
