"""The card of a model: what it was trained with and on, and what was measured."""

import re
import textwrap
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers.training_args import OptimizerNames

from topr_trl import __version__
from topr_trl.config import TOPRArguments
from topr_trl.evaluation.estimates import Evaluation
from topr_trl.evaluation.report import Evaluations

PAPER: dict[str, str] = {
    "title": "Tapered Off-Policy REINFORCE: Stable and efficient reinforcement learning for LLMs",
    "id": "2503.14286",
    "citation": textwrap.dedent("""\
        @article{leroux2025topr,
            title  = {{Tapered Off-Policy REINFORCE: Stable and efficient reinforcement learning for LLMs}},
            author = {Nicolas {Le Roux} and Marc G. Bellemare and Jonathan Lebensold and Arnaud Bergeron and
                      Joshua Greaves and Alex Fr{\\'e}chette and Carolyne Pelletier and Eric Thibodeau-Laufer and
                      S{\\'a}ndor Toth and Sam Work},
            year   = 2025,
            eprint = {arXiv:2503.14286},
        }"""),
}

TAGS = ("trl", "topr", "arxiv:2503.14286")

PICTURE = "evaluation.png"

_TEMPLATE = Path(__file__).with_name("model_card.md")

_LONGEST_PROMPT = 600  # characters; a longer one would bury the card


def training_facts(args: TOPRArguments, rows: str, steps: int, learning_rate: float, optim: str) -> dict[str, str]:
    """What both trainers and the stage `train` can tell of a training."""
    limits, share = args.limits, args.effective_positive_share
    return {
        "rows": rows,
        "baseline": str(args.baseline) if share is None else f"solved for an effective positive share of {share:g}",
        "curation": args.curation,
        "truncation limits": f"R >= 0: [{limits.a_pos:g}, {limits.b_pos:g}]; R < 0: [{limits.a_neg:g}, "
        f"{limits.b_neg:g}] (`{args.preset}`)",
        "ratio": f"{args.ratio_level}, log μ of the {args.log_mu}",
        "steps": f"{steps}, learning rate {learning_rate:g}, {OptimizerNames(optim).value}",
    }


def model_card(
    data: ModelCardData,
    repo_id: str,
    facts: Mapping[str, str],
    *,
    problems: str | None = None,
    prompt: Any = None,
    max_new_tokens: int | None = None,
    links: str = "",
) -> ModelCard:
    """The card of a model.

    Args:
        data: metadata; the base model is taken from there.
        repo_id: the model's name on the Hub.
        facts: of the training.
        problems: whose answers it was trained on.
        prompt: text or messages, for the quick start; a long one is left out.
        max_new_tokens: of a response.
        links: Markdown, to what trackers have recorded.
    """
    packages = {"TRL": "trl", "Transformers": "transformers", "PyTorch": "torch", "Datasets": "datasets",
                "Tokenizers": "tokenizers"}  # fmt: skip
    versions = {"topr_trl": __version__} | {name: version(package) for name, package in packages.items()}
    data.tags = list(dict.fromkeys([*(data.tags or []), *TAGS]))
    shown = repr(prompt)
    card: ModelCard = ModelCard.from_template(
        data,
        template_path=str(_TEMPLATE),
        name=repo_id.rpartition("/")[2],
        repo_id=repo_id,
        problems=problems,
        prompt=shown if prompt and len(shown) <= _LONGEST_PROMPT else None,
        max_new_tokens=max_new_tokens,
        facts=facts_table(facts),
        links=links,
        versions="\n".join(f"- {name}: {number}" for name, number in versions.items()),
        citation=PAPER["citation"],
    )
    return card


def add_evaluation(
    card: ModelCard,
    evaluations: Mapping[str, Evaluation],
    *,
    picture: bool,
    tested_on: str | None = None,
    dataset: str | None = None,
) -> None:
    """Put a table of evaluations, and the last one's results as metadata, into a card; one that is there is replaced.

    Args:
        card: changed in place.
        evaluations: by name, such as `before` and `after`.
        picture: whether `PICTURE` is pushed with it.
        tested_on: what the problems are, and how responses were drawn.
        dataset: the problems' name on the Hub; without it there is no metadata.
    """
    lines = ["## Evaluation", ""]
    lines += [f"Tested on {tested_on}.", ""] if tested_on else []
    compared = Evaluations(evaluations)
    lines += [markdown_table(["measure", *evaluations], compared._rows()), "", *compared._notes(), ""]
    lines += [f"![{' and '.join(evaluations)}]({PICTURE})", ""] if picture else []
    section = "\n".join([*lines, ""])
    remove_evaluation(card)
    start, heading, end = card.text.partition("## Training procedure")
    card.text = f"{start}{section}{heading}{end}" if heading else f"{card.text.rstrip()}\n\n{section}"
    last = list(evaluations.values())[-1]
    if dataset:
        curves = {"pass": last.pass_at, "maj": last.maj_at}
        card.data.eval_results = [
            EvalResult(
                task_type="text-generation", dataset_type=dataset, dataset_name=dataset, dataset_split="test",
                metric_type=f"{measure}@{k}", metric_value=round(100 * estimate.value, 2),
            )
            for measure, curve in curves.items() for k, estimate in curve.items()
        ]  # fmt: skip


def remove_evaluation(card: ModelCard) -> None:
    """Take what `add_evaluation` has put there out of a card."""
    card.text = re.sub(r"^## Evaluation\n.*?(?=^## |\Z)", "", card.text, flags=re.MULTILINE | re.DOTALL)
    card.data.eval_results = None


def adapt(card: ModelCard, repo_id: str, step: int | None = None) -> None:
    """Let a card that a trainer has written speak of where the model is pushed, and of the step that is pushed.

    What was measured after another step is taken out.
    """
    start = r'(?<=pipeline\("text-generation", model=")[^"]*'
    card.text = re.sub(start, lambda _: repo_id, card.text)
    told = re.search(r"(?<=^\| steps \| )\d+", card.text, re.MULTILINE)
    if told and step is not None and step != int(told[0]):
        card.text = f"{card.text[: told.start()]}{step}{card.text[told.end() :]}"
        remove_evaluation(card)


def facts_table(facts: Mapping[str, str], *header: str) -> str:
    return markdown_table(header or ("setting", "value"), [[name, fact] for name, fact in facts.items()])


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
