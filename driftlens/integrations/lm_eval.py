"""lm-evaluation-harness run on a variant of a run, and its results attached to it.

    python -m driftlens.integrations.lm_eval runs/llama calibrated:residual --tasks arc_easy,gsm8k --limit 100

The variant is saved as a folder of transformers, unless it is one, and asked by the harness's own `hf` model.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import driftlens as dl
from driftlens.checkpoints.loading import library_folder
from driftlens.checkpoints.weight_files import is_lora_folder
from driftlens.config.run import load_spec
from driftlens.runs.external_scores import attach
from driftlens.utils.errors import SpecError
from driftlens.utils.files import write_text_atomic
from driftlens.utils.variants import calibration_of, expert_of


def model_arguments(run: str | Path, variant: str, folder: Path) -> str:
    """What the harness's `hf` model is opened by; what is not a folder of its own is saved to `folder`.

    Raises:
        SpecError: the run has no such variant, or its weights are no folder of transformers.
    """
    opened = dl.open_run(run)
    spec = load_spec(opened.path / "spec.yaml")
    name = calibration_of(variant)
    named = {
        "base": spec.base,
        "merged": spec.merged,
        **{expert_of(each): at for each, at in spec.experts.items()},
    }
    at = named.get(variant)
    place = None if at is None else at.weights
    if variant == "merged" and spec.merge is not None:
        place = str(dl.merge(spec, method=spec.merge.method, parameters=spec.merge.parameters, out=folder))
    if name and variant in opened.variants:
        dl.calibrate(opened, name=name, save_weights=folder)
        place = str(folder)
    if place is None:
        known = ["base", "merged", *(f"expert:{each}" for each in spec.tasks), *opened.variants]
        raise SpecError(
            f"{opened.name} has no variant {variant!r}", hint=f"There are {', '.join(dict.fromkeys(known))}."
        )
    if is_lora_folder(Path(place)) and spec.base is not None:
        return f"pretrained={spec.base.weights},peft={place}"
    if library_folder(place) is None:
        raise SpecError(
            f"{place} is no folder that transformers loads", hint="Save the model with its library first."
        )
    return f"pretrained={place}"


def evaluate(
    run: str | Path, variant: str, tasks: Sequence[str], *, folder: Path | None = None, **options: Any
) -> Path:
    """Run the harness on a variant, write its results, and attach them to the run; returns their file.

    Args:
        run: the run directory.
        variant: `base`, `merged`, `expert:TASK` or `calibrated:NAME`.
        tasks: the harness's names.
        folder: where the variant is saved if need be; beside the run if left out.
        options: of `lm_eval.simple_evaluate`, such as `limit`, `num_fewshot`, `batch_size` and `device`.

    Raises:
        SpecError: the variant can't be loaded by transformers.
    """
    harness: Any = importlib.import_module("lm_eval")
    home, plain = Path(run), variant.replace(":", "-")
    arguments = model_arguments(run, variant, folder or home.with_name(f"{home.name}-{plain}"))
    found = harness.simple_evaluate(model="hf", model_args=arguments, tasks=[*tasks], **options)
    # Samples are texts of their data sets, which a run doesn't keep.
    results = {key: value for key, value in found.items() if key != "samples"}
    file = home.with_name(f"{home.name}-{plain}-lm-eval.json")
    write_text_atomic(file, json.dumps(results, indent=2, default=str))
    attach(home, variant, file)
    return file


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("variant")
    parser.add_argument("--tasks", required=True)
    parser.add_argument("--limit", type=float)
    parser.add_argument("--device")
    given = vars(parser.parse_args())
    options = {name: given[name] for name in ("limit", "device") if given[name] is not None}
    print(evaluate(given["run"], given["variant"], given["tasks"].split(","), **options))


if __name__ == "__main__":
    main()
