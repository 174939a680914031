"""One task's samples as a whole: drawn, labelled by name, kept apart where accuracy needs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from driftlens.config.data import DataDefaults
from driftlens.data.task_data import TaskData, open_task_data, require_same_classes
from driftlens.utils.distributed import Permissions
from driftlens.utils.errors import DataError
from tests.data.sources import entry_of, write_images
from tests.refusing import refusing


def first_red(pictures: list[Any]) -> Tensor:
    """A stand-in for a model's preprocessing: the red of each picture's first pixel, [n]."""
    return torch.tensor([int(np.asarray(picture)[0, 0, 0]) for picture in pictures])


def opened(values: dict[str, Any], *, counts: tuple[int, int, int | str] = (4, 3, "all"), **options: Any) -> TaskData:
    n, n_diagnosis, n_test = counts
    defaults = DataDefaults(n=n, n_diagnosis=n_diagnosis, n_test=n_test, batch_size=2)
    return open_task_data("Autos 車", entry_of(**values), defaults, first_red, reads="image", **options)


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, str]:
    """Two splits; an image's shade tells its class (10 or 20) and its number."""
    for split, count in (("train", 6), ("test", 5)):
        files = {f"{name}/{i}.png": shade + i for name, shade in (("a", 10), ("花", 20)) for i in range(count)}
        write_images(tmp_path / split, files)
    return {"kind": "imagefolder", "calibration": str(tmp_path / "train"), "test": str(tmp_path / "test")}


def shade_of(sample_id: str) -> int:
    name, file = sample_id.split("/")
    return {"a": 10, "花": 20}[name] + int(file.removesuffix(".png"))


def test_inputs_labels_and_ids_stay_together(folders: dict[str, str]) -> None:
    data = opened(folders)
    for samples, count in ((data.calibration, 4), (data.diagnosis, 3), (data.test, 10)):
        assert len(samples) == count
        loaded = torch.cat([batch.inputs for batch in samples.batches()])
        assert loaded.tolist() == [shade_of(sample) for sample in samples.ids]
        assert samples.labels == tuple(sample.split("/")[0] for sample in samples.ids)
        assert (samples.task, samples.batch_size) == ("Autos 車", 2)
    assert data.notices == ()
    assert data.class_names == ("a", "花")


def test_a_tasks_own_counts_stand_above_the_defaults(folders: dict[str, str]) -> None:
    data = opened({**folders, "n": 2, "n_test": 7})
    assert [len(samples) for samples in (data.calibration, data.diagnosis, data.test)] == [2, 3, 7]


def test_diagnosis_draws_from_the_test_split_unless_it_has_its_own(folders: dict[str, str], tmp_path: Path) -> None:
    assert set(opened(folders).diagnosis.ids) <= set(opened(folders).test.ids)
    own = write_images(tmp_path / "val", {f"a/{i}.png": 10 + i for i in range(90, 93)})
    data = opened({**folders, "diagnosis": str(own)})
    assert set(data.diagnosis.ids) == {"a/90.png", "a/91.png", "a/92.png"}


def test_equal_ids_of_different_folders_are_no_overlap(folders: dict[str, str]) -> None:
    data = opened(folders, counts=(12, 10, "all"))
    assert set(data.calibration.ids) > set(data.diagnosis.ids)
    assert data.notices == ()


def test_one_folder_for_calibration_and_test_keeps_their_samples_apart(folders: dict[str, str]) -> None:
    data = opened({**folders, "test": folders["calibration"]}, counts=(4, 8, "all"))
    calibration = set(data.calibration.ids)
    assert not calibration & set(data.test.ids)
    assert not calibration & set(data.diagnosis.ids)
    assert len(data.test) == 12 - 4
    assert any("excluded from the test" in notice for notice in data.notices)


def test_one_folder_for_calibration_and_diagnosis_is_stamped_with_the_overlap(
    folders: dict[str, str],
) -> None:
    data = opened({**folders, "diagnosis": folders["calibration"]}, counts=(12, 7, "all"))
    (notice,) = data.notices
    assert "Autos 車: calibration and diagnosis draw from the same samples" in notice
    assert "7 of 7 diagnosis samples are in both" in notice


def test_the_head_orders_the_classes_and_the_data_is_met_by_name(folders: dict[str, str]) -> None:
    data = opened(folders, head_classes=("花", "a"))
    assert data.class_names == ("花", "a")
    assert data.test.labels == opened(folders).test.labels


def test_a_head_may_have_more_classes_than_the_data(folders: dict[str, str]) -> None:
    data = opened(folders, head_classes=("z", "花", "a"))
    assert data.class_names == ("z", "花", "a")
    assert data.test.labels == opened(folders).test.labels
    (notice,) = set(data.notices) - set(opened(folders, head_classes=("花", "a")).notices)
    assert "the head has 3 classes, of which the test data lacks 1 ('z')" in notice


def test_classes_that_differ_from_the_heads_are_refused_with_both_lists(folders: dict[str, str]) -> None:
    with refusing(DataError, "task Autos 車", match=r"only in data: '花'; only in head: 'A'"):
        opened(folders, head_classes=("a", "A"))


@pytest.mark.parametrize("split", ["calibration", "test"])
def test_one_split_need_not_show_every_class(split: str, folders: dict[str, str], tmp_path: Path) -> None:
    few = write_images(tmp_path / "few", {f"a/{i}.png": i for i in range(5)})
    data = opened({**folders, split: str(few)}, head_classes=("a", "花"))
    shown = {name: set(getattr(data, name).labels or ()) for name in ("calibration", "test")}
    assert shown == {"calibration": {"a", "花"}, "test": {"a", "花"}} | {split: {"a"}}
    assert any("花" in notice for notice in data.notices) == (split == "test"), data.notices


def test_samples_without_labels_have_no_accuracy_and_say_so(folders: dict[str, str], tmp_path: Path) -> None:
    bare = write_images(tmp_path / "bare", {f"{i}.png": i for i in range(5)})
    data = opened({**folders, "test": str(bare)}, head_classes=("a", "花"))
    assert (data.test.labels, data.diagnosis.labels) == (None, None)
    assert data.notices == ("Autos 車: test samples have no labels, so accuracy is not measured",)


def test_real_arrays_meet_a_head_in_another_order(real: Path) -> None:
    file = real / "data" / "sign_digits.npz"
    with np.load(file, allow_pickle=False) as raw:
        names, numbers, pixels = raw["class_names"].tolist(), raw["y_test"], raw["x_test"]
    data = opened({"kind": "npz", "file": str(file)}, counts=(64, 32, "all"), head_classes=names[::-1])
    assert data.test.labels == tuple(names[number] for number in numbers)
    assert data.class_names == tuple(names[::-1])
    rows = [int(sample.removeprefix("test/")) for sample in data.diagnosis.ids]
    assert data.diagnosis.labels == tuple(names[numbers[row]] for row in rows)
    assert data.diagnosis.load(range(32)).tolist() == pixels[rows][:, 0, 0, 0].tolist()


def test_a_source_with_some_labels_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"partly_{tmp_path.name.replace('-', '_')}"
    pairs = "[(np.zeros((2, 2), np.uint8), label) for label in ('a', None)]"
    code = f"import numpy as np\nf = lambda split: {pairs}\n"
    (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(DataError, match="has no label, others do"):
        opened({"kind": "python", "target": f"{name}:f"}, counts=(2, 1, "all"), access=Permissions(trust=True))


def test_text_samples_reach_a_text_model_and_no_other(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f'{{"input": "i{row}", "target": "t{row}"}}\n' for row in range(1, 5)))
    values = {"kind": "jsonl", "calibration": str(file), "test": str(file)}
    with refusing(DataError, match="has text samples, but the model reads image", hint="For texts use"):
        opened(values, counts=(2, 2, "all"))
    defaults = DataDefaults(n=2, n_diagnosis=2)
    data = open_task_data("t", entry_of(**values), defaults, list, reads="text")
    samples = data.test
    assert samples.load(range(2)) == [(f"i{line}", "") for line in samples.ids], "answers are not shown"
    asked = data.calibration
    assert asked.load(range(2)) == [(f"i{line}", f"t{line}") for line in asked.ids]
    assert samples.text(1) == (f"i{samples.ids[1]}", f"t{samples.ids[1]}")
    assert samples.labels is None


# --- class names: compared by name, and differences told with the names that look alike


def differing(data: list[str], head: list[str], *, all_of_head: bool = True) -> DataError:
    with pytest.raises(DataError) as caught:
        require_same_classes(data, head, where="task cars", all_of_head=all_of_head)
    return caught.value


def test_the_same_names_in_another_order_are_accepted() -> None:
    require_same_classes(["b", "花", "a"], ["a", "b", "花"], where="task cars")


def test_a_split_that_serves_no_accuracy_may_lack_classes_but_not_add_any() -> None:
    require_same_classes(["a"], ["a", "b"], where="task cars", all_of_head=False)
    error = differing(["a", "c"], ["a", "b"], all_of_head=False)
    assert "only in data: 'c'" in error.message
    assert "only in head" not in error.message
