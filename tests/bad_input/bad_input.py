"""What happens to bad input: the cases' form, and the page `docs/bad_input.md` that is made of them.

`python tests/bad_input/bad_input.py` writes the page again.
"""

import contextlib
import io
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from topr_trl import OfflineTOPRConfig, OfflineTOPRTrainer, TOPRConfig, TOPRTrainer
from topr_trl.cli import main as cli

PAGE = Path(__file__).parents[2] / "docs" / "bad_input.md"


@dataclass(frozen=True)
class Kept:
    """What is still there afterwards, in words, and how that is checked."""

    text: str
    check: Callable[[Any], None]


@dataclass(frozen=True)
class Case:
    """
    Attributes:
        given: what is wrong, for the page.
        do: does it; takes the door's kit.
        message: of the error, whole; … stands for what differs from run to run.
        kept: what is checked afterwards.
        error: what is raised; a warning is caught, and all goes on; None where nothing is said.
    """

    given: str
    do: Callable[[Any], Any]
    message: str
    kept: Kept
    error: type[BaseException] | None = ValueError

    def run(self, kit: Any) -> None:
        if self.error is None:
            self.do(kit)
            self.kept.check(kit)
            return
        if issubclass(self.error, Warning):
            with pytest.warns(self.error) as caught:
                self.do(kit)
            texts = [str(warning.message) for warning in caught]
        else:
            with pytest.raises(self.error) as raised:
                self.do(kit)
            texts = [str(raised.value)]
        pattern = ".+?".join(map(re.escape, self.message.split("…")))
        assert any(re.fullmatch(pattern, " ".join(text.split())) for text in texts), texts
        self.kept.check(kit)


def cases(door: list[Case]) -> Any:
    """For `pytest.mark.parametrize`."""
    return pytest.mark.parametrize("case", [pytest.param(case, id=case.given.replace("`", "")) for case in door])


class Kit:
    """What cases work with: a folder, and the doors.

    Attributes:
        folder, out: a folder for what is given, and one in it for what is written.
        trainer: the last that was made.
        before: the files below `folder`, with their contents, as `note` found them.
    """

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self._request = request
        self.folder: Path = self["tmp_path"]
        self.out = self.folder / "out"
        self.trainer: Any = None
        self.before: dict[Path, bytes] = {}

    def small_disk(self, size: str) -> None:
        """Let `out` lie on a disk of this size; or give it another."""
        options = f"size={size}" + ",remount" * self.out.is_mount()
        self.out.mkdir(exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(self.out)]
        if not options.endswith("remount"):
            self._request.addfinalizer(lambda: subprocess.run(["umount", "--lazy", str(self.out)], check=False))
        if sys.platform != "linux" or os.geteuid() or subprocess.run(command, capture_output=True).returncode:
            pytest.skip("mounting a small disk needs root on Linux, and to be allowed to mount")

    def __getitem__(self, fixture: str) -> Any:
        return self._request.getfixturevalue(fixture)

    def note(self) -> None:
        self.before = {path: path.read_bytes() for path in self.folder.rglob("*") if path.is_file()}

    def offline(
        self, rows: Dataset, model: Any = None, tokenizer: Any = None, resume: Any = None, **given: Any
    ) -> None:
        """An OfflineTOPRTrainer that trains on rows; `given` are settings and other arguments."""
        settings = {**SETTINGS, "per_device_train_batch_size": 4, "output_dir": str(self.out), **given}
        others = {name: settings.pop(name) for name in _OF_THE_TRAINER if name in settings}
        model, tokenizer = model or self["model"], tokenizer or self["tokenizer"]
        args = OfflineTOPRConfig(**settings)
        self.trainer = OfflineTOPRTrainer(model, args, rows, processing_class=tokenizer, **others)
        self.trainer.train(resume_from_checkpoint=resume)

    def online(
        self,
        reward: Any,
        prompts: Any = None,
        model: Any = None,
        tokenizer: Any = None,
        replayed: Any = None,
        **given: Any,
    ) -> None:
        """A TOPRTrainer that trains on four responses to each of two prompts."""
        settings = {**SETTINGS, "per_device_train_batch_size": 8, "num_generations": 4, "max_steps": 2,
                    "max_completion_length": 8, "output_dir": str(self.out), **given}  # fmt: skip
        rows = Dataset.from_dict({"prompt": ["3 + 4 =", "9 - 2 ="]} if prompts is None else prompts)
        model, tokenizer = model or self["model"], tokenizer or self["tokenizer"]
        self.trainer = TOPRTrainer(
            model, reward, TOPRConfig(**settings), rows, processing_class=tokenizer, replay_dataset=replayed
        )
        self.trainer.train()

    def topr(self, *arguments: Any) -> None:
        """The command in this process; what it ends with is raised as its user reads it."""
        self["monkeypatch"].chdir(self.folder)
        self["monkeypatch"].setattr("sys.argv", ["topr", *map(str, arguments)])
        errors = io.StringIO()
        try:
            with contextlib.redirect_stderr(errors):
                cli.console()
        except SystemExit as end:
            if isinstance(end.code, str):
                line, *more = end.code.removesuffix(" (--debug shows where)").split("\n")
                raise SystemExit(f"{line} AND MORE LINES" if more else line) from None
            raise SystemExit(errors.getvalue()) from None  # argparse prints, and exits with 2


_OF_THE_TRAINER = ("eval_dataset", "data_collator", "compute_metrics")  # and not of its settings
SETTINGS = {
    "report_to": "none", "bf16": False, "use_cpu": True, "learning_rate": 1e-3, "gradient_checkpointing": False,
    "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True,
}  # fmt: skip
NOWHERE = "nowhere/model"  # cannot be loaded: what is raised before that has loaded nothing


def _nothing_written(kit: Kit) -> None:
    assert not [path for path in kit.out.rglob("*") if path.is_file()]


def _unchanged(kit: Kit) -> None:
    assert kit.before
    assert kit.before == {path: path.read_bytes() for path in kit.before}


def _no_shard(kit: Kit) -> None:
    assert not list(kit.out.rglob("*.parquet"))
    assert kit.before == {path: path.read_bytes() for path in kit.before}


NO_SHARD = Kept("what was there; no shard is written", _no_shard)
NOTHING_WRITTEN = Kept("nothing is written", _nothing_written)
UNCHANGED = Kept("all files are as they were", _unchanged)


@pytest.fixture
def kit(request: pytest.FixtureRequest) -> Kit:
    return Kit(request)


def doors() -> dict[str, list[Case]]:
    import test_bad_files
    import test_bad_rows
    import test_bad_settings
    import test_bad_training

    modules = (test_bad_rows, test_bad_files, test_bad_settings, test_bad_training)
    return {door: cases for module in modules for door, cases in module.DOORS.items()}


INTRODUCTION = """\
# Bad input

This page lists wrong input, the message that the user gets, and what is kept. It has {count} cases, and each is a test
in `tests/bad_input/`; `python tests/bad_input/bad_input.py` writes this page from them. … stands for what differs from
run to run. Checks come before anything expensive: what can be known from columns, settings and file headers is reported
before a model is loaded or a token is sampled. On the command line a message is one line that begins with the command
(`topr train: ...`), and `--debug` shows its traceback. An error of your own reward function is passed on; a reward
function that hangs is waited for, unless it works in a `WorkerPool`.
"""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def page() -> str:
    def lines() -> Iterator[str]:
        found = doors()
        yield INTRODUCTION.format(count=sum(map(len, found.values())))
        for door, members in found.items():
            yield f"## {door}\n\n| given | message | kept |\n|---|---|---|"
            for case in members:
                plain = case.error is None or issubclass(case.error, ValueError | SystemExit)
                message = ("" if plain else f"{case.error.__name__}: ") + (case.message or "–").replace("<", "&lt;")
                yield f"| {_cell(case.given)} | {_cell(message)} | {_cell(case.kept.text)} |"
            yield ""

    return "\n".join(lines())


if __name__ == "__main__":
    # As the tests know it: under its own name, or its classes would be there twice.
    sys.path.insert(0, str(Path(__file__).parent))
    from bad_input import page

    PAGE.write_text(page())
    print(f"Wrote {PAGE}")
