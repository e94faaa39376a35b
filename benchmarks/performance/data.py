"""Time curation, import and the start of training, on as many rows as in an iteration on GSM8K."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pyarrow as pa

from benchmarks.performance.work import GSM8K, WORDS
from topr_trl.data.tables import from_table, save_rows

PROBLEMS, SAMPLES = 7_473, 64
PROMPT = 1_000  # tokens: eight examples and the question
PROBLEMS_PER_SHARD = 64


def write_candidates(folder: Path, problems: int) -> int:
    """Write scored completions with the columns and sizes of a real loop. Return the number of rows."""
    rng = np.random.default_rng(0)
    shards = -(-problems // PROBLEMS_PER_SHARD)
    for shard in range(shards):
        ids = np.arange(shard * PROBLEMS_PER_SHARD, min((shard + 1) * PROBLEMS_PER_SHARD, problems))
        count = len(ids) * SAMPLES
        lengths = np.exp(rng.normal(*GSM8K.response, count)).astype(np.int32) + 1
        offsets = pa.array(np.concatenate([[0], lengths.cumsum()]).astype(np.int32))
        tokens = rng.integers(2, WORDS, lengths.sum(), dtype=np.int32)
        prompts = np.repeat(rng.integers(2, WORDS, (len(ids), PROMPT), dtype=np.int32), SAMPLES, axis=0)
        texts = ["".join(map(chr, rng.integers(97, 123, 4 * PROMPT))) for _ in ids]
        right = rng.random(count) < 0.4
        rows = {
            "problem_id": np.repeat(ids, SAMPLES), "sample_id": np.tile(np.arange(SAMPLES), len(ids)),
            "prompt": [text for text in texts for _ in range(SAMPLES)],
            "prompt_ids": pa.FixedSizeListArray.from_arrays(prompts.ravel(), PROMPT).cast(pa.list_(pa.int32())),
            "completion": ["x" * (4 * n) for n in lengths],
            "completion_ids": pa.ListArray.from_arrays(offsets, tokens),
            "sampler_logps": pa.ListArray.from_arrays(offsets, rng.normal(-0.5, 0.2, len(tokens)).clip(max=0)),
            "finish_reason": ["stop"] * count, "answer": ["12"] * count,
            "extracted": np.where(right, "12", "13"), "verdict": np.where(right, "correct", "incorrect"),
            "reward": np.where(right, 1.0, -1.0),
        }  # fmt: skip
        save_rows(from_table(pa.table(rows)), folder, shard, shards)
    return problems * SAMPLES


RESPONSE = 1_000  # tokens of a logged response


def write_log(path: Path, records: int) -> None:
    """Write chat completions of `RESPONSE` tokens in the format of vLLM's server, with token ids."""
    rng = np.random.default_rng(0)
    letters = rng.integers(97, 123, 4 * RESPONSE).astype(np.uint8).tobytes().decode()
    ids = rng.integers(2, WORDS, RESPONSE).tolist()
    choice = {"index": 0, "message": {"role": "assistant", "content": letters}, "finish_reason": "stop",
              "token_ids": ids}  # fmt: skip
    with path.open("w") as file:
        for n in range(records):
            request = {"messages": [{"role": "user", "content": f"Question {n // 16}?"}], "temperature": 1.0}
            response = {"id": str(n), "choices": [choice], "prompt_token_ids": ids[:20]}
            file.write(json.dumps({"request": request, "response": response, "stars": n % 2}) + "\n")


_IMPORT = """
    import topr_trl.cli.commands  # as `main` does when called
    from topr_trl.cli.main import main
    start = time.perf_counter()
    main(["import", "--format", "openai", "--input", {log!r}, "--output_dir", {out!r}, "--reward_fields", "stars"])
"""

_PARSE = """
    import json
    from transformers import AutoTokenizer
    from topr_trl.tasks.arithmetic import CARELESS_MODEL
    tokenizer = AutoTokenizer.from_pretrained(CARELESS_MODEL)
    start = time.perf_counter()
    with open({log!r}) as file:
        for line in file:
            record = json.loads(line)
            tokenizer(record["response"]["choices"][0]["message"]["content"])
"""

_CURATE = """
    import topr_trl.cli.commands  # as `main` does when called
    from topr_trl.cli.main import main
    start = time.perf_counter()
    main(["curate", "--input", {rows!r}, "--output_dir", {out!r}, "--curation", "anna_karenina"])
"""

_START = """
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, TrainerCallback
    from topr_trl import OfflineTOPRConfig, OfflineTOPRTrainer
    from topr_trl import load_rows
    from topr_trl.tasks.arithmetic import CARELESS_MODEL
    model = LlamaForCausalLM(LlamaConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=1,
                                         num_attention_heads=1, num_key_value_heads=1, vocab_size=1_024))
    start = time.perf_counter()
    rows = load_rows({rows!r}, {cache!r})
    args = OfflineTOPRConfig({out!r}, max_steps=1, per_device_train_batch_size=1, use_cpu=True, report_to="none",
                             preset="positives_only", save_strategy="no")  # which needs no log μ
    OfflineTOPRTrainer(model, args, rows, processing_class=AutoTokenizer.from_pretrained(CARELESS_MODEL)).train()
"""


def _apart(code: str) -> tuple[float, int]:
    """Run code in a new process. Return the seconds after `start`, and the peak of private memory in bytes."""
    program = f"""
import resource, sys, threading, time, warnings
warnings.simplefilter("ignore")
most = 0
def watch():  # the high-water mark would include memory-mapped files
    global most
    while True:
        with open("/proc/self/status") as file:
            most = max(most, *(int(line.split()[1]) for line in file if line.startswith("RssAnon")))
        time.sleep(0.02)
threading.Thread(target=watch, daemon=True).start()
{textwrap.dedent(code)}
print("\\nMEASURED", time.perf_counter() - start, most * 1024)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-4_000:])
    _, seconds, memory = done.stdout.strip().splitlines()[-1].split()
    return float(seconds), int(memory)


def import_log(log: Path, out: Path) -> tuple[float, int]:
    """Return seconds and bytes of `topr import`, without Python imports."""
    return _apart(_IMPORT.format(log=str(log), out=str(out)))


def parse_log(log: Path) -> tuple[float, int]:
    """Return seconds and bytes of parsing JSON and tokenizing the completions, the reference for an import."""
    return _apart(_PARSE.format(log=str(log)))


def curate(rows: Path, out: Path) -> tuple[float, int]:
    """Return seconds and bytes of `topr curate`, without Python imports."""
    return _apart(_CURATE.format(rows=str(rows), out=str(out)))


def start(rows: Path, cache: Path, out: Path) -> tuple[float, int]:
    """Return seconds and bytes from reading rows to the end of the first step, without computing log μ."""
    return _apart(_START.format(rows=str(rows), cache=str(cache), out=str(out)))


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.parquet"))


if __name__ == "__main__":
    json.dump({"rows": write_candidates(Path(sys.argv[1]), int(sys.argv[2]))}, sys.stdout)
