"""Property tests of the entry points for logs (records, masks, rollouts, messages) and for replayed rows.

As in `test_doors.py`, every run tries each property on the same few examples, and `make fuzz` tries new ones.
"""

import copy
import json
import tempfile
import warnings
from pathlib import Path

import numpy as np
import pyarrow as pa
from any_input import JSON, bundled_tokenizer, few, fewer, refused_by_name, tables
from hypothesis import assume, example, given
from hypothesis import strategies as st
from records import CALL, EXAMPLES

from topr_trl.data.masks import explicit_masks
from topr_trl.data.rows import rollout_column
from topr_trl.data.sampler_logps import LOGPROBS_MODES, why_incomparable
from topr_trl.data.tables import from_table, load_rows, save_rows
from topr_trl.data.tokenization import tokenize_row
from topr_trl.data.trajectories import Rollouts
from topr_trl.importing import FORMATS
from topr_trl.importing.reading_settings import ReadingArguments
from topr_trl.importing.recognition import format_of
from topr_trl.importing.record_files import count_records, read_records
from topr_trl.importing.record_to_rows import RecordReader
from topr_trl.importing.row_table import to_table
from topr_trl.pipeline import split
from topr_trl.pipeline.settings import TrialArguments
from topr_trl.report.page import write_page
from topr_trl.trainers.replay.logged_rows import read_logged

# Records of other systems: one of each format, with parts replaced or removed.


def parts_of(value):
    """Yield the container and the key of each part of a JSON value."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inside:
        yield value, key
        yield from parts_of(part)


SAMPLES_OF_INSPECT = (Path(__file__).parents[1] / "importing" / "written" / "inspect-0.3.285.eval").read_bytes()
FIELDS = sorted({name for record in EXAMPLES.values() for name in record})


@st.composite
def damaged(draw, record):
    record = copy.deepcopy(record)
    for _ in range(draw(st.integers(0, 3))):
        if places := list(parts_of(record)):
            holder, key = draw(st.sampled_from(places))
            if isinstance(holder, dict) and draw(st.booleans()):
                del holder[key]
            else:
                holder[key] = draw(JSON)
    return record


@st.composite
def logs(draw):
    name = draw(st.sampled_from(sorted(EXAMPLES)))
    return name, draw(st.lists(damaged(EXAMPLES[name]), min_size=1, max_size=3))


@few
@example(("oaieval", [{**EXAMPLES["oaieval"], "run_id": []}]), False, "all_turns", True)
@given(logs(), st.booleans(), st.sampled_from(["all_turns", "last_turn"]), st.booleans())
def test_records_of_other_systems(log, skips, turns, lines):
    name, records = log
    fields = ["reward"] if FORMATS[name].rewards is None and "reward" in EXAMPLES[name] else None
    skip = {"skip_unrewarded": skips, "skip_unusable": skips}
    args = ReadingArguments(format=name, reward_fields=fields, completion=turns, **skip)
    reader = RecordReader(args, Path(__file__))
    with refused_by_name("log, line "):
        places = (
            (f"log, line {n}", json.dumps(record).encode() if lines else record) for n, record in enumerate(records)
        )
        part = reader.read(reader.format.join(places))
        assume(part.rows)
        table = to_table(part.rows, reader.columns, isinstance(part.rows[0]["prompt"], list))
        assert np.isfinite(np.asarray(table["reward"], dtype=float)).all()
        for row in from_table(table):
            check_tokens_of(row)


@few
@given(logs() | st.tuples(st.none(), st.lists(st.dictionaries(st.sampled_from(FIELDS), JSON), min_size=1, max_size=3)))
def test_formats_are_recognized_or_not(log):
    name, records = log
    for record in records:
        found = format_of(record)
        assert found is None or found in FORMATS
        if name is not None and record == EXAMPLES[name]:
            assert found == name


@st.composite
def files(draw):
    """Draw the content of a file, which is records in some layout or any bytes, perhaps damaged, and its suffix."""
    _, records = draw(logs())
    dumped = [json.dumps(record, indent=draw(st.sampled_from([None, 1]))) for record in records]
    written = draw(st.sampled_from(["\n".join(dumped), f"[{','.join(dumped)}]", f"a,b\n{','.join(dumped)}"])).encode()
    content = draw(st.just(written) | st.binary(max_size=60) | st.just(SAMPLES_OF_INSPECT))
    if draw(st.booleans()):
        place = draw(st.integers(0, len(content)))
        content = content[:place] + draw(st.binary(max_size=4)) + content[place + draw(st.integers(0, 3)) :]
    return content[: draw(st.integers(0, len(content)))] if draw(st.booleans()) else content, draw(
        st.sampled_from([".jsonl", ".json", ".csv", ".tsv", ".eval", ".jsonl.gz", ".parquet", ".traj"])
    )


@few
@given(files())
def test_files_of_other_systems(given_file):
    content, suffix = given_file
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"log{suffix}"
        path.write_bytes(content)
        with refused_by_name(str(path)):
            reader = RecordReader(ReadingArguments(), path)
            list(count_records([path]))
            reader.read(read_records(path))


def check_tokens_of(row):
    with refused_by_name("prompt", "completion", "template", "learn from", "message", "arguments", "tool"):
        prompt, completion, written = tokenize_row(row, with_tools())
        assert prompt
        assert completion
        assert written is None or (len(written) == len(completion) and any(written))


def with_tools():
    tokenizer = bundled_tokenizer()
    tokenizer.chat_template = (
        "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}"
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}"
        "{% for c in m['tool_calls'] or [] %}{{ c | tojson }}{% endfor %}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    return tokenizer


# Messages, masks and rollouts of rows.

CONTENT = st.text() | st.none() | st.lists(st.just({"type": "text", "text": "a"}) | JSON, max_size=2)
CALLS = st.none() | st.lists(damaged(CALL), max_size=2)
TURNS = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool", "function"]), "content": CONTENT},
        optional={
            "tool_calls": CALLS,
            "tool_call_id": st.text(max_size=3),
            "reasoning_content": st.none() | st.text(),
            "weight": st.sampled_from([0, 1, None]) | JSON,
        },
    ),
    min_size=1,
    max_size=5,
)


@few
@given(TURNS, TURNS, st.none() | st.just('[{"type": "function", "function": {"name": "run"}}]') | st.text(),
       st.none() | st.just({"enable_thinking": False}) | JSON)  # fmt: skip
def test_runs_of_agents_to_tokens(prompt, completion, tools, options):
    row = {"prompt": prompt, "completion": completion, "tools": tools, "chat_template_kwargs": options}
    check_tokens_of({name: value for name, value in row.items() if value is not None})


IDS = (pa.list_(pa.int64()), st.lists(st.integers(0, 50), max_size=4))
MASK = (pa.list_(pa.int64()), st.lists(st.integers(0, 1), max_size=4))
LOGPS = (pa.list_(pa.float64()), st.lists(st.none() | st.floats(-9, 0), max_size=4))


@few
@given(tables(completion_ids=IDS, completion_mask=MASK, sampler_logps=LOGPS, mu_logps=LOGPS))
def test_masks_of_rows(rows):
    with refused_by_name("mask", "sampler_logps", "mu_logps", "completion_ids"):
        found = explicit_masks(rows)
        if "completion_mask" in found.column_names:
            for ids, mask in zip(found["completion_ids"][:], found["completion_mask"][:], strict=True):
                assert mask is None or (len(mask) == len(ids or ()) and any(mask))


@few
@given(tables(rollout_id=(pa.int64(), st.integers(0, 3))))
def test_rollouts_of_rows(rows):
    with refused_by_name("rollout_id"):
        found = Rollouts.of(rollout_column(rows))
        assert sorted(found.order_N) == list(range(len(rows)))
        assert found.counts_R.sum() == len(rows)
        assert (found.counts_R > 0).all()
        assert sorted(found.rows_of(np.arange(len(found.counts_R)))) == list(range(len(rows)))
        if len(rows):
            numbers = np.arange(len(rows))
            assert (found.of_each_row(numbers[found.firsts_R]) <= numbers).all()


# Replayed rows.


@few
@given(tables(prompt=(pa.string(), st.text()), completion=(pa.string(), st.text()), reward=(pa.float64(), st.floats()),
              rollout_id=(pa.int64(), st.integers(0, 9)), temperature=(pa.float64(), st.sampled_from([1.0, 0.7])),
              finish_reason=(pa.string(), st.sampled_from(["stop", "length", "?"]))))  # fmt: skip
def test_logged_rows_to_be_used_again(rows):
    with refused_by_name("reward", "label", "no row", "finish_reason", "temperature", "rollout_id", "replay"):
        read_logged(rows, 1.0)


@few
@given(tables(top_p=(pa.float64(), st.floats(0, 1)), top_k=(pa.int64(), st.integers(-1, 99)),
              logprobs_mode=(pa.string(), st.sampled_from(LOGPROBS_MODES))), st.sampled_from([1.0, 0.7]))  # fmt: skip
def test_how_rows_were_sampled(rows, temperature):
    with refused_by_name("top_p", "top_k", "logprobs_mode"):
        why = why_incomparable(rows, temperature, 50)
        assert why is None or "sampler_logps" in why


# Trials and reports.

ROW = st.fixed_dictionaries({
    "prompt": st.sampled_from([f"{n}?" for n in range(9)]), "completion": st.text(max_size=5),
    "reward": st.sampled_from([1.0, -1.0, 0.0]) | st.floats(),
})  # fmt: skip


@fewer
@given(st.lists(ROW, min_size=1, max_size=30), st.integers(2, 5), st.integers(0, 3))
def test_rows_of_a_trial(rows, problems, seed):
    with tempfile.TemporaryDirectory() as folder:
        source, out = f"{folder}/logged", f"{folder}/trial"
        save_rows(from_table(pa.Table.from_pylist(rows)), source)
        trial = TrialArguments(input=source, output_dir=out, held_out_problems=problems, test_by="rewards", seed=seed,
                               use_cpu=True, bf16=False)  # fmt: skip
        with refused_by_name("reward", "at least 6", "held-out", "nothing to choose"):
            stage = split.Split(trial)
            found = stage.run()
            training, tested = (load_rows(stage.folder / part) for part in (split.TRAINING_ROWS, split.HELD_OUT))
            assert len(training) == found["rows"] > 0
            assert not set(training["prompt"][:]) & set(tested["prompt"][:])
            assert len(set(found["settings"])) >= 2


ENTRY = st.fixed_dictionaries(
    {"step": st.integers(0, 9) | JSON, "loss": st.floats() | JSON},
    optional={"topr/effective_positive_share": st.floats(0, 1), "topr/log_ratio/negatives/q50": st.floats() | JSON},
)


@fewer
@given(st.fixed_dictionaries({"log_history": st.lists(ENTRY | JSON, max_size=3) | JSON}) | JSON, st.none() | JSON)
def test_files_of_a_run(state, evaluation):
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (Path(folder) / "trainer_state.json").write_text(json.dumps(state))
        if evaluation is not None:
            (Path(folder) / "evaluation.json").write_text(json.dumps(evaluation))
        with refused_by_name(folder):
            page = Path(folder) / "report.html"
            write_page(Path(folder), page)
            assert "<html" in page.read_text()
