"""Test the database: rollouts, continued answers, rewards, damaged files, and kills."""

import json
import os
import signal
import sqlite3
import threading
import time
from contextlib import closing

import httpx2 as httpx
import pytest
from recorders import Upstream, recorder, start_recorder, until

from topr_trl.recording.protocols import choice_of
from topr_trl.recording.store import (
    NAME,
    State,
    StorageFullError,
    Store,
    count_rollouts,
    read_rollouts,
    recording_id,
    recording_in,
)

HI = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def answer(text, index=0):
    message = {"role": "assistant", "content": text}
    return {"choices": [{"index": index, "message": message, "finish_reason": "stop"}]}


@pytest.fixture
def store(tmp_path):
    found = Store(tmp_path)
    yield found
    found.close()


def rollouts(store):
    return list(read_rollouts(store.path))


def test_a_call_is_read_while_the_store_is_open(store):
    call = store.begin("chat/completions", HI, None, 1, served_model="/w", model_revision="v2")
    store.end(call.id, State.FINISHED, answer("yes"))
    (rollout,) = rollouts(store)
    (read,) = rollout["calls"]
    assert (read["request"], read["response"], read["state"]) == (HI, answer("yes"), "finished")
    assert (read["served_model"], read["model_revision"], read["redacted"]) == ("/w", "v2", 0)
    assert rollout["rollout_id"] == call.rollouts[0]


def test_an_answer_is_continued_again_after_a_failure(store):
    first = store.begin("chat/completions", HI, None, 1)
    store.end(first.id, State.FINISHED, answer("yes"), {0: "key"})
    for state, response in ((State.FAILED, None), (State.CUT, answer("s")), (State.FINISHED, answer("so"))):
        call = store.begin("chat/completions", HI, None, 1, "key")
        store.end(call.id, state, response, {0: state.value})
        assert call.rollouts == first.rollouts
    assert store.begin("chat/completions", HI, None, 1, "key").rollouts != first.rollouts
    assert store.begin("chat/completions", HI, None, 1, "cut").rollouts == first.rollouts


def continued_by(store, key="key"):
    """Begin a call that continues the answer with the key, and return its number, its rollout and its answer."""
    call = store.begin("chat/completions", HI, None, 1, key)
    return call.id, call.rollouts[0], call.answers[0]


def test_an_answer_is_continued_again_after_a_kill(tmp_path):
    killed = Store(tmp_path)
    killed._connection.execute("DROP TABLE continued")  # An earlier version wrote the database.
    killed.close()
    killed = Store(tmp_path)
    first = killed.begin("chat/completions", HI, None, 1)
    killed.end(first.id, State.FINISHED, answer("yes"), {0: "key"})
    assert continued_by(killed)[1:] == (*first.rollouts, 2)
    killed.close()
    store = Store(tmp_path)
    assert store.recover() == 1
    assert continued_by(store)[1:] == (*first.rollouts, 3)
    assert continued_by(store)[2] == 1
    store.close()


def test_an_answer_is_continued_again_after_a_full_disk(store):
    first = store.begin("chat/completions", HI, None, 1)
    store.end(first.id, State.FINISHED, answer("yes"), {0: "key"})
    call, *_ = continued_by(store)
    (pages,) = store._connection.execute("PRAGMA page_count").fetchone()
    store._connection.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(StorageFullError):
        store.end(call, State.FINISHED, answer("x" * 100_000))
    store._connection.execute("PRAGMA max_page_count = 1000000")
    again, *place = continued_by(store)
    assert place == [*first.rollouts, 3]
    store.end(again, State.FINISHED, answer("so"))
    assert store.recover() == 1  # The next start ends the call whose end is missing, and leaves the key to the retry.
    assert continued_by(store)[2] == 1


def test_each_choice_is_continued_on_its_own(store):
    first = store.begin("chat/completions", HI, None, 2)
    both = {"choices": [*answer("a")["choices"], *answer("b", 1)["choices"]]}
    store.end(first.id, State.FINISHED, both, {0: "a", 1: "b"})
    assert store.begin("chat/completions", HI, None, 1, "b").rollouts == first.rollouts[1:]


def test_the_latest_of_equal_answers_is_continued(store):
    """The first answers of two conversations can be equal, for instance to a fixed question."""
    names = []
    for _ in range(2):
        call = store.begin("chat/completions", HI, None, 1)
        store.end(call.id, State.FINISHED, answer("yes"), {0: "key"})
        names += call.rollouts
    assert [store.begin("chat/completions", HI, None, 1, "key").rollouts for _ in range(2)] == [names[1:], names[:1]]


def test_lists_and_totals(store):
    for n in range(5):
        store.begin("chat/completions", HI, f"r{n}", 1)
    store.set_reward("r1", "rating", 1.0)
    store.set_reward("r3", "rating", 0.0)
    store.set_reward("r4", "test", 1.0)
    names = [[each["rollout_id"] for each in store.latest(graded, before, 2)] for graded, before in
             ((None, None), (None, 4), (True, None), (False, None))]  # fmt: skip
    assert names == [["r4", "r3"], ["r2", "r1"], ["r3", "r1"], ["r4", "r2"]]
    totals = store.totals(2)
    assert (totals["rollouts"], totals["rewarded"], totals["graded"]) == (5, 3, 2)
    assert [(mean, count) for _, mean, count in totals["means"]["rating"]] == [(1.0, 1), (0.0, 1)]
    assert store.rollout("r1")["rewards"] == {"rating": 1.0}
    assert store.rollout("none") is None


def test_answers_are_numbered_in_their_rollout(store):
    assert store.begin("chat/completions", HI, "r", 2).answers == [1, 2]
    first = store.begin("chat/completions", HI, None, 1)
    store.end(first.id, State.FINISHED, answer("yes"), {0: "key"})
    assert store.begin("chat/completions", HI, "r", 1).answers == [3]
    assert store.begin("chat/completions", HI, None, 3, "key").answers == [2, 1, 1]


def graded(store, **rewards):
    """Record two answers, and give rewards by name: of the answers, or of the whole rollout."""
    for text in ("a", "b"):
        store.end(store.begin("chat/completions", HI, "r", 1).id, State.FINISHED, answer(text))
    for name, values in rewards.items():
        for place, reward in enumerate(values if isinstance(values, list) else [values], isinstance(values, list)):
            if reward is not None:
                store.set_reward("r", name, reward, None, place)


def test_each_answer_keeps_its_own_reward(store):
    graded(store, rating=[1, -1], test=0.5)
    store.set_reward("r", "rating", 0, "why", 2)
    (rollout,) = rollouts(store)
    assert rollout["rewards"] == {"rating": None, "test": 0.5}
    assert [call["rewards"] for call in rollout["calls"]] == [{"rating": 1, "test": None}, {"rating": 0, "test": None}]
    assert [call["comments"] for call in rollout["calls"]] == [{}, {"rating": "why"}]
    store.set_reward("r", "rating", None, None, 1)
    assert [call["rewards"] for call in store.rollout("r")["calls"]] == [{}, {"rating": 0}]


@pytest.mark.parametrize(("rating", "answer", "words"), [(1, 2, "whole rollout has"), ([None, 1], 0, "Answer 2 has")])
def test_a_rollout_has_one_reward_or_rewards_of_answers(store, rating, answer, words):
    graded(store, rating=rating)
    with pytest.raises(ValueError, match=rf"{words} a reward named rating.*remove"):
        store.set_reward("r", "rating", 1, None, answer)
    store.set_reward("r", "test", 1, None, answer)  # Another name has rewards of its own.


def test_only_answers_that_arrived_get_rewards(store):
    graded(store)
    store.set_reward("r", "rating", 1, None, store.begin("chat/completions", HI, "r", 1).answers[0])  # may arrive
    (failed,) = store.begin("chat/completions", HI, "r", 1).answers
    store.end(failed, State.FAILED)
    assert store.latest(None, None, 9)[0]["answers"] == 3  # without the failed call
    for number, words in ((failed, "answer 4 failed"), (5, "no answer 5.*1 to 4")):
        with pytest.raises(LookupError, match=words):
            store.set_reward("r", "rating", 1, None, number)


@pytest.mark.parametrize(("rating", "expected"), [
    (None, (0, 2, {})), (1, (0, 0, {})),
    ([1, None], (1, 1, {"rating": [1, 1]})), ([1, 0], (1, 0, {"rating": [0.5, 2]})),
])  # fmt: skip
def test_a_rollout_with_some_rated_answers_is_graded_and_not_graded(store, rating, expected):
    graded(store, rating=rating)
    (found,) = store.latest(None, None, 9)
    assert (store.totals(9)["graded"] - (rating == 1), found["ungraded"], found["answer_rewards"]) == expected
    assert (found["answers"], len(found["calls"])) == (2, 1)
    assert len(store.latest(True, None, 9)) == (rating is not None)
    assert len(store.latest(False, None, 9)) == (expected[1] > 0)


@pytest.mark.parametrize(("search", "found"), [
    ("Hé", "r"), ('"2" + 100%', "r"), ("0%2", ""), ("YES", "r"), ("no", "b"), ("nice", "r"), ("token", ""),
    ("user", ""), ("\\", ""), ("new\nline", "r"), ("inf", "i"),
])  # fmt: skip
def test_search(store, search, found):
    """Search finds text of a message, of the rollout's own answer, or of a comment, but no names of fields."""
    request = {"messages": [{"role": "user", "content": 'Hé, "2" + 100% new\nline'}]}
    call = store.begin("chat/completions", request, "r", 1)
    choices = {"choices": [{**answer("yes")["choices"][0], "logprobs": {"content": [{"token": "token"}]}}]}
    store.end(call.id, State.FINISHED, choices)
    store.set_reward("r", "rating", 1, "nice", 1)
    both = store.begin("chat/completions", HI, None, 2)
    store.end(both.id, State.FINISHED, {"choices": [*answer("so")["choices"], *answer("no", 1)["choices"]]})
    call = store.begin("chat/completions", {"top_p": float("inf")}, "i", 1)
    store.end(call.id, State.FINISHED, {"choices": [{"text": "inf", "index": 0, "x": float("nan")}]})
    names = {"r": "r", "i": "i", both.rollouts[1]: "b"}
    assert "".join(names.get(each["rollout_id"], "?") for each in store.latest(None, None, 9, search)) == found


@pytest.mark.parametrize(("number", "order"), [(0.5, [0, 1]), (0.5, [1, 0]), (float("nan"), [0, 1])])
def test_views_leave_out_tokens_if_they_can(store, number, order):
    choices = [{"index": n, "text": json.loads('"\\ud83d"'), "token_ids": [n], "logprobs": {}} for n in order]
    call = store.begin("completions", {"prompt": "hi"}, None, 2)
    store.end(call.id, State.FINISHED, {"choices": choices, "prompt_token_ids": [1], "x": number})
    for found in (store.rollout(call.rollouts[1]), store.latest(None, None, 1)[0]):
        response = found["calls"][0]["response"]
        choice = choice_of(found["calls"][0])
        assert (choice["index"], choice["text"]) == (1, choices[1]["text"])
        assert ("token_ids" in choice) == ("prompt_token_ids" in response) == (number != number)
    assert rollouts(store)[1]["calls"][0]["response"]["choices"] == choices


def test_a_database_of_another_format(tmp_path):
    Store(tmp_path).close()
    with sqlite3.connect(tmp_path / NAME) as connection:
        connection.execute("UPDATE about SET value = '99' WHERE name = 'format'")
    connection.close()
    with pytest.raises(ValueError, match="format 99"):
        Store(tmp_path)
    with pytest.raises(ValueError, match="format 99"):
        count_rollouts(tmp_path / NAME)


def test_a_file_that_is_no_database(tmp_path):
    (tmp_path / NAME).write_text("not a database, but long enough to be read as one" * 100)
    with pytest.raises(ValueError, match="cannot be read as a recording"):
        count_rollouts(tmp_path / NAME)
    with pytest.raises(ValueError, match="cannot be opened as a recording"):
        Store(tmp_path)


def damage(file, *names):
    """Create a database, and overwrite the first pages of tables and indexes."""
    Store(file.parent).close()
    with closing(sqlite3.connect(file)) as connection:
        pages = dict(connection.execute("SELECT name, rootpage FROM sqlite_schema"))
    with file.open("r+b") as opened:
        for name in names:
            opened.seek(4096 * (pages[name] - 1))
            opened.write(b"\xff" * 4096)


def test_a_database_that_is_locked(store):
    store._connection.execute("PRAGMA busy_timeout = 0")
    with closing(sqlite3.connect(store.path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StorageFullError, match=f"{NAME} cannot be written: .*locked. Close other programs"):
            store.begin("chat/completions", HI, None, 1)


@pytest.mark.parametrize("act", [Store, lambda folder: count_rollouts(folder / NAME)])
@pytest.mark.parametrize(("spoil", "remedy"), [
    (lambda file: file.mkdir(), "Check"), (lambda file: damage(file, "about"), "Restore the file"),
    (lambda file: sqlite3.connect(file).execute("CREATE TABLE about (x)").connection.close(), "topr record wrote"),
])  # fmt: skip
def test_a_database_that_cannot_be_used(tmp_path, act, spoil, remedy):
    spoil(tmp_path / NAME)
    with pytest.raises((ValueError, StorageFullError), match=f"{NAME} cannot be .*{remedy}"):
        act(tmp_path)


def test_a_database_that_can_be_opened_and_is_damaged(tmp_path):
    damage(tmp_path / NAME, "calls", "open_calls")
    store = Store(tmp_path)
    with pytest.raises(ValueError, match=f"{NAME} cannot be read .*Restore the file"):
        store.recover()
    with pytest.raises(StorageFullError, match=f"{NAME} cannot be written: .*Restore the file"):
        store.begin("chat/completions", HI, None, 1)
    store.close()


def test_the_id_stays_while_a_recording_grows(tmp_path, store):
    before = recording_id(store.path)
    store.begin("chat/completions", HI, None, 1)
    assert recording_id(store.path) == before
    assert recording_in(tmp_path) == recording_in(store.path) == store.path
    assert recording_in(tmp_path / "none") is None


@pytest.mark.slow
@pytest.mark.processes
def test_kills_under_load_lose_and_double_nothing(tmp_path):
    """Kill the recorder while eight clients stream and grade. The recording has all that clients received, once."""
    folder, upstream = tmp_path / "log", Upstream()
    upstream.delay, upstream.words = 0.005, ["w"] * 20
    with recorder(tmp_path / "other", upstream) as running:
        for _ in range(int(os.environ.get("KILLS", 3))):
            received, graded = _load_and_kill(running.direct, folder)
            stored = {rollout["rollout_id"]: rollout for rollout in read_rollouts(folder / NAME)}
            for name, text in received.items():
                (call,) = stored[name]["calls"]
                content = (
                    call["response"]["choices"][0]["message"]["content"]
                    if call["response"]
                    else _in_chunks(folder, name)
                )
                assert content.startswith(text)
            assert all(stored[name]["rewards"] == {"reward": 1.0} for name in graded)
            assert len(graded) > 8
    store = Store(folder)
    assert store.recover() > 0
    states = [call["state"] for rollout in rollouts(store) for call in rollout["calls"]]
    assert "open" not in states
    assert store._connection.execute("SELECT count(*) FROM chunks").fetchone()[0] == 0
    store.close()


def _in_chunks(folder, name):
    with sqlite3.connect(folder / NAME) as connection:
        found = connection.execute(
            "SELECT data FROM chunks JOIN parts USING (call) JOIN rollouts ON rollouts.id = rollout WHERE name = ?",
            (name,),
        ).fetchall()
    return "".join(json.loads(data)["choices"][0]["delta"]["content"] for (data,) in found)


def _load_and_kill(direct, folder):
    """Return the text that each client received, by rollout, and the rollouts whose reward was accepted."""
    process, address = start_recorder(direct, folder)
    received, streamed, graded, stop = {}, set(), set(), threading.Event()

    def client():
        with httpx.Client(timeout=60) as http:
            while not stop.is_set():
                try:
                    with http.stream("POST", f"{address}/v1/chat/completions", json={**HI, "stream": True}) as found:
                        name, answer = found.headers["x-topr-rollout"], found.headers["x-topr-answer"]
                        for line in found.iter_lines():
                            if line.startswith("data: {"):
                                word = json.loads(line[6:])["choices"][0]["delta"]["content"]
                                received[name] = received.get(name, "") + word
                    streamed.add(name)
                    reward = {"rollout_id": name, "answer": answer, "reward": 1}
                    if http.post(f"{address}/rewards", json=reward).status_code == 200:
                        graded.add(name)
                except httpx.TransportError:
                    return

    threads = [threading.Thread(target=client) for _ in range(8)]
    for thread in threads:
        thread.start()
    time.sleep(2)
    until(lambda: len(graded) > 8 and received.keys() - streamed)  # The kill hits a call that is open.
    process.send_signal(signal.SIGKILL)
    process.wait()
    stop.set()
    for thread in threads:
        thread.join()
    return received, graded


def test_a_recording_in_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    store = Store(tmp_path)
    store.begin("chat/completions", HI, None, 1)
    store.close()
    monkeypatch.setattr(os, "access", lambda *_: False)  # A chmod has no effect for root.
    assert count_rollouts(tmp_path / NAME) == 1
    assert [file.name for file in tmp_path.iterdir()] == [NAME]


def test_only_the_user_can_read_the_files(tmp_path):
    Store(tmp_path).close()
    (tmp_path / NAME).chmod(0o644)  # as an earlier version wrote it
    store = Store(tmp_path)
    store.begin("chat/completions", HI, None, 1)
    assert {file.name: file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == dict.fromkeys(
        (NAME, f"{NAME}-wal", f"{NAME}-shm"), 0o600
    )
    store.close()


def test_a_closed_store_ends_the_queries_of_the_page(tmp_path):
    store = Store(tmp_path)
    with store._read() as connection:
        store.close()
        query = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT count(*) FROM n"
        with pytest.raises(sqlite3.OperationalError, match="interrupted"):
            connection.execute(query)
