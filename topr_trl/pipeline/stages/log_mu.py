"""Compute log μ of the rows with the starting model."""

import numpy as np
import pyarrow as pa
from accelerate import PartialState
from trl import ModelConfig

from topr_trl.data.rows import ROLLOUT
from topr_trl.data.trajectories import PARTS
from topr_trl.pipeline import manifest
from topr_trl.pipeline.adapters import adapter_settings
from topr_trl.pipeline.manifest import Json
from topr_trl.pipeline.settings import RowsArguments, field_names
from topr_trl.pipeline.shards import MU_COLUMNS, columns_before, count_rows
from topr_trl.pipeline.stage import Result, Stage
from topr_trl.pipeline.stage_inputs import rows_read, values_of, weights_read
from topr_trl.pipeline.trainer_of_rows import FORWARD, RATIO, TrainArguments, trainer_of_rows
from topr_trl.settings.shared import LossArguments
from topr_trl.trainers.log_mu import LOG_MU_FILE, read_log_mu

# Settings of `topr train` that the computation of log μ uses, besides the settings of rows, model and loss.
_TRAINER_SETTINGS = (
    "baseline", "effective_positive_share", "seed", "iteration", "per_device_train_batch_size",
    "per_device_eval_batch_size", "bf16", "fp16", "tf32", "padding_free", "max_length", "dataset_num_proc", "use_cpu",
    "trust_remote_code", "model_init_kwargs", "chat_template_path", "eos_token", "pad_token", "disable_tqdm",
    "use_liger_kernel", "share_prompts",
    # Accelerate and DeepSpeed shard the model together with its optimizer, and check the optimizer's settings.
    "optim", "optim_args", "optim_target_modules", "learning_rate", "weight_decay", "adam_beta1", "adam_beta2",
    "adam_epsilon", "max_grad_norm", "gradient_accumulation_steps", "deepspeed", "fsdp", "fsdp_config",
)  # fmt: skip


class ComputeLogMu(Stage[TrainArguments]):
    """Stage that writes log μ of the chosen rows that need it, null for all other rows, and a model fingerprint."""

    settings = TrainArguments
    outcome = "log μ is in {folder}/."
    order = 30
    adds_columns = True
    runs_apart = True
    on_several_processes = True

    @classmethod
    def setting_names(cls) -> tuple[str, ...]:
        """Return the names of the settings of `topr train` that the computation of log μ uses."""
        own = field_names(RowsArguments, ModelConfig, LossArguments, without=("length_normalization", "segment_tokens"))
        return (*own, *(name for name in _TRAINER_SETTINGS if name in field_names(TrainArguments)))

    def inputs(self) -> Json:
        """Return the rows, the weights, and the settings of the forward pass."""
        args = self.args
        names = ("baseline", "effective_positive_share", *RATIO, *FORWARD, "seed", "iteration")
        return {
            **rows_read(args.source, self.folder), **weights_read(args), **adapter_settings(args),
            **values_of(args, names),
        }  # fmt: skip

    def make(self) -> Result:
        """Compute log μ with a trainer, and write it to the shards. If the stage was killed, continue its work.

        Raises:
            ValueError: a rollout has several rows.
        """
        # If the stage was killed, some shards have the new columns already, and the trainer must not read them.
        trainer = trainer_of_rows(self.args, columns_before(self.name, self.args.source))
        if PARTS in trainer.train_dataset.column_names:
            raise ValueError(
                f"{self.args.source} has rollouts of several rows ({ROLLOUT}), and topr log-mu needs one row per "
                "rollout. Leave this stage out: topr train computes log μ, too."
            )
        distance = trainer.compute_log_mu()
        computed = self.folder / manifest.WORK / LOG_MU_FILE
        if PartialState().is_main_process:
            arrays = {}
            # The trainer writes no file if no row needs log μ, or if all rows have it already.
            if computed.is_file():
                mu_logps, model = read_log_mu(computed)
                places = np.full(count_rows(self.args.source), -1)
                places[trainer.train_dataset["row"][:]] = np.arange(len(mu_logps))
                values = mu_logps.take(pa.array(places, mask=places < 0))
                models = pa.array([model] * len(places), pa.string())
                arrays = dict(zip(MU_COLUMNS, (values, models), strict=True))
            self.add_arrays(arrays, "Writing log μ")
        return len(trainer.train_dataset), {"sampler_distance": distance}

    @classmethod
    def summary(cls, done: Json) -> str:
        """Return the difference between the log-probabilities of sampler and trainer. Return "" if it is unknown."""
        if not (distance := done["sampler_distance"]):
            return ""
        return (
            f"The log-probabilities of sampler and trainer differ by {distance['token']:.2g} per token and "
            f"{distance['response']:.2g} per completion."
        )
