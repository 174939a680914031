"""What a spec is refused for: the path, the value, what is allowed, and the remedy."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from driftlens.config.spec import load_spec
from driftlens.utils.errors import SpecError
from tests.refusing import refusing
from tests.specs import minimal, refused

# What is set, what the message says of it, what the hint says: refusals of our own, and one for each way in which
# pydantic's findings reach the user.
REFUSED = {
    "another version": ("version=2", "version: expected 1, got 2", "version: 1"),
    "no version": ("version=null", "version: expected 1, got None", "version: 1"),
    "unknown section": ("exprts={}", "exprts: unknown key; allowed here: version", "'experts'"),
    "misspelt key deep inside": (
        "experts.cars={weigths: x}",
        "experts.cars.weigths: unknown key; allowed here: weights",
        "Did you mean 'weights'?",
    ),
    "number for a task": (
        "experts={1: {weights: x}}",
        "experts: Input should be a valid string, got 1",
        '"1"',
    ),
    "blank task": ("experts={' ': {weights: x}}", "experts: the name ' ' is not text, or empty", "visible"),
    "task with a tab": ('experts={"a\\tb": {weights: x}}', "experts: the name 'a\\tb' holds a control", ""),
    "neither merged nor merge": ("merged=null", "exactly one of merged and merge, got neither", "scaling"),
    "merged and merge": ("merge={method: average}", "exactly one of merged and merge, got both", "scaling"),
    "merge without method": ("merge={scaling: 1}", "merge.method: missing", "required"),
    "NaN for a parameter": ("merge={method: ties, k: .nan}", "merge.k: Input should be a finite number", ""),
    "Python loader without function": ("architecture.loader=python:os.system", "got 'python:os.system'", ""),
    "loader without source": (
        "architecture={loader: hf-clip}",
        "the loader hf-clip needs `source`",
        "Hub id",
    ),
    "data of an unknown task": (
        "data.carz={kind: npz, file: x}",
        "data.carz: no expert is called 'carz'; experts are Blumen 花, cars",
        "Did you mean 'cars'?",
    ),
    "template without placeholder": ("heads.cars.templates=['a {}', x]", "heads.cars.templates[1]:", ""),
    "class twice": ("heads.cars.classes=[a, b, a]", "class names occur more than once: a", ""),
    "misspelt kind": ("data.cars.kind=imagfolder", "data.cars: Input tag 'imagfolder'", "'imagefolder'"),
    "npz without file": ("data.cars={kind: npz, test: {file: f, x: x}}", "a split has no file", "`file`"),
    "true samples": (
        "data.defaults.n=true",
        "data.defaults.n: Input should be a valid integer, got True",
        "",
    ),
    "neither number nor word": (
        "data.cars.n_test=some",
        "valid integer, got 'some'; or: Input should be 'all'",
        "",
    ),
    "misspelt pool": ("layers.pool=clss", "layers.pool: Input should be 'cls', 'mean'", "'cls'"),
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
    "unknown device": ("compute.device=gpu", "compute.device: String should match pattern", ""),
    "budget in apples": ("compute.feature_budget=2 apples", "could not interpret byte unit: apples", ""),
}


@pytest.mark.parametrize(("override", "message", "hint"), REFUSED.values(), ids=REFUSED)
def test_a_wrong_value_is_refused_by_path_and_remedy(override: str, message: str, hint: str) -> None:
    error = refused(minimal(), override)
    assert message in error.message
    assert hint in error.hint
    assert error.exit_code == 2
    assert "problems" not in error.message, "one mistake is one problem"


def test_a_task_cannot_take_the_place_of_the_defaults() -> None:
    error = refused(minimal(experts={"defaults": {"weights": "x"}}, heads=None, data=None))
    assert "a task can't be called 'defaults'" in error.message


def test_a_merged_checkpoint_and_plain_averaging_need_no_base() -> None:
    assert load_spec(minimal(base=None)).base is None
    assert load_spec(minimal(base=None, merged=None, merge={"method": "average"})).base is None


def test_all_problems_are_told_at_once_each_with_its_remedy() -> None:
    error = refused(minimal(layers={"pool": "clss"}, metrics={"prefiks": True}))
    assert error.context["problems"] == [
        "layers.pool: Input should be 'cls', 'mean', 'last' or 'all', got 'clss'",
        "metrics.prefiks: unknown key; allowed here: jacobian, contributions, prefix, cka, adjoint",
    ]
    assert "2 problems" in error.message
    assert "(Did you mean 'cls'?)" in error.message
    assert "(Did you mean 'prefix'?)" in error.message


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("n", "expected a.b=value"),
        ("a..b=1", "expected a.b=value"),
        ("merged.weights.x=2", "not a mapping"),
    ],
)
def test_an_override_without_a_place_for_its_value_is_refused(override: str, message: str) -> None:
    assert message in refused(minimal(), override).message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("", "found NoneType", id="empty file"),
        pytest.param("- 1", "found list", id="a list"),
        pytest.param("a: [1\nb: 2", "line 2, column 2", id="bracket left open"),
        pytest.param("[" * 1500, "nested too deeply", id="brackets without end"),
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


def test_what_is_no_file_of_text_is_refused_with_a_way_to_begin(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_bytes(b"\xff\xfe\x00\x01")
    for name in ("missing.yaml", "run.yaml", "."):
        with refusing(SpecError, match="the spec can't be read", hint="driftlens init"):
            load_spec(tmp_path / name)
