"""Test that help is grouped, and that neither cached help nor errors about unknown settings import torch."""

import subprocess
import sys

import pytest

from topr_trl.cli import help as cli_help
from topr_trl.cli import main as cli
from topr_trl.cli.help import WIDTH, format_help
from topr_trl.cli.parsing import settings_of


@pytest.mark.parametrize("command", cli.commands())
def test_the_short_help_shows_few_settings_and_the_long_one_all(command):
    short, everything = format_help(command, "Text."), format_help(command, "Text.", everything=True)
    names = settings_of(command)
    for text in (short, everything):
        assert text.startswith(f"usage: topr {command} [--config FILE] [settings]\n\nText.\n")
        assert max(map(len, text.splitlines())) <= WIDTH
    for name in names:
        assert everything.count(f"\n  --{name} ") + everything.count(f"\n  --{name},") == 1, name
    shown = [line for line in short.splitlines() if line.startswith("  --")]
    assert len(shown) <= 26
    assert ("--help_all" in short) == (len(shown) < len(names))


def test_important_settings_exist():
    everywhere = {name for command in cli.commands() for name in settings_of(command)}
    assert set(cli_help._IMPORTANT) <= everywhere


def test_settings_are_in_groups():
    text = format_help("iterate", "Text.")
    titles = [line for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert titles == ["Data:", "Model:", "Algorithm:", "Training:", "Sampling:", "Machines:"]
    training = text.partition("Training:")[2].partition("Sampling:")[0]
    assert "--learning_rate" in training
    assert "Settings:" in format_help("score", "Text.")


@pytest.mark.slow
@pytest.mark.processes
def test_the_second_help_and_a_typing_error_need_no_torch(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cli.main(["score", "--help"])
    (file,) = (tmp_path / "topr_trl").iterdir()
    kept = file.read_text()
    file.write_text("{")
    cli.main(["score", "--help"])  # A damaged cache is written again.
    assert file.read_text() == kept
    text = format_help("score", cli.commands()["score"])
    assert capsys.readouterr().out == 2 * text
    code = "import sys\nfrom topr_trl.cli.main import main\nmain(['score', '--help'])\n"
    for words in (["--taks", "math"], ["--worker", "0/2"]):
        code += f"try: main(['score', *{words}])\nexcept ValueError as error: print(error)\n"
    code += "print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == (
        f"{text}This command has no setting --taks. Did you mean --task?\n"
        "This command has no setting --worker. It is a setting of topr sample.\nFalse\n"
    )
