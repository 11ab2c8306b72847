"""How long a newcomer takes from an archive to a model of their own, trained, killed and resumed.

python benchmarks/newcomer.py

In a folder of its own: what `git archive` makes of the commit is unpacked, an environment is made,
`pip install` fills it, and the scripts of `newcomers/` train models in float16, one for each
library. Each runs once to its end; again, ended by SIGKILL once its first checkpoint is whole; and
a third time, which goes on. Says so and exits with 1 where the two last states differ in a bit, or
where a log has not every step once. Then the code of the pages that four newcomers read, each from
top to bottom: who comes from PyTorch AMP, who has a notebook with NNX, who knows FSDP and orbax,
and who comes from Keras or Lightning.
"""

import argparse
import csv
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
SCRIPTS = ROOT / "benchmarks" / "newcomers"
LIBRARIES = ("linen", "nnx", "equinox")
PACKAGES = ("orbax-checkpoint", "scikit-learn", "flax", "equinox")
# Whose pages: what each newcomer reads, and whose code they run.
PATHS = {
    "PyTorch AMP": ("index.md", "migrate/pytorch.md"),
    "an NNX notebook": ("index.md", "recipes.md"),
    "FSDP and orbax": ("index.md", "pods.md"),
    "Keras and Lightning": ("index.md", "migrate/keras.md", "migrate/lightning.md"),
}
DEVICES = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "MPLBACKEND": "agg"}
STEPS, FIRST_CHECKPOINT = 60, "20"  # as newcomers/loop.py has them
HEAD = """\
# A newcomer's first minutes

`python benchmarks/newcomer.py`: from what `git archive` makes of a commit to models of one's own,
trained in float16 on digits by `benchmarks/newcomers/` with what the recipes show: BatchNorm,
Dropout, a batch with an inf, a log, checkpoints; ended by SIGKILL and started again. Elapsed time,
downloads and the import of JAX included. Last, the code of the pages that four newcomers read, from
top to bottom, page by page.

| what is done | seconds | what came out |
| --- | ---: | --- |
"""


def timed(words: list[str], **options: Any) -> tuple[float, str]:
    """Returns how long a command took, and what it printed; ends all where it fails."""
    print("$", " ".join(words), flush=True)
    started = time.perf_counter()
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True, **options)
    return time.perf_counter() - started, done.stdout


def killed(words: list[str], folder: pathlib.Path) -> float:
    """Starts a run and ends it when its first checkpoint is whole; returns how long that took."""
    print("$", " ".join(words), "  # until SIGKILL", flush=True)
    started = time.perf_counter()
    job = subprocess.Popen(words, stdout=subprocess.PIPE)
    while not (folder / FIRST_CHECKPOINT).exists():
        if job.poll() is not None:
            sys.exit(f"{' '.join(words)} ended with {job.returncode} before its first checkpoint.")
        time.sleep(0.01)
    job.kill()
    job.communicate()
    return time.perf_counter() - started


def logged(folder: pathlib.Path) -> list[int]:
    """Returns the steps in a run's log."""
    with open(folder / "log.csv") as file:
        return [int(row[0]) for row in csv.reader(file)]


def installed(python: str, folder: pathlib.Path) -> tuple[str, list[tuple[str, float, str]]]:
    """Returns the interpreter of a new environment with the commit in it, and rows of the table."""
    archive, checkout = str(folder / "mpjax.tar"), folder / "mpjax"
    checkout.mkdir()
    timed(["git", "-C", str(ROOT), "archive", "-o", archive, "HEAD"])
    timed(["tar", "-xf", archive, "-C", str(checkout)])
    made, _ = timed([python, "-m", "venv", str(folder / "env")])
    python = str(folder / "env/bin/python")
    install = [python, "-m", "pip", "install", "--quiet", ".[optax]", *PACKAGES]
    filled, _ = timed(install, cwd=checkout)
    looked, _ = timed([python, "-m", "mpjax"], cwd=folder)
    return python, [
        ("`python -m venv`", made, ""),
        (f'`pip install ".[optax]" {" ".join(PACKAGES)}`', filled, ""),
        ("`python -m mpjax`", looked, "which name to type here"),
    ]


def made(python: str) -> str:
    """Returns the versions of what was installed, and the machine."""
    asked = "from measure import machine; print(f'{machine.made()}; on {machine.cpu()}.')"
    return timed([python, "-c", asked], cwd=ROOT / "benchmarks")[1]


def own_model(library: str, python: str, folder: pathlib.Path) -> tuple[float, str]:
    """Returns what training, a kill and going on took, and whether nothing was lost."""
    script = [python, str(SCRIPTS / f"own_{library}.py")]
    whole, broken = folder / f"{library}-whole", folder / f"{library}-killed"
    first, at_once = timed([*script, str(whole)])
    until_kill = killed([*script, str(broken), "slow"], broken)
    rest, resumed = timed([*script, str(broken)])
    begun, end = resumed.splitlines()
    is_equal = end == at_once.splitlines()[-1]
    is_logged = logged(broken) == logged(whole) == list(range(1, STEPS + 1))
    if not (is_equal and is_logged):
        sys.exit(f"{library}: {at_once!r} and {resumed!r}; logged {logged(broken)}.")
    said = f"{end.split('skipped ')[1]} step skipped; {begun}; bit-equal; {STEPS} steps logged"
    return first + until_kill + rest, said


def page_code(page: pathlib.Path) -> str:
    """Returns all Python of a page, as someone pastes it."""
    return "\n".join(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S))


def path_of(newcomer: str, python: str, folder: pathlib.Path) -> tuple[str, float, str]:
    """Returns the row of who reads some pages and runs their code."""
    spent, lines = 0.0, 0
    for page in PATHS[newcomer]:
        script = folder / f"{newcomer}-{page}".replace("/", "-").replace(" ", "-")
        code = page_code(folder / "mpjax" / "docs" / page)
        script.with_suffix(".py").write_text(code)
        took, _ = timed(
            [python, str(script.with_suffix(".py"))], cwd=folder, env={**os.environ, **DEVICES}
        )
        spent, lines = spent + took, lines + len(code.splitlines())
    pages = ", ".join(PATHS[newcomer])
    return f"{newcomer}: the code of {pages}", spent, f"{lines} lines, no error"


def main() -> None:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--python", default=sys.executable, help="that makes the environment")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "benchmarks/results/newcomer.md")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        python, rows = installed(arguments.python, folder)
        foot = made(python)
        rows += [(f"own_{x}.py, three runs", *own_model(x, python, folder)) for x in LIBRARIES]
        rows += [path_of(newcomer, python, folder) for newcomer in PATHS]
    total = sum(spent for _, spent, _ in rows)
    rows.append(("all of it", total, ""))
    lines = [f"| {what} | {spent:.0f} | {said} |" for what, spent, said in rows]
    busy = f"The machine's load was {os.getloadavg()[2]:.0f} on {os.cpu_count()} cores.\n"
    arguments.out.write_text(HEAD + "\n".join(lines) + "\n\n" + foot + busy)
    print(arguments.out.read_text())


if __name__ == "__main__":
    main()
