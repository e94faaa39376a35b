"""The loop over the stages: sample, score, curate, log-mu, train, evaluate, again and again.

It can be killed at any moment and started again with the same command: finished stages are skipped, the others continue
from their last shard or checkpoint.
"""

import time
from collections.abc import Iterator
from pathlib import Path

from topr_trl.checkpoints import check_files
from topr_trl.evaluation.report import Evaluations, read_evaluation
from topr_trl.pipeline import manifest, stages
from topr_trl.pipeline.arguments import (
    CurateArguments,
    EvaluateArguments,
    IterateArguments,
    SampleArguments,
    ScoreArguments,
    TrainArguments,
    model_path,
    take,
)
from topr_trl.pipeline.problems import load_problems
from topr_trl.pipeline.steps import Step, check_launch, run_steps


def steps_of(loop: IterateArguments) -> Iterator[Step]:
    """All steps of the loop, in order."""
    out = loop.folder

    def testing(folder: Path, model: str | None, iteration: int) -> Iterator[Step]:
        rows = str(folder / "rollouts")
        yield sampling(rows, model, iteration, split="test", num_generations=loop.num_generations_eval)
        yield Step("score", take(ScoreArguments, loop, input=rows, output_dir=rows))
        results = {"input": rows, "output_dir": str(folder / "results")}
        yield Step("evaluate", take(EvaluateArguments, loop, **results))

    def sampling(rows: str, model: str | None, iteration: int, **more: object) -> Step:
        return Step("sample", take(SampleArguments, loop, output_dir=rows, model_name_or_path=model,
                                   iteration=iteration, **more))  # fmt: skip

    model = loop.model_name_or_path
    yield from testing(out / "base" / "test", model, 0)
    for iteration in range(1, loop.iterations + 1):
        folder = out / f"iteration-{iteration}"
        rows, given = str(folder / "rollouts"), loop.rows if iteration == 1 else None
        if given is None:
            yield sampling(rows, model, iteration)
        yield Step("score", take(ScoreArguments, loop, input=given or rows, output_dir=rows))
        here: dict[str, object] = {"input": rows, "iteration": iteration}
        yield Step("curate", take(CurateArguments, loop, output_dir=rows, **here))
        start: dict[str, object] = {**here, "model_name_or_path": model}
        yield Step("log-mu", take(TrainArguments, loop, output_dir=rows, **start))
        yield Step("train", take(TrainArguments, loop, output_dir=str(folder / "model"), **start))
        model = str(folder / "model")
        yield from testing(folder / "test", model, iteration)


def iterate(loop: IterateArguments) -> None:
    """Run the loop to its end, or from where it stopped.

    Raises:
        ValueError: a folder holds results for other settings, or settings cannot work together.
        ChildProcessError: a stage failed; its messages say why.
    """
    check(loop)
    began, out = time.monotonic(), loop.folder
    with manifest.lock(out):
        steps = list(steps_of(loop))
        spent = run_steps(steps, loop, out, len(steps))
        results = Evaluations({
            step.folder.parent.parent.name: read_evaluation(step.folder / "evaluation.json")
            for step in steps if step.stage == "evaluate"
        })  # fmt: skip
    total = time.monotonic() - began
    print(
        f"\n{results}\n\nModels, rows and results are in {out}/; topr plot --input {out} draws them.\n"
        f"{total:.0f} s: stages {spent.stages:.0f} s, starting processes {spent.starts:.0f} s, the loop itself "
        f"{total - spent.stages - spent.starts:.1f} s.",
        flush=True,
    )


def check(loop: IterateArguments) -> None:
    """A ValueError or ImportError for what would fail in a later stage, after hours of sampling."""
    manifest.check_own(loop.folder)
    check_launch("iterate", loop)
    for split in ("train", "test"):
        if split == "test" or not loop.rows:
            load_problems(loop, split)
    if loop.rows:
        stages.check_rows(Path(loop.rows))
    check_files(model_path(loop))
    if loop.log_mu == "sampler" and loop.temperature != 1:
        raise ValueError(
            f"log_mu='sampler' and temperature={loop.temperature:g}: `topr sample` keeps the model's own "
            "log-probabilities, at temperature 1. Set log_mu='trainer'."
        )
