"""Measures mpjax on a GPU, card by card, and goes on where an earlier run stopped.

    python benchmarks/gpu.py --minutes 9 --out DIR                    # on a GPU: every card
    python benchmarks/gpu.py --minutes 9 --out DIR --cards 1,2        # these
    python benchmarks/gpu.py --device cpu --size tiny --out DIR       # tries the script itself

Needs Python, JAX with its CUDA plugin, flax and optax; PyTorch, torchvision, timm and transformers
for card 3. DIR/gpu.json and DIR/gpu.md are written after each network; a row that is there for the
same GPU, JAX and code is not measured again. Nothing of the GPU's settings is touched.

Exit codes: 0 measured, or out of time · 1 something failed or is wrong: it stands first in gpu.md ·
2 no GPU, or a wrong argument.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import time
import uuid

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # mpjax of this checkout, installed or not

from gpu_cards import device, tables, worker  # noqa: E402
from gpu_cards.plans import CARDS, PLANS  # noqa: E402
from measure.store import Store  # noqa: E402

GROUPS = ((0, 1, 2), (3,), (4, 5, 6, 7))  # PyTorch gets a process in which JAX holds no memory yet
LEAST_MINUTES = 0.5
GRACE = 10.0  # seconds after which a process that is late is ended


def cards(text: str) -> list[int]:
    """Parses numbers of cards."""
    words = [word.strip() for word in text.split(",")]
    unknown = [word for word in words if not (word.isdecimal() and int(word) in CARDS)]
    if unknown:
        there = "\n".join(f"  {number}  {title}" for number, title in CARDS.items())
        raise argparse.ArgumentTypeError(
            f"unknown card: {', '.join(unknown)}. There are:\n{there}\n  Type e.g. --cards 0,1,2"
        )
    return sorted({int(word) for word in words})


def minutes(text: str) -> float:
    """Parses how long a run may take."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not LEAST_MINUTES <= value < 1e4:
        raise argparse.ArgumentTypeError(f"{text!r}: give {LEAST_MINUTES:g} or more, such as 9")
    return value


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--minutes", type=minutes, default=9.0, help="when to stop, to within 30 s (default: 9)")
    add("--out", type=pathlib.Path, required=True, metavar="DIR", help="for gpu.json and gpu.md")
    add("--cards", type=cards, default=list(CARDS), help="such as 0,1,2; all without")
    add("--device", choices=device.KINDS, default="gpu", help="cpu: to try this script")
    add("--size", choices=PLANS, help="full, or tiny; on a GPU full without")
    add("--torch", metavar="PYTHON", default=sys.executable, help="an interpreter with PyTorch")
    add("--worker", help=argparse.SUPPRESS)  # the run's name, in the process that measures
    add("--seconds", type=float, help=argparse.SUPPRESS)
    add("--command", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.device == "cpu" and options.size != "tiny":
        parser.error(f"--device cpu measures no GPU; it tries the script: {device.TRY_ON_A_CPU}")
    options.size = options.size or "full"
    return options


def main() -> int:
    options = arguments()
    if options.worker:
        try:
            code = worker.main(options)
        except device.NoGpuError as error:
            print(error, file=sys.stderr, flush=True)
            code = 2
        sys.stdout.flush()
        os._exit(code)  # threads may still compile what there is no time for
    options.out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * options.minutes
    command = " ".join(["python", "benchmarks/gpu.py", *sys.argv[1:]])
    name = uuid.uuid4().hex
    if options.size == "tiny":  # programs that run for a moment: what compiles them is tried too
        os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
    for group in GROUPS:
        chosen = [card for card in group if card in options.cards]
        if chosen and measure(options, chosen, name, command, deadline) == 2:
            return 2
    return closing(options.out, name)


def measure(
    options: argparse.Namespace, chosen: list[int], name: str, command: str, deadline: float
) -> int:
    """Runs a process that measures, and another one where it broke; returns the exit code."""
    numbers = ", ".join(map(str, chosen))
    while (seconds := deadline - time.monotonic()) > 0:
        words = ["--worker", name, "--seconds", str(seconds), "--command", command]
        words += ["--out", str(options.out), "--cards", ",".join(map(str, chosen))]
        words += ["--device", options.device, "--size", options.size, "--torch", options.torch]
        process = subprocess.Popen([sys.executable, __file__, *words])
        try:
            code = process.wait(seconds + GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            leave_out(options.out, f"cards {numbers}: the rest was not done when time was over")
            return worker.DONE
        if code in (worker.DONE, 2):
            return code
        if code == worker.BROKEN:
            continue  # between two jobs: their rows are written
        if not write_down(options.out, code):
            print(f"gpu.py: the process that measures ended with {code}", file=sys.stderr)
            return 2
    leave_out(options.out, f"cards {numbers}: no time was left")
    return worker.DONE


def leave_out(folder: pathlib.Path, line: str) -> None:
    """Says and writes down what a run had no time for."""
    print(f"left out: {line}", flush=True)
    (folder / worker.IN_HAND).unlink(missing_ok=True)
    store = Store.read(folder / "gpu.json")
    if store.runs:
        store.runs[-1]["left"].append(line)
        store.write()
        (folder / "gpu.md").write_text(tables.document(store))


def write_down(folder: pathlib.Path, code: int) -> bool:
    """Makes rows of what was in hand when a process broke; returns whether anything was."""
    path = folder / worker.IN_HAND
    if not path.exists():
        return False
    lost = json.loads(path.read_text())
    path.unlink()
    store = Store.read(folder / "gpu.json")
    reason = f"the process ended with {code} while this was measured, or compiled with the next"
    for variant in lost["variants"]:
        key = (f"card {lost['card']}", lost["target"], "", lost["size"], lost["network"], variant)
        store.put(*key, error=reason, code=lost["code"])
    (folder / "gpu.md").write_text(tables.document(store))
    return True


def closing(folder: pathlib.Path, name: str) -> int:
    """Says what was measured and what is to be looked at; returns the exit code."""
    store = Store.read(folder / "gpu.json")
    mine = [row for row in store.rows.values() if store.runs[row["run"] - 1]["id"] == name]
    wrong = [row for row in mine if "error" in row or row.get("right") is False]
    lines = list(tables.findings(mine))
    print(f"{len(mine)} rows measured, {len(store.rows)} in all: {folder / 'gpu.md'}")
    for line in lines[:40]:
        print(f"- {line}")
    absent = sum("absent" in row for row in mine)
    print(f"{len(wrong)} failed or are wrong; {absent} for want of a package")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
