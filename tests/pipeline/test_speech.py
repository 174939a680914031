"""Speech models from files: sounds are heard as their library hears them, what is written is scored word by word."""

from __future__ import annotations

import copy
import functools
import io
import json
import wave
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pytest
import torch
import transformers

import driftlens as dl
from driftlens.base.errors import DataError, DriftLensError, IncompatibleModelsError, SpecError
from driftlens.base.metrics import METRICS
from driftlens.checkpoints.loading import open_checkpoint
from driftlens.findings.measures import interval_of
from driftlens.jobs.preflight.job import preflight
from driftlens.jobs.study.opening import open_study
from driftlens.models.architecture import load_architecture
from driftlens.models.language.generation import log_likelihoods
from driftlens.models.language.sounds import word_errors, words_of
from driftlens.spec import load_spec
from tests.refusing import refusing
from tests.zoo.cases import perturbed
from tests.zoo.seq2seq import extractor_of_seconds, save_whisper, whisper
from tests.zoo.suite import spec_of_folders
from tests.zoo.tokenizers import word_tokenizer

RATE = 16000
NUM = 9


def sounds(folder: Path) -> list[str]:
    """Files of waveforms, shorter ones too, of whole numbers in WAV, and of features that the extractor has made."""
    draw, names = np.random.default_rng(0), []
    extractor = extractor_of_seconds()
    for at in range(2 * NUM):
        heard = draw.normal(size=RATE - 900 * at).astype(np.float32) / 4
        names.append(f"{at}.{'wav' if at % 3 == 1 else 'npy'}")
        if at % 3 == 1:
            with wave.open(str(folder / names[-1]), "wb") as file:
                file.setnchannels(2)
                file.setsampwidth(2)
                file.setframerate(RATE)
                file.writeframes((heard.clip(-1, 1) * 32767).astype("<i2").repeat(2).tobytes())
        elif at % 3 == 2:
            features = extractor(heard, sampling_rate=RATE, return_tensors="np").input_features[0]
            np.save(folder / names[-1], features)
        else:
            np.save(folder / names[-1], heard)
    return names


def features_of(path: Path) -> torch.Tensor:
    """What the library's extractor makes of a file."""
    extractor = extractor_of_seconds()
    if path.suffix == ".wav":
        with wave.open(str(path), "rb") as file:
            heard = np.frombuffer(file.readframes(file.getnframes()), "<i2")[::2] / 32768
    else:
        heard = np.load(path)
    if heard.ndim == 2:
        return torch.tensor(heard)[None]
    return extractor(heard, sampling_rate=RATE, return_tensors="pt").input_features


@torch.no_grad()
def answer(model: Any, heard: torch.Tensor, most: int) -> str:
    """Greedily, a whole forward pass of the library for every token; `green` begins no answer."""
    ids, tokenizer = [3], word_tokenizer("encoder-decoder", ends_texts=True)
    for turn in range(most):
        scores = model.double()(heard.double(), decoder_input_ids=torch.tensor([ids])).logits[0, -1]
        if turn == 0:
            scores[SUPPRESSED] = -torch.inf
        ids.append(int(scores.argmax()))
        if ids[-1] == tokenizer.eos_token_id:
            break
    return str(tokenizer.decode(ids[1:], skip_special_tokens=True)).strip()


SUPPRESSED = 8


def spec_of(folder: Path, **entry: Any) -> dict[str, Any]:
    names = sounds(folder)
    model = transformers.AutoModelForSpeechSeq2Seq.from_pretrained(folder / "a")
    said = [answer(model, features_of(folder / name), 6) for name in names]
    assert len({*said}) > 4  # or else nobody would hear the sounds
    for split, part in (("train", range(NUM)), ("test", range(NUM, 2 * NUM))):
        rows = [{"file": names[at], "text": f"{said[at]} yes" if at % 2 else said[at].upper()} for at in part]
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    files = {"calibration": str(folder / "train.jsonl"), "test": str(folder / "test.jsonl")}
    counts = {"n": 8, "n_diagnosis": 5, "batch_size": 4}
    data = {"defaults": counts, "a": {"kind": "jsonl", **files, "audio": "file", "target": "text", **entry}}
    settings = {"merge": {"method": "task_arithmetic", "scaling": 0.5}, "compute": {"dtype": "float64"}}
    return spec_of_folders("hf-seq2seq", folder / "base", {"a": folder / "a"}, data, **settings)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("speech")
    for seed, name in enumerate(("base", "a")):
        model = perturbed(perturbed(whisper(), 2, 0.5), seed, 0.05 * seed)
        model.generation_config.begin_suppress_tokens = [SUPPRESSED]
        save_whisper(model, place / name)
    return place


@pytest.fixture(scope="module")
def written(folder: Path) -> dict[str, Any]:
    return spec_of(folder)


@pytest.fixture
def spec(written: dict[str, Any]) -> dict[str, Any]:
    return copy.deepcopy(written)


@pytest.mark.family("Whisper")
@pytest.mark.shows("drift", files="hf-seq2seq", heads="word error rate")
@pytest.mark.slow
def test_what_is_heard_is_scored_word_by_word(folder: Path, spec: dict[str, Any], tmp_path: Path) -> None:
    run = dl.analyze(spec, out=tmp_path / "run", progress="none")
    rows = run.layers(variant="merged")
    assert rows["closure_error"].max() < 1e-9 and set(rows["stream"]) == {"encoder", "hidden"}
    _assert_transcribed(run, "expert", folder / "a", folder)


@pytest.mark.slow
@pytest.mark.family("Whisper")
@pytest.mark.shows("attribution", "sites", "reloads")
def test_a_repaired_speech_model_is_heard_by_its_library(
    folder: Path, spec: dict[str, Any], tmp_path: Path
) -> None:
    spec["metrics"] = {"jacobian": {"samples": 2}}
    run = dl.analyze(spec, out=tmp_path / "run", progress="none")
    shares = run.layers(variant="merged")[["final_share", "remainder_share"]]
    assert shares.sum().sum() == pytest.approx(1, abs=1e-6)
    run.calibrate(dl.FeatCal(), name="featcal", save_weights=tmp_path / "saved")
    _assert_transcribed(dl.open_run(tmp_path / "run"), "calibrated:featcal", tmp_path / "saved", folder)
    card = (tmp_path / "saved" / "README.md").read_text()
    assert "AutoModelForSpeechSeq2Seq" in card and "automatic-speech-recognition" in card
    processor = transformers.AutoFeatureExtractor.from_pretrained(tmp_path / "saved")
    assert processor.hop_length == extractor_of_seconds().hop_length
    cross = "model.decoder.layers.1.encoder_attn.v_proj.weight"
    places = (folder / "base", folder / "a", tmp_path / "saved")
    base, expert, saved = (open_checkpoint(place).read(cross) for place in places)
    assert not torch.allclose(saved, (base + expert) / 2, atol=1e-4)


def _assert_transcribed(run: dl.DriftRun, variant: str, place: Path, folder: Path) -> None:
    """What a variant wrote is what its library writes, a token at a time, and its errors are those counted by hand."""
    kind = transformers.AutoModelForSpeechSeq2Seq
    model, info = kind.from_pretrained(place, output_loading_info=True)
    assert not any(info.values())
    test = [json.loads(line) for line in (folder / "test.jsonl").read_text().split("\n")]
    wanted = [row["text"] for row in test]
    longest = max(len(text.split()) for text in wanted)
    said = [answer(model, features_of(folder / row["file"]), longest + 8) for row in test]
    scores = run.scores("a", variant)
    assert scores["answer"].tolist() == said and scores["target"].tolist() == wanted
    (found,) = run.accuracy("a", variant).to_dict("records")
    rate = sum(map(by_hand, said, wanted)) / sum(len(text.split()) for text in wanted)
    assert found["metric"] == "wer" and found["value"] == pytest.approx(rate)
    assert found["ci_low"] <= found["value"] <= found["ci_high"]


def by_hand(said: str, wanted: str) -> int:
    """The distance of two transcripts by its definition."""
    one, other = said.lower().split(), wanted.lower().split()

    @functools.cache
    def distance(left: int, right: int) -> int:
        if not left or not right:
            return left + right
        same = one[left - 1] == other[right - 1]
        if same:
            return distance(left - 1, right - 1)
        return 1 + min(distance(left - 1, right), distance(left, right - 1), distance(left - 1, right - 1))

    return distance(len(one), len(other))


@pytest.mark.parametrize(
    ("said", "wanted", "errors", "words"),
    [
        ("It's RED, is it?", "it's red is it", 0, 4),
        ("", "is it", 2, 2),
        ("is is it red", "is it green", 2, 3),
        ("yes no", "", 2, 0),
    ],
)
def test_words_are_counted_without_case_and_punctuation(
    said: str, wanted: str, errors: int, words: int
) -> None:
    one, other = words_of(said), words_of(wanted)
    assert (word_errors(one, other), len(other)) == (errors, words)
    try:
        import jiwer
    except ImportError:
        return
    if other:
        assert jiwer.wer(" ".join(other), " ".join(one)) == pytest.approx(errors / words)


def test_a_word_error_rate_weighs_words_and_has_an_interval_over_samples() -> None:
    errors, words = np.array([0.0, 2.0, 1.0]), np.array([8.0, 1.0, 4.0])
    score = interval_of(METRICS["wer"], errors, words)
    assert score.value == pytest.approx(3 / 13) and score.low < score.value < score.high


def test_likelihoods_of_transcripts_are_those_of_the_library(folder: Path, spec: dict[str, Any]) -> None:
    study, _ = open_study(load_spec(spec))
    test = study.tasks["a"].test
    assert test is not None and test.texts is not None and test.texts.reader is not None
    reader, heard = test.texts.reader, [test.text(at) for at in range(3)]
    with study.pool.loaded("base") as module:
        sums, _ = log_likelihoods(module, reader, [*map(reader.asked, heard)], [["it is red", "yes"]] * 3)
    model = transformers.AutoModelForSpeechSeq2Seq.from_pretrained(folder / "base").double().eval()
    tokens = [*reader.answer_tokens("it is red"), reader.end]
    for at, sample in enumerate(heard):
        with torch.no_grad():
            features = features_of(folder / sample.input).double()
            scores = model(features, decoder_input_ids=torch.tensor([[3, *tokens[:-1]]])).logits[0]
        wanted = scores.log_softmax(dim=-1)[range(len(tokens)), tokens].sum()
        assert float(sums[at, 0]) == pytest.approx(float(wanted), rel=1e-6)


def test_a_table_names_sounds_and_an_expert_writes_what_they_say(
    spec: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    spec["data"]["a"] |= {"kind": "table"}
    for split, name in (("calibration", "train"), ("test", "test")):
        rows = pd.read_json(folder / f"{name}.jsonl", lines=True)
        rows["file"] = [str(folder / file) for file in rows["file"]]
        rows = rows.drop(columns="text") if split == "calibration" else rows
        rows.to_csv(tmp_path / f"{name}.csv", index=False)
        spec["data"]["a"][split] = str(tmp_path / f"{name}.csv")
    assert not preflight(load_spec(spec), estimate=False).problems
    study, _ = open_study(load_spec(spec))
    samples = study.tasks["a"].calibration
    assert samples is not None
    batch, model = samples.load([0, 1]), transformers.AutoModelForSpeechSeq2Seq.from_pretrained(folder / "a")
    tokenizer = word_tokenizer("encoder-decoder", ends_texts=True)
    for row in range(2):
        path = Path(samples.text(row).input)
        torch.testing.assert_close(batch["input_features"][row], features_of(path)[0])
        ids = batch["decoder_input_ids"][row]
        said = tokenizer.decode(ids[1:], skip_special_tokens=True).strip()
        assert said and said == answer(model, features_of(path), 15)


def wav(rate: int) -> bytes:
    made = io.BytesIO()
    with wave.open(made, "wb") as file:
        file.setparams((1, 1, rate, 0, "NONE", ""))
        file.writeframes(b"\x80" * 100)
    return made.getvalue()


HUGE = b"\x93NUMPY\x01\x00v\x00{'descr': '<f4', 'fortran_order': False, 'shape': (999999999999,), }"
HUGE = HUGE + b" " * (10 + 118 - len(HUGE) - 1) + b"\n"


@pytest.mark.parametrize(
    ("content", "words", "hint"),
    [
        pytest.param(np.zeros(2 * RATE, np.float32), "2.0 seconds; the model hears 1", "pieces", id="long"),
        pytest.param(np.zeros((8, 11), np.float32), "reads [8, 12]", "waveform itself", id="other features"),
        pytest.param(np.full(RATE, np.nan, np.float32), "not finite", "PCM", id="not finite"),
        pytest.param(np.array([print], dtype=object), "no sound", "PCM", id="objects"),
        pytest.param(np.zeros(4, complex), "its numbers are complex128", "PCM", id="complex"),
        pytest.param(HUGE, "no sound", "PCM", id="promises more than it holds"),
        pytest.param(b"RIFF", "no sound", "PCM", id="no array"),
        pytest.param(wav(8000), "8000 samples a second; the model hears 16000", "ffmpeg", id="rate"),
        pytest.param(None, "5 of 5 sounds are not there", "", id="gone"),
    ],
)
def test_sounds_that_cant_be_heard_are_refused(
    content: Any, words: str, hint: str, spec: dict[str, Any], tmp_path: Path
) -> None:
    name = "odd.wav" if isinstance(content, bytes) and b"WAVE" in content else "odd.npy"
    if isinstance(content, bytes):
        (tmp_path / name).write_bytes(content)
    elif content is not None:
        np.save(tmp_path / name, content, allow_pickle=True)
    (tmp_path / "test.jsonl").write_text("\n".join([json.dumps({"file": name, "text": "red"})] * 5))
    spec["data"]["a"]["test"] = str(tmp_path / "test.jsonl")
    with refusing(DataError, words, hint=hint):
        dl.analyze(spec, out=tmp_path / "run", progress="none")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"audio": "sound"}, DataError, "no column 'sound'"),
        ({"prompt": "say {text}"}, SpecError, "prompt doesn't go together with audio"),
        ({"audio": None, "input": "file"}, DataError, "have no sounds, and the model reads sounds"),
    ],
    ids=["column", "prompt", "texts"],
)
def test_what_is_no_entry_of_sounds_is_refused(
    change: dict[str, Any], error: type[DriftLensError], words: str, spec: dict[str, Any], tmp_path: Path
) -> None:
    spec["data"]["a"] |= change
    with refusing(error, words):
        dl.analyze(spec, out=tmp_path / "run", progress="none")
    assert not (tmp_path / "run").exists()


BYTES = {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}


def in_a_data_set(folder: Path, spec: dict[str, Any], place: Path, cell: Any, feature: Any) -> None:
    """The sounds of every third row as cells of a data set, in the place of the files.

    Bytes are written as a plain column and called `datasets.Audio` afterwards, which would ask for an encoder.
    """
    kinds, splits = datasets.Features({"heard": feature, "text": datasets.Value("string")}), {}
    for split in ("train", "test"):
        rows = [json.loads(line) for line in (folder / f"{split}.jsonl").read_text().splitlines()]
        cells = [{"heard": cell(folder / row["file"]), "text": row["text"]} for row in rows]
        kept = [row for row in cells if row["heard"] is not None]
        splits[split] = datasets.Dataset.from_list(kept, features=kinds)
    datasets.DatasetDict(splits).save_to_disk(str(place))
    for info in place.glob("*/dataset_info.json") if feature == BYTES else ():
        stated = json.loads(info.read_text())
        stated["features"]["heard"] = {"_type": "Audio"}
        info.write_text(json.dumps(stated))
    entry = {"kind": "hf", "path": str(place), "calibration": "train", "test": "test", "audio": "heard"}
    spec["data"] = {"a": entry | {"target": "text"}, "defaults": {"n": 3, "n_diagnosis": 3, "batch_size": 2}}


def as_cell(form: str, file: Path) -> Any:
    """A file's content as a data set holds it; None where this form is another file's."""
    if form == "bytes":
        return {"bytes": file.read_bytes(), "path": None} if file.suffix == ".wav" else None
    array = None if file.suffix == ".wav" else np.load(file)
    if array is None or (array.ndim == 2) != (form == "features"):
        return None
    return array.tolist() if form == "features" else {"array": array.tolist(), "sampling_rate": RATE}


@pytest.mark.parametrize("form", ["bytes", "numbers", "features"])
def test_cells_of_a_data_set_are_heard_as_files_are(
    form: str, folder: Path, spec: dict[str, Any], tmp_path: Path
) -> None:
    """WAV files in `datasets.Audio`, waveforms with their rate, features: without the library's decoders."""
    number = datasets.Value("float32")
    feature = {
        "bytes": BYTES,
        "numbers": {"array": datasets.List(number), "sampling_rate": datasets.Value("int32")},
        "features": datasets.List(datasets.List(number)),
    }[form]
    in_a_data_set(folder, spec, tmp_path / "data", functools.partial(as_cell, form), feature)
    study, _ = open_study(load_spec(spec))
    test = study.tasks["a"].test
    assert test is not None and len(test) == NUM // 3
    rows = [json.loads(line) for line in (folder / "test.jsonl").read_text().splitlines()]
    files = [row["file"] for row in rows if as_cell(form, folder / row["file"]) is not None]
    wanted = {row["file"]: row["text"] for row in rows}
    heard = test.load(range(len(test)))["input_features"]
    for at, file in enumerate(files):
        assert test.text(at).target == wanted[file]
        torch.testing.assert_close(heard[at], features_of(folder / file)[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        pytest.param(
            {"bytes": b"fLaC" + b"\0" * 60, "path": "a.flac"},
            "no sound: file does not start with RIFF",
            id="packed",
        ),
        pytest.param({"bytes": None, "path": "/etc/hostname"}, "leads out of the data set", id="elsewhere"),
        pytest.param({"bytes": wav(8000), "path": None}, "8000 samples a second", id="rate"),
        pytest.param([1, 2, 3], "its numbers are int64", id="whole numbers"),
        pytest.param([[0.1, 0.2], [0.1]], "no sound", id="ragged"),
    ],
)
def test_cells_that_cant_be_heard_are_refused(
    cell: Any, words: str, folder: Path, spec: dict[str, Any], tmp_path: Path
) -> None:
    kind = "int64" if cell == [1, 2, 3] else "float32"
    value = datasets.Value(kind)
    feature = datasets.List(datasets.List(value) if isinstance(cell, list) and kind == "float32" else value)
    feature = BYTES if isinstance(cell, dict) else feature
    in_a_data_set(folder, spec, tmp_path / "data", lambda _: cell, feature)
    with refusing(DataError, words):
        dl.analyze(spec, out=tmp_path / "run", progress="none")
    assert not (tmp_path / "run").exists()


def test_encoders_of_sounds_are_refused_by_name(tmp_path: Path) -> None:
    config = transformers.Wav2Vec2Config(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, conv_dim=[8] * 7
    )
    config.architectures = ["Wav2Vec2ForCTC"]
    config.save_pretrained(tmp_path)
    for loader in ("hf-seq2seq", "hf-auto"):
        with pytest.raises(IncompatibleModelsError) as refusal:
            load_architecture(loader, str(tmp_path))
        assert "input_values" in refusal.value.message + str(refusal.value.hint)
