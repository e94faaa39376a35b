"""Test the import of answers that promptfoo and OpenAI's evals graded, and that people rated in annotation tools."""

import json
import re

import pytest
from reading import ASKED, QUESTION, WRITTEN, imported, turns
from records import ARGILLA, LABEL_STUDIO, OAIEVAL, OPENAI_EVALS, PROMPTFOO

from topr_trl.importing import FORMATS
from topr_trl.importing.format import LeftOut, NotOfFormat, Unusable
from topr_trl.importing.formats import label_studio, oaieval, openai_evals, promptfoo
from topr_trl.importing.recognition import format_of


def learned(rows):
    return [turns(row["completion"])[0][1] for row in rows]


def test_results_that_promptfoo_wrote(tmp_path, capsys):
    rows = imported(tmp_path, WRITTEN / "promptfoo-0.121.20.json")
    assert (learned(rows), rows["reward"][:]) == (["12", "17 legs"], [1.0, 0.5])
    assert [turns(row["prompt"]) for row in rows] == [ASKED, ASKED[1:]]
    assert (set(rows["model"]), set(rows["finish_reason"])) == ({"m"}, {"stop"})
    printed = " ".join(capsys.readouterr().out.split())
    assert "2 requests or runs failed" in printed
    assert re.search("2 [^.]* grade", printed)
    lines = json.loads((WRITTEN / "promptfoo-0.121.20.json").read_text())["results"]["results"]
    rows = imported(tmp_path, lines, "--reward_fields", "success")
    assert (learned(rows), rows["reward"][:]) == (["12", "17 legs"], [1.0, -1.0])


def test_outputs_of_promptfoo_that_are_no_text():
    (result,) = PROMPTFOO["results"]["results"]
    call = {"id": "c1", "type": "function", "function": {"name": "legs", "arguments": "{}"}}
    (row,) = promptfoo.rows({**result, "response": {"output": [call]}})
    assert turns(row["completion"]) == [("assistant", "", None, [call["function"]])]
    changed = {"testCase": {"options": {"transform": "output.trim()"}}}
    for more, why in (
        ({"response": {"output": {"legs": 12}}}, "output is an object"),
        (changed, "changed by a transform"),
    ):
        with pytest.raises(Unusable, match=why):
            promptfoo.rows({**result, **more})
    config = {"providers": ["openai:m", {"id": "m", "transform": "output.trim()"}]}
    (changed,) = promptfoo.results({**PROMPTFOO, "config": config})
    with pytest.raises(Unusable, match="changed by a transform"):
        promptfoo.rows(changed)
    assert promptfoo.rows({**result, "response": {"output": ""}}) == []
    (row,) = promptfoo.rows(
        {**result, "prompt": {"raw": "\n- role: system\n  content: Add.\n- role: user\n  content: a\n"}}
    )
    assert [(each["role"], each["content"]) for each in row["prompt"]] == [("system", "Add."), ("user", "a")]
    for raw in ("- role: system: x", "- role: user\n  content: &a x\n- role: assistant\n  content: *a\n"):
        with pytest.raises(Unusable, match="not valid YAML"):
            promptfoo.rows({**result, "prompt": {"raw": raw}})


def test_a_log_that_openais_evals_wrote(tmp_path):
    rows = imported(tmp_path, WRITTEN / "evals-3.0.1.jsonl")
    assert (learned(rows), rows["reward"][:]) == (["12", "17 legs"], [1.0, -1.0])
    assert [turns(row["prompt"]) for row in rows] == [ASKED] * 2
    assert (rows["problem_id"][:], rows["answer"][:], set(rows["model"])) == (
        ["legs.test.0", "legs.test.1"], ["12", "12"], {"m"}
    )  # fmt: skip


def event(kind, **data):
    return {**OAIEVAL, "type": kind, "data": data}


@pytest.mark.parametrize(
    ("events", "found"),
    [
        ([OAIEVAL, event("metrics", score=0.5, choice="B")], [{"results.score": 0.5}]),
        ([OAIEVAL, event("match", correct=True), OAIEVAL, event("match", correct=False)],
         [{"results.correct": True}, {"results.correct": False}]),
        ([OAIEVAL, OAIEVAL, event("metrics", score=0.5)], "several samplings with one result.*Keep one"),
        ([{**OAIEVAL, "data": {**OAIEVAL["data"], "sampled": ["a", "b"]}}], "2 completions and one result"),
        ([OAIEVAL, event("error", message="no")], LeftOut.FAILED),
        ([event("metrics", score=0.5)], LeftOut.OTHER),
    ],
)  # fmt: skip
def test_results_belong_to_the_sampling_before_them(events, found):
    records = list(oaieval.samplings({"sample": "s", "lines": events}))
    if isinstance(found, LeftOut):
        assert oaieval.rows(records[0]) == [found]
    elif isinstance(found, str):
        for record in records:
            with pytest.raises(Unusable, match=found):
                oaieval.rows(record)
    else:
        assert [oaieval.rewards(record) for record in records] == found
        assert [learned(oaieval.rows(record)) for record in records] == [["42"]] * len(found)


def test_items_of_openais_evals_api(tmp_path):
    rows = imported(tmp_path, WRITTEN / "openai-evals-3.57.0.json")
    assert (learned(rows), rows["reward"][:], set(rows["temperature"])) == (["12", "17 legs"], [1.0, 0.0], {0.7})
    assert [turns(row["prompt"]) for row in rows] == [ASKED] * 2
    sample = OPENAI_EVALS["sample"]
    assert openai_evals.rows({"sample": {**sample, "error": {"code": "timeout", "message": ""}}}) == [LeftOut.FAILED]


@pytest.mark.parametrize("name", ["argilla-2.8.0.json", "argilla-2.8.0-flat.json"])
def test_ratings_that_argilla_wrote(tmp_path, name):
    rows = imported(tmp_path, WRITTEN / name, "--reward_fields", "ratings.rating")
    assert (learned(rows), rows["reward"][:]) == (["12", "17 legs"], [5.0, 1.0])
    assert [turns(row["prompt"]) for row in rows] == [ASKED[1:]] * 2
    assert imported(tmp_path, WRITTEN / name, "--reward_fields", "ratings.helpful")["reward"][:] == [1.0, -1.0]
    with pytest.raises(ValueError, match=r"ratings.rating, ratings.helpful may all be the reward.*--reward_fields"):
        imported(tmp_path, WRITTEN / name)


def test_questions_without_an_answer_or_with_another_kind_of_answer(tmp_path):
    """Test a record that has no ratings yet, in a parquet file, and answers that mark parts of a text."""
    rated, other = json.loads((WRITTEN / "argilla-2.8.0-flat.json").read_text())
    marks = [{"label": "a", "start": 0, "end": 1}, {"label": "b", "start": 1, "end": 2}]
    rated = {**rated, "spans.responses": [marks], "spans.responses.status": ["submitted"]}
    other |= dict.fromkeys(("rating.responses", "rating.responses.status"))
    rows = imported(tmp_path, [rated, other], "--reward_fields", "ratings.rating", "--skip_unrewarded")
    assert (learned(rows), rows["reward"][:]) == (["12"], [5.0])


def test_a_ranking_that_argilla_wrote(tmp_path):
    rows = imported(tmp_path, WRITTEN / "argilla-2.8.0-ranking.json", "--reward_fields", "ratings.rank")
    found = dict(zip(learned(rows), rows["reward"], strict=True))
    assert found == {"12": 1.0, "Many.": 0.0, "17 legs": -1.0}
    assert {json.dumps(row["prompt"]) for row in rows} == {json.dumps(rows[0]["prompt"])}


def test_annotators_that_disagree(tmp_path):
    values = [{"value": value, "user_id": str(value)} for value in (5, 4)]
    with pytest.raises(ValueError, match=r"two ratings rating: 5 and 4. Keep one.*--skip_unusable"):
        imported(tmp_path, [{**ARGILLA, "responses": {"rating": values}}])


def task(*results, **data):
    named = [{"from_name": "a", "to_name": "t", **result} for result in results]
    return {"data": data, "annotations": [{"result": named, "was_cancelled": False}]}


ITEMS = [{"id": "x", "title": "First", "body": "17 legs"}, {"id": "y", "title": "Second", "body": "12"}]
PAIR = {"type": "pairwise", "to_name": "answer1,answer2", "value": {"selected": "right"}}
RANKER = {"type": "ranker", "value": {"ranker": ["y", "x"]}}


@pytest.mark.parametrize(
    ("record", "rewards"),
    [
        (LABEL_STUDIO, {"42": 5.0}),
        (task({"type": "choices", "value": {"choices": ["Good"]}}, prompt=QUESTION, response="12"), {"12": 1.0}),
        (task({"type": "number", "value": {"number": 0.5}}, prompt=QUESTION, response="12"), {"12": 0.5}),
        (task(PAIR, prompt=QUESTION, answer1="17 legs", answer2="12"), {"17 legs": -1.0, "12": 1.0}),
        (task(RANKER, prompt=QUESTION, items=ITEMS), {"17 legs": -1.0, "12": 1.0}),
        (task({**RANKER, "value": {"ranker": {"best": ["y", "x"], "_": []}}}, prompt=QUESTION, items=ITEMS),
         {"17 legs": -1.0, "12": 1.0}),
    ],
)  # fmt: skip
def test_annotations_of_label_studio(tmp_path, record, rewards):
    assert format_of(record) == "label-studio"
    skipped = {**record["annotations"][0], "was_cancelled": True, "result": []}
    record = {**record, "annotations": [skipped, *record["annotations"]]}
    rows = imported(tmp_path, [record])
    assert dict(zip(learned(rows), rows["reward"], strict=True)) == rewards


@pytest.mark.parametrize(
    ("record", "why"),
    [
        (task({**PAIR, "to_name": "a,b"}, prompt=QUESTION, answer1="12", answer2="7"), "its data has no a, b"),
        (task({**RANKER, "value": {"ranker": {"a": ["y"], "b": ["x"]}}}, items=ITEMS), "several buckets, whose order"),
    ],
)
def test_rankings_of_label_studio_that_are_not_clear(record, why):
    with pytest.raises(NotOfFormat, match=why):
        list(label_studio.records(record))


@pytest.mark.parametrize("name", ["argilla", "label-studio"])
def test_a_record_without_a_rating_is_counted(tmp_path, capsys, name):
    rated = ARGILLA if name == "argilla" else LABEL_STUDIO
    unrated = {**rated, "responses": {}} if name == "argilla" else {**rated, "annotations": []}
    assert len(imported(tmp_path, [rated, unrated], "--skip_unrewarded", "true")) == 1
    assert "1 record has no reward" in capsys.readouterr().out
    assert FORMATS[name].chat


def test_an_answer_that_is_not_rated_can_be_left_out(tmp_path):
    given = [{**ARGILLA, "fields": {**ARGILLA["fields"], "prediction": "Not 12."}}]
    with pytest.raises(ValueError, match=r"prediction is in no row.*--ignore_fields prediction"):
        imported(tmp_path, given)
    assert len(imported(tmp_path, given, "--ignore_fields", "prediction")) == 1
