"""Checkpoints of the pod trainer in a bucket: a store of objects, which knows no folders."""

from typing import Any, ClassVar

import fsspec
import numpy as np
import pytest
from etils import epath
from fsspec.implementations.memory import MemoryFileSystem
from pod_job.checkpoints import Checkpoints
from pod_job.processes import together

RUN = "gs://bucket/run"


class Bucket(MemoryFileSystem):
    """Objects in memory under gs:// names; a folder is there while an object is in it."""

    protocol = ("gs", "gcs")
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]

    @classmethod
    def _strip_protocol(cls, path):
        return "/" + str(path).removeprefix("gs://").strip("/")

    def mkdir(self, path, create_parents=True, **_):
        pass

    def makedirs(self, path, exist_ok=False):
        pass

    def glob(self, path, **options):
        return [found.removeprefix("/") for found in super().glob(path, **options)]


class Manager:
    """Does what `Checkpoints` asks of Orbax, whose own client of buckets writes to real ones."""

    def __init__(self, folder, options):
        self.folder = folder

    def all_steps(self):
        done = self.folder.glob("*/commit_success.txt")
        return sorted(int(path.parent.name) for path in done if path.parent.name.isdigit())

    def save(self, step, args, force):
        (self.folder / str(step) / "w").write_bytes(args.item["w"].tobytes())
        (self.folder / str(step) / "commit_success.txt").write_text("")

    def restore(self, step, args):
        return {"w": np.frombuffer((self.folder / str(step) / "w").read_bytes(), np.float32)}

    def is_saving_in_progress(self):
        return False

    def wait_until_finished(self):
        pass

    reload = close = wait_until_finished


@pytest.fixture
def bucket(monkeypatch):
    """The folder of a run with the checkpoints of steps 3 and 6."""
    import orbax.checkpoint as ocp

    fsspec.register_implementation("gcs", Bucket, clobber=True)
    monkeypatch.setattr(ocp, "CheckpointManager", Manager)
    Bucket.store.clear()
    with Checkpoints(RUN) as checkpoints:
        checkpoints.claim({"seed": 0})
        for step in (3, 6):
            checkpoints.save(step, state_of(step))
    yield epath.Path(RUN)
    Bucket.store.clear()


def state_of(step):
    return {"w": np.arange(64, dtype=np.float32) * step}


def restored(folder=RUN):
    with Checkpoints(folder) as checkpoints:
        return checkpoints.restore(state_of(0))


def test_the_newest_checkpoint_of_a_bucket_is_restored(bucket):
    step, state, said = restored()
    assert (step, said) == (6, [])
    np.testing.assert_array_equal(state["w"], state_of(6)["w"])
    assert (bucket / "6" / "seal-0.json").is_file()


def test_a_broken_one_is_moved_aside_and_the_one_before_taken(bucket):
    (bucket / "6" / "w").write_bytes(bytes(256))
    step, state, said = restored()
    assert step == 3
    np.testing.assert_array_equal(state["w"], state_of(3)["w"])
    assert len(said) == 1
    assert f"refused checkpoint {RUN}/6: w is corrupted" in said[0]
    assert (bucket / "refused" / "6-0" / "w").is_file()
    assert not (bucket / "6").exists()


def test_one_that_was_being_written_is_said_though_no_name_tells_it(bucket):
    (bucket / "9" / "w").write_bytes(bytes(9))
    step, _, said = restored()
    assert (step, said) == (6, [f"refused {RUN}/9: it was being written when a run ended."])


def test_another_jobs_bucket_is_refused(bucket):
    said = r"another job's.\n  'seed' is 0 there, 1 here"
    with Checkpoints(RUN) as checkpoints, pytest.raises(ValueError, match=said):
        checkpoints.claim({"seed": 1})


def test_an_object_is_no_folder(bucket):
    with pytest.raises(ValueError, match=r"checkpoint folder gs://bucket/run/6/w: is a file"):
        Checkpoints(f"{RUN}/6/w")


def test_a_bucket_without_its_client_says_what_to_install(monkeypatch):
    def missing(*_):
        raise ImportError("Please install gcsfs to access Google Storage")

    fsspec.register_implementation("gcs", Bucket, clobber=True)
    monkeypatch.setattr(Bucket, "isdir", missing)
    monkeypatch.setattr(Bucket, "exists", missing)
    with pytest.raises(ValueError, match=r"cannot be opened(.|\n)*pip install gcsfs"):
        Checkpoints("gs://other/run")


def test_processes_look_for_each_others_errors_in_the_bucket(bucket):
    with pytest.raises(ValueError, match="of the work"), together(RUN):
        raise ValueError("of the work")
