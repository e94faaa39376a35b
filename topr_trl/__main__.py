"""Run the command `topr` with `python -m topr_trl`."""

from topr_trl.cli.main import console

if __name__ == "__main__":
    console()
