"""What the quick profile of the benchmarks has to show: only what is far outside noise."""

from pathlib import Path

from benchmarks.__main__ import open_store
from benchmarks.claims import base, online_compared, protocols, rivals_compared, theory
from benchmarks.setting import PROFILES

profile = PROFILES["quick"]
store = open_store(Path("reproduction/quick"), profile)
start = base.point(store, profile)
ends = {cell["rival"]: result["curve"][-1] for cell, result in store.results(rivals_compared.cells(profile, store))}
for name, end in {"base model": start, **ends}.items():
    print(f"{name:16} pass@1 {end['pass@1']:5.1%}, invalid {end['invalid']:5.1%}")

of_kinds = {(c["base"], c["share"]): r for c, r in store.results(protocols.cells(profile, store))}
for name in protocols.QUICK:
    half, only = (of_kinds[name, share] for share in (0.5, 1.0))
    accuracies = ", ".join(
        f"{label} {result['end']['pass@1']:.1%}" for label, result in (("p~ 50%", half), ("positives only", only))
    )
    print(f"{name:16} {half['p']:.1%} of the rows are right; after one pass: {accuracies}")
    assert max(r["end"]["pass@1"] for r in (half, only)) > half["p"], f"nothing is learned from {name}"

assert ends["topr"]["pass@1"] > start["pass@1"] + 0.05, "TOPR does not improve the base model"
assert ends["topr"]["invalid"] < start["invalid"] / 4, "TOPR leaves invalid answers"
assert ends["reinforce"]["pass@1"] < start["pass@1"] / 4, "naive REINFORCE does not collapse"

for cell, result in store.results(online_compared.cells(profile, store)):
    end = result["curve"][-1]
    print(f"{cell['method']:16} online, {end['completions']:.0f} completions: pass@1 {end['pass@1']:5.1%}")
    assert end["pass@1"] > start["pass@1"] + 0.05, f"{cell['method']} does not learn online"

parts = {cell["part"]: result for cell, result in store.results(theory.cells(profile, store))}
last = {float(a): points[-1][1] for a, points in parts["bound"]["curves"].items()}
assert parts["identity"]["largest_difference"] < 1e-12, "Prop. 3.1 does not hold"
assert last.pop(0.0) <= parts["bound"]["upper_bound"] < min(last.values()), "Prop. 3.2 does not hold"
