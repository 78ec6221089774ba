"""The rows of a benchmark, as benchmark.json has them: what was measured of a file at one batch and image size. Times are in ms."""

from collections.abc import Sequence
from typing import Any

from typing_extensions import NotRequired, TypedDict  # typing has both from Python 3.11

Statistics = dict[str, float]  # of the times of queries, see timing.statistics
Accuracy = dict[str, Any]  # see run.accuracy_of
Shown = dict[str, Any]  # a row with the figures that tables derive from it, see tables.with_shown


class Facts(TypedDict):
    """The part of a row that describes the file that ran."""

    model: str  # path of the file that ran
    given: str  # on the command line: the .onnx file, if its checkpoint ran
    backend: str  # its title
    types: str  # of the computation, in words; SIMULATED of INT8 computed in float
    precision: str
    imgsz: Sequence[int] | None  # height and width
    batch: int
    open_batch: bool
    size_bytes: int
    parameters: int | None
    layers: int | None
    outputs: int  # their number
    streams: int | None
    notes: list[str]  # on how the engine ran it


class Figures(TypedDict):
    """The timed figures of a row."""

    queries: int  # one at a time
    qps: float  # queries per second: on a GPU queued, in OpenVINO in streams
    latency: Statistics  # of one query alone, with its transfers
    compute: Statistics  # in the model
    h2d: Statistics | None  # inputs to the GPU; this and the next two are None on a CPU
    d2h: Statistics | None  # outputs from it
    enqueue: Statistics | None  # until the host has queued a query
    host_seconds: float  # of the queries for the throughput
    compute_seconds: float  # of these, in the model; with several streams their sum


class Load(TypedDict, total=False):
    """Memory in MiB, utilisation in percent and clock while a file ran; what the system does not tell is left out."""

    peak_mib: float
    added_mib: float
    percent: float
    clock_mhz: float
    others_percent: float  # of the CPU, by other processes
    turns: list[tuple[float, float]]  # seconds from and to, since the start of the sampling


class Against(TypedDict):
    """The change of a row against another, its baseline."""

    model: str
    backend: str
    types: str
    latency_percent: float
    latency_speed_up: float  # times as fast
    images_per_s_percent: float
    images_per_s_speed_up: float
    points: dict[str, float] | None  # differences of each accuracy (0.01)


class Row(Facts, Figures):
    """A row of benchmark.json."""

    images_per_s: float
    usage: Load | None
    accuracy: Accuracy | None
    against: NotRequired[Against | None]


class Report(TypedDict):
    """The content of benchmark.json."""

    settings: dict[str, Any]  # see BenchmarkConfig.plain
    machine: dict[str, object]
    left_out: list[str]  # lines
    results: Sequence[Row]
    usage: Sequence[tuple]  # samples of a Usage
