"""The spec: what its values mean, how paths and overrides resolve, and what changes its digest."""

from __future__ import annotations

import copy
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings, strategies as st

from driftlens.config.data import ImageFolderData
from driftlens.config.packaged import packaged_names, spec_template
from driftlens.config.spec import RunSpec, load_spec
from driftlens.config.types import parse_yaml, to_yaml
from driftlens.data.sources import data_sources
from driftlens.models.architecture import loaders
from driftlens.utils.errors import SpecError
from tests.specs import minimal

# What a complete spec means.


def test_defaults_are_those_of_the_contract() -> None:
    spec = load_spec(minimal())
    defaults, jacobian, compute = spec.data.defaults, spec.metrics.jacobian, spec.compute
    assert (defaults.n, defaults.n_diagnosis, defaults.n_test) == (256, 256, "all")
    assert (defaults.seed, defaults.batch_size) == (0, 32)
    assert jacobian
    assert (jacobian.nodes, jacobian.max_nodes, jacobian.samples) == (4, 32, 32)
    assert (jacobian.tolerance, jacobian.spectral) == (1e-4, False)
    metrics = spec.metrics
    assert (metrics.contributions, metrics.prefix, metrics.cka, metrics.adjoint) == (True, True, False, False)
    assert (spec.layers.select, spec.layers.pool) == ("blocks", None), "the pooling is the model family's"
    assert (compute.device, compute.dtype) == ("auto", "float32")
    assert compute.feature_budget == 2 * 2**30
    assert spec.calibration is None


def test_tasks_are_sorted_by_name_whatever_their_order_in_the_file() -> None:
    spec = load_spec(minimal(experts={name: {"weights": "org/x"} for name in ("cars", "b", "a")}))
    assert spec.tasks == ("a", "b", "cars")
    assert list(spec.as_dict()["experts"]) == ["a", "b", "cars"]


def test_the_parameters_of_a_merge_stand_flat_beside_its_method() -> None:
    merge = load_spec(minimal(merged=None, merge={"method": "ties", "scaling": 0.3, "density": 0.2})).merge
    assert merge is not None
    assert (merge.method, merge.parameters) == ("ties", {"density": 0.2, "scaling": 0.3})


def test_tasks_may_be_called_like_attributes_of_the_model() -> None:
    names = ["tasks", "model_dump", "copy", "n"]
    entry = {"kind": "imagefolder", "calibration": "a", "test": "b"}
    experts = {name: {"weights": "org/x"} for name in names}
    spec = load_spec(minimal(experts=experts, heads=None, data=dict.fromkeys(names, entry)))
    assert list(spec.data.tasks) == sorted(names)
    assert load_spec(spec.as_dict()) == spec


def test_every_kind_of_data_has_a_source_and_every_source_a_kind() -> None:
    tags = RunSpec.model_json_schema()["$defs"]["Data"]["additionalProperties"]["discriminator"]["mapping"]
    assert set(tags) == set(data_sources)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("2GiB", 2**31),
        ("1.5 gib", 3 * 2**29),
        ("512MB", 512 * 10**6),
        ("10 kB", 10**4),
        ("100", 100),
        (100, 100),
    ],
)
def test_a_feature_budget_may_carry_a_unit(text: str | int, count: int) -> None:
    assert load_spec(minimal(compute={"feature_budget": text})).compute.feature_budget == count


# Paths.


def test_relative_paths_are_resolved_against_the_file_of_the_spec(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "specs"
    (folder / "models" / "cars").mkdir(parents=True)
    file = folder / "run.yaml"
    file.write_text(to_yaml(minimal(experts={"cars": {"weights": "models/cars"}, "x": {"weights": "org/name"}})))
    monkeypatch.chdir(tmp_path)
    for source in (file, "specs/run.yaml"):
        spec = load_spec(source)
        assert spec.base is not None
        assert spec.base.weights == str(folder / "base.safetensors")
        assert spec.experts["cars"].weights == str(folder / "models" / "cars"), "it exists, so it is a path"
        assert spec.experts["x"].weights == "org/name"
        entry = spec.data.tasks["cars"]
        assert isinstance(entry, ImageFolderData)
        assert entry.calibration == str(folder / "cars" / "train")


@pytest.mark.parametrize(
    ("source", "is_path"),
    [
        ("openai/clip-vit-base-patch32", False),
        ("ViT-B-32-quickgelu", False),
        ("meta-llama/Llama-3.2-3B", False),
        ("timm/vit_base_patch16_clip_224.openai", False),
        ("./openai/clip", True),
        ("../clip", True),
        ("model_config.json", True),
        ("folder/weights.SAFETENSORS", True),
        ("weights.pt", True),
    ],
)
def test_a_name_stays_as_it_is_and_a_path_becomes_absolute(
    source: str, is_path: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    spec = load_spec(minimal(architecture={"loader": "hf-clip", "source": source}))
    assert spec.architecture.source == (str(tmp_path / source) if is_path else source)


def test_an_absolute_path_and_the_home_folder_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    spec = load_spec(minimal(base={"weights": tmp_path / "b"}, merged={"weights": "~/m"}))
    assert spec.base is not None
    assert spec.merged is not None
    assert (spec.base.weights, spec.merged.weights) == (str(tmp_path / "b"), str(tmp_path / "m"))


# Overrides.


def test_overrides_are_parsed_as_yaml_and_applied_in_order() -> None:
    given_spec = minimal()
    before = copy.deepcopy(given_spec)
    spec = load_spec(
        given_spec,
        [
            "data.defaults.n=64",
            "data.defaults.n=32",
            "data.cars.n_test=10",
            "calibration.lam=1e-5",
            "metrics.jacobian=false",
            "layers.select=[blocks, 3]",
            "merged=null",
            "merge={method: average}",
            "name=a=b",
        ],
    )
    assert spec.data.defaults.n == 32
    assert spec.data.tasks["cars"].n_test == 10
    assert spec.calibration is not None
    assert spec.calibration.parameters == {"lam": 1e-5}
    assert spec.metrics.jacobian is False
    assert spec.layers.select == ("blocks", 3)
    assert spec.merged is None
    assert spec.name == "a=b"
    assert given_spec == before, "the caller's own mapping is not modified"


# Digest, dump, schema.


def shuffled(value: Any, randomness: random.Random) -> Any:
    if isinstance(value, dict):
        items = list(value.items())
        randomness.shuffle(items)
        return {key: shuffled(inner, randomness) for key, inner in items}
    return value


@settings(max_examples=25)
@given(st.randoms(use_true_random=False))
def test_the_order_of_keys_plays_no_part_in_the_digest(randomness: random.Random) -> None:
    entry = {"kind": "imagefolder", "calibration": "a", "test": "b"}
    merge = {"method": "ties", "density": 0.2, "scaling": {"cars": 0.3, "花": 0.5}}
    spec = load_spec(minimal(merged=None, merge=merge, data={"cars": entry, "Blumen 花": entry}))
    assert load_spec(shuffled(spec.as_dict(), randomness)).digest() == spec.digest()


@pytest.mark.parametrize(
    "override",
    [
        "data.defaults.seed=1",
        "experts.cars.weights=org/other",
        "heads.cars.classes=[T-shirt/top, sedan]",
        "name=x",
    ],
)
def test_any_other_value_changes_the_digest(override: str) -> None:
    assert load_spec(minimal(), [override]).digest() != load_spec(minimal()).digest()


@pytest.mark.slow
def test_the_digest_is_equal_under_any_hash_seed() -> None:
    script = "import json, sys; import driftlens.config.spec as s; print(s.load_spec(json.load(sys.stdin)).digest())"
    digests = {
        subprocess.run(
            [sys.executable, "-c", script],
            input=json.dumps(minimal()),
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("0", "42")
    }
    assert digests == {load_spec(minimal()).digest()}


names = st.text(st.characters(exclude_categories=("Cc", "Cs")), min_size=1, max_size=8).filter(
    lambda name: name.strip() and name != "defaults"
)


@settings(max_examples=40)
@given(st.dictionaries(names, st.just({"weights": "org/x"}), min_size=1, max_size=4), names)
def test_what_is_dumped_loads_to_an_equal_spec(experts: dict[str, Any], name: str) -> None:
    spec = load_spec(minimal(experts=experts, heads=None, data=None, name=name))
    again = load_spec(parse_yaml(spec.dump(), "dump"))
    assert again == spec
    assert again.digest() == spec.digest()
    assert tuple(sorted(experts)) == again.tasks


def test_the_dump_spells_out_defaults_and_loads_from_a_file(tmp_path: Path) -> None:
    spec = load_spec(minimal(), ["calibration={preset: demo-clip, lam: 1e-5}", "data.cars.n=7"])
    file = tmp_path / "elsewhere" / "spec.yaml"
    file.parent.mkdir()
    file.write_text(spec.dump(), encoding="utf-8")
    assert load_spec(file) == spec
    assert parse_yaml(spec.dump(), "dump")["metrics"]["jacobian"]["tolerance"] == 1e-4


def test_a_run_keeps_its_spec_readable_when_keys_are_taken_out(tmp_path: Path) -> None:
    """As earlier versions wrote it: the defaults of keys that nothing read stand in the file."""
    old = load_spec(minimal()).as_dict()
    old["projection"] = {"methods": ["pca"], "layer": "final", "max_points": 2000, "seed": 0}
    old["compute"]["solve_dtype"] = "float64"
    file = tmp_path / "spec.yaml"
    file.write_text(to_yaml(old), encoding="utf-8")
    with pytest.raises(SpecError, match="projection: unknown key"):
        load_spec(file)
    (tmp_path / "manifest.json").write_text("{}", encoding="utf-8")
    assert load_spec(file) == load_spec(minimal())
    old["projections"] = {}
    file.write_text(to_yaml(old), encoding="utf-8")
    with pytest.raises(SpecError, match="projections: unknown key"):
        load_spec(file)


@example("\x85")
@example("a\u2028b")
@given(
    st.recursive(
        st.text(max_size=6) | st.booleans() | st.integers(1 - 2**64, 2**64 - 1) | st.floats(allow_nan=False),
        st.lists,
    )
)
def test_yaml_that_is_written_reads_back_to_the_same_value(value: Any) -> None:
    again = parse_yaml(to_yaml({"value": value}), "text")["value"]
    assert repr(again) == repr(value), "a number stays a number, text stays text"


def test_the_published_schema_accepts_what_loads_and_refuses_what_does_not() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator(RunSpec.model_json_schema())
    validator.check_schema(RunSpec.model_json_schema())
    spec = minimal(compute={"feature_budget": "2GiB"}, metrics={"jacobian": False})
    assert list(validator.iter_errors(spec)) == []
    assert list(validator.iter_errors(load_spec(spec).as_dict())) == []
    for wrong in (
        minimal(exprts={}),
        minimal(layers={"pool": "max"}),
        minimal(data={"cars": {"kind": "zip"}}),
    ):
        assert list(validator.iter_errors(wrong)), wrong


OPTION = re.compile(r"^(\s*)#(?=[a-z])", flags=re.MULTILINE)


@pytest.mark.parametrize("name", packaged_names("templates"))
def test_a_template_loads_as_it_stands(name: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(spec_template(name), encoding="utf-8")
    spec = load_spec(file)
    assert spec.architecture.loader in loaders, "what is offered can be run"
    assert set(spec.data.tasks) == set(spec.experts), "every task has data"


@pytest.mark.parametrize("name", packaged_names("templates"))
def test_a_template_loads_with_every_option_switched_on(name: str, tmp_path: Path) -> None:
    text, count = OPTION.subn(r"\1", spec_template(name))
    assert count >= 2
    file = tmp_path / "run.yaml"
    file.write_text(text, encoding="utf-8")
    # `merged` and `merge` are alternatives, so the option replaces the other.
    spec = load_spec(file, ["merged=null"])
    assert spec.merge is not None
    assert spec.compute == load_spec(file, ["merged=null", "compute={}"]).compute, "the values shown are the defaults"
