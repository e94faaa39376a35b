"""Import files that other systems wrote, and show messages of rows."""

import json
from itertools import groupby
from pathlib import Path

from topr_trl import load_rows
from topr_trl.cli import main
from topr_trl.data.tokenization import tokenize_row

WRITTEN = Path(__file__).parent / "importing" / "written"  # files of other systems, and the scripts that wrote them
LEGS = {"name": "legs", "arguments": '{"animal": "cat"}'}
QUESTION = "How many legs have 3 cats?"
ASKED = [("system", "Calculate.", None, []), ("user", QUESTION, None, [])]  # as `turns` returns it


def imported(tmp_path, source, *settings):
    """Return the rows of a file or a folder, of a record, or of a list of records."""
    if not isinstance(source, Path):
        records, source = source if isinstance(source, list) else [source], tmp_path / "a.json"
        source.write_text("\n".join(map(json.dumps, records)))
    out = tmp_path / f"rows-{len(list(tmp_path.iterdir()))}"
    main.main(["import", "--input", str(source), "--output_dir", str(out), *settings])
    return load_rows(out)


def turns(messages):
    """Return the role, the content, the thinking and the called functions of each message."""
    names = ("role", "content", "reasoning_content")
    return [
        (*(turn[name] for name in names), [call["function"] for call in turn["tool_calls"] or ()]) for turn in messages
    ]


def learned(row, tokenizer):
    """Return the texts of a completion that a trainer learns."""
    made = tokenize_row(row, tokenizer)
    own = made.completion_mask or [True] * len(made.completion_ids)
    runs = groupby(zip(made.completion_ids, own, strict=True), key=lambda pair: pair[1])
    return [tokenizer.decode([token for token, _ in run]) for is_own, run in runs if is_own]
