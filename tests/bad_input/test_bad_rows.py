"""Rows that cannot be learned from. The page `docs/bad_input.md` is made of these cases, see `bad_input.py`."""

import json
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from bad_input import NO_SHARD, NOTHING_WRITTEN, NOWHERE, Case, Kept, Kit, cases, kit
from datasets import Dataset, DatasetDict

__all__ = ["kit"]


def with_columns(rows: Dataset, **columns: Any) -> Dataset:
    """None removes a column."""
    for name, values in columns.items():
        rows = rows.remove_columns([name] if name in rows.column_names else [])
        rows = rows if values is None else rows.add_column(name, values)
    return rows


def _not_loaded(kit: Kit) -> None:
    assert kit.trainer is None
    assert not kit.out.exists()


NOT_LOADED = Kept("no model is loaded, nothing is written", _not_loaded)


def at_once(given: str, message: str, error: type[BaseException] = ValueError, **columns: Any) -> Case:
    """Rows with other columns, refused before a model is loaded."""
    return Case(
        given, lambda kit: kit.offline(with_columns(kit["rows"], **columns), NOWHERE), message, NOT_LOADED, error
    )


def tokenized(given: str, message: str, settings: dict[str, Any] | None = None, **columns: Any) -> Case:
    """Rows with other columns, refused once they are tokenized."""
    return Case(
        given, lambda kit: kit.offline(with_columns(kit["rows"], **columns), **settings or {}), message, NOTHING_WRITTEN
    )


def masked(given: str, message: str, **columns: Any) -> Case:
    """Rows of token ids with masks, refused once they are tokenized."""
    return tokenized(given, message, prompt_ids=[[5, 6]] * 8, completion_ids=[[7, 8]] * 8, **columns)


def turns(given: str, message: str, template: str, role: str = "user", **of_first: Any) -> Case:
    """Trajectories in messages, written by a chat template."""

    def do(kit: Kit) -> None:
        kit["tokenizer"].chat_template = template
        prompt = [[{"role": "user", "content": "How many?"}]] * 8
        says = [("assistant", "I count. Four."), (role, "Sure?"), ("assistant", "Yes.")]
        messages = [{"role": who, "content": what} for who, what in says]
        completion = [[{**messages[0], **of_first}, *messages[1:]]] * 8
        kit.offline(with_columns(kit["rows"], prompt=prompt, completion=completion))

    return Case(given, do, message, NOTHING_WRITTEN)


def ones(wrong: Any, at: int = 1, rest: Any = 1.0) -> list[Any]:
    return [rest] * at + [wrong] + [rest] * (7 - at)


ROWS = [
    at_once(
        "no column `reward` or `label`",
        "Rows to learn from need the columns prompt, completion (or completion_ids) and reward (or label); found "
        "['prompt', 'completion', 'problem_id', 'sample_id']. Rename them with `dataset.rename_column`, "
        "score the rows first, or make rows of another system's logs with topr import.",
        reward=None,
    ),
    at_once(
        "no column `prompt`",
        "Rows to learn from need the columns prompt, completion (or completion_ids) and reward (or label); found "
        "['completion', 'reward', 'problem_id', 'sample_id']. Rename them with `dataset.rename_column`, "
        "score the rows first, or make rows of another system's logs with topr import.",
        prompt=None,
    ),
    at_once(
        "no column `completion` or `completion_ids`",
        "Rows to learn from need the columns prompt, completion (or completion_ids) and reward (or label); found "
        "['prompt', 'reward', 'problem_id', 'sample_id']. Rename them with `dataset.rename_column`, "
        "score the rows first, or make rows of another system's logs with topr import.",
        completion=None,
    ),
    Case(
        "no row",
        lambda kit: kit.offline(kit["rows"].select([]), NOWHERE),
        "The dataset has no row.",
        NOT_LOADED,
    ),
    at_once(
        "a reward is missing",
        "Column `reward` must hold finite numbers (float32); row 1 holds None. Fill or drop such rows.",
        reward=ones(None),
    ),
    at_once(
        "a reward is NaN",
        "Column `reward` must hold finite numbers (float32); row 1 holds nan. Fill or drop such rows.",
        reward=ones(float("nan")),
    ),
    at_once(
        "a reward is infinite",
        "Column `reward` must hold finite numbers (float32); row 1 holds inf. Fill or drop such rows.",
        reward=ones(float("inf")),
    ),
    at_once(
        "a reward that float32 cannot hold",
        "Column `reward` must hold finite numbers (float32); row 1 holds 1e+300. Fill or drop such rows.",
        reward=ones(1e300),
    ),
    at_once(
        "rewards are text",
        "Column `reward` must hold finite numbers (float32); row 0 holds 'good' (the first of 8 such rows). Fill "
        "or drop such rows.",
        reward=["good"] * 8,
    ),
    at_once(
        "rewards are booleans (those belong in `label`)",
        "Column `reward` must hold finite numbers (float32); row 0 holds True (the first of 8 such rows). Fill "
        "or drop such rows.",
        reward=[True] * 8,
    ),
    at_once(
        "labels are numbers",
        "Column `label` must hold true or false; row 0 holds 1 (the first of 8 such rows). Fill or cast the column.",
        reward=None,
        label=[1, 0] * 4,
    ),
    at_once(
        "a label is missing",
        "Column `label` must hold true or false; row 1 holds None. Fill or cast the column.",
        reward=None,
        label=ones(None, rest=True),
    ),
    at_once(
        "a `finish_reason` is misspelled",
        "Column `finish_reason` must hold stop or length; row 3 holds 'lenght'. Write `length` where a "
        "completion was truncated, else `stop`; or drop the column.",
        finish_reason=ones("lenght", 3, "stop"),
    ),
    at_once(
        "rows with images",
        "Rows with images are not supported offline. Use TOPRTrainer for vision models.",
        image=[None] * 8,
    ),
    Case(
        "a stream",
        lambda kit: kit.offline(kit["rows"].to_iterable_dataset(), NOWHERE),
        "OfflineTOPRTrainer needs a datasets.Dataset; found IterableDataset. Pass one split, or load the "
        "stream into a Dataset: baseline, curation and log μ need all rows before the first step.",
        NOT_LOADED,
        TypeError,
    ),
    Case(
        "all splits of a dataset",
        lambda kit: kit.offline(DatasetDict({"train": kit["rows"]}), NOWHERE),
        "OfflineTOPRTrainer needs a datasets.Dataset; found DatasetDict. Pass one split, or load the "
        "stream into a Dataset: baseline, curation and log μ need all rows before the first step.",
        NOT_LOADED,
        TypeError,
    ),
    Case(
        "an evaluation set that is called train",
        lambda kit: kit.offline(kit["rows"], NOWHERE, eval_dataset={"train": kit["rows"]}),
        "'train' is the name of the training dataset. Give the evaluation dataset another name.",
        NOT_LOADED,
    ),
    Case(
        "a custom collator",
        lambda kit: kit.offline(kit["rows"], NOWHERE, data_collator=list),
        "OfflineTOPRTrainer does not take data_collator: rows and loss are TOPR's. Remove it.",
        NOT_LOADED,
    ),
    Case(
        "metrics that need logits",
        lambda kit: kit.offline(kit["rows"], NOWHERE, compute_metrics=dict),
        "OfflineTOPRTrainer does not take compute_metrics: rows and loss are TOPR's. Remove it.",
        NOT_LOADED,
    ),
    tokenized(
        "a completion is empty",
        "Row 1 of the train dataset: the completion is empty. Fix or drop it.",
        completion=ones("", rest=" 7"),
    ),
    tokenized(
        "a completion is missing",
        "Row 1 of the train dataset: the completion is empty. Fix or drop it.",
        completion=ones(None, rest=" 7"),
    ),
    tokenized(
        "a prompt is empty",
        "Row 0 of the train dataset: the prompt is empty. Fix or drop it.",
        prompt=ones("", 0, "3 + 4 ="),
    ),
    tokenized(
        "prompts are numbers",
        "Row 0 of the train dataset: prompt and completion must be text, messages (both of them) or token "
        "ids. Fix or drop it.",
        prompt=list(range(1, 9)),
    ),
    tokenized(
        "completions are messages, prompts text",
        "Row 0 of the train dataset: prompt and completion must be text, messages (both of them) or token "
        "ids. Fix or drop it.",
        completion=[[{"role": "assistant", "content": "7"}]] * 8,
    ),
    tokenized(
        "a row is longer than the model's context",
        "1 of 8 rows of the train dataset are longer than the model's context, 2048 tokens; the first is row "
        "2 with 4007. Drop or shorten them.",
        prompt=ones("a" * 4_000, 2, "3 + 4 ="),
    ),
    tokenized(
        "a row is longer than `max_length`",
        "1 of 8 rows of the train dataset are longer than max_length, 70 tokens; the first is row 2 with 107. "
        "Drop or shorten them.",
        {"max_length": 70},
        prompt=ones("a" * 100, 2, "3 + 4 ="),
    ),
    tokenized(
        "a token id above the vocabulary",
        "Row 4 of the train dataset holds the token id 999, and the model has the ids 0 to 408: another "
        "tokenizer wrote it. Drop prompt_ids and completion_ids, so that text is tokenized, or train the "
        "model that they are for.",
        prompt_ids=[[5, 6]] * 8,
        completion_ids=ones([7, 999], 4, [7]),
    ),
    tokenized(
        "a negative token id",
        "Row 4 of the train dataset holds the token id -100, and the model has the ids 0 to 408: another "
        "tokenizer wrote it. Drop prompt_ids and completion_ids, so that text is tokenized, or train the "
        "model that they are for.",
        prompt_ids=[[5, 6]] * 8,
        completion_ids=ones([-100], 4, [7]),
    ),
    tokenized(
        "a token id is missing",
        "Column `completion_ids` holds 1 ids that are null. Drop those rows.",
        prompt_ids=[[5, 6]] * 8,
        completion_ids=ones([7, None], 4, [7]),
    ),
    tokenized(
        "a token id that no tokenizer has",
        "Column `completion_ids` holds values that are not token ids: ….",
        prompt_ids=[[5, 6]] * 8,
        completion_ids=ones([2**32], 4, [7]),
    ),
    tokenized(
        "a `problem_id` is missing",
        "Column `problem_id` must hold numbers or text; row 1 holds None. Fill or drop the column.",
        problem_id=ones(None, rest=3),
    ),
    tokenized(
        "problem ids are lists",
        "Column `problem_id` must hold numbers or text; row 0 holds [1] (the first of 8 such rows). Fill or drop "
        "the column.",
        problem_id=[[1]] * 8,
    ),
    tokenized(
        "a `sample_id` is missing",
        "Column `sample_id` must hold numbers or text; row 1 holds None. Fill or drop the column.",
        sample_id=ones(None, rest=3),
    ),
    tokenized(
        "all rewards are 0",
        "All 8 rewards of the training dataset are 0 after baseline=mean: there is nothing to learn. Add rows "
        "with other rewards. To imitate all, set baseline to a number below them.",
        reward=[0.0] * 8,
    ),
    tokenized(
        "rewards that are all the same, and `effective_positive_share`",
        "All 8 rewards are 1, so no baseline reaches an effective share of positives of 0.2: with every baseline "
        "it is 1 or 0. Add rows with other rewards, or set a number as baseline.",
        {"effective_positive_share": 0.2},
        reward=[1.0] * 8,
    ),
    at_once(
        "rows of a rollout with different rewards",
        "Row 3 has the reward 1, and the first row of its rollout_id -1. The rows of a rollout are one trajectory, "
        "with one reward: give it to all of them, or give other trajectories another rollout_id.",
        rollout_id=[0, 0, 1, 1, 2, 3, 4, 5],
    ),
    at_once(
        "rows of a rollout of different problems",
        "Row 4 has the problem_id 1, and the first row of its rollout_id 0. The rows of a rollout are one trajectory, "
        "with one problem_id: give it to all of them, or give other trajectories another rollout_id.",
        rollout_id=[0, 1, 2, 3] * 2,
        problem_id=[0] * 4 + [1] * 4,
        reward=[1.0] * 8,
    ),
    at_once(
        "`rollout_id` that is no number or text",
        "Column `rollout_id` must hold numbers or text; row 1 holds [1]. Fix or drop such rows.",
        rollout_id=[None, [1]] + [None] * 6,
    ),
    tokenized(
        "`curation` that chooses no row",
        "curation='positives' chose no row: 0 rows, 0.0% positive, chosen from 0 positives and 8 negatives of "
        "2 problems (2 without a positive). Change curation or baseline.",
        {"curation": "positives", "baseline": 0},
        reward=[-1.0] * 8,
    ),
    tokenized(
        "`log_mu='sampler'` without `sampler_logps`",
        "log_mu='sampler' needs the column `sampler_logps`: the sampler's log-probabilities. Add it, or set "
        "log_mu='trainer'.",
        {"log_mu": "sampler"},
    ),
    tokenized(
        "log μ of a sampler that drew from a part of the vocabulary",
        "log_mu='sampler' and the train dataset: its rows were sampled with top_p=0.95 and top_k=20, and their "
        "sampler_logps were computed after that (logprobs_mode is processed_logprobs), so that they are larger than "
        "those of the whole vocabulary, and every negative would begin with a small weight. Set log_mu='trainer'; or "
        "sample with top_p=1 and top_k=-1.",
        {"log_mu": "sampler"},
        sampler_logps=[[-1.0]] * 8,
        logprobs_mode=["processed_logprobs"] * 8,
        top_p=[0.95] * 8,
        top_k=[20] * 8,
    ),
    tokenized(
        "log μ of a sampler at another temperature than its log-probabilities",
        "log_mu='sampler' and the train dataset: its rows were sampled at temperature 0.7, and their sampler_logps may "
        "be those at temperature 1 (logprobs_mode is None). Set log_mu='trainer'; add a column logprobs_mode if you "
        "know it (raw_logprobs or processed_logprobs).",
        {"log_mu": "sampler"},
        sampler_logps=[[-1.0]] * 8,
        temperature=[0.7] * 8,
    ),
    tokenized(
        "a `logprobs_mode` that vLLM does not have",
        "Column `logprobs_mode` must hold raw_logprobs or processed_logprobs; row 0 holds 'raw' (the first of 8 such "
        "rows). Fix or drop the column.",
        sampler_logps=[[-1.0]] * 8,
        logprobs_mode=["raw"] * 8,
    ),
    tokenized(
        "rows of several temperatures",
        "The train dataset has rows of several temperatures: 0.7, 1. log π is computed at one. Train on the rows of "
        "one of them, or drop the column `temperature`: it is then 1.",
        temperature=ones(0.7, 4),
    ),
    tokenized(
        "rows of greedy decoding",
        "Column `temperature` must hold numbers above 0; row 1 holds 0.0. Drop greedy rows (temperature 0), which are "
        "for evaluation and not for training. If the rows were sampled, drop the column: log π is then computed at 1.",
        temperature=ones(0.0),
    ),
    masked(
        "`completion_mask` of another length",
        "Row 4 of the train dataset: completion_mask has 3 values, and the completion 2 tokens. It is of "
        "`completion_ids`, without the prompt. Fix or drop it.",
        completion_mask=ones([1, 0, 1], 4, [1, 1]),
    ),
    masked(
        "`completion_mask` with other values than 0 and 1",
        "Row 4 of the train dataset: completion_mask must be 1 for tokens that the model wrote and 0 for what it "
        "read. Fix or drop it.",
        completion_mask=ones([1, 2], 4, [1, 1]),
    ),
    masked(
        "`completion_mask` that is 0 everywhere",
        "Row 4 of the train dataset: by its mask the model wrote nothing of the completion, so there is nothing to "
        "learn from it. Fix or drop it.",
        completion_mask=ones([0, 0], 4, [1, 1]),
    ),
    masked(
        "`completion_mask` of prompt and completion",
        "Row 0 of the train dataset: completion_mask has 4 values, and the completion 2 tokens. It is of "
        "`completion_ids`, without the prompt. Fix or drop it.",
        completion_mask=[[0, 0, 1, 1]] * 8,
    ),
    masked(
        "`sampler_logps` that are null where `completion_mask` is 1",
        "Row 4 of the train dataset: sampler_logps is null for tokens that the model wrote, by completion_mask. Fix or "
        "drop it.",
        completion_mask=[[1, 1]] * 8,
        sampler_logps=ones([-1.0, None], 4, [-1.0, -1.0]),
    ),
    tokenized(
        "`completion_mask` without `completion_ids`",
        "Row 0 of the train dataset: it has a completion_mask and no completion_ids: a mask is of tokens. Add the "
        "ids, or drop the mask. Fix or drop it.",
        completion_mask=[[1, 1]] * 8,
    ),
    masked(
        "`sampler_logps` that are null for tokens of another completion",
        "Row 4 of the train dataset: sampler_logps is null for some of 3 tokens, and the completion has 2: keep the "
        "sampler's `completion_ids` with it. Fix or drop it.",
        sampler_logps=ones([-1.0, None, -1.0], 4, [-1.0, -1.0]),
    ),
    turns(
        "a trajectory whose template removes earlier thinking",
        "Row 0 of the train dataset: its chat template writes earlier turns differently once later ones follow (it "
        "removes their thinking, for example), so the model read other tokens than the last rendering has. Set "
        "chat_template_path to a template that keeps them, or make each turn a row of its own, with what the model "
        "read as its prompt. Fix or drop it.",
        "{% for m in messages %}{{ m.role }}: {{ m.content if loop.last else m.content[:1] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}",
    ),
    tokenized(
        "an image in a trajectory",
        "Row 0 of the train dataset: a message has image: only text can be trained on offline. Fix or drop it.",
        prompt=[[{"role": "user", "content": [{"type": "text", "text": "What is it?"}, {"type": "image"}]}]] * 8,
        completion=[[{"role": "assistant", "content": "7"}]] * 8,
    ),
    tokenized(
        "a completion in messages, none of them the assistant's",
        "Row 0 of the train dataset: there is nothing to learn from its completion: no turn is the assistant's. Fix or "
        "drop it.",
        prompt=[[{"role": "user", "content": "1 + 1"}]] * 8,
        completion=[[{"role": "tool", "content": "2"}]] * 8,
    ),
    turns(
        "calls of tools, and a template that leaves them out",
        "Row 0 of the train dataset: it calls tools, and the tokenizer's chat template does not write calls and "
        "results of tools. Set chat_template_path to one that does, or give completion_ids and completion_mask. Fix or "
        "drop it.",
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}",
        role="tool",
    ),
    turns(
        "a call of a tool whose arguments are no JSON",
        "Row 0 of the train dataset: the arguments of its call of count are not valid JSON ('{\"of\": '), and what the "
        "model wrote instead is not known. Give completion_ids, write the call as content, or drop the row. Fix or "
        "drop it.",
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
        tool_calls=[{"type": "function", "function": {"name": "count", "arguments": '{"of": '}}],
    ),
]


def brought(given: str, message: str, mu: list[Any], settings: dict[str, Any] | None = None, **columns: Any) -> Case:
    """Rows that bring their own log μ; the first two are not chosen, and rows keep their numbers."""

    def do(kit: Kit) -> None:
        rows = with_columns(kit["rows"], reward=[1.0, 1.0] + [-1.0] * 6, mu_logps=mu, **columns)
        kit.offline(rows, curation="positive_share", curation_positive_share=0.0, **settings or {})

    return Case(given, do, message, NOTHING_WRITTEN)


LOG_MU = [
    brought(
        "one value too few",
        "Row 2 of the train dataset: log μ of 1 tokens for a completion of 7. Give one value per token of "
        "`completion_ids` (or per token that the model wrote); or drop the column, and log μ is computed.",
        [[-0.1]] * 8,
    ),
    brought(
        "a NaN",
        "Row 4 of the train dataset: log μ must be a finite number of at most 0 for each token, or their sum; "
        "found nan. Fix it; or drop the column, and log μ is computed.",
        ones(float("nan"), 4, -5.0),
    ),
    brought(
        "a probability instead of its logarithm",
        "Row 4 of the train dataset: log μ must be a finite number of at most 0 for each token, or their sum; "
        "found 0.9. Fix it; or drop the column, and log μ is computed.",
        ones(0.9, 4, -5.0),
    ),
    brought(
        "a completion of probability 0",
        "Row 4 of the train dataset: log μ must be a finite number of at most 0 for each token, or their sum; "
        "found -inf. Fix it; or drop the column, and log μ is computed.",
        ones(float("-inf"), 4, -5.0),
    ),
    brought(
        "sums, and `ratio_level='token'`",
        "Row 2 of the train dataset: ratio_level='token' needs log μ for each token, not their sum.",
        [-5.0] * 8,
        {"ratio_level": "token"},
    ),
    brought(
        "another model's",
        "Column `mu_logps` was computed by another model: mu_fingerprint 0123456789abcdef, and the model in "
        "training has …. If that model did write these rows and is the μ you mean, remove the column "
        "`mu_fingerprint`; to compute log μ with the model in training, remove both.",
        [-5.0] * 8,
        mu_fingerprint=["0123456789abcdef"] * 8,
    ),
    Case(
        "rows for `evaluate()` that need log μ, once the weights have moved",
        lambda kit: (kit.offline(kit["rows"], max_steps=1), kit.trainer.evaluate(kit["rows"])),
        "The rows of eval need log μ of the starting weights, and training has changed them. Pass the dataset "
        "as eval_dataset when you make the trainer, or give it a column mu_logps.",
        Kept("the trainer, which can go on", lambda kit: kit.trainer.train() and None),
    ),
]


def scored(kit: Kit, stage: str, columns: dict[str, list[Any]], *arguments: Any) -> None:
    pq.write_table(pa.table(columns), kit.folder / "rows.parquet")
    kit.note()
    kit.topr(stage, "--input", "rows.parquet", "--output_dir", "out", *arguments)


def stage(given: str, message: str, stage: str, *arguments: Any, **columns: list[Any]) -> Case:
    return Case(given, lambda kit: scored(kit, stage, columns, *arguments), message, NO_SHARD, SystemExit)


TWO = {"prompt": ["a", "b"], "completion": ["7", "8"]}
SAMPLES = {"problem_id": [0, 0, 1], "extracted": ["7", None, "8"], "answer": ["7", "7", "8"]}
WITH_A_GREEDY_ROW = {**TWO, "reward": [1.0, -1.0], "temperature": [1.0, 0.0]}

STAGES = [
    stage(
        "`trial`: fewer than six problems",
        "topr trial: A trial tests on problems that it does not train on, and needs at least 6; rows.parquet has 2.",
        "trial",
        **TWO,
        reward=[1.0, -1.0],
    ),
    stage(
        "`trial`: rows without a reward",
        "topr trial: Rows to learn from need the columns prompt, completion (or completion_ids) and reward (or label); "
        "found ['prompt', 'completion']. Rename them with `dataset.rename_column`, score the rows first, or make rows "
        "of another system's logs with topr import.",
        "trial",
        **TWO,
    ),
    stage(
        "`trial`: answers that cannot be judged",
        "topr trial: test_by='answers': the rows need the columns prompt and answer (text) and completion; found "
        "['prompt', 'completion', 'reward']. Name another --task, or weight the rewards of held-out rows: --test_by "
        "rewards.",
        "trial",
        "--test_by",
        "answers",
        prompt=list("abcdef"),
        completion=["7"] * 6,
        reward=[1.0, -1.0] * 3,
    ),
    stage(
        "`score`: no answers",
        "topr score: rows.parquet: rows without a reward need the columns completion, answer; found "
        "['prompt', 'completion'].",
        "score",
        **TWO,
    ),
    stage(
        "`score`: an answer is missing",
        "topr score: rows.parquet: Column `answer` must hold text; row 1 holds None. Fill or drop such rows, or write "
        'them as text: rows.cast_column("answer", Value("string")).',
        "score",
        **TWO,
        answer=["7", None],
    ),
    stage(
        "`score`: answers are numbers",
        "topr score: rows.parquet: Column `answer` must hold text; row 0 holds 7 (the first of 2 such rows). Fill or "
        'drop such rows, or write them as text: rows.cast_column("answer", Value("string")).',
        "score",
        **TWO,
        answer=[7, 8],
    ),
    stage(
        "`score`: a completion is missing",
        "topr score: rows.parquet: Column `completion` must hold text or messages; row 1 holds None.",
        "score",
        **{**TWO, "completion": ["7", None]},
        answer=["7", "8"],
    ),
    stage(
        "`curate`: rows that were not scored",
        "topr curate: rows.parquet: rows to choose from, as topr score writes them, need the columns prompt, "
        "reward; found ['prompt', 'completion'].",
        "curate",
        **TWO,
    ),
    stage(
        "`curate`: a reward is missing",
        "topr curate: rows.parquet: Column `reward` must hold finite numbers (float32); row 1 holds None. "
        "Fill or drop such rows.",
        "curate",
        **TWO,
        reward=[1.0, None],
    ),
    stage(
        "`curate`: rewards are text",
        "topr curate: rows.parquet: Column `reward` must hold finite numbers (float32); row 0 holds '1' "
        "(the first of 2 such rows). Fill or drop such rows.",
        "curate",
        **TWO,
        reward=["1", "-1"],
    ),
    stage(
        "`score`: some rewards are missing",
        "topr score: rows.parquet: Column `reward` must hold finite numbers (float32); row 1 holds None. "
        "Fill or drop such rows.",
        "score",
        **TWO,
        reward=[1.0, None],
        answer=["7", "8"],
    ),
    stage(
        "`curate`: a reward is infinite",
        "topr curate: rows.parquet: Column `reward` must hold finite numbers (float32); row 1 holds inf. "
        "Fill or drop such rows.",
        "curate",
        **TWO,
        reward=[1.0, float("inf")],
    ),
    stage(
        "`curate`: a `problem_id` is missing",
        "topr curate: rows.parquet: Column `problem_id` must hold numbers or text; row 1 holds None. Fill or "
        "drop the column.",
        "curate",
        **TWO,
        reward=[1.0, -1.0],
        problem_id=[1, None],
    ),
    stage(
        "`curate`: greedy rows",
        "topr curate: rows.parquet: Column `temperature` must hold numbers above 0; row 1 holds 0.0. Drop greedy rows "
        "(temperature 0), which are for evaluation and not for training. If the rows were sampled, drop the column: "
        "log π is then computed at 1.",
        "curate",
        **WITH_A_GREEDY_ROW,
    ),
    stage(
        "`trial`: greedy rows",
        "topr trial: Column `temperature` must hold numbers above 0; row 1 holds 0.0. Drop greedy rows (temperature "
        "0), which are for evaluation and not for training. If the rows were sampled, drop the column: log π is then "
        "computed at 1.",
        "trial",
        **WITH_A_GREEDY_ROW,
    ),
    stage(
        "`evaluate`: a problem has two greedy rows",
        "topr evaluate: rows.parquet: A greedy row has `temperature` 0, and each problem needs one if any problem has "
        "one; 1 of 2 problems do not, such as problem 0 with 2. Drop or add greedy rows, or drop the column "
        "`temperature` to count all rows as samples.",
        "evaluate",
        problem_id=[0, 0, 0, 1, 1],
        extracted=["7", "7", "7", "8", "8"],
        answer=["7", "7", "7", "8", "8"],
        temperature=[1.0, 0.0, 0.0, 1.0, 0.0],
    ),
    stage(
        "`evaluate`: a negative temperature",
        "topr evaluate: rows.parquet: Column `temperature` must hold numbers of at least 0; row 2 holds -1.0. Fill or "
        "drop the column.",
        "evaluate",
        **SAMPLES,
        temperature=[1.0, 1.0, -1.0],
    ),
    stage(
        "`evaluate`: neither `problem_id` nor `prompt`",
        "topr evaluate: rows.parquet: Rows to evaluate need the columns problem_id or prompt, answer, extracted or "
        "completion; problem_id or prompt missing.",
        "evaluate",
        extracted=["7", "8"],
        answer=["7", "8"],
    ),
    stage(
        "`evaluate`: a problem has fewer samples",
        "topr evaluate: rows.parquet: Every problem needs the same number of samples; the most are 2, and 1 "
        "of 2 problems have fewer (problem 1: 1).",
        "evaluate",
        **SAMPLES,
    ),
    stage(
        "`evaluate`: a problem has two right answers",
        "topr evaluate: rows.parquet: All rows of a problem need the same `answer`; those of 1 problems "
        "differ, as in 0.",
        "evaluate",
        **{**SAMPLES, "answer": ["7", "8", "8"]},
    ),
    stage(
        "`evaluate`: an unknown verdict",
        "topr evaluate: rows.parquet: Column `verdict` must hold correct, incorrect, invalid; row 1 holds 'wrong'. "
        "Fix or drop such rows.",
        "evaluate",
        **SAMPLES,
        verdict=["correct", "wrong", "correct"],
    ),
    stage(
        "`evaluate`: a score is NaN",
        "topr evaluate: rows.parquet: Scores must be finite numbers; 1 of 2 are not.",
        "evaluate",
        problem_id=[0, 0],
        extracted=["7", "8"],
        answer=["7", "7"],
        score=[0.5, float("nan")],
    ),
]

LOG_OF_VERL = {"input": "1 + 1 =", "output": "2", "gts": "2", "score": 1.0, "step": 1}


def imported(given: str, message: str, *lines: Any, also: dict[str, str] | None = None, **settings: str) -> Case:
    """A log of verl with these lines; `also` are files beside it."""

    def do(kit: Kit) -> None:
        folder = kit.folder / "log"
        folder.mkdir()
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        (folder / "1.jsonl").write_text("".join(f"{text}\n" for text in texts))
        for name, text in (also or {}).items():
            (kit.folder / name).write_text(text)
        kit.note()
        more = [part for name, value in settings.items() for part in (f"--{name}", value)]
        kit.topr("import", "--format", "verl", "--input", "log", "--output_dir", "out", *more)

    return Case(given, do, message, NO_SHARD, SystemExit)


IMPORTED = [
    imported(
        "fields that are missing",
        "topr import: log/1.jsonl, line 2: it lacks output; it has gts, input, score, step.",
        LOG_OF_VERL,
        {name: value for name, value in LOG_OF_VERL.items() if name != "output"},
    ),
    imported(
        "a value of another kind",
        'topr import: log/1.jsonl, line 1: its completion is ["2"], and must be text.',
        {**LOG_OF_VERL, "output": ["2"]},
    ),
    imported(
        "a reward that is no number",
        "topr import: log/1.jsonl, line 1: score is 'high', and a reward must be a finite number.",
        {**LOG_OF_VERL, "score": "high"},
    ),
    imported(
        "a reward that is NaN",
        "topr import: log/1.jsonl, line 2: score is nan, and a reward must be a finite number.",
        LOG_OF_VERL,
        {**LOG_OF_VERL, "score": float("nan")},
    ),
    imported(
        "two rewards for one completion",
        "topr import: log/1.jsonl, line 1: score holds 2 reward(s) for 1 completion(s): it must be a list with one for "
        "each.",
        {**LOG_OF_VERL, "score": [1, 0]},
    ),
    imported(
        "a second file that has an id twice",
        "topr import: rewards.jsonl, line 2 has the id 'a', which an earlier line has, too.",
        LOG_OF_VERL,
        also={"rewards.jsonl": '{"id": "a", "reward": 1}\n{"id": "a", "reward": 0}\n'},
        rewards="rewards.jsonl",
    ),
    imported(
        "an array of records",
        "topr import: log/1.jsonl, line 1: it begins a JSON array: write one record per line.",
        json.dumps([LOG_OF_VERL], indent=1),
    ),
    imported(
        "a list of messages",
        "topr import: log/1.jsonl, line 1: it lacks input, output, score, step; it has messages, reward; --format "
        "messages reads lists of messages.",
        {"messages": [], "reward": 1},
    ),
    imported(
        "two rewards of one run",
        "topr import: log/1.jsonl, line 2: its reward is 0, where an earlier record of run 3 has 1: a run has one "
        "reward, at one of its records or at all.",
        {**LOG_OF_VERL, "run": 3},
        {**LOG_OF_VERL, "run": 3, "score": 0},
        rollout_field="run",
    ),
    imported(
        "a file that is not compressed as its name says",
        "topr import: log/2.jsonl.gz cannot be read: zlib inflate failed: incorrect header check. Write or download it "
        "again.",
        LOG_OF_VERL,
        also={"log/2.jsonl.gz": "{}"},
    ),
    imported(
        "no line that is whole",
        "topr import: log: none of its records holds a completion to learn from.",
        '{"input": "1 +',
    ),
    imported(
        "files of several formats in a folder",
        "topr import: log must hold .jsonl files of this format alone; it has .parquet files. Name a file, or another "
        "folder.",
        LOG_OF_VERL,
        also={"log/2.parquet": ""},
    ),
    imported(
        "a field of the reward that is not there",
        "topr import: log/1.jsonl, line 1: it has no field info.score; it has gts, input, output, score, step. "
        "--skip_unrewarded leaves such records out.",
        LOG_OF_VERL,
        reward_fields="info.score",
    ),
    imported(
        "a reward that the second file lacks",
        "topr import: log/1.jsonl, line 2: --rewards has nothing for the uid 'b'. --skip_unrewarded leaves such "
        "records out.",
        {**LOG_OF_VERL, "uid": "a"},
        {**LOG_OF_VERL, "uid": "b"},
        also={"rewards.jsonl": '{"id": "a", "reward": 1}\n'},
        rewards="rewards.jsonl",
        id_field="uid",
    ),
    imported(
        "a second file of another shape",
        "topr import: rewards.jsonl, line 1 must be JSON with the fields id (text or a number) and reward.",
        LOG_OF_VERL,
        also={"rewards.jsonl": '{"uid": "a"}\n'},
        rewards="rewards.jsonl",
    ),
]

DOORS = {
    "Rows": ROWS, "log μ that rows bring": LOG_MU, "Rows of the stages": STAGES, "Files of other systems": IMPORTED,
}  # fmt: skip


@cases([case for door in DOORS.values() for case in door])
def test_case(case: Case, kit: Kit) -> None:
    case.run(kit)
