"""What an event of a run looks like: one typed dictionary for each kind, with a line on every field.

Events stay plain dictionaries from the writer to the page, so that a step costs nothing but its JSON; pydantic checks
them by these declarations when they are written and when they are read. docs/events.md is made from them:
`python -m lockstep.record.events_page > docs/events.md`.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, Literal, NotRequired, TypeAlias, cast, get_args

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails
from typing_extensions import TypedDict  # pydantic takes that of typing from Python 3.12 on

from lockstep.errors import UserError, unknown

NOT_FINITE = ("NaN", "Infinity", "-Infinity")
"""How numbers are written that JSON cannot write; Python's float() and JavaScript's Number() read them."""


class Head(TypedDict):
    """What every event has."""

    time: Annotated[float, "Unix time"]
    attempt: Annotated[int, "1 for the first start of the run, one more for each restart"]


class VersionsTold(TypedDict):
    """What a run was computed with."""

    lockstep: Annotated[str, "the package's"]
    torch: Annotated[str, "that of PyTorch"]
    python: Annotated[str, "the interpreter's"]


class MetricTold(TypedDict):
    """One metric of a validation."""

    sum: Annotated[float, "over all samples; of `perplexity`, the loss's own"]
    count: Annotated[float, "what it is divided by; of `perplexity`, the loss's own"]
    value: Annotated[float, "sum / count; of `perplexity`, exp(sum / count)"]


class ComparedTold(TypedDict):
    """What was predicted, and what came."""

    predicted: Annotated[float, "beforehand"]
    measured: Annotated[float | None, "afterwards"]
    error: Annotated[float | None, "predicted / measured - 1"]


class RecoverySeconds(TypedDict):
    """Where the time from a failure to the next step went."""

    stop: Annotated[float, "to stop the other ranks"]
    start: Annotated[float, "to start processes that have met"]
    load: Annotated[float, "to load model and checkpoint"]
    step: Annotated[float, "for the first step"]


class ProfileSeconds(TypedDict):
    """Where the time of profiled steps went."""

    whole: Annotated[float, "from the first to the last"]
    compute: Annotated[float, "a device computed"]
    communication: Annotated[float, "it communicated"]
    overlapped: Annotated[float, "it did both at once: part of both"]
    idle: Annotated[float, "it did neither"]


class GpuTold(TypedDict):
    """One GPU of a host."""

    index: Annotated[int, "its number there"]
    name: Annotated[str, "what it is"]
    busy: Annotated[float | None, "a share of the time"]
    memory: Annotated[float | None, "the most that was held, by whomever"]
    memory_total: Annotated[float | None, "what there is"]
    watts: Annotated[float | None, "on average"]
    celsius: Annotated[float | None, "on average"]
    ranks: Annotated[list[int], "who uses it"]


class HostTold(TypedDict):
    """One host of a run; what nobody measures, or a driver does not answer, is null."""

    host: Annotated[str, "its name"]
    cores: Annotated[int, "that the run may use"]
    cpu: Annotated[float | None, "the share of all cores that was busy, whoever used them"]
    memory: Annotated[float | None, "the most"]
    memory_total: Annotated[float | None, "what there is"]
    sent: Annotated[float | None, "over the network, bytes a second"]
    received: Annotated[float | None, "the same"]
    read: Annotated[float | None, "from disks, bytes a second"]
    written: Annotated[float | None, "the same"]
    watts: Annotated[float | None, "of its CPUs"]
    joules: Annotated[float | None, "of CPUs and GPUs since the attempt began"]
    gpus: Annotated[list[GpuTold], "every one of the node, also those no rank uses"]


class ProcessesTold(TypedDict):
    """What every rank's processes used of their host; null where that could not be found out."""

    cores: Annotated[list[float | None], "how many it kept busy with its data workers"]
    memory: Annotated[list[float | None], "of all of them"]
    threads: Annotated[list[int | None], "how many it has"]
    workers: Annotated[list[int | None], "data workers"]


class StartEvent(Head):
    """An attempt begins."""

    kind: Literal["start"]
    run: Annotated[str, "the name of the run"]
    layout: Annotated[str, "the layout text"]
    world_size: Annotated[int, "how many ranks there are"]
    nodes: Annotated[int, "how many hosts"]
    device: Annotated[str, "`cpu` or the GPU's name"]
    precision: Annotated[str, "what matrix products are computed in"]
    formats: Annotated[dict[str, str], "the whole precision table, one line for each kind of number"]
    resumed_from_step: Annotated[int | None, "the step of the checkpoint it goes on from"]
    total_steps: Annotated[int | None, "how many steps it will be, where that is known"]
    steps_per_epoch: Annotated[int | None, "the same for an epoch"]
    global_batch: Annotated[int, "samples of a step"]
    micro_batch: Annotated[int, "samples of one forward"]
    item: Annotated[Literal["tokens", "samples"], "what throughput counts"]
    versions: Annotated[VersionsTold, "of `lockstep`, `torch` and `python`"]
    parameters: Annotated[int, "of the whole model"]
    host: Annotated[str, "rank 0's"]


class StatusEvent(Head):
    """What the run is waiting for while it starts, validates or saves."""

    kind: Literal["status"]
    text: Annotated[str, "the sentence for people"]


class StepEvent(Head):
    """One optimizer step is done."""

    kind: Literal["step"]
    step: Annotated[int, "counts from 1"]
    epoch: Annotated[float, "a fraction, 0.25 after a quarter of the data"]
    loss: Annotated[float, "that of this step's batch"]
    grad_norm: Annotated[float, "measured before clipping"]
    lr: Annotated[float, "the learning rate of the first parameter group"]
    weight: Annotated[float, "the weight that the loss sum was divided by"]
    items: Annotated[int, "the tokens or samples used up"]
    padding: Annotated[int, "of these, those that only fill rows up"]
    seconds: Annotated[float, "without validation and saving"]
    skipped: Annotated[bool, "true when the weights were left as they were"]
    loss_scale: Annotated[float, "what the loss was multiplied by, 1 unless in fp16"]


class ValidationEvent(Head):
    """The validation data were scored, no sample counted twice."""

    kind: Literal["validation"]
    step: Annotated[int, "after which step"]
    epoch: Annotated[float, "as in `step`"]
    loss: Annotated[float, "over all of them"]
    metrics: Annotated[dict[str, MetricTold], "by their names"]
    samples: Annotated[int, "how many there were"]
    seconds: Annotated[float, "how long it took"]
    best: Annotated[bool, "whether it is the lowest loss so far"]


class TestEvent(Head):
    """The same over the test data, scored after the last step with the best checkpoint's weights."""

    kind: Literal["test"]
    step: Annotated[int, "that checkpoint's, the last one where nothing was validated"]
    loss: Annotated[float, "as in `validation`"]
    metrics: Annotated[dict[str, MetricTold], "as in `validation`"]
    samples: Annotated[int, "as in `validation`"]
    seconds: Annotated[float, "as in `validation`"]


class CheckpointEvent(Head):
    """A complete checkpoint is on disk."""

    kind: Literal["checkpoint"]
    step: Annotated[int, "of which step"]
    path: Annotated[str, "relative to the run folder"]
    seconds: Annotated[float, "how long it took"]
    stall: Annotated[float, "for how long of these the training waited"]
    bytes: Annotated[int, "of its files"]
    best: Annotated[bool, "whether the validation loss is the lowest so far"]


class MetricEvent(Head):
    """What a script logged with `run.log(...)`."""

    kind: Literal["metric"]
    step: Annotated[int, "after which step"]
    values: Annotated[dict[str, float], "by their names"]


class BaselineEvent(Head):
    """Something simple, to compare with."""

    kind: Literal["baseline"]
    name: Annotated[str, "what it is"]
    loss: Annotated[float, "its validation loss"]


class SampleEvent(Head):
    """What the model writes."""

    kind: Literal["sample"]
    step: Annotated[int, "after which step"]
    prompt: Annotated[str, "what it was given"]
    text: Annotated[str, "what the model made of it, without the prompt"]


class MessageEvent(Head):
    """A remark."""

    kind: Literal["message"]
    text: Annotated[str, "the sentence for people"]
    level: Annotated[Literal["info", "warning"], "how much it matters"]


class FailureEvent(Head):
    """The launcher's verdict on ranks that ended too early."""

    kind: Literal["failure"]
    rank: Annotated[int, "who was first"]
    host: Annotated[str, "where that rank was"]
    cause: Annotated[
        Literal["refused", "exception", "exit", "signal", "memory", "hang", "left"],
        "`exit` is its own `sys.exit`, `left` that it ended before the others",
    ]
    text: Annotated[str, "the sentence for people"]
    where: Annotated[str, "the line of the user's code, empty when unknown"]
    step: Annotated[int | None, "the last one done"]
    restarted: Annotated[bool, "whether another attempt follows"]
    micro_batch: Annotated[int | None, "with how much it does, where memory ran out"]


class RecoveredEvent(Head):
    """The first step of an attempt that follows a failure is done."""

    kind: Literal["recovered"]
    step: Annotated[int, "which one"]
    seconds: Annotated[RecoverySeconds, "where the time since then went"]


class AlarmEvent(Head):
    """The numbers of a step are not as they should be."""

    kind: Literal["alarm"]
    what: Annotated[
        Literal["loss", "gradient", "spike"],
        "`loss` or `gradient` (not finite), or `spike` (the loss is far above that of the steps before)",
    ]
    step: Annotated[int, "of which step"]
    rank: Annotated[int | None, "who saw it, `null` where several did or it is a sum over ranks"]
    sample_ids: Annotated[
        list[Any],
        "the samples of the micro-batches whose loss it was, all of the step's for a gradient or a spike, "
        "none where the weights were not finite before",
    ]
    loss: Annotated[float, "the step's"]
    action: Annotated[Literal["warn", "skip", "rollback", "stop"], "as `[recover]` says"]
    text: Annotated[str, "the sentence for people"]


class RankTimesTold(TypedDict):
    """Where the time of some steps went on every rank."""

    steps: Annotated[int, "how many steps it is about, without validation and saving"]
    seconds: Annotated[float, "how long these took on average"]
    input: Annotated[list[float], "of these seconds, what each rank waited for samples"]
    compute: Annotated[list[float], "all that is neither `input` nor `wait` (docs/stragglers.md)"]
    optimizer: Annotated[list[float], "of `compute`, what went to the optimizer"]
    between: Annotated[list[float], "of `compute`, the script's own code before and after `engine.step`"]
    wait: Annotated[list[float], "exposed communication: waiting in collectives"]
    samples: Annotated[list[int], "how many samples each rank computed"]
    memory: Annotated[list[int], "the most that each rank has held, of its GPU or its host"]
    hosts: Annotated[list[str], "where each rank is"]


class RanksEvent(Head, RankTimesTold):
    """Where the time went on every rank, told soon after the start, every five seconds and at the end."""

    kind: Literal["ranks"]
    step: Annotated[int, "the last of these steps"]


class MachinesTold(TypedDict):
    """What hosts and ranks did."""

    hosts: Annotated[list[HostTold], "in the order of nodes"]
    ranks: Annotated[ProcessesTold, "of every rank"]


class MachineEvent(Head, MachinesTold):
    """What the hosts did since this was told before (at first: since the first step began), together with `ranks`."""

    kind: Literal["machine"]
    step: Annotated[int, "as in `ranks`"]


class TimetableEvent(Head):
    """One step of a pipeline as it really happened."""

    kind: Literal["timetable"]
    step: Annotated[int, "which one"]
    seconds: Annotated[float, "from the first action to the last"]
    busy: Annotated[list[Any], "the share of these that each place computed"]
    lanes: Annotated[
        list[Any],
        "for every place of the pipeline what its first rank did, each `[what, stage, micro_batch, begin, end]` in "
        "seconds since the first of all began: `what` is `F` (forward), `B` (backward), or `I` and `W` where the "
        "backward is split (for inputs, for weights)",
    ]


class FlopsEvent(Head):
    """What one sample costs, counted by tracing the model on tensors without data; nothing counts twice."""

    kind: Literal["flops"]
    per_sample: Annotated[float | None, "floating-point operations, forward and backward; `null` without a trace"]
    by: Annotated[dict[str, float], "by kind of operation: `products` of matrices, `attention`, `convolutions`"]
    peak: Annotated[float | None, "what one rank's device can do in a second at the precision of matrix products"]
    source: Annotated[str, "where that number comes from, empty where there is none"]
    reason: Annotated[str, "why something is missing"]


class SettingsEvent(Head):
    """The resolved config of this attempt, every value."""

    kind: Literal["settings"]
    text: Annotated[str, "as `config.toml` has it"]


class ProfileEvent(Head):
    """What `--profile` has recorded on one rank."""

    kind: Literal["profile"]
    rank: Annotated[int, "which one"]
    host: Annotated[str, "where it is"]
    first_step: Annotated[int, "the first step"]
    last_step: Annotated[int, "the last step"]
    path: Annotated[str, "the trace for Perfetto and TensorBoard, in the run folder; empty where none could be made"]
    seconds: Annotated[ProfileSeconds, "where the time went"]
    kernels: Annotated[list[Any], "the longest, `[name, calls, seconds]`"]
    gaps: Annotated[list[Any], "the longest times without any, `[begin, seconds, before, after]`"]
    memory: Annotated[list[Any], "over time, `[second, bytes]`"]
    tensors: Annotated[list[Any], "the biggest alive at the peak, `[bytes, shape, where]`"]
    text: Annotated[str, "the sentence for people; of a trace too large to look through, why the lists are empty"]


class StragglerEvent(Head):
    """`ranks` showed twice in a row what holds the steps up; it comes again when rank or cause change."""

    kind: Literal["straggler"]
    step: Annotated[int, "after which step"]
    rank: Annotated[int | None, "who is slow, `null` where all ranks are alike"]
    host: Annotated[str | None, "where that rank is, or `null`"]
    cause: Annotated[Literal["input", "compute", "communication"], "what takes long"]
    seconds: Annotated[float, "how long it takes of a step there"]
    others: Annotated[float | None, "and on the other ranks, or `null`"]
    text: Annotated[str, "the sentence for people"]


class JobTold(TypedDict):
    """What Slurm says of a job."""

    id: Annotated[str, "`ARRAY_TASK` in an array"]
    restart: Annotated[int, "how often the job was requeued"]
    state: Annotated[
        str,
        "when it was submitted (`PENDING`), at each start (`RUNNING`), how the start before ended where accounting "
        "knows it, and how the job ended, once somebody has looked (`lockstep jobs`, `lockstep submit --follow`)",
    ]
    reason: Annotated[str, "why, in Slurm's words"]
    nodes: Annotated[str, "the hosts, as Slurm writes them"]
    partition: Annotated[str, "where it was submitted to"]
    account: Annotated[str, "who pays"]
    exit_code: Annotated[str, "as Slurm writes it"]


class JobEvent(Head, JobTold):
    """What Slurm says of the job that the run is in; it may come after `end`."""

    kind: Literal["job"]


class PredictionEvent(Head):
    """What the planner expects of this attempt; so far only the recipe `lm` is known beforehand."""

    kind: Literal["prediction"]
    memory_bytes: Annotated[float | None, "of tensors on the fullest rank, without what an allocator holds beside them"]
    step_seconds: Annotated[float | None, "of a step"]
    machine: Annotated[
        str | None,
        "`here` where `lockstep bench` has measured this kind of device on this machine, else the catalogue's entry of "
        "the GPU, or `laptop-cpu`",
    ]
    band: Annotated[float | None, "the share by which the memory may be wrong"]
    source: Annotated[str, "where its numbers come from"]
    reason: Annotated[str, "why all numbers are `null`, where nothing is foretold; else it is empty"]


class PredictionErrorEvent(Head):
    """How far off that was, just before `end`: `predicted`, `measured`, and `error`, which is their ratio less 1."""

    kind: Literal["prediction_error"]
    step: Annotated[int, "the last one"]
    machine: Annotated[str, "as in `prediction`"]
    memory_bytes: Annotated[
        ComparedTold,
        "`measured` is the most that a GPU has held (torch's `max_memory_allocated`); it and `error` are `null` on "
        "CPUs: a process holds much besides its tensors, and torch does not count those apart there",
    ]
    step_seconds: Annotated[ComparedTold, "`measured` is the median of the steps after the second"]


class StopEvent(Head):
    """The attempt stops before the end. An attempt with neither `stop` nor `end` was killed, or is still running."""

    kind: Literal["stop"]
    reason: Annotated[
        Literal["interrupted", "terminated", "failed"], "Ctrl-C, a signal or out of time, or an error of its own"
    ]
    step: Annotated[int, "the last one done, 0 if none"]
    text: Annotated[str, "the sentence for people"]


class EndEvent(Head):
    """The run is finished."""

    kind: Literal["end"]
    step: Annotated[int, "the last one"]
    loss: Annotated[float, "the training loss of the last step"]
    best_loss: Annotated[float | None, "of the best validation, `null` without one"]
    best_step: Annotated[int | None, "of the best validation, `null` without one"]
    metrics: Annotated[dict[str, MetricTold], "the last validation's"]
    seconds: Annotated[float, "this attempt's time"]


class ConfigEvent(Head):
    """Values that were chosen while running, under their config names; no name is always there."""

    kind: Literal["config"]
    micro_batch: NotRequired[Annotated[int, "samples of one forward"]]
    attention: NotRequired[Annotated[str, "who computes attention"]]


_OfTraining: TypeAlias = StartEvent | StatusEvent | StepEvent | ValidationEvent | TestEvent | CheckpointEvent
_OfScripts: TypeAlias = MetricEvent | BaselineEvent | SampleEvent | MessageEvent | ConfigEvent
_OfFaults: TypeAlias = FailureEvent | RecoveredEvent | AlarmEvent | StragglerEvent
_OfSpeed: TypeAlias = RanksEvent | MachineEvent | TimetableEvent | FlopsEvent | ProfileEvent
_OfPlans: TypeAlias = PredictionEvent | PredictionErrorEvent | SettingsEvent | JobEvent | StopEvent | EndEvent
Event: TypeAlias = _OfTraining | _OfScripts | _OfFaults | _OfSpeed | _OfPlans

KINDS: Mapping[str, type] = {get_args(one.__annotations__["kind"])[0]: one for one in get_args(Event)}

ADDED: Mapping[tuple[str, str], object] = {
    ("start", "formats"): {},
    ("step", "padding"): 0,
    ("step", "loss_scale"): 1.0,
    ("checkpoint", "stall"): 0.0,
    ("ranks", "optimizer"): [],
    ("ranks", "between"): [],
    ("prediction_error", "machine"): "",
}
"""Fields that logs of earlier versions do not have, and what stands for them."""


def validate(event: Mapping[str, Any]) -> None:
    """Refuse an event that is not as its kind is declared, naming the field that is missing, unknown or wrong."""
    kind = event.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise unknown("event kind", str(kind), KINDS)
    try:
        _check_of(kind)(event)
    except ValidationError as error:
        raise _refusal(kind, error.errors(include_url=False)[0]) from None


def settled(event: dict[str, Any]) -> Event | None:
    """An event of a log of any version, as it is declared; None where a field is missing or of the wrong type.

    Kinds, fields and choices that a later version has added are fine, and so are missing ones that an earlier one did
    not know. Numbers that JSON cannot write are made numbers.
    """
    kind = event["kind"]
    if kind not in KINDS:
        return cast(Event, event)
    try:
        _check_of(kind)(event)
    except ValidationError as error:
        if not all(_is_mended(event, problem) for problem in error.errors(include_url=False)):
            return None
    return cast(Event, event)


@cache
def _check_of(kind: str) -> Callable[[object], object]:
    """What raises where an event is not as its kind is declared."""
    # An optional one, because pydantic takes no config for a typed dictionary itself. Made when the first of a kind
    # comes: to make all of them takes longer than most commands.
    declared: Any = TypeAdapter(cast(Any, KINDS[kind] | None), config=ConfigDict(strict=True, extra="forbid"))
    check: Callable[[object], object] = declared.validator.validate_python
    return check


def _is_mended(event: dict[str, Any], problem: ErrorDetails) -> bool:
    """Whether what is wrong comes from another version, or is a number that JSON cannot write, which is put right."""
    what, path, given = problem["type"], problem["loc"], problem["input"]
    if what == "missing" and len(path) == 1 and (field := (str(event["kind"]), str(path[0]))) in ADDED:
        event[field[1]] = ADDED[field]
        return True
    if what == "float_type" and given in NOT_FINITE:
        holder: Any = event
        for name in path[:-1]:
            holder = holder[name]
        holder[path[-1]] = float(given)
        return True
    return what == "extra_forbidden" or (what == "literal_error" and isinstance(given, str))


def _refusal(kind: str, problem: ErrorDetails) -> UserError:
    what, path = problem["type"], ".".join(map(str, problem["loc"]))
    if what == "missing":
        return UserError(f"the {kind} event has no field {path!r}", "add it: it is always there")
    if what == "extra_forbidden":
        return unknown(f"field of the {kind} event", path, KINDS[kind].__annotations__)
    if what == "literal_error" and isinstance(problem["input"], str):
        choices: Sequence[str] = get_args(get_args(KINDS[kind].__annotations__[path])[0])
        return unknown(f"{path} of the {kind} event", problem["input"], choices)
    cause = f"the field {path!r} of the {kind} event is of type {type(problem['input']).__name__}"
    return UserError(cause, problem["msg"].replace("Input should be", "make it"))
