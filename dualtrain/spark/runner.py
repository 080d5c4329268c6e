"""``HorovodRunner`` with the interface that it had in Databricks Runtime ML up to version 15."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dualtrain.errors import UserError
from dualtrain.functions import run as run_here
from dualtrain.spark.barrier import run


class HorovodRunner:
    """Runner of a function on several ranks.

    Args:
        np: number of ranks. Positive: tasks of a Spark job, which start together. Negative: ``abs(np)`` processes on
            the driver's host. 0 is refused: Databricks deprecated it.
        driver_log_verbosity: ``"all"`` or ``"log_callback_only"``; has no effect. The output of Spark's tasks is in the
            logs of Spark's executors.
    """

    def __init__(self, np: int, driver_log_verbosity: str = "log_callback_only") -> None:
        if isinstance(np, bool) or not isinstance(np, int) or np == 0:
            raise UserError(
                f"HorovodRunner(np={np!r}) gives no number of ranks: give the number of Spark tasks, or a negative number "
                "for processes on the driver"
            )
        if driver_log_verbosity not in ("all", "log_callback_only"):
            raise UserError(f"driver_log_verbosity={driver_log_verbosity!r} is unknown: give 'all' or 'log_callback_only'")
        self.num_processor = np

    def run(self, main: Callable[..., Any], **kwargs: Any) -> Any:
        """Call ``main(**kwargs)`` on each rank; return rank 0's result. Blocks until all ranks have ended.

        Raises:
            RankFailedError: the function failed on a rank, or a rank's process ended unexpectedly.
            UserError: the ranks cannot be started.
            Exception: Spark's own error, if the Spark job failed for another reason.
        """
        if self.num_processor < 0:
            return run_here(main, (), kwargs, nproc=-self.num_processor)[0]
        return run(main, (), kwargs, num_proc=self.num_processor)[0]
