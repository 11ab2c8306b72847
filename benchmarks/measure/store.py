"""Results kept as JSON beside their tables, so that a run may measure a part and keep the rest."""

import dataclasses
import json
import pathlib
from typing import Any

Row = dict[str, Any]
KEYS = ("part", "target", "dtype", "size", "network", "variant")


@dataclasses.dataclass
class Store:
    """Rows by what they measure, and the runs that measured them."""

    path: pathlib.Path | None  # of the JSON; None to keep nothing
    runs: list[dict[str, str]] = dataclasses.field(default_factory=list)
    rows: dict[tuple[str, ...], Row] = dataclasses.field(default_factory=dict)

    @classmethod
    def read(cls, path: pathlib.Path | None) -> "Store":
        """Returns what the file holds, or an empty store."""
        store = cls(path)
        if path is not None and path.exists():
            found = json.loads(path.read_text())
            store.runs = found["runs"]
            store.rows = {tuple(row[k] for k in KEYS): row for row in found["rows"]}
        return store

    def begin(self, **about: str) -> None:
        """Opens a run; rows that are put from now on belong to it."""
        self.runs.append(about)

    def put(self, *key: str, **values: Any) -> None:
        """Adds a row, in place of an older one that measured the same, and writes the file."""
        row = {**dict(zip(KEYS, key, strict=True)), **values, "run": len(self.runs)}
        self.rows[key] = row
        self.write()

    def drop(self, *key: str) -> None:
        """Forgets the rows whose keys begin so."""
        self.rows = {k: row for k, row in self.rows.items() if k[: len(key)] != key}

    def part(self, name: str) -> list[Row]:
        """Returns the rows of one kind of measurement."""
        return [row for row in self.rows.values() if row["part"] == name]

    def used_runs(self) -> list[tuple[int, dict[str, str]]]:
        """Returns the runs that a row still comes from, with their numbers."""
        used = {row["run"] for row in self.rows.values()}
        return [(i, run) for i, run in enumerate(self.runs, start=1) if i in used]

    def write(self) -> None:
        """Writes the file, if there is one."""
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        rows = ",\n".join(json.dumps(row) for row in self.rows.values())
        runs = ",\n".join(json.dumps(run) for run in self.runs)
        # In one piece: a run that is stopped in between leaves the file of before.
        beside = self.path.with_suffix(".part")
        beside.write_text(f'{{"runs": [\n{runs}\n],\n"rows": [\n{rows}\n]}}\n')
        beside.replace(self.path)
