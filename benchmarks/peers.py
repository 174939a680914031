"""DriftLens compared with published code: CPU seconds, peak memory, and the difference of the results.

`python -m benchmarks peers` uses towers of ViT-B/32 with random weights and one thread. Each side runs in its own
process, interleaved with the other. `DRIFTLENS_FEATCAL` and `DRIFTLENS_SURGERY` name clones of
github.com/egangu/featcal and github.com/EnnengYang/RepresentationSurgery, `DRIFTLENS_FUSIONBENCH` the Python of an
environment with fusion_bench; cases without their variable are left out. `DRIFTLENS_BLOCKS` sets the number of blocks
(3).
"""

from __future__ import annotations

import copy
import importlib
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

ROUNDS = 2
SAMPLES = BATCH = 16
BLOCKS = int(os.environ.get("DRIFTLENS_BLOCKS", "3"))
STEPS = 10
"""Of WUDI's 300 and of Surgery's 1000, of which theirs take a second or more each."""
FEATCAL, FUSIONBENCH, SURGERY = "DRIFTLENS_FEATCAL", "DRIFTLENS_FUSIONBENCH", "DRIFTLENS_SURGERY"
CASES = {"featcal": FEATCAL, "regmean": FUSIONBENCH, "wudi": FUSIONBENCH, "surgery": SURGERY}
"""And the variable that each needs."""
TITLES = {
    "featcal": "`FeatCal.fit` against the authors' code",
    "regmean": "RegMean against FusionBench, which solves in float32",
    "wudi": f"WUDI against FusionBench, {STEPS} of 300 steps",
    "surgery": f"Surgery against its authors' code, {STEPS} of 1000 steps",
}
SIDES = ("ours", "theirs")
Work = Callable[[], Mapping[str, Tensor] | None]
"""What is measured, and what of it is compared; None where it saves that itself."""


class Case(NamedTuple):
    """What both sides are given; models and samples of merges lie in the folder."""

    name: str
    tasks: int
    folder: Path

    @property
    def pixels(self) -> dict[str, Tensor]:
        """Decoded samples of each task."""
        drawn = torch.Generator().manual_seed(0)
        return {f"t{task}": torch.randn(self.samples, 3, 224, 224, generator=drawn) for task in range(self.tasks)}

    @property
    def samples(self) -> int:
        """Samples of each task; of calibrations 128 in all, so that their sums cost the same."""
        return 8 * SAMPLES // self.tasks if self.name == "featcal" else SAMPLES


def run(device: str) -> None:
    """Record a figure per case; cases without their variable are left out."""
    del device
    _compare("analysis", 1, "analysis of one variant against three forward passes, 12 blocks, 64 images")
    for name, variable in CASES.items():
        if variable not in os.environ:
            print(f"{name}: not measured, since {variable} is not set; see benchmarks/peers.py")
            continue
        for tasks in (2, 8):
            target = "at least 1.9 times" if name == "featcal" else ""
            samples = f", {Case(name, tasks, Path()).samples} samples per task" if name == "featcal" else ""
            case = f"{tasks} experts{samples}"
            _compare(name, tasks, f"{TITLES[name]}, {case}, {BLOCKS} block{'s' * (BLOCKS > 1)} of ViT-B/32", target)


def _compare(name: str, tasks: int, figure: str, target: str = "") -> None:
    with tempfile.TemporaryDirectory() as folder:
        case = Case(name, tasks, Path(folder))
        if CASES.get(name) == FUSIONBENCH:
            _child(case, "write")
        rounds = [[_child(case, side) for side in SIDES] for _ in range(ROUNDS)]
        own, other = ([min(of) for of in zip(*side, strict=True)] for side in zip(*rounds, strict=True))
        from benchmarks.figures import record

        faster = f"{other[0] / own[0]:.2f} times faster ({own[0]:.1f} s against {other[0]:.1f} s)"
        peak = f"peak {own[1] / 1e3:.1f} GB against {other[1] / 1e3:.1f} GB"
        record("peers", figure, f"{faster}; {peak}{_apart(case)}", target)


def _child(case: Case, side: str) -> list[float]:
    """Seconds of the processors and the peak in MB, and what that was before the work began."""
    is_elsewhere = side == "theirs" and CASES.get(case.name) == FUSIONBENCH
    python = os.environ[FUSIONBENCH] if is_elsewhere else sys.executable
    command = [python, "-m", "benchmarks.peers", case.name, side, str(case.tasks), str(case.folder)]
    here = str(Path(__file__).resolve().parents[1])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": here}
    done = subprocess.run(command, env=environment, cwd=case.folder, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _apart(case: Case) -> str:
    """The largest difference of a tensor of both results, by its norm."""
    from safetensors import safe_open

    own, other = (case.folder / side / "model.safetensors" for side in SIDES)
    if not own.exists():
        return ""
    apart = {}
    with safe_open(own, "pt") as ours, safe_open(other, "pt") as theirs:
        for name in ours.keys():  # noqa: SIM118 - it is no mapping
            value = theirs.get_tensor(name).double()
            apart[name] = float((ours.get_tensor(name).double() - value).norm() / value.norm())
    name = max(apart, key=apart.__getitem__)
    return f"; largest relative difference {apart[name]:.1e}"


@torch.no_grad()
def _towers(count: int) -> list[Any]:
    """A random tower of transformers and others near it."""
    from transformers import CLIPVisionConfig, CLIPVisionModel

    torch.manual_seed(0)
    first = CLIPVisionModel(CLIPVisionConfig(num_hidden_layers=BLOCKS)).eval()
    towers = [copy.deepcopy(first) for _ in range(count)]
    for seed, tower in enumerate(towers):
        drawn = torch.Generator().manual_seed(seed)
        for parameter in tower.parameters():
            parameter.add_(1e-3 * torch.randn(parameter.shape, generator=drawn))
    return towers


def _featcal(case: Case, side: str) -> Work:
    import driftlens as dl

    base, merged, *others = _towers(2 + case.tasks)
    pixels = case.pixels
    experts = dict(zip(pixels, others, strict=True))
    if side == "ours":
        method = dl.FeatCal(lam=0.05, rho=2.0, alpha=0.3, last_block_tokens="cls_emphasis")
        return lambda: method.fit(merged, base, experts, pixels, batch_size=BATCH).model_.state_dict()
    sys.path.insert(0, f"{os.environ[FEATCAL]}/src")
    theirs: Any = importlib.import_module("featcal.featcal")
    # Called as towers of transformers 5 want it, with samples that lie ready.
    theirs._forward_clip_layer = lambda layer, x: theirs._extract_hidden_state(layer(x, attention_mask=None))
    theirs._clip_layers = lambda model: getattr(model, "vision_model", model).encoder.layers

    @torch.no_grad()
    def inputs(*, merged_model: Any, expert_models: Any, tasks: list[str]) -> Any:
        def of(model: Any, task: str) -> list[Tensor]:
            tower = getattr(model, "vision_model", model)
            return [tower.pre_layrnorm(tower.embeddings(part)) for part in pixels[task].split(BATCH)]

        ready = {task: of(merged_model, task) for task in tasks}
        return ready, {task: of(expert_models[task], task) for task in tasks}

    settings = theirs.FeatCalConfig(lambda_ratio=0.05, anchor_blend_rho=2.0, teacher_interp_alpha=0.3)
    calibrator = theirs.CLIPFeatCalibrator(settings, processor=None, device=torch.device("cpu"))
    calibrator.prepare_first_layer_inputs = inputs

    def work() -> Mapping[str, Tensor]:
        model, tasks = copy.deepcopy(merged), list(experts)
        calibrator.calibrate(merged_model=model, base_model=base, expert_models=experts, tasks=tasks)
        return model.state_dict()

    return work


def _write(case: Case) -> None:
    """A base, experts and images, as merges of both sides read them."""
    import numpy as np
    from transformers import CLIPImageProcessor

    base, *experts = _towers(1 + case.tasks)
    base.save_pretrained(case.folder / "base")
    CLIPImageProcessor().save_pretrained(case.folder / "base")
    drawn, labels = np.random.default_rng(0), np.zeros(SAMPLES, dtype=np.int64)
    for task, expert in zip(case.pixels, experts, strict=True):
        expert.save_pretrained(case.folder / task)
        x = drawn.integers(0, 256, (SAMPLES, 224, 224, 3), dtype=np.uint8)
        np.savez(case.folder / f"{task}.npz", x_train=x, y_train=labels, x_test=x[:1], y_test=labels[:1])


def _merge(case: Case, side: str) -> Work:
    """From folders to a folder."""
    folder, tasks = case.folder, [*case.pixels]
    if side == "theirs":
        return _fusionbench(case.name, folder, tasks)
    importlib.import_module("transformers.models.clip.modeling_clip")  # of theirs, too, no import is counted
    from driftlens.front.api import merge

    data = {task: {"kind": "npz", "file": str(folder / f"{task}.npz")} for task in tasks}
    spec = {
        "version": 1,
        "name": "peers",
        "architecture": {"loader": "hf-clip", "source": str(folder / "base")},
        "base": {"weights": str(folder / "base")},
        "experts": {task: {"weights": str(folder / task)} for task in tasks},
        "data": {"defaults": {"n": SAMPLES, "batch_size": BATCH, "n_diagnosis": 1}, **data},
        "merge": {"method": "average"},
    }
    published = {"steps": STEPS, "learning_rate": 1e-5} if case.name == "wudi" else {}

    def work() -> None:
        merge(spec, method=case.name, parameters=published, out=str(folder / "ours"))

    return work


def _fusionbench(name: str, folder: Path, tasks: list[str]) -> Work:
    import numpy as np
    from fusion_bench.method import RegMeanAlgorithmForCLIP, WUDIMerging
    from fusion_bench.modelpool import CLIPVisionModelPool
    from PIL import Image
    from transformers import CLIPImageProcessor

    class Pool(CLIPVisionModelPool):
        def load_processor(self) -> Any:
            return CLIPImageProcessor.from_pretrained(folder / "base")

        def load_train_dataset(self, task: str) -> Any:
            images = np.load(folder / f"{task}.npz")["x_train"]
            return [{"image": Image.fromarray(image), "label": 0} for image in images]

    class RegMean(RegMeanAlgorithmForCLIP):
        # A head would want a text tower; sums are taken of what modules of the tower read.
        def on_regmean_start(self) -> None:
            pass

        def compute_logits(self, module: Any, batch: Any, task: str) -> Any:
            return module(batch[0])

    # Ours takes the mean task vector of what is no linear module's, as theirs does of what it excludes.
    algorithms: dict[str, Callable[[], Any]] = {
        "wudi": lambda: WUDIMerging(iter_num=STEPS, exclude_keys=["embeddings.position_embedding.weight"]),
        "regmean": lambda: RegMean(
            num_regmean_examples=SAMPLES,
            exclude_param_names_regex=[],
            reduce_non_diagonal_ratio=0.95,
            weight_transpose=True,
            dataloader_kwargs={"batch_size": BATCH, "num_workers": 0},
        ),
    }
    algorithm = algorithms[name]()
    pool = Pool({"_pretrained_": str(folder / "base")} | {task: str(folder / task) for task in tasks})

    def work() -> None:
        algorithm.run(pool).save_pretrained(folder / "theirs")

    return work


def _surgery(case: Case, side: str) -> Work:
    """Maps behind a task arithmetic of open_clip's towers, all beginning at the same numbers."""
    from benchmarks.calibration import _tower
    from driftlens.calibration.surgery import linear_init

    pixels = case.pixels
    base, *others = (_tower(seed, BLOCKS) for seed in range(1 + case.tasks))
    experts = dict(zip(pixels, others, strict=True))
    start = base.state_dict()
    vectors = [{k: v - start[k] for k, v in expert.state_dict().items()} for expert in others]
    if side == "ours":
        merged = copy.deepcopy(base)
        merged.load_state_dict({k: v + 0.3 * sum(vector[k] for vector in vectors) for k, v in start.items()})
        return lambda: _trained(merged, experts, pixels)
    sys.path.insert(0, f"{os.environ[SURGERY]}/src")
    # Heads are downloaded there, and train nothing; and every step asks for a card.
    sys.modules["heads"] = ModuleType("heads")
    sys.modules["heads"].__dict__["get_classification_head"] = lambda *_: nn.Identity()
    setattr(Tensor, "cuda", lambda self, *_: self)  # noqa: B010 - no type checker lets it be assigned
    theirs: Any = importlib.import_module("merging_model")
    wrapped = theirs.ModelWrapper(nn.Sequential(copy.deepcopy(base)))
    _, names = theirs.make_functional(wrapped)
    weights = [tuple(v.detach().requires_grad_() for v in state.values()) for state in (start, *vectors)]
    settings = SimpleNamespace(method_name="task_arithmetic", model_name="ViT-B-32", device="cpu")
    model = theirs.AlphaWrapper(weights, wrapped, names, [*pixels], settings)
    maps = {
        f"{task}.{part}": getattr(model, f"feature_mapping_to_head_{part}_proj_{task}").weight
        for task in pixels
        for part in ("down", "up")
    }
    for task in pixels:
        drawn = torch.Generator().manual_seed(zlib.crc32(f"{BLOCKS + 2} {task}".encode()))
        maps[f"{task}.down"].data = linear_init(16, 512, drawn)

    def work() -> Mapping[str, Tensor]:
        # The loop of their scripts, which is in no function.
        descent = torch.optim.Adam(model.collect_trainable_params(), lr=1e-3)
        for _ in range(STEPS):
            for task, x in pixels.items():
                _, features, _, _ = model(x, task)
                loss = nn.functional.l1_loss(features, experts[task](x).detach())
                descent.zero_grad()
                loss.backward()
                descent.step()
        return {name: value.detach() for name, value in maps.items()}

    return work


def _trained(
    merged: nn.Module, experts: Mapping[str, nn.Module], pixels: Mapping[str, Tensor]
) -> Mapping[str, Tensor]:
    from driftlens.calibration.surgery import Surgery
    from driftlens.checkpoints.tensor_sources import module_source
    from driftlens.data.samples import Batch
    from driftlens.engine.calibrating import CalibrationContext
    from driftlens.engine.pool import ModelPool
    from driftlens.engine.walk import InMemoryBatches
    from driftlens.models.chain import adapters

    models = {"merged": merged, **{f"expert:{task}": expert for task, expert in experts.items()}}
    sources = {name: module_source(model, name) for name, model in models.items()}
    chain = adapters["open_clip_vit"].chain(merged)
    pool = ModelPool(chain, merged, sources, device=torch.device("cpu"), dtype=torch.float32)
    samples = {task: InMemoryBatches(lambda x=x: [Batch(0, len(x), x)]) for task, x in pixels.items()}
    return {
        f"{task}.{part}": value
        for layer in Surgery(steps=STEPS).calibrate(CalibrationContext(pool, samples, base=None))
        for task, attached in layer.attachments.items()
        for part, value in attached.tensors().items()
    }


def _analysis(case: Case, side: str) -> Work:
    """All columns of one variant beside one pass of the expert and two of the merged model."""
    from benchmarks.models import images, vit_b32, vit_b32_pool
    from driftlens.engine.walk import drift_columns, walk

    batches = images(64)
    pool = vit_b32_pool(1, "cpu") if side == "ours" else None
    expert, merged = (vit_b32(seed) for seed in range(2))

    @torch.no_grad()
    def work() -> None:
        if pool is not None:
            for view in walk(pool, "a", ["merged"], batches):
                torch.stack(list(drift_columns(view, "cls").values())).cpu()
            return
        for model in (expert, merged, merged):
            for batch in batches:
                model(batch.inputs)

    return work


WORKS = {"analysis": _analysis, "featcal": _featcal, "regmean": _merge, "wudi": _merge, "surgery": _surgery}


def _peak() -> float:
    unit = 1 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def main(name: str, side: str, tasks: str, folder: str) -> None:
    """Run one side of one case, and print what it took."""
    torch.set_num_threads(1)
    case = Case(name, int(tasks), Path(folder))
    if side == "write":
        _write(case)
        print([])
        return
    place = case.folder / side
    shutil.rmtree(place, ignore_errors=True)
    work = WORKS[name](case, side)
    before, started = _peak(), time.process_time()
    result = work()
    print(json.dumps([time.process_time() - started, _peak(), before]))
    if result is not None:
        from safetensors.torch import save_file

        place.mkdir()
        tensors = {name: value.contiguous() for name, value in result.items()}
        save_file(tensors, place / "model.safetensors")


if __name__ == "__main__":
    main(*sys.argv[1:])
