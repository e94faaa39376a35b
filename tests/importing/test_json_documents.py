"""Test layouts of JSON: lines, arrays, documents of several lines, and truncated files."""

import gzip
import json

import pytest
from test_feedback_tables import imported

from topr_trl.data import json_documents

RUN = [{"role": "user", "content": "3 + 4?"}, {"role": "assistant", "content": "7 \N{GRINNING FACE}"}]


def record(n, **more):
    return {
        "traj": [RUN[0], {**RUN[1], "content": f"{n} \N{GRINNING FACE}"}],
        "reward": n,
        "info": {"tags": ["a", "b"]},
        **more,
    }


def read(tmp_path, text, name="a.json", *more):
    return imported(tmp_path, text, name, "--reward_fields", "reward", *more)


LAYOUTS = {
    "array": lambda records: json.dumps(records),
    "pretty array": lambda records: json.dumps(records, indent=2),
    "lines": lambda records: "\n".join(map(json.dumps, records)),
    "documents": lambda records: "\n".join(json.dumps(each, indent=2) for each in records),
    "array of lines": lambda records: "[\n" + ",\n".join(map(json.dumps, records)) + "\n]",
    "several arrays": lambda records: json.dumps(records[:3]) + "\n" + json.dumps(records[3:], indent=2),
    "with a BOM": lambda records: "\ufeff" + json.dumps(records, ensure_ascii=False),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.traj", "a.jsonl.gz"])
def test_layouts_have_the_same_records(tmp_path, layout, name, monkeypatch):
    monkeypatch.setattr(json_documents, "_CHUNK", 100)  # Chunks split records and characters.
    text = LAYOUTS[layout]([record(n) for n in range(7)]).encode()
    rows = read(tmp_path, gzip.compress(text) if name.endswith("gz") else text, name)
    assert rows["reward"][:] == [float(n) for n in range(7)]
    assert [row["completion"][0]["content"] for row in rows] == [f"{n} \N{GRINNING FACE}" for n in range(7)]


@pytest.mark.parametrize("layout", ["array", "lines", "documents", "several arrays"])
def test_text_that_was_cut_inside_a_character_is_left_out(tmp_path, layout, capsys):
    rows = read(tmp_path, LAYOUTS[layout]([record(n, user="\ud83d" if n == 1 else "me") for n in range(4)]))
    assert rows["reward"][:] == [0.0, 2.0, 3.0]
    assert "contains an unpaired surrogate, and is left out: a.json, " in capsys.readouterr().out


def test_a_field_inside_of_a_field(tmp_path):
    nested = {"run": {"traj": RUN}, "other": RUN, "reward": 1}
    (row,) = read(tmp_path, json.dumps(nested, indent=2), "a.json", "--messages_field", "run.traj")
    assert len(row["completion"]) == 1
    with pytest.raises(ValueError, match=r"run\.traj, other may all hold its messages.*--messages_field"):
        read(tmp_path, json.dumps(nested, indent=2), "b.json")
    with pytest.raises(ValueError, match="it has no field history"):
        read(tmp_path, json.dumps(nested, indent=2), "b.json", "--messages_field", "history")


def test_the_field_of_the_messages_is_found_in_each_record(tmp_path):
    other = [{"role": "user", "content": "5 + 4?"}, {"role": "assistant", "content": "9"}]
    records = [{"history": RUN, "reward": 1}, {"messages": RUN, "history": other, "reward": 1}]
    with pytest.raises(ValueError, match="history"):
        read(tmp_path, json.dumps(records), "a.json")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (json.dumps([record(n) for n in range(3)])[:-20], r"a\.json: after 2 complete records, it is not valid JSON"),
        (json.dumps(record(0), indent=1)[:-20], "after 0 complete records"),
        ('[{"a": 1}, {"b": nothing}]', "after 1 complete records"),
        ('[{"a": 1}]\nno JSON', "after 1 complete records"),
        ("[" * 100_000, "nested too deeply"),
        ('[{"a": ' + "1" * 5_000 + "}]", r"after 0 complete records: .*4300 digits"),
        ("[1, 2]", "its first record is a number"),
        (b'[{"a": "\xff\xff\xff\xff"}]', "UTF-8"),
        ("", "has no record"),
        ("hello\nworld", "none of its first lines is JSON"),
    ],
)
def test_unreadable_input(tmp_path, text, words):
    with pytest.raises(ValueError, match=words):
        read(tmp_path, text)


LONG = json.dumps(record(1) | {"note": "x" * 5_000})
SEVERAL_LINES = json.dumps(json.loads(LONG), indent=1)


@pytest.mark.parametrize(("name", "text", "place"), [
    ("a.jsonl.gz", f"{json.dumps(record(1))}\n{LONG}\n", "line 2"), ("a.jsonl", f"{LONG}\n", "line 1"),
    ("a.json.gz", f"[{json.dumps(record(1))}, {LONG}]", "record 2"), ("a.json", SEVERAL_LINES, "record 1"),
])  # fmt: skip
def test_a_record_that_is_too_long(tmp_path, monkeypatch, name, text, place):
    monkeypatch.setattr(json_documents, "LONGEST", 4_000)
    monkeypatch.setattr(json_documents, "_CHUNK", 2_000)
    data = gzip.compress(text.encode()) if name.endswith(".gz") else text.encode()
    with pytest.raises(ValueError, match=rf"{name}: {place} is longer than .*a line of its own") as error:
        read(tmp_path, data, name)
    assert ("inspect_ai" in str(error.value)) == (name == "a.json")
    monkeypatch.setattr(json_documents, "LONGEST", 10_000)
    assert read(tmp_path, data, name).num_rows > 0


def test_spaces_between_records_can_be_longer_than_a_record(tmp_path, monkeypatch):
    monkeypatch.setattr(json_documents, "LONGEST", 4_000)
    monkeypatch.setattr(json_documents, "_CHUNK", 2_000)
    text = json.dumps(record(1), indent=1) + "\n" * 9_000 + json.dumps(record(2), indent=1) + " " * 9_000
    assert read(tmp_path, text).num_rows == 2
