"""Choose completions to read, and write them as plain JSON: one card per problem, with tags to filter by."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import isfinite
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from topr_trl.curation import counted
from topr_trl.data.rows import OF_FUNCTION, ROLLOUT
from topr_trl.data.trajectories import Rollouts
from topr_trl.diagnosis import agreements, answer_keys, kinds_of
from topr_trl.limits import DEAD_WEIGHT
from topr_trl.report.contents import Rows, messages_of, numbers_in
from topr_trl.rewards import CORRECT, INCORRECT, INVALID

_SHOWN_CHARACTERS = 4_000  # longer texts are cut
_SHOWN_TOKENS = 1_000
_DISAGREE = ["reward functions disagree"]
_MOST_COMPARED = 50  # maximum number of completions of a problem on which two reward functions are compared
_PER_TAG = 40  # maximum number of problems that are chosen for each tag
# Tags of test problems, in the order of the page.
_CHANGES = (
    "worse", "better", "still wrong", "still below the median", "still right", "still above the median",
)  # fmt: skip
Json = dict[str, Any]


@dataclass
class Section:
    """Cards about the same kind of completions.

    Attributes:
        title (`str`): Title.
        cards (`list[dict]`): Chosen cards. Each has its `tags`.
        counts (`dict[str, int]`): Number of problems with each tag, chosen or not.
        problems (`int`): Number of problems.
        completions (`int`): Number of completions.
    """

    title: str
    cards: list[Json]
    counts: dict[str, int]
    problems: int
    completions: int

    def __str__(self) -> str:
        return f"{self.title}: {counted(self.problems, 'problem')}, {counted(self.completions, 'completion')}."

    def keep(self, per_tag: int) -> None:
        """Keep the first `per_tag` cards with each tag, and the first `per_tag` cards without a tag."""
        seen = Counter[str]()
        kept = []
        for card in self.cards:
            tags = card["tags"] or [""]
            if any(seen[tag] < per_tag for tag in tags):
                kept.append(card)
            seen.update(tags)
        self.cards = kept


@dataclass
class Table:
    """Columns of completions as arrays.

    Attributes:
        name (`str`): Name of the model or of the table.
        table (`pa.Table`): Rows.
        problems (`list`): Id of the problem of each row, or its prompt.
        levels (`np.ndarray`): Distinct rewards in this table and in the other tables of the same page.
    """

    name: str
    table: pa.Table
    problems: list[Any]
    levels: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))

    @classmethod
    def of(cls, rows: Rows) -> "Table":
        """Read rows. Raise a ValueError if the rows have no column `prompt`, `prompt_ids` or `problem_id`."""
        table = rows.read()
        by_id = "problem_id" in table.column_names and table["problem_id"].null_count == 0
        names = ["problem_id"] * by_id + [name for name in ("prompt", "prompt_ids") if name in table.column_names]
        if not names:
            raise ValueError(f"{rows.path or rows.name} has rows without a column prompt, prompt_ids or problem_id.")
        problems = table[names[0]].to_pylist()
        if problems and not isinstance(problems[0], str | int | float):
            problems = [json.dumps(one, sort_keys=True) for one in problems]
        found = cls(rows.name, table, problems)
        found.levels = np.unique(found.rewards_N[~np.isnan(found.rewards_N)])
        return found

    @cached_property
    def of_functions(self) -> list[NDArray[np.float64]]:
        """Rewards of each reward function."""
        return [self.column(name) for name in self.table.column_names if name.startswith(OF_FUNCTION)]

    @cached_property
    def places(self) -> dict[Any, list[int]]:
        """Positions of the rows of each problem."""
        found: dict[Any, list[int]] = {}
        for place, problem in enumerate(self.problems):
            found.setdefault(problem, []).append(place)
        return found

    @cached_property
    def problem_N(self) -> NDArray[np.int64]:
        """Number of each row's problem, in the order of `places`."""
        numbers = {problem: number for number, problem in enumerate(self.places)}
        return np.array([numbers[problem] for problem in self.problems], dtype=np.int64)

    @cached_property
    def rewards_N(self) -> NDArray[np.float64]:
        """Reward of each row, or label if there is no column `reward`. NaN marks a missing value."""
        return self.column("reward" if "reward" in self.table.column_names else "label")

    @property
    def is_by_turn(self) -> bool:
        """Whether turns of a conversation have rewards of their own."""
        return not np.isnan(self.column("turn")).all()

    @property
    def has_two_values(self) -> bool:
        """Whether each completion is either right or wrong: rows have verdicts, or rewards have two values."""
        return "verdict" in self.table.column_names or len(self.levels) == 2

    @cached_property
    def values_N(self) -> NDArray[np.float64]:
        """1 for a right and 0 for a wrong completion, or the reward if `has_two_values` is false. NaN if unknown."""
        if "verdict" in self.table.column_names:
            known = {CORRECT: 1.0, INCORRECT: 0.0, INVALID: 0.0}
            return np.array([known.get(verdict, np.nan) for verdict in self.table["verdict"].to_pylist()])
        if not self.has_two_values:
            return self.rewards_N
        return np.where(np.isnan(self.rewards_N), np.nan, self.rewards_N == self.levels[1])

    def column(self, name: str) -> NDArray[np.float64]:
        """Return a column of numbers as float64, with NaN for null, or only NaN if the table lacks the column."""
        if name not in self.table.column_names:
            return np.full(self.table.num_rows, np.nan)
        return np.asarray(numbers_in(self.table, name, pa.float64()).to_numpy(), dtype=np.float64)

    @cached_property
    def greedy_N(self) -> NDArray[np.bool_]:
        """Whether each completion is greedy."""
        return self.column("temperature") == 0

    @cached_property
    def is_last_N(self) -> NDArray[np.bool_]:
        """Whether each row is the last row of its rollout, which has the answer. True for rows without a rollout."""
        if ROLLOUT not in self.table.column_names:
            return np.ones(self.table.num_rows, dtype=bool)
        rollouts = Rollouts.of(self.table[ROLLOUT].to_pylist())
        last_R = rollouts.order_N[rollouts.counts_R.cumsum() - 1]
        return np.isin(np.arange(self.table.num_rows), last_R)

    def texts(self, name: str) -> list[str]:
        """Return the text of all turns of each prompt or completion, or [] if the table lacks the column."""
        values = self.table[name].to_pylist() if name in self.table.column_names else []
        return ["".join(said for _, said in whole_turns(value)) for value in values]

    def mean_by_problem(self, which_N: NDArray[np.bool_]) -> dict[Any, float]:
        """Return the mean value of each problem over the selected rollouts. Leave out problems without a value."""
        found: dict[Any, list[float]] = {}
        for place in np.flatnonzero(which_N & self.is_last_N & ~np.isnan(self.values_N)).tolist():
            found.setdefault(self.problems[place], []).append(self.values_N[place])
        return {problem: float(np.mean(values)) for problem, values in found.items()}


def sections_of_tests(tests: Sequence[Table]) -> list[Section]:
    """Return a section with the test problems, changed problems first, or [] without tests.

    The section shows completions of up to 3 models.
    """
    if not tests:
        return []
    first, last = tests[0], tests[-1]
    by_greedy = all(one.greedy_N.any() for one in tests)
    means = [one.mean_by_problem(one.greedy_N if by_greedy else ~one.greedy_N) for one in (first, last)]
    middle = 0.5 if last.has_two_values else float(np.nanmedian(last.values_N))
    right, wrong = ("right", "wrong") if last.has_two_values else ("above the median", "below the median")
    tags, order = {}, {}
    for problem in first.places:
        before, after = (found.get(problem, np.nan) for found in means)
        order[problem] = abs(after - before) if before == before and after == after else 0.0
        if np.isnan(after) or np.isnan(before):
            tags[problem] = ["not answered by all models"]
        elif after != before:
            tags[problem] = ["better" if after > before else "worse"]
        else:
            tags[problem] = ["still " * (len(tests) > 1) + (right if after >= middle else wrong)]
        tags[problem] += _DISAGREE * any(_disagree(one, one.places.get(problem, [])) for one in tests)
    ranks = {name: rank for rank, name in enumerate(_CHANGES)}
    tags = dict(sorted(tags.items(), key=lambda one: ranks.get(one[1][0], len(ranks))))
    shown = tests if len(tests) <= 3 else [first, tests[len(tests) // 2], last]
    title = "Test problems, by greedy answers" if by_greedy else "Test problems, by sampled answers"
    return [_section(title, shown, tags, order)]


def section_of_rows(rows: Table) -> Section:
    """Return a section with rows: by kind of problem if completions are right or wrong, otherwise by reward."""
    kinds, order = _by_reward(rows)
    if rows.has_two_values:
        kinds, order = _kinds_of_conversations(rows) if rows.is_by_turn else _kinds(rows), {}
    tags: dict[Any, list[str]] = {}
    for problem, place in rows.places.items():
        missing = ["without a reward"] * bool(np.isnan(rows.values_N[place]).all())
        tags[problem] = [*kinds.get(problem, []), *missing, *_DISAGREE * _disagree(rows, place)]
    return _section(rows.name, [rows], tags, order)


def _kinds(rows: Table) -> dict[Any, list[str]]:
    """Return the kind of each problem with rewards, see `topr_trl.diagnosis`."""
    known = np.flatnonzero(~np.isnan(rows.values_N) & ~rows.greedy_N & rows.is_last_N)
    names = [name for name in ("extracted", "completion") if name in rows.table.column_names]
    keys = answer_keys(*(rows.table[name].take(known).to_pylist() for name in names)) or [""] * len(known)
    found, problem_N = np.unique(rows.problem_N[known], return_inverse=True)
    kinds = kinds_of(rows.values_N[known] == 1, problem_N, agreements(problem_N, keys)) if len(known) else []
    names = list(rows.places)
    return {names[number]: [kind] for number, kind in zip(found.tolist(), kinds, strict=True)}


def _kinds_of_conversations(rows: Table) -> dict[Any, list[str]]:
    """Return a tag for each conversation: whether its answers are right, wrong, or right and wrong."""
    found = {}
    for problem, place in rows.places.items():
        values = rows.values_N[place]
        signs = ["right"] * bool((values == 1).any()) + ["wrong"] * bool((values == 0).any())
        found[problem] = [f"{' and '.join(signs)} answers"] * bool(signs)
    return found


def _by_reward(rows: Table) -> tuple[dict[Any, list[str]], dict[Any, float]]:
    """Return tags for the 10% of problems with the highest and the lowest mean rewards, and distances from the middle.

    The middle is the mean of the two quantiles that bound these problems.
    """
    means = rows.mean_by_problem(np.ones(len(rows.values_N), bool))
    low, high = np.quantile(list(means.values()) or [0.0], [0.1, 0.9])
    if low == high:  # For instance, all rewards are equal.
        return {}, {}
    tags = {
        problem: ["highest rewards"] * bool(mean >= high) + ["lowest rewards"] * bool(mean <= low)
        for problem, mean in means.items()
    }
    return tags, {problem: abs(mean - (low + high) / 2) for problem, mean in means.items()}


def section_of_logged(rows: Table) -> Section:
    """Return a section with the rows that a trainer logged, by the weight of negatives."""
    R_N, weight_N = rows.column("advantage"), rows.column("weight")
    dead = f"dead negative (w < {DEAD_WEIGHT:g})"
    kinds = np.select(
        [R_N > 0, R_N == 0, weight_N < DEAD_WEIGHT, weight_N < 1, weight_N >= 1],
        ["positive", "R = 0", dead, "tapered negative (w < 1)", "negative with w = 1"],
        "weight not known",
    )  # fmt: skip
    tags = {problem: sorted({str(kinds[i]) for i in place}) for problem, place in rows.places.items()}
    return _section(rows.name, [rows], tags, {})


def _disagree(rows: Table, places: Sequence[int]) -> bool:
    """Return whether two reward functions rank a pair of completions in opposite orders.

    Only the first `_MOST_COMPARED` completions are compared.
    """
    if len(rows.of_functions) < 2 or len(places) < 2:
        return False
    some = [one[list(places[:_MOST_COMPARED])] for one in rows.of_functions]
    signs = [np.sign(one[:, None] - one[None, :]) for one in some]
    return any(bool((a * b < 0).any()) for n, a in enumerate(signs) for b in signs[:n])


def _section(title: str, tables: Sequence[Table], tags: dict[Any, list[str]], order: dict[Any, float]) -> Section:
    """Return a section with problems for each tag.

    Problems with the largest values in `order` are chosen. Among equal values, the choice is random.
    """
    counts = Counter(tag for found in tags.values() for tag in found)
    mixed = np.random.default_rng(0).permutation(len(tags))
    ranked = sorted(zip(mixed.tolist(), tags, strict=True), key=lambda one: (-order.get(one[1], 0.0), one[0]))
    chosen: dict[Any, None] = {}
    for tag in counts:
        of_tag = [problem for _, problem in ranked if tag in tags[problem]]
        chosen |= dict.fromkeys(of_tag[:_PER_TAG])
    if not counts:
        chosen = dict.fromkeys([problem for _, problem in ranked[:_PER_TAG]])
    cards = [_card(problem, tables, tags[problem]) for problem in chosen]
    return Section(title, cards, dict(counts), len(tags), sum(one.table.num_rows for one in tables))


def _card(problem: Any, tables: Sequence[Table], tags: list[str]) -> Json:
    with_rows = [one for one in tables if problem in one.places]
    start = with_rows[0]
    row = start.table.slice(start.places[problem][0], 1).to_pylist()[0]
    columns = []
    for one in with_rows:
        place = one.places[problem]
        columns.append({"name": one.name, "of": len(place), "answers": [_answer(one, i) for i in _shown(one, place)]})
    prompt = turns_of(row.get("prompt", "(token ids only)"))
    return {"prompt": prompt, "truth": _cut(row.get("answer")), "tags": tags, "columns": columns}


def _shown(rows: Table, places: Sequence[int]) -> list[int]:
    """Return the positions of up to four rows: a greedy row, and the best, the middle and the worst sampled row."""
    greedy = [i for i in places if rows.greedy_N[i]]
    sampled = sorted(
        (i for i in places if i not in greedy), key=lambda i: -np.nan_to_num(rows.values_N[i], nan=-np.inf)
    )
    picked = [*greedy[:1], *sampled[:1], *sampled[len(sampled) // 2 :][:1], *sampled[-1:]]
    return sorted(set(picked)) if rows.is_by_turn else list(dict.fromkeys(picked))


_LABELS = {"greedy": ("temperature", 0), "no answer": ("verdict", INVALID), "cut": ("finish_reason", "length")}


def _answer(rows: Table, place: int) -> Json:
    row = rows.table.slice(place, 1).to_pylist()[0]
    value = float(rows.values_N[place])
    labels = [f"turn {row['turn']}"] if row.get("turn") else []
    labels += [label for label, (column, marked) in _LABELS.items() if row.get(column) == marked]
    numbers = {name: row.get(name) for name in ("reward", "advantage", "weight", "log_ratio")}
    functions = {name: name.removeprefix(OF_FUNCTION) for name in row if name.startswith(OF_FUNCTION)}
    numbers |= {name if plain in numbers else plain: row[name] for name, plain in functions.items()}
    shown = {name: float(f"{number:.3g}") for name, number in numbers.items() if _is_number(number)}
    if rows.has_two_values:
        shown.pop("reward", None)
    return {
        "turns": turns_of(row["completion"]) if "completion" in row else [{"role": "", "text": "(token ids only)"}],
        "right": None if not rows.has_two_values or value != value else bool(value),
        "labels": labels, "numbers": shown, "extracted": _cut(row.get("extracted")), "tokens": _tokens(row),
    }  # fmt: skip


def _tokens(row: Json) -> list[list[Any]]:
    """Return text, log-ratio and weight of the first 1,000 tokens, or [] if no trainer logged them."""
    columns = [row.get(name) or [] for name in ("tokens", "token_log_ratio", "token_weight")]
    return [
        [text, *(float(f"{number:.2g}") if _is_number(number) else None for number in numbers)]
        for text, *numbers in zip(*columns, strict=True)
    ][:_SHOWN_TOKENS]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and isfinite(value)  # JSON has neither NaN nor infinity


def turns_of(text: Any) -> list[Json]:
    """Return the turns of a conversation, with long texts cut. Plain text becomes one turn without a role."""
    return [{"role": role, "text": _cut(said)} for role, said in whole_turns(text)]


def whole_turns(text: Any) -> list[tuple[str, str]]:
    """Return role and text of each turn of a conversation. Plain text becomes one turn with the role `""`."""
    messages = messages_of(text)
    if messages is None:
        return [("", "" if text is None else str(text))]
    return [(turn["role"], _text_of(turn)) for turn in messages]


def _text_of(turn: Json) -> str:
    content = turn.get("content")
    if isinstance(content, list):
        content = "\n".join(str(part.get("text", part)) if isinstance(part, dict) else str(part) for part in content)
    parts = [turn.get("reasoning_content") and f"[thinking]\n{turn['reasoning_content']}\n[/thinking]", content]
    calls = turn.get("tool_calls")
    parts += [json.dumps(calls, indent=1, ensure_ascii=False)] if calls else []
    return "\n".join(str(part) for part in parts if part)


def _cut(value: Any) -> str:
    text = "" if value is None else str(value)
    left = len(text) - _SHOWN_CHARACTERS
    return text if left <= 0 else f"{text[:_SHOWN_CHARACTERS]}… ({left:,} more characters)"


def tables_of(found: Iterable[Rows]) -> list[Table]:
    """Read tables, and leave out empty tables. The rewards of all tables together tell which completions are right."""
    tables = [table for table in map(Table.of, found) if table.table.num_rows]
    levels = np.unique(np.concatenate([np.empty(0), *(one.levels for one in tables)]))
    for table in tables:
        table.levels = levels
    return tables
