"""Figures at full size, on one GPU: `make gpu`."""

import argparse
import gc
import importlib.util
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.cells import Store
from benchmarks.gpu import learning, page, precision, steps
from benchmarks.performance.timing import quiet

PARTS = {"steps": steps, "precision": precision, "learning": learning}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], metavar="part", help=f"of {', '.join(PARTS)}")
    parser.add_argument(
        "--peak_tflops", type=float, default=989.0, help="bfloat16 peak of the GPU; default: H100, H200"
    )
    parser.add_argument(
        "--gsm8k",
        default="openai/gsm8k",
        help="data set of the Hub, or a folder with gsm8k_train.jsonl, gsm8k_test.jsonl",
    )
    parser.add_argument("--minutes", type=float, default=9.0, help="no cell is begun after these; default: 9")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on a CPU; results are printed and not kept")
    parser.add_argument("--report", action="store_true", help="run nothing; write docs/full_size.md")
    args = parser.parse_args()
    quiet()
    if args.report:
        print(f"Written: {page.write(Store(page.RESULTS))}")
        return
    if not args.tiny and not torch.cuda.is_available():
        raise SystemExit("There is no GPU. --tiny tries all parts without one.")
    with tempfile.TemporaryDirectory() as nowhere:
        store = Store(Path(nowhere) if args.tiny else page.RESULTS)
        flash = not args.tiny and importlib.util.find_spec("flash_attn") is not None
        machine = steps.Machine(args.tiny, args.peak_tflops * 1e12, flash, args.gsm8k)
        run(args.parts or list(PARTS), store, machine, args.minutes)
        print(page.text(store) if args.tiny else f"Written: {page.write(store)}")


def run(parts: list[str], store: Store, machine: steps.Machine, minutes: float) -> None:
    """Cells that are not finished, one after the other; each is kept when it is done."""
    began = time.monotonic()
    for part in parts:
        # What is to be run may depend on what was found: until nothing is left.
        while todo := store.unfinished(PARTS[part].cells(machine.use_cpu, store)):
            for cell in todo:
                if time.monotonic() - began > 60 * minutes:
                    print("Time is up; the same command goes on from here.")
                    return
                print({name: value for name, value in cell.items() if name != "claim"}, flush=True)
                start = time.perf_counter()
                try:
                    result = PARTS[part].work(cell, machine)
                except torch.cuda.OutOfMemoryError:
                    result = {"failed": "out of memory"}
                device = "CPU" if machine.use_cpu else torch.cuda.get_device_name()
                store.add(
                    cell, result | {"device": device}, time.perf_counter() - start, f"python -m benchmarks.gpu {part}"
                )
                gc.collect()
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
