r"""Define the task MATH (arXiv 2103.03874): few-shot prompts, and answers in `\boxed{}`, judged with math-verify."""

import random
import re
from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from datasets import Dataset, concatenate_datasets, get_dataset_config_names, get_dataset_split_names, load_dataset
from tqdm.auto import tqdm

from topr_trl.data.rows import need_columns, text_column
from topr_trl.data.tables import TABLE_SUFFIXES, read_table
from topr_trl.rewards import CORRECT, INVALID, Judgement
from topr_trl.sandbox.worker_pool import WorkerPool

# Texts that end a completion. Without them, a base model continues with another problem, as in the prompt.
STOP_STRINGS = ("\nProblem:",)

# Four worked examples of different subjects, written for this package.
EXEMPLARS = (
    (
        "Find all real $x$ with $2x^2 - 7x + 3 = 0$. Separate your answers by a comma.",
        r"We look for factors: $(2x - 1)(x - 3) = 2x^2 - 6x - x + 3 = 2x^2 - 7x + 3$. A product is zero if one of its "
        r"factors is, so $x = \frac{1}{2}$ or $x = 3$. The answer is $\boxed{\frac{1}{2}, 3}$.",
    ),
    (
        "A bag holds 4 red and 6 blue marbles. Two are drawn without replacement. What is the probability that both "
        "are red? Express your answer as a common fraction.",
        r"There are $\binom{10}{2} = 45$ pairs of marbles, all equally likely, and $\binom{4}{2} = 6$ of them are red. "
        r"The probability is $\frac{6}{45} = \frac{2}{15}$. The answer is $\boxed{\frac{2}{15}}$.",
    ),
    (
        "A right triangle has legs of 5 and 12. What is the radius of the circle that touches all three of its sides?",
        r"The hypotenuse is $\sqrt{5^2 + 12^2} = 13$. The area is $\frac{5 \cdot 12}{2} = 30$, and it is also "
        r"the radius times half the perimeter, $r \cdot \frac{5 + 12 + 13}{2} = 15r$. So $r = 2$. "
        r"The answer is $\boxed{2}$.",
    ),
    (
        "What is the remainder when $7^{50}$ is divided by $5$?",
        r"Modulo 5 we have $7 \equiv 2$, and the powers of 2 are $2, 4, 3, 1$, then again from the start. As "
        r"$50 = 4 \cdot 12 + 2$, the remainder is that of $2^2$. The answer is $\boxed{4}$.",
    ),
)

_LONGEST = 1_000  # in characters; a longer answer is correct only if it is literally equal to the correct answer
_LAST_CHARACTERS = 100_000  # number of characters at the end of a text that are searched for boxes
_TOKEN = re.compile(
    r"(?P<box>\\{1,4}(?:boxed|fbox)\s{0,9}\{)|"  # The limit of 4 avoids quadratic time on many backslashes.
    r"\\{1,4}(?:boxed|fbox)(?:\s{0,9}(?P<fraction>\\[dt]?frac\s?(?:\d\d|\{[^{}]{1,99}\}\{[^{}]{1,99}\}))|"
    r"\s{1,9}(?P<bare>[^\s{}$\\]+)|(?P<digit>\d))|\\.|(?P<brace>[{}])",
    re.S,
)


def extract_boxed(text: str) -> str | None:
    r"""Return the content of the last closed box: `\boxed{...}`, `\fbox{...}` or `\boxed 5`.

    If boxes are nested, the inner box counts as the last. Only the last 100,000 characters of the text are searched.

    Args:
        text (`str`): Completion or solution.

    Returns:
        The content. None if there is no closed box, or if the last closed box is empty.
    """
    text = text[-_LAST_CHARACTERS:]
    open_braces: list[int | None] = []  # start of the content of a box, or None for other braces
    last, content = -1, ""
    for token in _TOKEN.finditer(text):
        if token["box"]:
            open_braces.append(token.end())
        elif bare := token["bare"] or token["digit"] or token["fraction"]:
            last, content = token.start(), bare.rstrip(".,;")
        elif token["brace"] == "{":
            open_braces.append(None)
        elif token["brace"] == "}" and open_braces:
            begin = open_braces.pop()
            if begin is not None and begin > last:
                last, content = begin, text[begin : token.start()]
    return content.strip() if content.strip("{}$ \t\n\r") else None


def judge(completions: Sequence[str], truths: Sequence[str]) -> list[Judgement]:
    r"""Return a verdict on each completion, and its answer in normal form.

    Worker processes compare the answers, with a limit of five seconds per answer. A completion is *invalid* if it has
    no box, or if the content of the box is empty or cannot be parsed. It is also invalid if the content or the correct
    answer has more than 1,000 characters, or if the comparison fails or exceeds the time limit. An answer that is
    literally equal to the correct answer is always correct.

    Args:
        completions (`Sequence[str]`): Completions.
        truths (`Sequence[str]`): Correct answers.

    Returns:
        `list[tuple[str, str | None]]`: verdict and answer of each completion. The answer is the correct answer for a
        correct completion, and None for an invalid completion.

    Raises:
        ImportError: math-verify is not installed.
    """
    pairs = [(extract_boxed(completion), truth) for completion, truth in zip(completions, truths, strict=True)]
    # Judge each distinct answer once, because completions of a prompt often agree.
    distinct = list(dict.fromkeys((a, b) for a, b in pairs if a and a != b and max(len(a), len(b)) <= _LONGEST))
    judged: dict[Any, Any] = {}
    if distinct:
        bar = {"desc": "Comparing answers", "unit": "answer", "delay": 5, "leave": False}
        with tqdm(total=len(distinct), **bar) as progress:
            judged = dict(zip(distinct, pool().map(distinct, progress.update), strict=True))
    judgements: list[Judgement] = []
    for given, truth in pairs:
        found = (CORRECT, None) if given == truth else judged.get((given, truth))
        verdict, canonical = found or (INVALID, None)  # no box, too long, failure or timeout
        judgements.append((verdict, truth if verdict == CORRECT else canonical))
    return judgements


@lru_cache(maxsize=1)
def pool() -> WorkerPool:
    """Return the worker pool of `judge`, which all callers in this process share."""
    if find_spec("math_verify") is None:
        raise ImportError('The task math needs math-verify to judge answers: run pip install ".[math]" in the clone.')
    return WorkerPool(Path(__file__).with_name("math_equality.py"), "judge")


Exemplars = Sequence[tuple[str, str]]  # worked examples: pairs of a problem and its solution


def draw_exemplars(rows: Dataset, num_shots: int, seed: int = 0, longest: int = 800) -> Exemplars:
    r"""Draw worked examples from training rows, from as many subjects as possible.

    Args:
        rows ([`~datasets.Dataset`]): Rows with the columns `problem` and `solution`, and optionally `subject` or
            `type`.
        num_shots (`int`): Number of examples.
        seed (`int`, *optional*, defaults to `0`): Seed of the draw.
        longest (`int`, *optional*, defaults to `800`): Maximum length of a solution, in characters.

    Returns:
        `list[tuple[str, str]]`: pairs of a problem and its solution.

    Raises:
        ValueError: a column is missing, or too few rows have a short solution with a box.
    """
    _check_text_columns(rows, ("problem", "solution"))
    order = random.Random(seed).sample(range(len(rows)), len(rows))
    column = next((name for name in ("subject", "type") if name in rows.column_names), None)
    chosen: list[tuple[str, str]] = []
    rest: list[tuple[str, str]] = []
    subjects = set()
    for i in order:
        row = rows[i]
        if len(row["solution"] or "") > longest or extract_boxed(row["solution"] or "") is None:
            continue
        subject = i if column is None else row[column]
        kind = rest if subject in subjects else chosen
        kind.append((row["problem"].strip(), row["solution"].strip()))
        subjects.add(subject)
        # The second limit ends the search if there are fewer subjects than examples.
        if len(chosen) == num_shots or len(rest) + len(chosen) > 100 * num_shots:
            break
    chosen = [*chosen, *rest][:num_shots]
    if len(chosen) < num_shots:
        raise ValueError(
            f"num_shots is {num_shots}, but only {len(chosen)} rows have a short boxed solution. Lower num_shots."
        )
    return chosen


def build_prompt(problem: str, num_shots: int = 4, exemplars: Exemplars = EXEMPLARS) -> str:
    """Return a prompt: worked examples, then the problem. A worked example of the same problem is left out.

    Args:
        problem (`str`): Problem.
        num_shots (`int`, *optional*, defaults to `4`): Number of worked examples.
        exemplars (`Exemplars`, *optional*, defaults to `EXEMPLARS`): Pairs of a problem and its solution.
    """
    problem = problem.strip()
    shots = [f"Problem: {q}\nSolution: {worked}\n\n" for q, worked in exemplars if q != problem]
    return "".join(shots[:num_shots]) + f"Problem: {problem}\nSolution:"


def prepare(dataset: Dataset, num_shots: int = 4, exemplars: Exemplars = EXEMPLARS) -> Dataset:
    r"""Convert rows in MATH's format into problems.

    The answer is the column `answer`. Without this column, it is the last box in `solution`.

    Args:
        dataset ([`~datasets.Dataset`]): Rows with the columns `problem`, and `answer` or `solution`. The columns
            `subject` (or `type`) and `level` (such as `"Level 5"`) are optional.
        num_shots (`int`, *optional*, defaults to `4`): Number of worked examples in the prompt.
        exemplars (`Exemplars`, *optional*, defaults to `EXEMPLARS`): Pairs of a problem and its solution.

    Returns:
        [`~datasets.Dataset`]: columns `problem_id`, `question`, `prompt` and `answer`. The columns `subject` (also for
        `type`) and `level` (an integer, or None) are included if `dataset` has them.

    Raises:
        ValueError: a column is missing or does not hold text, a row has no answer, or `num_shots` is not between
            0 and the number of exemplars.
    """
    if not 0 <= num_shots <= len(exemplars):
        raise ValueError(f"num_shots must be between 0 and {len(exemplars)}, not {num_shots}.")
    truth = "answer" if "answer" in dataset.column_names else "solution"
    _check_text_columns(dataset, ("problem", truth))
    subject = next((name for name in ("subject", "type") if name in dataset.column_names), None)

    def convert(row: dict[str, Any], index: int) -> dict[str, Any]:
        answer = (row[truth] or "").strip() if truth == "answer" else extract_boxed(row[truth] or "")
        if not answer:
            raise ValueError(
                f"Row {index}: column {truth!r} holds no answer: {(row[truth] or '')[-60:]!r}. Fix or drop the row."
            )
        problem = {
            "problem_id": index,
            "question": row["problem"].strip(),
            "prompt": build_prompt(row["problem"], num_shots, exemplars),
            "answer": answer,
        }
        if subject is not None:
            problem["subject"] = row[subject]
        if "level" in row:
            problem["level"] = _level(row["level"])
        return problem

    return dataset.map(convert, with_indices=True, remove_columns=dataset.column_names, desc="Building prompts")


def _level(level: Any) -> int | None:
    """Return the level of a value such as `"Level 5"`, `"5"` or 5. Return None for `"Level ?"`, which MATH contains."""
    digits = str(level).removeprefix("Level").strip()
    return int(digits) if digits.isdecimal() and len(digits) < 10 else None


def _check_text_columns(rows: Dataset, needed: tuple[str, ...]) -> None:
    need_columns(rows.column_names, needed, "Rows in MATH's format")
    for name in needed:
        text_column(rows, name, may_be_empty=name != "problem")


def load(name_or_path: str, split: str) -> Dataset:
    """Load rows in MATH's format.

    If a dataset has a configuration `default`, `main` or `all`, only this configuration is loaded. Otherwise, all
    configurations are loaded. If there are several, their names become the column `subject`, unless there is a column
    `subject` or `type`.

    Args:
        name_or_path (`str`): Dataset on the Hub, or a `.jsonl`, `.json` or `.parquet` file.
        split (`str`): Split of a dataset on the Hub. It is ignored for a file.

    Raises:
        ValueError: the dataset does not have the split, or the file cannot be read.
        FileNotFoundError: there is no such file.
    """
    if name_or_path.endswith(TABLE_SUFFIXES):
        return read_table(name_or_path)
    names = get_dataset_config_names(name_or_path)
    whole = [name for name in ("default", "main", "all") if name in names]
    names = whole[:1] or sorted(names)
    splits = get_dataset_split_names(name_or_path, names[0])
    if split not in splits:
        raise ValueError(
            f"{name_or_path} has the splits {', '.join(splits)}, not {split}. "
            "Choose a different dataset with --dataset_name (training) or --test_dataset_name."
        )
    parts = [load_dataset(name_or_path, name, split=split) for name in names]
    if len(parts) > 1 and not {"subject", "type"} & set(parts[0].column_names):
        parts = [part.add_column("subject", [name] * len(part)) for part, name in zip(parts, names, strict=True)]
    return concatenate_datasets(parts)
