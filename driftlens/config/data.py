"""The `data` section: the source of each task's images or texts, and how many are sampled."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal, Self

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

from driftlens.config.types import (
    ClassNames,
    Count,
    CountOrAll,
    Flag,
    LocalPath,
    PythonTarget,
    Seed,
    Source,
    SpecSection,
    Text,
    field_error,
    path_to_text,
    resolve_path,
)
from driftlens.utils.registry import Registry
from driftlens.utils.variants import METRICS


class Views(SpecSection):
    """Augmented copies of every calibration sample, generated from `seed` whenever they are read.

    `crop` shifts an image and changes its light, `mix` adds another sample of the task, `words` replaces words of a
    prompt by words of the task's other prompts; `auto` chooses by the samples, `none` makes no copies.
    """

    kind: Literal["auto", "crop", "mix", "words", "none"] = "auto"
    copies: Annotated[int, Field(strict=True, ge=1, le=31)] = 3
    seed: Seed = 0

    @property
    def count(self) -> int:
        """The number of copies of each sample; 0 for the kind `none`."""
        return 0 if self.kind == "none" else self.copies

    def __str__(self) -> str:
        return (
            "none" if self.kind == "none" else ":".join(map(str, (self.kind, self.copies, *filter(None, [self.seed]))))
        )


_VIEWS = re.compile(r"(?P<kind>[a-z]+)?:?(?P<copies>\d{1,9})?(:(?P<seed>\d{1,9}))?")


def _expand_short_views(views: Any) -> Any:
    """Expand the short forms `3`, `crop`, `crop:3` and `crop:3:1` of views to a mapping."""
    if isinstance(views, int) and not isinstance(views, bool):
        return {"copies": views}
    if not isinstance(views, str):
        return views
    match = _VIEWS.fullmatch(views)
    if match is None or not views:
        # pydantic refuses it with the list of fields.
        return views
    return {name: value if name == "kind" else int(value) for name, value in match.groupdict().items() if value}


ViewsSetting = Annotated[Views | None, BeforeValidator(_expand_short_views)]
"""Views as a mapping, or in short form: `crop:3`."""


class DataDefaults(SpecSection):
    """Default sample counts, seed and batch size, which a task's own entry may override."""

    n: Count = 256
    n_diagnosis: Count = 256
    n_test: CountOrAll = "all"
    seed: Seed = 0
    batch_size: Count = 32
    views: ViewsSetting = None


def _require_known_metric(name: str) -> str:
    if name not in METRICS:
        raise field_error(f"unknown metric {name!r}", f"Choose one of {', '.join(METRICS)}.")
    return name


MetricName = Annotated[Text, AfterValidator(_require_known_metric)]


class Entry(SpecSection):
    """The fields that data entries of every kind have; `metric` defaults to accuracy or exact match."""

    kind: str
    n: Count | None = None
    n_diagnosis: Count | None = None
    n_test: CountOrAll | None = None
    views: ViewsSetting = None
    metric: Annotated[
        tuple[MetricName, ...] | None, BeforeValidator(lambda names: (names,) if isinstance(names, str) else names)
    ] = None


# Text between doubled braces, or a field. Not `str.format`: prompts may contain JSON or code with other braces.
_FIELD = re.compile(r"\{(\{[\w][\w .\-/]*\})\}|\{([\w][\w .\-/]*)\}")


def template_fields(template: str) -> tuple[str, ...]:
    """List the names in braces in a prompt template; doubled braces are plain text."""
    return tuple(match[2] for match in _FIELD.finditer(template) if match[2])


def fill_template(template: str, values: Mapping[str, str]) -> str:
    """Fill the fields of a prompt template; other braces, also those in values, are kept."""
    return _FIELD.sub(lambda match: match[1] or values[match[2]], template)


def _labels_as_text(words: Any) -> Any:
    """Convert a mapping's labels to text, since YAML reads some as numbers or booleans."""
    if not isinstance(words, Mapping):
        return words
    # `str(True)` is "True", but the label in the file is `true`.
    return {str(label).lower() if isinstance(label, bool) else str(label): word for label, word in words.items()}


def _require_prompt_field(template: str) -> str:
    if not template_fields(template):
        raise field_error(f"the prompt {template!r} has no field", "Write {COLUMN} for the text of a row.")
    return template


def _require_target_field(template: str) -> str:
    if set(template_fields(template)) != {"target"}:
        raise field_error(f"the answer {template!r} must have the field {{target}} only", 'Example: " {target}".')
    return template


class Corpus(SpecSection):
    """The passages that queries search: a file, or a split of the entry's own data.

    Attributes:
        text: column of the passages.
        key: column of their keys in queries, which several may share; their text if left out.
        prompt: format of a passage, with columns in braces.
    """

    file: LocalPath | None = None
    split: Text | None = None
    text: Text = "text"
    key: Text | None = None
    prompt: Annotated[Text, AfterValidator(_require_prompt_field)] | None = None

    @model_validator(mode="after")
    def _require_file_or_split(self) -> Self:
        if (self.file is None) == (self.split is None):
            raise field_error(
                "a corpus is a file or a split", "Give `file: FILE`, or `split: NAME` of the entry's data."
            )
        return self


Classes = Flag | ClassNames
"""True if labels are classes named elsewhere; or the names of all classes, or a JSON file of them."""


class TextEntry(Entry):
    """The columns and templates that turn rows of a data source into questions and answers.

    Attributes:
        input: column of the text that `{input}` refers to.
        target: column of the answers, optional for calibration; by default `target` if that exists.
        prompt: the model's question, with names of columns in braces.
        answer: the expected answer; by default with a leading space for decoders without `chat`.
        classes: True if targets are class names, which a head's rows refer to; or the names, or a JSON file.
        words: the model's word for each label; targets are classes then.
        chat: True if questions use the tokenizer's chat template, as a user's message.
        max_length: maximal number of tokens per row; the model's own limit if left out.
        too_long: cut or refuse longer questions.
        decoder_inputs: answers shown during calibration: the data's, the expert's own greedy ones, or none.
        pair: column of the second text; `target` is their similarity, a number.
        positive: column of texts, or keys of the corpus, that answer a query; one or a list.
        negative: column of the texts among which a query's positives are ranked, without a corpus.
        corpus: the passages that queries search; all positives if left out.
    """

    input: Text | None = None
    target: Text | None = None
    prompt: Annotated[Text, AfterValidator(_require_prompt_field)] | None = None
    answer: Annotated[Text, AfterValidator(_require_target_field)] | None = None
    classes: Classes = False
    words: Annotated[dict[str, Text], Field(min_length=1), BeforeValidator(_labels_as_text)] | None = None
    chat: Flag = False
    max_length: Count | None = None
    too_long: Literal["cut", "refuse"] = "cut"
    decoder_inputs: Literal["target", "expert", "none"] | None = None
    pair: Text | None = None
    positive: Text | None = None
    negative: Text | None = None
    corpus: Annotated[
        Corpus | None, BeforeValidator(lambda place: {"file": place} if isinstance(place, str) else place)
    ] = None

    @property
    def has_text_column(self) -> bool:
        """True if the entry names a text column, so that its rows are texts."""
        return self.input is not None or self.prompt is not None

    @property
    def answer_column(self) -> str:
        """The name of the column with the answers."""
        return self.target or "target"

    @property
    def image_column(self) -> str | None:
        """The name of the column with the images, or image paths, of questions; None for questions without images."""
        return getattr(self, "image", None) if self.has_text_column else None

    @model_validator(mode="after")
    def _require_consistent_fields(self) -> Self:
        fields = type(self).model_fields
        # Fields with their default are left out, also if the file has them: runs store specs with all defaults.
        set_fields = [name for name in fields if getattr(self, name) != fields[name].default]
        if not self.has_text_column:
            has_classes = self.kind == "table" and self.classes is not True
            others = {*Entry.model_fields, *(["classes"] if has_classes else [])}
            if own := [name for name in TextEntry.model_fields if name in set_fields and name not in others]:
                raise field_error(f"{own[0]} needs a text column", "Add `input: COLUMN`, or a `prompt` with {COLUMN}.")
            return self
        if "label" in set_fields:
            raise field_error("label belongs to images, but the entry has texts", "The column of answers is `target`.")
        self._refuse_conflicting_fields(set_fields)
        columns = {self.input if name == "input" else name for name in template_fields(self.prompt or "")}
        # With the answer in the question, accuracy would measure copying.
        if self.answer_column in columns:
            raise field_error(f"the prompt contains the answer, {self.answer_column}", "Remove it from the prompt.")
        return self

    def _refuse_conflicting_fields(self, set_fields: Collection[str]) -> None:
        # Each kind of comparison ignores these fields, so setting one of them is a mistake.
        conflicts: dict[str, tuple[str, ...]] = {
            "pair": ("positive", "negative", "corpus", "classes", "words", "chat", "answer"),
            "positive": ("classes", "words", "chat", "answer", "target"),
            "negative": ("corpus",),
        }
        for key, others in conflicts.items():
            if key in set_fields and (both := [name for name in others if name in set_fields]):
                raise field_error(f"{both[0]} can't be combined with {key}", "Remove one of them.")
        for key in ("negative", "corpus"):
            if key in set_fields and "positive" not in set_fields:
                raise field_error(f"{key} needs the column of answers", "Add `positive: COLUMN`.")


class _FilePerSplit(Entry):
    """A file or folder for each split."""

    calibration: LocalPath
    test: LocalPath
    diagnosis: LocalPath | None = None


class ImageFolderData(_FilePerSplit):
    """Image folders with a sub-folder per class; sub-folders of `unlabelled` splits are not classes."""

    kind: Literal["imagefolder"]
    unlabelled: tuple[Literal["calibration", "diagnosis", "test"], ...] = ()


class NpzArrays(SpecSection):
    """The image and label arrays of one split in an `.npz` file; without `y` the split has no labels."""

    file: LocalPath | None = None
    x: Text
    y: Text | None = None


class NpzData(Entry):
    """An `.npz` file with arrays `x_train`, `y_train`, `x_test`, `y_test` and `class_names`, or arrays by name."""

    kind: Literal["npz"]
    file: LocalPath | None = None
    calibration: NpzArrays | None = None
    test: NpzArrays | None = None
    diagnosis: NpzArrays | None = None

    @model_validator(mode="after")
    def _require_file_per_split(self) -> Self:
        splits = [self.calibration, self.test, *filter(None, [self.diagnosis])]
        if self.file is None and not all(arrays and arrays.file for arrays in splits):
            raise field_error(
                "a split has no file", "Set `file`, or `calibration: {file, x, y}` and `test: {file, x, y}`."
            )
        return self


class HfData(TextEntry):
    """A folder written by `save_to_disk` of the library `datasets`, or a Hub id.

    Rows are images, or with `input` or `prompt` texts, whose images are in the column `image`.
    """

    kind: Literal["hf"]
    path: Source
    revision: Text | None = None
    config: Text | None = None
    calibration: Text
    test: Text
    diagnosis: Text | None = None
    image: Text | None = None
    label: Text | None = "label"


class JsonlData(_FilePerSplit, TextEntry):
    """Text tasks: files with one JSON object per line.

    `image` names the key of the path of a question's image, or a list of paths.
    """

    kind: Literal["jsonl"]
    input: Text = "input"
    image: Text | None = None


def _resolve_file_or_split_value(value: str, info: ValidationInfo) -> str:
    return value if info.data.get("file") is not None else resolve_path(value, info)


Rows = Annotated[Text, BeforeValidator(path_to_text), AfterValidator(_resolve_file_or_split_value)]
"""A file of one split; with `file`, the value of its rows in the column `split`."""


def _expand_tab_name(text: Any) -> Any:
    return "\t" if text in ("tab", "\\t") else text


class TableData(TextEntry):
    """CSV, TSV or Parquet files with image paths and labels, or, with `input` or `prompt`, with texts.

    There is one file per split, or `file` with a column of splits. `image` is the column of image paths, by default
    `path`.
    """

    kind: Literal["table"]
    file: LocalPath | None = None
    split: Text = "split"
    calibration: Rows
    test: Rows
    diagnosis: Rows | None = None
    image: Text | None = None
    label: Text | None = "label"
    classes: Classes = None
    encoding: Text | None = None
    separator: Annotated[str, Field(min_length=1, max_length=1), BeforeValidator(_expand_tab_name)] | None = None

    @property
    def path_column(self) -> str:
        """The name of the column with the image paths."""
        return self.image or "path"


class WebdatasetData(_FilePerSplit):
    """Tar files of samples, as a file, folder or pattern per split; `image` and `label` are member extensions."""

    kind: Literal["webdataset"]
    image: Text | None = None
    label: Text | None = "cls"
    key: Text = "label"
    classes: ClassNames = None


class PythonData(Entry):
    """A user's Python function that returns the samples of `calibration` or `test`; needs `--trust-code`."""

    kind: Literal["python"]
    target: PythonTarget


KINDS = ("imagefolder", "npz", "hf", "table", "webdataset", "jsonl", "python")


# Models of kinds that plug-ins add. Looked up for unknown kinds only, since loading plug-ins takes time.
data_kinds: Registry[type[Entry]] = Registry("kind of data", "driftlens.config", "driftlens.data_sources")


def _validate_by_kind(entry: Any, check: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
    kind = entry.get("kind") if isinstance(entry, Mapping) else None
    if isinstance(kind, str) and kind not in KINDS and kind in data_kinds:
        return data_kinds[kind].model_validate(entry, context=info.context)
    return check(entry)


TaskData = Annotated[
    SerializeAsAny[ImageFolderData | NpzData | HfData | TableData | WebdatasetData | JsonlData | PythonData],
    Field(discriminator="kind"),
    WrapValidator(_validate_by_kind),
]
"""The data of one task."""


class Data(SpecSection):
    """The spec's `data` section: defaults, and one entry per task under the task's name."""

    # Tasks are next to `defaults` in the file, so they are the extra keys of this section.
    model_config = ConfigDict(extra="allow", frozen=True)
    __pydantic_extra__: dict[str, TaskData] = Field(init=False)

    defaults: DataDefaults = Field(default_factory=DataDefaults)

    @property
    def tasks(self) -> dict[str, TaskData]:
        """The data entries by task name, sorted."""
        return dict(sorted(self.__pydantic_extra__.items()))
