"""Print messages to the user."""

import sys
from typing import Any

from accelerate import PartialState


def say(what: str, args: Any) -> None:
    """Print a message on the main process, unless the setting `disable_tqdm` is on."""
    if PartialState().is_main_process and not args.disable_tqdm:
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"  # A stream of the user's may have no encoding.
        shown = what.encode(encoding, "replace").decode(encoding)  # Latin-1, for example, has no π and no μ.
        print(f"TOPR: {shown}", flush=True)
