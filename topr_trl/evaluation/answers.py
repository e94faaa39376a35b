"""Read the final answers of completions as arrays of P problems and S samples per problem."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path

import numpy as np
import pyarrow as pa
from datasets import Dataset
from numpy.typing import NDArray

from topr_trl.baseline import group_numbers, is_missing
from topr_trl.data.rows import checked_column, hash_prompts, id_column, text_column
from topr_trl.data.sampler_logps import GREEDY, TEMPERATURE
from topr_trl.data.tables import columns_of, from_table, read_shard, shards_of
from topr_trl.data.usable_rows import check_usable
from topr_trl.rewards import CORRECT, INVALID, VERDICTS

ProblemId = int | float | str

INVALID_CODE, RIGHT_CODE = -1, 0
OPTIONAL = ("problem_id", "verdict", "score", "subject", "level", TEMPERATURE)
GROUPINGS = ("subject", "level")
_NO_GROUP = "none"  # name for problems without a subject or level
_FILL_OR_DROP = "Fill or drop the column."


@dataclass(frozen=True)
class Samples:
    """Final answers of S samples for each of P problems. [`samples_of`] converts rows to this class.

    Attributes:
        codes_PS (`np.ndarray`):
            Answers as integers, shape (P, S): -1 for an invalid answer, 0 for the true answer, and 1, 2, ... for the
            other answers to the problem. Equal answers to a problem have the same code.
        problem_ids (`Sequence[int | float | str]`):
            Ids of the P problems.
        truths (`Sequence[str]`):
            True answers to the P problems.
        scores_PS (`np.ndarray`, *optional*):
            Scores of the samples, for instance from a verifier, shape (P, S), float64.
        groups (`Mapping[str, Sequence[str]]`, *optional*, defaults to `{}`):
            Subject and level of each problem, if they are known: `{"subject": P names, "level": P names}`.
        greedy_P (`np.ndarray`, *optional*):
            Whether the greedy answer (temperature 0) to each problem is correct, shape (P,). `None` without greedy
            answers.
        temperatures (`Sequence[float]`, *optional*, defaults to `()`):
            Distinct temperatures of the samples, in ascending order. Empty if a sample's temperature is unknown.
    """

    codes_PS: NDArray[np.int64]
    problem_ids: Sequence[ProblemId]
    truths: Sequence[str]
    scores_PS: NDArray[np.float64] | None = None
    groups: Mapping[str, Sequence[str]] = field(default_factory=dict)
    greedy_P: NDArray[np.bool_] | None = None
    temperatures: Sequence[float] = ()

    @property
    def num_problems(self) -> int:
        """Number of problems, P."""
        return len(self.codes_PS)

    @property
    def num_samples(self) -> int:
        """Number of samples per problem, S."""
        return self.codes_PS.shape[1]

    @property
    def num_rows(self) -> int:
        """Total number of samples and greedy answers."""
        return self.codes_PS.size + (0 if self.greedy_P is None else len(self.greedy_P))

    def check_k(self, k: int) -> None:
        """Raise a ValueError unless k is between 1 and the number of samples."""
        if not 1 <= k <= self.num_samples:
            raise ValueError(f"k must be between 1 and the number of samples, {self.num_samples}; it is {k}.")


def encode(
    answers: Sequence[Sequence[str | None]],
    truths: Sequence[str],
    scores: Sequence[Sequence[float]] | None = None,
    problem_ids: Sequence[ProblemId] | None = None,
    groups: Mapping[str, Sequence[str]] | None = None,
) -> Samples:
    """Convert lists of answers to [`Samples`].

    Args:
        answers (`Sequence[Sequence[str | None]]`):
            S answers for each of P problems. Equal answers to a problem must be the same text. `None` is an invalid
            answer.
        truths (`Sequence[str]`):
            True answers to the P problems. A correct answer must be the same text as the true answer.
        scores (`Sequence[Sequence[float]]`, *optional*):
            Finite score of each answer.
        problem_ids (`Sequence[int | float | str]`, *optional*):
            Ids of the problems. `None` numbers them from 0.
        groups (`Mapping[str, Sequence[str]]`, *optional*):
            Subject and level of each problem, as in [`Samples`].

    Returns:
        [`Samples`]: the encoded answers.

    Raises:
        ValueError: there is no problem or no sample, the number of truths is wrong, problems differ in their number of
            samples, an answer or truth is not text, a score is missing or not finite, a group does not have one name
            per problem, or an id is missing or not unique.
    """
    if len(answers) == 0 or len(answers) != len(truths):
        raise ValueError(
            f"Give at least one problem, and one true answer for each: there are {len(answers)} problems and "
            f"{len(truths)} truths."
        )
    _check_texts(answers, truths)
    ids = list(range(len(answers))) if problem_ids is None else problem_ids
    if len(set(group_numbers("problem_ids", ids, len(answers)).tolist())) < len(answers):
        raise ValueError("problem_ids: two problems have the same id. Give each problem its own id.")
    num_samples = max(map(len, answers))
    odd = [(ids[i], len(row)) for i, row in enumerate(answers) if len(row) != num_samples]
    if odd or num_samples == 0:
        some = ", ".join(f"problem {problem!r}: {count}" for problem, count in odd[:3])
        raise ValueError(
            f"Every problem needs the same number of samples; the maximum is {num_samples}, and {len(odd)} of "
            f"{len(answers)} problems have fewer ({some})."
        )
    for column, names in (groups or {}).items():
        if len(names) != len(answers):
            raise ValueError(
                f"groups[{column!r}] has {len(names)} names. Give one for each of {len(answers)} problems."
            )
    codes = np.empty((len(answers), num_samples), dtype=np.int64)
    for row, (given, truth) in enumerate(zip(answers, truths, strict=True)):
        known: dict[str, int] = {truth: RIGHT_CODE}
        codes[row] = [INVALID_CODE if a is None else known.setdefault(a, len(known)) for a in given]
    return Samples(codes, ids, truths, _checked_scores(scores, codes.shape), dict(groups or {}))


def _check_texts(answers: Sequence[Sequence[str | None]], truths: Sequence[str]) -> None:
    """Raise a ValueError if an answer is neither text nor None, or a truth is not text.

    A text instead of a list of answers would count as one answer per character. A number is never equal to a text.
    """
    for name, texts in (("truths", truths), *((f"answers[{p}]", given) for p, given in enumerate(answers))):
        types = str if name == "truths" else str | None
        wrong = [texts] if isinstance(texts, str) else [text for text in texts if not isinstance(text, types)]
        if wrong:
            raise ValueError(
                f"{name} must be a list of texts{'' if name == 'truths' else ', or None for an invalid answer'}; "
                f"found {wrong[0]!r}. Write numbers as text."
            )


def _checked_scores(scores: Sequence[Sequence[float]] | None, shape: tuple[int, ...]) -> NDArray[np.float64] | None:
    if scores is None:
        return None
    if len(scores) != shape[0] or any(len(row) != shape[1] for row in scores):
        raise ValueError(f"There must be one score for each of {shape[0]} x {shape[1]} samples.")
    array = np.array(scores, dtype=np.float64)
    if bad := int((~np.isfinite(array)).sum()):
        raise ValueError(f"Scores must be finite numbers; {bad} of {array.size} are not.")
    return array


def samples_of(rows: Dataset) -> Samples:
    """Convert rows with extracted answers to [`Samples`]. Problems are in order of first appearance.

    Example:

    ```python
    >>> from datasets import Dataset
    >>> from topr_trl import samples_of

    >>> rows = {"problem_id": [0, 0, 1, 1], "answer": ["7", "7", "8", "8"], "extracted": ["7", "9", None, "8"]}
    >>> samples_of(Dataset.from_dict(rows)).codes_PS.tolist()
    [[0, 1], [-1, 0]]
    ```

    Args:
        rows ([`~datasets.Dataset`]):
            Rows from [`score_completions`], with the same number of rows for each problem. Columns:

            - `answer`, `extracted`: true answer, and answer of the completion (null or empty if it is invalid).
            - `problem_id`: problem of the row. Without this column, rows with equal `prompt` share a problem.
            - `verdict` (optional): `"correct"`, `"incorrect"` or `"invalid"`. Without this column, an answer is correct
              if `extracted` equals `answer`.
            - `score` (optional): score of the completion, for instance from a verifier.
            - `subject`, `level` (optional): subject and level of the problem.
            - `temperature` (optional): a row with temperature 0 is the greedy answer to its problem and not a sample.
              If all rows have temperature 0, they are also the samples.

    Returns:
        [`Samples`]: the answers as arrays.

    Raises:
        ValueError: there is no row, a column is missing or has a wrong value, the rows of a problem differ in answer,
            subject or level, or the problems differ in their number of samples or greedy rows.
    """
    columns = rows.column_names
    check_usable(columns, "answers")
    if len(rows) == 0:
        raise ValueError("There is no row to evaluate.")
    rows_of, sampled, greedy, temperatures = rows_by_problem(rows)
    truths = _one_value_each(text_column(rows, "answer"), rows_of, "answer")
    extracted = text_column(rows, "extracted", may_be_empty=True)
    verdicts = verdict_column(rows) if "verdict" in columns else None

    def answer_of(i: int, truth: str) -> str | None:
        if verdicts is None:
            return extracted[i] or None
        if verdicts[i] == CORRECT:
            return truth
        # A judge can reject an answer with the text of the true answer. The suffix keeps the two texts different.
        wrong = extracted[i] if extracted[i] != truth else f"{truth} (incorrect)"
        return None if verdicts[i] == INVALID else wrong or None

    answers = [[answer_of(i, truth) for i in place] for place, truth in zip(sampled, truths, strict=True)]
    scores = None
    if "score" in columns:
        column = checked_column(rows, "score", lambda score: isinstance(score, int | float), "numbers", _FILL_OR_DROP)
        scores = [[column[i] for i in place] for place in sampled]
    groups = {name: _one_value_each(_names(rows, name), rows_of, name) for name in GROUPINGS if name in columns}
    right = [answer_of(i, truth) == truth for i, truth in zip(greedy, truths, strict=False)]
    return replace(
        encode(answers, truths, scores, list(rows_of), groups),
        greedy_P=np.array(right) if greedy else None,
        temperatures=temperatures,
    )


def rows_by_problem(
    rows: Dataset,
) -> tuple[dict[ProblemId, list[int]], list[list[int]], list[int], list[float]]:
    """Return the positions of rows by problem, of samples, and of greedy rows, and the temperatures of the samples.

    The temperatures are distinct and in ascending order. The list is empty if a sample's temperature is unknown.
    Without a column `problem_id`, rows with equal prompts share a problem.

    Raises:
        ValueError: an id or prompt is missing, a temperature is not a number of at least 0, or a problem has no greedy
            row or several (see `without_greedy`).
    """
    ids = id_column(rows, "problem_id").tolist() if "problem_id" in rows.column_names else _named(rows)
    rows_of: dict[ProblemId, list[int]] = {}
    for i, problem in enumerate(ids):
        rows_of.setdefault(problem, []).append(i)
    temperatures = temperatures_of(rows)
    sampled, greedy = without_greedy(rows_of, temperatures)
    known = {temperatures[i] for place in sampled for i in place}
    return rows_of, sampled, greedy, [] if None in known else sorted(value for value in known if value is not None)


def temperatures_of(rows: Dataset) -> list[float | None]:
    """Return the temperature of each row, or None if it is unknown. Rounding makes float32 and float64 values equal."""
    if TEMPERATURE not in rows.column_names:
        return [None] * len(rows)
    values = checked_column(
        rows, TEMPERATURE, lambda value: value is None or (isinstance(value, int | float) and 0 <= value < inf),
        "numbers of at least 0", _FILL_OR_DROP,
    )  # fmt: skip
    return [None if value is None else round(float(value), 6) for value in values]


def without_greedy(
    rows_of: Mapping[ProblemId, list[int]], temperatures: Sequence[float | None]
) -> tuple[list[list[int]], list[int]]:
    """Return the positions of each problem's samples, and the position of each problem's greedy row.

    If there are no greedy rows, the second list is empty. If all rows are greedy, they are also the samples.

    Raises:
        ValueError: there are greedy rows, but a problem has no greedy row or several.
    """
    greedy = [[i for i in place if temperatures[i] == GREEDY] for place in rows_of.values()]
    if not any(greedy):
        return list(rows_of.values()), []
    if odd := [(problem, len(place)) for problem, place in zip(rows_of, greedy, strict=True) if len(place) != 1]:
        raise ValueError(
            f"If any problem has a greedy row (`{TEMPERATURE}` 0), each problem needs exactly one; {len(odd)} of "
            f"{len(rows_of)} problems have none or several, such as problem {odd[0][0]!r} with {odd[0][1]}. Drop or "
            f"add greedy rows, or drop the column `{TEMPERATURE}` to count all rows as samples."
        )
    sampled = [[i for i in place if temperatures[i] != GREEDY] for place in rows_of.values()]
    return (sampled if any(sampled) else list(rows_of.values())), [place[0] for place in greedy]


def _named(rows: Dataset) -> list[str]:
    """Return a problem id for each row: the end and a hash of its prompt. Whole prompts would take more memory."""
    prompts = rows.with_format(None)["prompt"][:]
    return [f"…{str(prompt)[-60:]} ({key})" for prompt, key in zip(prompts, hash_prompts(prompts), strict=True)]


def _names(rows: Dataset, name: str) -> list[str]:
    """Return the subject or level of each row as text, or `"none"` if the value is missing."""
    types = int | float | str | None
    values = checked_column(rows, name, lambda v: isinstance(v, types), "numbers or text", _FILL_OR_DROP)
    return [_NO_GROUP if is_missing(value) else str(value) for value in values]


def verdict_column(rows: Dataset) -> list[str]:
    """Return the column `verdict`. Any value but `correct`, `incorrect` or `invalid` raises a ValueError."""
    return checked_column(rows, "verdict", lambda verdict: verdict in VERDICTS, ", ".join(VERDICTS))


def _one_value_each(column: list[str], rows_of: Mapping[ProblemId, list[int]], name: str) -> list[str]:
    if odd := [problem for problem, place in rows_of.items() if len({column[i] for i in place}) > 1]:
        raise ValueError(
            f"All rows of a problem need the same `{name}`; it differs in {len(odd)} problems, such as "
            f"problem {odd[0]!r}."
        )
    return [column[place[0]] for place in rows_of.values()]


def read_samples(path: Path) -> Samples:
    """Read [`Samples`] from a folder of shards or a file.

    Raises:
        FileNotFoundError: the file or a shard does not exist.
        ValueError: a file cannot be read, only some shards have an optional column, or [`samples_of`] rejects the rows.
    """
    shards = shards_of(path)
    columns = [set(columns_of(shard)) for shard in shards]
    for name in OPTIONAL:
        count = sum(name in found for found in columns)
        if 0 < count < len(shards):
            raise ValueError(f"{path}: only {count} of {len(shards)} files have the column {name!r}.")
    of_all = set.intersection(*columns)
    try:
        check_usable(list(of_all), "answers")
        names = [name for name in ("answer", "extracted", *OPTIONAL) if name in of_all]
        return samples_of(from_table(pa.concat_tables([_read(shard, names) for shard in shards])))
    except (ValueError, pa.ArrowInvalid) as error:
        raise ValueError(f"{path}: {error}") from error


def _read(shard: Path, names: list[str]) -> pa.Table:
    """Read columns of a shard. If `names` lacks `problem_id`, derive this column from the prompts."""
    if "problem_id" in names:
        return read_shard(shard, names)
    table = read_shard(shard, [*names, "prompt"])
    problems = pa.array(_named(from_table(table)), pa.string())
    return table.drop_columns("prompt").append_column("problem_id", problems)


def run_names(first: Path, second: Path) -> list[str]:
    """Return different names for two runs: the last path components that differ. Equal paths raise a ValueError."""
    paths = first.resolve(), second.resolve()
    if paths[0] == paths[1]:
        raise ValueError(f"A run cannot be compared with itself, but --input and --compare are both {first}.")
    backwards = zip(*(reversed(path.parts) for path in paths), strict=False)
    differ = next(names for names in backwards if names[0] != names[1])
    # If one path is a suffix of the other path, the differing component of the shorter path is the root. Use the last
    # component of the shorter path instead of the root.
    names = [path.name if name == path.anchor else name for name, path in zip(differ, paths, strict=True)]
    return names if names[0] != names[1] else ["-".join(path.parts[1:]) for path in paths]  # for instance, /b and /b/b
