"""``RayExecutor``, with the methods of ``horovod.ray.RayExecutor``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from dualtrain.errors import UserError
from dualtrain.functions.local import refuse_other_backend
from dualtrain.launchers import World, new_job, spawned, without_launchers
from dualtrain.ray.actors import Actors, require_ray, results
from dualtrain.ray.settings import Placement, Settings, placement

T = TypeVar("T")


class RayExecutor:
    """Ranks as actors of Ray, which keep their state between calls. dualtrain must be installed on Ray's workers.

    Args:
        settings: from :meth:`create_settings`, or Horovod's own; ``None`` for the defaults.
        num_workers: number of ranks.
        num_hosts: number of hosts, in place of ``num_workers``; each host gets ``num_workers_per_host`` ranks.
        num_workers_per_host: number of ranks on each of ``num_hosts``.
        cpus_per_worker: CPUs that Ray reserves for each rank.
        use_gpu: whether each rank gets GPUs.
        gpus_per_worker: GPUs of each rank; by default, 1 with ``use_gpu``.
        use_current_placement_group: whether to use the placement group of the calling task, if there is one.
        elastic: ``min_workers``, ``max_workers``, ``reset_limit`` and similar arguments, which must be ``None``.

    Raises:
        UserError: an argument of ``elastic`` is not ``None``, or other arguments are not valid: see
            :func:`dualtrain.ray.settings.placement`.
    """

    def __init__(
        self,
        settings: Any = None,
        num_workers: int | None = None,
        num_hosts: int | None = None,
        num_workers_per_host: int = 1,
        cpus_per_worker: float = 1,
        use_gpu: bool = False,
        gpus_per_worker: float | None = None,
        use_current_placement_group: bool = True,
        **elastic: Any,
    ) -> None:
        for name, value in elastic.items():
            if value is not None:
                raise UserError(f"RayExecutor({name}={value!r}) is elastic, which is not supported: give num_workers alone")
        self._settings = Settings() if settings is None else settings
        self._placement: Placement = placement(
            num_workers,
            num_hosts,
            num_workers_per_host,
            cpus_per_worker,
            use_gpu,
            gpus_per_worker,
            use_current_placement_group,
        )
        self._actors: Actors | None = None
        self._failed = ""  # the method whose failure has ended the actors

    @classmethod
    def create_settings(
        cls,
        timeout_s: float = 30,
        ssh_identity_file: str | None = None,
        ssh_str: str | None = None,
        placement_group_timeout_s: float = 100,
        nics: Iterable[str] | None = None,
    ) -> Settings:
        """Return settings with these time limits and network interfaces. The ssh arguments are ignored: ssh is not used."""
        return Settings(timeout_s, placement_group_timeout_s, nics)

    def start(
        self,
        executable_cls: Callable[..., Any] | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, Any] | None = None,
    ) -> None:
        """Start an actor for each rank, with the environment variables ``extra_env_vars``. Blocks until all have started.

        The variables that make an actor a rank take precedence over ``extra_env_vars``.
        If a class is given, create ``executable_cls(*executable_args, **executable_kwargs)`` in each actor.

        Raises:
            UserError: Ray is not initialized or cannot place the actors, they do not start in time, ``start`` was called
                before without ``shutdown``, or DUALTRAIN_BACKEND is ``horovod``.
            RayError: an actor's process ended, or ``executable_cls`` raised an exception.
        """
        refuse_other_backend()
        if self._actors is not None:
            raise UserError("RayExecutor.start() was called twice: call shutdown() before the second call")
        self._actors, self._failed = Actors(self._placement, self._settings.placement_group_timeout_s), ""
        try:
            self._make_ranks({str(name): str(value) for name, value in (extra_env_vars or {}).items()})
            arguments = (executable_cls, executable_args or (), executable_kwargs or {})
            self._call_and_wait("make", [arguments] * self._placement.num_workers)
        except BaseException:
            self.shutdown()
            raise

    def _make_ranks(self, variables: dict[str, str]) -> None:
        size = self._placement.num_workers
        places = self._call_and_wait("place", [()] * size)
        hosts = [host for host, _ in places]
        single_host = len(set(hosts)) == 1
        reference = self._running().workers[0].reserve.remote(single_host)
        [(address, secret)] = results([reference], self._settings.timeout_s, "the start of rank 0")
        for interface in list(self._settings.nics or ())[:1]:
            variables.setdefault("GLOO_SOCKET_IFNAME", interface)
        job, arguments = new_job(), []
        for rank in range(size):
            world = World().placed(rank, hosts)
            of_rank = spawned(rank, size, address, secret, job, (world.local_rank, world.local_size), "ray")
            arguments.append((without_launchers(variables) | of_rank | visible_gpus(rank, places),))
        self._call_and_wait("set_variables", arguments)

    def run_remote(
        self, fn: Callable[..., Any], args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Start ``fn(*args, **kwargs)`` on each rank; return Ray's references to the results, in rank order.

        Does not block. If a rank fails, the other ranks continue until :meth:`shutdown`.
        """
        positional, named = tuple(args or ()), dict(kwargs or {})
        return self._execute(lambda _: fn(*positional, **named))

    def run(
        self,
        fn: Callable[..., T],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callable[..., Any]] | None = None,
    ) -> list[T]:
        """Return the results of ``fn(*args, **kwargs)`` by rank. Blocks until all calls have ended, or one rank has failed.

        If ``fn`` raises on a rank, or a rank's process ends, all actors are ended, their objects are lost, and Ray's
        exception is raised; it names the rank. Ctrl-C ends all actors, too. ``callbacks`` are ignored, as Horovod ignores
        them without elastic training.

        Raises:
            UserError: the actors are not started.
        """
        return self._wait_for(self.run_remote(fn, args, kwargs), "run")

    def execute(self, fn: Callable[[Any], Any], callbacks: Sequence[Callable[..., Any]] | None = None) -> list[Any]:
        """Return ``fn(object)`` by rank; ``object`` is the rank's ``executable_cls`` instance, if any. See :meth:`run`."""
        return self._wait_for(self._execute(fn), "execute")

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Return the result of ``fn(object)`` on rank 0. Blocks until the call has ended.

        If ``fn`` raises, Ray's exception is raised, and no actor is ended.
        """
        return results([self._running().workers[0].execute.remote(fn)], None, "execute_single")[0]

    def shutdown(self) -> None:
        """End the actors, and remove their placement group. A second call does nothing."""
        if self._actors is not None:
            self._actors.end()
            self._actors = None

    def _wait_for(self, references: Sequence[Any], what: str) -> list[Any]:
        """Return the results. If a rank fails, end the other ranks, which might wait for it without a limit.

        Also end all ranks if the wait is interrupted: the next call would wait until their functions have returned.
        """
        try:
            return results(references, None, what)
        except BaseException:
            self.shutdown()
            self._failed = what
            raise

    def _execute(self, fn: Callable[[Any], Any]) -> list[Any]:
        return self._running().call("execute", [(fn,)] * self._placement.num_workers)

    def _call_and_wait(self, method: str, arguments: Sequence[Sequence[Any]]) -> list[Any]:
        seconds = self._settings.timeout_s
        return results(self._running().call(method, arguments), seconds, f"the start of {len(arguments)} ranks ({method})")

    def _running(self) -> Actors:
        """Return the actors. Raises UserError if there are none, or Ray was shut down."""
        if self._actors is None:
            after = f", because {self._failed}() has failed" if self._failed else ""
            raise UserError(f"RayExecutor has no workers{after}: call start() first")
        require_ray()
        return self._actors


def visible_gpus(rank: int, places: Sequence[tuple[int, Sequence[str]]]) -> dict[str, str]:
    """Return CUDA_VISIBLE_DEVICES with the GPUs of all ranks on the host of ``rank``, ordered by rank.

    With one GPU for each rank, the index of a rank's GPU is then its local rank. A GPU that ranks share is listed once,
    because torch finds no GPU at all in a list with duplicates. Without GPUs, the dict is empty.
    """
    visible = dict.fromkeys(gpu for host, gpus in places if host == places[rank][0] for gpu in gpus)
    return {"CUDA_VISIBLE_DEVICES": ",".join(visible)} if visible else {}
