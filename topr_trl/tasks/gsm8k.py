"""GSM8K (arXiv 2110.14168): few-shot chain-of-thought prompt, answer after "The answer is"."""

import re
from collections.abc import Sequence
from decimal import Context, Decimal
from fractions import Fraction

from datasets import Dataset, load_dataset

from topr_trl.data.rows import need_columns, text_column
from topr_trl.data.tables import TABLE_SUFFIXES, read_table
from topr_trl.rewards import CORRECT, Judgement, verdict

# End a completion besides the stop token: a base model goes on with the next question of the prompt.
STOP_STRINGS = ("\nQuestion:",)

# Eight worked examples of our own, in the style of chain-of-thought prompting (arXiv 2201.11903).
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
_NUMBER = re.compile(r"(?P<number>-?(?:\d[\d,]*(?:\.\d+)?|\.\d+))(?:/(?P<bottom>\d{1,9})(?!\d|\.\d))?")
_PLAIN_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)")  # no exponent: 1e999999 would take a megabyte in normal form
_CURRENCY = str.maketrans("", "", "\\$€£")
_LONGEST_ANSWER = 40  # characters; longer runs of digits are not answers and would take long to parse
_EXACT = Context(prec=_LONGEST_ANSWER)  # Decimal rounds to 28 digits by default


def normalize_number(text: str) -> str | None:
    """A number in normal form: no thousands separators, no trailing zeros, no `-0`; None if it is not one."""
    text = text.strip().rstrip(".").replace(",", "")
    if len(text) > _LONGEST_ANSWER or not _PLAIN_NUMBER.fullmatch(text):
        return None
    return format(_EXACT.plus(Decimal(text).normalize(_EXACT)), "f")


def extract_answer(completion: str) -> str | None:
    """The number after the last "The answer is", in normal form; None if there is none (the paper's *invalid*).

    Currency signs, units and other words between the phrase and the number, up to the end of the line, are skipped.
    """
    start = max(completion.rfind(phrase) for phrase in _STATED)
    if start < 0:
        return None
    tail = completion[start + len(_STATED[0]) :][:200]
    tail = re.sub(r"^[ *]*:\s*", "", tail).split("\n", 1)[0]
    tail = tail.split(". ", 1)[0].rpartition("=")[2]  # "2 * 9 = 18"
    number = _NUMBER.search(tail.replace("−", "-").translate(_CURRENCY).replace("- ", "-"))
    if number is None:
        return None
    value, bottom = normalize_number(number["number"]), number["bottom"]
    if value is None or not bottom:
        return value
    return str(Fraction(value) / int(bottom)) if int(bottom) else None  # an integer if it is one


def judge(completions: Sequence[str], truths: Sequence[str]) -> list[Judgement]:
    """Verdicts on completions, and the numbers that they state.

    A right answer may be a number in any form, or GSM8K's own column, which ends in `#### N`.
    """
    judgements: list[Judgement] = []
    for completion, truth in zip(completions, truths, strict=True):
        answer, right = extract_answer(completion), normalize_number(truth.rpartition("####")[2]) or truth
        found = verdict(answer, right)
        judgements.append((found, truth if found == CORRECT else answer))
    return judgements


def build_prompt(question: str, num_shots: int = 8) -> str:
    """The prompt: `num_shots` worked examples, of at most eight, then the question."""
    if not 0 <= num_shots <= len(EXEMPLARS):
        raise ValueError(f"num_shots must be between 0 and {len(EXEMPLARS)}, not {num_shots}.")
    return "\n\n".join([*EXEMPLARS[:num_shots], f"Question: {question.strip()}\nAnswer:"])


def prepare(dataset: Dataset, num_shots: int = 8) -> Dataset:
    """Rows of GSM8K's shape to problems: columns `problem_id`, `question`, `prompt`, `answer` (normal form).

    Raises:
        ValueError: a column is missing or holds no text, or an answer does not end in `#### N` with a number N.
    """
    needed = ("question", "answer")
    need_columns(dataset.column_names, needed, "Rows of GSM8K's shape")
    for name in needed:
        text_column(dataset, name)

    def convert(row: dict[str, str], index: int) -> dict[str, object]:
        answer = normalize_number(row["answer"].rpartition("####")[2]) if "####" in row["answer"] else None
        if answer is None:
            raise ValueError(f"Row {index}: the answer does not end in `#### N`: {row['answer'][-60:]!r}.")
        question = row["question"].strip()
        prompt = build_prompt(question, num_shots)
        return {"problem_id": index, "question": question, "prompt": prompt, "answer": answer}

    return dataset.map(convert, with_indices=True, remove_columns=dataset.column_names, desc="Building prompts")


def load(name_or_path: str, split: str) -> Dataset:
    """Rows of GSM8K's shape: a `.jsonl`, `.json` or `.parquet` file (`split` is not used), or a dataset of the Hub."""
    if name_or_path.endswith(TABLE_SUFFIXES):
        return read_table(name_or_path)
    return load_dataset(name_or_path, "main", split=split)
