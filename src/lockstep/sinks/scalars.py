"""The numbers of a run's events, under the names people know from TensorBoard; W&B and MLflow get the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lockstep.record.events import Event, FlopsEvent, HostTold, RanksEvent, StartEvent

MOST_DEVICES = 16
"""Up to so many GPUs of a run each have curves of their own; beyond, there are those of all together."""


class Numbers:
    """Names the numbers of one event after another; MFU needs what the events before have said."""

    def __init__(self) -> None:
        self._start: StartEvent | None = None
        self._flops: FlopsEvent | None = None

    def of(self, event: Event) -> dict[str, float]:
        """The numbers of an event by their names; none for kinds that have none."""
        match event["kind"]:
            case "start":
                self._start, self._flops = event, None
            case "flops":
                self._flops = event
            case "step":
                named = {"Loss/Train": event["loss"], "LearningRate": event["lr"], "GradNorm": event["grad_norm"]}
                return named | ({"Throughput": event["items"] / event["seconds"]} if event["seconds"] > 0 else {})
            case "validation" | "test" as kind:
                part = "Val" if kind == "validation" else "Test"
                metrics = {f"{name.title()}/{part}": metric["value"] for name, metric in event["metrics"].items()}
                return {f"Loss/{part}": event["loss"], **metrics}
            case "metric":
                return dict(event["values"])
            case "ranks" if event["seconds"] > 0:
                return {**_time_shares(event), **self._mfu(event["seconds"])}
            case "machine":
                return dict(_machine(event["hosts"]))
        return {}

    def _mfu(self, step_seconds: float) -> dict[str, float]:
        if not self._start or not self._flops or not self._flops["per_sample"] or not self._flops["peak"]:
            return {}
        done = self._flops["per_sample"] * self._start["global_batch"] / step_seconds
        mfu = done / (self._flops["peak"] * self._start["world_size"])
        # More than all there is says that the peak is wrong: that is told too, but under a name that says so.
        return {"MFU" if mfu <= 1 else "MFU-Over-100-Percent": mfu}


def _time_shares(event: RanksEvent) -> dict[str, float]:
    """Where a step's time goes, as shares of it, over all ranks; and the memory of the fullest."""
    optimizer, between = _mean(event["optimizer"]), _mean(event["between"])
    seconds = {
        "Input": _mean(event["input"]),
        "Compute": _mean(event["compute"]) - optimizer - between,
        "Optimizer": optimizer,
        "Between": between,
        "Communication": _mean(event["wait"]),
    }
    shares = {f"Time/{name}": value / event["seconds"] for name, value in seconds.items()}
    return shares | ({"Memory/Fullest": max(event["memory"])} if event["memory"] else {})


def _machine(hosts: Sequence[HostTold]) -> Iterator[tuple[str, float]]:
    gpus = [(host["host"], gpu) for host in hosts for gpu in host["gpus"]]
    used = [gpu["busy"] for _, gpu in gpus if gpu["ranks"] and gpu["busy"] is not None]
    if used:
        yield "GPU/Busy", _mean(used)
        yield "GPU/LeastBusy", min(used)
    if len(hosts) <= MOST_DEVICES:
        for host in hosts:
            yield from _present(f"CPU/{host['host']}", Busy=host["cpu"], Memory=host["memory"])
    if len(gpus) <= MOST_DEVICES:
        for name, gpu in gpus:
            numbers = {"Busy": gpu["busy"], "Memory": gpu["memory"], "Watts": gpu["watts"]}
            yield from _present(f"GPU/{name}/{gpu['index']}", **numbers)


def _present(prefix: str, **numbers: float | None) -> Iterator[tuple[str, float]]:
    return ((f"{prefix}/{name}", number) for name, number in numbers.items() if number is not None)


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers) if numbers else 0.0
