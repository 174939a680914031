"""What a spec is refused for: the path, the value, what is allowed, and the remedy."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from driftlens.base.errors import SpecError
from driftlens.spec import load_spec
from tests.refusing import refusing
from tests.specs import minimal, refused

# What is set, what the message says of it, what the hint says.
REFUSED = {
    "newer version": ("version=2", "version: 2 was written for a newer DriftLens", "Update"),
    "older version": ("version=0", "version: 0 was written for an older DriftLens", "init"),
    "no version": ("version=null", "version: missing", "version: 1"),
    "true for a version": ("version=true", "version: expected 1, got True", "version: 1"),
    "unknown section": ("exprts={}", "exprts: unknown key; allowed here: version", "'experts'"),
    "no experts": ("experts={}", "experts: expected at least one entry", ""),
    "misspelt key deep inside": (
        "experts.cars={weigths: x}",
        "experts.cars.weigths: unknown key; allowed here: weights",
        "Did you mean 'weights'?",
    ),
    "text for a mapping": ("experts.cars=x", "experts.cars: expected a mapping", ""),
    "number for a task": ("experts={1: {weights: x}}", "experts: expected text, got 1", '"1"'),
    "blank task": ("experts={' ': {weights: x}}", "experts: a name is empty", "visible"),
    "task with a tab": ('experts={"a\\tb": {weights: x}}', "experts: the name 'a\\tb' holds a control", ""),
    "number for a path": ("experts.cars.weights=3", "experts.cars.weights: expected text, got 3", '"3"'),
    "empty path": ("experts.cars.weights=''", "experts.cars.weights: expected text that is not empty", ""),
    "neither merged nor merge": ("merged=null", "exactly one of merged and merge, got neither", "scaling"),
    "merged and merge": ("merge={method: average}", "exactly one of merged and merge, got both", "scaling"),
    "merge without method": ("merge={scaling: 1}", "merge.method: missing", "required"),
    "NaN for a parameter": ("merge={method: ties, k: .nan}", "merge: the parameter k is not finite", ""),
    "no name of a loader": (
        "architecture.loader='HF CLIP'",
        "architecture.loader: expected a loader such as hf-clip, or python:package.module:function; got",
        "driftlens doctor --methods",
    ),
    "Python loader without function": ("architecture.loader=python:os.system", "got 'python:os.system'", ""),
    "loader without source": (
        "architecture={loader: hf-clip}",
        "the loader hf-clip needs `source`",
        "Hub id",
    ),
    "section that nothing read": (
        "projection={methods: [pca]}",
        "projection: no key any more, as nothing read it",
        "`driftlens view --method`",
    ),
    "key that nothing read": (
        "compute.solve_dtype=float32",
        "compute.solve_dtype: no key any more",
        "--set solve_dtype",
    ),
    "head of an unknown task": (
        "heads.carz={templates: ['{}']}",
        "heads.carz: no expert is called",
        "'cars'",
    ),
    "data of an unknown task": (
        "data.carz={kind: npz, file: x}",
        "data.carz: no expert is called 'carz'; experts are Blumen 花, cars",
        "Did you mean 'cars'?",
    ),
    "head without templates": ("heads.cars={classes: [a]}", "heads.cars.templates: missing", "required"),
    "no templates": ("heads.cars.templates=[]", "heads.cars.templates: expected at least one entry", ""),
    "template without placeholder": (
        "heads.cars.templates=['a {}', x]",
        "heads.cars.templates[1]: the template 'x' has no place for the class name",
        "{}",
    ),
    "class twice": (
        "heads.cars.classes=[a, b, a]",
        "heads.cars.classes: class names occur more than once: a",
        "",
    ),
    "number for a class": ("heads.cars.classes=[7]", "the class name 7 is not text", '"7"'),
    "no classes": ("heads.cars.classes=[]", "expected a list of class names or a JSON file", ""),
    "logit scale of zero": (
        "heads.cars={file: f, tensor: t, logit_scale: 0}",
        "heads.cars.logit_scale: expected more than 0, got 0",
        "",
    ),
    "file and templates": (
        "heads.cars={file: f, templates: ['{}']}",
        "heads.cars.templates: unknown key",
        "",
    ),
    "misspelt kind": (
        "data.cars.kind=imagfolder",
        "data.cars.kind: expected one of imagefolder, npz, hf, table, webdataset, jsonl, python; got 'imagfolder'",
        "'imagefolder'",
    ),
    "no kind": ("data.cars={test: a}", "data.cars: kind is missing; expected one of imagefolder, npz", ""),
    "no test split": ("data.cars={kind: imagefolder, calibration: a}", "data.cars.test: missing", ""),
    "key of another kind": ("data.cars.file=x", "data.cars.file: unknown key; allowed here: kind, n,", ""),
    "npz without file": (
        "data.cars={kind: npz, test: {file: f, x: x}}",
        "data.cars: no file for calibration",
        "`file`",
    ),
    "Python target without function": (
        "data.cars={kind: python, target: a.b}",
        "data.cars.target: expected",
        "",
    ),
    "zero samples": ("data.defaults.n=0", "data.defaults.n: expected at least 1, got 0", ""),
    "half a sample": ("data.defaults.n=1.5", "data.defaults.n: expected a whole number, got 1.5", ""),
    "true samples": ("data.defaults.n=true", "data.defaults.n: expected a whole number, got True", ""),
    "some samples": (
        "data.cars.n_test=some",
        "data.cars.n_test: expected a whole number of at least 1, or all; got 'some'",
        "",
    ),
    "misspelt pool": (
        "layers.pool=clss",
        "layers.pool: expected one of cls, mean, last, all; got 'clss'",
        "'cls'",
    ),
    "no layers": ("layers.select=[]", "layers.select: expected blocks, a pattern, or a list", ""),
    "layer zero": ("layers.select=[0]", "layers.select: expected blocks, a pattern, or a list", ""),
    "number for a mapping": (
        "metrics.jacobian=3",
        "metrics.jacobian: expected a mapping such as {nodes: 4}",
        "",
    ),
    "misspelt key inside a union": (
        "metrics.jacobian={nodez: 3}",
        "metrics.jacobian.nodez: unknown",
        "'nodes'",
    ),
    "more nodes than the most": (
        "metrics.jacobian.nodes=64",
        "max_nodes is 32, below nodes, which is 64",
        "",
    ),
    "text for a flag": ("metrics.cka=perhaps", "metrics.cka: expected true or false, got 'perhaps'", ""),
    "infinite ridge": ("calibration.lam=.inf", "calibration: the parameter lam is not finite: inf", ""),
    "number for a calibrator": ("calibration.method=3", "calibration.method: expected text, got 3", '"3"'),
    "no site": ("calibration.sites=[]", "calibration.sites: expected at least one entry", ""),
    "unknown device": (
        "compute.device=gpu",
        "compute.device: expected auto, cpu, cuda, mps or xpu, or cuda:1 for the second of several; got 'gpu'",
        "`driftlens doctor` says what there is.",
    ),
    "budget in apples": ("compute.feature_budget=2 apples", "a number of bytes or a size such as 2GiB", ""),
    "budget of nothing": ("compute.feature_budget=0GiB", "got '0GiB'", ""),
}


@pytest.mark.parametrize(("override", "message", "hint"), REFUSED.values(), ids=REFUSED)
def test_a_wrong_value_is_refused_by_path_and_remedy(override: str, message: str, hint: str) -> None:
    error = refused(minimal(), override)
    assert message in error.message
    assert hint in error.hint
    assert error.exit_code == 2
    assert "problems" not in error.message, "one mistake is one problem"


@pytest.mark.parametrize(
    ("changes", "message", "hint"),
    [
        pytest.param(
            {"experts": {"defaults": {"weights": "x"}}, "heads": None, "data": None},
            "a task can't be called 'defaults'",
            "defaults of all tasks",
            id="reserved task name",
        ),
        pytest.param({"experts": None}, "experts: missing", "required", id="no experts section"),
    ],
)
def test_sections_that_contradict_are_refused(changes: dict[str, Any], message: str, hint: str) -> None:
    error = refused(minimal(**changes))
    assert message in error.message
    assert hint in error.hint


def test_a_merged_checkpoint_and_plain_averaging_need_no_base() -> None:
    assert load_spec(minimal(base=None)).base is None
    assert load_spec(minimal(base=None, merged=None, merge={"method": "average"})).base is None


def test_all_problems_are_told_at_once_each_with_its_remedy() -> None:
    error = refused(minimal(layers={"pool": "clss"}, metrics={"prefiks": True}))
    assert error.context["problems"] == [
        "layers.pool: expected one of cls, mean, last, all; got 'clss'",
        "metrics.prefiks: unknown key; allowed here: jacobian, contributions, prefix, cka, adjoint, groups",
    ]
    assert "2 problems" in error.message
    assert "(Did you mean 'cls'?)" in error.message
    assert "(Did you mean 'prefix'?)" in error.message


@pytest.mark.parametrize("override", ["n", "=3", "a..b=1", ".a=1"])
def test_an_override_without_path_and_value_is_refused(override: str) -> None:
    assert "expected a.b=value" in refused(minimal(), override).message


def test_an_override_below_a_value_without_keys_is_refused() -> None:
    spec = minimal(metrics={"jacobian": False})
    assert "metrics.jacobian is False" in refused(spec, "metrics.jacobian.nodes=2").message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("", "found nothing", id="empty file"),
        pytest.param("- 1", "found a list", id="a list"),
        pytest.param("a: [1\nb: 2", "line 2, column 2", id="bracket left open"),
        pytest.param("[" * 5000, "nested too deeply", id="brackets without end"),
        pytest.param(
            "experts:\n  cars: {weights: a}\n  cars: {weights: b}",
            "line 3, column 3: the key 'cars' occurs twice",
            id="a task twice",
        ),
        pytest.param(
            "version: !!python/object/apply:os.system [true]",
            "could not determine a constructor",
            id="a tag that names code",
        ),
    ],
)
def test_a_file_that_is_no_spec_is_refused_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(SpecError, match=re.escape(message)) as caught:
        load_spec(file)
    assert str(file) in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    "name",
    ["missing.yaml", "."],
)
def test_a_spec_that_cannot_be_opened_is_refused_with_a_way_to_begin(tmp_path: Path, name: str) -> None:
    with refusing(SpecError, match="can't be read", hint="driftlens init"):
        load_spec(tmp_path / name)


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(SpecError, match="not UTF-8"):
        load_spec(file)
