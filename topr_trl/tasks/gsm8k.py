"""Define the task GSM8K (arXiv 2110.14168): few-shot chain-of-thought prompts, and answers after "The answer is"."""

import re
from collections.abc import Sequence
from decimal import Context, Decimal
from fractions import Fraction
from unicodedata import normalize

from datasets import Dataset, load_dataset

from topr_trl.data.rows import need_columns, text_column
from topr_trl.data.tables import TABLE_SUFFIXES, read_table
from topr_trl.rewards import CORRECT, Judgement, verdict

# Texts that end a completion. Without them, a base model continues with another question, as in the prompt.
STOP_STRINGS = ("\nQuestion:",)

# Eight worked examples, written for this package in the style of chain-of-thought prompting (arXiv 2201.11903).
EXEMPLARS = """\
Question: A florist has 24 tulips and buys 3 bunches of 8 tulips each. How many tulips are there now?
Answer: 3 bunches of 8 tulips are 3 * 8 = 24 tulips. Together with the first 24 that is 24 + 24 = 48. The answer is 48.

Question: Nils read 35 pages on Monday and twice as many on Tuesday. The book has 150 pages. How many are left?
Answer: On Tuesday he read 2 * 35 = 70 pages. In both days he read 35 + 70 = 105. So 150 - 105 = 45 are left. \
The answer is 45.

Question: A bus leaves with 40 people. At the first stop 12 get off and 7 get on. How many people are on the bus?
Answer: After 12 get off there are 40 - 12 = 28. After 7 get on there are 28 + 7 = 35. The answer is 35.

Question: Mira earns $15 an hour and works 6 hours a day. How much does she earn in 5 days?
Answer: In a day she earns 15 * 6 = 90 dollars. In 5 days she earns 90 * 5 = 450 dollars. The answer is 450.

Question: A rope of 84 meters is cut into 7 equal pieces. Two of them are used. How many meters are used?
Answer: Each piece has 84 / 7 = 12 meters. Two pieces have 2 * 12 = 24 meters. The answer is 24.

Question: In a class of 30 pupils, 60% play football. How many pupils do not play football?
Answer: 60% of 30 is 0.6 * 30 = 18 pupils who play. So 30 - 18 = 12 do not. The answer is 12.

Question: Otto had $50. He bought 4 notebooks at $6 each and a pen for $3. How many dollars does he have left?
Answer: The notebooks cost 4 * 6 = 24 dollars. With the pen he spent 24 + 3 = 27. He has 50 - 27 = 23 left. \
The answer is 23.

Question: A tank is filled at 9 liters a minute and leaks 2 liters a minute. How long does it take to hold 63 liters?
Answer: Each minute the tank gains 9 - 2 = 7 liters. It takes 63 / 7 = 9 minutes. The answer is 9.
""".rstrip("\n").split("\n\n")

_STATED = ("The answer is", "the answer is")
_NUMBER = re.compile(r"-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:/\d{1,9}(?!\d|\.\d))?")
# The pattern allows no exponent, because 1e999999 would have a million digits.
_PLAIN_NUMBER = re.compile(r"(?P<top>[-+]?(?:\d+\.?\d*|\.\d+))(?:/(?P<bottom>\d{1,9}))?")
# Minus signs and the non-breaking hyphen become hyphens, ⁄ becomes a slash, and currency signs are removed.
_SYMBOLS = str.maketrans("−–‑⁄", "---/", "\\$€£")
# One character for a fraction becomes LaTeX: ½ becomes \frac12.
_VULGAR = str.maketrans({each: r"\frac" + normalize("NFKC", each).replace("⁄", "") for each in "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"})
_FRACTION = re.compile(r"[ \u00a0]*\\[cdt]?frac(?:\{ *(\d{1,9}) *\}\{ *(\d{1,9}) *\}|(\d)(\d))")
_MIXED = re.compile(r"(?<![\d.,/])(\d{1,9}) (\d{1,9})/(\d{1,9})(?!\d|\.\d)")  # a mixed number, such as 1 1/2
_SEPARATOR = re.compile(r"(?<=\d)[,\u00a0\u2009\u202f'’](?=\d{3}(?!\d))")  # thousands separators
_SPACED = re.compile(r"(?<=-)[ \u00a0]|(?<=\d) ?/ ?(?=\d)")  # spaces after a minus sign, and around a fraction's slash
_LONGEST_ANSWER = 40  # in characters; a longer number is not an answer, and would be slow to parse
_EXACT = Context(prec=_LONGEST_ANSWER)  # The default context rounds to 28 digits.


def normalize_number(text: str) -> str | None:
    """Return a number in normal form: no thousands separators, no trailing zeros after the decimal point, no `-0`.

    A fraction such as 1/2 is converted to a decimal. If no decimal is exact, the fraction is reduced to lowest terms,
    such as 2/3. Return None for other text, for numbers with more than 40 characters, and for the denominator 0.
    """
    text = text.strip().rstrip(".").replace(",", "")
    found = _PLAIN_NUMBER.fullmatch(text)
    if len(text) > _LONGEST_ANSWER or found is None or (bottom := int(found["bottom"] or 1)) == 0:
        return None
    value = Fraction(Decimal(found["top"])) / bottom
    decimal = _EXACT.divide(value.numerator, value.denominator).normalize(_EXACT)
    number = format(decimal, "f") if Fraction(decimal) == value else str(value)
    return number if len(number) <= _LONGEST_ANSWER else None  # The number can outgrow the text: ".5" becomes "0.5".


def extract_answer(completion: str) -> str | None:
    """Return the number after the last "The answer is", in normal form.

    The search ends at the end of the sentence or line, or after 200 characters. Line breaks after a colon, and around
    the start of a displayed formula, do not end it. It skips words, units and currency signs before the number. In an
    equation such as `2 * 9 = 18`, the number after the last `=` counts.

    Args:
        completion (`str`): Completion.

    Returns:
        The number. None if there is no number, or if the number has more than 40 characters or the denominator 0. The
        paper calls a completion without an answer *invalid*.
    """
    start = max(completion.rfind(phrase) for phrase in _STATED)
    if start < 0:
        return None
    tail = completion[start + len(_STATED[0]) :][:200]
    # Skip a colon, or the start of a formula, and the line breaks around it.
    tail = re.sub(r"^[ *]*(?::?\s*(?:\$\$|\\\[)|:)\s*", "", tail).split("\n", 1)[0]
    tail = tail.replace("{,}", ",").translate(_VULGAR)
    tail = _FRACTION.sub(lambda found: f" {found[1] or found[3]}/{found[2] or found[4]}", tail)
    tail = tail.split(". ", 1)[0].rpartition("=")[2]  # "2 * 9 = 18" states 18.
    tail = _SEPARATOR.sub("", tail.translate(_SYMBOLS))
    tail = _SPACED.sub(lambda found: found[0].strip(), tail)
    tail = _MIXED.sub(lambda mixed: f"{int(mixed[1]) * int(mixed[3]) + int(mixed[2])}/{mixed[3]}", tail)
    number = _NUMBER.search(tail)
    return None if number is None else normalize_number(number[0])


def judge(completions: Sequence[str], truths: Sequence[str]) -> list[Judgement]:
    """Return a verdict on each completion, and its answer.

    The answer of a correct completion is the entry of `truths`, unchanged. For other completions, it is the number that
    the completion states, or None.

    Args:
        completions (`Sequence[str]`): Completions.
        truths (`Sequence[str]`): Correct answers: numbers in any form, or values of GSM8K's column `answer`, which
            end in `#### N`.

    Raises:
        ValueError: a correct answer is not a number, so no completion can state it.
    """
    judgements: list[Judgement] = []
    for completion, truth in zip(completions, truths, strict=True):
        answer, right = extract_answer(completion), normalize_number(truth.rpartition("####")[2])
        if right is None:
            raise ValueError(
                f"The judge of GSM8K compares numbers, but the column `answer` holds {truth[:60]!r}. Write only the "
                "number, or use --reward_funcs instead of this judge; topr sample then needs --task prompts."
            )
        found = verdict(answer, right)
        judgements.append((found, truth if found == CORRECT else answer))
    return judgements


def build_prompt(question: str, num_shots: int = 8) -> str:
    """Return a prompt: worked examples, then the question.

    Args:
        question (`str`): Question.
        num_shots (`int`, *optional*, defaults to `8`): Number of worked examples, at most 8.

    Raises:
        ValueError: `num_shots` is outside its range.
    """
    if not 0 <= num_shots <= len(EXEMPLARS):
        raise ValueError(f"num_shots must be between 0 and {len(EXEMPLARS)}, not {num_shots}.")
    return "\n\n".join([*EXEMPLARS[:num_shots], f"Question: {question.strip()}\nAnswer:"])


def prepare(dataset: Dataset, num_shots: int = 8) -> Dataset:
    """Convert rows in GSM8K's format into problems.

    Args:
        dataset ([`~datasets.Dataset`]): Rows with the columns `question` and `answer`.
        num_shots (`int`, *optional*, defaults to `8`): Number of worked examples in the prompt, at most 8.

    Returns:
        [`~datasets.Dataset`]: columns `problem_id`, `question`, `prompt` and `answer` (in normal form).

    Raises:
        ValueError: a column is missing or does not hold text, an answer does not end in `#### N` with a number N, or
            `num_shots` is outside its range.
    """
    needed = ("question", "answer")
    need_columns(dataset.column_names, needed, "Rows in GSM8K's format")
    for name in needed:
        text_column(dataset, name)

    def convert(row: dict[str, str], index: int) -> dict[str, object]:
        answer = normalize_number(row["answer"].rpartition("####")[2]) if "####" in row["answer"] else None
        if answer is None:
            raise ValueError(
                f"Row {index}: the answer must end in `#### N` with a number N; it ends in {row['answer'][-60:]!r}. "
                "Fix or drop the row."
            )
        question = row["question"].strip()
        prompt = build_prompt(question, num_shots)
        return {"problem_id": index, "question": question, "prompt": prompt, "answer": answer}

    return dataset.map(convert, with_indices=True, remove_columns=dataset.column_names, desc="Building prompts")


def load(name_or_path: str, split: str) -> Dataset:
    """Load rows in GSM8K's format.

    Args:
        name_or_path (`str`): Dataset on the Hub with a configuration `main`, or with `default` alone, or a `.jsonl`,
            `.json` or `.parquet` file.
        split (`str`): Split of a dataset on the Hub. It is ignored for a file.
    """
    if name_or_path.endswith(TABLE_SUFFIXES):
        return read_table(name_or_path)
    try:
        return load_dataset(name_or_path, "main", split=split)
    except ValueError as error:
        if "['default']" not in str(error):  # names of the existing configurations
            raise
        return load_dataset(name_or_path, "default", split=split)
