"""Training on pods and clusters: sharded casts, and a check of the job before it starts.

Inside `shard_map`, `gather` makes whole weights of shards in the compute dtype and reduces their
gradients in float32. `check` compiles a train step for hardware that need not be here, and says
whether it fits, what it sends and what is wrong:

    topology = mpjax.pods.get_topology("v5e-256")
    mesh = topology.make_mesh({"fsdp": 256})
    args = mpjax.pods.with_sharding((state, batch), (specs, PartitionSpec("fsdp")), mesh)
    report = mpjax.pods.check(step, args, topology)
    print(report)
    sys.exit(report.exit_code)
"""

from typing import TYPE_CHECKING

from mpjax._base.foreign_errors import attributes_of
from mpjax.pods._args import with_sharding
from mpjax.pods._check import check, check_job
from mpjax.pods._collectives import Collective
from mpjax.pods._findings import CHECKS, Finding, Memory, Times
from mpjax.pods._gather import gather, gather_constraint
from mpjax.pods._mesh import make_mesh
from mpjax.pods._report import Report
from mpjax.pods._topology import Topology, get_topology

__all__ = [
    "gather",
    "gather_constraint",
    "get_topology",
    "make_mesh",
    "with_sharding",
    "check",
    "check_job",
    "Report",
    "Finding",
    "Collective",
    "Memory",
    "Times",
    "Topology",
    "CHECKS",
]


def __dir__() -> list[str]:
    return __all__


if not TYPE_CHECKING:  # with it, an editor would let every misspelt name pass
    __getattr__ = attributes_of(__name__, __all__)
