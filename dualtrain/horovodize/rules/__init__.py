"""The rules of ``--check``: one function each."""

from collections.abc import Callable, Iterable

from dualtrain.horovodize.rules import environment, evaluation, ranks, rate, sent_objects, single_calls, steps, wrapping
from dualtrain.horovodize.source import Finding, Source

Rule = Callable[[Source], Iterable[Finding]]

RULES: tuple[Rule, ...] = (
    single_calls.discarded_result,
    single_calls.unknown_name,
    single_calls.unnamed_calls,
    single_calls.join_with_other_operations,
    single_calls.adasum,
    single_calls.half_precision,
    single_calls.mpi_communicator,
    environment.uncovered_imports,
    environment.horovod_run,
    environment.build_questions,
    environment.variables,
    environment.elastic_run,
    evaluation.padded_evaluation,
    sent_objects.code_in_objects,
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
