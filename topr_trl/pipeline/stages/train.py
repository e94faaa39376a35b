"""Train a model on rows with offline TOPR."""

import os
import shlex
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

from accelerate import PartialState
from transformers import TrainerCallback

from topr_trl.data.rows import TURN_REWARDS
from topr_trl.data.tables import columns_of, shards_of
from topr_trl.pipeline import manifest
from topr_trl.pipeline.adapters import adapter_settings, merge_adapter
from topr_trl.pipeline.lineage import lineage, name_on_the_hub
from topr_trl.pipeline.manifest import Json
from topr_trl.pipeline.model_loading import ADAPTER, model_path
from topr_trl.pipeline.settings import NOT_FOR_COMMANDS, field_names
from topr_trl.pipeline.stage import Result, Stage
from topr_trl.pipeline.stage_inputs import rows_read, values_of, weights_read
from topr_trl.pipeline.trainer_of_rows import FORWARD, TrainArguments, last_whole_checkpoint, trainer_of_rows
from topr_trl.tasks import OWN_PROMPTS
from topr_trl.trainers.checkpoints import STATE
from topr_trl.trainers.run_identity import compared_settings
from topr_trl.user_warnings import warn_user

# Settings that determine the trained weights, besides the settings of `compared_settings`.
RESULT = (
    *FORWARD, "preset", "a_pos", "b_pos", "a_neg", "b_neg", "tf32", "max_length", "padding_free", "sort_by_length",
    "share_prompts", "per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs", "max_steps",
    "neftune_noise_alpha", "full_determinism", "use_liger_kernel", "accelerator_config", "iteration",
)  # fmt: skip
NO_WEIGHTS = (
    "Training would save no whole weights. Set zero3_save_16bit_model: true in the config file of Accelerate, or "
    "stage3_gather_16bit_weights_on_model_save in that of DeepSpeed."
)


class SaveAtInterrupt(TrainerCallback):
    """Callback that saves a checkpoint after the current step at Ctrl+C, and stops. A second Ctrl+C stops at once.

    With `save_only_model` or several processes, the first Ctrl+C stops at once. Several processes would stop at
    different steps.

    Attributes:
        asked (`bool`): Whether the user has pressed Ctrl+C.
    """

    asked = False

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Listen for Ctrl+C from now on. Before the first epoch, there is nothing to save."""
        is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        is_main = threading.current_thread() is threading.main_thread()
        if is_default and is_main and not self.asked and args.world_size == 1 and not args.save_only_model:
            self.process = os.getpid()
            signal.signal(signal.SIGINT, self._ask)

    def _ask(self, *_: Any) -> None:
        if os.getpid() == self.process:  # Processes that load data get Ctrl+C, too.
            self.stop_listening()
            self.asked = True
            # `print` cannot be called here: the signal may have interrupted another `print`.
            os.write(2, b"\nTraining stops after this step, with a checkpoint. Ctrl+C again stops it at once.\n")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save a checkpoint and stop if the user has pressed Ctrl+C."""
        if self.asked:
            control.should_save = control.should_training_stop = True

    def stop_listening(self) -> None:
        """Let Ctrl+C raise `KeyboardInterrupt` again."""
        if signal.getsignal(signal.SIGINT) == self._ask:
            signal.signal(signal.SIGINT, signal.default_int_handler)


class Train(Stage[TrainArguments]):
    """Stage that trains a model with offline TOPR, by default for one epoch.

    With PEFT, the adapter is merged into float32 weights on the CPU, and also saved in the subfolder `adapter/`.
    """

    settings = TrainArguments
    outcome = "The model is in {folder}/."
    runs_apart = True
    on_several_processes = True

    @classmethod
    def setting_names(cls) -> tuple[str, ...]:
        """Return the names of the trainer's settings that apply to a command."""
        return field_names(TrainArguments, without=NOT_FOR_COMMANDS)

    def next_steps(self) -> str:
        """Return commands that show the curves, test the model and compare settings. Return "" in a loop."""
        if self.args.iteration:
            return ""
        name, folder = self.args.model_name_or_path, shlex.quote(str(self.folder))
        options = f"--model_name_or_path {shlex.quote(name)} " if name else ""
        if self.args.ratio_level == "segment":
            options += f"--ratio_level segment --segment_tokens {self.args.segment_tokens} "
        trial = (
            f"\nIf 6 or more problems have several rows each, compare settings by rewards: topr trial {options}"
            f"--input {shlex.quote(str(self.args.input))} --test_by rewards"
        )  # `topr trial` needs one reward per row.
        by_turn = any(TURN_REWARDS in columns_of(shard) for shard in shards_of(self.args.source))
        return (
            f"Read the rows and curves: topr look {folder}\n"
            f"Test the model: topr evaluate --model_name_or_path {folder} {self._test_options()} "
            f"--output_dir results{'' if by_turn else trial}"
        )

    def _test_options(self) -> str:
        """Return options with which `topr evaluate` judges answers as the rows were judged."""
        made = {name: entry["inputs"] for name, entry in lineage(self.folder).items()}
        task = made.get("score", {}).get("task")
        if task in (None, OWN_PROMPTS.name):
            return "--test_dataset_name PROMPTS.jsonl --reward_funcs FILE.py:FUNCTION"
        if (sampling := made.get("sample")) is None:
            return f"--task {task} --test_dataset_name PROBLEMS.jsonl"
        options, dataset = f"--task {task} --num_shots {sampling['num_shots']}", sampling["dataset_name"]
        if sampling["training_shots"]:
            options += " --training_shots true"
        if dataset is None:
            return options  # The built-in problems have a test split.
        name = name_on_the_hub(dataset)
        return f"{options} {f'--dataset_name {name}' if name else '--test_dataset_name PROBLEMS.jsonl'}"

    def inputs(self) -> Json:
        """Return the rows, the weights and the settings.

        The number of processes is not included, because the loop does not know it. Checkpoints and `make` store the
        rows per step.
        """
        args = self.args
        return {
            **rows_read(args.source, self.folder), **weights_read(args), **adapter_settings(args),
            **compared_settings(args), **values_of(args, RESULT),
        }  # fmt: skip

    def make(self) -> Result:
        """Train, starting from the last complete checkpoint if there is one, and save the model."""
        folder, state = self.folder, PartialState()
        work = folder / manifest.WORK
        trainer = trainer_of_rows(self.args)
        zero = trainer.accelerator.state.deepspeed_plugin if trainer.is_deepspeed_enabled else None
        if zero and zero.zero_stage == 3 and not (zero.zero3_save_16bit_model or self.args.use_peft):
            raise ValueError(NO_WEIGHTS)
        interrupt = SaveAtInterrupt()
        trainer.add_callback(interrupt)
        if state.is_main_process:
            self._warn_of_another_batch(trainer._rows_per_step)
        try:
            trainer.train(resume_from_checkpoint=last_whole_checkpoint(work, state))
        finally:
            interrupt.stop_listening()
        if interrupt.asked and (step := trainer.state.global_step) < trainer.state.max_steps:
            raise KeyboardInterrupt(f"The checkpoint of step {step:,} is saved.")
        trainer.save_model(str(work / "final"))
        state.wait_for_everyone()
        if state.is_main_process:  # The other processes do not wait, see `Stage.run`.
            if self.args.use_peft:
                merge_adapter(work / "final", self.args, trainer, folder)
            else:
                for path in (work / "final").iterdir():
                    path.replace(folder / path.name)
            for name in ("completions", "runs"):  # tables of `log_completions`, and TensorBoard's files
                if (work / name).is_dir():
                    shutil.copytree(work / name, folder / name, dirs_exist_ok=True)
            shutil.copyfile(work / STATE, folder / STATE)
        return len(trainer.train_dataset), {"rows_per_step": trainer._rows_per_step}

    def _warn_of_another_batch(self, rows: int) -> None:
        """Warn if the iteration before had another number of rows per step."""
        before = manifest.read(Path(model_path(self.args))) if self.args.iteration > 1 else None
        there = before.stages.get(self.name, {}).get("rows_per_step", rows) if before else rows
        if there != rows:
            warn_user(
                f"This iteration trains on {rows} rows per step, and the iteration before on {there}. Check the "
                "number of processes, per_device_train_batch_size and gradient_accumulation_steps."
            )

    @classmethod
    def summary(cls, done: Json) -> str:
        """Return advice on loading a model with a merged adapter. Return "" without an adapter."""
        if not done["inputs"]["peft"]:
            return ""
        return (
            "The model is saved in float32, because bfloat16 would lose most of a small update. In other programs, "
            f"load float32, or load the base model with the adapter in {ADAPTER}/."
        )
