"""The notebook runs from its first cell to its last, and its policy learns."""

import json
import re

import pytest
from processes import ROOT, ran

from configs import gemma3_1b

NOTEBOOK = ROOT / "experiments" / "notebook" / "dapo.ipynb"


def code_cells(notebook=NOTEBOOK):
    cells = json.loads(notebook.read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def test_each_cell_compiles_and_shows_what_it_showed_last():
    """Outputs are committed: a cell that was changed and not executed again would lie."""
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    for number, source in enumerate(code_cells()):
        compile(source, f"cell {number}", "exec")
    counts = [cell["execution_count"] for cell in cells if cell["cell_type"] == "code"]
    assert counts == list(range(1, len(counts) + 1))


@pytest.mark.slow
def test_the_notebook_runs_in_a_process_of_its_own(tmp_path):
    """As a person would run it, in its folder, but for two steps in place of twenty."""
    cells = code_cells()
    short = [cell.replace("config.num_steps = 20", "config.num_steps = 2") for cell in cells]
    assert short != cells
    shown = "\nprint('THE END', len(run.rows), run['eval/arithmetic/mean@8'].to_dict())"
    program = tmp_path / "notebook.py"
    program.write_text(
        "\n\n".join(short).replace('pathlib.Path("runs"', f"pathlib.Path({str(tmp_path)!r}") + shown
    )
    assert "THE END 2 {0: " in ran(program, cwd=NOTEBOOK.parent, MPLBACKEND="agg").stdout


def test_the_steps_of_a_free_session_follow_from_the_minutes_of_one():
    about = " ".join(gemma3_1b.__doc__.split())
    low, high = map(float, re.search(r"Minutes: (.*) to (.*) a step", about).groups())
    fewest, most = map(int, re.search(r"for (\d+) to (\d+) of the 300 steps", about).groups())
    assert fewest == pytest.approx(9 * 60 / high, rel=0.05)
    assert most == min(300, round(9 * 60 / low))
    assert gemma3_1b.get_config().num_steps == 300


@pytest.mark.slow
def test_a_free_session_goes_on_with_what_the_last_one_left(tmp_path):
    """The cell as it stands, with a small run: the second session begins on a fresh disk."""
    cell = code_cells(NOTEBOOK.with_name("tpu.ipynb"))[-1]
    cell = re.sub(r"(?m)^!(.*)$", r"import subprocess; subprocess.run(f'\1', shell=True)", cell)
    cell = cell.replace("runs/gemma_left", f"{tmp_path}/left")
    for session, (kept, steps) in enumerate((("", 1), (f"{tmp_path}/left", 2))):
        small = f"--config=tests/small_config.py --config.num_steps={steps}"
        mine = cell.replace("--config=configs/gemma3_1b.py", small)
        mine = mine.replace('KEPT = ""', f'KEPT = "{kept}"')
        program, disk = tmp_path / f"{session}.py", tmp_path / f"disk{session}"
        disk.mkdir()
        program.write_text(f"import os, pathlib, sys\n{mine}")
        out = ran(program, cwd=ROOT, TMPDIR=str(disk)).stdout
    assert "resuming after 1 steps" in out and "step 1 (2/2)" in out
