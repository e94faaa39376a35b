"""Make the trainer of the stages `log-mu` and `train`: an `OfflineTOPRTrainer` on the rows of `input`."""

import shutil
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path

from accelerate import PartialState
from trl import ModelConfig, get_peft_config

from topr_trl.data.tables import read_table, shards_of
from topr_trl.pipeline import manifest
from topr_trl.pipeline.adapters import check_adapter
from topr_trl.pipeline.lineage import lineage, older_weights, weights_of
from topr_trl.pipeline.manifest import Json
from topr_trl.pipeline.model_loading import adapter_of, load_model, load_tokenizer, loading, model_path
from topr_trl.pipeline.settings import RowsArguments, SeedArguments, seed_of, validate_model
from topr_trl.pipeline.shards import MU_COLUMNS
from topr_trl.pipeline.stage_inputs import absolute
from topr_trl.pipeline.stages.curate import CHOICE
from topr_trl.settings.checks import check_at_least
from topr_trl.settings.config import OfflineTOPRConfig
from topr_trl.settings.shared import CurationArguments
from topr_trl.trainers.checkpoints import is_whole_checkpoint
from topr_trl.trainers.offline import OfflineTOPRTrainer

# Settings, besides the weights, that determine log π of a row.
FORWARD = ("bf16", "fp16", "model_init_kwargs", "chat_template_path", "eos_token", "pad_token")
# Settings that determine the limits and the level of π/μ, and the source of log μ. `segment_tokens` is left out,
# because log μ does not depend on this setting.
RATIO = ("preset", "a_pos", "b_pos", "a_neg", "b_neg", "ratio_level", "log_mu")


@dataclass
class TrainArguments(RowsArguments, OfflineTOPRConfig, ModelConfig):
    """Settings of `topr train`. `topr log-mu` uses a subset of them."""

    save_total_limit: int | None = field(default=1, metadata={"help": "Number of checkpoints to keep during training."})
    iteration: int = SeedArguments.iteration

    def __post_init__(self) -> None:
        output_dir = self.output_dir
        validate_model(self, whole=True)
        OfflineTOPRConfig.__post_init__(self)
        self.output_dir = output_dir  # transformers replaces None with a default name.
        check_at_least(0, self, "iteration")
        if self.push_to_hub:
            raise ValueError(
                "push_to_hub is a setting for trainers in your own script. Push the result of a command after it has "
                "finished: topr push --input FOLDER --repo_id NAME."
            )


def trainer_of_rows(args: TrainArguments, columns: Sequence[str] | None = None) -> OfflineTOPRTrainer:
    """Make a trainer for the rows of `args.source`.

    Args:
        args (`TrainArguments`): Settings.
        columns (`Sequence[str]`, *optional*): Columns to read. `None` reads all.

    Raises:
        ValueError: the rows cannot be trained on, the settings differ from those of `curate`, or the adapter of the
            model cannot be trained further with these settings.
    """
    work, own = args.folder / manifest.WORK, copy(args)
    own.output_dir, own.seed = str(work), seed_of("train", args.seed, args.iteration)
    # In iteration 1, `log-mu` leaves the messages to `train`, which runs after it. A trial prints its own findings.
    own.was_said = args.iteration > 1 or (args.iteration == 1 and columns is not None) or _is_in_trial(args)
    how = {**loading(args), **(args.model_init_kwargs or {})}
    # Training continues with the old adapter. A new adapter would need the merged weights as its base model, and these
    # weights must not be rounded.
    further = adapter_of(args, None if args.use_peft else how.get("dtype"), "quantization_config" in how)
    tokenizer = load_tokenizer(args)
    with PartialState().main_process_first():
        rows = read_table(*shards_of(args.source), cache_dir=work / "cache", columns=columns)
    done = lineage(args.source)
    if MU_COLUMNS[1] in rows.column_names and _has_log_mu_of_writer(done, model_path(args)):
        # The trainer refuses the fingerprint of an older model. That model wrote the rows, so its log μ is right.
        rows = rows.remove_columns(MU_COLUMNS[1])
    _check_choice(args, done.get("curate"))
    if further is not None:
        check_adapter(args, further)
        own.model_init_kwargs = None
        return OfflineTOPRTrainer(load_model(args, how, trainable=True), own, rows, processing_class=tokenizer)
    own.model_init_kwargs, adapter = how, get_peft_config(args)
    if adapter is not None:
        # PEFT saves this revision with the adapter. Otherwise, the adapter would belong to the main revision.
        adapter.revision = how.get("revision")
    # PEFT also saves the path of the base model. Later commands may run in another folder, so make it absolute.
    model = absolute(model_path(args)) if adapter else model_path(args)
    return OfflineTOPRTrainer(model, own, rows, processing_class=tokenizer, peft_config=adapter)


def _is_in_trial(args: TrainArguments) -> bool:
    rows = args.source.parent
    return args.folder.resolve().is_relative_to(rows.parent.resolve()) and "split" in lineage(rows)


def _has_log_mu_of_writer(done: Mapping[str, Json], model: str) -> bool:
    """Return whether the model that wrote the rows computed their log μ, and `model` was trained from that model."""
    if not {"sample", "log-mu"} <= set(done):
        return False
    writer, scorer = (weights_of(done[stage]["inputs"]) for stage in ("sample", "log-mu"))
    return writer == scorer and writer in older_weights(Path(model))


def _check_choice(args: TrainArguments, curate: Json | None) -> None:
    """Raise a ValueError if a curation setting has no effect, because `curate` chose the rows with a different value.

    Default values pass, because the user may not have set them.
    """
    if curate is None:
        return
    for name in CHOICE:
        value, there = getattr(args, name), curate["inputs"][name]
        if value not in (there, getattr(CurationArguments, name)):
            raise ValueError(
                f"{name}={value}, but topr curate chose the rows of {args.source} with {name}={there}. Remove "
                f"{name}, or run topr curate again."
            )


def last_whole_checkpoint(run: Path, state: PartialState) -> str | None:
    """Remove incomplete checkpoints of a run. Return the newest checkpoint that is left, or None if none is left.

    All processes must call this function together.
    """
    found = sorted(run.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    whole = [path for path in found if is_whole_checkpoint(path)]
    state.wait_for_everyone()
    if state.is_main_process:
        for path in set(found) - set(whole):
            shutil.rmtree(path)
    state.wait_for_everyone()
    return str(whole[-1]) if whole else None
