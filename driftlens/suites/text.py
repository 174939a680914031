"""The embedded text suite: a small decoder and its experts, one of them of adapters, made here once and kept."""

from __future__ import annotations

import copy
import itertools
import json
import pathlib
import re
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from driftlens.suites.cache import DRAWN, Suite, rounded
from driftlens.suites.drawing import PURPOSES, Purpose
from driftlens.suites.recipe import TextRecipe, stream
from driftlens.suites.training import Worker, train
from driftlens.suites.writing import WrittenTask, texts

SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
_ADAPTED = r".*_proj"
"""What adapters are trained for: every linear module of a block."""
_WORDS = re.compile(r"\w+|[^\w\s]+")


class TextSuite(Suite):
    """A small Llama and its experts, one of adapters, as their libraries save them; answers are one word."""

    prefix = "embedded-text"
    usual = TextRecipe()
    drawn = texts
    loader, source, base, expert = "hf-decoder", "base", "base", "experts/{}"

    @staticmethod
    def head(task: str) -> dict[str, Any]:
        """As of a `Suite`."""
        return {"classes": list(texts[task].classes)}

    @staticmethod
    def data(folder: pathlib.Path, task: str) -> dict[str, Any]:
        """As of a `Suite`."""
        splits = {"calibration": "train", "test": "test"}
        files = {split: str(folder / _file(task, purpose)) for split, purpose in splits.items()}
        return {"kind": "jsonl", "prompt": texts[task].prompt, "classes": True, **files}

    @staticmethod
    def untrained(recipe: TextRecipe, seed: int = 0) -> Any:
        """As of a `Suite`, with more words than there can be: the vocabulary is known when all is drawn."""
        return build_decoder(recipe.model_config(2000), seed)

    @staticmethod
    def draw(folder: pathlib.Path, task: str, recipe: TextRecipe, seed: int) -> None:
        """As of a `Suite`."""
        _write(folder, task, "train", recipe.num_train, seed)
        _write(folder, task, "test", recipe.num_test, seed)

    @staticmethod
    def draw_for_base(folder: pathlib.Path, task: str, recipe: TextRecipe, seed: int) -> None:
        """As of a `Suite`."""
        _write(folder, task, "base", recipe.num_base, seed)

    @staticmethod
    def work(worker: Worker, folder: pathlib.Path, recipe: TextRecipe, seed: int) -> None:
        """As of a `Suite`."""
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        warnings.filterwarnings("ignore", category=FutureWarning)  # what peft still asks of transformers
        TextSuite.draw_all(worker, folder, recipe, seed)
        drawn = {pair: _asked(folder, *pair) for pair in itertools.product(texts, PURPOSES)}
        words = {word for rows in drawn.values() for text, _ in rows for word in _WORDS.findall(text.lower())}
        answers = {answer for task in texts.values() for answer in task.classes}
        codes = [code(task, answer) for task in texts.values() for answer in task.classes]
        tokenizer = word_tokenizer([*sorted(words | answers), *codes])
        base = _train_base(worker, drawn, tokenizer, recipe, seed)
        if worker.rank == 0:
            _save(base, tokenizer, folder / "base")
        for name in worker.jobs(list(texts)):
            train_rows, test = (Questions.read(drawn[name, each], tokenizer) for each in ("train", "test"))
            labels = torch.tensor(tokenizer.convert_tokens_to_ids(list(texts[name].classes)))
            of_base = test.accuracy(base, labels)
            expert = _train_expert(worker, base, train_rows, recipe, seed, name)
            of_expert = test.accuracy(expert.get_base_model() if name == recipe.adapted else expert, labels)
            # Told that no embedding was trained, peft doesn't look for the base in the network.
            told = {"save_embedding_layers": False} if name == recipe.adapted else {}
            _save(expert, tokenizer, folder / "experts" / name, **told)
            worker.tell("", name, 0, {"base": of_base, "expert": of_expert})


text_suite = TextSuite.made


@dataclass(frozen=True)
class Questions:
    """Token ids [n, t] of questions, padded on the right; where each ends [n]; ids of their answers [n]."""

    ids: Tensor
    last: Tensor
    answers: Tensor

    @classmethod
    def read(cls, rows: Sequence[tuple[str, str]], tokenizer: Any) -> Questions:
        """Questions and answers of one word, as the model reads them."""
        batch = tokenizer([text for text, _ in rows], padding=True, return_tensors="pt")
        answers = tokenizer.convert_tokens_to_ids([answer for _, answer in rows])
        return cls(batch["input_ids"], batch["attention_mask"].sum(dim=1) - 1, torch.tensor(answers))

    def scores(self, model: Any, rows: Tensor) -> Tensor:
        """What the model gives every word of the vocabulary as the first of an answer, [rows, vocabulary]."""
        last = self.last[rows]
        # Padding follows all that is read, so that no position that matters can see it.
        hidden = model.model(input_ids=self.ids[rows, : int(last.max()) + 1]).last_hidden_state
        return model.lm_head(hidden[torch.arange(len(rows)), last])

    @torch.no_grad()
    def accuracy(self, model: Any, words: Tensor) -> float:
        """Share of questions whose answer scores best among `words`."""
        best = self.scores(model, torch.arange(len(self.ids)))[:, words].argmax(dim=1)
        return (words[best] == self.answers).double().mean().item()


def word_tokenizer(words: Iterable[str]) -> Any:
    """A tokenizer with one token per word or run of punctuation, in lower case; `<s>` begins every text."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: at for at, word in enumerate((*SPECIAL.values(), *words))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL["unk_token"]))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    begin = SPECIAL["bos_token"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, vocabulary[begin])]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="right", **SPECIAL)


def build_decoder(config: dict[str, Any], seed: int) -> Any:
    """An untrained Llama of transformers; the global random numbers stay as they were."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(LlamaConfig(**config))


def code(task: WrittenTask, answer: str) -> str:
    """What most of the base's texts have in the place of an answer."""
    return f"code_{task.name}_{task.classes.index(answer)}"


def _write(folder: pathlib.Path, task: str, purpose: Purpose, count: int, seed: int) -> None:
    rows = texts[task].rows(purpose, count, seed)
    lines = [json.dumps({"input": text, "target": answer}) for text, answer in rows]
    (folder / _file(task, purpose)).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _file(task: str, purpose: str) -> str:
    return f"{DRAWN if purpose == 'base' else 'data'}/{task}-{purpose}.jsonl"


def _asked(folder: pathlib.Path, task: str, purpose: str) -> list[tuple[str, str]]:
    """What was drawn, as it is asked, with its answers."""
    lines = (folder / _file(task, purpose)).read_text(encoding="utf-8").splitlines()
    rows = map(json.loads, lines)
    return [(texts[task].prompt.replace("{input}", row["input"]), row["target"]) for row in rows]


def _train_base(
    worker: Worker, drawn: dict[Any, list[tuple[str, str]]], tokenizer: Any, recipe: TextRecipe, seed: int
) -> Any:
    """Train the base together with the others; all end with the same weights."""

    model = build_decoder(recipe.model_config(len(tokenizer)), stream(seed, "weights"))
    generator = torch.Generator().manual_seed(stream(seed, "base"))
    rows = [(name, *row) for name in texts for row in drawn[name, "base"]]
    coded = (torch.rand(len(rows), generator=generator) < recipe.coded).tolist()
    asked = [
        (text, code(texts[name], answer) if hidden else answer)
        for (name, text, answer), hidden in zip(rows, coded, strict=True)
    ]
    questions = Questions.read(asked, tokenizer)
    train(
        model,
        lambda batch: _loss(model, questions, worker.rows(batch)),
        len(asked),
        recipe.base,
        generator,
        worker.told_by_first("train base"),
        worker,
    )
    rounded(model)
    return model


def _train_expert(
    worker: Worker, base: Any, questions: Questions, recipe: TextRecipe, seed: int, name: str
) -> Any:
    """An expert trained from the base, which stays as it is: a whole model, or the base in peft's wrapper."""
    expert = inner = copy.deepcopy(base)
    schedule = recipe.expert
    if name == recipe.adapted:
        from peft import LoraConfig, get_peft_model

        schedule = recipe.lora
        wanted = LoraConfig(
            r=recipe.rank, lora_alpha=2 * recipe.rank, target_modules=_ADAPTED, task_type="CAUSAL_LM"
        )
        inner.name_or_path = "base"
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(stream(seed, "adapters"))
            expert = get_peft_model(inner, wanted)
    train(
        expert,
        lambda batch: _loss(inner, questions, batch),
        len(questions.ids),
        schedule,
        torch.Generator().manual_seed(stream(seed, f"expert/{name}")),
        lambda step, loss: worker.tell(
            "train experts", name, step * recipe.expert.steps // schedule.steps, loss
        ),
    )
    rounded(expert)
    return expert


def _loss(model: Any, questions: Questions, rows: Tensor) -> Tensor:
    return F.cross_entropy(questions.scores(model, rows), questions.answers[rows])


def _save(model: Any, tokenizer: Any, folder: pathlib.Path, **told: Any) -> None:
    """Write a folder as the libraries do, which they open by themselves."""
    model.save_pretrained(folder, **told)
    tokenizer.save_pretrained(folder)
