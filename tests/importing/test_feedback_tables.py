"""Test the import of CSV and other tables with a prompt, a completion and a rating per row."""

import gzip
import json
from decimal import Decimal

import pytest

from topr_trl import load_rows
from topr_trl.cli import main
from topr_trl.importing import csv_tables
from topr_trl.importing.format import NotOfFormat, Unusable
from topr_trl.importing.formats import table
from topr_trl.importing.record_rewards import as_number

VOTES = "question,answer,likes,dislikes\na,b,3,1\na,c,0,2\n"
ROWS = "question,response,thumbs\n3 + 4?,7,up\n3 + 4?,8,down\n"


def imported(tmp_path, content, name="feedback.csv", *more):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    out = tmp_path / f"rows-{len(list(tmp_path.iterdir()))}"
    main.main(["import", "--input", str(tmp_path / name), "--output_dir", str(out), *more])
    return load_rows(out)


def said(row):
    return [(turn["role"], turn["content"]) for turn in row["prompt"] + row["completion"]]


def test_a_csv_of_thumbs_becomes_chat_messages(tmp_path, capsys):
    rows = imported(tmp_path, ROWS)
    assert [said(row) for row in rows] == [[("user", "3 + 4?"), ("assistant", "7")],
                                           [("user", "3 + 4?"), ("assistant", "8")]]  # fmt: skip
    assert rows["reward"][:] == [1.0, -1.0]
    assert len(set(rows["problem_id"])) == 1
    out = capsys.readouterr().out
    assert "Recognized as table" in out
    assert "Rewards: -1 in 1 row, 1 in 1 row." in out
    assert "--chat false" in out


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (ROWS.replace(",", ";"), "a.csv"),
        (ROWS.replace(",", "\t"), "a.tsv"),
        ("question\tresponse\tthumbs\ta, b, c, d\n3 + 4?\t7\tup\t\n3 + 4?\t8\tdown\t\n", "A.TSV"),
        ("sep=;\n" + ROWS.replace(",", ";"), "a.csv"),  # Excel writes this line.
        (f"\n\r\n{ROWS}", "a.csv"),
        (b"\xef\xbb\xbf" + ROWS.replace("\n", "\r\n").encode(), "a.csv"),
        ("".join(json.dumps({"question": "3 + 4?", "response": n, "thumbs": t}) + "\n"
                 for n, t in (("7", "up"), ("8", "down"))), "a.jsonl"),
    ],
)  # fmt: skip
def test_other_tables_have_the_same_rows(tmp_path, content, name):
    rows = imported(tmp_path, content, name)
    assert [row["completion"][0]["content"] for row in rows] == ["7", "8"]
    assert rows["reward"][:] == [1.0, -1.0]


@pytest.mark.parametrize(
    ("content", "names"),
    [
        ('a,"b\n""c""",d\n1,2,3\n', ["a", 'b\n"c"', "d"]),
        ('"a\n";b\n1;2\n', ["a\n", "b"]),
        ('"a, b, c";d\n1;2\n', ["a, b, c", "d"]),
        ('5" long,6" wide\n1,2\n', ['5" long', '6" wide']),
    ],
)
def test_names_of_columns_can_have_quotes(tmp_path, content, names):
    (tmp_path / "a.csv").write_text(content)
    (row,) = csv_tables.read_table(tmp_path / "a.csv")
    assert list(row.items()) == list(zip(names, "123", strict=False))


def test_cells_keep_their_text(tmp_path):
    """Numbers stay as they are written, and cells may have commas, quotes and line breaks."""
    content = 'Prompt,Completion,Score\n"a, ""b""\nc",007,0.5\n5" pipe,null,-1\n'
    rows = imported(tmp_path, content)
    assert [said(row)[0][1] for row in rows] == ['a, "b"\nc', '5" pipe']
    assert [said(row)[1][1] for row in rows] == ["007", "null"]
    assert rows["reward"][:] == [0.5, -1.0]


def test_names_of_columns_and_numbers_of_labels_can_be_given(tmp_path):
    content = "asked,said,question,mood\n3 + 4?,7,no,fine\n3 + 4?,8,no,angry\n3 + 4?,9,no,\n"
    given = "--prompt_field asked --completion_field said --reward_fields mood --label_values fine=2 angry=-0.5"
    rows = imported(tmp_path, content, "a.csv", *given.split(), "--skip_unrewarded")
    assert [said(row) for row in rows] == [[("user", "3 + 4?"), ("assistant", "7")],
                                           [("user", "3 + 4?"), ("assistant", "8")]]  # fmt: skip
    assert rows["reward"][:] == [2.0, -0.5]


def test_an_error_lists_all_columns():
    with pytest.raises(NotOfFormat, match=r"no column for the completion; it has question, thumbs\. Set"):
        table.rows({"question": "3 + 4?", "thumbs": "up"})
    assert not set(table.PROMPTS) & set(table.COMPLETIONS)  # No column can be both.


def test_one_column_cannot_be_prompt_and_completion(tmp_path):
    with pytest.raises(ValueError, match="both name said"):
        imported(tmp_path, "said,reward\na,1\n", "a.csv", "--prompt_field", "said", "--completion_field", "said")


def test_columns_with_each_others_names_can_be_swapped(tmp_path):
    content = "completion,prompt,reward\n3 + 4?,7,1\n3 + 4?,8,-1\n"
    given = "--prompt_field completion --completion_field prompt"
    rows = imported(tmp_path, content, "a.csv", *given.split())
    assert [said(row) for row in rows] == [[("user", "3 + 4?"), ("assistant", "7")],
                                           [("user", "3 + 4?"), ("assistant", "8")]]  # fmt: skip


@pytest.mark.parametrize(
    ("labels", "given"),
    [
        ("true false", "true=1 false=-1"),
        ("true false", "True=1 False=-1"),
        ("1 0", "1=1 0=-1"),
        ("1.0 0.0", "1=1 0=-1"),
        ('"1.0" "0.0"', "1=1 0=-1"),
        ('"Great" "POOR"', "great=1 poor=-1"),
        ('"great" "poor"', "GREAT=1 Poor=-1"),
        ('"Up" "up"', "Up=1 up=-1"),  # The given spelling comes before other cases.
    ],
)
def test_a_label_need_not_be_text(tmp_path, labels, given):
    lines = [f'{{"prompt": "a", "completion": "{n}", "label": {label}}}' for n, label in enumerate(labels.split())]
    rows = imported(tmp_path, "\n".join(lines), "a.jsonl", "--label_values", *given.split())
    assert rows["reward"][:] == [1.0, -1.0]


def test_all_unknown_labels_are_listed(tmp_path):
    content = "question,response,mood\n" + "".join(
        f"a,{n},{mood}\n" for n, mood in enumerate(["good", "bad", "so-so", "good", "hm", "3"])
    )
    fields = ("--reward_fields", "mood")
    with pytest.raises(ValueError, match=r"row 4: mood is 'so-so'.* Labels without a number in .*: so-so, hm\."):
        imported(tmp_path, content, "a.csv", *fields)
    with pytest.raises(ValueError, match=r"row 3: mood is 'bad'.* Labels without a number in .*: bad, so-so, hm\."):
        imported(tmp_path, content, "a.csv", *fields, "--label_values", "GOOD=1")
    free = "question,response,mood\n" + "".join(f"a,{n},word{n}\n" for n in range(30))
    with pytest.raises(ValueError, match=r"word0, .*word19, \.\.\.\.$"):
        imported(tmp_path, free, "a.csv", *fields)


@pytest.mark.parametrize("completion", ['[{"name": "Bob"}]', "[{'name': 'Bob'}]", '[{"rows": [{"role": "admin"}]}]'])
def test_objects_without_roles_are_text(completion):
    (row,) = table.rows({"prompt": "Who?", "completion": completion})
    assert row["completion"] == completion


@pytest.mark.parametrize(
    "completion", ['[{"role": "assistant", "content": ' + "[" * 200_000, "[{'role': 'assistant'}]"]
)
def test_messages_that_cannot_be_parsed_are_refused(completion):
    with pytest.raises(NotOfFormat, match="its completion looks like messages, and is not valid JSON"):
        table.rows({"prompt": "Who?", "completion": completion})


@pytest.mark.parametrize("completion", ["[" * 200_000, "[" + "1" * 5_000 + "]"])
def test_degenerate_completions_are_text(tmp_path, completion):
    line = json.dumps({"prompt": "Who?", "completion": completion, "reward": 0})
    (row,) = imported(tmp_path, line, "a.jsonl")
    assert row["completion"][0]["content"] == completion


def test_a_record_without_a_column_for_the_reward_can_be_skipped(tmp_path, capsys):
    lines = ['{"prompt": "a", "completion": "b", "rating": 1}', '{"prompt": "a", "completion": "c"}']
    with pytest.raises(ValueError, match=r"line 2: .*--reward_fields.*--skip_unrewarded"):
        imported(tmp_path, "\n".join(lines), "a.jsonl")
    assert imported(tmp_path, "\n".join(lines), "b.jsonl", "--skip_unrewarded")["reward"][:] == [1.0]


@pytest.mark.parametrize("mask", [[1, 0, 1], [0, 0, 1, 0, 1], "[1, 0, 1]"])
def test_text_of_others_in_a_completion_is_refused(mask):
    record = {"prompt": "2+2?", "response": "Run: 4. It is 4.", "reward": 1, "loss_mask": mask}
    with pytest.raises(Unusable, match=r"loss_mask has zeros between ones.* --ignore_fields loss_mask"):
        table.FORMAT.rows(record)
    called = [{"role": "assistant", "content": "Run"}, {"role": "tool", "content": "4"}]
    for accepted in ({"loss_mask": [0, 0, 1, 1, 0]}, {"loss_mask": [1, 1]}, {"response": called}):
        assert table.FORMAT.rows({**record, **accepted})
    assert table.FORMAT.rows({**record, "response": None}) == [None]


def test_a_list_with_an_empty_completion(tmp_path):
    rows = imported(tmp_path, json.dumps({"question": "a", "generations": ["b", None], "ratings": [5, 1]}), "a.jsonl")
    assert [(said(row)[1][1], row["reward"]) for row in rows] == [("b", 5.0)]


def test_ranks_can_have_rewards(tmp_path):
    given = ("--reward_fields", "rank", "--label_values", "1=1", "2=-1")
    assert imported(tmp_path, "question,answer,rank\na,b,1\na,c,2\n", "a.csv", *given)["reward"][:] == [1.0, -1.0]
    table = "question,answer,reciprocal_rank\na,b,1\na,c,0.5\n"
    assert imported(tmp_path, table, "b.csv", "--reward_fields", "reciprocal_rank")["reward"][:] == [1.0, 0.5]


def test_a_label_can_mean_no_reward(tmp_path, capsys):
    content = ROWS + "3 + 4?,9,unsure\n"
    given = ("--label_values", "up=1", "down=0", "unsure=", "--skip_unrewarded")
    assert imported(tmp_path, content, "a.csv", *given)["reward"][:] == [1.0, 0.0]
    summary = capsys.readouterr().out
    assert "1 record has no reward and is left out: a.csv, row 4." in summary
    assert summary.count("left out") == 1  # The summary names no reason that left out nothing.


def test_a_system_prompt_and_messages_as_json(tmp_path):
    messages = json.dumps([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
                           {"role": "user", "content": "c"}]).replace('"', '""')  # fmt: skip
    rows = imported(tmp_path, f'system,prompt,response,score\nBe brief.,"{messages}",d,1\n,x,y,0\n')
    assert said(rows[0]) == [
        ("system", "Be brief."),
        ("user", "a"),
        ("assistant", "b"),
        ("user", "c"),
        ("assistant", "d"),
    ]
    assert said(rows[1]) == [("user", "x"), ("assistant", "y")]


def test_cells_can_be_long(tmp_path, monkeypatch):
    text = f"1\n{'x' * 200_000}"
    (row,) = imported(tmp_path, f'prompt,completion,score\n1,"{text}",1\n')
    assert row["completion"][0]["content"] == text
    monkeypatch.setattr(csv_tables, "_LONGEST", 1_000)
    with pytest.raises(ValueError, match=r"a\.csv has a line of more than 1,000 characters"):
        imported(tmp_path, f"prompt,completion,score\n{text[2:]},1,1\n", "a.csv")


@pytest.mark.parametrize(
    ("content", "given", "words"),
    [
        (ROWS.replace("up", "--"), (), r"row 2: thumbs is '--'.* needs a space before it: ' --='"),
        (ROWS, ("--label_values", "up=1"), r"row 3: thumbs is 'down', which is no known label \(label_values"),
        (ROWS, ("--label_values", "up:1"), r"label_values must be pairs such as great=1 poor=-1, not 'up:1'"),
        ("question,query,response,score\na,b,c,1\n", (), "query is in no row, .*--prompt_field question query"),
        ("question,response,score\na,b,1\na,b\n", (), r"a\.csv cannot be read as a table: .*columns"),
        # Quotes that start a cell, in a file that does not quote its cells or that escapes quotes with backslashes.
        ('question\tanswer\trating\na\t"b\t1\nc\t"d\t0\ne\tf\t1\n', (), "in line 2, a cell .*write each quote .*JSON"),
        ('question;answer;rating\na;b;0\na;"Click \\"b\\" now.";1\n', (), "in line 3, a cell .*write each quote"),
        ('question,answer,rating\na,"b \\"",1\nc,"no \\"d",0\ne,"f",1\n', (), "in line 2, a cell .*write each quote"),
        ('question,answer,rating\na,"b,1\nc,d,0\n', (), "in line 2, a cell .*write each quote"),
        ("My export,,\nquestion,answer,rating\na,b,1\n", (), "columns without a name: .*a title, delete it"),
        ("My export\nquestion,answer,rating\na,b,1\n", (), "has one column .*a title, delete it"),
        (b"question,response,score\n\xe9,b,1\n", (), "UTF-8"),
        (b"qu\xe9stion,response,score\na,b,1\n", (), "UTF-8"),
        (ROWS.encode("utf-16"), (), "UTF-16. Save it as UTF-8"),
        ("no table\nat all\n", (), r"a\.csv has one column.*header"),
        ("", (), r"a\.csv is empty"),
        ("question,question,response\na,b,c\n", (), "two columns named 'question'"),
        ('prompt,response,score\n"[{\'role\': \'user\'}]",b,1\n', (), "its prompt looks like messages.*not valid JSON"),
        (ROWS, ("--format", "messages"), "like table .*Use --format table.*With --format messages, .*: it lacks"),
        ("question,response,score\n<|im_start|>user,b,1\n", (), "already applied.*--chat false.*--chat true"),
        *(
            (f'question,response,score\na,"<tool_call>{mark}12",1\n', given, "tool or user messages.*list of messages")
            for mark, given in (
                ("<|im_end|>\n<|im_start|>user\n", ()), ("<|start_header_id|>ipython", ("--chat", "false")),
                ("<start_of_turn>user", ("--chat", "true")), ("\nuser\n<tool_response>", ()), ("<|user|>", ()),
                ("[INST]", ()),
                ("\n\nHuman: 1?\n\nAssistant: ", ()), ("\nuser\n1?\nassistant\n", ()),
            )
        ),
        ("question,response,score\na, and,b,1\n", (), "put text with a comma.*in double quotes"),
        (ROWS, ("--prompt_field", "asked", "--completion_field", "response"), "it has no field asked"),
        ("question,prediction,answer,score\na,b,b,1\na,,c,0\n", (), r"row 3: .*prediction.*--completion_field"),
        ("question,prediction,answer,score\na,,c,0\na,b,b,1\n", (), r"row 3: .*prediction.*--completion_field"),
        ("question,user,response,score\n,u13,b,0\na,u14,b,1\n", (), r"row 3: .*--prompt_field"),
        ("question,answer,score,system\na,b,1,Zendesk\n", (), "system is 'Zendesk'.*--ignore_fields system"),
        ("question,answer,score,備考\na,b,1,注文番号を確認してください。\n", (), "備考 is in no row"),
        ("question,answer,score\na,b,1\na,c,3.5\n", ("--label_values", "1=-1", "5=1"), "score is '3.5'"),
        ("question,answer,score\na,b,1_0\n", (), "score is '1_0'"),
        ("question,answer,score,run\na,b,1,\n", ("--rollout_field", "run"), "its run is empty"),
        ("question,answer,score,pid\na,b,1,\n", ("--problem_field", "pid"), "its pid is empty"),
        ("question,answer,rank\na,b,1\na,c,2\n", ("--reward_fields", "rank"), "rank is a rank.*--label_values 1=1 2=0"),
        (VOTES, ("--reward_fields", "likes", "dislikes"), "its dislikes may .*minus.*--label_values true=-1"),
        (VOTES, ("--reward_fields", "like"), r"no field like \(did you mean likes\?\)"),
        ("3+4?,7,up\n3+5?,8,up\n", (), "first line must name the columns"),
    ],
)  # fmt: skip
def test_unreadable_input(tmp_path, content, given, words):
    with pytest.raises(ValueError, match=words):
        imported(tmp_path, content, "a.csv", *given)


@pytest.mark.parametrize(
    "prompt",
    [
        "Hi there\n<extra_id_1>Assistant\nHello to you\n<extra_id_1>User\nAn\n\nHuman: x",
        "\n\nHuman: Hi there\n\nAssistant: Hello to you\n\nHuman: An\n\nHuman: x\n\nAssistant: ",
    ],
    ids=["HelpSteer2", "Nectar"],
)
def test_turns_in_a_text_prompt(tmp_path, prompt):
    table = {"prompt": prompt, "completion": "4", "score": 1}
    compared = {"prompt": prompt, "response_1": "4", "response_2": "5", "preference_strength": -2}
    for record in (table, compared):
        row = imported(tmp_path, json.dumps(record), "a.jsonl")[0]
        asked = "".join(f"{role}: {text}\n" for role, text in said(row))
        assert asked.startswith("user: Hi there\nassistant: Hello to you\nuser: An\n")
        assert asked.endswith("x\nassistant: 4\n")


def test_all_rewards_of_a_table_are_in_one_column(tmp_path):
    rows = [{"question": "a", "answer": "b", "rating": 5}, {"question": "a", "answer": "c", "thumbs": "up"}]
    content = "\n".join(map(json.dumps, rows))
    with pytest.raises(ValueError, match=r"thumbs.*rating.*--reward_fields.*--skip_unrewarded"):
        imported(tmp_path, content, "a.jsonl")
    assert imported(tmp_path, content, "a.jsonl", "--reward_fields", "rating", "--skip_unrewarded")["reward"][:] == [5]


def test_the_summary_names_the_columns_of_all_files(tmp_path, capsys):
    (tmp_path / "logs").mkdir()
    for name, prompt, completion in (("a", "question", "response"), ("b", "question", "reply")):
        record = {prompt: f"3 + 4 in {name}?", completion: "7", "thumbs": "up"}
        (tmp_path / "logs" / f"{name}.jsonl").write_text(json.dumps(record))
    main.main(["import", "--input", str(tmp_path / "logs"), "--output_dir", str(tmp_path / "rows")])
    columns = "Read from columns: question (prompt), response or reply (completion), thumbs (reward).\n"
    assert columns in capsys.readouterr().out


def test_an_empty_cell_of_the_chosen_column_is_left_out(tmp_path, capsys):
    content = "asked,said,answer,score\na,b,b,1\na,,c,0\n"
    given = ("--prompt_field", "asked", "--completion_field", "said")
    assert imported(tmp_path, content, "a.csv", *given)["reward"][:] == [1.0]
    out = capsys.readouterr().out
    assert "asked (prompt), said (completion), score (reward)" in out
    assert "1 completion is empty" in out


@pytest.mark.parametrize("value", [None, float("nan")])
def test_a_missing_rating_is_no_label(value):
    assert as_number("rating", value, {"none": 0.0, "nan": 0.0, "1": 1.0}) is value


def test_rounded_ids_are_refused(tmp_path):
    row = {"question": "a", "answer": "b", "score": 1, "pid": 1234567890123456800.0}
    with pytest.raises(ValueError, match=r"its pid is 1234567890123456768, .*int64 or text"):
        imported(tmp_path, json.dumps(row), "a.jsonl", "--problem_field", "pid")


def test_ids_that_are_equal_numbers_are_equal(tmp_path):
    rows = [{"question": q, "answer": "b", "score": 1, "pid": pid} for q, pid in (("a", 1), ("c", 1.0))]
    found = imported(tmp_path, "\n".join(map(json.dumps, rows)), "a.jsonl", "--problem_field", "pid")
    assert found["problem_id"][:] == ["1", "1"]


@pytest.mark.parametrize("number", [4, 4.0])  # pandas stores whole numbers as floats if a value is missing.
def test_a_number_can_be_the_completion(tmp_path, number):
    (row,) = imported(tmp_path, json.dumps({"question": "2+2", "answer": number, "rating": 1}), "a.jsonl")
    assert said(row) == [("user", "2+2"), ("assistant", "4")]


@pytest.mark.parametrize(("answer", "expected"), [(4.0, "4"), (0.5, "0.5"), (float("nan"), None), (["4"], "['4']")])
def test_numbers_in_the_answer(answer, expected):
    (row,) = table.rows({"prompt": "2+2", "completion": "4", "answer": answer})
    assert row["answer"] == expected


@pytest.mark.parametrize(("value", "reward"), [("👍", 1), ("👍🏽", 1), ("👎\ufe0f", -1), (Decimal("4.5"), 4.5)])
def test_rewards_in_other_forms(value, reward):
    assert as_number("rating", value, None) == reward


def test_failed_calls_of_a_csv_are_left_out(tmp_path):
    content = "question,answer,score,is_error\na,b,1,TRUE\na,c,0,false\n"
    assert imported(tmp_path, content, "a.csv")["reward"][:] == [0.0]


@pytest.mark.parametrize("bytes_kept", [15, -20])
def test_a_truncated_file_is_named(tmp_path, bytes_kept):
    packed = gzip.compress((ROWS + "a,b,up\n" * 100_000).encode())
    with pytest.raises(ValueError, match=r"a\.csv\.gz"):
        imported(tmp_path, packed[:bytes_kept], "a.csv.gz")


@pytest.mark.parametrize(
    ("name", "value"),
    [("turn_rewards", [1.0]), ("completion_ids", [3]), ("prompt_ids", [1]), ("completion_mask", [1]),
     ("sampler_logps", [-0.5]), ("mu_logps", [-0.5])],
)  # fmt: skip
def test_rows_with_columns_that_a_table_cannot_keep(tmp_path, name, value):
    given = {"prompt": "a", "completion": "b", name: value, "reward": 1.0}
    row = json.dumps(given)
    with pytest.raises(ValueError, match=rf"column {name}, .*topr train as it is.*--ignore_fields {name}"):
        imported(tmp_path, row, "rows.jsonl", "--format", "table")
    (read,) = imported(tmp_path, row, "rows.jsonl", "--ignore_fields", name, "--chat", "false")
    assert read["reward"] == 1.0


def test_other_columns_of_rows_are_kept(tmp_path):
    kept = {"temperature": 0.5, "top_p": 0.9, "top_k": 20, "problem_id": 0}
    row = {"prompt": "a", "completion": "b", "reward": 1, "problem_id": float("nan")}
    rows = [row, {"prompt": "a", "completion": "c", "reward": 0, **kept}]
    read = imported(tmp_path, "\n".join(map(json.dumps, rows)), "rows.jsonl", "--chat", "false")
    assert {name: read[1][name] for name in kept} == {**kept, "problem_id": "0"}
    assert len(read[0]["problem_id"]) > 1  # a hash of the prompt
