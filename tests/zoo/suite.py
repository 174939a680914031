"""A suite of texts on disk: a small language model, its experts and their questions."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import torch
import transformers

from driftlens.models.texts import TextProcessor
from tests.zoo.cases import perturbed, with_seed
from tests.zoo.decoders import llama, t5
from tests.zoo.tokenizers import WORDS as VOCABULARY, word_tokenizer

PAIRS = [
    *[
        ("is it red", "yes"),
        ("is it blue", "no it is green"),
        ("it is green", "it is"),
        ("is green blue", "red"),
    ],
    *[
        ("question red", "blue no"),
        ("question blue", "red green no"),
        ("no question", "green"),
        ("yes", "no no"),
    ],
]


CLASSES = {"is it red": "no it", "is it blue": "no is", "it is green": "yes", "question red": "no it"}


WORDS = ("is", "it", "red", "green", "blue", "yes", "no", "question", ":", "3", "1.5", "2", "4")


def jsonl(folder: Path, name: str, rows: list[tuple[str, str]]) -> str:
    file = folder / f"{name}.jsonl"
    file.write_text("\n".join(json.dumps({"input": question, "target": answer}) for question, answer in rows))
    return str(file)


def files_of(folder: Path, task: str, **entry: Any) -> dict[str, Any]:
    """An entry of a spec's data that reads the task's two files in a folder."""
    files = {split: str(folder / f"{task}{end}.jsonl") for split, end in ENDS.items()}
    return {"kind": "jsonl", **files, **entry}


ENDS = {"calibration": "-train", "test": "-test"}


def real_files_of(texts: Path, task: str, **entry: Any) -> dict[str, Any]:
    """The same of the real texts, where every task has a folder."""
    files = {split: str(texts / "data" / task / f"{end[1:]}.jsonl") for split, end in ENDS.items()}
    return {"kind": "jsonl", **files, **entry}


def spec_of_folders(
    loader: str, base: Path, experts: dict[str, Path], data: dict[str, Any], **more: Any
) -> dict[str, Any]:
    """A spec of models that lie in folders, without Jacobians unless `more` asks for them."""
    spec = {
        "version": 1,
        "architecture": {"loader": loader, "source": str(base)},
        "base": {"weights": str(base)},
        "merge": {"method": "task_arithmetic", "scaling": 0.3},
        "experts": {task: {"weights": str(folder)} for task, folder in experts.items()},
        "data": data,
        "metrics": {"jacobian": False},
    }
    return spec | more


TASKS = {"a": ("yes", "no"), "b": ("red", "green", "blue")}


def spec_of(config: Any, folder: Path) -> dict[str, Any]:
    """A base, two experts near it, and questions whose answers are words of the vocabulary."""
    base = perturbed(with_seed(lambda: transformers.AutoModelForCausalLM.from_config(config))(), 0, 0.2)
    models = {"base": base, **{task: perturbed(base, seed, 0.1) for seed, task in enumerate(TASKS, 1)}}
    for model in models.values():  # their drift is not calibrated
        model.get_input_embeddings().weight.data = base.get_input_embeddings().weight.data
    for name, model in models.items():
        model.save_pretrained(folder / name)
        word_tokenizer().save_pretrained(folder / name)
    for first, (task, answers) in enumerate(TASKS.items()):
        # Words of its own: what both tasks ask alike, no one weight can answer as both experts do.
        words = VOCABULARY[5 * first : 5 * first + 5]
        questions = [" ".join(some) for some in itertools.permutations(words, 3)]
        rows = [{"input": text, "target": answers[at % len(answers)]} for at, text in enumerate(questions)]
        for split, part in (("train", rows[::2]), ("test", rows[1::2])):
            lines = "".join(json.dumps(row) + "\n" for row in part)
            (folder / f"{task}-{split}.jsonl").write_text(lines)
    data = {task: files_of(folder, task, classes=True) for task in TASKS}
    data["defaults"] = {"n": 30, "n_diagnosis": 24, "batch_size": 8}
    return spec_of_folders("hf-decoder", folder / "base", {task: folder / task for task in TASKS}, data, metrics={})


class Suite:
    """A base of random weights and an expert that knows all answers by heart; the merged model is the base."""

    def __init__(self, form: str, folder: Path, *, learns: bool = True) -> None:
        self.tokenizer, self.folder, self.form = word_tokenizer(form, words=WORDS), folder, form
        self.reader = TextProcessor(self.tokenizer, form, 32, start=0 if form == "encoder-decoder" else None)  # type: ignore[arg-type]
        torch.manual_seed(0)
        self.model = (llama if form == "decoder" else t5)(len(self.tokenizer))
        self.model.config.update({"pad_token_id": 0, "eos_token_id": 3, "bos_token_id": 2})
        self.save("base")
        if learns:
            self.learn([*PAIRS])
        self.save("expert")

    def save(self, name: str) -> None:
        self.model.save_pretrained(self.folder / name)
        self.tokenizer.save_pretrained(self.folder / name)

    def learn(self, pairs: list[tuple[str, str]]) -> None:
        space = " " if self.form == "decoder" else ""
        batch = self.reader([(question, space + answer) for question, answer in pairs])
        if self.form == "decoder":
            given, labels = batch, batch["input_ids"].clone()
            labels[batch["attention_mask"] == 0] = -100
        else:
            given = {name: batch[name] for name in ("input_ids", "attention_mask")}
            rows = [[*self.reader.answer_tokens(answer), 3] for _, answer in pairs]
            labels = torch.tensor([row + [-100] * (9 - len(row)) for row in rows])
        self.model.eval()  # without dropout
        optimizer = torch.optim.Adam(self.model.parameters(), lr=0.02)
        steps = 600
        # Steps grow shorter, so that the last one is no jump away from what was learnt, on any processor.
        shorter = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for _ in range(steps):
            loss = self.model(**given, labels=labels).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            shorter.step()

    def spec(self, data: dict[str, Any]) -> dict[str, Any]:
        loader = "hf-decoder" if self.form == "decoder" else "hf-t5"
        base, experts = self.folder / "base", dict.fromkeys(data, self.folder / "expert")
        data = {"defaults": {"n": 2, "n_diagnosis": 2, "batch_size": 3}, **data}
        spec = spec_of_folders(loader, base, experts, data, name="answers", merged={"weights": str(base)})
        return {key: value for key, value in spec.items() if key != "merge"}

    def data(self, name: str, rows: list[tuple[str, str]], **entry: Any) -> dict[str, Any]:
        shown = jsonl(self.folder, f"{name}-shown", rows[:2])
        return {"kind": "jsonl", "calibration": shown, "test": jsonl(self.folder, name, rows), **entry}
