"""Test that each command takes its own settings, refuses settings of other commands, and prints its results."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from transformers import TrainerControl
from trl import get_peft_config

import topr_trl
from tests.loops import start_topr
from topr_trl.cli import command_names
from topr_trl.cli import main as cli
from topr_trl.cli import parsing as settings
from topr_trl.cli.command_names import refuse_unknown
from topr_trl.cli.parsing import parse, settings_of
from topr_trl.cli.settings_index import read_index, write_index
from topr_trl.pipeline.parent_process import LOOP
from topr_trl.pipeline.stages.train import SaveAtInterrupt
from topr_trl.tasks import arithmetic

COMMANDS = cli.commands()
CPU = ["--use_cpu", "true", "--bf16", "false"]


def settings_of_others(command):
    """Return the settings that a command does not take, with the other commands that take them."""
    own, found = settings_of(command), {}
    for other in COMMANDS:
        for name in settings_of(other):
            if name not in own:
                found.setdefault(name, []).append(other)
    return found


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Return a function that writes settings to `own.yaml`, and returns the arguments that read the file."""
    monkeypatch.chdir(tmp_path)

    def write(**settings):
        (tmp_path / "own.yaml").write_text(yaml.safe_dump(settings))
        return ["--config", "own.yaml"]

    return write


def refusal(command, given):
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        cli.main([command, *given])
    assert "\n" not in str(raised.value)
    return str(raised.value)


# Settings of another command.


@pytest.mark.parametrize("command", COMMANDS)
def test_settings_of_another_command_are_refused_by_name(command, own, tmp_path):
    found, index = settings_of_others(command), read_index() or write_index()
    assert len(found) > 10

    def refused(given):
        """Return the message, without reading the index again."""
        with pytest.raises(ValueError, match="This command has no setting") as raised:
            refuse_unknown(command, given, index)
        return str(raised.value)

    for number, (name, others) in enumerate(found.items()):
        forms = ([f"--{name}", "1"], [f"--{name}=1"], [f"--{name.replace('_', '-')}", "1"])
        for given in forms[: 3 if number == 0 else 1]:
            message = refused(given)
            assert number or message == refusal(command, given)
            assert message.startswith(f"This command has no setting --{name}. It is a setting of topr ")
            assert set(others) == set(message.partition("topr ")[2].rstrip(".").split(", "))
        if command not in ("iterate", "look", "push") and name in settings_of("iterate"):
            continue  # The YAML file of a loop can hold settings that the command does not take.
        message = refused(own(**{name: 1}))
        assert message.startswith(f"This command has no setting --{name} (in own.yaml). It is a setting of topr ")
    assert {path.name for path in tmp_path.iterdir()} <= {"own.yaml"}


def test_the_yaml_of_a_loop_serves_its_stages_and_its_plan(own):
    config = own(iterations=3, learning_rate=1e-6, num_generations=8, model_name_or_path="70b", use_peft=False)
    planned = parse("plan", config)
    assert (planned.num_generations, planned.model_name_or_path) == (8, "70b")
    assert parse("sample", config).num_generations == 8
    assert parse("train", [*config, *CPU]).learning_rate == 1e-6
    assert "--iterations" in refusal("plan", ["--iterations", "3"])
    assert "--iterations (in own.yaml)" in refusal("push", config)
    assert "--split" in refusal("plan", own(split="test"))  # `split` is not a setting of the loop.


@pytest.mark.parametrize(
    ("command", "name", "hint"),
    [
        ("sample", "num_generation", "Did you mean --num_generations?"),
        ("iterate", "learning_rat", "Did you mean --learning_rate?"),
        ("score", "zzz", "topr score --help lists its settings."),
        ("plan", "output", "It is a setting of topr look."),
        (
            "train",
            "resume_from_checkpoint",
            "Run a stopped command again, and it continues from its last checkpoint.",
        ),
        (
            "iterate",
            "eval_strategy",
            "Remove it: commands do not evaluate during training. Use topr evaluate after it.",
        ),
        ("train", "num_generations_eval", "It is a setting of topr iterate, trial, evaluate, plan."),
    ],
)
def test_a_hint_for_an_unknown_setting(command, name, hint, own):
    assert refusal(command, [f"--{name}", "1"]) == f"This command has no setting --{name}. {hint}"
    if name != "num_generations_eval":  # The YAML file of a loop can hold this name.
        assert refusal(command, own(**{name: 1})) == f"This command has no setting --{name} (in own.yaml). {hint}"


def test_words_that_belong_to_no_setting_are_refused(own):
    for given in (["rows.jsonl"], ["--task", "gsm8k", "math"], [*own(task="gsm8k"), "rows.jsonl"], ["-x"]):
        assert "Unexpected argument" in refusal("score", given)


def test_a_file_without_its_setting(tmp_path):
    (tmp_path / "rows.jsonl").touch()
    assert f"--input {tmp_path / 'rows.jsonl'}" in refusal("import", [str(tmp_path / "rows.jsonl")])
    assert "--input" not in refusal("import", [str(tmp_path / "other.jsonl")])
    assert "Write" not in refusal("import", ["--input", "other.jsonl", str(tmp_path / "rows.jsonl")])
    assert "Write" not in refusal("import", ["x" * 5_000])


def test_a_repeated_input_is_refused(tmp_path):
    assert "twice" in refusal("import", ["--input", str(tmp_path), f"--input={tmp_path}"])


def test_no_command_lists_the_commands(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([])
    assert ended.value.code == 0
    assert {*COMMANDS} <= {*capsys.readouterr().out.split()}


@pytest.mark.parametrize(("name", "value"), [("model", "70b"), ("no_bf16", True)])
def test_other_spellings_of_the_command_line_are_none_of_yaml(name, value, own):
    command = "plan" if name == "model" else "train"
    assert refusal(command, own(**{name: value})).startswith(f"This command has no setting --{name} (in own.yaml).")


def test_evaluate_names_its_own_setting(own):
    assert refusal("evaluate", ["--num_generations_eval", "0"]) == "num_generations_eval must be at least 1, not 0."


def test_a_trial_has_one_number_of_completions():
    assert "no setting --num_generations." in refusal("trial", ["--num_generations", "4"])


# Values.


def test_a_config_file(own):
    file = own(num_generations=3, top_p=0.5)[1]
    for given in (["--config", file], [f"--config={file}"]):
        found = parse("sample", cli.full_arguments("sample", given))
        assert (found.num_generations, found.top_p, found.temperature) == (3, 0.5, 1.0)
        assert parse("sample", ["--config", file, "--num_generations", "4"]).num_generations == 4


UNQUOTED = "YAML reads no, off, yes and on as a bool: quote them."


@pytest.mark.parametrize(
    ("command", "name", "value", "message"),
    [
        ("sample", "num_generations", [4], "num_generations must be int, not [4]."),
        ("sample", "num_generations", True, "num_generations must be int, not True."),
        ("sample", "num_train_problems", {"a": 1}, "num_train_problems must be int or None, not {'a': 1}."),
        ("trial", "sampling_devices", "0,1", "sampling_devices must be list or None, not '0,1'."),
        ("train", "save_strategy", False, f"save_strategy must be SaveStrategy or str, not False. {UNQUOTED}"),
        ("train", "learning_rate", None, "learning_rate must be float, not None."),
        ("curate", "iteration_size", "many", None),
    ],
)
def test_values_of_another_type_in_yaml(command, name, value, message, own, capsys):
    if message is None:  # argparse checks text, as on the command line.
        with pytest.raises(SystemExit):
            parse(command, own(**{name: value}))
        assert f"--{name}" in capsys.readouterr().err
    else:
        assert refusal(command, own(**{name: value})) == message


def test_values_that_transformers_converts(own):
    parsed = parse("train", own(debug=None, fsdp=False))
    assert not parsed.debug
    assert not parsed.fsdp  # Some versions of transformers convert it to an empty list.


def test_numbers_in_yaml(own, tmp_path):
    (tmp_path / "own.yaml").write_text("learning_rate: 1e-4\nbaseline: 0.5\nmax_steps: '7'\nnum_train_epochs: 2\n")
    assert isinstance(yaml.safe_load((tmp_path / "own.yaml").read_text())["learning_rate"], str)
    found = parse("train", ["--config", "own.yaml", *CPU])
    assert (found.learning_rate, found.baseline, found.max_steps, found.num_train_epochs) == (1e-4, 0.5, 7, 2)


def test_whole_numbers_as_baseline_in_yaml(own):
    assert parse("curate", own(baseline=0)).baseline == 0.0


def test_lists_and_mappings_in_yaml(own):
    config = own(lr_scheduler_kwargs={"num_cycles": 2}, report_to=["none"], lora_target_modules=["q_proj"])
    found = parse("train", [*config, *CPU])
    assert found.lr_scheduler_kwargs == {"num_cycles": 2}
    assert found.lora_target_modules == ["q_proj"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["q_proj"], ["q_proj"]),
        (["self_attn.q_proj"], ["self_attn.q_proj"]),
        (["q_proj", "v_proj"], ["q_proj", "v_proj"]),
        (["all-linear"], "all-linear"),
        ([r".*\.(q|v)_proj"], r".*\.(q|v)_proj"),
    ],
)
def test_one_module_for_lora_is_a_name_and_no_pattern(given, expected, own, model, tmp_path):
    peft = pytest.importorskip("peft")
    for arguments in (["--lora_target_modules", *given], own(lora_target_modules=given if given[1:] else given[0])):
        found = parse("train", [*arguments, "--use_peft", "true", *CPU])
        assert found.lora_target_modules == expected
        again = own(lora_target_modules=found.lora_target_modules)  # The loop passes the parsed value to its stages.
        assert parse("train", [*again, *CPU]).lora_target_modules == expected
    names = {name for name, _ in peft.get_peft_model(model, get_peft_config(found)).named_modules()}
    assert any("q_proj.lora_A" in name for name in names)
    assert any("v_proj.lora_A" in name for name in names) == ("v_proj" in given or isinstance(expected, str))


def test_one_name_of_weights_for_lora_is_a_list(own):
    found = parse("train", own(lora_modules_to_save="lm_head", lora_target_parameters="experts.down_proj") + CPU)
    assert (found.lora_modules_to_save, found.lora_target_parameters) == (["lm_head"], ["experts.down_proj"])


# The bundled model.


def defaults(command, *given):
    values = {**command_names.read_config(given), **command_names.values_given(given)}
    return settings._settings_of_the_bundled_model(command, values)


def test_settings_of_the_bundled_model(own, capsys):
    assert defaults("iterate")["num_shots"] == 0
    assert "num_shots=0" in capsys.readouterr().out
    defaults("iterate", *own(num_shots=3, learning_rate=1e-3))
    shown = capsys.readouterr().out
    assert "num_shots" not in shown
    assert "learning_rate" not in shown
    assert "max_new_tokens=96" in shown
    assert parse("iterate", [*own(num_shots=3), *CPU]).num_shots == 3
    found = parse("iterate", CPU)
    assert (found.curation, found.iteration_size, found.learning_rate) == ("uniform", 6_000, 1e-4)
    # `topr train` uses all rows of its input, so the bundled curation defaults do not apply.
    assert not {"curation", "iteration_size"} & set(defaults("train"))
    for given in (["--curation", "anna_karenina"], ["--curation=anna_karenina"], own(curation="anna_karenina")):
        assert parse("iterate", [*given, *CPU]).iteration_size is None
    assert parse("curate", []).curation == "none"
    assert parse("sample", []).num_shots == 0
    assert parse("sample", []).dtype == "float32"
    for name in (["--model_name_or_path", "own"], ["--model-name-or-path", "own"], own(model_name_or_path="own")):
        assert parse("sample", name).num_shots == 8
    assert parse("plan", []).max_new_tokens == 512  # `plan` uses another default model.
    capsys.readouterr()
    parse("evaluate", ["--input", "rows"])
    assert capsys.readouterr().out == ""  # The rows are given, so no model is needed.
    parse("evaluate", [])
    assert "--model_name_or_path is not set" in capsys.readouterr().out


def test_a_command_takes_only_the_defaults_of_its_own_settings():
    for command in COMMANDS:
        assert set(defaults(command)) <= set(settings_of(command)) & set(arithmetic.CARELESS_SETTINGS)


# Help, and errors.


def test_the_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"topr_trl {topr_trl.__version__}\n"


def console(monkeypatch, *given):
    monkeypatch.setattr("sys.argv", ["topr", *given])
    cli.console()


def test_errors_that_users_can_fix_are_one_line(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    given = ["score", "--input", "nowhere", "--output_dir", "out"]
    for more, message in (
        ([], r"topr score: --input: nowhere does not exist\. \(--debug shows where\)"),
        (["--\x1b[2J", "0"], r"topr score: .* --\ufffd\[2J"),
        (["--worker", "0/2"], r"topr score: This command has no setting --worker\. .* topr sample\. \(--debug"),
    ):
        with pytest.raises(SystemExit, match=message) as raised:
            console(monkeypatch, *given, *more)
        assert "\n" not in raised.value.code
    with pytest.raises(FileNotFoundError):
        console(monkeypatch, "score", "--debug", *given[1:])
    assert not list(tmp_path.iterdir())


def test_a_stopped_command_promises_no_checkpoint(monkeypatch, capsys):
    """After Ctrl+C, `topr train` has no checkpoint before the first step."""
    monkeypatch.setattr(cli, "main", lambda arguments: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(SystemExit, match="130"):
        console(monkeypatch, "train", "--output_dir", "my model")
    said = capsys.readouterr().err
    assert "without any, it starts over" in said
    assert said.endswith("run: topr train --output_dir 'my model'\n")
    monkeypatch.setenv(LOOP, "1")
    with pytest.raises(SystemExit, match="130"):
        console(monkeypatch, "train")
    assert capsys.readouterr().err == ""  # The loop says how to continue.


@pytest.mark.slow
@pytest.mark.xdist_group("server")
def test_ctrl_c_saves_a_checkpoint_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{n} + 1 =", "completion": f" {n + 1}", "reward": float((-1) ** n)} for n in range(4)]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    given = "train --input rows.jsonl --output_dir x --max_steps 60 --logging_steps 1 --per_device_train_batch_size 4"
    process = start_topr(given.split(), first := tmp_path / "first.log")
    while "\nstep " not in (said := first.read_text() if first.exists() else ""):
        assert process.exitcode is None, said
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGINT)
    process.join()
    said = first.read_text()
    assert process.exitcode == 130, said
    (checkpoint,) = Path("x").glob("*/checkpoint-*")
    step = int(checkpoint.name.rpartition("-")[2])
    assert f"The checkpoint of step {step} is saved. To continue, run: topr {given}\n" in said
    again = start_topr(shlex.split(said.rpartition("run: topr ")[2]), second := tmp_path / "second.log")
    again.join()
    printed = second.read_text()
    steps = [line.split("/")[0] for line in printed.splitlines() if line.startswith("step ")]
    assert steps == [f"step {n}" for n in range(step + 1, 61)]
    assert "The model is in x/.\n" in printed


@pytest.fixture
def ctrl_c():
    """Let Ctrl+C raise `KeyboardInterrupt`, also if a shell has started the tests in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_a_second_ctrl_c_stops_training_at_once():
    interrupt, control = SaveAtInterrupt(), TrainerControl()
    several = SimpleNamespace(world_size=2, save_only_model=False)
    interrupt.on_epoch_begin(several, None, control)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    interrupt.on_epoch_begin(SimpleNamespace(world_size=1, save_only_model=False), None, control)
    interrupt.on_step_end(None, None, control)
    assert not control.should_save
    signal.raise_signal(signal.SIGINT)
    interrupt.on_epoch_begin(SimpleNamespace(world_size=1, save_only_model=False), None, control)
    interrupt.on_step_end(None, None, control)
    assert control.should_save
    assert control.should_training_stop
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("train --debug", "train"),
        ("--debug train", "train"),
        ("train --debug --seed 3", "train --seed 3"),
        ("train --debug underflow_overflow", "train --debug underflow_overflow"),
        ("train --debug underflow_overflow --debug", "train --debug underflow_overflow"),
        ("train --debug=underflow_overflow", "train --debug=underflow_overflow"),
    ],
)
def test_a_value_after_debug_is_a_setting_of_transformers(given, expected):
    assert cli.without_debug(given.split()) == expected.split()


def test_debug_with_a_value_reaches_the_trainer_and_gives_no_traceback(monkeypatch, tmp_path):
    for words in (["--debug", "underflow_overflow"], ["--debug=underflow_overflow"]):
        assert parse("train", [*words, *on_a_cpu("train")]).debug == ["underflow_overflow"]
        with pytest.raises(SystemExit, match="nowhere"):
            console(monkeypatch, "train", "--input", "nowhere", "--output_dir", str(tmp_path / "out"), *words)


@pytest.mark.parametrize("command", ["sample", "score", "curate", "log-mu", "train", "evaluate"])
def test_a_folder_to_write_is_asked_for_first(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1 =", "completion": " 2", "reward": 1, "answer": "2"}\n')
    given = [] if command == "sample" else ["--input", "rows.jsonl"]
    assert "Set --output_dir to the folder to write." in refusal(command, [*given, *on_a_cpu(command)])
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def on_a_cpu(command):
    given = {"use_cpu": "true", "bf16": "false", "gradient_checkpointing": "false", "report_to": "none"}
    return [part for name, value in given.items() if name in settings_of(command) for part in (f"--{name}", value)]


# Output.


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Return a function that runs a command and returns its output."""
    monkeypatch.chdir(tmp_path)

    def run(command, *given):
        cli.main([command, *map(str, given), *on_a_cpu(command)])
        return capsys.readouterr().out

    return run


@pytest.mark.slow
def test_each_command_ends_with_what_came_out(run, tmp_path):
    few = ["--num_train_problems", 3, "--num_generations", 4, "--problems_per_shard", 2]
    printed = run("sample", "--output_dir", "rollouts", *few)
    assert printed.endswith("\nCompletions in rollouts/: 12.\n")
    here = ["--input", "rollouts", "--output_dir", "rollouts"]
    printed = run("score", *here)
    verdicts = read("rollouts")["verdict"].to_pylist()
    counts = [(verdicts.count(verdict), verdict) for verdict in ("correct", "incorrect", "invalid")]
    found = ", ".join(f"{n} {verdict}" for n, verdict in counts if n)
    assert printed == f"{found}.\nRows with rewards in rollouts/: 12.\n"
    printed = run("curate", *here, "--curation", "uniform", "--iteration_size", 8)
    assert printed.startswith("Chosen: 8 rows, ")
    assert "\n3 problems:\n" in printed
    assert "Rows in rollouts/: 12. The column reward_after_baseline is set" in printed
    printed = run("log-mu", *here)
    assert "log-probabilities of sampler and trainer differ by " in printed
    assert printed.endswith("log μ is in rollouts/.\n")
    segments = ("--ratio_level", "segment", "--segment_tokens", 32)
    printed = run("train", "--input", "rollouts", "--output_dir", "model", "--max_steps", 1, *segments)
    _, look, evaluate, trial = printed.splitlines()[-4:]
    assert "The model is in model/.\n" in printed
    assert look.endswith("topr look model")
    assert evaluate.endswith("topr evaluate --model_name_or_path model --task gsm8k --num_shots 0 --output_dir results")
    assert trial.endswith("topr trial --ratio_level segment --segment_tokens 32 --input rollouts --test_by rewards")
    printed = run("evaluate", "--input", "rollouts", "--output_dir", "results")
    assert "pass@4" in printed
    assert printed.endswith("Evaluated the rows in rollouts. Tables, JSON and a plot are in results/.\n")
    # The second command says that there is nothing to do, and prints what the first one printed.
    again = "Nothing to do: topr score had already finished in rollouts."
    assert run("score", *here) == f"{again}\n{found}.\nRows with rewards in rollouts/: 12.\n"


def read(folder):
    return pa.concat_tables(pq.read_table(path) for path in sorted(Path(folder).glob("*.parquet")))


def test_train_puts_the_model_where_a_user_of_trl_says(run, tmp_path):
    rows = [{"prompt": f"{n} + 1 =", "completion": f" {n + 1}", "reward": float((-1) ** n)} for n in range(4)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    printed = run("train", "--output_dir", "x", "--input", "rows.jsonl")
    assert "The model is in x/.\n" in printed
    assert "--model_name_or_path x --test_dataset_name PROMPTS.jsonl --reward_funcs FILE.py:FUNCTION" in printed
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= {path.name for path in (tmp_path / "x").iterdir()}
    assert {path.name for path in tmp_path.iterdir()} == {"rows.jsonl", "x"}


def test_the_papers_values_as_a_file():
    path = Path(__file__).parents[2] / "examples" / "paper.yaml"
    loop = parse("iterate", ["--config", str(path), "--model_name_or_path", "own", "--output_dir", "x"])
    assert (loop.baseline, loop.curation) == (0.0, "anna_karenina")
    assert loop.num_generations == loop.num_generations_eval == 64
    assert (loop.optim, loop.learning_rate, loop.top_k) == ("adafactor", 5e-7, 500)


def test_a_terminal_that_cannot_show_all_signs():
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "topr_trl", "--help"]
    shown = subprocess.run(command, env=environment, capture_output=True, check=True).stdout
    assert b"Compute log ? of the rows" in shown


def test_trackers_finish_their_runs_in_each_of_several_processes():
    """wandb finishes a run at exit. The process also ends without the teardown of gloo, by `os._exit`."""
    script = (
        "import atexit; from topr_trl.cli import main as cli\n"
        "atexit.register(print, 'finished'); cli.main = lambda _: None; cli.console()\n"
        "raise AssertionError('not ended')"
    )
    environment = {**os.environ, "WORLD_SIZE": "2"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, check=True)
    assert done.stdout == b"finished\n"
