"""Base class of a stage. A stage writes a folder, and is skipped while its inputs stay the same.

To add a stage, add a module with one subclass to `topr_trl/pipeline/stages/`. The name of the module is the command,
and the first line of the module's docstring is the help of the command.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from os.path import relpath
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

import pyarrow as pa
from accelerate import PartialState
from trl import ModelConfig

from topr_trl.data.tables import set_column
from topr_trl.pipeline import locks, manifest, shards
from topr_trl.pipeline import stages as registry
from topr_trl.pipeline.manifest import Json
from topr_trl.pipeline.model_loading import model_path
from topr_trl.pipeline.settings import FolderArguments, field_names
from topr_trl.trainers.checkpoints import writing_to

Result = tuple[int, Json]  # result of `make`: the number of rows, and notes for the manifest
Settings = TypeVar("Settings", bound=FolderArguments, covariant=True)


class Stage(ABC, Generic[Settings]):
    """Base class of a stage. An instance is a stage with its settings.

    Subclasses define `inputs` and `make`, and set these class attributes. The attribute `name` is the command, which
    comes from the name of the module.

    Attributes:
        settings (`type`): Dataclass of settings, a subclass of `FolderArguments`.
        outcome (`str`, defaults to `""`): Line that the command prints after the summary. It can contain `{folder}` and
            `{rows:,}`.
        order (`int`, *optional*): Position among the stages that write rows. A stage that runs again removes the
            columns of stages with a higher `order`. The loop runs them in this order.
        adds_columns (`bool`, defaults to `False`): Whether `make` adds columns to rows with `self.add_columns`. The
            loop runs such stages on the rows of each iteration.
        runs_apart (`bool`, defaults to `False`): Whether the loop runs the stage in its own processes. All of their
            memory, including GPU memory, is freed when they end.
        on_several_processes (`bool`, defaults to `False`): Whether `accelerate launch` may start the stage in several
            processes.

    Example:
        ```python
        from topr_trl.pipeline.stages.score import Score, ScoreArguments

        done = Score(ScoreArguments(input="rows", output_dir="rows", task="gsm8k")).run()
        print(done["rows"])
        ```
    """

    name: ClassVar[str]
    settings: ClassVar[type]
    outcome: ClassVar[str] = ""
    order: ClassVar[int | None] = None
    adds_columns: ClassVar[bool] = False
    runs_apart: ClassVar[bool] = False
    on_several_processes: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        cls.name = registry.command_of(cls.__module__.rpartition(".")[2])

    def __init__(self, args: Settings) -> None:
        self.args = args

    @property
    def folder(self) -> Path:
        """Return the folder to write."""
        return self.args.folder

    @classmethod
    def setting_names(cls) -> tuple[str, ...]:
        """Return the names of the command's settings. By default, these are all fields of `settings`."""
        return field_names(cls.settings)

    def needs_process(self, in_thread: bool) -> bool:
        """Return whether the loop runs the stage in its own processes. By default, return `runs_apart`.

        Args:
            in_thread (`bool`): Whether the loop would otherwise run the stage in a thread, as with `overlap`.
        """
        return self.runs_apart

    @abstractmethod
    def inputs(self) -> Json:
        """Return the settings and files that determine the result, as JSON."""

    @abstractmethod
    def make(self) -> Result:
        """Write the result. If a killed run left a part of the result, write only the missing part.

        Returns:
            The number of rows, and notes for the manifest.
        """

    def sources(self) -> dict[str, Path]:
        """Return the folders and files with the rows that the stage reads, by the name of the setting.

        Raises:
            ValueError: `input` is not set.
            FileNotFoundError: the input does not exist.
        """
        return {"input": self.args.source}

    def weights(self) -> Path | None:
        """Return the folder of the weights that the stage reads. Return None if no stage wrote the weights."""
        if not isinstance(self.args, ModelConfig):
            return None
        folder = Path(model_path(self.args))
        return folder if (folder / manifest.NAME).is_file() else None

    @classmethod
    def summary(cls, done: Json) -> str:
        """Return the summary that the command prints after the stage has finished.

        Args:
            done (`dict`): Entry of the stage in the manifest.
        """
        return ""

    def next_steps(self) -> str:
        """Return text with commands that the user can run next. The command prints this text at the end."""
        return ""

    def is_finished(self) -> bool:
        """Return whether the stage has finished with the current inputs, and no file is damaged. No file is changed.

        Raises:
            ValueError: the folder holds results for other inputs, the input is unfinished or damaged, or the manifest
                is damaged.
            FileNotFoundError: the input does not exist.
        """
        record = manifest.read(self.folder)
        if record is None or self.name not in record.stages:
            return False
        self.check_sources()
        return manifest.state(self.folder, self.name, self.inputs(), self._has_results()) == manifest.FINISHED

    def run(self) -> Json:
        """Run the stage, unless it has finished already.

        Returns:
            The stage's entry in the manifest, on the main process. The remaining processes get {}.

        Raises:
            ValueError: the folder holds results for other settings, the input is unfinished or damaged, or a stage
                that runs in one process was launched in several.
            FileNotFoundError: the input does not exist.
        """
        state = PartialState(cpu=getattr(self.args, "use_cpu", False))
        if state.num_processes > 1 and not self.on_several_processes:
            raise ValueError(f"The stage {self.name} runs in one process; start it without accelerate launch.")
        self.check_sources()  # Check before the next line creates the output folder.
        with locks.lock_all(self.folder) if state.is_main_process else nullcontext():
            with state.main_process_first():
                finished = self.begin()
            if not finished:
                started = time.monotonic()
                try:
                    with writing_to(self.folder):
                        rows, notes = self.make()
                except Exception:
                    if state.is_main_process and not self._has_results():
                        manifest.forget(self.folder, self.name)  # The user can then change the settings.
                    raise
                # Computing the checksums of a large model takes a long time. The other processes do not wait, because
                # they would time out.
                if state.is_main_process:
                    seconds = round(time.monotonic() - started, 3)
                    manifest.finish(self.folder, self.name, rows, **notes, seconds=seconds)
        return self.entry() if state.is_main_process else {}

    def clean_up(self) -> None:
        """Remove temporary files that a process left if it was killed at the very end of a stage."""
        record = manifest.read(self.folder)
        if record is not None and record.finished:
            manifest.clean(self.folder)

    def entry(self) -> Json:
        """Return the stage's entry in the manifest of its folder. Return {} if the manifest or the entry is missing."""
        record = manifest.read(self.folder)
        return record.stages.get(self.name, {}) if record is not None else {}

    def begin(self) -> bool:
        """Prepare the folder for this stage, see `manifest.begin`. Return whether the stage has finished."""
        self._check_earlier_stages()
        read = self._other_sources()
        if (weights := self.weights()) is not None:
            read["weights"] = weights
        sources = {name: relpath(path.resolve(), self.folder.resolve()) for name, path in read.items()}
        return manifest.begin(self.folder, self.name, self.inputs(), sources, self._has_results())

    def _check_earlier_stages(self) -> None:
        """Check that a new stage in the folder of other stages only adds columns to their rows, and comes after them.

        Raises:
            ValueError: the stage would remove the results of another stage, or mix its results with them.
        """
        record = manifest.read(self.folder)
        if record is None or self.name in record.stages:
            return
        in_place = self.adds_columns and not self._other_sources()
        removed = registry.removed_by(self.name) if in_place else record.stages
        if others := [name for name in record.stages if name in removed]:
            raise ValueError(
                f"{self.folder} holds the results of topr {others[-1]}, which topr {self.name} would remove or mix "
                "with its own. Use another output_dir."
            )

    def check_sources(self) -> None:
        """Check that the folders to read exist, are finished and have all of their files.

        The stage's own folder and the weights are not checked.

        Raises:
            ValueError: `input` is not set, or a folder is unfinished or damaged.
            FileNotFoundError: a path does not exist.
        """
        for path in self._other_sources().values():
            manifest.check_whole(path)

    def _other_sources(self) -> dict[str, Path]:
        """Return the folders and files that the stage reads, without the stage's own folder."""
        return {name: path for name, path in self.sources().items() if path.resolve() != self.folder.resolve()}

    def add_columns(self, columns: Callable[[shards.Part, pa.Table], pa.Table], description: str) -> None:
        """Add columns to each part of the input, see `shards.add_columns`."""
        shards.add_columns(self.args.source, self.folder, self.name, columns, description)

    def add_arrays(self, arrays: Mapping[str, pa.Array | pa.ChunkedArray], description: str) -> None:
        """Add columns from arrays, by name. Each array has one value per row, for the rows of all shards in order."""

        def with_arrays(part: shards.Part, table: pa.Table) -> pa.Table:
            for name, values in arrays.items():
                own = values.slice(part.first, len(table))
                kind = pa.list_(own.type.value_type) if pa.types.is_large_list(own.type) else own.type
                table = set_column(table, name, own.cast(kind))
            return table

        self.add_columns(with_arrays, description)

    def _has_results(self) -> bool:
        """Return whether the folder has results or checkpoints of this stage.

        A stage with results refuses other settings, because new results would mix with the old results or replace them.
        """
        work = self.folder / manifest.WORK
        kept = [*work.glob("checkpoint-*"), *work.glob("final"), *work.glob("log_mu*")]
        if self.adds_columns:
            return bool(kept) or any(shards.has_stage(self.name, shard) for shard in self.folder.glob("*.parquet"))
        return bool(kept) or bool(manifest.results(self.folder))
