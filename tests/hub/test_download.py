"""Test commands whose input is a dataset on the Hub."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hub_server import Repo, serve, start

from topr_trl.hub.download import downloaded


def lines(*answers):
    rows = [{"question": "1 + 1 =", "response": answer, "score": reward} for answer, reward in answers]
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def parquet(tmp_path, **columns):
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    return (tmp_path / "rows.parquet").read_bytes()


CONFIGS = "".join(f"- config_name: {each}\n  data_files: {each}/train.jsonl\n" for each in ("en", "fr"))
LANGUAGES = {"en/train.jsonl": lines((" 3.", 0)), "fr/train.jsonl": lines((" deux.", 1)),
             "README.md": f"---\nconfigs:\n{CONFIGS}---\n".encode()}  # fmt: skip


def test_no_network(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with pytest.raises(ConnectionError, match="me/logs was not read, because the Hub cannot be reached"):
        downloaded("hub:me/logs", "--input")


@pytest.mark.slow
@pytest.mark.processes
def test_the_input_is_a_dataset_on_the_hub(tmp_path):
    first = {"train.jsonl": lines((" 3.", 0)), "test.jsonl": lines((" 9.", 1))}
    rows = {"prompt": ["1 + 1 ="] * 2, "completion": [f" The answer is {n}." for n in (2, 3)], "answer": ["2"] * 2}
    graded = parquet(tmp_path, **rows, reward=[1.0, -1.0])
    with serve() as hub:
        hub.repos["dataset", "me/logs"] = Repo(True, [first, {**first, "train.jsonl": lines((" 2.", 1), (" 3.", 0))}])
        hub.repos["dataset", "me/rows"] = Repo(True, [{"data/train-00000-of-00001.parquet": parquet(tmp_path, **rows)}])
        hub.repos["dataset", "me/old"] = Repo(True, [{"old.py": b""}])
        hub.repos["dataset", "me/langs"] = Repo(True, [LANGUAGES])
        hub.repos["dataset", "me/graded"] = Repo(True, [{f"train-0000{k}-of-00002.parquet": graded for k in (0, 1)}])
        said = start(hub, "from_hub.py", tmp_path, Repo.sha_of(0)).stdout
    for line in (
        f"Read me/logs from the Hub: split train of commit {Repo.sha_of(1)}.",
        f"Read me/logs from the Hub: split train of commit {Repo.sha_of(0)}.",
        "split [' 2.', ' 3.'] [1.0, 0.0]",
        "other [' 9.'] [1.0]",
        "commit [' 3.'] [0.0]",
        "french [' deux.'] [1.0]",
        "scored [' The answer is 2.', ' The answer is 3.'] [1.0, -1.0]",
        "curated 4",
        "trained [1.0, 0.0]",
        f"me/logs has several splits. Name one of train, test, as in hub:me/logs:train@{Repo.sha_of(0)}.",
        "refused hub:me/logs:dev: --input: me/logs has no split dev. Name one of train, test",
        "refused hub:me/logs:none: --rows: me/logs has no split none. Name one of train, test",
        "refused hub:logs: --input: hub:logs must have the form hub:owner/name",
        "refused hub:me/old:train: --input: me/old cannot be read: Dataset scripts are no longer supported",
        "hub:me/old:train@refs/convert/parquet",
        "me/langs cannot be read: Config name is missing. Name one of en, fr and a split, as in hub:me/langs:en/train.",
        "refused hub:me/langs:de/test: --input: me/langs cannot be read: BuilderConfig 'de' not found.",
        "me/langs has no split test. Name one of train, as in hub:me/langs:fr/train.",
        "Repository Not Found for url",
        "Revision Not Found for url",
    ):
        assert line in said
