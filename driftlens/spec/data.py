"""The `data` section: where each task's images or texts come from, and how many are drawn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializeAsAny,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from driftlens.errors import SpecError
from driftlens.registry import Registry
from driftlens.spec.sections import ClassNames
from driftlens.spec.types import (
    Count,
    CountOrAll,
    Flag,
    LocalPath,
    Part,
    PythonTarget,
    Seed,
    Source,
    Text,
    plain_text,
    problem,
    resolved,
)


class DataDefaults(Part):
    """Counts per task that a task's own entry may override.

    Attributes:
        n: samples drawn for calibration.
        n_diagnosis: samples drawn for diagnostics.
        n_test: samples on which accuracy is measured, or all.
        seed: decides which samples are drawn.
        batch_size: samples per forward pass.
    """

    n: Count = 256
    n_diagnosis: Count = 256
    n_test: CountOrAll = "all"
    seed: Seed = 0
    batch_size: Count = 32


class Entry(Part):
    """What an entry of any kind may set; of another distribution's kind too, see `data_kinds`."""

    kind: str
    n: Count | None = None
    n_diagnosis: Count | None = None
    n_test: CountOrAll | None = None


class Places(Entry):
    """A file or folder per split."""

    calibration: LocalPath
    test: LocalPath
    diagnosis: LocalPath | None = None


class ImageFolderData(Places):
    """Folders with one sub-folder per class, or with images only (then there are no labels).

    Attributes:
        unlabelled: splits whose sub-folders are no classes: images at any depth, without labels.
    """

    kind: Literal["imagefolder"]
    unlabelled: tuple[Literal["calibration", "diagnosis", "test"], ...] = ()


class NpzArrays(Part):
    """Which arrays of an `.npz` file make one split; without `y` it has no labels."""

    file: LocalPath | None = None
    x: Text
    y: Text | None = None


class NpzData(Entry):
    """An `.npz` file with `x_train, y_train, x_test, y_test, class_names`, or with arrays named per split."""

    kind: Literal["npz"]
    file: LocalPath | None = None
    calibration: NpzArrays | None = None
    test: NpzArrays | None = None
    diagnosis: NpzArrays | None = None

    @model_validator(mode="after")
    def _every_split_has_a_file(self) -> NpzData:
        splits = {"calibration": self.calibration, "test": self.test}
        if self.diagnosis is not None:
            splits["diagnosis"] = self.diagnosis
        homeless = [name for name, arrays in splits.items() if arrays is None or arrays.file is None]
        if self.file is None and homeless:
            raise problem(
                f"no file for {' and '.join(homeless)}",
                "Set `file`, or `calibration: {file, x, y}` and `test: {file, x, y}`.",
            )
        return self


class HfData(Entry):
    """A data set in the Hugging Face `datasets` format: a folder written by `save_to_disk`, or a Hub id."""

    kind: Literal["hf"]
    path: Source
    config: Text | None = None
    calibration: Text
    test: Text
    diagnosis: Text | None = None
    image: Text = "image"
    label: Text | None = "label"


class JsonlData(Places):
    """Text tasks: files with one JSON object per line that holds an input and a target.

    Attributes:
        classes: whether targets are the names of classes, which a head's rows meet.
    """

    kind: Literal["jsonl"]
    input: Text = "input"
    target: Text = "target"
    classes: Flag = False


def _file_or_value(value: str, info: ValidationInfo) -> str:
    return value if info.data.get("file") is not None else resolved(value, info)


Rows = Annotated[Text, BeforeValidator(plain_text), AfterValidator(_file_or_value)]
"""A file of one split; beside `file`, the value that its rows have in the column `split`."""


class TableData(Entry):
    """CSV, TSV or Parquet files of image paths and labels; one per split, or `file` with a column of splits."""

    kind: Literal["table"]
    file: LocalPath | None = None
    split: Text = "split"
    calibration: Rows
    test: Rows
    diagnosis: Rows | None = None
    image: Text = "path"
    label: Text | None = "label"
    classes: ClassNames = None


class WebdatasetData(Places):
    """Tar files of samples: a file, a folder or a pattern per split; `image` and `label` are endings of members."""

    kind: Literal["webdataset"]
    image: Text | None = None
    label: Text | None = "cls"
    key: Text = "label"
    classes: ClassNames = None


class PythonData(Entry):
    """A function of the user's that is called with `calibration` or `test`; runs only when trusted."""

    kind: Literal["python"]
    target: PythonTarget


KINDS = ("imagefolder", "npz", "hf", "table", "webdataset", "jsonl", "python")


data_kinds: Registry[type[Entry]] = Registry("kind of data", "driftlens.spec", "driftlens.data_sources")
"""What an entry of a kind that another distribution adds may hold; asked for kinds that are none of `KINDS`."""


def _of_its_kind(given: Any, check: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
    kind = given.get("kind") if isinstance(given, Mapping) else None
    if isinstance(given, Mapping) and kind is None:
        raise problem(f"kind is missing; expected one of {', '.join(KINDS)}")
    if not isinstance(kind, str) or kind in KINDS:
        return check(given)
    try:
        known = kind in data_kinds
    except SpecError as error:
        raise problem(error.message, error.hint) from None
    return data_kinds[kind].model_validate(given, context=info.context) if known else check(given)


TaskData = Annotated[
    SerializeAsAny[ImageFolderData | NpzData | HfData | TableData | WebdatasetData | JsonlData | PythonData],
    Field(discriminator="kind"),
    WrapValidator(_of_its_kind),
]
"""Where one task's samples come from."""


class Data(Part):
    """The defaults, and one entry per task under the task's own name."""

    # Tasks stand beside `defaults` in the file, so they are the extra keys of this section.
    model_config = ConfigDict(extra="allow", frozen=True)
    __pydantic_extra__: dict[str, TaskData] = Field(init=False)

    defaults: DataDefaults = DataDefaults()

    @property
    def tasks(self) -> dict[str, TaskData]:
        """Entry per task, sorted by the task's name."""
        return dict(sorted(self.__pydantic_extra__.items()))
