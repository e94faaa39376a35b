"""Property tests of the package's entry points: any input is accepted, or refused by an error that names it.

Every run tries each property on the same few examples. `make fuzz` searches with new examples for a given time, and its
findings are added as `@example`.
"""

import json
import math
import tempfile
import time
import warnings
from contextlib import contextmanager
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from any_input import JSON, MESSAGES, TYPES, bundled_tokenizer, few, fewer, refused_by_name, tables
from hypothesis import assume, example, given
from hypothesis import strategies as st

from topr_trl.baseline import BASELINES, baseline_for_positive_share, effective_positive_share, subtract_baseline
from topr_trl.cli import main as cli
from topr_trl.cli.command_names import commands
from topr_trl.cli.parsing import settings_of
from topr_trl.curation import CURATIONS, REPEATING, compose
from topr_trl.data.rows import problem_column, reward_column
from topr_trl.data.tables import from_table, read_table
from topr_trl.data.tokenization import tokenize, tokenize_row
from topr_trl.evaluation.answers import samples_of
from topr_trl.evaluation.bootstrap import compare
from topr_trl.evaluation.estimates import Evaluation, evaluate_in_full
from topr_trl.limits import TruncationLimits
from topr_trl.loss import MAX_LOG_WEIGHT, topr_loss, truncated_weights
from topr_trl.pipeline import manifest
from topr_trl.pipeline.lineage import lineage
from topr_trl.rewards import VERDICTS, score_completions
from topr_trl.sandbox.worker_pool import WorkerPool
from topr_trl.settings.config import OfflineTOPRConfig
from topr_trl.settings.shared import CurationArguments, LossArguments
from topr_trl.tasks import gsm8k, hendrycks_math
from topr_trl.tasks import math_equality as math_equal
from topr_trl.trainers.metrics import row_metrics

TEXT, NUMBER = (pa.string(), st.text()), (pa.float64(), st.floats())
FEW_IDS, FEW_WORDS = (pa.int64(), st.integers(0, 2)), (pa.string(), st.sampled_from(["1", "2", "", "½"]))


@few
@given(tables(prompt=TEXT, completion=TEXT, reward=NUMBER, label=(pa.bool_(), st.booleans()), problem_id=FEW_IDS))
def test_rewards_and_problems_of_rows(rows):
    with refused_by_name("reward", "label", "no row"):
        rewards = reward_column(rows)
        assert rewards.shape == (len(rows),)
        assert np.isfinite(rewards).all()
        with refused_by_name("problem_id", "prompt"):
            problems = problem_column(rows)
            assert problems.shape == (len(rows),)
            np.unique(problems)


@few
@given(tables(problem_id=FEW_IDS, extracted=FEW_WORDS, answer=(pa.string(), st.just("1")),
              verdict=(pa.string(), st.sampled_from(VERDICTS)), score=NUMBER, subject=TEXT,
              level=(pa.int64(), st.integers(1, 5)),
              temperature=(pa.float64(), st.sampled_from([1.0, 0.7, 0.0]))))  # fmt: skip
def test_rows_to_evaluate(rows):
    names = ("problem_id", "extracted", "answer", "verdict", "core", "subject", "level", "temperature")
    with refused_by_name(*names, "samples", "row"):
        samples = samples_of(rows)
        check_evaluation(samples)


@st.composite
def encoded(draw):
    """Draw 1 to 5 problems with 1 to 9 samples each, with or without scores, which can be extreme."""
    problems, size = draw(st.integers(1, 5)), draw(st.integers(1, 9))
    count, words = problems * size, st.sampled_from(["1", "2", "3", None])
    columns = {"problem_id": pa.array(np.repeat(np.arange(problems), size)), "answer": pa.array(["1"] * count),
               "extracted": pa.array(draw(st.lists(words, min_size=count, max_size=count)), pa.string())}  # fmt: skip
    if draw(st.booleans()):
        scores = st.floats(allow_nan=False, allow_infinity=False)
        columns["score"] = pa.array(draw(st.lists(scores, min_size=count, max_size=count)))
    return samples_of(from_table(pa.table(columns)))


@few
@given(encoded())
def test_evaluations_hold_their_laws(samples):
    check_evaluation(samples)


@few
@given(encoded(), encoded(), st.integers(0, 2**32))
def test_comparisons_hold_their_laws(first, second, seed):
    with refused_by_name("same problems"):
        for difference in compare(first, second, seed).values():
            assert -1 <= difference.low <= difference.high <= 1
            assert -1 <= difference.difference <= 1
            assert 0 <= difference.share_better <= 1


def check_evaluation(samples):
    run = evaluate_in_full(samples)
    curves = (run.pass_at, run.maj_at, run.weighted_sc_at, run.best_at)
    assert all(-1e-12 <= e.value <= 1 + 1e-12 for curve in curves for e in curve.values())
    assert all(not e.standard_error < 0 for curve in curves for e in curve.values())
    assert run.greedy is None or (0 <= run.greedy.value <= 1 and run.greedy.standard_error >= 0)
    passes = [run.pass_at[k].value for k in sorted(run.pass_at)]
    assert all(a <= b + 1e-12 for a, b in pairwise(passes))  # pass@k does not fall with k.
    for k in run.maj_at:  # The winning answer is among the k samples.
        assert run.maj_at[k].value <= run.pass_at[k].value + 1e-12
        assert not run.best_at or run.best_at[k].value <= run.pass_at[k].value + 1e-12
    assert math.isclose(sum(run.shares.values()), 1)
    assert sum(run.cardinality) == run.num_problems == samples.num_problems
    assert math.isclose(run.pass_at[1].value, run.shares["correct"], abs_tol=1e-12)
    again = Evaluation.from_dict(json.loads(json.dumps(run.to_dict(), allow_nan=False)))
    assert again.to_dict() == run.to_dict()


@few
@given(tables(prompt=TEXT, completion=(pa.string(), st.text() | st.just("The answer is 1.")), answer=FEW_WORDS))
def test_rows_to_score(rows):
    assume({"answer", "completion"} <= set(rows.column_names))  # The stage requires these columns.
    with refused_by_name("completion", "answer"):
        scored = score_completions(rows, gsm8k.judge)
        assert set(scored["verdict"][:]) <= set(VERDICTS)
        assert set(scored["reward"][:]) <= {1.0, -1.0}
        for verdict, extracted in zip(scored["verdict"][:], scored["extracted"][:], strict=True):
            assert (verdict == "invalid") == (extracted is None)


IDS = (pa.list_(pa.int64()), st.lists(st.integers(0, 50)))
PROMPT = st.sampled_from([TEXT, (TYPES[11][0], MESSAGES)])


@few
@given(st.fixed_dictionaries({"prompt": st.text() | MESSAGES | IDS[1] | JSON},
                             optional={"completion": st.text() | MESSAGES | IDS[1] | JSON, "prompt_ids": IDS[1],
                                       "completion_ids": IDS[1], "finish_reason": FEW_WORDS[1]}))  # fmt: skip
def test_a_row_to_tokens(row):
    with refused_by_name("prompt", "completion"):
        prompt, completion, _ = tokenize_row(row, bundled_tokenizer())
        assert prompt
        assert completion
        assert all(isinstance(token, int) for token in (*prompt, *completion))


@fewer  # `datasets` takes 0.1 seconds per example.
@given(st.data())
def test_rows_to_tokens(data):
    columns = {"prompt": data.draw(PROMPT), "completion": data.draw(PROMPT), "finish_reason": FEW_WORDS}
    rows = data.draw(tables(**columns, **data.draw(st.sampled_from([{}, {"prompt_ids": IDS, "completion_ids": IDS}]))))
    assume(len(rows) and "prompt" in rows.column_names)  # `reward_column` refuses other rows.
    with refused_by_name("prompt", "completion"):
        tokens = tokenize(rows, bundled_tokenizer())
        lengths = [len(ids) for ids in tokens["input_ids"][:]]
        assert all(0 < prompt < both for prompt, both in zip(tokens["prompt_length"][:], lengths, strict=True))


@fewer
@given(st.lists(st.dictionaries(st.sampled_from(["prompt", "completion", "reward"]), JSON) | JSON, max_size=4),
       st.none() | st.binary(max_size=20), st.sampled_from([".jsonl", ".json", ".parquet"]))  # fmt: skip
@example([{"": None}, {}], None, ".jsonl")  # raises a KeyError in datasets 4.7
@example([None], None, ".json")  # crashes pyarrow 26
@example([], b"PA", ".parquet")
def test_files_of_rows(lines, tail, suffix):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"rows{suffix}"
        path.write_bytes("\n".join(map(json.dumps, lines)).encode() + (tail or b""))
        with refused_by_name("rows."):
            rows = read_table(path, cache_dir=folder)
            with refused_by_name("reward", "no row"):
                reward_column(rows)


# Answers.

FRAGMENTS = st.sampled_from([
    *"0123456789", "12", "1,234", "0.5", ".5", "-", "+", "/", "(", ")", "[", "]", "{", "}", ",", ";", ".", "=", "<",
    "|", "!", "%", "^", "_", "&", "$", " ", "\n", "\\", "x", "i", "e", "²", "٣", "½", "−", "and", "or", r"\\", r"\{",
    r"\}", r"\$", r"\%", r"\frac", r"\sqrt", r"\pi", r"\infty", r"\cup", r"\pm", r"\binom", r"\sum_{n=1}^{",
    r"\int_0^1", r"\lim_{x\to 0}", r"\prod", r"\text{", r"\text{ cm}", r"\mathrm{", r"\begin{pmatrix}",
    r"\end{pmatrix}", r"\begin{array}{c}", r"\left(", r"\right)", r"\cdot", r"\overline{", r"\boxed{", r"\boxed",
    r"\fbox{", r"^{\circ}", r"\log", r"\sin", r"\in", r"\mathbb{R}", "9^9^9", "10^{99}", "2^{3^{4^{5}}}", "100!!",
    r"\frac{1}{0}", "The answer is", "####", "Question:",
])  # fmt: skip
REPEATED = st.tuples(FRAGMENTS, st.integers(1, 60)).map(lambda pair: pair[0] * pair[1])
HOSTILE = st.lists(FRAGMENTS | REPEATED | st.text(max_size=5), max_size=12).map("".join)


@contextmanager
def within(seconds):
    """Assert that the block needs less CPU time than this. A busy machine affects only wall-clock time."""
    begin = time.process_time()
    yield
    assert time.process_time() - begin < seconds


@few
@given(HOSTILE, st.integers(1, 2_000))
def test_a_number_is_found_in_any_text(text, times):
    with within(1):
        answer = gsm8k.extract_answer(f"The answer is {text * times}")
    if answer is not None:
        assert len(answer) < 100
        assert str(Fraction(answer)) == answer or gsm8k.normalize_number(answer) == answer
    assert gsm8k.judge([text], [answer or "1"])[0][0] in VERDICTS


@few
@given(st.text("0123456789.,eE+-_ nafi٣²", max_size=45) | HOSTILE)
def test_numbers_have_one_normal_form(text):
    with within(1):
        number = gsm8k.normalize_number(text)
    if number is not None:
        assert len(number) < 100
        assert gsm8k.normalize_number(number) == number
        assert Fraction(number) == Fraction(text.strip().rstrip(".").replace(",", ""))  # not rounded


@few
@given(HOSTILE, st.integers(1, 500))
def test_a_box_is_found_in_any_text(text, times):
    with within(2):
        content = hendrycks_math.extract_boxed(text * times)
    assert content is None or (content and content in text * times)
    whole = hendrycks_math.extract_boxed(rf"{text}\boxed{{7}}")
    assert whole == "7" or text.endswith("\\") or r"\boxed" in text or r"\fbox" in text


@lru_cache
def judges():
    return WorkerPool(Path(math_equal.__file__), "judge", workers=1, seconds=2)


@few
@given(HOSTILE, st.none() | HOSTILE)
def test_any_two_formulas_are_judged_in_time(given, truth):
    assume(len(given) <= 1_000 and len(truth or "") <= 1_000)
    begin = time.monotonic()
    (found,) = judges().map([[given, given if truth is None else truth]])
    seconds = time.monotonic() - begin
    if found is None:
        assert seconds > 2, "the judge raised"
        return
    verdict, canonical = found
    assert verdict in VERDICTS
    assert (canonical is not None) == (verdict == "incorrect")
    assert truth is not None or verdict in ("correct", "invalid")


@few
@given(st.lists(st.dictionaries(st.sampled_from(["problem", "solution", "answer", "level", "subject"]),
                                HOSTILE | st.none()), min_size=1, max_size=3))  # fmt: skip
def test_problems_of_math(rows):
    names = sorted({name for row in rows for name in row})
    columns = {name: pa.array([row.get(name) for row in rows], pa.string()) for name in names}
    with refused_by_name("problem", "answer", "solution"):
        found = hendrycks_math.prepare(from_table(pa.table(columns or {"nothing": [1]})))
        assert all(found["answer"][:])
        assert len(found) == len(rows)


# Folders.

PATHS = st.sampled_from([
    "rows.parquet", "../victim", "work/../../victim", "link/victim", "linked", "sub/rows", "..", ".", "", "/", "\0",
    "ABSOLUTE", "missing", "_manifest.json", "x" * 300,
])  # fmt: skip
ENTRIES = st.fixed_dictionaries({"bytes": st.sampled_from([4, 6, 0, -1]), "sha256": st.text(max_size=3)}) | JSON
STAGE = st.fixed_dictionaries(
    {"inputs": st.just({"seed": 1}) | JSON}, optional={"sources": st.just({}) | JSON, "finished": JSON, "rows": JSON}
) | JSON  # fmt: skip
MANIFESTS = st.fixed_dictionaries(
    {},
    optional={
        "stages": st.dictionaries(st.sampled_from(["sample", "score"]), STAGE, max_size=2) | JSON,
        "files": st.none() | st.dictionaries(PATHS, ENTRIES, max_size=4) | JSON,
        "rows": JSON,
    },
)


@few
@given(MANIFESTS | JSON, st.none() | st.binary(max_size=3), st.lists(st.integers(0, 4), min_size=1, max_size=4))
def test_a_manifest_never_leads_out_of_its_folder(content, tail, calls):
    with tempfile.TemporaryDirectory() as temporary:
        outside, folder = Path(temporary), Path(temporary) / "stage"
        folder.mkdir()
        (outside / "victim").write_bytes(b"victim")
        (folder / "rows.parquet").write_bytes(b"rows")
        (folder / "link").symlink_to(outside)
        (folder / "linked").symlink_to(outside / "victim")
        text = json.dumps(content).replace("ABSOLUTE", str(outside / "victim"))
        (folder / manifest.NAME).write_bytes(text.encode() + (tail or b""))
        work = (
            lambda: manifest.begin(folder, "sample", {"seed": 1}), lambda: manifest.check_whole(folder),
            lambda: manifest.begin(folder, "score", {}), lambda: manifest.fingerprint(folder),
            lambda: lineage(folder),
        )  # fmt: skip
        for call in calls:
            with refused_by_name(str(folder)):
                work[call]()
            assert (outside / "victim").read_bytes() == b"victim"
            assert {path.name for path in outside.iterdir()} == {"victim", "stage"}


# Math on any numbers.

LARGEST = 3e38  # rewards are finite in float32
FINITE = st.floats(-LARGEST, LARGEST) | st.sampled_from([1.0, -1.0, LARGEST, -LARGEST, 5e-324])


@few
@given(st.lists(FINITE | st.just(math.nan), max_size=12), st.floats(0, 1) | st.floats())
def test_baselines_of_any_rewards(rewards, share):
    scored = [r for r in rewards if r == r]
    with refused_by_name("share", "reward"):
        c = baseline_for_positive_share(rewards, share)
        assert min(scored) <= c <= max(scored)
    mass = effective_positive_share(rewards)
    assert 0 <= mass <= 1 or (math.isnan(mass) and not any(scored))
    for baseline in (*BASELINES, 0.5):
        found = subtract_baseline(rewards, baseline, [0, 1] * (len(rewards) // 2) + [0] * (len(rewards) % 2))
        np.testing.assert_array_equal(np.isnan(found), np.isnan(rewards))


@few
@given(st.data())
def test_curation_of_any_rewards(data):
    rewards = data.draw(st.lists(FINITE | st.just(math.nan), max_size=12))
    ids = st.lists(st.integers(0, 3), min_size=len(rewards), max_size=len(rewards))
    problems, samples = data.draw(ids), data.draw(st.none() | ids)
    rule = data.draw(st.sampled_from(CURATIONS))
    share, target = data.draw(st.floats(0, 1) | st.floats()), data.draw(st.none() | st.floats(0, 1) | st.floats())
    baseline, size = data.draw(st.sampled_from([0.0, *BASELINES])), data.draw(st.none() | st.integers(-1, 20))
    with warnings.catch_warnings(), refused_by_name("share", "reward", "number of rows"):
        warnings.simplefilter("ignore")
        found, curated = compose(rewards, problems, baseline=baseline, effective_positive_share=target, rule=rule,
                                 size=size, positive_share=share, sample_ids=samples)  # fmt: skip
        chosen = curated.indices
        assert found.shape == chosen.shape
        assert np.isfinite(found).all()
        assert (np.diff(chosen) >= (0 if rule in REPEATING else 1)).all()
        assert not np.isnan(np.array(rewards)[chosen]).any()
        assert len(chosen) <= curated.size
        assert curated.shortfall == curated.size - len(chosen)
        assert curated.chosen_positives == (found >= 0).sum()
        assert 0 <= curated.problems_without_positive <= curated.problems <= 4
        if rule in REPEATING:
            assert (np.bincount(chosen[found < 0]) <= 1).all()
        if rule == "anna_karenina" and target is None:
            assert curated.chosen_positives <= curated.problems - curated.problems_without_positive
        if rule == "positives" and target is None:
            assert curated.chosen_positives == len(chosen)


@few
@given(st.lists(st.floats(), min_size=4, max_size=4), st.lists(st.tuples(st.floats(), FINITE), min_size=1, max_size=6),
       st.sampled_from([torch.float32, torch.float64]))  # fmt: skip
def test_weights_of_any_ratio_are_within_any_limits(limits, rows, dtype):
    with refused_by_name("runcation limit"):
        limits = TruncationLimits(*limits)
        log_ratio = torch.tensor([ratio for ratio, _ in rows], dtype=torch.float64).to(dtype)
        rewards = torch.tensor([reward for _, reward in rows], dtype=torch.float64)
        weights = truncated_weights(log_ratio, rewards, limits)
        assert weights.dtype == dtype
        for weight, ratio, reward in zip(weights.tolist(), log_ratio.tolist(), rewards.tolist(), strict=True):
            a, b = (limits.a_pos, limits.b_pos) if reward >= 0 else (limits.a_neg, limits.b_neg)
            if math.isnan(weight):
                assert math.isnan(ratio)
                assert a < b
            else:
                ceiling = min(b, math.exp(MAX_LOG_WEIGHT))
                assert min(a, ceiling) * (1 - 1e-5) - 1e-37 <= weight <= ceiling * (1 + 1e-5) + 1e-37


@few
@given(st.data(), st.sampled_from(["sequence", "segment"]), st.booleans())
def test_losses_of_any_log_probabilities_are_finite(data, level, normalized):
    rows, tokens = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    logps = st.lists(st.lists(st.floats(-1e5, 0), min_size=tokens, max_size=tokens), min_size=rows, max_size=rows)
    policy = torch.tensor(data.draw(logps), requires_grad=True)
    mu, rewards = torch.tensor(data.draw(logps)), torch.tensor([data.draw(st.floats(-1e3, 1e3)) for _ in range(rows)])
    mask = torch.tensor([[data.draw(st.booleans()) for _ in range(tokens)] for _ in range(rows)]).long()
    a, width = data.draw(st.floats(0, 10)), data.draw(st.floats(0, 10) | st.just(math.inf))
    limits = TruncationLimits(a, a + width, a, a + width)
    loss = topr_loss(policy, mu, rewards, mask, limits, level, normalized).losses_B
    loss.sum().backward()
    assert torch.isfinite(loss).all()
    assert torch.isfinite(policy.grad).all()
    assert (policy.grad[mask == 0] == 0).all()


@few
@given(st.lists(st.tuples(st.floats(0, 1e17), st.floats(-1e6, 1e6) | st.just(math.nan),
                          FINITE | st.just(math.nan)), max_size=9))  # fmt: skip
def test_metrics_of_any_rows_are_finite(rows):
    columns = torch.tensor(rows, dtype=torch.float64).reshape(-1, 3)
    metrics = row_metrics(columns[:, 0], columns[:, 1], columns[:, 2])
    assert bool(metrics) == any(reward == reward for *_, reward in rows)
    assert all(math.isfinite(value) for name, value in metrics.items() if name != "topr/reward")
    shares = [value for name, value in metrics.items() if name.endswith(("share", "tapered", "dead", "not_one"))]
    assert all(0 <= share <= 1 for share in shares)


# Settings.

OF_TOPR = [*LossArguments.__dataclass_fields__, *CurationArguments.__dataclass_fields__]
VALUES = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    | st.sampled_from(["topr", "mean", "none", "uniform", "positive_share", "balanced", "repeated_positives", "token",
                       "sampler", 0, 1, 0.5, "0.5", 10])
)  # fmt: skip


@few
@given(st.dictionaries(st.sampled_from(OF_TOPR), VALUES | JSON, max_size=4))
def test_settings_of_training(values):
    with warnings.catch_warnings(), refused_by_name(*OF_TOPR), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        config = OfflineTOPRConfig(output_dir=folder, use_cpu=True, bf16=False, **values)
        assert 0 <= config.limits.a_pos <= config.limits.b_pos
        assert 0 <= config.limits.a_neg <= config.limits.b_neg
        assert config.baseline in BASELINES or math.isfinite(config.baseline)
        assert config.effective_positive_share is None or 0 < config.effective_positive_share <= 1


NAMES = [*dict.fromkeys(name for command in commands() for name in settings_of(command)), "no_such_setting"]


@fewer
@given(st.dictionaries(st.sampled_from(NAMES), VALUES | JSON, max_size=3) | JSON,
       st.lists(st.tuples(st.sampled_from(NAMES), st.text(max_size=6).filter(lambda t: t not in ("-h", "--help"))),
                max_size=2),
       st.sampled_from(["import", "score", "curate", "log-mu", "train", "evaluate", "trial"]))  # fmt: skip
@example({"deepspeed": 1.0}, [], "train")
@example({"parallelism_config": False}, [], "train")
@example({"sampling_devices": False}, [], "trial")
def test_settings_of_the_command(content, flags, command):
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (Path(folder) / "config.yaml").write_text(json.dumps(content))
        options = [part for name, value in flags for part in (f"--{name}", value)]
        # argparse raises SystemExit, other checks ValueError. Valid settings fail at the missing input folder.
        with pytest.raises((SystemExit, ValueError, OSError)):
            cli.main([command, "--config", f"{folder}/config.yaml", *options, "--input", f"{folder}/nowhere",
                      "--output_dir", f"{folder}/out"])  # fmt: skip
        assert not (Path(folder) / "out").exists()
