"""The command line, `python -m mpjax`: tables of machines and names, checks, and the doctor."""

import argparse
import dataclasses
import functools
import importlib.util
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

import mpjax
from mpjax._base.dtypes import short_name
from mpjax._base.errors import message
from mpjax._hardware import DTYPES, SUPPORT, Accelerator, examine, find_accelerator
from mpjax._policies.policy import POLICY_NAMES, get_policy
from mpjax._policies.quantized_policy import NAMES
from mpjax._policies.recipes import DTYPES as EIGHT_BIT

OK, SLOW, FAILED = 0, 1, 2
"""Exit codes: all is well · runs, with little or no gain · cannot run, or a wrong argument."""

_WORDS = {"native": "yes", "slow": "slow", "unsupported": "no", "unknown": "?"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """A subcommand: `run` prints and returns the exit code."""

    name: str
    help: str
    run: Callable[[argparse.Namespace], int]
    add_arguments: Callable[[argparse.ArgumentParser], None] = lambda parser: None


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; `argv` is `sys.argv[1:]` unless given."""
    args = _parser().parse_args(argv, argparse.Namespace(json=False))
    try:
        return args.run(args)
    except (ValueError, TypeError) as error:  # the library's message about a wrong name
        print(error, file=sys.stderr)
        return FAILED


def _parser() -> argparse.ArgumentParser:
    shared = argparse.ArgumentParser(add_help=False)
    # SUPPRESS: a subcommand's own default would undo a --json that stands before it.
    shared.add_argument(
        "--json", action="store_true", default=argparse.SUPPRESS, help="print JSON instead of text"
    )
    parser = argparse.ArgumentParser(
        prog="mpjax" if sys.argv[0].endswith("mpjax") else "python -m mpjax",
        description="Mixed precision for JAX. Without a command: what this machine is, what it "
        "runs well, which policy to pick, and the same for every accelerator known.",
        epilog="Exit codes: 0 fine, 1 runs with little or no gain, 2 cannot run or wrong argument.",
        parents=[shared],
    )
    parser.add_argument("--version", action="version", version=f"mpjax {mpjax.__version__}")
    parser.set_defaults(run=_machine)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command in COMMANDS:
        sub = commands.add_parser(
            command.name, help=command.help, description=command.help, parents=[shared]
        )
        command.add_arguments(sub)
        sub.set_defaults(run=command.run)
    return parser


# -- machine -----------------------------------------------------------------------------------


def _machine(args: argparse.Namespace) -> int:
    try:
        devices = jax.devices()
    except RuntimeError as error:  # JAX_PLATFORMS names a backend that does not start
        print(f"JAX starts no backend: {error}", file=sys.stderr)
        print("  `python -m mpjax table` needs none.", file=sys.stderr)
        return FAILED
    row = find_accelerator(devices[0])
    if args.json:
        machine = {"platform": devices[0].platform, "device_count": len(devices), **_row(row)}
        versions = {"mpjax": mpjax.__version__, "jax": jax.__version__}
        return _print_json({"versions": versions, "machine": machine, "table": _rows()})
    print(f"mpjax {mpjax.__version__}, JAX {jax.__version__}\n")
    count = "" if len(devices) == 1 else f"{len(devices)} x "
    print(f"This machine: {count}{row.name} ({row.key})")
    for dtype in DTYPES:
        cell = row.cell(dtype)
        print(f"  {dtype:<14} {_WORDS[cell.status]:<5} {cell.reason}")
    print(f"\nPick: {row.policy!r}, as in mpjax.get_policy({row.policy!r}).\n")
    _print_support()
    return OK


# -- table -------------------------------------------------------------------------------------


def _table(args: argparse.Namespace) -> int:
    rows = [find_accelerator(name, "mpjax table") for name in args.device]
    if args.json:
        return _print_json([_row(row) for row in rows] if rows else _rows())
    if not rows:
        _print_support()
    for row in rows:
        cells = [(dtype, row.cell(dtype)) for dtype in DTYPES]
        lines = [(dtype, _WORDS[cell.status], cell.reason) for dtype, cell in cells]
        title = f"{row.name} ({row.key}): pick {row.policy!r}"
        _print_table(title, ("dtype", "fast", "why"), lines)
    return OK


def _table_arguments(parser: argparse.ArgumentParser) -> None:
    help = "an accelerator, for the reasons: v5e, h100, sm_90, gfx942, cpu ...; all without one"
    parser.add_argument("device", nargs="*", metavar="DEVICE", help=help)


def _print_support() -> None:
    names = {dtype: short_name(dtype) for dtype in DTYPES}
    names |= {dtype: short for short, dtype in EIGHT_BIT.items()}
    lines = [
        (row.key, row.name, *(_WORDS[row.cell(dtype).status] for dtype in DTYPES), row.policy)
        for row in SUPPORT.values()
    ]
    header = ("name", "accelerator", *(names[dtype] for dtype in DTYPES), "pick")
    _print_table("Products by accelerator: fast, or no faster than a wider dtype", header, lines)
    print(
        "Why, for one of them: python -m mpjax table NAME. Models (h100, rtx4090, mi300x), compute"
    )
    print("capabilities (9.0) and slices of a TPU pod (v5litepod-16) are names too.")


def _row(row: Accelerator) -> dict[str, Any]:
    cells = {dtype: row.cell(dtype)._asdict() for dtype in DTYPES}
    return {"name": row.key, "description": row.name, "pick": row.policy, "dtypes": cells}


def _rows() -> list[dict[str, Any]]:
    return [_row(row) for row in SUPPORT.values()]


# -- names -------------------------------------------------------------------------------------


def _names(args: argparse.Namespace) -> int:
    rows = [{"name": row.name, **row.policy.to_dict(), "from": row.source} for row in POLICY_NAMES]
    low = [{"name": name, **get_policy(name).to_dict(), "from": "Keras"} for name in NAMES]
    if args.json:
        return _print_json(rows + low)
    header = ("name", "parameters", "computation", "output", "from")
    _print_table("Names that get_policy takes", header, [tuple(row.values()) for row in rows])
    header = (*header[:-1], "recipe of products", "from")
    _print_table("With products in 8 bits", header, [tuple(row.values()) for row in low])
    print("Also: one dtype for all three (bfloat16), or pairs as in jmp (p=f32,c=bf16,o=f32).")
    print("'bf16' alone is refused: it is mixed for Lightning and all bfloat16 for jmp.")
    return OK


# -- check -------------------------------------------------------------------------------------


def _check(args: argparse.Namespace) -> int:
    report = examine(_policy(args.policy), find_accelerator(args.device, "mpjax check"))
    if args.json:
        _print_json(report.to_dict())
    else:
        print(report)
    return {"slow": SLOW, "unsupported": FAILED}.get(report.status, OK)


def _policy(name: str, option: str = "") -> Any:
    """Returns the policy of a name; an error says what to type behind `option` in its place."""
    try:
        return get_policy(name)
    except (ValueError, TypeError) as error:
        raise type(error)(re.sub(r"get_policy\('(.*?)'\)", rf"{option}\1", str(error))) from None


def _check_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("policy", metavar="POLICY", help="a name, as `names` lists them")
    help = "an accelerator that need not be here (v5litepod-16, h100 ...); this machine's without"
    parser.add_argument("--device", metavar="NAME", help=help)


# -- doctor ------------------------------------------------------------------------------------


def _doctor(args: argparse.Namespace) -> int:
    from mpjax._doctor import doctor  # the other commands need no autocast

    if args.timed and args.device:
        fix = "Leave out one of the two: what is not here is compiled for, and not run."
        raise ValueError(message("mpjax doctor", "--run measures this machine, not --device.", fix))
    row = find_accelerator(args.device, "mpjax doctor")
    for name in args.policy or ():
        _policy(name, "--policy ")
    policies = tuple(dict.fromkeys(("32-true", *args.policy))) if args.policy else doctor.POLICIES
    compiler, note = _compiler(row.key) if args.device else (None, "")
    diagnosis = doctor.diagnose(
        args.function,
        args.argument,
        policies=policies,
        accelerator=row,
        compiler=compiler,
        track=_tracked,
    )
    measured = _measured(diagnosis, policies, args.budget) if args.timed else None
    if args.json:
        more = {"measured": measured.to_dict()} if measured else {}
        return _print_json({**diagnosis.to_dict(), **more})
    _print_diagnosis(diagnosis, note)
    if measured:
        print(f"\nBy the clock:\n\n{measured}")
    return OK


def _measured(diagnosis: Any, policies: Sequence[str], budget: float) -> Any:
    """Returns the time, memory and error of the function under each policy, on this machine."""
    from mpjax._doctor import doctor

    track = functools.partial(_tracked, doing="measuring")
    measured = mpjax.measure(diagnosis.fun, policies, budget=budget, track=track)
    return measured(*doctor.values_of(diagnosis))


def _compiler(key: str) -> tuple[Any, str]:
    """Returns an accelerator's compiler with its name, or None and a note on installing it."""
    from mpjax.pods import _one

    topology = _one.topology_of(key)
    if topology is None:
        return None, f"the compiler for {key} runs on such a device only."
    try:
        return (topology.chip.name, _one.compiler_for(topology)), ""
    except ModuleNotFoundError as error:
        missing, install, *_ = str(error).splitlines()
        return None, f"the device's {missing.partition(': its ')[2]}\n{install.strip()}"


def _print_diagnosis(diagnosis: Any, note: str) -> None:
    base, accelerator = diagnosis.rows[0], diagnosis.accelerator
    lines = [
        (
            measured.policy,
            _WORDS[measured.status],
            *_with_share(measured.kept, base.kept),
            *_with_share(measured.temporaries, base.temporaries),
            *_with_share(measured.bytes_accessed, base.bytes_accessed),
            f"{measured.seconds:.1f}",
        )
        for measured in diagnosis.rows
    ]
    header = ("policy", "fast", "kept", "x", "temporary", "x", "accessed", "x", "compiled in s")
    print(f"{diagnosis.function}: {diagnosis.what}\n")
    _print_table(f"On {accelerator.name} ({accelerator.key})", header, lines)
    print(f"x: against {base.policy}. kept: from the forward to the backward pass, on any device.")
    print(f"The rest is as compiled for {diagnosis.compiled_for}{f': {note}' if note else '.'}\n")
    for dtype in dict.fromkeys(str(get_policy(row.policy).compute_dtype) for row in diagnosis.rows):
        cell = accelerator.cell(dtype)
        print(f"  {dtype:<9} {_WORDS[cell.status]:<5} {cell.reason}")
    print(f"\nWhat {diagnosis.taken!r} does:")
    print("".join(f"  {line}\n" for line in diagnosis.explanation.summary()))
    print("\n".join(diagnosis.advice))
    call = f"mpjax.explain({diagnosis.function}, {diagnosis.taken!r})(...)"
    print(f"Operation by operation: print({call})")


def _with_share(count: int | None, base: int | None) -> tuple[str, str]:
    if count is None:
        return "?", ""
    return _size(count), f"{count / base:.2f}" if base else ""


def _size(count: int) -> str:
    for unit, step in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= step:
            return f"{count / step:.1f} {unit}"
    return f"{count} B"


def _tracked(policies: Sequence[str], doing: str = "compiling") -> Iterator[str]:
    """Yields the policies with a progress bar on a terminal, where a person waits."""
    if not (sys.stderr.isatty() and importlib.util.find_spec("rich")):
        yield from policies
        return
    from rich.console import Console
    from rich.progress import track

    yield from track(policies, doing, console=Console(stderr=True), transient=True)


def _doctor_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("function", metavar="FILE:FUNCTION", help="e.g. train.py:loss_fn")
    help = "one a parameter: a name in the file (a value, or a function that makes one) or a "
    help += "shape such as 'f32[8,128]'; without any, the names of the function's parameters"
    # Without a default, argparse would call it required.
    parser.add_argument("argument", nargs="*", default=[], metavar="ARGUMENT", help=help)
    help = "compare this policy with 32-true; may be repeated (default: bf16-mixed and 16-mixed)"
    parser.add_argument("--policy", action="append", metavar="NAME", help=help)
    help = "an accelerator that need not be here, for what it runs well; this machine's without"
    parser.add_argument("--device", metavar="NAME", help=help)
    help = "run it too, on this machine: time, memory and error of each policy, and which to take"
    parser.add_argument("--run", dest="timed", action="store_true", help=help)
    help = "seconds for --run, in all (default: 60)"
    parser.add_argument("--budget", type=float, default=60.0, metavar="SECONDS", help=help)


# -- pods --------------------------------------------------------------------------------------


def _pods(args: argparse.Namespace) -> int:
    from mpjax._doctor import user_file
    from mpjax.pods import _command

    topology = _command.topology_of(args.topology, args.num_slices)
    load = functools.partial(user_file.load_build, args.function, _command.WHERE)
    if args.outline:
        return _print_json_line(_command.outline(load, topology))
    again = ["pods", args.function, args.topology, "--outline"]
    _command.use_cpu(topology)
    try:
        again += ["--num-slices", str(args.num_slices)]
        report = _command.check_file(load, again, topology)
    except ModuleNotFoundError as error:  # the compiler for that platform; says what to install
        print(error, file=sys.stderr)
        return FAILED
    if args.json:
        _print_json(report.to_dict())
    else:
        print(report)
    return report.exit_code


def _print_json_line(value: Any) -> int:
    print(json.dumps(value))
    return OK


def _pods_arguments(parser: argparse.ArgumentParser) -> None:
    help = "build(topology) -> (step, args), as mpjax.pods.check_job takes it"
    parser.add_argument("function", metavar="FILE:FUNCTION", help=help)
    help = "v5e-256, v5p-128, 8xh100, cpu:8 ...: hardware that need not be here"
    parser.add_argument("topology", metavar="TOPOLOGY", help=help)
    help = "TPU slices that are joined by the data centre's network (default: 1)"
    parser.add_argument("--num-slices", type=int, default=1, metavar="N", help=help)
    parser.add_argument("--outline", action="store_true", help=argparse.SUPPRESS)  # for itself


COMMANDS: tuple[Command, ...] = (
    Command(
        name="table",
        help="which precision is fast on which accelerator, and why",
        run=_table,
        add_arguments=_table_arguments,
    ),
    Command(name="names", help="every policy name, and where it comes from", run=_names),
    Command(
        name="check",
        help="whether a policy runs, and runs well, on an accelerator",
        run=_check,
        add_arguments=_check_arguments,
    ),
    Command(
        name="doctor",
        help="what each policy would save in your function, and which to take",
        run=_doctor,
        add_arguments=_doctor_arguments,
    ),
    Command(
        name="pods",
        help="whether a train step is right for a TPU slice or GPUs, compiled ahead of time",
        run=_pods,
        add_arguments=_pods_arguments,
    ),
)


# -- printing ----------------------------------------------------------------------------------


def _print_json(value: Any) -> int:
    print(json.dumps(value, indent=2))
    return OK


def _print_table(title: str, header: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """Prints a table: by rich on a terminal, if rich is installed; else as plain text."""
    if sys.stdout.isatty() and importlib.util.find_spec("rich"):
        _print_rich(title, header, lines)
        return
    widths = [max(map(len, column)) for column in zip(header, *lines, strict=True)]
    print(title)
    for line in (header, ["-" * width for width in widths], *lines):
        padded = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        print("  " + "  ".join(padded).rstrip())
    print()


def _print_rich(title: str, header: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # No padding: one space between columns, so that 80 columns are enough.
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    widths = [max(map(len, column)) for column in zip(header, *lines, strict=True)]
    for name, width in zip(header, widths, strict=True):
        # A narrow terminal breaks the longest column only: the others hold names to be typed.
        table.add_column(name, no_wrap=width < max(widths))
    colours = {"yes": "green", "slow": "yellow", "no": "red"}
    for line in lines:
        table.add_row(*(Text(cell, style=colours.get(cell, "")) for cell in line))
    Console().print(table)


def run_as_program() -> int:
    """Runs the command line of `python -m mpjax`, or of `mpjax`, and returns its exit code."""
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        # Python flushes stdout once more at exit, and would print a traceback then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    return code


if __name__ == "__main__":
    sys.exit(run_as_program())
