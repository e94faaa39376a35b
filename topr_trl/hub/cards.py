"""The card of a data set: what its rows are, and how they were made."""

from collections.abc import Mapping
from pathlib import Path

from huggingface_hub import DatasetCard, DatasetCardData, EvalResult

from topr_trl.evaluation.estimates import Evaluation
from topr_trl.model_card import PAPER, TAGS, markdown_table

_SIZES = ("n<1K", "1K<n<10K", "10K<n<100K", "100K<n<1M", "1M<n<10M", "10M<n<100M", "100M<n<1B", "n>1B")

COLUMNS = {
    "prompt": "what the model was asked",
    "completion": "its response",
    "reward": "what the response is worth; after the baseline, if there is a `raw_reward` too",
    "raw_reward": "the reward before the baseline",
    "reward_after_baseline": "what a row that was chosen for training is worth there; empty in the other rows",
    "label": "true where the response is good: a reward of +1, else -1",
    "prompt_ids": "token ids of the prompt",
    "completion_ids": "token ids of the response, its stop token included",
    "problem_id": "the problem: rows with the same one are responses to the same",
    "sample_id": "the place in the order in which a problem's responses were drawn",
    "finish_reason": "`stop`, or `length` where the response was cut off",
    "sampler_logps": "log-probability of each token, as the sampler reported it",
    "mu_logps": "log μ of each token, or of the whole response; empty where no weight depends on it",
    "mu_fingerprint": "fingerprint of the model that has scored `mu_logps`",
    "answer": "the right answer, in normal form",
    "extracted": "the answer that was found in the response, in normal form; empty where there is none",
    "verdict": "`correct`, `incorrect`, or `invalid` where there is no answer",
    "score": "of a verifier",
    "question": "the problem without the prompt around it",
    "solution": "a worked solution of the problem",
    "subject": "of the problem",
    "level": "of the problem: how hard it is",
    "tools": "for the chat template",
    "chat_template_kwargs": "for the chat template",
}


def results_metadata(evaluation: Evaluation, dataset: str) -> list[EvalResult]:
    """The results of an evaluation for a model card's metadata; `dataset` is the problems' name on the Hub."""
    curves = {"pass": evaluation.pass_at, "maj": evaluation.maj_at}
    return [
        EvalResult(
            task_type="text-generation", dataset_type=dataset, dataset_name=dataset, dataset_split="test",
            metric_type=f"{measure}@{k}", metric_value=round(100 * estimate.value, 2),
        )
        for measure, curve in curves.items() for k, estimate in curve.items()
    ]  # fmt: skip


def dataset_card(
    repo_id: str,
    columns: Mapping[str, str],
    counts: Mapping[str, str],
    num_rows: int,
    files: str,
    *,
    split: str = "train",
    made: Mapping[str, str] | None = None,
    problems: str | None = None,
    sampler: str | None = None,
) -> DatasetCard:
    """The card of candidates.

    Args:
        repo_id: the data set's name on the Hub.
        columns: names and types.
        counts: what there is of what.
        num_rows: of all files.
        files: the name or pattern of the files of rows: readers take those and nothing else for data.
        split: of the problems; the rows are loaded under this name.
        made: how they were sampled, as far as it is known.
        problems, sampler: short descriptions, in Markdown.
    """
    size = _SIZES[min(max(len(str(num_rows)) - 3, 0), len(_SIZES) - 1)]
    data = DatasetCardData(
        pretty_name=repo_id.rpartition("/")[2],
        task_categories=["text-generation"],
        size_categories=[size],
        tags=list(TAGS),
        configs=[{"config_name": "default", "data_files": [{"split": split, "path": files}]}],
    )
    responses = f"{num_rows:,} responses to {counts['problems']} problems"
    rows = [[f"`{name}`", f"`{kind}`", COLUMNS.get(name, "")] for name, kind in columns.items()]
    card: DatasetCard = DatasetCard.from_template(
        data,
        template_path=str(Path(__file__).with_name("dataset_card.md")),
        name=data.pretty_name,
        repo_id=repo_id,
        size=responses,
        problems=problems,
        sampler=sampler,
        split=split,
        trainable=bool({"reward", "label"} & set(columns)),
        judged="verdict" in columns,
        counts=markdown_table(("what", "how many"), counts.items()),
        columns=markdown_table(["column", "type", "meaning"], rows),
        made=markdown_table(("setting", "value"), made.items()) if made else None,
        citation=PAPER["citation"],
    )
    return card
