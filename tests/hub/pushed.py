"""Push models and rows to the Hub at `HF_ENDPOINT`, and load them again; see test_push.py."""

import sys
from pathlib import Path

import pyarrow.parquet as pq
import torch
from datasets import Dataset, load_dataset
from huggingface_hub import snapshot_download
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from topr_trl import Evaluations, OfflineTOPRConfig, OfflineTOPRTrainer, TOPRConfig, TOPRTrainer, evaluate_samples, hub
from topr_trl.cli import main as cli
from topr_trl.pipeline import manifest
from topr_trl.tasks import arithmetic

ROWS = Dataset.from_dict({"prompt": ["3 + 4 = "] * 6, "completion": list("787675"), "reward": [1.0, -1.0] * 3})
SETTINGS = {
    "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": "none", "save_steps": 1,
    "learning_rate": 1e-3, "per_device_train_batch_size": 2, "disable_tqdm": True, "save_strategy": "steps",
}  # fmt: skip


class WaitForPush(TrainerCallback):
    """Callback that waits for each push. These steps are short, and the Trainer skips a push while another one runs."""

    def __init__(self, trainer) -> None:
        self.trainer = trainer

    def on_save(self, *_, **__) -> None:
        self.trainer._finish_current_push()


def model_and_tokenizer():
    model = AutoModelForCausalLM.from_pretrained(arithmetic.CARELESS_MODEL, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(arithmetic.CARELESS_MODEL)


def push_from_trainers(out: Path) -> None:
    model, tokenizer = model_and_tokenizer()
    args = OfflineTOPRConfig(str(out / "offline"), max_steps=2, push_to_hub=True, hub_strategy="checkpoint",
                             hub_model_id="me/offline", **SETTINGS)  # fmt: skip
    offline = OfflineTOPRTrainer(model, args, ROWS, processing_class=tokenizer)
    offline.add_callback(WaitForPush(offline))
    offline.train()
    offline.evaluations = Evaluations(
        before=evaluate_samples([["7", "8"]], ["7"]), after=evaluate_samples([["7"] * 2], ["7"])
    )
    offline.push_to_hub(dataset_name="me/sums")
    args = TOPRConfig(str(out / "online"), max_steps=1, num_generations=2, max_completion_length=8, baseline=0.5,
                      hub_model_id="me/online", hub_private_repo=True, **SETTINGS)  # fmt: skip

    def reward(completions, **_):
        return [float(i % 2) for i in range(len(completions))]

    model, tokenizer = model_and_tokenizer()
    online = TOPRTrainer(model, reward, args=args, train_dataset=ROWS.select_columns(["prompt"]),
                         processing_class=tokenizer)  # fmt: skip
    online.train()
    online.push_to_hub()


def push_folders(out: Path, loop: Path) -> None:
    rows = loop / "iteration-1" / "rollouts"
    cli.main(["push", "--input", str(loop / "iteration-1" / "model"), "--repo_id", "me/solver"])
    cli.main(["push", "--input", str(out / "offline" / "checkpoint-2"), "--repo_id", "from-a-checkpoint"])
    # Push two folders of rows to one repository. The shards of the first push must not remain.
    cli.main(["push", "--input", str(loop / "base" / "test" / "rollouts"), "--repo_id", "me/rows", "--private"])
    assert hub.push_to_hub(rows, "me/rows").repo_url.repo_id == "me/rows"
    loaded = Path(snapshot_download("me/rows", repo_type="dataset", local_dir=out / "loaded"))
    assert manifest.fingerprint(loaded) == manifest.fingerprint(rows)
    sets = load_dataset("me/rows")
    assert list(sets) == ["train"]
    tables = [pq.read_table(shard) for shard in sorted(rows.glob("*.parquet"))]
    assert sets["train"].to_list() == [row for table in tables for row in table.to_pylist()]


def check_model(name: str, folder: Path) -> None:
    expected = load_file(folder / "model.safetensors")
    found = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).state_dict()
    assert all(torch.equal(weight, found[key]) for key, weight in expected.items()), name
    tokenize, own = (AutoTokenizer.from_pretrained(each) for each in (name, folder))
    assert tokenize("Ana has 4 pens.")["input_ids"] == own("Ana has 4 pens.")["input_ids"]


if __name__ == "__main__":
    out, loop = map(Path, sys.argv[1:])
    push_from_trainers(out)
    push_folders(out, loop)
    check_model("me/solver", loop / "iteration-1" / "model")
    check_model("me/from-a-checkpoint", out / "offline" / "checkpoint-2")
    check_model("me/offline", out / "offline")
    check_model("me/online", out / "online")
