"""Write model cards: the method, the training rows, the settings and the evaluations."""

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

from huggingface_hub import ModelCard, ModelCardData
from transformers.training_args import OptimizerNames

from topr_trl import __version__
from topr_trl.limits import PRESETS
from topr_trl.settings.shared import TOPRArguments

CITATION = textwrap.dedent("""\
    @article{leroux2025topr,
        title  = {{Tapered Off-Policy REINFORCE: Stable and efficient reinforcement learning for LLMs}},
        author = {Nicolas {Le Roux} and Marc G. Bellemare and Jonathan Lebensold and Arnaud Bergeron and
                  Joshua Greaves and Alex Fr{\\'e}chette and Carolyne Pelletier and Eric Thibodeau-Laufer and
                  S{\\'a}ndor Toth and Sam Work},
        year   = 2025,
        eprint = {arXiv:2503.14286},
    }""")

TAGS = ("trl", "topr", "arxiv:2503.14286")


def training_facts(
    args: TOPRArguments, rows: str, steps: int, offline: bool, optimizer: Mapping[str, Any] | None = None
) -> dict[str, str]:
    """Return the settings and the number of steps of a run, by their names in the model card.

    Args:
        args ([`TOPRArguments`]):
            Settings of the trainer.
        rows (`str`):
            Description of the training rows.
        steps (`int`):
            Number of optimizer steps.
        offline (`bool`):
            Whether the training rows existed before training.
        optimizer (`Mapping`, *optional*):
            Class and arguments of an optimizer that replaces the one in `args`. See `given_optimizer`.
    """
    name: str = OptimizerNames(args.optim).value
    rate: float | None = args.learning_rate
    if optimizer and optimizer["class"]:
        name, rate = optimizer["class"], optimizer.get("lr")
    limits, share = args.limits, args.effective_positive_share
    baseline = "middle between the two rewards" if args.curation == "balanced" else str(args.baseline)
    changed = "" if limits == PRESETS[args.preset] else "changed from "
    return {
        "rows": rows,
        "baseline": baseline if share is None else f"solved for an effective positive share of {share:g}",
        "curation": args.curation,
        "truncation limits": f"R >= 0: [{limits.a_pos:g}, {limits.b_pos:g}]; R < 0: [{limits.a_neg:g}, "
        f"{limits.b_neg:g}] ({changed}`{args.preset}`)",
        "ratio": f"{describe_ratio(args)}, log μ {_whose_log_mu(args, offline)}",
        "steps": f"{steps}, {'' if rate is None else f'learning rate {rate:g}, '}{name}",
    }


def describe_ratio(args: TOPRArguments) -> str:
    """Describe the level of the ratio, with the length of a segment.

    Args:
        args (`TOPRArguments`): Settings of the loss.
    """
    if args.ratio_level != "segment":
        return args.ratio_level
    return f"segments of {'one token' if args.segment_tokens == 1 else f'{args.segment_tokens} tokens'}"


def _whose_log_mu(args: TOPRArguments, offline: bool) -> str:
    """Describe the source of log μ. In the card, the description follows the words "log μ"."""
    if args.log_mu == "sampler":
        return "as the sampler reported it"
    if offline:
        return "of the model that training started from, which is a proxy for rows of another model without `mu_logps`"
    return "computed by the trainer"


def model_card(
    data: ModelCardData,
    repo_id: str,
    facts: Mapping[str, str],
    *,
    problems: str | None = None,
    prompt: Any = None,
    max_new_tokens: int | None = None,
    is_float32: bool = False,
    links: str = "",
) -> ModelCard:
    """Return a model card without evaluations. `add_section` adds evaluations.

    Args:
        data (`ModelCardData`):
            Metadata, with the base model. The function adds tags to it.
        repo_id (`str`):
            Name of the model on the Hub, or its folder.
        facts (`Mapping[str, str]`):
            Settings and numbers of the run, by name. See `training_facts`.
        problems (`str`, *optional*):
            Description of the problems that the model was trained on, in Markdown.
        prompt (`str` or `list[dict]`, *optional*):
            Text or messages for the quick start. A prompt whose `repr` has more than 600 characters is left out.
        max_new_tokens (`int`, *optional*):
            Length of the completion in the quick start, in tokens.
        is_float32 (`bool`, *optional*, defaults to `False`):
            Whether the card says to load the weights in float32.
        links (`str`, *optional*, defaults to `""`):
            Links to the run's pages in experiment trackers, in Markdown.
    """
    packages = {"TRL": "trl", "Transformers": "transformers", "PyTorch": "torch", "Datasets": "datasets",
                "Tokenizers": "tokenizers"}  # fmt: skip
    versions = {"topr_trl": __version__} | {name: version(package) for name, package in packages.items()}
    data.tags = list(dict.fromkeys([*(data.tags or []), *TAGS]))
    shown = repr(prompt)
    return ModelCard.from_template(
        data,
        template_path=str(Path(__file__).with_name("model_card.md")),
        name=Path(repo_id).name,
        repo_id=repo_id,
        problems=problems,
        # The quick start is at the top, so a long prompt would hide the other sections.
        prompt=shown if prompt and len(shown) <= 600 else None,
        max_new_tokens=max_new_tokens,
        is_float32=is_float32,
        facts=markdown_table(("setting", "value"), facts.items()),
        links=links,
        versions="\n".join(f"- {name}: {number}" for name, number in versions.items()),
        citation=CITATION,
    )


class CardSection(Protocol):
    """Object that can write the section `## Evaluation` of a model card, such as `topr_trl.Evaluations`."""

    def write_card_section(self, folder: Path) -> str:
        """Return Markdown that starts with `## Evaluation`, and save the plots that it shows in the folder."""


def complete_card(
    folder: Path,
    name: str,
    facts: Mapping[str, str],
    dataset_name: str | None,
    is_adapter: bool,
    evaluations: CardSection | None,
) -> None:
    """Replace the text of TRL's model card in a folder. The metadata and the links to trackers stay.

    Args:
        folder (`Path`):
            Folder with the file `README.md`.
        name (`str`):
            Name of the model on the Hub, or its folder.
        facts (`Mapping[str, str]`):
            Settings and numbers of the run. See `training_facts`.
        dataset_name (`str`, *optional*):
            Id of the dataset of problems on the Hub.
        is_adapter (`bool`):
            Whether the model is an adapter.
        evaluations (`CardSection`, *optional*):
            Evaluations for the section `## Evaluation`.
    """
    of_trl = ModelCard.load(folder / "README.md")
    of_trl.data.pop("licence")
    if is_adapter:
        of_trl.data.library_name = "peft"
    problems = dataset_name and f"[{dataset_name}](https://huggingface.co/datasets/{dataset_name})"
    links = "\n".join(re.findall(r"^\[<img .*", of_trl.text, re.MULTILINE))
    card = model_card(of_trl.data, name, facts, problems=problems, links=links)
    if evaluations:
        add_section(card, evaluations.write_card_section(folder))
    card.save(folder / "README.md")


def add_section(card: ModelCard, section: str) -> None:
    """Add or replace the section `## Evaluation` of a card.

    The section is placed before `## Training procedure`, or at the end if the card has no such heading. Evaluation
    results in the card's metadata are removed.
    """
    remove_evaluation(card)
    start, heading, end = card.text.partition("## Training procedure")
    section = f"{section.rstrip()}\n\n"
    card.text = f"{start}{section}{heading}{end}" if heading else f"{card.text.rstrip()}\n\n{section}"


def remove_evaluation(card: ModelCard) -> None:
    """Remove the section `## Evaluation` of a card, and the evaluation results in its metadata."""
    card.text = re.sub(r"^## Evaluation\n.*?(?=^## |\Z)", "", card.text, flags=re.MULTILINE | re.DOTALL)
    card.data.eval_results = None


def adapt(card: ModelCard, repo_id: str, step: int | None = None) -> None:
    """Adapt a card that a trainer wrote, before it is uploaded with a model.

    The name in the quick start becomes `repo_id`. If `step` differs from the number of steps in the card, the function
    replaces this number and removes the evaluations.
    """
    start = r'(?<=pipeline\("text-generation", model=")[^"]*'
    card.text = re.sub(start, lambda _: repo_id, card.text)
    told = re.search(r"(?<=^\| steps \| )\d+", card.text, re.MULTILINE)
    if told and step is not None and step != int(told[0]):
        card.text = f"{card.text[: told.start()]}{step}{card.text[told.end() :]}"
        remove_evaluation(card)


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table. Each row has one cell for each name in the header."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
