"""Run the Python code of README.md, SKILL.md and docs/, and check their commands and links.

The fixture `world` provides small models, datasets and files under the names that the pages use.
"""

import json
import logging
import re
import shlex
import tomllib
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name

import pytest
import torch
import yaml
from datasets import Dataset
from recorders import recorder
from transformers import AutoModelForCausalLM, AutoTokenizer

import topr_trl
from topr_trl import SamplingArguments, load_rows, sample_completions, save_rows, score_completions
from topr_trl.cli.command_names import commands as known_commands
from topr_trl.cli.main import full_arguments
from topr_trl.cli.parsing import parse
from topr_trl.recording.grading import read_reward
from topr_trl.settings.unsupported import GRPO_ONLY, SFT_ONLY
from topr_trl.tasks import arithmetic, gsm8k
from topr_trl.trainers.metrics import row_metrics

ROOT = Path(__file__).parent.parent
ON_THE_SITE = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "SKILL.md", *ON_THE_SITE]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
_FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


def blocks(page, language):
    """Return the line number and the text of each code block in a language."""
    text = page.read_text()
    return [(text[: m.start(3)].count("\n"), m[3]) for m in _FENCE.finditer(text) if m[2] == language]


def with_blocks(language):
    return pytest.mark.parametrize("page", [pytest.param(p, id=n) for p, n in zip(PAGES, NAMES, strict=True)
                                            if blocks(p, language)])  # fmt: skip


@pytest.fixture(scope="module")
def sampled(tmp_path_factory):
    """Return a folder with 16 completions of the bundled model for each of four built-in problems."""
    model = AutoModelForCausalLM.from_pretrained(arithmetic.CARELESS_MODEL, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(arithmetic.CARELESS_MODEL)
    problems = gsm8k.prepare(arithmetic.arithmetic_dataset(4, seed=1), num_shots=0)
    rows = sample_completions(model, tokenizer, problems, SamplingArguments(max_new_tokens=48), ("Question:",))
    folder = tmp_path_factory.mktemp("sampled")
    save_rows(score_completions(rows, gsm8k.judge), folder)
    return folder


@pytest.fixture
def world(sampled, tokenizer, tmp_path, monkeypatch):
    """Create a working directory with all models, datasets, files and folders that the pages name."""
    monkeypatch.chdir(tmp_path)
    # Without an accelerator, TRL's default bf16=True raises an error unless `use_cpu` is set. The pages do not set it.
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)
    whole_training = topr_trl.TOPRTrainer.train

    def two_steps(trainer, *args, **kwargs):  # instead of 192, with the pages' generation batches of 64 prompts
        trainer.args.max_steps = 2
        return whole_training(trainer, *args, **kwargs)

    monkeypatch.setattr(topr_trl.TOPRTrainer, "train", two_steps)
    model = AutoModelForCausalLM.from_pretrained(arithmetic.CARELESS_MODEL, dtype="float32")
    for name in ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-Coder-0.5B-Instruct"):
        model.save_pretrained(name)
        tokenizer.save_pretrained(name)
    rows = load_rows(sampled)

    def save(path, dataset):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        dataset.to_json(path)

    save("my/prompts/train.jsonl", rows.select_columns(["prompt", "answer"]))
    by_reward = rows.sort("reward").select([*range(6), *range(len(rows) - 6, len(rows))])  # right and wrong completions
    save("logs.jsonl", by_reward.select_columns(["prompt", "completion", "reward"]))
    said = [[{"role": role, "content": text}] for role, text in (("user", "Hello?"), ("assistant", "Yes."))]
    opinions = {"prompt": said[:1] * 4, "completion": said[1:] * 4, "label": [True, False, True, False]}
    save("trl-lib/kto-mix-14k/train.jsonl", Dataset.from_dict(opinions))
    other = [said[0][0], {"role": "assistant", "content": "No."}]
    pairs = {"chosen": [said[0] + said[1]] * 2, "rejected": [other] * 2}  # as on the Hub, without a column `prompt`
    save("trl-lib/ultrafeedback_binarized/train.jsonl", Dataset.from_dict(pairs))
    for folder in ("topr-gsm8k/before/test", "topr-gsm8k/after/test"):
        save_rows(rows, folder)
    return tmp_path


@pytest.mark.slow
@with_blocks("python")
def test_python(page, world):
    names = {"__name__": "__main__"}
    with recorder(world / "my-log") if page.name == "recording.md" else nullcontext() as running:
        for line, code in blocks(page, "python"):
            if running:
                code = code.replace("http://127.0.0.1:9000", running.address).replace("Qwen/Qwen2.5-0.5B-Instruct", "m")
            exec(compile("\n" * line + code, str(page), "exec"), names)
        if running:
            (rollout,) = running.rollouts()
            names["grade"](rollout["rollout_id"], 0.5)
            names["grade"](rollout["rollout_id"], label=True, name="rating", comment="good")
            assert running.rollouts()[0]["rewards"] == {"rating": 1.0, "reward": 0.5}


def commands(text):
    """Yield the commands of a block: with joined lines and `$((...))` as 0, without comments, variables and `&`."""
    text = re.sub(r"\$\(\(.*?\)\)", "0", text.replace("\\\n", " "))
    for line in text.splitlines():
        words = shlex.split(line.rstrip("& "), comments=True)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words = words[1:]
        if words:
            yield words


@with_blocks("bash")
def test_bash(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)
    Path("examples").symlink_to(ROOT / "examples")
    Path("rollouts").mkdir()
    for path, text in files_of(page).items():
        Path(path).write_text(text)
    variables = {}
    for _, text in blocks(page, "bash"):
        for words in commands(text):
            if assigned := re.fullmatch(r"(\w+)=(.*)", words[0]):
                value = re.sub(r"\$\w+", lambda name: " ".join(variables.get(name[0], [name[0]])), assigned[2])
                variables[f"${assigned[1]}"] = shlex.split(value)
                continue
            check([part for word in words for part in variables.get(word, [word])])


def files_of(page):
    """Return the YAML files that a page shows, by the name in the comment on their first line."""
    shown = {}
    for _, text in blocks(page, "yaml"):
        if named := re.match(r"# (\S+\.yaml)", text):
            shown[named[1]] = text
    return shown


def test_messages_and_pages_install_a_clone_and_no_unpublished_package():
    """The package is not on the package index, so `pip install topr_trl` fails or installs something else."""
    files = [*PAGES, *(path for folder in ("topr_trl", "docs", "examples") for path in (ROOT / folder).rglob("*"))]
    texts = [path.read_text() for path in files if path.suffix in (".py", ".md", ".html", ".ipynb", ".txt")]
    installed = re.findall(r"pip install (\S+)", "\n".join(texts))
    assert len(installed) > 15
    for package in installed:
        assert not re.search(r"topr[_-]?trl", package), package
        check(["pip", "install", package])


def test_the_address_of_the_repository_is_that_of_the_package():
    """pyproject.toml holds the address. The other places follow it."""
    address = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
    files = [*PAGES, *(ROOT / "examples" / "notebooks").glob("*.ipynb")]
    cloned = [url for page in files for url in re.findall(r"git clone (?:--\S+ )*([^\s;\"\\]+)", page.read_text())]
    assert cloned
    assert set(cloned) == {address}


def check(words):
    """Check that `topr` can parse a command, or that the files and names in another command exist."""
    program, *rest = words
    if program == "topr":
        assert rest[0] in known_commands(), rest
        if rest[1:] not in (["--help"], ["--help_all"]):
            parse(rest[0], full_arguments(rest[0], rest[1:]))
    elif program.startswith("--"):  # a setting without a command
        parse("train", words)
    elif program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert rest[0] == "install"
        for asked in re.findall(r"\.\[(.*?)\]", " ".join(rest)):
            assert set(asked.split(",")) <= set(extras), asked
    elif program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert {word for word in rest if "=" not in word} <= set(targets), rest
    elif program in ("accelerate", "python"):
        started = rest[1:] if rest[0] == "launch" else rest
        while started[0].startswith("--") and "=" not in started[0]:  # options of the launcher, each with a value
            if "/" in started[1]:
                assert (ROOT / started[1]).exists(), started[1]
            started = started[2:]
        if started[0] == "-m":
            assert find_spec(started[1]) is not None, started[1]
            if started[1] in ("topr_trl", "topr_trl.cli.main"):
                check(["topr", *started[2:]])
        else:
            assert (ROOT / started[0]).is_file(), started[0]
    elif program == "curl":
        read_reward(json.loads(rest[rest.index("-d") + 1]))
    else:
        assert program in ("cd", "wait", "pre-commit", "git", "hf", "source", ".", "vllm"), (
            f"{words}: add this program to `check`"
        )


@with_blocks("yaml")
def test_yaml(page, tmp_path):
    for _, text in blocks(page, "yaml"):
        assert yaml.safe_load(text)
    for name, text in files_of(page).items():
        (tmp_path / name).write_text(text)
        parse("iterate", ["--config", str(tmp_path / name), "--bf16", "False"])


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_blocks_are_of_a_kind_that_is_tried(page):
    """Code blocks are in a language that the tests above check. Output of programs has no language."""
    assert {m[2] for m in _FENCE.finditer(page.read_text())} <= {"", "python", "bash", "yaml"}


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_lead_somewhere(page):
    """All links lead to existing files. Pages in docs/ link only to files in docs/."""
    text = re.sub(r"`[^`\n]*`", "", _FENCE.sub("", page.read_text()))
    home = ROOT / "docs" if page in ON_THE_SITE else ROOT
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)|(?:src|href)=\"([^\"#]+)\"", text):
        target = "".join(target)
        if not re.match(r"https?://|mailto:", target):
            path = (page.parent / target).resolve()
            assert path.exists(), target
            assert path.is_relative_to(home), f"{target} is not on the site"


def test_comments_do_not_break_paragraphs():
    """Markdown ends a paragraph at a line that starts with a comment, and shows the rest of the line as it is."""
    for page in [*PAGES, *sorted((ROOT / "benchmarks").rglob("*.md"))]:
        lines = page.read_text().splitlines()
        broken = [line for line in lines if re.match(r"\s*<!--", line) and not re.fullmatch(r"<!--[^>]*-->", line)]
        assert not broken, f"{page.relative_to(ROOT)}: join these lines with the line before: {broken}"


def directives():
    return re.findall(r"^::: (\S+)", "\n".join(page.read_text() for page in PAGES), re.MULTILINE)


def test_every_public_name_is_on_an_api_page():
    shown = directives()
    for name in topr_trl.__all__:
        assert f"topr_trl.{name}" in shown, name


def test_the_overview_of_the_api_has_every_public_name_and_every_page():
    text = (ROOT / "docs" / "api" / "index.md").read_text()
    tables = re.findall(r"^\|.*", text, re.MULTILINE)
    names = re.findall(r"`([\w.]+)`", "\n".join(tables))
    assert sorted(name for name in names if "." not in name) == sorted(topr_trl.__all__)
    for name in names:
        assert resolve_name(f"topr_trl.{name}"), name
    pages = {page.name for page in (ROOT / "docs" / "api").glob("*.md")} - {"index.md"}
    assert set(re.findall(r"\((\w+\.md)\)", text)) == pages


@pytest.mark.slow
def test_docstrings_are_read_without_a_warning(caplog):
    griffe = pytest.importorskip("griffe", reason="the extra docs is not installed")
    extensions = griffe.load_extensions(str(ROOT / "scripts" / "griffe_docstrings.py"))
    package = griffe.load("topr_trl", search_paths=[str(ROOT)], extensions=extensions)
    options = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["plugins"]["mkdocstrings"]
    how = options["handlers"]["python"]["options"]["docstring_options"]
    seen = 0

    def read(thing):
        nonlocal seen
        if thing.docstring:
            seen += len(thing.docstring.parse("google", **how))
        for member in thing.members.values():
            if not member.is_alias:
                read(member)

    with caplog.at_level(logging.WARNING, logger="griffe"):
        for path in directives():
            read(package[path.removeprefix("topr_trl.")])
    assert seen > 200
    assert not caplog.messages


def test_every_page_is_in_the_navigation_once():
    nav = re.findall(r'"([\w/]+\.md)"', (ROOT / "zensical.toml").read_text())
    assert sorted(nav) == sorted(str(page.relative_to(ROOT / "docs")) for page in ON_THE_SITE)


def test_llms_txt_lists_the_pages_of_the_site():
    """All pages but Home, and of the API only the overview."""
    linked = re.findall(r"\]\(([\w/]+)\.html\)", (ROOT / "docs" / "llms.txt").read_text())
    pages = [page.relative_to(ROOT / "docs").with_suffix("").as_posix() for page in ON_THE_SITE]
    assert sorted(linked) == [page for page in pages if page == "api/index" or ("/" not in page and page != "index")]


def test_every_folder_of_the_package_has_an_api_page():
    folders = {path.parent.name for path in (ROOT / "topr_trl").glob("*/__init__.py")}
    for folder in folders:
        text = (ROOT / "docs" / "api" / f"{folder}.md").read_text()
        assert re.findall(r"^::: topr_trl\.(\w+)", text, re.MULTILINE), folder


def test_every_refused_setting_is_in_the_tables():
    text = (ROOT / "docs" / "online_trainer.md").read_text()
    for name in GRPO_ONLY:
        assert f"`{name}`" in text or any(f"`{name[:n]}*`" in text for n in range(4, len(name))), name
    text = (ROOT / "docs" / "offline_trainer.md").read_text()
    for name in SFT_ONLY:
        assert f"`{name}`" in text, name


def test_every_metric_is_on_its_page():
    text = (ROOT / "docs" / "metrics.md").read_text()
    rewards = torch.tensor([1.0, -1.0, -1.0])
    for name in row_metrics(torch.tensor([1.0, 0.5, 0.0]), torch.tensor([0.1, -0.7, -9.0]), rewards):
        name = re.sub(r"log_ratio/(positives|negatives)/\w+", "log_ratio/", name)
        assert name in text, name
