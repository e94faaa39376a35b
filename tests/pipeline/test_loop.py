import json
import os
import random
import sys
import time
import warnings
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import Mock

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from safetensors.torch import load_file

from tests.loops import loop, stage_of, start_topr, steps_of
from topr_trl import load_rows
from topr_trl.cli.main import main
from topr_trl.cli.parsing import parse
from topr_trl.pipeline import manifest, steps
from topr_trl.pipeline.launch import write_settings
from topr_trl.pipeline.lineage import weights_of
from topr_trl.pipeline.loop import check, sides_of
from topr_trl.pipeline.steps import Step
from topr_trl.pipeline.trainer_of_rows import TrainArguments

KILLS = int(os.environ.get("KILLS", 3))  # kills per loop; for more, run make test-all KILLS=20
CONFIGS = Path(__file__).parents[2] / "examples" / "accelerate_configs"
SETTINGS = {
    "num_train_problems": 24, "num_test_problems": 4, "num_shots": 0, "problems_per_shard": 4, "num_generations": 4,
    "num_generations_eval": 2, "max_new_tokens": 60, "curation": "uniform", "iteration_size": 64, "learning_rate": 1e-3,
    "optim": "adamw_torch", "adam_epsilon": 1e-5,  # Otherwise, Adam's first steps magnify rounding in tiny gradients.
    "per_device_train_batch_size": 4, "save_steps": 2, "bf16": False, "report_to": "none",
    "gradient_checkpointing": False, "use_cpu": True, "dtype": "float32", "disable_tqdm": True,
}  # fmt: skip


def start(out, **more):
    log = out.parent / f"{out.name}.log"
    return start_topr(command_of(out, **more), log, OMP_NUM_THREADS="1", ACCELERATE_USE_CPU="true")


def command_of(out, **more):
    settings = {"output_dir": out, **SETTINGS, **more}
    return ["iterate", *(part for name, value in settings.items() for part in (f"--{name}", str(value)))]


def finish(out, **more):
    """Run a loop to its end."""
    process = start(out, **more)
    process.join()
    assert process.exitcode == 0, log_of(out)


def test_steps(tmp_path):
    steps = list(steps_of(loop(tmp_path, iterations=2, model_name_or_path="base")))
    names = [step.stage.name for step in steps]
    testing = ["sample", "score", "evaluate"]
    assert names == testing + 2 * (["sample", "score", "curate", "log-mu", "train", *testing])
    models = {step.stage.args.model_name_or_path for step in steps if step.stage.name in ("log-mu", "train")}
    assert models == {"base", str(tmp_path / "iteration-1" / "model")}
    # The rows of an iteration are in one folder, to which its stages add columns.
    for step in steps[3:7]:
        assert step.stage.folder == tmp_path / "iteration-1" / "rollouts"
    pq.write_table(pa.table({"prompt": ["a"], "completion": ["b"], "answer": ["b"]}), tmp_path / "a.parquet")
    given = list(steps_of(loop(tmp_path, rows=str(tmp_path))))
    assert [step.stage.name for step in given] == [*testing, *names[4:8], *testing]
    assert given[3].stage.args.source == tmp_path
    assert given[3].stage.folder == tmp_path / "iteration-1" / "rollouts"


def test_stages_get_the_settings_of_the_loop(tmp_path):
    given = {"learning_rate": 3e-4, "max_new_tokens": 7, "num_generations_eval": 3, "num_shots": 2, "task": "math",
             "baseline": "group_mean", "preset": "tis", "seed": 5, "use_peft": True, "lora_r": 4,
             "lr_scheduler_type": "cosine", "max_grad_norm": 2.0, "num_generations": 5,
             "model_init_kwargs": {"attn_implementation": "eager"}, "lora_target_modules": ["q_proj", "v_proj"],
             "sampling_backend": "vllm", "vllm_dtype": "float32",
             "eos_token": "<|x|>", "pad_token": "<|y|>", "per_device_train_batch_size": 1, "ratio_level": "segment",
             "optim_args": "eps=1e-7", "top_p": 0.9, "temperature": 0.5, "iterations": 2}  # fmt: skip
    for step in steps_of(loop(tmp_path, accelerator_config={"split_batches": True}, **given)):
        counted = 3 if getattr(step.stage.args, "split", "train") == "test" else 5
        for name, value in {**given, "num_generations": counted}.items():
            if step.stage.name != "evaluate" and hasattr(step.stage.args, name):
                assert getattr(step.stage.args, name) == value, (step.stage.name, name)
        if step.stage.name in ("sample", "log-mu", "train"):  # stages that read a YAML file
            parsed = parse(step.stage.name, ["--config", str(write_settings(step.stage))])
            if step.stage.name != "sample":
                (step.stage.folder.parent / "rollouts").mkdir(parents=True, exist_ok=True)
            assert stage_of(step.stage.name, parsed).inputs() == step.stage.inputs()
            assert parsed.folder == step.stage.folder
        # DeepSpeed compares these settings with its config file.
        for name in ("learning_rate", "max_grad_norm", "optim_args") if step.stage.on_several_processes else ():
            assert getattr(parsed, name) == given[name], step.stage.name


@pytest.mark.parametrize(
    ("optim", "environment"),
    [
        ("adamw_torch_fused", {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}),
        ("adamw_torch", {"ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu"}),
    ],
)
def test_log_mu_of_a_sharded_model_gets_the_optimizer(tmp_path, monkeypatch, optim, environment):
    (stage,) = (step.stage for step in steps_of(loop(tmp_path, optim=optim)) if step.stage.name == "log-mu")
    path = write_settings(stage)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert parse("log-mu", ["--config", str(path)]).optim == optim


def test_test_problems_also_get_a_greedy_completion(tmp_path):
    """Rows to train on never include a greedy completion."""
    for more, tested in (({}, True), ({"greedy": False}, False)):
        steps = [step for step in steps_of(loop(tmp_path, **more)) if step.stage.name == "sample"]
        assert [(step.stage.args.split, step.stage.args.greedy) for step in steps] == [
            ("test", tested), ("train", False), ("test", tested),
        ]  # fmt: skip
        for step in steps:  # The sampling process gets the same setting.
            parsed = parse("sample", ["--config", str(write_settings(step.stage))])
            assert parsed.greedy == step.stage.args.greedy


def test_a_setting_that_is_the_default_of_another_task_is_kept(tmp_path):
    """By default, GSM8K's prompts have eight examples, and MATH's prompts have four."""
    (tmp_path / "problems.jsonl").write_text("{}")
    problems = str(tmp_path / "problems.jsonl")
    given = loop(
        tmp_path, task="math", num_shots=8, training_shots=True, dataset_name=problems, test_dataset_name=problems
    )
    for step in steps_of(given):
        if step.stage.name == "sample":
            parsed = parse("sample", ["--config", str(write_settings(step.stage))])
            assert parsed.num_shots == step.stage.args.num_shots == 8


def test_settings_that_would_fail_later_are_refused_first(tmp_path, monkeypatch):
    for name, message in (("fsdp2", "DTensors"), ("zero3_offload", "its own Adam")):
        with pytest.raises(ValueError, match=message):
            check(loop(tmp_path, accelerate_config=str(CONFIGS / f"{name}.yaml")))
    check(loop(tmp_path, accelerate_config=str(CONFIGS / "fsdp2.yaml"), optim="adamw_torch"))
    with pytest.raises(ValueError, match=r"log_mu='sampler' and temperature=0.7: `topr sample` keeps the model's own"):
        check(loop(tmp_path, log_mu="sampler", temperature=0.7))
    check(loop(tmp_path, log_mu="sampler"))
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    of_training = {"chat_template_path": str(tmp_path / "chat.jinja"), "eos_token": "7",
                   "model_init_kwargs": {"dtype": "auto"}}  # fmt: skip
    for name, value in of_training.items():
        with pytest.raises(ValueError, match=rf"{name}.* and not to sampling.* --model_name_or_path"):
            check(loop(tmp_path / "run", **{name: value}))
    check(loop(tmp_path / "run", model_init_kwargs={"device_map": "auto"}))
    if find_spec("vllm") is None:
        with pytest.raises(ImportError, match="sampling_python"):
            check(loop(tmp_path / "run", sampling_backend="vllm"))
    now = loop(tmp_path / "run")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="--accelerate_config"):
        check(now)


def test_rows_that_are_given_are_not_all_that_is_trained_on(tmp_path):
    rows, problems = str(tmp_path / "rows.jsonl"), str(tmp_path / "problems.jsonl")
    Path(rows).write_text('{"prompt": "a", "completion": "b", "reward": 1}\n' * 2)
    Path(problems).write_text('{"question": "1 + 1?", "answer": "#### 2"}\n' * 2)
    of_rows = {"rows": rows, "dataset_name": "nowhere.jsonl", "test_dataset_name": problems, "num_shots": 0}
    run = tmp_path / "run"
    check(loop(run, **of_rows))
    Path(rows).write_text('{"prompt": "a", "completion": "b", "reward": 1, "temperature": 0}\n' * 2)
    with pytest.raises(ValueError, match=r"rows.jsonl: Column `temperature` must hold numbers above 0; .*greedy"):
        check(loop(run, **of_rows))
    Path(rows).write_text('{"prompt": "a", "completion": "b", "reward": 1, "temperature": 1}\n' * 2)
    check(loop(run, **of_rows))
    for folder, finished in (("sampled", True), ("stopped", False)):
        manifest.begin(tmp_path / folder, "sample", {"task": "math"})
        pq.write_table(
            pa.table({"prompt": ["a"], "completion": ["b"], "reward": [1.0]}), tmp_path / folder / "a.parquet"
        )
        if finished:
            manifest.finish(tmp_path / folder, "sample", 1)
    with pytest.raises(ValueError, match=r"rows: .*sampled for the task math.* of the task gsm8k.*--task math"):
        check(loop(run, **{**of_rows, "rows": str(tmp_path / "sampled")}))
    check(loop(run, **{**of_rows, "rows": str(tmp_path / "sampled"), "num_test_problems": 0}))
    with pytest.raises(ValueError, match=r"--task gsm8k: .*sampled for the task math"):
        check(loop(run, **{**of_rows, "rows": str(tmp_path / "sampled"), "task": "gsm8k"}))
    with pytest.raises(ValueError, match="is not finished"):
        check(loop(run, **{**of_rows, "rows": str(tmp_path / "stopped")}))
    with pytest.raises(FileNotFoundError, match="nowhere"):  # The second iteration samples these prompts.
        check(loop(run, **of_rows, iterations=2))


def test_rows_that_another_model_wrote_give_a_warning(tmp_path):
    """The loop would compute log μ with the starting model, and the taper would restart."""
    rows = tmp_path / "rows"
    given = {"rows": str(rows), "num_test_problems": 0}
    manifest.begin(rows, "sample", {"model": "me/other", "revision": "main"})
    pq.write_table(pa.table({"prompt": ["a"], "completion": ["b"], "reward": [1.0]}), rows / "a.parquet")
    manifest.finish(rows, "sample", 1)
    with pytest.warns(UserWarning, match=r"written by model me/other, revision main, .*--model_name_or_path"):
        check(loop(tmp_path / "run", **given))
    with warnings.catch_warnings(action="error", category=UserWarning):
        check(loop(tmp_path / "run", **given, log_mu="sampler"))
        check(loop(tmp_path / "run", **given, model_name_or_path="me/other"))


@pytest.mark.parametrize("overlap", [0, 1, 2, 9])
def test_sides(tmp_path, overlap):
    """Each step uses the right model, and comes after the steps that made its model and its rows."""
    settings = loop(tmp_path, iterations=4, overlap=overlap, model_name_or_path="base")
    sides = sides_of(settings)
    assert set(sides) == ({"sampling", "training"} if overlap else {""})
    every = [step for steps in sides.values() for step in steps]
    assert len(every) == 3 + 4 * 8

    def number(path):
        return 0 if path == "base" else int(Path(path).parent.name.removeprefix("iteration-"))

    def comes_after(step, other):
        side = next(steps for steps in sides.values() if any(one is step for one in steps))
        before = side[: next(n for n, one in enumerate(side) if one is step) + 1]
        return any(one is other or one.after is other for one in before)

    trained = {number(step.stage.folder): step for step in every if step.stage.name == "train"}
    for step in every:
        if step.stage.name not in ("sample", "log-mu", "train"):
            continue
        model, iteration = number(step.stage.args.model_name_or_path), step.stage.args.iteration
        is_test = getattr(step.stage.args, "split", "train") == "test"
        assert model == (iteration if is_test else max(iteration - 1 - overlap * (step.stage.name != "train"), 0))
        assert not model or comes_after(step, trained[model])
        if step.stage.name == "train":
            (rows,) = (one for one in every if one.stage.name == "log-mu" and one.stage.args.iteration == iteration)
            assert comes_after(step, rows)
    if overlap:
        assert [step.stage.name for step in sides["training"]] == ["train"] * 4
        # The rows of the first iteration come before all tests, so that training waits only for these rows.
        assert {step.stage.folder for step in sides["sampling"][:4]} == {tmp_path / "iteration-1" / "rollouts"}


def test_weights_that_later_stages_have_read_can_be_removed(tmp_path, monkeypatch, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1 + 1 =", "completion": " 2", "reward": 1.0}\n')

    def training(name, model):
        args = TrainArguments(input=str(rows), output_dir=str(tmp_path / name), use_cpu=True, bf16=False,
                              model_name_or_path=model)  # fmt: skip
        step = Step(stage_of("train", args))
        step.stage.begin()
        for file in ("config.json", "model.safetensors"):
            (step.stage.folder / file).write_text("{}")
        return step

    first = training("first", None)
    manifest.finish(first.stage.folder, "train", 1)
    second = training("second", str(first.stage.folder))
    (first.stage.folder / "model.safetensors").unlink()
    monkeypatch.setattr(steps, "run_apart", Mock(side_effect=ChildProcessError))
    with pytest.raises(ChildProcessError):  # The second training needs the weights.
        steps.run_steps([first, second], loop(tmp_path), tmp_path)
    manifest.finish(second.stage.folder, "train", 1)
    steps.run_steps([first, second], loop(tmp_path), tmp_path)
    assert capsys.readouterr().out.count("done before") == 2


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the folder of a loop that was not interrupted. It samples beside training.

    In the first iteration, that changes no row, so the loops that are compared with it do without.
    """
    out = tmp_path_factory.mktemp("loop") / "whole"
    finish(out, overlap=1)
    return out


def log_of(out):
    return (out.parent / f"{out.name}.log").read_text()[-4_000:]


@pytest.mark.weekly
@pytest.mark.processes
@pytest.mark.xdist_group("server")
def test_sampling_workers_and_a_launcher_make_the_same(whole, tmp_path):
    config = yaml.safe_load((CONFIGS / "ddp.yaml").read_text())
    config |= {"num_processes": 2, "mixed_precision": "no", "main_process_port": 0}
    (tmp_path / "two.yaml").write_text(yaml.safe_dump(config))
    out = tmp_path / "several"
    several = {"sampling_workers": 2, "accelerate_config": tmp_path / "two.yaml", "per_device_train_batch_size": 2,
               "training_launcher": "nice -n 1"}  # fmt: skip
    for begun in (SAMPLING, TRAINING):
        kill_once(begun, out, **several)
    finish(out, **several)
    for folder in ("base/test/rollouts", "iteration-1/rollouts"):
        assert keys(whole / folder) == keys(out / folder), folder
    one, two = (load_rows(run / "iteration-1/rollouts")["mu_logps"][:] for run in (whole, out))
    for a, b in zip(one, two, strict=True):
        assert (a is None) == (b is None)
        assert a is None or a == pytest.approx(b, abs=1e-4)
    history, other = (
        json.loads((run / "iteration-1/model/trainer_state.json").read_text())["log_history"] for run in (whole, out)
    )
    assert other[-1]["epoch"] == history[-1]["epoch"]
    # Sums have another order.
    assert difference_of_weights(whole, out) < 2e-4


SAMPLING, TRAINING = "iteration-1/rollouts/**/rows-*", "iteration-1/model/**/checkpoint-*"


def kill_once(begun, out, with_its_processes=False, **settings):
    """Start a loop, and kill it when the files `begun` appear."""
    process = start(out, **settings)
    while not any(out.glob(begun)):
        assert process.exitcode is None, log_of(out)
        time.sleep(0.02)
    if with_its_processes:
        kill_all(process)
    process.kill()
    process.join()


def kill_all(process):
    for one in psutil.Process(process.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            one.kill()


def end_by_kills(out, **settings):
    """Run a loop that is killed at most `KILLS` times at any moment, let it finish, and return the number of kills."""
    moments = random.Random(0)
    kills = 0
    while True:
        process = start(out, **settings)
        # Starting the loop takes several seconds. During most of the longer waits, a stage finishes.
        process.join(moments.uniform(0.5, min(12, 180 / KILLS)) if kills < KILLS else None)
        if process.exitcode is not None:
            assert process.exitcode == 0, log_of(out)
            return kills
        loop_process = psutil.Process(process.pid)
        servers = loop_process.children()  # The server, from which stages are forked.
        stages_of_it = [
            one for one in loop_process.children(recursive=True)
            if one not in servers and one.status() != psutil.STATUS_ZOMBIE
        ]  # fmt: skip
        if kills % 3 == 0:
            kill_all(process)
        elif kills % 3 == 2 and stages_of_it:  # Kill a stage. The loop and its other stage must end.
            with suppress(psutil.NoSuchProcess):
                moments.choice(stages_of_it).kill()
            process.join(60)
            assert process.exitcode != 0  # None if the stage had just finished
        process.kill()  # Kill only the loop. Its stages must end, too.
        process.join()
        kills += 1


KILLABLE = pytest.mark.skipif(sys.platform != "linux", reason="stages end with a killed loop on Linux alone")


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.xdist_group("server")
@KILLABLE
def test_a_loop_that_is_killed_ends_as_one_that_is_not(whole, tmp_path, capfd):
    """A test in test_launch.py kills only a stage, or only the server."""
    killed = tmp_path / "killed"
    kill_once(SAMPLING, killed, with_its_processes=True)
    kill_once(TRAINING, killed)
    finish(killed)
    check_that_kills_changed_nothing(whole, killed)
    capfd.readouterr()
    main(command_of(killed))
    assert capfd.readouterr().out.count("done before") == 3 + 8  # no stage runs


@pytest.mark.weekly
@pytest.mark.processes
@pytest.mark.xdist_group("server")
@KILLABLE
@pytest.mark.parametrize("settings", [{}, {"overlap": 1, "iterations": 3}])
def test_a_loop_that_is_killed_at_any_moment_ends_as_one_that_is_not(settings, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finish(whole, **settings)
    kills = end_by_kills(killed, **settings)
    assert kills >= KILLS / 2, f"the loop ended after {kills} kills: make it longer"
    check_that_kills_changed_nothing(whole, killed, **settings)


def check_that_kills_changed_nothing(whole, killed, overlap=0, iterations=1):
    lost = repeated = 0
    folders = [f"iteration-{i}/{of}" for i in range(1, iterations + 1) for of in ("rollouts", "test/rollouts")]
    for folder in ("base/test/rollouts", *folders):
        expected, found = keys(whole / folder), keys(killed / folder)
        lost += len(set(expected) - set(found))
        repeated += len(found) - len(set(found))
        assert expected == found, folder
    difference = max(difference_of_weights(whole, killed, iteration=i) for i in range(1, iterations + 1))
    print(f"rows lost {lost}, rows repeated {repeated}, weight difference {difference}")
    assert (lost, repeated, difference) == (0, 0, 0.0)
    for i in range(1, iterations + 1):  # The right model wrote each iteration's rows.
        known = manifest.read(killed / f"iteration-{i}/rollouts").stages
        writer = i - 1 - overlap
        expected = {"weights": manifest.fingerprint(killed / f"iteration-{writer}/model")} if writer > 0 else {
            "model": "the bundled model of 0.3", "revision": "main"
        }  # fmt: skip
        assert weights_of(known["sample"]["inputs"]) == weights_of(known["log-mu"]["inputs"]) == expected


def keys(folder: Path):
    rows = load_rows(folder)
    names = [n for n in ("problem_id", "sample_id", "reward", "reward_after_baseline") if n in rows.column_names]
    return [(tuple(row["completion_ids"]), *(row[name] for name in names)) for row in rows]


def difference_of_weights(*runs: Path, iteration=1):
    weights, others = (load_file(run / f"iteration-{iteration}/model/model.safetensors") for run in runs)
    return max((weights[name] - others[name]).abs().max().item() for name in weights)
