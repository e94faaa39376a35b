"""Store calls, answers and rewards in a SQLite database.

SQLite keeps each committed write after a kill, lets `topr train` read while the recorder writes, and can add a reward
to an old row. Parquet files can do none of this. A power failure can lose the last writes, because SQLite does not
flush each write to the disk.
"""

import json
import os
import sqlite3
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

from topr_trl.recording.protocols import PROTOCOLS

NAME = "recording.sqlite"
RATING = "rating"  # name of the reward that a person gives on the grading page
_FORMAT = "2"  # The number must change if this version cannot read the databases of earlier versions.
_REMEDIES = {  # by error code of SQLite
    sqlite3.SQLITE_FULL: "Free some space.",
    sqlite3.SQLITE_IOERR: "Check the disk, and free some space.",
    sqlite3.SQLITE_CANTOPEN: "Check that the file exists, and that you can write to its folder.",
    sqlite3.SQLITE_READONLY: "Allow writing to the file and its folder.",
    **dict.fromkeys((sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED), "Close other programs that have the file open."),
    **dict.fromkeys((sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB), "Restore the file, or use a different folder."),
}
_SECONDS_BETWEEN = 0.1  # pause between large writes. In this time, waiting small writes try again, and come first.
_SCHEMA = """
CREATE TABLE IF NOT EXISTS about (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS calls (
    id INTEGER PRIMARY KEY, started REAL NOT NULL, ended REAL, endpoint TEXT NOT NULL, state TEXT NOT NULL,
    request TEXT NOT NULL, response TEXT, error TEXT, served_model TEXT, model_revision TEXT, redacted INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS open_calls ON calls (id) WHERE state = 'open';
CREATE INDEX IF NOT EXISTS responses ON calls (json_extract(response, '$.id'))
    WHERE endpoint = 'responses' AND json_valid(response);
CREATE TABLE IF NOT EXISTS chunks (call INTEGER NOT NULL, data TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS chunks_of_call ON chunks (call);
CREATE TABLE IF NOT EXISTS rollouts (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, started REAL NOT NULL);
CREATE TABLE IF NOT EXISTS parts (
    rollout INTEGER NOT NULL, call INTEGER NOT NULL, choice INTEGER NOT NULL, conversation TEXT,
    number INTEGER NOT NULL, -- of the answer in its rollout, from 1
    PRIMARY KEY (rollout, call, choice)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS parts_of_call ON parts (call);
CREATE INDEX IF NOT EXISTS conversations ON parts (conversation) WHERE conversation IS NOT NULL;
CREATE TABLE IF NOT EXISTS continued ( -- by open call: place of the answer that it continues, and the answer's key
    call INTEGER PRIMARY KEY, conversation TEXT NOT NULL, rollout INTEGER NOT NULL, earlier INTEGER NOT NULL,
    choice INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS rewards (
    rollout INTEGER NOT NULL, answer INTEGER NOT NULL, -- 0: a reward of the whole rollout
    name TEXT NOT NULL, reward REAL NOT NULL, comment TEXT, given REAL NOT NULL, PRIMARY KEY (rollout, answer, name)
) WITHOUT ROWID;
"""


class State(StrEnum):
    """Progress of a call, as stored in the column `state`."""

    OPEN = "open"  # the answer is being received
    FINISHED = "finished"
    CUT = "cut"  # the end of the answer is missing
    FAILED = "failed"  # there is no answer


class StorageFullError(OSError):
    """Error for a database that cannot be written, for instance because the disk is full."""


@dataclass(frozen=True)
class Call:
    """Call that is being recorded.

    Attributes:
        id (`int`): Number of the call.
        rollouts (`list[str]`): Name of the rollout of each choice.
        answers (`list[int]`): Number of each choice in its rollout, from 1.
    """

    id: int
    rollouts: list[str]
    answers: list[int]


class Store:
    """Database of a recorder. Each write is one transaction.

    A write raises a StorageFullError if the database cannot be written. Only the user of this process can read the
    files of the database.

    Args:
        folder (`Path`): Folder of the database. The store creates a missing folder.

    Raises:
        ValueError: the database has a different format, or cannot be opened.
        OSError: the files belong to another user.
        StorageFullError: the database cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / NAME
        self._unended: set[int] = set()  # calls whose end could not be stored. `recover` ends them at the next start.
        self._one_large_write = threading.Lock()
        self._closed = threading.Event()
        self.path.touch(mode=0o600)
        for file in (self.path, *folder.glob(f"{NAME}-*")):  # SQLite gives new -wal and -shm files this mode.
            file.chmod(0o600)
        try:
            self._connection = sqlite3.connect(self.path, isolation_level=None)
            self._connection.executescript("PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL;" + _SCHEMA)
            with self._transaction() as run:
                run("INSERT OR IGNORE INTO about VALUES ('format', ?), ('id', ?)", (_FORMAT, uuid.uuid4().hex))
            _check_version(self._connection, self.path)
            # Large writes have their own connection, because a write and its checkpoint block users of a connection.
            self._for_large = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
            self._for_large.execute("PRAGMA synchronous = NORMAL")
        except sqlite3.DatabaseError as error:
            raise ValueError(f"{self.path} cannot be opened as a recording of topr record: {_why(error)}") from error

    def close(self) -> None:
        """Close the database, and stop running read queries, such as those of the grading page."""
        self._closed.set()
        with self._one_large_write:
            self._for_large.close()
        self._connection.close()

    @contextmanager
    def _transaction(self, other: sqlite3.Connection | None = None) -> Iterator[Any]:
        """Yield a function that runs an SQL statement. Commit at the end, or roll back after an error.

        Raises:
            StorageFullError: the database cannot be written.
        """
        connection = other or self._connection
        try:
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection.execute
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
        except sqlite3.DatabaseError as error:
            if _code(error) in _REMEDIES:
                raise StorageFullError(f"{self.path} cannot be written: {_why(error)}") from error
            raise

    def recover(self) -> int:
        """End the calls that an earlier recorder left open, and return their number. Partial answers are kept."""
        with _opened(self.path) as connection:
            calls = connection.execute("SELECT id, endpoint FROM calls WHERE state = 'open'").fetchall()
            for call, endpoint in calls:
                answer = PROTOCOLS[endpoint].assembler()
                for (data,) in connection.execute("SELECT data FROM chunks WHERE call = ? ORDER BY rowid", (call,)):
                    answer.add(json.loads(data))
                state = State.CUT if answer.answer else State.FAILED
                self.end(call, state, answer.answer, error="The recorder was killed, or the disk was full.")
        return len(calls)

    def begin(
        self,
        endpoint: str,
        request: Mapping[str, Any],
        rollout: str | None,
        choices: int,
        continues: str | int | None = None,
        served_model: str | None = None,
        model_revision: str | None = None,
        redacted: bool = False,
    ) -> Call:
        """Store the request of a call, choose the rollouts of its choices, and return the call.

        Args:
            endpoint (`str`): Path of the API, such as `chat/completions`.
            request (`Mapping[str, Any]`): Body of the request.
            rollout (`str` or `None`): Name of the rollout. If None, each choice gets a new rollout, but the first
                choice of a call that continues an earlier answer gets the rollout of that answer.
            choices (`int`): Number of choices that the request asks for.
            continues (`str` or `int`, *optional*): Key of the conversation that the request continues, or number of the
                call whose answer it continues.
            served_model (`str`, *optional*): Path or name of the model's weights.
            model_revision (`str`, *optional*): Revision of the weights.
            redacted (`bool`, defaults to `False`): Whether text of the request was blanked out.
        """
        now = time.time()
        continued: list[Any] = []
        new = uuid.uuid4().hex
        several = [f"{new}-{n}" for n in range(choices)] if choices > 1 else [new]
        names = [rollout] * choices if rollout else several
        with self._transaction() as run:
            for unended in self._unended:
                _end_continuation(run, unended, State.FAILED)
            if rollout is None and continues is not None:
                column = "call" if isinstance(continues, int) else "conversation"
                earlier = run(
                    "SELECT name, conversation, rollout, call, choice FROM parts "
                    f"JOIN rollouts ON rollouts.id = rollout WHERE {column} = ? AND conversation IS NOT NULL "
                    "ORDER BY call DESC LIMIT 1",  # Equal answers: people continue the latest.
                    (continues,),
                ).fetchone()
                if earlier is not None:
                    names[0], *continued = earlier
                    # Remove the key, so that another request that continues the same answer starts a new rollout.
                    run("UPDATE parts SET conversation = NULL WHERE (rollout, call, choice) = (?, ?, ?)", continued[1:])
            call = run(
                "INSERT INTO calls (started, endpoint, state, request, served_model, model_revision, redacted) "
                "VALUES (?, ?, 'open', ?, ?, ?, ?)",
                (now, endpoint, _dumped(request), served_model, model_revision, redacted),
            ).lastrowid
            if continued:
                run("INSERT INTO continued VALUES (?, ?, ?, ?, ?)", (call, *continued))
            earlier = run(
                "SELECT number FROM parts JOIN rollouts ON rollouts.id = rollout WHERE name = ? "
                "ORDER BY call DESC, choice DESC LIMIT 1",
                names[:1],  # Only the first rollout can have earlier answers.
            ).fetchone()
            numbers = Counter({names[0]: earlier[0] if earlier else 0})
            answers = []
            for choice, name in enumerate(names):
                numbers[name] += 1
                answers.append(numbers[name])
                run("INSERT OR IGNORE INTO rollouts (name, started) VALUES (?, ?)", (name, now))
                run("INSERT INTO parts SELECT id, ?, ?, NULL, ? FROM rollouts WHERE name = ?",
                    (call, choice, numbers[name], name))  # fmt: skip
        self._unended.clear()
        return Call(call, names, answers)

    def add_text(self, call: int, column: Literal["request", "response"], value: object) -> None:
        """Store a large request or answer. Threads can call this method.

        Args:
            call (`int`): Number of the call.
            column (`str`): `"request"` or `"response"`.
            value (`object`): JSON value.
        """
        text = _dumped(value)
        with self._one_large_write:
            with self._transaction(self._for_large) as run:
                run(f"UPDATE calls SET {column} = ? WHERE id = ?", (text, call))
            time.sleep(_SECONDS_BETWEEN)

    def add_chunk(self, call: int, data: str) -> None:
        """Store an event of a streamed answer.

        Args:
            call (`int`): Number of the call.
            data (`str`): Data of the event, which is JSON.
        """
        with self._transaction() as run:
            run("INSERT INTO chunks VALUES (?, ?)", (call, data))

    def end(
        self,
        call: int,
        state: State,
        response: Mapping[str, Any] | None = None,
        conversations: Mapping[int, str] | None = None,
        error: str | None = None,
        redacted: bool = False,
    ) -> None:
        """End a call, and store its answer.

        Args:
            call (`int`): Number of the call.
            state (`State`): State of the call.
            response (`Mapping[str, Any]`, *optional*): Body of the answer. None if there is no answer, or if `add_text`
                has stored it.
            conversations (`Mapping[int, str]`, *optional*): Key of the conversation that ends with a choice, by the
                index of the choice. A later request with this key continues the choice.
            error (`str`, *optional*): Error message.
            redacted (`bool`, defaults to `False`): Whether text of the response was blanked out.
        """
        text = None if response is None else _dumped(response)
        try:
            with self._transaction() as run:
                run(
                    "UPDATE calls SET ended = ?, state = ?, response = coalesce(?, response), error = ?, "
                    "redacted = redacted OR ? WHERE id = ?",
                    (time.time(), state, text, error, redacted, call),
                )
                run("DELETE FROM chunks WHERE call = ?", (call,))
                _end_continuation(run, call, state)
                for choice, key in (conversations or {}).items():
                    run("UPDATE parts SET conversation = ? WHERE call = ? AND choice = ?", (key, call, choice))
        except StorageFullError:
            self._unended.add(call)
            raise

    def set_reward(
        self, rollout: str, name: str, reward: float | None, comment: str | None = None, answer: int = 0
    ) -> None:
        """Set, replace or remove a reward of a rollout or of an answer.

        Args:
            rollout (`str`): Name of the rollout.
            name (`str`): Name of the reward.
            reward (`float` or `None`): Reward. None removes the reward.
            comment (`str`, *optional*): Comment.
            answer (`int`, defaults to 0): Number of the answer in its rollout, from 1. 0 stands for the whole rollout.

        Raises:
            LookupError: there is no such rollout or answer, or a reward is set for an answer whose call failed.
            ValueError: the reward is for an answer and the whole rollout has a reward of this name, or the reward is
                for the whole rollout and an answer has a reward of this name.
        """
        with self._transaction() as run:
            found = run("SELECT id FROM rollouts WHERE name = ?", (rollout,)).fetchone()
            if found is None:
                raise LookupError(
                    f"There is no rollout {rollout!r}. Use the id in the header x-topr-rollout of an answer."
                )
            place = (found[0], answer, name)
            if answer:
                _check_answer(run, found[0], answer, is_removed=reward is None)
            if reward is None:
                run("DELETE FROM rewards WHERE (rollout, answer, name) = (?, ?, ?)", place)
                return
            _check_kind(run, *place)
            run("REPLACE INTO rewards VALUES (?, ?, ?, ?, ?, ?)", (*place, reward, comment, time.time()))

    # Several threads call the following methods, so each method opens a new connection.

    def response(self, name: str) -> tuple[dict[str, Any], dict[str, Any], bool, int, int] | None:
        """Return a call of the Responses API: request, response, whether text was blanked out, call number and size.

        The size is the number of characters of request and response. Return None if there is no such response.

        Args:
            name (`str`): Id of the response.
        """
        with self._read() as connection:
            found = connection.execute(
                "SELECT request, response, redacted, id FROM calls "
                "WHERE endpoint = 'responses' AND json_valid(response) AND json_extract(response, '$.id') = ? "
                "ORDER BY id DESC LIMIT 1",
                (name,),
            ).fetchone()
        if found is None:
            return None
        request, response, redacted, call = found
        return json.loads(request), json.loads(response), bool(redacted), call, len(request) + len(response)

    def latest(
        self, graded: bool | None, before: int | None, limit: int, search: str | None = None
    ) -> list[dict[str, Any]]:
        """Return the latest rollouts, newest first. Each rollout has only its last call, without tokens.

        Each rollout also has `answer_rewards`, the mean and the count of the rewards of its answers by name. `answers`
        is the number of answers, without failed calls, and `ungraded` the number of these answers without a rating.

        Args:
            graded (`bool` or `None`): True returns only rollouts with a rating. False returns only rollouts with an
                answer that has no rating. None returns all rollouts.
            before (`int` or `None`): Return only rollouts whose `number` is smaller. None sets no limit.
            limit (`int`): Maximum number of rollouts.
            search (`str`, *optional*): Return only rollouts with this text, in a call, a comment or the rollout's name.
        """
        where = ["1"] if before is None else [f"id < {before:d}"]
        if graded is not None:
            where.append(f"EXISTS (SELECT 1 {_RATINGS})" if graded else f"EXISTS (SELECT 1 {_UNGRADED})")
        if search is not None:
            where.append(_MATCHES)
        pattern = "".join(f"\\{each}" if each in "\\%_" else each for each in search or "")
        with self._read() as connection:
            run = connection.execute
            found = run(
                f"SELECT id, name, (SELECT count(*) {_UNGRADED}), (SELECT count(*) {_ANSWERS}) "
                f"FROM rollouts WHERE {' AND '.join(where)} ORDER BY id DESC LIMIT :limit",
                {"limit": limit, "pattern": f"%{pattern}%"},
            ).fetchall()
            means = "SELECT name, avg(reward), count(*) FROM rewards WHERE rollout = ? AND answer > 0 GROUP BY name"
            return [
                {
                    "number": number, "ungraded": ungraded, "answers": answers,
                    "answer_rewards": {of: [mean, count] for of, mean, count in run(means, (number,))},
                    **_rollout(connection, number, name, last=True, tokens=False),
                }
                for number, name, ungraded, answers in found
            ]  # fmt: skip

    def rollout(self, name: str) -> dict[str, Any] | None:
        """Return a rollout with its calls and rewards, without tokens. Return None if there is no such rollout.

        Args:
            name (`str`): Name of the rollout.
        """
        with self._read() as connection:
            found = connection.execute("SELECT id FROM rollouts WHERE name = ?", (name,)).fetchone()
            return None if found is None else _rollout(connection, found[0], name, tokens=False)

    def totals(self, intervals: int) -> dict[str, Any]:
        """Return counts of rollouts, and mean rewards over time.

        Args:
            intervals (`int`): Maximum number of intervals in which to average each reward. The intervals of a name
                have about the same number of rewards.

        Returns:
            `dict`: numbers of all rollouts (`rollouts`), of rollouts with a reward (`rewarded`) and of rollouts with a
                rating (`graded`). `means` has, by reward name, the start time, mean and count of each interval.
        """
        means: dict[str, list[list[float]]] = {}
        with self._read() as connection:
            run = connection.execute
            (rollouts,) = run("SELECT count(*) FROM rollouts").fetchone()
            rewarded, graded = run(
                "SELECT count(DISTINCT rollout), count(DISTINCT rollout) FILTER (WHERE name = ?) FROM rewards",
                (RATING,),
            ).fetchone()
            for name, when, mean, count in run(
                "SELECT name, min(started), avg(reward), count(*) FROM (SELECT rewards.name, rollouts.started, reward, "
                "ntile(?) OVER (PARTITION BY rewards.name ORDER BY rollouts.id, answer) AS interval "
                "FROM rewards JOIN rollouts ON rollouts.id = rollout) GROUP BY name, interval ORDER BY name, interval",
                (intervals,),
            ):
                means.setdefault(name, []).append([when, mean, count])
        return {"rollouts": rollouts, "rewarded": rewarded, "graded": graded, "means": means}

    @contextmanager
    def _read(self) -> Iterator[sqlite3.Connection]:
        """Open the database for reading. Closing the store stops a query, which can take minutes on a large file."""
        with _opened(self.path) as connection:
            connection.set_progress_handler(self._closed.is_set, 10_000)
            yield connection


def _end_continuation(run: Any, call: int, state: State) -> None:
    """Restore the key of the answer that a call continues, unless the call has finished. Clients often retry."""
    continued = run("SELECT conversation, rollout, earlier, choice FROM continued WHERE call = ?", (call,)).fetchone()
    if continued and state != State.FINISHED:
        run("UPDATE parts SET conversation = ? WHERE (rollout, call, choice) = (?, ?, ?)", continued)
    run("DELETE FROM continued WHERE call = ?", (call,))


def _check_answer(run: Any, rollout: int, answer: int, is_removed: bool) -> None:
    """Check that the reward of an answer can be set, or removed if `is_removed`.

    Raises:
        LookupError: the rollout has no such answer, or a reward is set for an answer whose call failed.
    """
    query = "SELECT number, state FROM parts JOIN calls ON calls.id = call WHERE rollout = ?"
    states = dict(run(query, (rollout,)))
    if answer not in states:
        raise LookupError(
            f"There is no answer {answer}. Use the number in the header x-topr-answer, here 1 to {len(states)}."
        )
    if states[answer] == State.FAILED and not is_removed:
        raise LookupError(f"The call of answer {answer} failed. Grade an answer that arrived.")


def _check_kind(run: Any, rollout: int, answer: int, name: str) -> None:
    """Check that the rewards of a name in a rollout are all for the whole rollout, or all for answers.

    Raises:
        ValueError: the reward is for an answer, and the whole rollout has a reward of this name, or the reverse.
    """
    query = "SELECT min(answer) FROM rewards WHERE (rollout, name) = (?, ?) AND (answer > 0) != (? > 0)"
    (other,) = run(query, (rollout, name, answer)).fetchone()
    if other is not None:
        has, wanted = ("The whole rollout", "answers") if answer else (f"Answer {other}", "the whole rollout")
        raise ValueError(
            f"{has} has a reward named {name}. To grade {wanted}, first remove it (reward: null), or use another name."
        )


def _dumped(value: object) -> str:
    # JSON from a client can have unpaired surrogates. SQLite cannot store them as UTF-8, so json.dumps escapes them.
    return json.dumps(value)


def _code(error: sqlite3.DatabaseError) -> int:
    """Return the error code of SQLite, or 0 for an error of Python's module."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def _why(error: sqlite3.DatabaseError) -> str:
    """Return the message of a database error, with the remedy."""
    return f"{error}. {_REMEDIES.get(_code(error), 'Check that topr record wrote the file.')}"


def _check_version(connection: sqlite3.Connection, path: Path) -> None:
    """Check that a database has the format of this version.

    Raises:
        ValueError: the database has a different format.
    """
    found = connection.execute("SELECT value FROM about WHERE name = 'format'").fetchone()
    if found is None or found[0] != _FORMAT:
        raise ValueError(
            f"{path} has format {found and found[0]}, and this version of topr_trl reads format {_FORMAT}. Use the "
            "version that wrote it."
        )


_COLUMNS = ("started", "endpoint", "state", "request", "response", "error", "served_model", "model_revision",
            "redacted", "choice", "number")  # fmt: skip


# SQLite removes the tokens of a long answer ten times faster than Python parses them. An answer with NaN keeps its
# tokens, because SQLite does not accept NaN as JSON.
_PLACE = (  # position of the choice in the answer, which can have the choices in any order
    "coalesce((SELECT key FROM json_each(response, '$.choices') "
    "WHERE coalesce(json_extract(value, '$.index'), 0) = choice), 0)"
)
_TOKENS_REMOVED = (
    "json_remove(response, '$.prompt_token_ids', '$.input_messages', '$.output_messages', "
    + ", ".join(f"'$.choices[' || {_PLACE} || '].{name}'" for name in ("logprobs", "token_ids", "prompt_token_ids"))
    + ")"
)
_WITHOUT_TOKENS = f"iif(json_valid(response), {_TOKENS_REMOVED}, response)"

# Parts of queries about a rollout, whose number is `rollouts.id`.
_RATINGS = f"FROM rewards WHERE rollout = rollouts.id AND name = '{RATING}'"
_ANSWERS = "FROM parts JOIN calls ON calls.id = call WHERE rollout = rollouts.id AND state != 'failed'"
_UNGRADED = f"{_ANSWERS} AND NOT EXISTS (SELECT 1 {_RATINGS} AND answer IN (0, parts.number))"
_LIKE = "LIKE :pattern ESCAPE '\\'"
# Search the text values of the JSON, without field names and without values such as roles. If an answer has several
# choices, search only the choice of the rollout.
_MATCHES = f"""(
    name {_LIKE}
    OR EXISTS (SELECT 1 FROM rewards WHERE rollout = rollouts.id AND comment {_LIKE})
    OR EXISTS (
        SELECT 1 FROM parts JOIN calls ON calls.id = call, json_tree(
            '[' || iif(json_valid(request), request, json_quote(request)) || ',' ||
            iif(json_valid(response), {_TOKENS_REMOVED}, json_quote(response)) || ']'
        ) AS leaf
        WHERE rollout = rollouts.id AND leaf.type = 'text' AND leaf.atom {_LIKE}
        AND leaf.key NOT IN ('role', 'type', 'object', 'finish_reason')
        AND (leaf.path NOT LIKE '$[1].choices[%' OR leaf.path LIKE '$[1].choices[' || {_PLACE} || ']%')
    )
)"""


def _rollout(
    connection: sqlite3.Connection, number: int, name: str, last: bool = False, tokens: bool = True
) -> dict[str, Any]:
    """Return a rollout with all its calls, or only with its last call. Leave out tokens unless `tokens` is true.

    The rollout has `rewards` and `comments` for the whole rollout. Each call has the `rewards` and `comments` for its
    answer.
    """
    columns = [_WITHOUT_TOKENS if column == "response" and not tokens else column for column in _COLUMNS]
    limit = "LIMIT 1" if last else ""
    calls = connection.execute(
        f"SELECT {', '.join(columns)} FROM parts JOIN calls ON calls.id = call WHERE rollout = ? "
        f"ORDER BY call DESC, choice DESC {limit}",
        (number,),
    ).fetchall()
    found = [dict(zip(_COLUMNS, call, strict=True)) for call in reversed(calls)]
    for call in found:
        call["request"] = json.loads(call["request"])
        call["response"] = json.loads(call["response"]) if call["response"] else None
    whole: dict[str, Any] = {"rollout_id": name, "calls": found}
    graded = {0: whole, **{call["number"]: call for call in found}}
    for each in graded.values():
        each |= {"rewards": {}, "comments": {}}
    given = connection.execute("SELECT answer, name, reward, comment FROM rewards WHERE rollout = ?", (number,))
    for answer, of, reward, comment in given:
        if answer in graded:
            graded[answer]["rewards"][of] = reward
            graded[answer]["comments"] |= {of: comment} if comment else {}
    return whole


@contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a database for reading. A recorder may write to it at the same time.

    Raises:
        ValueError: the database has a different format, or cannot be read.
    """
    # If there is no write-ahead log, reading creates one. `immutable` prevents this in a folder that cannot be written.
    creates_log = not Path(f"{path}-wal").exists() and not os.access(path.parent, os.W_OK)
    mode = "immutable=1" if creates_log else "mode=ro"
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?{mode}", uri=True)) as connection:
            _check_version(connection, path)
            yield connection
    except sqlite3.DatabaseError as error:
        raise ValueError(f"{path} cannot be read as a recording of topr record: {_why(error)}") from error


def recording_in(path: Path) -> Path | None:
    """Return the path of a recording's database. Return None if the path is not a recording.

    Args:
        path (`Path`): File, or folder that `topr record` wrote.
    """
    file = path / NAME if path.is_dir() else path
    return file if file.suffix == Path(NAME).suffix and file.is_file() else None


def recording_id(path: Path) -> str:
    """Return the identifier of a recording. It stays the same while the recording grows.

    Args:
        path (`Path`): Database of the recording.
    """
    with _opened(path) as connection:
        return str(connection.execute("SELECT value FROM about WHERE name = 'id'").fetchone()[0])


def count_rollouts(path: Path) -> int:
    """Return the number of rollouts of a recording.

    Args:
        path (`Path`): Database of the recording.
    """
    with _opened(path) as connection:
        return int(connection.execute("SELECT count(*) FROM rollouts").fetchone()[0])


def read_rollouts(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rollouts of a recording. Each rollout and each call has all reward names. A missing reward is None.

    If a rollout has only one answer, not counting failed calls, the rewards of this answer are moved to the rollout.

    Args:
        path (`Path`): Database of the recording.
    """
    with _opened(path) as connection:
        connection.execute("BEGIN")  # All reads see the same state of the database.
        names = sorted(name for (name,) in connection.execute("SELECT DISTINCT name FROM rewards"))
        for number, name in connection.execute("SELECT id, name FROM rollouts ORDER BY id"):
            rollout = _rollout(connection, number, name)
            answers = [call for call in rollout["calls"] if call["state"] != State.FAILED]
            if len(answers) == 1:
                rollout["rewards"] |= answers[0]["rewards"]
                answers[0]["rewards"] = {}
            for each in (rollout, *rollout["calls"]):
                each["rewards"] = {reward: each["rewards"].get(reward) for reward in names}
            yield rollout
