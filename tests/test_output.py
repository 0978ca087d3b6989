"""What users see of a run and of a loader: everything that their code prints, once and on its stream, and each error as one sentence."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from offload.report.run_dir import read_lines
from tests.helpers import ROOT
from tests.programs.printing import FLOOD, SAMPLES

SAMPLE_OUT = [f"sample {number} on stdout" for number in range(SAMPLES)]
DATA_OUT = ["sample 3 writes to descriptor 1", *SAMPLE_OUT]
DATA_ERR = ["sample 3 on stderr", "sample 3 logs", "sample 3 writes to descriptor 2"]
FUNCTION_OUT = [
    "the function on stdout",
    "a program of the function",
    *(f"line {n} of the function" for n in range(100)),
]
FUNCTION_ERR = ["the function on stderr", "the function writes to descriptor 2", "the function logs"]
CORRUPT = "Corrupt JPEG data: premature end of data segment"
BAD = r"ValueError: this sample is bad \(__getitem__, .*printing.py:\d+\)\."
DIED = "offload.errors.RunError: preprocessing failed: the processes that got the same samples have died"
ERRORS = {
    "trainer getitem": rf"offload\.errors\.RunError: reading sample 7 \(item 7 of Speaking\) raised {BAD}",
    "trainer transform": r"offload\.errors\.RunError: the transform transform raised ValueError: this sample is bad",
    "trainer function": r"offload\.errors\.RunError: training failed: ValueError: this step is bad\.",
    "trainer timeout": r"offload\.errors\.RunError: reading sample 7 .* took longer than sample_timeout_s=1\.",
    "trainer crash": DIED,
    "loader getitem": r"ValueError: Caught ValueError in a preprocessing process .*\nOriginal Traceback",
    "loader timeout": "RuntimeError: DataLoader timed out after 2 seconds",
    "loader collate": r"ValueError: Caught ValueError in a preprocessing process .*\nOriginal Traceback",
    "loader init": r"ValueError: Caught ValueError in a preprocessing process .*\nOriginal Traceback",
    "loader interrupted": "\nKeyboardInterrupt\n",
    "loader crash": DIED,
}
# As Ray names them; a process of its own that ends as it starts has no name.
OURS = re.compile(r"\((\S+ )?(hub|controller|worker|preprocessing|feed|reader|sender|[A-Z]\w+) pid=\d+\)")
OK = ("loader", "loader flood", "trainer")


def printed(folder: Path, who: str, cases: list[str]) -> list[tuple[str, str, str]]:
    """Each case with its part of standard output and of standard error."""
    program = [sys.executable, "-m", "tests.programs.printing", str(folder), who, *cases]
    # Ray keeps the authentication mode that it finds when it is imported, before the program sets its own.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=800, env=environment)
    assert done.returncode == 0, done.stderr
    parts = [re.split(r"^=== (.*)\n", text, flags=re.MULTILINE)[1:] for text in (done.stdout, done.stderr)]
    assert parts[0][::2] == parts[1][::2]
    return list(zip(parts[0][::2], parts[0][1::2], parts[1][1::2], strict=True))


def check(case: str, out: str, err: str) -> None:
    assert 'File "' + str(ROOT / "offload") not in err
    assert not OURS.search(out + err), "Ray prints it as well"
    outs, errs = Counter(out.splitlines()), Counter(err.splitlines())
    if case in ERRORS:
        assert len(re.findall(ERRORS[case], err)) == 1, err
        assert err.count("Traceback (most recent call last)") == 1 + err.count("Original Traceback (most"), err
        assert ('raise ValueError("this step is bad")' in err) == (case == "trainer function")
        return
    assert "Traceback" not in err
    wanted_out, wanted_err = list(SAMPLE_OUT), []
    if case != "loader flood":
        wanted_out, wanted_err = list(DATA_OUT), list(DATA_ERR)
        assert err.count("UserWarning: sample 3 warns") == 1
        (half,) = (line for line in outs if line.startswith("half a line of sample 3"))
        outs[half] -= 1
        if following := half.removeprefix("half a line of sample 3"):
            outs[following] += 1
    else:
        assert errs[CORRUPT] < 20
        more = sum(int(n.replace(",", "")) for n in re.findall(r"… and ([\d,]+) more lines like this: Corrupt", err))
        assert errs[CORRUPT] + more == SAMPLES * FLOOD
    if case == "trainer":
        wanted_out, wanted_err = [*wanted_out, *FUNCTION_OUT, "its last line"], [*wanted_err, *FUNCTION_ERR]
        assert [line for line in out.splitlines() if line in FUNCTION_OUT] == FUNCTION_OUT
    assert {line: outs[line] for line in wanted_out} == dict.fromkeys(wanted_out, 1)
    assert {line: errs[line] for line in wanted_err} == dict.fromkeys(wanted_err, 1)
    assert not (set(wanted_out) & set(errs) | set(wanted_err) & set(outs))
    assert "nobody wants to read this" not in err


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize(
    "who",
    [
        pytest.param("us", id="ray of ours"),
        pytest.param("program", id="ray of the program", marks=pytest.mark.soak),  # all cases: a minute of CPU time
    ],
)
def test_what_users_print_appears_once_and_errors_are_a_sentence(tmp_path: Path, who: str) -> None:
    # First, while nothing of this program holds cores.
    cases = ["joined:loader,trainer", "trainer", "loader", "loader flood", *ERRORS]
    if who == "us":  # Ray itself prints nothing, so that a kind of error at each place will do
        cases = ["trainer", "loader", "loader flood", "trainer getitem", "trainer function", "loader crash"]
    for case, out, err in printed(tmp_path, who, cases):
        if case in OK or case in ERRORS:
            try:
                check(case, out, err)
            except AssertionError as error:
                error.add_note(f"in {case}:\n{out}\n{err}")
                raise
    logged = Counter((each["stream"], each["text"]) for each in read_lines(tmp_path / "run" / "printed.jsonl"))
    for stream, lines in (("stdout", ["sample 3 writes to descriptor 1"]), ("stderr", DATA_ERR)):
        assert {line: logged[stream, line] for line in lines} == dict.fromkeys(lines, 1)
