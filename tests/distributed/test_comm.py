"""Communicators: one contract for a process alone, torch.distributed and MPI; what MPI says where it is not there."""

from __future__ import annotations

import sys
import types

import pytest

import dsq_ckpt
from dsq_ckpt import DSQConfig, SaveFailed
from dsq_ckpt.distributed.comm import SingleProcess
from dsq_ckpt.distributed.mpi import MPICommunicator, read_launcher_rank
from tests.helpers import contract, forks
from tests.helpers.processes import torchrun
from tests.helpers.source_files import plain_state
from tests.helpers.states import find_differences, load_copy


def test_a_process_alone():
    contract.check_communicator(SingleProcess())


def test_several_processes(tmp_path):
    """Launches by torch.distributed; those of MPI are in `test_mpi_compress.py`."""
    assert "ok 3" in torchrun("contract", 3, tmp_path / "out")
    state = plain_state()
    dsq_ckpt.compress(state, tmp_path / "alone")
    alone, together = load_copy(tmp_path / "alone", state), load_copy(tmp_path / "out", state)
    assert find_differences(together, alone) == [] != find_differences(together, state)


def test_a_rank_that_is_gone():
    output = torchrun("gone", 2, dies=True)
    assert output.count("ok ") == 4, output


def test_a_rank_outside_of_the_group_is_told_so(tmp_path):
    assert torchrun("outside", 2, tmp_path).count("ok ") == 5


@pytest.mark.parametrize("ranks", [1, 2])
def test_groups_are_closed_before_exit(tmp_path, ranks):
    """Neither by a rank alone, on whose group DCP does collectives too."""
    output = torchrun("ending", ranks, tmp_path, **{forks.TEARDOWN: "1"})
    for promise in ("tensors", "groups", "reducers", "released"):
        assert output.count(f"ok {promise}") == ranks, output


def test_ranks_of_launchers_are_read(no_launcher):
    assert read_launcher_rank() == (0, 1)
    no_launcher.setenv("SLURM_STEP_NUM_TASKS", "8")
    no_launcher.setenv("SLURM_PROCID", "5")
    assert read_launcher_rank() == (0, 1) and read_launcher_rank(slurm=True) == (5, 8)
    no_launcher.setenv("PMI_SIZE", "4")
    assert read_launcher_rank() == (0, 1)  # rank and size, or it is something else
    no_launcher.setenv("PMI_RANK", "2")
    assert read_launcher_rank() == (2, 4)
    no_launcher.setenv("OMPI_COMM_WORLD_SIZE", "3")
    no_launcher.setenv("OMPI_COMM_WORLD_RANK", "1")
    assert read_launcher_rank() == (1, 3) == read_launcher_rank(slurm=True)


def test_ranks_of_a_host_share_its_cores(no_launcher):
    no_launcher.setattr("os.cpu_count", lambda: 6)
    for name in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"):
        assert DSQConfig().storage.thread_count() == 6
        no_launcher.setenv(name, "3")
        assert DSQConfig().storage.thread_count() == 2
        no_launcher.delenv(name)


def test_without_mpi4py(no_launcher):
    no_launcher.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(SaveFailed, match=r"pip install mpi4py"):
        MPICommunicator()


def test_without_a_library(no_launcher, tmp_path):
    """mpi4py of a wheel looks for one when it is imported."""
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").touch()
    (tmp_path / "mpi4py" / "MPI.py").write_text("raise RuntimeError('cannot load MPI library\\nlibmpi.so: not there')")
    no_launcher.syspath_prepend(tmp_path)
    with pytest.raises(SaveFailed, match=r"no MPI library that it can load \(cannot load MPI library\).*mpich"):
        MPICommunicator()


def test_the_launcher_of_another_mpi(no_launcher):
    """Every process would believe that it is alone."""
    class World:
        Get_size, Get_rank = staticmethod(lambda: 1), staticmethod(lambda: 0)

    library = types.SimpleNamespace(COMM_WORLD=World, Get_library_version=lambda: "Open MPI v5, package: x\n")
    no_launcher.setitem(sys.modules, "mpi4py", types.SimpleNamespace(MPI=library))
    assert MPICommunicator().size == 1
    no_launcher.setenv("PMI_SIZE", "4")
    no_launcher.setenv("PMI_RANK", "3")
    with pytest.raises(SaveFailed, match=r"^4 processes were started, but .* knows of 1: .* this one: Open MPI v5$"):
        MPICommunicator()
    assert MPICommunicator(World).size == 1
