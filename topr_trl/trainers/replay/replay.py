"""Replay rows of earlier generation batches and logged rows in `TOPRTrainer` (`replay_share`).

`buffer.py` stores the rows, `logged_rows.py` reads logged rows, and `batches.py` adds rows to TRL's batches.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from datasets import Dataset
from torch import Tensor
from tqdm.auto import tqdm

from topr_trl.data.preparation import ScoredRows
from topr_trl.data.rows import refuse_images
from topr_trl.settings.config import TOPRConfig
from topr_trl.settings.shared import REPLAYED_BATCHES
from topr_trl.trainers.log_mu import check_fingerprints
from topr_trl.trainers.messages import say
from topr_trl.trainers.replay.batches import batch_of, check_columns, with_rows
from topr_trl.trainers.replay.buffer import ReplayBuffer, ReplayRow
from topr_trl.trainers.replay.logged_rows import logged_rows, read_logged
from topr_trl.user_warnings import warn_user


def check_replay(args: TOPRConfig, dataset: object, logged: Dataset | None) -> ScoredRows | None:
    """Check that rows can be replayed, before the model is loaded. Validate the logged rows, and return them.

    Args:
        args ([`TOPRConfig`]):
            Settings of the trainer.
        dataset (`object`):
            Training dataset with the prompts.
        logged ([`~datasets.Dataset`], *optional*):
            Logged rows (`replay_dataset`).

    Returns:
        `ScoredRows`: the logged rows, or `None` if `logged` is `None`.

    Raises:
        TypeError: the logged rows are not a `Dataset`.
        ValueError: the logged rows are given without `replay_share`, `read_logged` rejects them, or rows of `dataset`
            have images.
    """
    if logged is not None and not args.replay_share:
        raise ValueError("replay_dataset needs replay_share above 0. Set replay_share, or leave replay_dataset out.")
    if args.replay_share and isinstance(dataset, Dataset):
        refuse_images(dataset, "Rows with images cannot be replayed: only text is kept. Set replay_share=0.")
    return None if logged is None else read_logged(logged, args.temperature)


class Replay:
    """Rows to replay in one process of a `TOPRTrainer`.

    Args:
        trainer ([`TOPRTrainer`]):
            Trainer with its model and tokenizer.
        logged (`ScoredRows`, *optional*):
            Logged rows. The buffer gets this process's part of them.

    Attributes:
        buffer (`ReplayBuffer`):
            Rows of this process.
        description (`str`):
            Text about the replayed rows, for the model card.
    """

    def __init__(self, trainer: Any, logged: ScoredRows | None) -> None:
        self._trainer = trainer
        args, accelerator = trainer.args, trainer.accelerator
        rows: list[ReplayRow] = []
        self._fingerprints: set[str] = set()  # models that computed log μ of the logged rows
        if logged is not None:
            config = trainer.model.config.get_text_config()
            with accelerator.main_process_first():
                rows, self._fingerprints = logged_rows(logged, trainer._tokenizer, config, args)
        process, processes = accelerator.process_index, accelerator.num_processes
        size = args.replay_size or max(REPLAYED_BATCHES * args.generation_batch_size, len(rows))
        self.buffer = ReplayBuffer(-(-size // processes), args.replay_rule)
        trainer._row_readers["train"].append("replay")
        own = np.random.default_rng(args.seed).permutation(len(rows))[process::processes]
        self.buffer.add([rows[place] for place in own])
        fresh = args.per_device_train_batch_size
        larger = fresh + args.rows_again(fresh)
        share = args.rows_again(fresh) / larger  # `replay_share`, rounded to whole rows
        logged_too = f" or {len(rows):,} logged rows" if rows else ""
        self.description = f"up to {share:.0%} of a step's rows come from earlier batches{logged_too}"
        kept = f"Each process keeps at most {self.buffer.size} rows for replay in host memory."
        say(f"a micro-batch grows from {fresh} rows to {larger}. {kept}", args)

    def start(self, model: str) -> None:
        """Prepare a new run, whose starting model has the fingerprint `model`.

        Raises:
            ValueError: log μ of the logged rows is from a different model.
        """
        check_fingerprints(self._fingerprints, model)
        self._settle()
        self.buffer.count_from_here()

    def add_rows(self, batch: dict[str, Any], chosen: int) -> dict[str, Any]:
        """Add replayed rows at the end of this process's generation batch. All processes add the same number of rows.

        Args:
            batch: TRL's generation batch of this process. Its rows are called fresh.
            chosen: number of fresh rows chosen for training, over all processes.

        Returns:
            The batch with the replayed rows, and with the factor `topr_scale` for the loss. Without rows to replay, the
            batch is unchanged.
        """
        check_columns(batch)
        trainer, args, buffer = self._trainer, self._trainer.args, self.buffer
        step, processes = trainer.state.global_step, trainer.accelerator.num_processes
        fresh, steps = len(batch["completion_ids"]), args.steps_per_generation
        self._settle()
        if step == 0:
            self._compute_log_mu()
        kept = gather_object([len(buffer)])  # one number per process
        count = steps * min(args.rows_again(fresh // steps), min(kept) // steps)
        rows = buffer.draw(count, [args.seed, trainer._rows_made, trainer.accelerator.process_index])
        buffer.begin(batch, step)
        metrics = trainer._metrics["train"]
        metrics["topr/replay/kept"].append(sum(kept))
        trained = chosen + count * processes
        metrics["topr/replay/share"].append(count * processes / trained if trained else 0.0)
        if not rows:
            return batch
        metrics["topr/replay/age"].append(sum(gather_object([step - row.step for row in rows])) / count / processes)
        # With `topr_scale`, the loss is the mean over the chosen and the replayed rows.
        scale = (fresh + count) * processes / trained
        batch = with_rows(batch, rows, trainer._tokenizer.pad_token_id, args.pad_to_multiple_of)
        return {**batch, "topr_scale": torch.tensor(scale, device=trainer.accelerator.device)}

    def _settle(self) -> None:
        """Add the rows of the last batch to the buffer, with the latest weights from the row log."""
        self.buffer.settle({number: weight for number, weight, _ in self._trainer._row_log.read("replay")})

    @torch.no_grad()
    def _compute_log_mu(self) -> None:
        """Compute log μ of logged rows with the starting weights, if log μ is needed and unknown."""
        trainer, args = self._trainer, self._trainer.args
        size, pad = args.per_device_train_batch_size, trainer._tokenizer.pad_token_id
        unknown = self.buffer.without_log_mu(args.limits)
        one = torch.tensor([pad])
        blank = ReplayRow(one, one, one == pad, torch.zeros(1), reward=0.0, number=0, step=0)
        # With sharded weights, all processes must run the same number of forward passes. A process without rows uses
        # `blank`, a row of padding.
        starts = range(0, max(gather_object([len(unknown)])), size)
        computed: dict[int, Tensor] = {}
        was_training = trainer.model.training
        trainer.model.eval()
        is_shown = bool(starts) and trainer.is_world_process_zero() and not args.disable_tqdm
        for start in tqdm(starts, "Computing log μ", disable=not is_shown, leave=False):
            rows = unknown[start : start + size]
            batch = batch_of(rows or [blank], pad, trainer.accelerator.device, args.pad_to_multiple_of)
            ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
            mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
            length = batch["completion_ids"].size(1)
            logps_BT = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, length, batch_size=size)[0]
            computed |= {row.number: logps_T for row, logps_T in zip(rows, logps_BT.float().cpu(), strict=False)}
        trainer.model.train(was_training)
        self.buffer.set_log_mu(computed)

    def save(self, checkpoint: str) -> None:
        """Save the buffer of this process in a checkpoint."""
        self._settle()
        trainer, accelerator = self._trainer, self._trainer.accelerator
        path = Path(checkpoint) / f"replay_{accelerator.process_index}.pt"
        path.parent.mkdir(parents=True, exist_ok=True)  # The main process may not have created the folder yet.
        torch.save({**self.buffer.state(), "rows_made": trainer._rows_made}, path)
        if trainer.is_world_process_zero():  # Remove old files of an earlier run with more processes.
            for number, old in _replay_files(checkpoint).items():
                if number >= accelerator.num_processes:
                    old.unlink()

    def load(self, checkpoint: str) -> None:
        """Load the buffer of this process from a checkpoint.

        If the number of processes has changed, divide all saved rows among the processes. If no buffer was saved, keep
        the logged rows, except those whose log μ is needed and unknown.
        """
        trainer = self._trainer
        process, processes = trainer.accelerator.process_index, trainer.accelerator.num_processes
        files = _replay_files(checkpoint)
        saved = max(gather_object([max(files, default=-1) + 1]))  # number of processes that saved buffers
        wanted = [process] if saved == processes else range(saved)
        trainer._row_log.discard("replay")
        states = [_read_rows(files[number]) for number in wanted if number in files]
        if len(states) < max(len(wanted), 1):
            what = "only a part of the rows" if states else "no rows"
            warn_user(f"{checkpoint} has {what} for replay (replay_*.pt). New rows fill the replay buffer.")
        if states:
            rows = sorted((row for state in states for row in state["rows"]), key=lambda row: row["number"])
            self.buffer.load({"rows": rows if saved == processes else rows[process::processes]})
        else:  # Missing log μ cannot be computed, because the starting weights are gone.
            self.buffer.remove(self.buffer.without_log_mu(trainer.args.limits))
        trainer._rows_made = max(gather_object([state["rows_made"] for state in states] or [trainer._rows_made]))


def _replay_files(checkpoint: str) -> dict[int, Path]:
    """Return the files of saved buffers in a checkpoint, by the number of the process that wrote them."""
    return {int(path.stem.removeprefix("replay_")): path for path in Path(checkpoint).glob("replay_*.pt")}


def _read_rows(path: Path) -> dict[str, Any]:
    """Return the buffer's state and `rows_made` from a file.

    Raises:
        ValueError: the file is damaged.
    """
    try:
        state: dict[str, Any] = torch.load(path, weights_only=True)
    except Exception as error:  # Hide torch's message, which advises the unsafe weights_only=False.
        raise ValueError(f"{path} is damaged ({type(error).__name__}). Restore or remove it.") from error
    return state
