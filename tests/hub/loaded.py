"""Load pushed models and rows without topr_trl, and compare them with the local files; see test_push.py."""

import sys
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import torch
from datasets import load_dataset
from huggingface_hub import snapshot_download
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer


def check_model(name: str, folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    expected, found = load_file(folder / "model.safetensors"), model.state_dict()
    assert expected.keys() <= found.keys()
    assert all(torch.equal(weight, found[key]) for key, weight in expected.items()), name
    text = "Question: Ana has 4 pens."
    own = AutoTokenizer.from_pretrained(folder)
    assert AutoTokenizer.from_pretrained(name)(text)["input_ids"] == own(text)["input_ids"], name


def check_rows(name: str, folder: Path, split: str = "train") -> None:
    sets = load_dataset(name)
    assert list(sets) == [split], sets
    rows = [row for shard in sorted(folder.glob("*.parquet")) for row in pq.read_table(shard).to_pylist()]
    assert sets[split].to_list() == rows, name
    shards = sorted(Path(snapshot_download(name, repo_type="dataset")).glob("*.parquet"))
    frame = pd.concat(map(pd.read_parquet, shards))
    assert frame["completion"].tolist() == [row["completion"] for row in rows], name
    assert frame["reward_after_baseline"].isna().tolist() == [row["reward_after_baseline"] is None for row in rows], (
        name
    )


if __name__ == "__main__":
    out, loop = map(Path, sys.argv[1:])
    check_model("me/solver", loop / "iteration-1" / "model")
    check_model("me/from-a-checkpoint", out / "every_save" / "checkpoint-2")
    check_model("me/every_save", out / "every_save" / "checkpoint-2")
    check_model("me/offline", out / "offline")
    check_model("me/online", out / "online")
    check_rows("me/rows", loop / "iteration-1" / "rollouts")
    check_rows("me/replaced", loop / "iteration-1" / "rollouts")
    assert "topr_trl" not in sys.modules
