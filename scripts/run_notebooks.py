"""Run the notebooks and save their outputs, without progress bars and warnings: `make notebooks`."""

import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "examples" / "notebooks"
NOISE = "[real_accelerator.py"  # DeepSpeed's log on a machine without a GPU


def main(names: list[str]) -> None:
    for path in sorted(FOLDER.glob("*.ipynb")):
        if names and path.stem not in names:
            continue
        notebook = nbformat.read(path, 4)
        with tempfile.TemporaryDirectory() as folder:
            client = NotebookClient(
                notebook, timeout=900, resources={"metadata": {"path": folder}}, coalesce_streams=True,
                record_timing=False,
            )  # fmt: skip
            client.execute()
        for cell in notebook.cells:
            if cell.cell_type == "code":
                cell.outputs = [output for output in map(_without_noise, cell.outputs) if output is not None]
        nbformat.write(notebook, path)
        print(f"{path}: run")


def _without_noise(output: nbformat.NotebookNode) -> nbformat.NotebookNode | None:
    if output.output_type != "stream":
        return output
    lines = [line for line in output.text.splitlines(keepends=True) if NOISE not in line]
    output.text = "".join(lines)
    return output if output.name == "stdout" and output.text.strip() else None


if __name__ == "__main__":
    main(sys.argv[1:])
