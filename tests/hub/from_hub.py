"""Run commands whose input is a dataset on the Hub at `HF_ENDPOINT`; see test_download.py."""

import sys
from pathlib import Path

from topr_trl import load_rows
from topr_trl.cli import main as cli
from topr_trl.tasks import arithmetic

out = Path(sys.argv[1])


def read(name, dataset, *more, command="import"):
    cli.main([command, "--input", dataset, "--output_dir", str(out / name), *more])
    rows = load_rows(out / name)
    print(name, rows["completion"][:], rows["reward"][:])


def refused(dataset, command="import", option="--input"):
    try:
        cli.main([command, option, dataset, "--output_dir", str(out / "refused")])
    except (SystemExit, ValueError, OSError) as error:
        print(f"refused {dataset}: {error}")


if __name__ == "__main__":
    read("split", "hub:me/logs:train", "--chat", "false")
    read("other", "hub:me/logs:test", "--chat", "false")
    read("commit", f"hub:me/logs:train@{sys.argv[2]}", "--chat", "false")
    read("french", "hub:me/langs:fr/train", "--chat", "false")
    read("scored", "hub:me/rows", command="score")
    cli.main(["curate", "--input", "hub:me/graded", "--curation", "uniform", "--iteration_size", "2", "--output_dir",
              str(out / "curated")])  # fmt: skip
    print("curated", len(load_rows(out / "curated")))
    training = ["--use_cpu", "true", "--bf16", "false", "--max_steps", "1", "--report_to", "none", "--chat", "false"]
    cli.main(["train", "--input", "hub:me/logs:train", "--output_dir", str(out / "model"), *training,
              "--model_name_or_path", str(arithmetic.CARELESS_MODEL)])  # fmt: skip
    print("trained", load_rows(out / "model" / "imported")["reward"][:])
    for name in ("me/old:train", "me/logs@" + sys.argv[2], "me/logs:dev", "logs", "me/none", "me/logs:train@none",
                 "me/langs", "me/langs:de/test", "me/langs:fr/test"):  # fmt: skip
        refused(f"hub:{name}")
    refused("hub:me/logs:none", "iterate", "--rows")
