"""The page of verdicts, from made-up results with planted winners and losers."""

import json
import re
from dataclasses import replace

import pytest

from benchmarks import evidence
from benchmarks.__main__ import CLAIMS
from benchmarks.cells import Store
from benchmarks.claims import difficulty, iterations, log_mu_noise, long_responses, overlapped, staleness, verifier
from benchmarks.claims.online_compared import needed
from benchmarks.online import OnlineArm
from benchmarks.setting import PROFILES

pytestmark = pytest.mark.slow

PROFILE = replace(PROFILES["full"], seeds=3)
BASE = 0.3
# pass@1 at the end, by rival; others stay at the base model's.
ENDS = {"topr": 0.6, "positives_only": 0.5, "reinforce": 0.01, "ppo": 0.35, "dpo": 0.45, "topr_geometric": 0.02,
        "topr_group_sign": 0.7}  # fmt: skip


def point(accuracy, **more):
    invalid = 0.8 if accuracy < 0.1 else 0.15 if accuracy == BASE else 0.001
    incorrect = max(1 - accuracy - invalid, 0.0)
    return {"pass@1": accuracy, "error": 0.005, "correct": accuracy, "incorrect": incorrect, "invalid": invalid, **more}


def result(cell):
    """What a cell of this claim might have given."""
    wobble = 0.002 * cell.get("seed", 0)
    claim = cell["claim"]
    if claim == "theory":
        curves = {a: [[n, 0.5 + float(a) * n] for n in (0, 3_000, 10_000)] for a in ("0.0", "0.05")}
        return {"trials": 3, "largest_difference": 1e-15, "curves": curves, "upper_bound": 1.0}
    if claim == "learning_rates":
        return point(0.5 if cell["learning_rate"] == (1e-4 if cell["rival"] == "topr" else 3e-5) else 0.3)
    if claim in ("rivals", "hard_task"):
        end = ENDS.get(cell["rival"], BASE) + wobble
        steps = [round(mark * PROFILE.steps) for mark in (0.5, 1, 2, 4)]
        still = {"invalid": 0.15} if cell["rival"] in ("ppo", "dpo") else {}
        return {"curve": [{"step": n, **point(BASE + (end - BASE) * n / steps[-1], **still)} for n in steps]}
    if claim == "positive_share":
        return point(
            0.3 + wobble + (0.2 if cell["share"] == 0.1 else 0.0) + (0.1 if cell["method"] == "topr" else -0.1)
        )
    if claim == "gradient_clipping":
        end = 0.5 if cell["rival"] == "topr" else 0.2 if cell["clip"] == 1 else 0.05
        return {"curve": [{"step": n, **point(end)} for n in (40, 80)], "gradient_norms": [1.0, 9.0]}
    if claim == "arms":
        return {"end": point(BASE + wobble), "p": 0.0}
    if claim == "against_positives":
        accuracy = ENDS.get(cell["rival"], BASE) + wobble
        solved = 60 if cell["rival"] == "topr" else 40
        cardinality = [400 - solved] + [0] * 63 + [solved]
        return {**point(accuracy), "maj": {str(k): accuracy for k in (1, 2, 4, 8, 16, 32)}, "cardinality": cardinality}
    if claim == "log_mu_noise":
        if cell["part"] == "training":
            return point(0.5 + wobble)
        weights = {f"{n}, {r}": 0.5 for n in log_mu_noise.LENGTHS[1:] for r in log_mu_noise.LOG_RATIOS}
        return {"sigma": 0.01, "bias": 0.0, "weights": weights}
    if claim == "long_responses":
        weights = {"weight": 0.5, "dead": 0.1, "log_ratio": -1.0}
        curve = [{"update": n, **weights} for n in long_responses.MEASURED_AT]
        return {"curve": curve, "trained": weights, "tokens": 40.0 * cell["parts"]}
    if claim == "staleness":
        end = 0.2 if cell["method"] == "topr_token" else 0.6
        end -= 0.1 if cell["method"] == "topr" and cell["age"] else 0.0
        return {"curve": [{"update": n, **point(end + wobble)} for n in (0, *staleness.MEASURED_AT)]}
    if claim == "iterations":
        more = {"maj@16": 0.6, "rows": 10, "tokens": 99, "baseline": 0.0, "positives": 0.3, "effective_share": 0.3}
        end = 0.7 if cell["curation"] == "uniform" else 0.6
        return {"curve": [point(end + wobble, **more) for _ in range(iterations.ITERATIONS + 1)]}
    if claim == "verifier":
        chosen = {f"{name}@{k}": 0.6 for k in verifier.KS for name in ("maj", "SC", "best")}
        base = {"accuracy": 0.4, "error": 0.01, "invalid": 0.3, "accuracy on yes": 0.4, "accuracy on no": 0.4,
                "pass@1": 0.3, **chosen}  # fmt: skip
        better = {name: 0.001 if name == "invalid" else 0.7 + wobble for name in base}
        rate = 0.1 if cell["learning_rate"] == verifier.LEARNING_RATES[0] else 0.0
        topr = {**better, "error": 0.01, "accuracy": better["accuracy"] + rate, "SC@32": 0.65 + wobble}
        return {"base": base, "topr": topr, "rows": 100, "positives": 0.4}
    if claim == "online":
        gained = 0.3 if cell["method"] == "topr_mean" else 0.2
        failed = cell["method"] == "trl_vespo" and cell["uses"] == 4
        arm = OnlineArm.of(cell)
        tested = (0, *arm.tested_after)[: 3 if failed else None]
        curve = [{"seconds": 9.0, **point(BASE + wobble + gained * n / arm.completions)} for n in tested]
        return {"curve": curve, "end": {"pass@32": 0.9}, "entropy": 0.1, "failed": failed}
    if claim == "overlapped":
        return {"curve": [point(0.5 + wobble - 0.01 * cell["overlap"], **{"maj@16": 0.7})] * overlapped.ITERATIONS}
    if claim == "difficulty":
        tilt = {str(s): [0.1 + 0.01 * s * b for b in range(10)] for s in difficulty.SHARES}
        return {"weights": tilt, "problems": [40] * 10}
    return point(BASE)  # base


@pytest.fixture
def store(filled):
    return filled(CLAIMS, PROFILE, result)


def verdicts(store, name, tmp_path):
    return {verdict.claim[:14]: verdict for verdict in CLAIMS[name].report(store, PROFILE, tmp_path)}


def test_page_has_every_claim_and_every_picture(store, tmp_path):
    page = tmp_path / "evidence.md"
    evidence.write(CLAIMS, store, PROFILE, page)
    text = page.read_text()
    assert "nan" not in text
    figures = [f"Fig. {n}:" for n in range(1, 10)]
    for claim in (
        *figures,
        "Prop. 3.1",
        "Prop. 3.2",
        "harder task",
        "old rows",
        "automatic target",
        "another engine",
        "the longer a negative",
        "Table 2",
    ):
        assert claim in text
    drawn = {path.stem for path in (tmp_path / "evidence").glob("*.png")}
    assert drawn == {path.stem for path in (tmp_path / "evidence").glob("*.svg")}
    assert drawn == {"fig1", "fig2", "fig3", "fig4", "fig5-6", "fig7", "fig8", "fig9", "prop3.2", "hard", "staleness",
                     "log_mu_noise", "long_responses", "online-main", "online-sure-17", "online-hard",
                     "online-hard-long", "overlapped"}  # fmt: skip
    assert all(f"evidence/{name}.png" in text for name in drawn)


def test_completions_that_a_method_needs(store, tmp_path):
    slips, sure, hard, longer = CLAIMS["online"].report(store, PROFILE, tmp_path)
    # 20 points in 6,144 completions for the others, 30 for the default: two thirds of them.
    assert "| TRL's default (DAPO) | 1 | 0.0001 | 50.4 ± 0.4 | 6,144 (6,144 to 6,144) | 90 | 0.10 | 192 | 9 | 0 |" in (
        slips.details
    )
    assert "| TOPR (default) | 1 | 0.0001 | 60.4 ± 0.4 | 4,096 (4,096 to 4,096) | 90 |" in slips.details
    assert "| TRL's VESPO | 4 | 3e-05 | 33.7 ± 0.4 | not reached | - | - | 768 | - | 5 |" in slips.details
    assert "TOPR (default), 75% used again" in slips.details
    assert "SAPO" not in sure.details + hard.details
    assert "not measured" not in slips.ours
    # Rows used again end as the default, 10 points above DAPO, which they reach after two thirds of the completions.
    assert "75% of each step's rows used again ends +10.0 ± 0.0 points beside TRL's default (DAPO)" in slips.headline
    assert "needs 67% of its completions" in slips.headline
    assert slips.headline.startswith("Online, main, ")
    assert sure.headline.startswith("Online, sure-17, ")
    # The longer runs have a table of their own, at the rate that is best in shorter ones.
    assert "| TRL's default (DAPO) | 4 | 3e-05 | 50.4 ± 0.4 | 18,432 (18,432 to 18,432) |" in longer.details
    assert longer.details.count("\n") == 3
    assert longer.headline.startswith("Online, hard, 18,432 completions, ")
    for entry in store.finished.values():
        if entry["cell"].get("replay_share") and entry["cell"]["base"] == "hard":
            entry["result"] = {**entry["result"], "curve": [{**p, "pass@1": 0.1} for p in entry["result"]["curve"]]}
    *_, hard, _ = CLAIMS["online"].report(store, PROFILE, tmp_path)
    assert hard.headline.endswith("of each batch, and does not reach its accuracy")


def test_what_is_finished_of_a_long_comparison_is_reported(store, tmp_path):
    left = {"trl_dapo": range(5), "topr_mean": range(4)}  # seeds
    store.finished = {
        key: entry
        for key, entry in store.finished.items()
        if entry["cell"]["claim"] == "online"
        and (entry["cell"]["seed"] > 5 or entry["cell"]["seed"] in left.get(entry["cell"]["method"], ()))
    }
    page = tmp_path / "evidence.md"
    evidence.write({"online": CLAIMS["online"]}, store, PROFILE, page)
    assert "| TRL's default (DAPO) | 4 |" in page.read_text()
    assert not re.search(r"\| TOPR \(default\) \|.*±", page.read_text())  # no row with an interval
    assert (
        "Planned and not measured: with 1 use: TOPR (default), 75% used again, TOPR (default), 50%" in page.read_text()
    )


def test_completions_are_counted_between_two_tests():
    curve = [0.3, 0.4, 0.6, 0.5]
    assert needed((0, 512, 1_024, 2_048), curve, 0.5) == 768
    assert needed((0, 512, 1_024, 2_048), curve, 0.3) == 0
    assert needed((0, 512, 1_024, 2_048), curve, 0.65) == float("inf")


def test_a_verifier_that_helps_and_one_that_does_not(store, tmp_path):
    (verdict,) = CLAIMS["verifier"].report(store, PROFILE, tmp_path)
    assert verdict.verdict == "holds"
    assert verdict.why == ""
    assert "accuracy +40.2" in verdict.ours  # at the better of the learning rates
    for entry in store.finished.values():
        if entry["cell"]["claim"] == "verifier":
            entry["result"]["topr"]["SC@32"] = 0.5
    (verdict,) = CLAIMS["verifier"].report(store, PROFILE, tmp_path)
    assert verdict.verdict == "holds in part"
    assert "Not seen: weighted SC@32 above the base verifier's, weighted SC@32 above the majority" in verdict.ours
    assert verdict.why


def test_a_claim_that_is_not_finished_is_not_judged(store, tmp_path):
    path = tmp_path / "results" / "rivals.jsonl"
    path.write_text("\n".join(path.read_text().splitlines()[:-1]) + "\n")
    page = tmp_path / "evidence.md"
    claims = {name: CLAIMS[name] for name in ("learning_rates", "rivals", "difficulty")}
    evidence.write(claims, Store(tmp_path / "results"), PROFILE, page)
    text = page.read_text()
    assert "Fig. 1:" not in text
    assert "Fig. 9:" in text
    assert f"| rivals | {18 * 3 - 1} of {18 * 3} |" in text


def test_nothing_finished_is_a_page_too(tmp_path):
    page = tmp_path / "e.md"
    evidence.write({name: CLAIMS[name] for name in ("theory", "rivals")}, Store(tmp_path), PROFILE, page)
    assert "| theory | 0 of 2 |" in page.read_text()


def test_winners_and_losers_are_told_apart(store, tmp_path):
    rivals = verdicts(store, "rivals", tmp_path)
    assert rivals["Fig. 1: of TOP"].verdict == "holds"
    assert "below “TOPR”, GRPO's advantages" in rivals["Fig. 1 with al"].ours
    assert rivals["Fig. 3: of the"].verdict == "holds"
    assert rivals["Beyond the pap"].verdict == "holds in part"
    assert verdicts(store, "gradient_clipping", tmp_path)["Fig. 7: with a"].verdict == "holds"
    assert (
        verdicts(store, "iterations", tmp_path)["Fig. 8: over e"].verdict == "holds in part"
    )  # uniform is above positives
    assert verdicts(store, "difficulty", tmp_path)["Fig. 9: the hi"].verdict == "holds"
    stale, variants = CLAIMS["staleness"].report(store, PROFILE, tmp_path)
    assert stale.verdict == "holds"
    assert "The change of TOPR minus that of others: M2PO -10.0 ± 1.2" in stale.ours  # 2 √(4 · 0.005² / 3)
    assert variants.ours.endswith("below TOPR at its own best rate: “TOPR” per token")
    best, past, low, *_ = CLAIMS["positive_share"].report(store, PROFILE, tmp_path)
    assert (best.verdict, past.verdict, low.verdict) == ("holds", "does not hold here", "holds")


def test_a_reversed_outcome_reverses_the_verdict(store, tmp_path):
    for entry in store.finished.values():
        if entry["cell"].get("rival") == "topr" and entry["cell"]["claim"] == "rivals":
            for point_ in entry["result"]["curve"]:
                point_["pass@1"], point_["invalid"] = 0.001, 0.9
    rivals = verdicts(store, "rivals", tmp_path)
    assert rivals["Fig. 1: of TOP"].verdict == "holds in part"  # naive REINFORCE still collapses
    assert "Not seen: TOPR improves" in rivals["Fig. 1: of TOP"].ours
    assert rivals["Beyond the pap"].verdict == "does not hold here"


def test_results_of_another_setting_are_not_seen(tmp_path):
    Store(tmp_path, "small").add({"claim": "a"}, {"x": 1}, 0.0, "")
    assert Store(tmp_path, "small").get({"claim": "a"}) == {"x": 1}
    assert Store(tmp_path, "large").get({"claim": "a"}) is None


def test_published_results_are_whole_lines(request):
    for path in (request.config.rootpath / "benchmarks" / "results").glob("*.jsonl"):
        for line in path.read_text().splitlines():
            assert json.loads(line)["cell"]["claim"] == path.stem
