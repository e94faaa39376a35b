"""Classes for cases of bad input."""

import contextlib
import io
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from topr_trl import OfflineTOPRConfig, OfflineTOPRTrainer, TOPRConfig, TOPRTrainer
from topr_trl.cli import main as cli


@dataclass(frozen=True)
class Case:
    """One bad input.

    Attributes:
        given: the bad input in a few words.
        do: function that gives the bad input; it receives a `Kit`.
        words: words and phrases that the message must contain, separated by ", ": the field or column, the wrong value,
            the remedy.
        kept: function that checks, with the `Kit`, what the error left unchanged.
        error: the expected exception or warning, or None.
    """

    given: str
    do: Callable[[Any], Any]
    words: str
    kept: Callable[[Any], None]
    error: type[BaseException] | None = ValueError

    def run(self, kit: Any) -> None:
        if self.error is None:
            self.do(kit)
        else:
            is_warning = issubclass(self.error, Warning)
            with (pytest.warns if is_warning else pytest.raises)(self.error) as caught:
                self.do(kit)
            texts = [str(warning.message) for warning in caught] if is_warning else [str(caught.value)]
            missing = {text: [word for word in self.words.split(", ") if not contains(text, word)] for text in texts}
            assert [] in missing.values(), missing
        self.kept(kit)


def contains(text: str, word: str) -> bool:
    """Whether a message contains a word or phrase, as whole words and ignoring case."""
    return bool(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", " ".join(text.split()), re.IGNORECASE))


def cases(door: list[Case]) -> Any:
    """Return a decorator that runs a test once per case."""
    return pytest.mark.parametrize("case", [pytest.param(case, id=case.given.replace("`", "")) for case in door])


class Kit:
    """Tools for cases: folders, and methods that train or run a command.

    Attributes:
        folder: temporary folder for the input.
        out: folder for the output, in `folder`.
        trainer: the last trainer that was made.
        before: contents of all files in `folder` when `note` was called.
    """

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self._request = request
        self.folder: Path = self["tmp_path"]
        self.out = self.folder / "out"
        self.trainer: Any = None
        self.before: dict[Path, bytes] = {}

    def small_disk(self, size: str) -> None:
        """Mount a disk of this size at `out`, or resize the disk that is mounted there."""
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
        """Train on rows with an OfflineTOPRTrainer. `given` holds settings and other arguments of the trainer."""
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
        """Train with a TOPRTrainer on four completions per prompt. `prompts` defaults to two prompts."""
        settings = {**SETTINGS, "per_device_train_batch_size": 8, "num_generations": 4, "max_steps": 2,
                    "max_completion_length": 8, "output_dir": str(self.out), **given}  # fmt: skip
        rows = Dataset.from_dict({"prompt": ["3 + 4 =", "9 - 2 ="]} if prompts is None else prompts)
        model, tokenizer = model or self["model"], tokenizer or self["tokenizer"]
        self.trainer = TOPRTrainer(
            model, reward, TOPRConfig(**settings), rows, processing_class=tokenizer, replay_dataset=replayed
        )
        self.trainer.train()

    def topr(self, *arguments: Any) -> None:
        """Run a command in this process. Its error must be argparse's, or one line that starts with the command."""
        self["monkeypatch"].chdir(self.folder)
        words = " ".join(map(str, arguments)).split()
        self["monkeypatch"].setattr("sys.argv", ["topr", *words])
        errors = io.StringIO()
        try:
            with contextlib.redirect_stderr(errors):
                cli.console()
        except SystemExit as end:
            if isinstance(end.code, str):
                line, *more = end.code.removesuffix(" (--debug shows where)").split("\n")
                assert line.startswith(f"topr {words[0]}: ")
                assert not more or "while parsing" in line  # PyYAML's errors have several lines.
                raise SystemExit(line + " …" * bool(more)) from None
            # argparse prints its error and exits with code 2.
            assert errors.getvalue().startswith("usage: topr ")
            raise SystemExit(errors.getvalue().split("\n", 1)[1].strip()) from None


_OF_THE_TRAINER = ("eval_dataset", "data_collator", "compute_metrics")  # arguments of the trainer that are not settings
SETTINGS = {
    "report_to": "none", "bf16": False, "use_cpu": True, "learning_rate": 1e-3, "gradient_checkpointing": False,
    "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True,
}  # fmt: skip
NOWHERE = "nowhere/model"  # This model cannot be loaded, so the expected error must come before loading.


def nothing_written(kit: Kit) -> None:
    assert not [path for path in kit.out.rglob("*") if path.is_file()]


def unchanged(kit: Kit) -> None:
    assert kit.before
    assert kit.before == {path: path.read_bytes() for path in kit.before}


def no_shard(kit: Kit) -> None:
    assert not list(kit.out.rglob("*.parquet"))
    assert kit.before == {path: path.read_bytes() for path in kit.before}


@pytest.fixture
def kit(request: pytest.FixtureRequest) -> Kit:
    return Kit(request)
