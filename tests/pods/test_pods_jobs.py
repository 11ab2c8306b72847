"""What a pod job stands on: its config file, its checkpoints, and processes that agree."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from pod_job.checkpoints import Checkpoints
from pod_job.config import Data, flat, load_config
from pod_job.corpus import open_corpus
from pod_job.processes import agree, gather_values, initialize, raise_differences

from mpjax.testing import assert_bitwise_equal

GOOD: dict[str, Any] = {
    "hardware": "a test",
    "accelerator": "cpu:8",
    "model": {"width": 16, "layers": 2, "heads": 2, "hidden": 32},
    "optimizer": {"learning_rate": 1.0e-2},
    "sequence_length": 16,
    "global_batch_size": 8,
    "steps": 12,
}


def written(folder, **changes):
    values = {k: v for k, v in (GOOD | changes).items() if v is not None}
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


# -- the config ------------------------------------------------------------------------------------


def test_a_config_is_read_with_its_defaults_and_overrides(tmp_path):
    job = load_config(written(tmp_path), ["model.layers=3", "precision=16-mixed", "mesh.fsdp=8"])
    assert (job.model.layers, job.precision, job.mesh.data) == (3, "16-mixed", 1)
    assert flat(job)["model.layers"] == 3
    assert load_config(written(tmp_path), ["data.pattern=*.txt"]).data.pattern == "*.txt"
    assert job.mesh_axes(8) == {"data": 1, "fsdp": 8, "tensor": 1}
    assert job.topology.num_devices == 8


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sequence_lenght": 8}, r"unknown key 'sequence_lenght'(.|\n)*mean 'sequence_length'"),
        ({"model": {"widht": 8}}, r"unknown key 'model.widht'.\n.*width(.|\n)*mean 'model.width'"),
        ({"steps": None}, r"key 'steps' is missing.\n  Add a line such as 'steps: 8'"),
        ({"model": {"width": 8}}, r"key 'model.layers' is missing"),
        ({"steps": "many"}, r"'steps' must be a whole number; got 'many'"),
        ({"steps": True}, r"'steps' must be a whole number; got True"),
        ({"steps": 0}, r"'steps' must be at least 1; got 0"),
        (
            {"model": GOOD["model"] | {"vocabulary": 100}},
            r"'model.vocabulary' must be at least 256; got 100",
        ),
        ({"optimizer": {"learning_rate": math.nan}}, r"above 0 and finite; got nan"),
        ({"optimizer": {"learning_rate": "1e-3"}}, r"got '1e-3'.\n  YAML wants a point: 1.0e-3"),
        ({"model": 8}, r"'model' must be a section; got 8"),
        ({"checkpoint": {"keep": 1}}, r"'checkpoint.keep' must be at least 2"),
        ({"data": {"held_out": 1.0}}, r"'data.held_out' must lie between 0 and 1"),
        ({"accelerator": "v5e-255"}, r"no slice of v5e has 255 chips(.|\n)*'v5e-256'"),
        ({"precision": "bf17-mixed"}, r"unknown policy 'bf17-mixed'(.|\n)*'bf16-mixed'"),
        ({"mesh": {"fsdp": 3}}, r"data=1 x fsdp=3 x tensor=1 does not divide 8 devices"),
        ({"global_batch_size": 12}, r"size: 12 does not divide .* = 8.\n  Type 8 or 16"),
        ({"mesh": {"tensor": 4}}, r"model.heads: 2 does not divide over tensor = 4"),
        ({"model": {"width": 12, "layers": 1, "heads": 4, "hidden": 8}}, r"even heads"),
    ],
)
def test_a_bad_config_is_refused(changes, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        load_config(written(tmp_path, **changes))


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("steps", r"--set steps: there is no '='"),
        ("steps.x=1", r"'steps' is a value, not a section"),
        ("modle.width=8", r"unknown key 'modle'(.|\n)*Did you mean 'model'"),
    ],
)
def test_a_bad_override_is_refused(override, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        load_config(written(tmp_path), [override])


def test_a_file_that_is_not_there_or_no_yaml_is_refused(tmp_path):
    path = written(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no such file.\n  Did you mean .*job.yaml"):
        load_config(tmp_path / "jbo.yaml")
    path.write_text("steps: [1")
    with pytest.raises(ValueError, match="is not YAML"):
        load_config(path)
    path.write_text("- 1")
    with pytest.raises(ValueError, match=r"must hold 'key: value' lines; got list"):
        load_config(path)


# -- the corpus ------------------------------------------------------------------------------------


def test_a_corpus_that_is_missing_empty_or_short_is_refused(tmp_path):
    data = {"cache": str(tmp_path / "cache")}
    with pytest.raises(FileNotFoundError, match="there is no such file or folder"):
        open_corpus(Data(path=str(tmp_path / "nothing"), **data), 8)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "empty.py").touch()
    with pytest.raises(FileNotFoundError, match=r"no file matches '\*.py' and has something"):
        open_corpus(Data(path=str(tmp_path / "texts"), **data), 8)
    short = tmp_path / "short.txt"
    short.write_bytes(b"0123456789")
    with pytest.raises(
        ValueError, match=r"9 bytes in train, of 1 file;(.|\n)*sequence_length \+ 1 = 9"
    ):
        open_corpus(Data(path=str(short), held_out=0.1, **data), 8)


def test_a_cache_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_bytes(bytes(99))
    data = Data(path=str(tmp_path / "file"), cache=str(tmp_path / "file"))
    with pytest.raises(ValueError, match=r"data.cache '.*file': is a file"):
        open_corpus(data, 8)


def test_one_file_is_split_by_position(tmp_path):
    path = tmp_path / "one.txt"
    path.write_bytes(bytes(range(100)))
    data = Data(path=str(path), held_out=0.25, cache=str(tmp_path / "cache"))
    corpus = open_corpus(data, 4)
    assert (corpus.train.tolist(), corpus.held_out.tolist()) == ([*range(75)], [*range(75, 100)])


# -- checkpoints -----------------------------------------------------------------------------------

ORBAX = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning"),
    pytest.mark.standard_promotion("orbax mixes dtypes"),
]


def state_of(step):
    return {"w": jnp.arange(512.0) * step, "step": jnp.int32(step)}


@pytest.fixture
def saved(tmp_path):
    """A folder with the checkpoints of steps 3 and 6."""
    with Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(3, state_of(3))
        checkpoints.save(6, state_of(6))
    return tmp_path / "run"


def largest_file(folder):
    return max((f for f in folder.rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)


def flip_a_bit(folder):
    path = largest_file(folder / "6")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut_short(folder):
    path = largest_file(folder / "6")
    path.write_bytes(path.read_bytes()[:-5])


def lose_a_file(folder):
    largest_file(folder / "6").unlink()


def scratch_a_seal(folder):
    (folder / "6" / "seal-0.json").write_bytes(bytes(9))


DAMAGE = [
    (flip_a_bit, "is corrupted"),
    (cut_short, "is corrupted"),
    (lose_a_file, "is missing"),
    (scratch_a_seal, "seal-0.json is corrupted"),
]


class TestCheckpoints:
    pytestmark = ORBAX

    @pytest.mark.parametrize(("damage", "said"), DAMAGE)
    def test_a_broken_one_is_refused_by_name_and_the_one_before_taken(self, damage, said, saved):
        damage(saved)
        with Checkpoints(saved) as checkpoints:
            step, state, refused = checkpoints.restore(state_of(0))
            assert step == 3
            assert_bitwise_equal(state, state_of(3))
            assert len(refused) == 1
            assert f"checkpoint {saved}/6: " in refused[0]
            assert said in refused[0]
            checkpoints.save(6, state_of(6))  # the run gets there again
        assert (saved / "refused" / "6-0").is_dir()
        with Checkpoints(saved) as checkpoints:
            assert checkpoints.restore(state_of(0))[0] == 6

    def test_what_orbax_was_writing_is_no_checkpoint(self, saved):
        (saved / "9.orbax-checkpoint-tmp" / "default").mkdir(parents=True)
        with Checkpoints(saved) as checkpoints:
            step, _, said = checkpoints.restore(state_of(0))
        assert step == 6
        assert any("9.orbax-checkpoint-tmp: it was being written" in line for line in said)

    def test_one_that_orbax_completed_and_nobody_sealed_is_taken_and_said(self, saved):
        (saved / "6" / "seal-0.json").unlink()
        with Checkpoints(saved) as checkpoints:
            step, state, said = checkpoints.restore(state_of(0))
        assert step == 6
        assert_bitwise_equal(state, state_of(6))
        assert said == [
            f"checkpoint {saved}/6 is taken unproven: the run ended before process 0 sealed it."
        ]

    def test_when_none_is_whole_a_run_does_not_start_anew(self, saved):
        flip_a_bit(saved)
        largest_file(saved / "3").unlink()
        said = r"no checkpoint is whole.(.|\n)*/6: (.|\n)*/3: "
        for _ in range(2):  # nor when a scheduler starts it again
            with Checkpoints(saved) as checkpoints, pytest.raises(ValueError, match=said):
                checkpoints.restore(state_of(0))

    def test_a_run_killed_while_it_wrote_its_first_one_starts_anew_and_says_so(self, tmp_path):
        (tmp_path / "run" / "3.orbax-checkpoint-tmp-1").mkdir(parents=True)
        with Checkpoints(tmp_path / "run") as checkpoints:
            step, state, said = checkpoints.restore(state_of(0))
        assert (step, state) == (0, None)
        assert "3.orbax-checkpoint-tmp-1: it was being written when a run ended." in said[0]

    def test_a_new_folder_has_nothing_to_restore(self, tmp_path):
        with Checkpoints(tmp_path / "new") as checkpoints:
            assert checkpoints.restore(state_of(0)) == (0, None, [])

    def test_another_jobs_folder_is_refused(self, saved):
        with Checkpoints(saved) as checkpoints:
            checkpoints.claim({"model.width": 16, "seed": 0})
            checkpoints.claim({"model.width": 16, "seed": 0})
            with pytest.raises(ValueError, match=r"another job's.\n  'seed' is 0 there, 1 here"):
                checkpoints.claim({"model.width": 16, "seed": 1})

    def test_a_folder_without_a_checkpoint_is_anyones(self, tmp_path):
        with Checkpoints(tmp_path / "run") as checkpoints:
            checkpoints.claim({"seed": -1})
            checkpoints.claim({"seed": 0})
            checkpoints.save(3, state_of(3))
        said = r"'seed' is 0 there, -1 here"
        with Checkpoints(tmp_path / "run") as checkpoints, pytest.raises(ValueError, match=said):
            checkpoints.claim({"seed": -1})

    def test_a_claim_that_cannot_be_read_is_named(self, saved):
        (saved / "job.json").write_text("")
        said = r"job.json: is not JSON(.|\n)*Take it away"
        with Checkpoints(saved) as checkpoints, pytest.raises(ValueError, match=said):
            checkpoints.claim({"seed": 0})

    def test_a_file_is_no_folder(self, tmp_path):
        (tmp_path / "file").touch()
        with pytest.raises(ValueError, match=r"checkpoint folder .*file: is a file"):
            Checkpoints(tmp_path / "file")
        with pytest.raises(ValueError, match=r"file/run: it cannot be made(.|\n)*may write to"):
            Checkpoints(tmp_path / "file" / "run")

    def test_shards_come_back_as_they_were(self, tmp_path, devices):
        mesh = jax.sharding.Mesh(np.array(devices), ("fsdp",))
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
        w = jax.device_put(jnp.arange(16.0), sharding)
        with Checkpoints(tmp_path / "run") as checkpoints:
            checkpoints.save(1, {"w": w})
        template = {"w": jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=sharding)}
        with Checkpoints(tmp_path / "run") as checkpoints:
            _, state, _ = checkpoints.restore(template)
        assert state["w"].sharding == sharding
        assert_bitwise_equal(state["w"], w)


# -- processes -------------------------------------------------------------------------------------


def test_one_process_agrees_with_itself():
    agree({"steps": 3})
    assert gather_values({"b": 1, "a": [2]}) == [{"a": [2], "b": 1}]


def test_a_difference_is_told_by_key_value_and_process():
    rows = [{"seed": 0, "steps": 9}] * 5 + [{"seed": 0, "steps": 8}]
    said = r"1 value differs.*\n  'steps': 9 on 5 processes \(0, 1, 2, 3, ...\); 8 on process 5"
    with pytest.raises(ValueError, match=said):
        raise_differences(rows, "config")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("host:1", 2, 2), r"2 is not below num_processes=2"),
        (("host:1", 2, -1), r"-1 is below 0.\n  Ids count from 0, one a process: 0 to 1"),
        (("host:1", 2, None), r"go together; some are missing"),
    ],
)
def test_bad_process_numbers_are_refused(arguments, said):
    with pytest.raises(ValueError, match=said):
        initialize(*arguments)
