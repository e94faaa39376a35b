"""The demo's promise: TOPR raises pass@1 by at least 15 points and cuts invalid answers at least tenfold."""

import json
import sys
from pathlib import Path

results = json.loads(Path(sys.argv[1]).read_text())
before, after = results["before"], results["after"]
gain = after["pass_at"]["1"]["value"] - before["pass_at"]["1"]["value"]
invalid = before["shares"]["invalid"], after["shares"]["invalid"]
print(f"pass@1 +{100 * gain:.1f} points, invalid answers {100 * invalid[0]:.1f}% -> {100 * invalid[1]:.2f}%")
assert gain >= 0.15
assert invalid[1] <= invalid[0] / 10
