"""The command `topr evaluate`: a model or rows in, tables, JSON and a picture out."""

from pathlib import Path

from topr_trl.data.tables import columns_of, shards_of
from topr_trl.evaluation.answers import NEEDED, check_columns, encode, read_samples, run_names
from topr_trl.evaluation.bootstrap import matched
from topr_trl.pipeline import manifest
from topr_trl.pipeline.model_loading import model_path
from topr_trl.pipeline.problems import load_problems
from topr_trl.pipeline.run_folders import ROLLOUTS
from topr_trl.pipeline.settings import stage_args
from topr_trl.pipeline.shards import naming
from topr_trl.pipeline.stages.evaluate import REPORT, Evaluate, EvaluateArguments
from topr_trl.pipeline.stages.sample import Sample, SampleArguments
from topr_trl.pipeline.stages.score import Score, ScoreArguments
from topr_trl.settings.checks import existing


def evaluate_command(args: EvaluateArguments) -> None:
    """Make what the stage `evaluate` lacks, run it, and print what it found.

    Without `--input` the test problems are sampled, to `rollouts/` in the output folder; rows without `extracted` are
    scored, to `scored/`. A command that is started again continues.

    Raises:
        ValueError, FileNotFoundError: settings or rows do not fit; before anything is sampled, where it can be known.
    """
    out, into = args.folder, args.folder / "scored"
    source = None if args.input is None else existing(args.input, "--input")
    second = None if args.compare is None else existing(args.compare, "--compare")
    for path in (source, second):
        if path is not None:
            manifest.check_whole(path)
            check_evaluable(path)
    if second is not None:
        first_name, second_name = _names(args, source, second)
        second, into = _scored(args, second, into / second_name), into / first_name
    if source is None:
        if second is not None:
            _check_problems(args, second)
        source = out / ROLLOUTS
        count = args.num_generations_eval
        Sample(stage_args(SampleArguments, args, output_dir=str(source), num_generations=count)).run()
        into = source
    source = _scored(args, source, into)
    compared = None if second is None else str(second)
    Evaluate(stage_args(EvaluateArguments, args, input=str(source), compare=compared)).run()
    tables = (out / REPORT).read_text(encoding="utf-8")
    print(f"{tables}\nEvaluated the rows in {source}. Tables, JSON and a picture are in {out}/.", flush=True)


def _names(args: EvaluateArguments, source: Path | None, second: Path) -> list[str]:
    """Folder names for the scored rows of two runs; the tables use them as headings."""
    if source is not None:
        return run_names(source, second)
    model = Path(model_path(args)).name
    return [model, second.name if second.name != model else f"compared-{model}"]


def check_evaluable(path: Path) -> None:
    """Raise a ValueError for rows that can neither be evaluated nor scored."""
    for shard in shards_of(path):
        columns = columns_of(shard)
        with naming(shard):
            check_columns(columns, (*NEEDED[:2], ("extracted", "completion")))
        if "extracted" not in columns and "reward" in columns:
            raise ValueError(
                f"{shard}: rows have a reward and no `extracted` answer. Drop the column `reward` to have them scored."
            )


def _scored(args: EvaluateArguments, source: Path, into: Path) -> Path:
    """Where the rows are with their extracted answers: there already, or after the stage `score`."""
    if all("extracted" in columns_of(shard) for shard in shards_of(source)):
        return source
    Score(stage_args(ScoreArguments, args, input=str(source), output_dir=str(into))).run()
    return into


def _check_problems(args: EvaluateArguments, second: Path) -> None:
    """Before sampling: the run to compare with must have the problems that will be sampled."""
    problems = load_problems(args, "test")
    nothing = [[None] for _ in range(len(problems))]
    matched(encode(nothing, problems["answer"][:], problem_ids=problems["problem_id"][:]), read_samples(second))
