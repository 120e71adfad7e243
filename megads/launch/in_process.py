"""The only rank of a run in the process of the command (cluster.in_process), for debuggers."""

from __future__ import annotations

import bdb
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from megads.errors import MegadsError, RollBack, leave_to_debugger
from megads.launch.node_ranks import NodePart, Ranks
from megads.launch.rank import failure_record, train_frozen
from megads.launch.rank_outcome import FailureRecord, NodeReport
from megads.runtime import environment
from megads.runtime.ports import read_secret, secret_path
from megads.runtime.run_dir import rank_log_path


class _Killed(BaseException):
    """Ends the rank at once; not an Exception, so that nothing on the way handles it."""


class InProcessRank(Ranks):
    """Trains in this process: one call of `poll` runs the rank to its end. A debugger may stop it, so it never hangs.

    Args:
        part: what to run.
        arguments: run directory, digest of the frozen config, and entry, as the command of a rank has them.

    Attributes:
        between_steps: called before the first and after every step; what the launcher does while it polls ranks.
        failure: unhandled exception of the rank, which is a bug; None if there was none.
        killed: whether the rank was ended before it returned.
    """

    def __init__(self, part: NodePart, arguments: tuple[Path, str, str]) -> None:
        self._part, self._arguments = part, arguments
        self.between_steps: Callable[[], None] = lambda: None
        self.failure: Exception | None = None
        self.killed = False
        self._records: list[FailureRecord] = []
        self._returned: dict[int, int] = {}

    def start(self) -> None:
        """Does nothing: `poll` runs the rank."""

    def poll(self) -> bool:
        """Runs the rank to its end; returns False."""
        # Imported late: they import torch, which the launcher of other ranks does without.
        import torch
        import torch.distributed as dist

        from megads.runtime.control_store import ControlStore

        part = self._part
        secret = secret_path(part.run_dir, part.lease)
        control = ControlStore(read_secret(secret), part.address)
        cuda = torch.cuda.is_available() and not part.cpu
        variables = environment.rank_variables(part.threads_per_rank, cuda, part.lease)
        variables |= environment.meeting_variables(secret, control.host, control.port, one_machine=True)
        variables |= environment.rank_numbers(0, 0, 1, 1) | (environment.HIDDEN_GPUS if part.cpu else {})
        threads = torch.get_num_threads()
        with environment.child_environment(variables):
            # torch read the variables when it was imported. The bits of LayerNorm's gradient depend on the threads.
            torch.set_num_threads(part.threads_per_rank)
            try:
                self._run()
            finally:
                torch.set_num_threads(threads)
                if dist.is_initialized():
                    dist.destroy_process_group()
        return False

    def _run(self) -> None:
        run_dir, digest, entry = self._arguments
        try:
            self._returned[0] = train_frozen(run_dir, digest, entry, self.between_steps)
        except RollBack as decided:
            self._returned[0] = decided.exit_code
        except (_Killed, KeyboardInterrupt, bdb.BdbQuit):  # the last is `quit` in pdb
            self.killed = True
        except Exception as error:
            self._records = [FailureRecord(**failure_record(0, error))]
            if not isinstance(error, MegadsError):
                self.failure = error
                leave_to_debugger(error)
            with rank_log_path(run_dir, 0).open("a") as log:
                log.write(f"--- rank 0 in the process of the command, {time.strftime('%F %T%z')}\n")
                traceback.print_exception(error, file=log)

    def kill(self) -> None:
        """Ends the rank; called in `between_steps`."""
        raise _Killed

    def reports(self) -> list[NodeReport]:
        """How the rank ended."""
        return [NodeReport(failures=self._records, returned=self._returned)]

    def description(self) -> dict[str, object]:
        return {"node": environment.node_name(), "in_process": True}
