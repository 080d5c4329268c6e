"""The rules of ``--check``: one function each."""

from collections.abc import Callable, Iterable

from dualtrain.horovodize.rules import calls, environment, evaluation, objects, ranks, rate, steps, wrapping
from dualtrain.horovodize.source import Finding, Source

Rule = Callable[[Source], Iterable[Finding]]

RULES: tuple[Rule, ...] = (
    calls.discarded_result,
    calls.unknown_name,
    calls.unnamed_calls,
    calls.join_with_other_operations,
    calls.adasum,
    calls.half_precision,
    calls.mpi_communicator,
    environment.uncovered_imports,
    environment.horovod_run,
    environment.build_questions,
    environment.variables,
    environment.elastic_run,
    evaluation.padded_evaluation,
    objects.code_in_objects,
    ranks.collective_on_some_ranks,
    rate.rate_times_size,
    steps.clip_before_synchronize,
    steps.scaler_before_synchronize,
    steps.second_reduction,
    steps.zero_grad_before_step,
    wrapping.set_to_none,
    wrapping.group_after_wrapping,
    wrapping.checkpoint_before_wrapping,
    wrapping.optimizer_state,
)
