"""Evaluate a model or rows with pass@k, maj@k and greedy accuracy, and compare two runs."""

from dataclasses import dataclass, field
from pathlib import Path

from topr_trl.evaluation.answers import read_samples, run_names
from topr_trl.evaluation.report import EVALUATION, read_evaluation, write_report
from topr_trl.pipeline import manifest
from topr_trl.pipeline.manifest import Json
from topr_trl.pipeline.settings import ADAPTER_SETTINGS, GREEDY_HELP, field_names
from topr_trl.pipeline.stage import Made, Stage
from topr_trl.pipeline.stages.sample import SampleArguments
from topr_trl.settings.checks import check_at_least

REPORT = "evaluation.txt"  # file with the tables


@dataclass
class EvaluateArguments(SampleArguments):
    """Settings of `topr evaluate`."""

    compare: str | None = field(default=None, metadata={"help": "Folder or file of rows of another run."})
    num_generations_eval: int = field(
        default=16, metadata={"help": "Number of completions per test problem (64 in the paper)."}
    )
    greedy: bool = field(default=True, metadata={"help": GREEDY_HELP})
    split: str = "test"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(1, self, "num_generations_eval")


class Evaluate(Stage[EvaluateArguments]):
    """Stage that writes tables, JSON and a picture for the scored rows of one run, or for a comparison of two runs."""

    settings = EvaluateArguments

    @classmethod
    def setting_names(cls) -> tuple[str, ...]:
        """Return the sampling settings that apply to test problems, and the settings of this stage."""
        without = ("num_generations", "split", "worker", "iteration", *ADAPTER_SETTINGS)
        return field_names(EvaluateArguments, without=without)

    def sources(self) -> list[Path]:
        """Return the rows, and the rows to compare with."""
        return [Path(path) for path in (self.args.input, self.args.compare) if path is not None]

    def inputs(self) -> Json:
        """Return the rows, the rows to compare with, and the seed of the bootstrap."""
        assert self.args.input is not None
        second = {"compare": manifest.fingerprint(Path(self.args.compare))} if self.args.compare else {}
        return {"input": manifest.fingerprint(Path(self.args.input)), **second, "seed": self.args.seed}

    def make(self) -> Made:
        """Write the report, see `write_report`."""
        sources = self.sources()
        names = run_names(*sources) if len(sources) == 2 else ["estimate"]
        runs = {name: read_samples(source) for name, source in zip(names, sources, strict=True)}
        report = write_report(self.folder, runs, self.args.seed)
        (self.folder / REPORT).write_text(f"{report}\n", encoding="utf-8")
        found = read_evaluation(self.folder / EVALUATION)
        notes = {"pass@1": str(found.pass_at[1])} | ({"greedy": str(found.greedy)} if found.greedy else {})
        return sum(samples.num_rows for samples in runs.values()), notes

    @classmethod
    def summary(cls, done: Json) -> str:
        """Return greedy accuracy and pass@1."""
        return ", ".join(f"{name} {done[name]}" for name in ("greedy", "pass@1") if name in done)
