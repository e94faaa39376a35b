"""Import rows of each format, train on them, push them to the Hub at `HF_ENDPOINT`, and load them; see test_push.py."""

import json
import shutil
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from topr_trl import OfflineTOPRConfig, OfflineTOPRTrainer, load_rows
from topr_trl.cli import main as cli
from topr_trl.importing import FORMATS
from topr_trl.tasks import arithmetic

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
from conftest import CHAT_TEMPLATE
from records import EXAMPLES

from tests.importing.test_formats import GRADED, NEMO, OPENHANDS, SWE_AGENT, WRITTEN

LOG = [json.loads(line) for line in (WRITTEN / "vllm-0.30.0.jsonl").read_text().splitlines()]
RECORDS = {
    "graded": [GRADED],
    "messages": [
        {"messages": OPENHANDS["trajectory"], "tools": OPENHANDS["tools"], "score": score} for score in (1.0, -1.0)
    ],
    "nemo-rl": [NEMO, {**NEMO, "rewards": [-1.0]}],
    "openai": [{**record, "stars": [1, -1]} for record in LOG],
    "openhands": [OPENHANDS, {**OPENHANDS, "resolved": 0}],
    "swe-agent": [SWE_AGENT, {**SWE_AGENT, "target": True}],
    "trl": [{"step": 1, "prompt": "1 + 1 =", "completion": " 2", "right": r, "advantage": r} for r in (1.0, -1.0)],
    "verl": [{"input": "1 + 1 =", "output": " 2.", "gts": "2", "score": score, "step": 1} for score in (1.0, -1.0)],
}
RECORDS.update({name: [record] for name, record in EXAMPLES.items() if name not in RECORDS})
FOLDERS = {"verifiers": WRITTEN / "verifiers-0.4.0", "verifiers-results": WRITTEN / "verifiers-0.3.1"}
REWARDS = {
    "messages": ["score"], "openai": ["stars"], "langfuse": ["reward"], "openai-completions": ["reward"],
    "openai-responses": ["reward"], "sharegpt": ["reward"],
}  # fmt: skip


def source_of(name: str, folder: Path) -> Path:
    if name in FOLDERS:
        return FOLDERS[name]
    path = folder / f"{name}{FORMATS[name].suffix if FORMATS[name].suffix == '.parquet' else '.jsonl'}"
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(RECORDS[name]), path)
    else:
        path.write_text("".join(json.dumps(record) + "\n" for record in RECORDS[name]))
    return path


def train(name: str, rows, folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(arithmetic.CARELESS_MODEL)
    tokenizer.chat_template = CHAT_TEMPLATE.replace("{{ m['content'] }}", "{{ m.reasoning_content }}{{ m['content'] }}")
    model = AutoModelForCausalLM.from_pretrained(arithmetic.CARELESS_MODEL, dtype=torch.float32)
    before = model.lm_head.weight.clone()
    args = OfflineTOPRConfig(
        str(folder), max_steps=2, learning_rate=1e-3, use_cpu=True, bf16=False, report_to="none", save_strategy="no",
        disable_tqdm=True, baseline=0.25,
    )  # fmt: skip
    trainer = OfflineTOPRTrainer(model, args, rows, processing_class=tokenizer)
    trainer.train()
    assert trainer.state.global_step == 2, name
    assert not torch.equal(before, trainer.model.lm_head.weight.detach()), name


if __name__ == "__main__":
    out = Path(sys.argv[1])
    for name in FORMATS:
        folder = out / name
        rewards = ["--reward_fields", *REWARDS[name]] if name in REWARDS else []
        given = ["--format", name, "--input", str(source_of(name, out)), *rewards]
        cli.main(["import", *given, "--output_dir", str(folder)])
        rows = load_rows(folder)
        train(name, rows, out / f"{name}-model")
        cli.main(["push", "--input", str(folder), "--repo_id", f"me/{name}", "--yes"])
        shutil.rmtree(folder)
        assert load_dataset(f"me/{name}", split="train").to_list() == rows.to_list(), name
        print("came back:", name)
