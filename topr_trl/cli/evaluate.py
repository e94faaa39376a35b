"""Run `topr evaluate`: sample and score where needed, then run the stage `evaluate`."""

from pathlib import Path

from topr_trl.data.usable_rows import have_answers, in_all_shards, is_scored
from topr_trl.evaluation.answers import encode, read_samples, run_names
from topr_trl.evaluation.bootstrap import matched, matching_order
from topr_trl.evaluation.rewards import read_reward_samples
from topr_trl.pipeline import manifest
from topr_trl.pipeline.problems import check_rewards, check_rows, load_problems
from topr_trl.pipeline.run_folders import ROLLOUTS
from topr_trl.pipeline.settings import stage_args
from topr_trl.pipeline.shards import naming
from topr_trl.pipeline.stages.evaluate import REPORT, Evaluate, EvaluateArguments
from topr_trl.pipeline.stages.sample import Sample, SampleArguments
from topr_trl.pipeline.stages.score import Score, ScoreArguments
from topr_trl.settings.checks import existing


def evaluate_command(args: EvaluateArguments) -> None:
    """Sample and score the rows if needed, run the stage `evaluate`, and print its tables.

    Without `--input`, the command samples completions for the test problems into `rollouts/` in the output folder, and
    scores them there. Rows from `--input` and `--compare` are scored into `scored/` if they have neither extracted
    answers nor rewards. A stopped command continues where it stopped when it is run again.

    Args:
        args (`EvaluateArguments`): Settings of the command.

    Raises:
        ValueError: settings or rows cannot be used. Most of these errors are raised before sampling starts.
        FileNotFoundError: `input` or `compare` does not exist, or is a folder without a complete set of shards.
    """
    if args.input is not None and args.model_name_or_path is not None:
        raise ValueError(
            "--input evaluates stored rows, so --model_name_or_path has no effect. Remove --input to sample from the "
            "model, or remove --model_name_or_path."
        )
    out, into = args.folder, args.folder / "scored"
    source = None if args.input is None else existing(args.input, "--input")
    second = None if args.compare is None else existing(args.compare, "--compare")
    for path in (source, second):
        if path is not None:
            manifest.check_whole(path)
            scored = path is second and in_all_shards(path, is_scored)
            check_rows(path, "evaluate", None if scored else args.reward_funcs)
    if source is None:
        _check_folder(out)
        check_rewards(load_problems(args, "test"), args)
    if second is not None:
        first_name, second_name = ("", second.name) if source is None else run_names(source, second)
        second, into = _score_if_needed(args, second, into / second_name), into / first_name
    if source is None:
        if second is not None:
            _check_same_problems(args, second)
        source = out / ROLLOUTS
        count = args.num_generations_eval
        Sample(stage_args(SampleArguments, args, output_dir=str(source), num_generations=count)).run()
        # Run `score` even if the rows have rewards, because the stage refuses rewards of functions that are not set.
        _score(args, source, source)
    else:
        source = _score_if_needed(args, source, into)
    compared = None if second is None else str(second)
    Evaluate(stage_args(EvaluateArguments, args, input=str(source), compare=compared)).run()
    tables = (out / REPORT).read_text(encoding="utf-8")
    print(f"{tables}\nEvaluated the rows in {source}. Tables, JSON and a plot are in {out}/.", flush=True)


def _check_folder(folder: Path) -> None:
    """Raise a ValueError if the folder has results that this command did not write. The check runs before sampling."""
    record = manifest.read(folder)
    if record is None:
        manifest.state(folder, Evaluate.name, {})  # It refuses files that topr did not write.
    elif Evaluate.name not in record.stages or manifest.read(folder / ROLLOUTS) is None:
        *_, last = record.stages
        raise ValueError(
            f"{folder} has results of topr {last} without the rows of this command. Use another output_dir."
        )


def _score_if_needed(args: EvaluateArguments, source: Path, into: Path) -> Path:
    """Return `source` if its rows have extracted answers or rewards. Otherwise, score them, and return `into`."""
    if in_all_shards(source, is_scored):
        return source
    _score(args, source, into)
    return into


def _score(args: EvaluateArguments, source: Path, into: Path) -> None:
    Score(stage_args(ScoreArguments, args, input=str(source), output_dir=str(into))).run()


def _check_same_problems(args: EvaluateArguments, second: Path) -> None:
    """Raise a ValueError if the rows of `second` are not for the test problems. This check runs before sampling."""
    problems = load_problems(args, "test")
    ids = problems["problem_id"][:]
    with naming(second):
        if "answer" not in problems.column_names or not in_all_shards(second, have_answers):
            matching_order(ids, read_reward_samples(second).problem_ids)
        else:  # `matched` needs a run, so encode one completion without an answer for each problem.
            nothing = [[None] for _ in ids]
            matched(encode(nothing, problems["answer"][:], problem_ids=ids), read_samples(second))
