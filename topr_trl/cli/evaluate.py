"""The command `topr evaluate`: a model or candidates in, tables, JSON and a picture out."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from topr_trl.data.tables import columns_of, shards_of
from topr_trl.evaluation.answers import encode, labels, read_samples
from topr_trl.evaluation.bootstrap import matched
from topr_trl.pipeline import manifest, stages
from topr_trl.pipeline.arguments import Settings, load_problems


def evaluate_command(settings: Settings) -> None:
    """Make what the stage `evaluate` lacks, run it, and print what it found.

    Without `--input` the test problems are sampled, to `candidates/` in the output folder; rows without `extracted` are
    scored, to `scored/`. A command that is started again goes on.

    Raises:
        ValueError, FileNotFoundError: settings or rows do not fit; before anything is sampled, where it can be known.
    """
    if settings.stage.worker is not None:
        raise ValueError("--worker is for topr sample: sample with it, then name the folder with --input.")
    settings = _of(settings, split="test")
    out, second = settings.folder, settings.compared
    source = settings.source if settings.stage.input is not None else None
    for path in (source, second):
        if path is not None:
            check_rows(path)
    into = out / "scored"
    if second is not None:
        first_name, second_name = _names(settings, source, second)
        second, into = _scored(settings, second, into / second_name), into / first_name
    if source is None:
        if second is not None:
            _check_problems(settings, second)
        source = out / "candidates"
        stages.run("sample", _of(settings, output=str(source), compare=None))
    source = _scored(settings, source, into)
    stages.run("evaluate", _of(settings, input=str(source), compare=None if second is None else str(second)))
    tables = (out / stages.REPORT).read_text()
    print(f"{tables}\nOf the rows in {source}. Tables, JSON and a picture are in {out}/", flush=True)


def _names(settings: Settings, source: Path | None, second: Path) -> list[str]:
    """Of two runs, for their folders of scored rows, from which the tables take them."""
    if source is not None:
        return labels(source, second)
    model = Path(settings.model_path).name
    return [model, second.name if second.name != model else f"compared-{model}"]


def _of(settings: Settings, **changes: Any) -> Settings:
    return replace(settings, stage=replace(settings.stage, **changes))


def check_rows(path: Path) -> None:
    """Refuse rows that can neither be evaluated nor scored.

    Raises:
        ValueError: naming the file and the columns that it lacks.
    """
    manifest.check_kept(path)
    for shard in shards_of(path):
        columns = set(columns_of(shard))
        needed = {"problem_id", "answer"} | (set() if "extracted" in columns else {"completion"})
        if missing := sorted(needed - columns):
            raise ValueError(
                f"{shard}: rows to evaluate need the columns problem_id, answer, and extracted or completion; "
                f"{', '.join(missing)} missing."
            )
        if "extracted" not in columns and "reward" in columns:
            raise ValueError(
                f"{shard}: rows have a reward and no `extracted` answer. Drop the column `reward` to have them scored."
            )


def _scored(settings: Settings, source: Path, into: Path) -> Path:
    """Where the rows are with their extracted answers: there already, or after the stage `score`."""
    if all("extracted" in columns_of(shard) for shard in shards_of(source)):
        return source
    stages.run("score", _of(settings, input=str(source), output=str(into), compare=None))
    return into


def _check_problems(settings: Settings, second: Path) -> None:
    """Before sampling: the run to compare with must have the problems that will be sampled."""
    problems = load_problems(settings.stage)
    nothing = [[None] for _ in range(len(problems))]
    matched(encode(nothing, problems["answer"][:], problem_ids=problems["problem_id"][:]), read_samples(second))
