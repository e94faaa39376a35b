"""Push models and rows to the Hub at `HF_ENDPOINT`, with both trainers and with `topr push`; see test_push.py."""

import sys
from pathlib import Path

import torch
from datasets import Dataset
from huggingface_hub import snapshot_download
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from topr_trl import Evaluations, OfflineTOPRConfig, OfflineTOPRTrainer, TOPRConfig, TOPRTrainer, evaluate_samples, hub
from topr_trl.cli import main as cli
from topr_trl.pipeline import manifest
from topr_trl.tasks import arithmetic

ROWS = Dataset.from_dict({
    "prompt": ["3 + 4 = "] * 6,
    "completion": ["7", "8", "7", "6", "7", "5"],
    "reward": [1.0, -1.0] * 3,
})  # fmt: skip
SETTINGS = {
    "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": "none", "save_steps": 1,
    "learning_rate": 1e-3, "per_device_train_batch_size": 2, "disable_tqdm": True, "save_strategy": "steps",
}  # fmt: skip


def offline(folder: Path, **settings) -> OfflineTOPRTrainer:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(arithmetic.CARELESS_MODEL, dtype=torch.float32)
    args = OfflineTOPRConfig(str(folder), **SETTINGS, **settings)
    return OfflineTOPRTrainer(model, args, ROWS, processing_class=tokenizer())


def tokenizer():
    return AutoTokenizer.from_pretrained(arithmetic.CARELESS_MODEL)


class WaitForPush(TrainerCallback):
    """Callback that waits for each push. These steps are short, and the Trainer skips a push while another one runs."""

    def __init__(self, trainer) -> None:
        self.trainer = trainer

    def on_save(self, *_, **__) -> None:
        self.trainer._finish_current_push()


def push_from_checkpoints(out: Path) -> None:
    for strategy in ("every_save", "checkpoint", "all_checkpoints"):
        trainer = offline(
            out / strategy, max_steps=2, push_to_hub=True, hub_strategy=strategy, hub_model_id=f"me/{strategy}"
        )
        trainer.add_callback(WaitForPush(trainer))
        trainer.train()


def push_at_the_end(out: Path) -> None:
    trainer = offline(out / "offline", max_steps=1)
    trainer.train()
    trainer.evaluations = Evaluations(
        before=evaluate_samples([["7", "8"]], ["7"]), after=evaluate_samples([["7"] * 2], ["7"])
    )
    trainer.push_to_hub(dataset_name="me/sums")

    def reward(completions, **_):
        return [float(i % 2) for i in range(len(completions))]

    args = TOPRConfig(
        str(out / "online"), max_steps=1, num_generations=2, max_completion_length=8, baseline=0.5,
        hub_model_id="me/online", hub_private_repo=True, **SETTINGS,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(arithmetic.CARELESS_MODEL, dtype=torch.float32)
    online = TOPRTrainer(
        model, reward, args=args, train_dataset=ROWS.select_columns(["prompt"]), processing_class=tokenizer()
    )
    online.train()
    online.push_to_hub()


def resume_from_the_hub(out: Path) -> None:
    """Check that a run resumed from a checkpoint on the Hub gives the same weights as an uninterrupted run."""
    offline(out / "whole", max_steps=3).train()
    elsewhere = snapshot_download("me/checkpoint", local_dir=out / "elsewhere")
    offline(Path(elsewhere), max_steps=3).train(resume_from_checkpoint=f"{elsewhere}/last-checkpoint")
    expected, found = (load_file(out / run / "checkpoint-3" / "model.safetensors") for run in ("whole", "elsewhere"))
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def push_folders(out: Path, loop: Path) -> None:
    cli.main(["push", "--input", str(loop / "iteration-1" / "model"), "--repo_id", "me/solver"])
    cli.main(["push", "--input", str(out / "every_save" / "checkpoint-2"), "--repo_id", "from-a-checkpoint"])
    rows = loop / "iteration-1" / "rollouts"
    cli.main(["push", "--input", str(rows), "--repo_id", "me/rows", "--private"])
    loaded = Path(snapshot_download("me/rows", repo_type="dataset", local_dir=out / "loaded"))
    assert manifest.fingerprint(loaded) == manifest.fingerprint(rows)
    cli.main(["curate", "--input", str(loaded), "--output_dir", str(out / "curated"), "--baseline", "mean"])
    assert set(manifest.read(out / "curated").stages) == {"curate"}
    # Push two folders of rows to one repository. The shards of the first push must not remain.
    cli.main(["push", "--input", str(loop / "base" / "test" / "rollouts"), "--repo_id", "me/replaced"])
    commit = hub.push_to_hub(rows, "me/replaced")
    assert commit.repo_url.repo_id == "me/replaced"


if __name__ == "__main__":
    out, loop = map(Path, sys.argv[1:])
    push_from_checkpoints(out)
    push_at_the_end(out)
    resume_from_the_hub(out)
    push_folders(out, loop)
